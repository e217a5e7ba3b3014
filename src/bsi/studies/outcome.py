"""A finished study as files: figure.png, figure.svg, numbers.json and numbers.csv, with the command and the commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bsi.studies import figures
from bsi.studies.estimates import Estimate
from bsi.studies.job import Bound, Measure, Profile, Quality, Reconstruction, describe, name_of, network_name, title
from bsi.studies.report import Report, Study
from bsi.studies.scale import Scale
from bsi.studies.store import Result, Store
from bsi.training.files import write_json, write_text

__all__ = ["line", "write_outcome"]


def line(job: Measure, result: Result) -> str:
    """What was measured, in a few words."""
    values = result.values
    match job:
        case Bound():
            return f"{Estimate(values['bits_per_dim'], values['monte_carlo_error'])} bits/dim"
        case Reconstruction():
            both = zip(values["factors"], values["reconstruction"], strict=True)
            return ", ".join(f"{bits:.5f} bits/dim at {factor:g} alpha_M" for factor, bits in both)
        case Profile():
            error = result.arrays["error"].mean(1)
            return f"|x - x_hat|^2 from {error[0]:.3g} to {error[-1]:.3g}"
        case Quality():
            return f"{values['metric']} {Estimate(values['distance'], values['error'])}"


def write_outcome(study: Study, scale: Scale, store: Store, about: Mapping[str, Any]) -> Path:
    """Report on a study whose measurements are all there, and write everything that is to be seen of it."""
    report, measures = study.report(scale, store), study.measures(scale)
    folder = store.results(study.name, scale.name)
    folder.mkdir(parents=True, exist_ok=True)
    with figures.style():
        figures.save(report.draw(), folder)
    write_text(folder / "numbers.csv", "\n".join(table.csv() for table in report.tables))
    write_json(folder / "numbers.json", record(study, scale, report, measures, store, about))
    for claim in report.claims:
        print(f"{study.name}: {claim}", flush=True)
    print(folder, flush=True)
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
        "command": f"bsi study {study.name} --scale {scale.name} --out FOLDER",
        "claims": [
            {"statement": claim.statement, "verdict": claim.verdict, "because": claim.because}
            for claim in report.claims
        ],
        "one_seed": _one_seed(measures),
        "notes": list(report.notes),
        "tables": [
            {"name": table.name, "markdown": table.markdown(), "rows": table.records()} for table in report.tables
        ],
        "networks": networks,
        "measurements": {name_of(job): title(job) for job in measures},
        "about": dict(about),
    }


def _one_seed(measures: list[Measure]) -> bool:
    """Whether some network was trained from one seed alone: then errors do not say what training anew would change."""
    seeds: dict[str, set[int]] = {}
    for job in measures:
        seeds.setdefault(network_name(replace(job.network, seed=0)), set()).add(job.network.seed)
    return any(len(each) == 1 for each in seeds.values())
