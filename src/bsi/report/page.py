"""The document: sections in the order a reader asks. What came out, what it looks like, how it got there, from what.

All text that comes from files is escaped; there is no script, and nothing is loaded from anywhere.
"""

from __future__ import annotations

import time
from html import escape
from importlib import resources
from pathlib import Path
from statistics import median

from torch import nn

from bsi import __version__
from bsi.io import atomic, check_writable
from bsi.progress import readable_seconds
from bsi.report import sections
from bsi.report.folder import Run, read_run
from bsi.report.measured import Measured, measure
from bsi.runtime.distributed import pick_device
from bsi.runtime.serialization import to_plain

__all__ = ["write_report"]


def write_report(
    run: str | Path,
    out: str | Path | None = None,
    backbone: nn.Module | None = None,
    device: str | None = None,
    ask_model: bool = True,
) -> Path:
    """Write a run's report, by default `report.html` in its folder, and return where it is.

    `backbone` is your own network, if the run was trained with it; without `ask_model` only files are read.
    """
    path = Path(run)
    found = read_run(path)
    target = path / "report.html" if out is None else Path(out)
    check_writable(target, "--out")
    known = any(record.get("step") == found.status.get("step") for record in found.bounds)
    asked = (
        measure(path, found.recipe, pick_device(device, 0), backbone, bound_known=known)
        if ask_model
        else Measured(None, None, None, (), ["the model was not asked, as was wished"])
    )
    with atomic(target, "--out") as temporary:
        temporary.write_text(document(found, asked), "utf-8")
    return target


def document(run: Run, asked: Measured) -> str:
    parts = [
        _section("A belief sharpens", sections.animation(asked)),
        _section("Likelihood", sections.likelihood(run, asked)),
        _section("Samples over training", sections.pictures(run)),
        _section("Training", sections.curves(run)),
        _section("Sample quality", sections.quality(run)),
        _section("Recipe", sections.recipe(run)),
        _section("Where and with what", sections.environment(run)),
    ]
    missing = "".join(f"<li>{escape(line)}</li>" for line in asked.missing)
    style = (resources.files("bsi.report") / "report.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(run.path.resolve().name)}: a report</title><style>{style}</style></head><body>"
        f"{_header(run, asked)}{''.join(parts)}"
        + (f'<section><h2>Left out</h2><ul class="note">{missing}</ul></section>' if missing else "")
        + f"<footer>bsi {__version__}, {time.strftime('%Y-%m-%d %H:%M')}</footer></body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _header(run: Run, asked: Measured) -> str:
    recipe, status = run.recipe, run.status
    method = str(to_plain(recipe.method).get("kind", "")).upper()
    state = str(status.get("state", "unknown"))
    step = int(status.get("step", 0) or 0)
    figures = [("steps", f"{step:,}" + ("" if step == recipe.steps else f" of {recipe.steps:,}"))]
    best = sections.Terms.best(run, asked)
    if best is not None:
        error = best.monte_carlo_error
        shown = f"{best.total:.3f}" + ("" if error is None else f' <span class="error">± {error:.3f}</span>')
        figures.insert(0, ("bits per dimension", shown))
    if asked.parameters is not None:
        figures.append(("parameters", f"{asked.parameters:,}"))
    rates = [rate for _, rate in run.numbers("train", "images_per_s")]
    if rates:
        figures.append(("samples per second", f"{median(rates):,.0f}"))
    times = [stamp for _, stamp in run.numbers("train", "time")]
    if len(times) > 1:
        figures.append(("first to last entry", readable_seconds(times[-1] - times[0])))
    numbers = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures)
    return (
        f"<header><h1>{escape(run.path.resolve().name)}</h1>"
        f'<p class="what">{escape(recipe.name)} · {method} on {escape(recipe.data.name)} · '
        f'<span class="state {escape(state)}">{escape(state)}</span></p><dl class="figures">{numbers}</dl></header>'
    )
