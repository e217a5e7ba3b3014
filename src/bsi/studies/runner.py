"""Plan and run studies: train each network, measure it, and write the outcomes and docs/results.md.

A job is done if its file exists, so a study resumes when the same command is run again. With a time limit, training
and drawing save what they have and stop; any other job starts only if its estimated time is left. One process at a
time works in a folder.

NAME-SCALE/figure.png, numbers.json            what a study writes
docs/results/NAME-SCALE.png, NAME-SCALE.json   copies of the figure and the numbers
docs/results/NAME-SCALE.txt                    a remark, written by hand, if there is one
docs/results/conclusion.txt                    what all of it shows, written by hand
docs/results.md                                generated from these by `page`; a test compares them
"""

from __future__ import annotations

import difflib
import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from bsi import __version__
from bsi.errors import UsageError
from bsi.evaluation.runs import COMPILED, open_run, speed_up
from bsi.io import write_json, write_text
from bsi.methods import METHODS
from bsi.model import Model
from bsi.progress import log
from bsi.recipe import Recipe
from bsi.recipes import named_recipe
from bsi.runtime.distributed import Place, World, find_place, pick_device
from bsi.runtime.export import export, read_trained
from bsi.runtime.run_folder import RunFolder, Value, read_journal
from bsi.runtime.serialization import changes
from bsi.studies import ablations, bounds, comparison, figures, illustration, outcome
from bsi.studies.job import Job, Store, Training, check_network, describe, network_name
from bsi.studies.measure import Bound, Deadline, Quality, measure
from bsi.studies.outcome import Results, Study
from bsi.studies.scale import SCALES, Scale
from bsi.training import train as trainer
from bsi.training.lock import hold

# The most informative for their time first: the first ones share six networks.
STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        illustration.illustration,
        illustration.noise_levels,
        comparison.comparison,
        comparison.fid_convergence,
        bounds.elbo_convergence,
        bounds.importance_sampling,
        bounds.proposal,
        comparison.samples,
        ablations.disentangle,
        ablations.initial_precision,
        ablations.weighting,
        ablations.finite_k,
        bounds.variance_aware,
        comparison.architecture,
    )
}


def named_studies(name: str, scale: Scale) -> list[Study]:
    """The study of that name, or all studies that run at the scale."""
    if name == "all":
        return [study for study in STUDIES.values() if study.runs_at(scale)]
    if name not in STUDIES:
        near = difflib.get_close_matches(name, STUDIES, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"unknown study {name!r}. {hint}Use one of {', '.join(STUDIES)}, or all.")
    if not STUDIES[name].runs_at(scale):
        allowed = ", ".join(scale.studies or ())
        raise UsageError(f"{name} does not run at the scale {scale.name}, which is for {allowed}. Use another --scale.")
    return [STUDIES[name]]


# The plan


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
        about = {"study": self.study, "job": self.job.title(), "minutes": self.seconds / 60, "done": self.done}
        return {**about, "values": values}


def plan(studies: Sequence[Study], store: Store) -> list[Planned]:
    """All jobs of the studies, each once: the networks seed by seed, each trained and then measured."""
    planned: dict[str, Planned] = {}
    wanted = {study.name: study.measurements(store.scale) for study in studies}
    unfinished = {network_name(job.network) for jobs in wanted.values() for job in jobs if not store.done(job)}
    for study, jobs in wanted.items():
        groups: dict[str, list[Job]] = {}
        for job in sorted(jobs, key=lambda job: job.network.seed):
            groups.setdefault(network_name(job.network), [Training(job.network)]).append(job)
        for network, group in groups.items():
            for each in group:
                done = store.done(each) or network not in unfinished
                planned.setdefault(each.name, Planned(each, study, each.seconds(store.scale), done))
    return list(planned.values())


def plan_text(planned: Sequence[Planned], store: Store) -> str:
    """One line for each job: its estimated minutes, or the values that were measured. At the paper's scale also the
    command that trains each network on several GPUs."""
    scale = store.scale
    lines = [f"{scale.name}: {scale.summary}"]
    for p in planned:
        found = f" = {store.read(p.job)}" if p.done and not isinstance(p.job, Training) else ""
        lines.append(f"{'done' if p.done else _duration(p.seconds):>12}  {p.study:<19} {p.job.title()}{found}")
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


# The jobs


def run(
    studies: Sequence[Study], results: Results, minutes: float | None = None, device: str | None = None
) -> list[Path]:
    """Run the remaining jobs, write the report of each study, and return the folders of the reports.

    Raises:
        Preempted: The time limit is reached; the same call resumes.
    """
    if find_place(os.environ).size > 1:
        paper = results.scale.name == "paper"
        hint = "Train its networks with the commands that --plan prints" if paper else "Drop torchrun"
        raise UsageError(f"a study runs in one process, got a process group. {hint} and run the study on one GPU.")
    deadline = Deadline(math.inf if minutes is None else time.monotonic() + 60 * minutes)
    where, written = pick_device(device, 0), []
    results.folder.mkdir(parents=True, exist_ok=True)
    with hold(results.folder, log):
        for study in studies:
            todo = [p for p in plan([study], results) if not p.done]
            for i, planned in enumerate(todo):
                log(f"{study.name}, {len(todo) - i} jobs left: {planned.job.title()}")
                do(planned, results, deadline, where)
            written.append(write_outcome(study, results, _about(where)))
    load_network.cache_clear()
    return written


def do(planned: Planned, store: Store, deadline: Deadline, device: torch.device) -> None:
    """Do a job and store its result."""
    job, title, started = planned.job, planned.job.title(), time.monotonic()
    # Training and drawing save what they have, so they need only enough time to make progress.
    needed = min(planned.seconds, 60.0) if isinstance(job, Training | Quality) else planned.seconds
    deadline.check(f"next is {title} ({planned.seconds / 60:.1f} min)", needed)
    if isinstance(job, Training):
        load_network.cache_clear()  # frees its memory
        found = train(job.network, store, deadline, device)
    else:
        model = load_network(store.file(Training(job.network)), job.network, device)
        result = measure(job, model, store, deadline)
        about = {**_about(device), "seconds": round(time.monotonic() - started, 1)}
        store.write(job, replace(result, about=about))
        found = str(result)
    print(f"{title}: {found} ({time.monotonic() - started:.0f} s)", flush=True)


def train(recipe: Recipe, store: Store, deadline: Deadline, device: torch.device) -> str:
    """Train a network, or resume, and keep its moving average in one file; returns a summary.

    `bsi train --out` into the same folder gives the same result, on any number of GPUs.
    """

    def stop_at_deadline(record: Mapping[str, Value]) -> None:
        """Make the trainer save and stop, like the signal of a scheduler."""
        if deadline.left_s <= 0:
            signal.raise_signal(signal.SIGTERM)

    out, sinks = store.network(recipe), [stop_at_deadline]
    folder = trainer.train(recipe, out=out, sinks=sinks, device=device.type, command_line=True).path
    export(folder, store.file(Training(recipe)))
    shutil.rmtree(RunFolder(folder).checkpoints)
    losses = [line["loss"] for line in read_journal(folder) if line["event"] == "train"]
    return f"loss {losses[-1]:.4f}"


@lru_cache(maxsize=1)  # consecutive measurements of one network load it once
def load_network(weights: Path, recipe: Recipe, device: torch.device) -> Model:
    """A trained network on the device, compiled where that is faster."""
    check_network(read_trained(weights).recipe, recipe, weights)
    found = open_run(weights, World(Place(), device), precision=recipe.precision)
    speed_up(found, COMPILED)
    return found.model


def _about(device: torch.device) -> dict[str, Any]:
    """The time, the machine and the commit of a measurement."""
    cuda = device.type == "cuda"
    return {
        "bsi": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if cuda else f"CPU, threads: {torch.get_num_threads()}",
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


@lru_cache
def _commit() -> str:
    """The commit of this code, marked if the code was changed since; $BSI_COMMIT if there is no repository."""
    command = ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty= with changes"]
    try:
        here = Path(__file__).parent
        return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("BSI_COMMIT", "unknown")


# The outcome, and the page of results


INTRODUCTION = """# Results

{conclusion}

`bsi study NAME --scale SCALE --out FOLDER` repeats a study, and `--plan` lists its jobs with their estimated minutes.
This page is generated by `--publish docs`.

| scale | what is trained | what it can show |
|---|---|---|
{scales}

## All claims

Numbers have one standard error: over seeds if there are several, otherwise the Monte Carlo error of a bound, or the
error from drawing these samples. **Held**: the difference is larger than two standard errors and than its practical
size, which is 0.001 bits/dim or 1 % of the value that is compared with. **Not held**: two standard errors rule out a
difference of that size. **Undecided**: neither. With one seed, another training run may reverse a verdict; with two,
the error has one degree of freedom. `--seeds 3` trains more.

| study | claim | scale, seeds | verdict | numbers |
|---|---|---|---|---|
{claims}

Not yet run: {missing}.
"""


def write_outcome(study: Study, results: Results, about: Mapping[str, Any]) -> Path:
    """Write the outcome of a study whose measurements are complete; returns its folder."""
    scale, jobs = results.scale, study.measurements(results.scale)
    folder = results.folder / f"{study.name}-{scale.name}"
    with figures.style():
        found = study.report(results)
        folder.mkdir(parents=True, exist_ok=True)
        found.figure.savefig(folder / "figure.png", dpi=150, metadata={"Software": None})
    made = [results.read(job).about for job in jobs] or [about]
    seeds = len({job.network.seed for job in jobs})
    tables = found.tables.items()
    numbers = {
        "study": study.name,
        "scale": scale.name,
        "hardware": sorted({str(each["device"]) for each in made}),
        "commits": sorted({str(each["commit"]) for each in made}),
        "command": study.command(scale),
        "claims": [asdict(claim) for claim in found.claims],
        "seeds": seeds,
        "notes": [*found.notes, *_protocol(jobs)],
        "tables": [
            {"name": t, "markdown": outcome.markdown(rows), "rows": outcome.records(rows)} for t, rows in tables
        ],
        "networks": {network_name(job.network): describe(job.network) for job in jobs},
        "measurements": {job.name: job.title() for job in jobs},
        "about": dict(about),
    }
    write_json(folder / "numbers.json", numbers)
    for claim in found.claims:
        print(f"{claim.statement}: {claim.verdict}, {_seeds(seeds)} ({claim.because}).", flush=True)
    print(folder, flush=True)
    return folder


def _protocol(jobs: Sequence[Job]) -> list[str]:
    """How precisely bounds and distances were estimated."""
    found: dict[str, None] = {}
    for job in jobs:
        if isinstance(job, Bound):
            found[f"bits/dim: the test set, {job.levels} levels and {job.recon} reconstructions of each image."] = None
        elif isinstance(job, Quality):
            found[f'{job.metric}: {job.num:,} samples against the test set if not stated; "at k" is in k steps.'] = None
    return list(found)


def publish(folders: Sequence[Path], docs: Path) -> Path:
    """Copy outcomes into docs/results and write the page; results at the scale smoke are left out."""
    target = docs / "results"
    target.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        found = json.loads((folder / "numbers.json").read_text("utf-8"))
        if found["scale"] != "smoke":
            path = target / f"{found['study']}-{found['scale']}.json"
            shutil.copyfile(folder / "figure.png", path.with_suffix(".png"))
            write_json(path, found)
    write_text(docs / "results.md", page(target))
    return docs / "results.md"


def page(results: Path) -> str:
    """The page, from the published results."""
    scales = [scale for scale in SCALES.values() if scale.name != "smoke"]
    wanted = [(study, scale) for study in STUDIES.values() for scale in scales if study.runs_at(scale)]
    paths = {(study.name, scale.name): results / f"{study.name}-{scale.name}.json" for study, scale in wanted}
    found = {key: json.loads(path.read_text("utf-8")) for key, path in paths.items() if path.is_file()}
    missing = {
        scale.name: [name for name, at in paths if at == scale.name and (name, at) not in found] for scale in scales
    }
    conclusion = results / "conclusion.txt"
    introduction = INTRODUCTION.format(
        conclusion=conclusion.read_text("utf-8").strip() if conclusion.is_file() else "The studies of this package.",
        scales="\n".join(f"| {scale.name} | {scale.summary} | {scale.evidence} |" for scale in scales),
        claims="\n".join(_claim(numbers, claim) for numbers in found.values() for claim in numbers["claims"]),
        missing="; ".join(f"{name}: {', '.join(studies)}" for name, studies in missing.items() if studies),
    )
    return "\n".join([introduction, *(_section(numbers, results) for numbers in found.values())])


def _claim(numbers: Mapping[str, Any], claim: Mapping[str, str]) -> str:
    where = f"[{numbers['study']}](#{numbers['study']}-{numbers['scale']})"
    seeds = _seeds(numbers["seeds"])
    cells = (where, claim["statement"], f"{numbers['scale']}, {seeds}", f"**{claim['verdict']}**", claim["because"])
    return f"| {' | '.join(cells)} |"


def _seeds(seeds: int) -> str:
    return {0: "nothing trained", 1: "1 seed"}.get(seeds, f"{seeds} seeds")


def _section(numbers: Mapping[str, Any], results: Path) -> str:
    """One screen: the figure, the first table, and how it was made. The other tables are in the JSON file."""
    study, scale = STUDIES[numbers["study"]], numbers["scale"]
    name, (table, *others) = f"{study.name}-{scale}", numbers["tables"]
    where = "New, not in the paper" if study.paper == "new" else f"The paper's {study.paper}"
    lines = [f"## {study.name}, {scale}", "", f"{where}: {study.shows}.", "", f"![{name}](results/{name}.png)", ""]
    remark = results / f"{name}.txt"
    lines += [f"*Remark.* {remark.read_text('utf-8').strip()}", ""] if remark.is_file() else []
    lines += [f"{table['name'][0].upper()}{table['name'][1:]}:", "", table["markdown"], ""]
    more = [f"[The other tables](results/{name}.json): {', '.join(each['name'] for each in others)}."] if others else []
    made = f"`{numbers['command']}` · {', '.join(numbers['hardware'])}; commit {', '.join(numbers['commits'])}"
    return "\n".join([*lines, " ".join([*numbers["notes"], *more]), "", made, ""])
