"""A study as files: figure.png, figure.svg, numbers.json and numbers.csv, with the command and the commit.

A study of which some measurements are missing has what there is so far: one table, without a figure or a verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bsi.io import write_json, write_text
from bsi.studies import figures
from bsi.studies.estimates import Estimate
from bsi.studies.job import (
    Bound,
    Measure,
    Profile,
    Quality,
    Reconstruction,
    describe,
    name_of,
    network_name,
    quantity,
    title,
)
from bsi.studies.report import Cell, Report, Study, Table, as_csv
from bsi.studies.scale import Scale
from bsi.studies.store import Result, Store

__all__ = ["line", "write_outcome"]


def line(job: Measure, result: Result) -> str:
    """What was measured, in a few words."""
    match job:
        case Bound():
            return f"{measured(job, result)} bits/dim"
        case Quality():
            return f"{result.values['metric']} {measured(job, result)}"
        case _:
            return str(measured(job, result))


def measured(job: Measure, result: Result) -> Estimate | str:
    """A number with its error, where what was measured is one."""
    values = result.values
    match job:
        case Bound():
            return Estimate(values["bits_per_dim"], values["monte_carlo_error"])
        case Quality():
            return Estimate(values["distance"], values["error"])
        case Reconstruction():
            both = zip(values["factors"], values["reconstruction"], strict=True)
            return ", ".join(f"{bits:.5f} bits/dim at {factor:g} alpha_M" for factor, bits in both)
        case Profile():
            error = result.arrays["error"].mean(1)
            return f"mean squared error from {error[0]:.3g} to {error[-1]:.3g}"


def so_far(wanted: Sequence[Measure], store: Store) -> Table:
    """What there is of a study that is not finished, networks by quantities; what is to come is told from what nobody
    asked for, an empty cell."""
    columns = list(dict.fromkeys(quantity(job) for job in wanted))
    rows: dict[str, list[Cell]] = {}
    for job in wanted:
        row = rows.setdefault(network_name(job.network), [describe(job.network), *(None for _ in columns)])
        row[1 + columns.index(quantity(job))] = measured(job, store.read(job)) if store.done(job) else "missing"
    return Table("measured so far", ("network", *columns), tuple(tuple(row) for row in rows.values()))


def write_outcome(study: Study, scale: Scale, store: Store, about: Mapping[str, Any]) -> Path | None:
    """Report on a study, or on what there is of it, and write what is to be seen; None if there is nothing."""
    wanted = study.measures(scale)
    jobs = [job for job in wanted if store.done(job)]
    if wanted and not jobs:
        return None
    finished = len(jobs) == len(wanted)
    report = study.report(scale, store) if finished else Report((so_far(wanted, store),), claims=(), draw=None)
    folder = store.results(study.name, scale.name)
    folder.mkdir(parents=True, exist_ok=True)
    if report.draw is None:
        figures.remove(folder)  # of when it was finished, with fewer measurements
    else:
        with figures.style():
            figures.save(report.draw(), folder)
    write_text(folder / "numbers.csv", as_csv(report.tables))
    left = len(wanted) - len(jobs)
    write_json(folder / "numbers.json", {**record(study, scale, report, jobs, store, about), "left": left})
    for claim in report.claims:
        print(f"{study.name}: {claim.said(_seeds(report, jobs))}", flush=True)
    print(folder if finished else f"{folder}: {len(jobs)} of {len(wanted)} measurements so far", flush=True)
    return folder


def record(
    study: Study, scale: Scale, report: Report, measures: list[Measure], store: Store, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything in one JSON object: what is published is made of this alone."""
    made = [store.about(job) for job in measures] or [about]
    networks = {network_name(job.network): describe(job.network) for job in measures}
    return {
        "study": study.name,
        "scale": scale.name,
        "hardware": sorted({str(each["device"]) for each in made}),
        "commits": sorted({str(each["commit"]) for each in made}),
        "command": study.command(scale),
        "commands": sorted({str(each["command"]) for each in made}),
        "claims": [
            {"statement": claim.statement, "verdict": claim.verdict, "because": claim.because}
            for claim in report.claims
        ],
        "seeds": _seeds(report, measures),
        "notes": [*report.notes, *_how(measures)],
        "tables": [
            {"name": table.name, "markdown": table.markdown(), "rows": table.records()} for table in report.tables
        ],
        "networks": networks,
        "measurements": {name_of(job): title(job) for job in measures},
        "about": dict(about),
    }


def _how(measures: list[Measure]) -> list[str]:
    """How closely bounds and distances were estimated, whatever the study."""
    found: dict[str, None] = {}  # in order, each once
    for job in measures:
        if isinstance(job, Bound):
            levels = f"{job.levels} levels and {job.recon} reconstructions"
            found[f"bits/dim: the whole test set, {levels} of each image."] = None
        elif isinstance(job, Quality):
            at_k = '"at k" is in k steps, of the paper\'s sampler if no other is named'
            found[f"{job.metric}: {job.num:,} samples against the test set; {at_k}."] = None
    return list(found)


def _seeds(report: Report, measures: list[Measure]) -> int:
    """From how many seeds each network was trained that claims are about, at least; 0 if there is none."""
    if report.seeds is not None:
        return report.seeds
    seeds: dict[str, set[int]] = {}
    for job in measures:
        seeds.setdefault(network_name(replace(job.network, seed=0)), set()).add(job.network.seed)
    return min((len(each) for each in seeds.values()), default=0)
