"""Plan and run studies: train each network, measure it, and write the reports.

A job is done if its file exists, so a study resumes when the same command is run again. With a time limit, training
and drawing save what they have and stop; any other job starts only if its estimated time is left. One process at a
time works in a folder.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bsi import __version__
from bsi.errors import UsageError
from bsi.methods import METHODS
from bsi.progress import log
from bsi.recipe import Recipe
from bsi.recipes import named_recipe
from bsi.runtime.distributed import find_place, pick_device
from bsi.runtime.export import export, read_trained
from bsi.runtime.run_folder import RunFolder, Sink, Value, read_journal
from bsi.runtime.serialization import changes
from bsi.studies.job import (
    Job,
    Measure,
    Quality,
    Store,
    Training,
    check_network,
    estimate_s,
    name_of,
    network_name,
    title,
)
from bsi.studies.measure import Deadline, Laboratory, load_network
from bsi.studies.outcome import Study
from bsi.studies.publish import write_outcome
from bsi.studies.scale import Scale
from bsi.training.lock import hold
from bsi.training.train import run_training


@dataclass(frozen=True)
class Planned:
    """A job, the first study that needs it, and its estimated seconds."""

    job: Job
    study: str
    seconds: float
    done: bool

    def record(self, store: Store) -> dict[str, Any]:
        """The job for JSON, with the values that were measured."""
        values = dict(store.read(self.job).values) if self.done and not isinstance(self.job, Training) else None
        about = {"study": self.study, "job": title(self.job), "minutes": self.seconds / 60, "done": self.done}
        return {**about, "values": values}


def plan(studies: Sequence[Study], scale: Scale, store: Store) -> list[Planned]:
    """All jobs of the studies, each once: the networks seed by seed, each trained and then measured."""
    planned: dict[str, Planned] = {}
    wanted = {study.name: study.measures(scale) for study in studies}
    unfinished = {network_name(job.network) for jobs in wanted.values() for job in jobs if not store.done(job)}
    for name, measures in wanted.items():
        groups: dict[str, list[Measure]] = {}
        for job in sorted(measures, key=lambda job: job.network.seed):
            groups.setdefault(network_name(job.network), []).append(job)
        for group in groups.values():
            for each in (Training(group[0].network), *group):
                done = store.done(each) or network_name(each.network) not in unfinished
                planned.setdefault(name_of(each), Planned(each, name, estimate_s(each, scale), done))
    return list(planned.values())


def plan_text(planned: Sequence[Planned], scale: Scale, store: Store) -> str:
    """One line for each job: its estimated minutes, or the values that were measured. At the paper's scale also the
    command that trains each network on several GPUs."""
    lines = [f"{scale.name}: {scale.summary}"]
    for p in planned:
        found = f" = {store.read(p.job)}" if p.done and not isinstance(p.job, Training) else ""
        lines.append(f"{'done' if p.done else _duration(p.seconds):>12}  {p.study:<19} {title(p.job)}{found}")
        if scale.name == "paper" and isinstance(p.job, Training) and not p.done:
            lines.append(f"{'':34}{train_command(p.job.network, store)}")
    left = [p for p in planned if not p.done]
    networks, duration = sum(isinstance(p.job, Training) for p in left), _duration(math.fsum(p.seconds for p in left))
    return "\n".join([*lines, f"{len(left)} of {len(planned)} jobs left, {networks} networks to train: {duration}"])


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.2f} min" if seconds < 300 * 60 else f"{seconds / 3600:.0f} h"


def train_command(recipe: Recipe, store: Store) -> str:
    """`bsi train` with every setting that differs from the recipe of that name."""
    method = next(name for name, spec in METHODS.items() if isinstance(recipe.method, spec))
    words = ["torchrun --nproc-per-node 4 -m bsi train", recipe.name, "--method", method]
    for change in changes(named_recipe(recipe.name, method), recipe):
        words += [f"--{change.name.replace('_', '-')}", str(change.after)]
    return " ".join([*words, "--out", str(store.network(recipe))])


def run(
    studies: Sequence[Study],
    scale: Scale,
    folder: Path,
    minutes: float | None = None,
    device: str | None = None,
) -> list[Path]:
    """Run the remaining jobs, write the report of each study, and return the folders of the reports.

    Raises:
        Preempted: The time limit is reached; the same call resumes.
    """
    if find_place(os.environ).size > 1:
        hint = "Train its networks with the commands that --plan prints" if scale.name == "paper" else "Drop torchrun"
        raise UsageError(f"a study runs in one process, got a process group. {hint} and run the study on one GPU.")
    worker = Worker(scale, Store(folder), Deadline.after(minutes), device)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with hold(folder, log):
        for study in studies:
            todo = [p for p in plan([study], scale, worker.store) if not p.done]
            for i, planned in enumerate(todo):
                log(f"{study.name}, {len(todo) - i} jobs left: {title(planned.job)}")
                worker.do(planned)
            written.append(write_outcome(study, scale, worker.store, worker.about()))
    return written


class Worker:
    """Runs jobs one after the other; consecutive measurements of one network load it once."""

    def __init__(self, scale: Scale, store: Store, deadline: Deadline, device: str | None) -> None:
        self.scale, self.store, self.deadline = scale, store, deadline
        self.device, self.commit = pick_device(device, 0), commit()
        self._laboratory: tuple[str, Laboratory] | None = None

    def do(self, planned: Planned) -> None:
        """Do a job and store its result."""
        job, started = planned.job, time.monotonic()
        # Training and drawing save what they have, so they need only enough time to make progress.
        needed = min(planned.seconds, 60.0) if isinstance(job, Training | Quality) else planned.seconds
        self.deadline.check(f"next is {title(job)} ({planned.seconds / 60:.1f} min)", needed)
        if isinstance(job, Training):
            self._laboratory = None  # frees its memory
            found = self.train(job.network)
        else:
            result = self.laboratory(job.network).measure(job)
            about = {**self.about(), "seconds": round(time.monotonic() - started, 1)}
            self.store.write(job, replace(result, about=about))
            found = str(result)
        print(f"{title(job)}: {found} ({time.monotonic() - started:.0f} s)", flush=True)

    def train(self, recipe: Recipe) -> str:
        """Train a network, or resume, and keep its moving average in one file; returns a summary.

        `bsi train --out` into the same folder gives the same result, on any number of GPUs.
        """
        sinks = [_stop_at(self.deadline)]
        folder = run_training(recipe, out=self.store.network(recipe), sinks=sinks, device=self.device.type)
        export(folder, self.store.weights(recipe))
        shutil.rmtree(RunFolder(folder).checkpoints)
        lines = [line for line in read_journal(folder) if line["event"] == "train"]
        rates = sorted(float(line["images_per_s"]) for line in lines)
        return f"loss {lines[-1]['loss']:.4f}, {rates[len(rates) // 2]:.4g} images/s"

    def laboratory(self, recipe: Recipe) -> Laboratory:
        """The laboratory with this network."""
        name = network_name(recipe)
        if self._laboratory is None or self._laboratory[0] != name:
            weights = self.store.weights(recipe)
            check_network(read_trained(weights).recipe, recipe, weights)
            model = load_network(weights, recipe, self.device)
            self._laboratory = name, Laboratory.of(model, recipe, self.scale, self.store.folder, self.deadline)
        return self._laboratory[1]

    def about(self) -> dict[str, Any]:
        """The time, the machine and the commit of the measurement."""
        cuda = self.device.type == "cuda"
        return {
            "bsi": __version__,
            "commit": self.commit,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(self.device) if cuda else f"CPU, threads: {torch.get_num_threads()}",
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }


def _stop_at(deadline: Deadline) -> Sink:
    """A sink that makes the trainer save and stop when the time limit is reached, like a scheduler's signal."""

    def sink(record: Mapping[str, Value]) -> None:
        if deadline.left_s > 0:
            return
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGTERM)
        else:  # the trainer handles signals in the main thread only
            deadline.check("training resumes from its last checkpoint")

    return sink


def commit() -> str:
    """The commit of this code, marked if the code was changed since; $BSI_COMMIT if there is no repository."""
    command = ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty= with changes"]
    try:
        here = Path(__file__).parent
        return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("BSI_COMMIT", "unknown")
