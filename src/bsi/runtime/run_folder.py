"""A run folder: the files of one training run, and the services that show its journal.

    run.json          the resolved recipe, its difference from the named one, the command, the environment
    status.json       running, preempted, finished or failed, with the step and the time
    journal.jsonl     one line per interval
    checkpoints/      see checkpoint.py
    samples/          grids drawn during training
    averages/         power-function averages, if the recipe names any
    evaluations/      records of `bsi eval`
    autoencoder.safetensors    of a model of latents
    lock.json         the process that trains in this folder, see bsi.training.lock
    replay-*.json     the inputs of a step whose loss or gradient was not finite
    trackers.json     the identifier that each tracker gave the run

The environment is limited to versions, the type of machine and a few variables: it contains no tokens or home paths.

A line of the journal is a dictionary of numbers and short strings, always with `step` and `event` ("train", "evaluate",
"sample"):

    {"event": "train", "step": 1000, "loss": 0.0123, "bits_per_dim": 3.51, "lr": 0.0002, "grad_norm": 0.31, ...}

`loss` is the minimized loss. `bits_per_dim` of a "train" line is L_M^inf of the batches seen, with the ELBO's weights
even if the objective has others; a run that minimizes L_M^k has `bits_per_dim_finite_k` instead, which is larger. In
an "evaluate" line `bits_per_dim` is the complete bound, of test samples under the EMA.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bsi import __version__
from bsi.errors import DataError, UsageError, extra, unknown
from bsi.io import append_line, read_json, write_json, write_text
from bsi.progress import log
from bsi.recipe import Recipe, changes, flat, from_plain, to_plain
from bsi.runtime.distributed import World

FORMAT = 1
State = Literal["running", "preempted", "finished", "failed"]
VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT")
TRACKED = "trackers.json"
PROJECT = "bsi"  # of trackers

Value = int | float | str
Sink = Callable[[Mapping[str, Value]], None]


@dataclass(frozen=True)
class RunRecord:
    """The part of run.json that is read again: the recipe, and the class of the network if the caller passed one."""

    recipe: Recipe
    network: str


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run, and its small files. `check` is called before each write: it raises if the lock is lost."""

    path: Path
    check: Callable[[], None] = lambda: None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make the folder. New folders that are still empty at the end, because the run was invalid, are removed."""
        try:
            new = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the run folder {self.path}: {error.strerror}. Use another --out.") from error
        for parent, folders, files in os.walk(self.path):
            check_inside(self.path, *(Path(parent, name) for name in (*folders, *files)))
            if parent == str(self.path) and "wandb" in folders:
                folders.remove("wandb")  # Weights & Biases links to its own log files, which are not ours to write
        try:
            yield
        finally:
            with suppress(OSError):  # not empty: the run has started
                for folder in new:
                    folder.rmdir()

    def write(self, name: str, content: Any) -> None:
        """Write a file of the run as JSON."""
        self.check()
        write_json(self.path / name, content)

    def write_record(self, record: RunRecord, named: Recipe | None, data_version: str, world: World) -> None:
        """Write run.json, without the path of the home folder: ~ replaces it in the command, as in --out=~/run."""
        home = os.path.expanduser("~")
        words = [Path(sys.argv[0]).name, *sys.argv[1:]]
        if len(home) > 1:
            words = [re.sub(rf"(?<![^=]){re.escape(home)}(?=/|$)", "~", word) for word in words]
        cuda = world.device.type == "cuda"
        environment = {
            "bsi": __version__, "python": platform.python_version(), "torch": torch.__version__,
            "cuda": torch.version.cuda, "system": platform.system(), "machine": platform.machine(),
            "device": torch.cuda.get_device_name(world.device) if cuda else "cpu",
            "ranks": world.size, "threads": torch.get_num_threads(),
            "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        }  # fmt: skip
        content = {
            "format": FORMAT, "recipe": to_plain(record.recipe),
            "changed": [] if named is None else [str(change) for change in changes(named, record.recipe)],
            "network": record.network, "data_version": data_version, "command": words, "environment": environment,
        }  # fmt: skip
        self.write("run.json", content)

    def read_record(self) -> RunRecord | None:
        """The record of a run that began earlier; None in a new folder."""
        path = self.path / "run.json"
        if not path.exists():
            return None
        try:
            given = read_json(path)
            if not isinstance(given, dict) or not {"format", "recipe", "network"} <= given.keys():
                raise DataError(f"{path} is not the record of a run.")
        except DataError as error:
            raise UsageError(f"{error} Restore it, or use another --out.") from error
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
        return _read_table(self.path / "status.json")


def check_inside(run: Path, *paths: Path) -> None:
    """Raise if a link in a run folder leads out of it: a folder from elsewhere must not choose where files are written.

    The folder itself may be a link.
    """
    for path in filter(os.path.islink, paths):
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(run)):
            raise UsageError(
                f"{path} is a link to {os.path.realpath(path)}, outside of the run folder, and is not written to. "
                f"Replace it by the file or folder itself."
            )


def _read_table(path: Path) -> dict[str, Any]:
    """A JSON object, empty if it cannot be read."""
    with suppress(DataError):
        found = read_json(path)
        return found if isinstance(found, dict) else {}
    return {}


# ---- The journal -----------------------------------------------------------------------------------------------------


class JsonLines:
    """The sink that writes the journal of a run folder.

    What a resumed run will write again is removed first: lines after its step, and the events of it in `repeated`.
    """

    def __init__(self, folder: RunFolder, resumed_at: int, repeated: Collection[str] = ()) -> None:
        self.folder, self._failed = folder, False
        kept = [line for line in _lines(folder.journal) if int(line["step"]) <= resumed_at]
        kept = [line for line in kept if int(line["step"]) < resumed_at or line.get("event") not in repeated]
        folder.check()
        write_text(folder.journal, "".join(json.dumps(line) + "\n" for line in kept))

    def __call__(self, record: Mapping[str, Value]) -> None:
        self.folder.check()
        # JSON has no NaN and no infinity.
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        try:
            append_line(self.folder.journal, json.dumps(known))
        except OSError as error:  # a full disk: the journal only reports
            if not self._failed:
                log(f"bsi train: cannot write {self.folder.journal}: {error.strerror}. Training continues without it.")
            self._failed = True


def _lines(path: Path) -> list[dict[str, Value]]:
    """The valid lines of a journal; the last one may be incomplete after a crash."""
    found = []
    for line in path.read_text("utf-8", errors="replace").splitlines() if path.is_file() else []:
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                found.append(record)
    return found


def read_journal(run: Path) -> list[dict[str, Value]]:
    """The records of a run folder's journal."""
    path = RunFolder(Path(run)).journal
    if not path.is_file():
        raise UsageError(f"{run} has no journal. Give the folder of a run.")
    return _lines(path)


# ---- Trackers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tracker:
    """An open record in a tracker.

    Args:
        known: The identifier by which a resumed run continues the record.
        write: Takes a step and its numbers by name, such as `train/loss`.
    """

    known: str
    write: Callable[[int, dict[str, float]], object]
    close: Callable[[], object]


def _tensorboard(folder: Path, recipe: Recipe, known: str | None) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), flush_secs=1)

    def write(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker("tensorboard", write, writer.close)


def _wandb(folder: Path, recipe: Recipe, known: str | None) -> Tracker:
    names = {"project": PROJECT, "name": folder.name, "dir": str(folder), "id": known}
    run = importlib.import_module("wandb").init(**names, resume="allow", config=flat(recipe))
    return Tracker(run.id, lambda step, values: run.log(values, step=step), run.finish)


def _trackio(folder: Path, recipe: Recipe, known: str | None) -> Tracker:
    name = known or folder.name
    run = importlib.import_module("trackio").init(project=PROJECT, name=name, resume="allow", config=flat(recipe))
    return Tracker(name, lambda step, values: run.log(values, step=step), run.finish)


def _mlflow(folder: Path, recipe: Recipe, known: str | None) -> Tracker:
    client = importlib.import_module("mlflow").MlflowClient()
    if known is None:
        experiment = client.get_experiment_by_name(PROJECT)
        identifier = client.create_experiment(PROJECT) if experiment is None else experiment.experiment_id
        known = str(client.create_run(identifier, run_name=folder.name).info.run_id)
        for name, value in flat(recipe).items():
            client.log_param(known, name, value)
    client.update_run(known, status="RUNNING")

    def write(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            client.log_metric(known, name, value, step=step)

    return Tracker(known, write, lambda: client.set_terminated(known))


# Each with the package that it needs, which the extra of the same name installs.
TRACKERS: dict[str, tuple[str, Callable[[Path, Recipe, str | None], Tracker]]] = {
    "tensorboard": ("torch.utils.tensorboard", _tensorboard),
    "wandb": ("wandb", _wandb),
    "trackio": ("trackio", _trackio),
    "mlflow": ("mlflow", _mlflow),
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise for an unknown name or a missing package, on all ranks alike."""
    if isinstance(names, str):
        raise UsageError(f"track is a list of names, got {names!r}. Pass track=[{names!r}].")
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
        with extra(name, f"--track {name}"):
            importlib.import_module(TRACKERS[name][0])


@contextmanager
def tracking(names: Sequence[str], folder: Path, recipe: Recipe) -> Iterator[list[Sink]]:
    """Sinks that send the journal to the trackers with these names.

    Tracking only reports: it may depend on a network, an account or a disk. What a tracker raises is printed, and
    training continues.
    """
    known, opened = _read_table(folder / TRACKED), dict[str, Tracker]()

    def send(name: str, record: Mapping[str, Value]) -> None:
        values = {
            f"{record['event']}/{key}": float(value)
            for key, value in record.items()
            if key not in ("step", "event", "time") and isinstance(value, int | float)
        }
        with _reported(name):
            opened[name].write(int(record["step"]), values)

    try:
        for name in names:
            with _reported(name):
                opened[name] = TRACKERS[name][1](folder, recipe, known.get(name))
                known[name] = opened[name].known
                write_json(folder / TRACKED, known)
        yield [functools.partial(send, name) for name in opened]
    finally:
        for name, tracker in reversed(opened.items()):
            with _reported(name):
                tracker.close()


@contextmanager
def _reported(name: str) -> Iterator[None]:
    """Print what a tracker raises; some also exit, or raise errors that cannot be printed."""
    try:
        yield
    except (Exception, SystemExit) as error:
        reason = type(error).__name__
        with suppress(Exception):
            reason = f"{error!s:.300}" or reason
        log(f"bsi train: the tracker {name} failed, and training continues without this record: {reason}")
