"""Plan and run studies: train each network, measure it, and write the outcomes and docs/results.md.

A job is done if its file exists, so a study resumes when the same command is run again. With a time limit, training
and drawing save what they have and stop; any other job starts only if its estimated time is left. One process at a
time works in a folder.

NAME-SCALE/figure.png, numbers.json            what a study writes
docs/results/NAME-SCALE.png, NAME-SCALE.json   copies of the figure and the numbers
docs/results/NAME-SCALE.txt                    a remark, written by hand, if there is one
docs/results/introduction.txt                  the beginning of the page, written by hand
docs/results.md                                generated from these by `page`; a test compares them
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from bsi import __version__
from bsi.errors import UsageError, extra, unknown
from bsi.evaluation.runs import COMPILED, open_run, speed_up
from bsi.io import write_json, write_text
from bsi.methods import METHODS
from bsi.model import Model
from bsi.progress import log
from bsi.recipe import Recipe, changes
from bsi.recipes import named_recipe
from bsi.runtime.distributed import Place, World, find_place, pick_device
from bsi.runtime.export import export, read_trained
from bsi.runtime.run_folder import RunFolder, Value, read_journal
from bsi.studies import ablations, bounds, comparison, illustration, outcome  # noqa: F401  studies register themselves
from bsi.studies.measure import (
    Bound,
    Job,
    Quality,
    Store,
    Training,
    check_network,
    describe,
    installed_networks,
    network_name,
)
from bsi.studies.outcome import STUDIES, Results, Study
from bsi.studies.scale import SCALES, Scale
from bsi.training import train as trainer
from bsi.training.lock import hold


def named_studies(name: str, scale: Scale) -> list[Study]:
    """The study of that name, or all studies that run at the scale."""
    if name == "all":
        return [study for study in STUDIES.values() if study.runs_at(scale)]
    if name not in STUDIES:
        raise unknown("study", name, [*STUDIES, "all"])
    if not STUDIES[name].runs_at(scale):
        allowed = ", ".join(scale.studies or ())
        raise UsageError(f"{name} does not run at the scale {scale.name}, which is for {allowed}. Use another --scale.")
    return [STUDIES[name]]


@dataclass(frozen=True)
class Planned:
    """A job and the first study that needs it. A training is also done if no missing result needs its network."""

    job: Job
    study: str
    done: bool

    def record(self, store: Store) -> dict[str, Any]:
        """For JSON, with the estimated minutes, and the values that were measured."""
        values = dict(store.read(self.job).values) if self.done and not isinstance(self.job, Training) else None
        minutes = self.job.seconds(store.scale) / 60
        return {"study": self.study, "job": self.job.title(), "minutes": minutes, "done": self.done, "values": values}


def plan(studies: Sequence[Study], store: Store) -> list[Planned]:
    """All jobs of the studies, each once: the networks seed by seed, each trained and then measured."""
    planned: dict[str, Planned] = {}
    wanted = {study.name: study.measurements(store.scale) for study in studies}
    unfinished = {network_name(job.network) for jobs in wanted.values() for job in jobs if not store.done(job)}
    for study, jobs in wanted.items():
        by_network: dict[str, list[Job]] = {}
        for job in sorted(jobs, key=lambda job: job.network.seed):
            by_network.setdefault(network_name(job.network), [Training(job.network)]).append(job)
        for network, group in by_network.items():
            for job in group:
                done = store.done(job) or network not in unfinished
                planned.setdefault(job.name, Planned(job, study, done))
    return list(planned.values())


def plan_text(planned: Sequence[Planned], store: Store) -> str:
    """One line for each job: its estimated minutes, or the values that were measured. At the paper's scale also the
    command that trains each network on several GPUs."""

    def duration(minutes: float) -> str:
        return f"{minutes:.2f} min" if minutes < 300 else f"{minutes / 60:.0f} h"

    lines, left, networks = [f"{store.scale.name}: {store.scale.summary}"], list[float](), 0
    for p in planned:
        record = p.record(store)
        found = f" = {store.read(p.job)}" if record["values"] else ""
        lines.append(f"{'done' if p.done else duration(record['minutes']):>12}  {p.study:<19} {record['job']}{found}")
        if p.done:
            continue
        left.append(record["minutes"])
        networks += isinstance(p.job, Training)
        if store.scale.name == "paper" and isinstance(p.job, Training):
            lines.append(f"{'':34}{train_command(p.job.network, store)}")
    last = f"{len(left)} of {len(planned)} jobs left, {networks} networks to train: {duration(math.fsum(left))}"
    return "\n".join([*lines, last])


def train_command(recipe: Recipe, store: Store) -> str:
    """`bsi train` with every setting that differs from the recipe of that name with --steps."""
    method = next(name for name, spec in METHODS.items() if isinstance(recipe.method, spec))
    named = named_recipe(recipe.name, method)
    found = changes(replace(named.shortened(recipe.steps), steps=named.steps), recipe)  # --steps is an option too
    options = [_option(change.name.replace("_", "-"), change.after) for change in found]
    words = ["torchrun --nproc-per-node 4 -m bsi train", recipe.name, "--method", method, *options]
    return " ".join([*words, "--out", str(store.network(recipe))])


def _option(name: str, value: object) -> str:
    """A setting on the command line. A switch has no value: --a.b, or --a.no-b."""
    group, dot, last = name.rpartition(".")
    return f"--{name} {value}" if not isinstance(value, bool) else f"--{group}{dot}{'' if value else 'no-'}{last}"


def run(
    studies: Sequence[Study], results: Results, minutes: float | None = None, device: str | None = None
) -> list[Path]:
    """Run the remaining jobs, write the outcome of each study, and return the folders of the outcomes.

    Raises:
        Preempted: The time limit is reached; the same call resumes.
    """
    if find_place(os.environ).size > 1:
        paper = results.scale.name == "paper"
        hint = "Train its networks with the commands that --plan prints" if paper else "Drop torchrun"
        raise UsageError(f"a study runs in one process, got a process group. {hint} and run the study on one GPU.")
    if minutes is not None:
        results = replace(results, deadline=time.monotonic() + 60 * minutes)
    where, written = pick_device(device, 0), []
    results.folder.mkdir(parents=True, exist_ok=True)
    with hold(results.folder, log):
        for study in studies:
            todo = [p for p in plan([study], results) if not p.done]
            for i, planned in enumerate(todo):
                log(f"{study.name}, {len(todo) - i} jobs left: {planned.job.title()}")
                do(planned.job, results, where)
            written.append(write_outcome(study, results, _about(where)))
    load_network.cache_clear()
    return written


def do(job: Job, store: Store, device: torch.device) -> None:
    """Do a job and store its result."""
    title, started, seconds = job.title(), time.monotonic(), job.seconds(store.scale)
    # Training and drawing save what they have, so they need only enough time to make progress.
    needed = min(seconds, 60.0) if isinstance(job, Training | Quality) else seconds
    store.check_time(f"next is {title} ({seconds / 60:.1f} min)", needed)
    if isinstance(job, Training):
        load_network.cache_clear()  # frees its memory
        found = train(job.network, store, device)
    else:
        model = load_network(store.file(Training(job.network)), job.network, device)
        result = job.measure(model, store)
        about = {**_about(device), "seconds": round(time.monotonic() - started, 1)}
        store.write(job, replace(result, about=about))
        found = str(result)
    print(f"{title}: {found} ({time.monotonic() - started:.0f} s)", flush=True)


def train(recipe: Recipe, store: Store, device: torch.device) -> str:
    """Train a network, or resume, and keep its moving average in one file; returns a summary.

    An installed network with the same recipe is taken as it is.

    `bsi train --out` into the same folder gives the same result, on any number of GPUs.
    """

    def stop_at_deadline(record: Mapping[str, Value]) -> None:
        if store.left_s <= 0:
            signal.raise_signal(signal.SIGTERM)  # like a scheduler: the trainer saves and stops

    out, sinks = store.network(recipe), [stop_at_deadline]
    if name := installed_networks().get(network_name(recipe)):
        out.mkdir(parents=True, exist_ok=True)
        export(name, store.file(Training(recipe)))
        return f"taken from the installed network {name}"
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
    """$BSI_COMMIT, or the commit of this code, marked if the code was changed since."""
    if given := os.environ.get("BSI_COMMIT"):
        return given
    command = ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty= with changes"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, text=True).strip()
    return "unknown"


def write_outcome(study: Study, results: Results, about: Mapping[str, Any]) -> Path:
    """Write the outcome of a study whose measurements are complete; returns its folder."""
    scale, jobs = results.scale, study.measurements(results.scale)
    folder = results.folder / f"{study.name}-{scale.name}"
    with extra("figures", "drawing a figure"):
        import matplotlib
    with matplotlib.rc_context(outcome.STYLE):
        found = study.report(results)
        folder.mkdir(parents=True, exist_ok=True)
        found.figure.savefig(folder / "figure.png", dpi=150, metadata={"Software": None})
    made = [results.read(job).about for job in jobs] or [about]
    # How precisely bounds and distances were estimated, each once.
    protocol = [
        f"bits/dim: {'the test set' if job.images is None else f'the first {job.images:,} test images'}, "
        f"{job.levels} levels and {job.recon} reconstructions of each."
        if isinstance(job, Bound)
        else f'{job.metric}: {job.num:,} samples against the test set if not stated; "at k" is in k steps.'
        for job in jobs
        if isinstance(job, Bound | Quality)
    ]
    numbers = {
        "study": study.name,
        "scale": scale.name,
        "hardware": sorted({str(each["device"]) for each in made}),
        "commits": sorted({str(each["commit"]) for each in made}),
        "command": study.command(scale),
        "claims": [asdict(claim) for claim in found.claims],
        "seeds": len({job.network.seed for job in jobs}),
        "notes": [*found.notes, *dict.fromkeys(protocol)],
        "tables": [
            {"name": name, "markdown": outcome.markdown(rows), "rows": outcome.records(rows)}
            for name, rows in found.tables.items()
        ],
        "networks": {network_name(job.network): describe(job.network) for job in jobs},
        "measurements": {job.name: job.title() for job in jobs},
        "about": dict(about),
    }
    write_json(folder / "numbers.json", numbers)
    for claim in found.claims:
        print(f"{claim.statement}: {claim.verdict}, {_seeds(numbers)} ({claim.because}).", flush=True)
    print(folder, flush=True)
    return folder


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
    """The page, from the published results: the introduction, all claims, and a section for each study."""
    published, missing = list[dict[str, Any]](), []
    for scale in (scale for scale in SCALES.values() if scale.name != "smoke"):
        paths = {name: results / f"{name}-{scale.name}.json" for name, study in STUDIES.items() if study.runs_at(scale)}
        published += [json.loads(path.read_text("utf-8")) for path in paths.values() if path.is_file()]
        if lacking := [name for name, path in paths.items() if not path.is_file()]:
            missing.append(f"{scale.name}: {', '.join(lacking)}")
    claims = ["| study | claim | scale, seeds | verdict | numbers |", "|---|---|---|---|---|"]
    for numbers in published:
        where = f"[{numbers['study']}](#{numbers['study']}-{numbers['scale']})"
        for claim in numbers["claims"]:
            scale_and_seeds = f"{numbers['scale']}, {_seeds(numbers)}"
            cells = (where, claim["statement"], scale_and_seeds, f"**{claim['verdict']}**", claim["because"])
            claims.append(f"| {' | '.join(cells)} |")
    introduction = results / "introduction.txt"
    head = introduction.read_text("utf-8") if introduction.is_file() else "# Results\n"
    table = "\n".join([*claims, "", f"Not yet run: {'; '.join(missing)}.", ""])
    return "\n".join([head, table, *(_section(numbers, results) for numbers in published)])


def _seeds(numbers: Mapping[str, Any]) -> str:
    return {0: "nothing trained", 1: "1 seed"}.get(numbers["seeds"], f"{numbers['seeds']} seeds")


def _section(numbers: Mapping[str, Any], results: Path) -> str:
    """One screen: the figure, the first table, and how it was made. The other tables are in the JSON file."""
    study, (table, *others) = STUDIES[numbers["study"]], numbers["tables"]
    name = f"{study.name}-{numbers['scale']}"
    where = "New, not in the paper" if study.paper == "new" else f"The paper's {study.paper}"
    parts = [f"## {study.name}, {numbers['scale']}", f"{where}: {study.shows}.", f"![{name}](results/{name}.png)"]
    if (remark := results / f"{name}.txt").is_file():
        parts.append(f"*Remark.* {remark.read_text('utf-8').strip()}")
    more = [f"[The other tables](results/{name}.json): {', '.join(each['name'] for each in others)}."] if others else []
    parts += [
        f"{table['name'][0].upper()}{table['name'][1:]}:",
        table["markdown"],
        " ".join([*numbers["notes"], *more]),
    ]
    made = f"{', '.join(numbers['hardware'])}; commit {', '.join(numbers['commits'])}"
    return "\n\n".join([*parts, f"`{numbers['command']}` · {made}"]) + "\n"
