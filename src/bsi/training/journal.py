"""The journal: one JSON line per interval, and the same record to anything else that wants it.

    {"step": 1000, "loss": 0.0123, "bits_per_dim": 3.51, "lr": 0.0002, "grad_norm": 0.31, "images_per_s": 7800.0, ...}

A sink is called with each record; `bsi.train(..., sinks=[print])` is all it takes. Records are dictionaries of numbers
and short strings, always with `step` and `event` ("train", "evaluate", "sample"). Only the first rank writes. When a
run goes on from a checkpoint, lines after its step are dropped: they will be written again. So are the evaluation and
the samples of that step, where the checkpoint says that they are still to be made, if they are still asked for.

`loss` is what is minimized. `bits_per_dim` of a "train" line is L_M^inf of the batches seen, each level weighed as the
ELBO does even where the objective weighs it otherwise; a run that minimizes L_M^k has that, which is larger, under
`bits_per_dim_finite_k`. Of an "evaluate" line `bits_per_dim` is the whole bound, of test samples under the EMA.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from bsi.errors import UsageError
from bsi.io import append_line, write_text

__all__ = ["JsonLines", "Sink", "Value", "read_journal", "tensorboard"]

Value = int | float | str
Sink = Callable[[Mapping[str, Value]], None]


class JsonLines:
    """The sink that is always there."""

    def __init__(self, path: Path, resumed_at: int, made_again: Collection[str] = ()) -> None:
        """`made_again` names the events of the step `resumed_at` that will be written again."""
        self.path = path
        kept = [line for line in _lines(path) if int(line["step"]) <= resumed_at] if path.exists() else []
        kept = [line for line in kept if int(line["step"]) < resumed_at or line.get("event") not in made_again]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))

    def __call__(self, record: Mapping[str, Value]) -> None:
        append_line(self.path, json.dumps({name: _finite(value) for name, value in record.items()}))


def _finite(value: Value) -> Value | None:
    """JSON has no NaN: a number that is none is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(path: Path) -> list[dict[str, Value]]:
    """The whole lines of a journal; a last line cut by a crash is left out."""
    found = []
    for line in path.read_text("utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            found.append(record)
    return found


def read_journal(run: Path) -> list[dict[str, Value]]:
    """The records of a run folder's journal."""
    path = Path(run) / "journal.jsonl"
    if not path.is_file():
        raise UsageError(f"{run} has no journal: is it a run folder?")
    return _lines(path)


def tensorboard(folder: Path) -> Sink:
    """The same numbers for TensorBoard (`pip install tensorboard`), by event and name.

    Every rank may ask, and is told alike where the package is not there; the writer is made with the first record,
    which only the first rank gets, in a run folder that is then its own.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError("TensorBoard is not installed: pip install tensorboard") from error
    writer = functools.cache(lambda: SummaryWriter(str(folder)))

    def sink(record: Mapping[str, Value]) -> None:
        for name, value in record.items():
            if name not in ("step", "event") and isinstance(value, int | float):
                writer().add_scalar(f"{record['event']}/{name}", value, int(record["step"]))
        writer().flush()

    return sink
