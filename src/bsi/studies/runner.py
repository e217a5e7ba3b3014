"""Plan and run studies: train each network, measure it, and write the reports.

A job is done if its file exists, so a study resumes when the same command is run again. With a time limit, training
and drawing save what they have and stop; any other job starts only if its estimated time is left. Processes that
share a folder take turns: each job has a lock file, which is taken over from a process that died.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bsi import __version__
from bsi.errors import DataError, UsageError
from bsi.methods import METHODS
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
    Result,
    Store,
    Train,
    estimate_s,
    name_of,
    network_name,
    same_network,
    title,
)
from bsi.studies.measure import Deadline, Laboratory, load_network
from bsi.studies.publish import write_outcome
from bsi.studies.report import Study
from bsi.studies.scale import Scale
from bsi.training.lock import InUse, Owner, hold
from bsi.training.train import train

__all__ = ["Planned", "plan", "plan_json", "plan_text", "run", "train_command"]

POLL_S = 1.0


@dataclass(frozen=True)
class Planned:
    """A job, the first study that needs it, and its estimated seconds."""

    job: Job
    study: str
    seconds: float
    done: bool


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
            for each in (Train(group[0].network), *group):
                done = store.done(each) or network_name(each.network) not in unfinished
                planned.setdefault(name_of(each), Planned(each, name, estimate_s(each, scale), done))
    return list(planned.values())


def plan_text(planned: Sequence[Planned], scale: Scale, store: Store) -> str:
    """One line for each job: its estimated minutes, or the values that were measured. At the paper's scale also the
    command that trains each network on several GPUs."""
    if not planned:
        return f"{scale.name}: {scale.summary}\nNothing to train or measure."
    lines = [f"{scale.name}: {scale.summary}"]
    for p in planned:
        found = f" = {summary(store.read(p.job))}" if p.done and not isinstance(p.job, Train) else ""
        lines.append(f"{'done' if p.done else _duration(p.seconds):>12}  {p.study:<19} {title(p.job)}{found}")
        if scale.name == "paper" and isinstance(p.job, Train) and not p.done:
            lines.append(f"{'':34}{train_command(p.job.network, store)}")
    left = [p for p in planned if not p.done]
    networks, duration = sum(isinstance(p.job, Train) for p in left), _duration(sum(p.seconds for p in left))
    return "\n".join([*lines, f"{len(left)} of {len(planned)} jobs left, {networks} networks to train: {duration}"])


def plan_json(planned: Sequence[Planned], store: Store) -> list[dict[str, Any]]:
    """The plan as records, with the values that were measured."""
    return [
        {
            "study": p.study,
            "job": title(p.job),
            "minutes": p.seconds / 60,
            "done": p.done,
            "values": dict(store.read(p.job).values) if p.done and not isinstance(p.job, Train) else None,
        }
        for p in planned
    ]


def summary(result: Result) -> str:
    """The values of a result on one line."""
    shown = (f"{name} {value:.5g}" for name, value in result.values.items() if isinstance(value, float))
    return ", ".join(shown) or f"{len(result.arrays)} arrays"


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
    """Run the remaining jobs and write the report of each study.

    Returns:
        The folders of the reports.

    Raises:
        Preempted: The time limit is reached; the same call resumes.
    """
    if find_place(os.environ).size > 1:
        hint = "Train its networks with the commands that --plan prints" if scale.name == "paper" else "Drop torchrun"
        raise UsageError(f"a study runs in one process, got a process group. {hint} and run the study on one GPU.")
    worker = _Worker(scale, Store(folder), Deadline.after(minutes), device)
    written = []
    for study in studies:
        todo = [p for p in plan([study], scale, worker.store) if not p.done]
        for i, planned in enumerate(todo):
            print(f"{study.name}, {len(todo) - i} jobs left: {title(planned.job)}", file=sys.stderr, flush=True)
            worker.do_in_turn(planned)
        written.append(write_outcome(study, scale, worker.store, worker.about()))
    return written


class _Worker:
    """Runs jobs one after the other; consecutive measurements of one network load it once."""

    def __init__(self, scale: Scale, store: Store, deadline: Deadline, device: str | None) -> None:
        self.scale, self.store, self.deadline = scale, store, deadline
        self.device, self.commit = pick_device(device, 0), commit()
        self._laboratory: tuple[str, Laboratory] | None = None

    def do_in_turn(self, planned: Planned) -> None:
        """Run a job in this process, or wait for its result if another process is running it."""
        job, store, waited = planned.job, self.store, False
        # Training and drawing save what they have, so they need only enough time to make progress.
        needed = min(planned.seconds, 60.0) if isinstance(job, Train | Quality) else planned.seconds
        self.deadline.check(f"next is {title(job)} ({planned.seconds / 60:.1f} min)", needed)
        store.folder.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                # Several nodes of one batch job may run studies: the lock names the process, not the batch job.
                with hold(store.folder, _log, f".{name_of(job)}.lock", replace(Owner.me(), job="")):
                    started = time.monotonic()
                    found = "done by another process" if store.done(job) else self._do(job)
                    print(f"{title(job)}: {found} ({time.monotonic() - started:.0f} s)", flush=True)
                    return
            except InUse as busy:
                if not waited:
                    _log(f"waiting for {busy.holder}, which does this job")
                waited = True
                self.deadline.check(f"{busy.holder} has not finished: {title(job)}")
                time.sleep(POLL_S)

    def _do(self, job: Job) -> str:
        """Do a job and store its result; returns a summary."""
        if isinstance(job, Train):
            self._laboratory = None  # frees its memory
            return self.train(job.network)
        started = time.monotonic()
        result = self.laboratory(job.network).measure(job)
        about = {**self.about(), "seconds": round(time.monotonic() - started, 1)}
        self.store.write(job, replace(result, about=about))
        return summary(result)

    def train(self, recipe: Recipe) -> str:
        """Train a network, or resume, and keep its moving average in one file.

        `bsi train --out` into the same folder gives the same result, on any number of GPUs.
        """
        sinks = [_stop_at(self.deadline)]
        folder = train(recipe, out=self.store.network(recipe), sinks=sinks, device=self.device.type)
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
            if not same_network(read_trained(weights).recipe, recipe):
                raise DataError(
                    f"{weights} is another network, trained with other defaults. Delete it and run the study again."
                )
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


def _log(message: str) -> None:
    print(f"bsi study: {message}", file=sys.stderr, flush=True)


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
    here = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        found = git("describe", "--always", "--abbrev=10", "--exclude=*")
        return f"{found} with changes" if git("status", "--porcelain", "--", ".") else found
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("BSI_COMMIT", "unknown")
