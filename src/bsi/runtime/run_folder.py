"""A run folder: the files of one training run.

    run.json          the resolved recipe, its difference from the named one, the command, the environment
    status.json       running, preempted, finished or failed, with the step and the time
    journal.jsonl     one line per interval
    checkpoints/      see checkpoint.py
    samples/          grids drawn during training
    averages/         power-function averages, if the recipe names any
    evaluations/      records of `bsi eval`
    lock.json         the process that trains in this folder, see bsi.training.lock
    replay-*.json     the inputs of a step whose loss or gradient was not finite

The environment is limited to versions, the type of machine and a few variables: it contains no tokens or home paths.

A line of the journal is a dictionary of numbers and short strings, always with `step` and `event` ("train", "evaluate",
"sample"):

    {"event": "train", "step": 1000, "loss": 0.0123, "bits_per_dim": 3.51, "lr": 0.0002, "grad_norm": 0.31, ...}

`loss` is the minimized loss. `bits_per_dim` of a "train" line is L_M^inf of the batches seen, with the ELBO's weights
even if the objective has others; a run that minimizes L_M^k has `bits_per_dim_finite_k` instead, which is larger. In
an "evaluate" line `bits_per_dim` is the complete bound, of test samples under the EMA.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bsi import __version__
from bsi.errors import DataError, UsageError
from bsi.io import append_line, read_json, write_json, write_text
from bsi.progress import log
from bsi.recipe import Recipe
from bsi.runtime.distributed import World
from bsi.runtime.serialization import changes, from_plain, to_plain

FORMAT = 1
State = Literal["running", "preempted", "finished", "failed"]
VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT")

Value = int | float | str
Sink = Callable[[Mapping[str, Value]], None]


@dataclass(frozen=True)
class RunRecord:
    """The part of run.json that is read again: the recipe, and the class of the network if the caller passed one."""

    recipe: Recipe
    network: str


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run, and its small files. `check` is called before each write: it raises if the lock is lost."""

    path: Path
    check: Callable[[], None] = _nothing

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make the folder. New folders that are still empty at the end, because the run was invalid, are removed."""
        new: list[Path] = []
        try:
            try:
                new = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"cannot make the run folder {self.path}: {error.strerror}. Use another --out."
                ) from error
            yield
        finally:
            with suppress(OSError):  # not empty: the run has started
                for folder in new:
                    folder.rmdir()

    def write(self, name: str, content: Any) -> Path:
        """Write a file of the run as JSON."""
        self.check()
        write_json(self.path / name, content)
        return self.path / name

    def write_record(self, record: RunRecord, named: Recipe | None, data_version: str, world: World) -> None:
        self.write(
            "run.json",
            {
                "format": FORMAT,
                "recipe": to_plain(record.recipe),
                "changed": [] if named is None else [str(change) for change in changes(named, record.recipe)],
                "network": record.network,
                "data_version": data_version,
                "command": _without_home([Path(sys.argv[0]).name, *sys.argv[1:]]),
                "environment": _environment(world),
            },
        )

    def read_record(self) -> RunRecord | None:
        """The record of a run that began earlier; None in a new folder."""
        path = self.path / "run.json"
        if not path.exists():
            return None
        try:
            given = read_json(path)
        except DataError as error:
            raise UsageError(f"{error} Restore it, or use another --out.") from error
        if not isinstance(given, dict) or not {"format", "recipe", "network"} <= given.keys():
            raise UsageError(f"{path} is not the record of a run. Restore it, or use another --out.")
        if given["format"] != FORMAT:
            raise UsageError(
                f"{path} has format {given['format']!r}, and this version of bsi reads format {FORMAT}. Resume with "
                f"the version that wrote it, or start a new run with --init-from."
            )
        return RunRecord(from_plain(Recipe, given["recipe"], "recipe"), str(given["network"]))

    def write_status(self, state: State, step: int, note: str = "") -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self.write("status.json", {"state": state, "step": step, "note": note, "time": stamp})

    def read_status(self) -> Mapping[str, Any]:
        """The status, or an empty dictionary if it cannot be read."""
        try:
            found = read_json(self.path / "status.json")
        except DataError:
            return {}
        return found if isinstance(found, dict) else {}


def _without_home(words: list[str]) -> list[str]:
    """Replace the home folder by ~ in the command, also in --out=FOLDER, but not inside other names."""
    home = os.path.expanduser("~")
    return [re.sub(rf"(?<![^=]){re.escape(home)}(?=/|$)", "~", word) if len(home) > 1 else word for word in words]


def _environment(world: World) -> dict[str, Any]:
    cuda = world.device.type == "cuda"
    return {
        "bsi": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "system": platform.system(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(world.device) if cuda else "cpu",
        "ranks": world.size,
        "threads": torch.get_num_threads(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


# ---- The journal -----------------------------------------------------------------------------------------------------


class JsonLines:
    """The sink that writes the journal of a run folder.

    Lines after the step that a run resumes from are removed, since they will be written again. The events of that step
    in `repeated`, which are pending according to the checkpoint, are removed too.
    """

    def __init__(self, folder: RunFolder, resumed_at: int, repeated: Collection[str] = ()) -> None:
        self.folder, self._failed = folder, False
        kept = [line for line in _lines(folder.journal) if int(line["step"]) <= resumed_at]
        kept = [line for line in kept if int(line["step"]) < resumed_at or line.get("event") not in repeated]
        folder.check()
        write_text(folder.journal, "".join(json.dumps(line) + "\n" for line in kept))

    def __call__(self, record: Mapping[str, Value]) -> None:
        self.folder.check()
        try:
            append_line(self.folder.journal, json.dumps({name: _finite(value) for name, value in record.items()}))
        except OSError as error:  # a full disk: the journal only reports
            if not self._failed:
                log(f"bsi train: cannot write {self.folder.journal}: {error.strerror}. Training continues without it.")
            self._failed = True


def _finite(value: Value) -> Value | None:
    """Replace NaN and infinity by None (null in JSON)."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(path: Path) -> list[dict[str, Value]]:
    """The valid lines of a journal; the last one may be incomplete after a crash."""
    found = []
    for line in path.read_text("utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            found.append(record)
    return found


def read_journal(run: Path) -> list[dict[str, Value]]:
    """The records of a run folder's journal."""
    path = RunFolder(Path(run)).journal
    if not path.is_file():
        raise UsageError(f"{run} has no journal. Give the folder of a run.")
    return _lines(path)
