"""`bsi.train`: the trainer as a Python function, and the `Run` that it returns.

    run = bsi.train(bsi.recipes.digits(), out="runs/digits")                       # a prepared dataset, our network
    run = bsi.train(recipe, data=tensor_or_dataset, backbone=MyNet(), out="runs/mine")
    images = run.model().sample(16)

A call with the same `out` resumes; for a finished run it returns at once. `bsi train` has the same trainer, and its
messages name the options of the command; here they name the arguments and the fields of the recipe.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from bsi.errors import BsiError, Preempted
from bsi.model import Model
from bsi.progress import wording
from bsi.recipe import Recipe
from bsi.runtime.export import load
from bsi.runtime.run_folder import RunFolder, Sink, Value, read_journal
from bsi.training.train import run_training
from bsi.values import DataKind

NAME = r"[a-z_\d]+(?:\.[a-z_\d]+)*"
ALLOW = re.compile(rf"--allow ((?!must ){NAME}(?: (?!to ){NAME})*)")
OPTION = re.compile(r"--([a-z][\w.-]*\w)(?: (\d\S*\d|\d)| (cpu|bf16)\b)?")


@dataclass(frozen=True)
class Run:
    """A run folder, as `bsi.train` returns it. It can be passed wherever a path is expected."""

    path: Path
    backbone: nn.Module | None = field(default=None, repr=False)
    """The network that was passed to `bsi.train`, for `model`."""

    def model(self, ema: bool = True, step: int | None = None) -> Model:
        """The trained model, by default with the moving average of the weights at the latest checkpoint."""
        described = load_description(self.path)
        return load(self.path, ema, None if described else self.backbone, step)

    def journal(self) -> list[dict[str, Value]]:
        """The records that were written during training, such as {"event": "train", "step": 50, "loss": ...}."""
        return read_journal(self.path)

    def evaluations(self) -> list[dict[str, Value]]:
        """The journal's bounds of test samples, the latest last."""
        return [record for record in self.journal() if record["event"] == "evaluate"]

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        status = RunFolder(self.path).read_status()
        lines = [f"{self.path}: {status.get('state', 'not begun')}, step {status.get('step', 0)}"]
        for found in self.evaluations()[-1:]:
            error = f" ± {found['error']:.4f} (Monte Carlo) ± {found['data_error']:.4f} (data set)"
            lines.append(f"test samples: {found['bits_per_dim']:.4f} bits/dim{error}, step {found['step']}")
        return "\n  ".join(lines)


def load_description(path: Path) -> bool:
    """Whether a run describes its network, so that it needs no other."""
    record = RunFolder(path).read_record()
    return record is not None and record.recipe.backbone is not None


def train(
    recipe: Recipe,
    data: object = None,
    backbone: nn.Module | None = None,
    out: str | Path | None = None,
    *,
    test: object = None,
    kind: DataKind | None = None,
    labels: object = None,
    init_from: str | Path | None = None,
    allow: Sequence[str] = (),
    track: Sequence[str] = (),
    sinks: Sequence[Sink] = (),
    device: str | None = None,
    hang_after_s: float = 600.0,
) -> Run:
    """Train a recipe, or resume, and return its run.

    Args:
        recipe: What to train, e.g. `bsi.recipes.digits()`.
        data: A tensor, array or map-style Dataset of uint8, of integers with a `kind`, or of floats. By default the
            recipe's prepared dataset.
        backbone: Your own network. By default the recipe's.
        out: The run folder, by default `runs/NAME`. The same folder resumes.
        test: Test data like `data`, for the bound during training.
        kind: What the integers of `data` are: `bsi.Bins`, or `bsi.Symbols`, whose prior is then fitted.
        labels: The labels of `data`, for a recipe with `data.labels`.
        init_from: A run or an export whose weights are the initialization.
        allow: Names of settings that may differ from the interrupted run's.
        track: Where to send the journal as well: tensorboard, wandb, trackio, mlflow.
        sinks: Functions that are called with every record of the journal.
        device: cuda or cpu. By default a GPU, if there is one.
        hang_after_s: Seconds without progress after which the run ends, naming the rank that hangs.
    """
    token = wording.set(in_python)
    try:
        path = run_training(
            recipe,
            data,
            backbone,
            out,
            test=test,
            kind=kind,
            labels=labels,
            init_from=init_from,
            allow=allow,
            track=track,
            sinks=sinks,
            device=device,
            hang_after_s=hang_after_s,
        )
    except BsiError as error:
        error.args = (in_python(str(error)), *error.args[1:])
        if isinstance(error, Preempted) and hasattr(sys, "ps1"):  # an interactive session is not ended
            raise KeyboardInterrupt(str(error)) from None
        raise
    finally:
        wording.reset(token)
    return Run(path, backbone)


def in_python(text: str) -> str:
    """A message of the trainer with arguments and fields of the recipe in place of options of the command line."""
    text = ALLOW.sub(lambda found: f"allow={found[1].split()}", text)
    text = re.sub(r"\b([Rr])un the same command", "call bsi.train with the same arguments", text)

    def named(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        return f"{name}={found[2]}" if found[2] else f'{name}="{found[3]}"' if found[3] else name

    return OPTION.sub(named, text)
