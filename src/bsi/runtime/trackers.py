"""Trackers: services that show the journal of a run, by name.

    bsi train digits --track wandb            bsi.train(recipe, track=["tensorboard", "mlflow"])

Each is a context manager that yields a function of a step and its numbers by name (`train/loss`). A resumed run
continues its record: the identifier is kept in the run folder. Their own environment variables apply (WANDB_MODE,
TRACKIO_DIR, MLFLOW_TRACKING_URI). Tracking only reports: what a tracker raises is printed, and training continues.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bsi.errors import DataError, UsageError, extra
from bsi.io import read_json, write_json
from bsi.progress import log
from bsi.recipe import Recipe
from bsi.runtime.run_folder import Sink, Value
from bsi.runtime.serialization import flat

PROJECT = "bsi"
IDENTIFIERS = "trackers.json"  # in the run folder: the identifier that each tracker gave the run

Write = Callable[[int, dict[str, float]], object]


@contextmanager
def tensorboard(folder: Path, recipe: Recipe, known: str | None) -> Iterator[tuple[Write, str]]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:

        def write(step: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        yield write, "tensorboard"


@contextmanager
def wandb(folder: Path, recipe: Recipe, known: str | None) -> Iterator[tuple[Write, str]]:
    module = importlib.import_module("wandb")
    with module.init(
        project=PROJECT, name=folder.name, dir=str(folder), id=known, resume="allow", config=flat(recipe)
    ) as run:
        yield (lambda step, values: run.log(values, step=step)), run.id


@contextmanager
def trackio(folder: Path, recipe: Recipe, known: str | None) -> Iterator[tuple[Write, str]]:
    module = importlib.import_module("trackio")
    name = known or folder.name
    run = module.init(project=PROJECT, name=name, resume="allow", config=flat(recipe))
    try:
        yield (lambda step, values: run.log(values, step=step)), name
    finally:
        run.finish()


@contextmanager
def mlflow(folder: Path, recipe: Recipe, known: str | None) -> Iterator[tuple[Write, str]]:
    module = importlib.import_module("mlflow")
    client = module.MlflowClient()
    if known is None:
        experiment = client.get_experiment_by_name(PROJECT)
        identifier = client.create_experiment(PROJECT) if experiment is None else experiment.experiment_id
        known = str(client.create_run(identifier, run_name=folder.name).info.run_id)
        for name, value in flat(recipe).items():
            client.log_param(known, name, value)
    client.update_run(known, status="RUNNING")
    try:
        yield (lambda step, values: [client.log_metric(known, k, v, step=step) for k, v in values.items()]), known
    finally:
        client.set_terminated(known)


# Each with the package that it needs, which the extra of the same name installs.
TRACKERS: dict[str, tuple[str, Callable[[Path, Recipe, str | None], Any]]] = {
    "tensorboard": ("torch.utils.tensorboard", tensorboard),
    "wandb": ("wandb", wandb),
    "trackio": ("trackio", trackio),
    "mlflow": ("mlflow", mlflow),
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise for an unknown name or a missing package, on all ranks alike."""
    if isinstance(names, str):
        raise UsageError(f"track is a list of names, got {names!r}. Pass track=[{names!r}].")
    for name in names:
        if name not in TRACKERS:
            near = difflib.get_close_matches(name, TRACKERS, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"unknown tracker {name!r}. {hint}Known: {', '.join(TRACKERS)}.")
        with extra(name, f"--track {name}"):
            importlib.import_module(TRACKERS[name][0])


@contextmanager
def tracking(names: Sequence[str], folder: Path, recipe: Recipe) -> Iterator[list[Sink]]:
    """Sinks for the trackers with these names."""
    try:
        known = read_json(folder / IDENTIFIERS) if names and (folder / IDENTIFIERS).exists() else {}
    except DataError:
        known = {}
    sinks: list[Sink] = []
    with ExitStack() as stack:
        for name in names:
            with _reported(name):
                opened = ExitStack()
                write, known[name] = opened.enter_context(TRACKERS[name][1](folder, recipe, known.get(name)))
                stack.callback(_close, name, opened)
                write_json(folder / IDENTIFIERS, known)
                sinks.append(_sink(name, write))
        yield sinks


def _sink(name: str, write: Write) -> Sink:
    def sink(record: Mapping[str, Value]) -> None:
        values = {
            f"{record['event']}/{key}": float(value)
            for key, value in record.items()
            if key not in ("step", "event", "time") and isinstance(value, int | float)
        }
        with _reported(name):
            write(int(record["step"]), values)

    return sink


def _close(name: str, opened: ExitStack) -> None:
    with _reported(name):
        opened.close()


@contextmanager
def _reported(name: str) -> Iterator[None]:
    """Print what a tracker raises: it may depend on a network, an account or a disk, and training does not."""
    try:
        yield
    except Exception as error:
        log(f"bsi train: the tracker {name} failed, and training continues without this record: {error!s:.300}")
