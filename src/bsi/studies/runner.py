"""What is left to do, in which order, and until when: `plan` says it, `run` does it.

Jobs go network by network: train it, then measure it. A job that is done is a file that is there; so is a network that
another study trained; one that another process is doing is waited for (turns.py). When the time is nearly over, no job
is begun that would not end in it; training and drawing save what they have, and everything else takes little time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bsi import __version__
from bsi.data.store import open_dataset
from bsi.errors import DataError, Preempted, UsageError
from bsi.model import Model
from bsi.runtime.distributed import find_place, pick_device
from bsi.runtime.export import read_trained
from bsi.studies.deadline import Deadline
from bsi.studies.job import Job, Measure, Train, estimate_s, name_of, network_name, same_network, title
from bsi.studies.measure import Laboratory
from bsi.studies.networks import train_network, training_record
from bsi.studies.outcome import line, write_outcome
from bsi.studies.report import Study
from bsi.studies.scale import Scale
from bsi.studies.store import Store
from bsi.studies.turns import in_turn

__all__ = ["Planned", "plan", "report_so_far", "run"]


@dataclass(frozen=True)
class Planned:
    """A job, the first study that wants it, and the seconds it is estimated to take."""

    job: Job
    study: str
    seconds: float
    done: bool


def plan(studies: Sequence[Study], scale: Scale, store: Store) -> list[Planned]:
    """All jobs of the studies, each once, in the order in which they are done."""
    wanted = {study.name: study.measures(scale) for study in studies}
    open_networks = {network_name(job.network) for jobs in wanted.values() for job in jobs if not store.done(job)}
    planned: dict[str, Planned] = {}
    for name, measures in wanted.items():
        for job in _by_network(measures):
            if name_of(job) not in planned:
                done = store.done(job) or network_name(job.network) not in open_networks  # all measured: not needed
                planned[name_of(job)] = Planned(job, name, estimate_s(job, scale), done)
    return list(planned.values())


def _by_network(measures: Sequence[Measure]) -> list[Job]:
    """Every network's training before its measurements; networks in the order in which they are first asked for."""
    groups: dict[str, list[Measure]] = {}
    for job in measures:
        groups.setdefault(network_name(job.network), []).append(job)
    return [job for group in groups.values() for job in (Train(group[0].network), *group)]


def run(
    studies: Sequence[Study],
    scale: Scale,
    folder: Path,
    minutes: float | None = None,
    device: str | None = None,
) -> list[Path]:
    """Do what is left of the studies and write their outcomes; the folders of the results. Raises Preempted when out
    of time, and writes what there is so far."""
    if find_place(os.environ).size > 1:
        shown = "Train its networks on many GPUs with the commands that --plan shows, then run the study on one."
        raise UsageError(
            f"a study runs in one process. {shown if scale.name == 'paper' else 'Start it without torchrun.'}"
        )
    deadline, store = Deadline.after(minutes), Store(folder)
    at_work = _Bench(scale, store, deadline, device)
    for study in studies:
        try:
            _finish(study, at_work)
        finally:
            write_outcome(study, scale, store, at_work.about())
    return [store.results(study.name, scale.name) for study in studies]


def _finish(study: Study, at_work: _Bench) -> None:
    """The jobs of a study that are left, one after the other."""
    store, deadline = at_work.store, at_work.deadline
    todo = plan([study], at_work.scale, store)
    for i, planned in enumerate(todo):
        if planned.done or store.done(planned.job):
            continue
        _begin(planned, deadline, sum(not (p.done or store.done(p.job)) for p in todo))
        print(f"{study.name} {i + 1}/{len(todo)}: {title(planned.job)}", file=sys.stderr, flush=True)
        started = time.monotonic()
        shown = in_turn(planned.job, store, deadline, at_work.do)
        print(f"{title(planned.job)}: {shown} ({time.monotonic() - started:.0f} s)", flush=True)


def report_so_far(studies: Sequence[Study], scale: Scale, folder: Path, device: str | None = None) -> list[Path]:
    """Do nothing more: write the outcomes of what there is. The folders of the studies that have something."""
    store = Store(folder)
    about = _Bench(scale, store, Deadline(), device).about()
    found = [write_outcome(study, scale, store, about) for study in studies]
    return [path for path in found if path is not None]


def _begin(planned: Planned, deadline: Deadline, left: int) -> None:
    """Refuse to begin what would not end in time; training needs only enough of it to get anywhere."""
    needed = min(planned.seconds, 60.0) if isinstance(planned.job, Train) else planned.seconds
    if deadline.left_s < needed:
        raise Preempted(
            f"out of time: {left} jobs of {planned.study} are left, next {title(planned.job)} "
            f"({planned.seconds / 60:.1f} min). Run the same command to go on"
        )


class _Bench:
    """The device, the data and the network at hand: consecutive measurements of one network load it once."""

    def __init__(self, scale: Scale, store: Store, deadline: Deadline, device: str | None) -> None:
        self.scale, self.store, self.deadline = scale, store, deadline
        self.device, self.commit = pick_device(device, 0), commit()  # of the code that was loaded, whatever follows it
        self._network: tuple[str, Model] | None = None
        self._laboratories: dict[str, Laboratory] = {}

    def do(self, job: Job) -> str:
        """Do a job and keep its result; what to print of it."""
        if isinstance(job, Train):
            self._network = None  # its memory, before another one is trained
            train_network(job, self.scale, self.store, self.deadline, self.device.type)
            record = training_record(job, self.store)
            return f"loss {record['loss']:.4f}, {record['images_per_s']:.4g} images/s"
        laboratory = self._laboratory(job.network.data.name)
        model = self._model(job, laboratory)
        started = time.monotonic()
        result = laboratory.measure(job, model, self.deadline)
        self.store.write(job, result, {**self.about(), "seconds": round(time.monotonic() - started, 1)})
        return line(job, result)

    def _laboratory(self, data: str) -> Laboratory:
        if data not in self._laboratories:
            self._laboratories[data] = Laboratory(self.scale, open_dataset(data), self.device, self.store.folder)
        return self._laboratories[data]

    def _model(self, job: Measure, laboratory: Laboratory) -> Model:
        name = network_name(job.network)
        if self._network is None or self._network[0] != name:
            weights = self.store.weights(job.network)
            if not same_network(read_trained(weights).recipe, job.network):
                raise DataError(f"{weights} is another network, trained with other defaults: delete it and run again")
            self._network = (name, laboratory.load(weights, job.network))
        return self._network[1]

    def about(self) -> dict[str, Any]:
        """Where, when and by what."""
        cuda, threads = self.device.type == "cuda", torch.get_num_threads()
        return {
            "bsi": __version__,
            "commit": self.commit,
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(self.device) if cuda else f"CPU, threads: {threads}",
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }


def commit() -> str:
    """The commit of this code, marked when the code has changed since; BSI_COMMIT where there is no repository."""
    here = Path(__file__).resolve().parents[1]
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=10", "--exclude=*"],
            cwd=here, capture_output=True, text=True, check=True, timeout=10,
        ).stdout.strip()  # fmt: skip
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--", "."],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("BSI_COMMIT", "unknown")
    return f"{found} with changes" if changed else found
