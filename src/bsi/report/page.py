"""The document: sections in the order a reader asks. What came out, what it looks like, how it got there, from what.

All text that comes from files is escaped; there is no script, and nothing is loaded from anywhere.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

from bsi import __version__
from bsi.errors import UsageError
from bsi.progress import readable_seconds
from bsi.report.charts import Axis, Point, Series, chart
from bsi.report.folder import Run, read_run
from bsi.report.measured import Measured, measure
from bsi.training.distributed import pick_device
from bsi.training.files import write_text
from bsi.training.plain import flat, to_plain

__all__ = ["write_report"]

MOST_PICTURES = 6


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
    if not target.parent.is_dir():
        raise UsageError(f"there is no folder {target.parent} to write {target.name} into")
    asked = (
        measure(path, found.recipe, pick_device(device, 0), backbone)
        if ask_model
        else Measured(None, None, None, (), ["the model was not asked, as was wished"])
    )
    write_text(target, document(found, asked))
    return target


def document(run: Run, asked: Measured) -> str:
    sections = [
        _section("A belief sharpens", _animation(asked)),
        _section("Likelihood", _likelihood(run, asked)),
        _section("Samples over training", _pictures(run)),
        _section("Training", _curves(run)),
        _section("Sample quality", _quality(run)),
        _section("Recipe", _recipe(run)),
        _section("Where and with what", _environment(run)),
    ]
    missing = "".join(f"<li>{escape(line)}</li>" for line in asked.missing)
    style = (resources.files("bsi.report") / "report.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(run.path.resolve().name)}: a report</title><style>{style}</style></head><body>"
        f"{_header(run, asked)}{''.join(sections)}"
        + (f'<section><h2>Left out</h2><ul class="note">{missing}</ul></section>' if missing else "")
        + f"<footer>bsi {__version__}, {time.strftime('%Y-%m-%d %H:%M')}</footer></body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _note(text: str) -> str:
    return f'<p class="note">{text}</p>'


def _table(rows: Sequence[Sequence[str]], head: Sequence[str] = (), kind: str = "") -> str:
    """Cells are HTML already; the first of a row is its name."""
    top = f"<thead><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr></thead>" if head else ""
    body = "".join(f"<tr><th>{row[0]}</th>{''.join(f'<td>{cell}</td>' for cell in row[1:])}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'


def _header(run: Run, asked: Measured) -> str:
    recipe, status = run.recipe, run.status
    method = str(to_plain(recipe.method).get("kind", "")).upper()
    state = str(status.get("state", "unknown"))
    step = int(status.get("step", 0) or 0)
    figures = [("steps", f"{step:,}" + ("" if step == recipe.steps else f" of {recipe.steps:,}"))]
    best = _bits(run, asked)
    if best is not None:
        figures.insert(0, ("bits per dimension", best))
    if asked.parameters is not None:
        figures.append(("parameters", f"{asked.parameters:,}"))
    rates = [rate for _, rate in run.numbers("train", "images_per_s")]
    if rates:
        figures.append(("samples per second", f"{median(rates):,.0f}"))
    times = [stamp for _, stamp in run.numbers("train", "time")]
    if len(times) > 1:
        figures.append(("first to last entry", readable_seconds(times[-1] - times[0])))
    shown = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures)
    return (
        f"<header><h1>{escape(run.path.resolve().name)}</h1>"
        f'<p class="what">{escape(recipe.name)} · {method} on {escape(recipe.data.name)} · '
        f'<span class="state {escape(state)}">{escape(state)}</span></p><dl class="figures">{shown}</dl></header>'
    )


def _bits(run: Run, asked: Measured) -> str | None:
    """The best-known bound: of `bsi eval`, of this report, or of the trainer's last look."""
    for record in reversed(run.evaluations):
        if isinstance(record.get("bits_per_dim"), float):
            return _plus_minus(record["bits_per_dim"], record.get("monte_carlo_error"))
    if asked.bound is not None:
        value = asked.bound.bits_per_dim
        return _plus_minus(value, asked.bound.monte_carlo_error)
    looks = run.events("evaluate")
    if looks and isinstance(looks[-1].get("bits_per_dim"), float):
        return _plus_minus(float(looks[-1]["bits_per_dim"]), looks[-1].get("error"))
    return None


def _plus_minus(value: float, error: object) -> str:
    known = isinstance(error, float) and math.isfinite(error)
    return f"{value:.3f}" + (f' <span class="error">± {error:.3f}</span>' if known else "")


def _animation(asked: Measured) -> str:
    if asked.animation is None:
        return ""
    data = base64.b64encode(asked.animation).decode("ascii")
    return (
        f'<img class="animation" alt="Belief mean, prediction and measurement, step by step" '
        f'src="data:image/webp;base64,{data}">'
        + _note(
            'The belief about a sample is a Gaussian with mean <i class="belief">μ</i>. The network predicts the '
            'sample, <i class="predict">x̂</i>; a noisy measurement <i class="measure">y</i> of the prediction sharpens '
            "the belief."
        )
    )


def _likelihood(run: Run, asked: Measured) -> str:
    parts = []
    if asked.bound is not None:
        bound, unit = asked.bound, asked.bound.n * math.log(2)
        terms = {"reconstruction": bound.reconstruction, "measurement": bound.measurement, "prior": bound.prior}
        rows = [(name, f"{float(nats.mean()) / unit:.4f}") for name, nats in terms.items()]
        if bound.log_determinant:
            rows.append(("change of units", f"{bound.log_determinant / math.log(2):.4f}"))
        rows.append(("<b>bits per dimension</b>", f"<b>{bound.bits_per_dim:.4f}</b>"))
        rows.append(("± of the estimate", f"{bound.monte_carlo_error:.4f}"))
        data_error = f"{bound.data_error:.4f}" if bound.data_error > 0 else "too small to tell"
        rows.append(("± of having these samples", data_error))
        parts.append(
            f"<div>{_table(rows, kind='numbers')}"
            + _note(
                f"An upper bound for the first {len(bound.nats):,} test samples, by the EMA. More evaluations shrink "
                "the first error, more test data the second."
            )
            + "</div>"
        )
    if asked.by_level:
        drawn = chart(
            "Where the bits are",
            Axis("precision", log=True),
            Axis("bits per dimension, for each factor of ten", low=0.0),
            [Series("measurement term", asked.by_level, "belief", dots=True, filled=True)],
        )
        parts.append(
            f"<figure>{drawn}<figcaption>Where the bits are: the area is the measurement term.</figcaption></figure>"
        )
    evaluated = [record for record in run.evaluations if "bits_per_dim" in record]
    if evaluated:
        parts.append(f"<div>{_records(evaluated)}</div>")
    return f'<div class="pair">{"".join(parts)}</div>' if parts else ""


def _records(records: Sequence[Mapping[str, Any]]) -> str:
    """Results as `bsi eval` left them, its own names and numbers."""
    names = list(dict.fromkeys(name for record in records for name, value in record.items() if _short(value)))
    rows = [[escape(name), *(escape(_short(record.get(name)) or "") for record in records)] for name in names]
    return _table(rows, kind="numbers") if rows else ""


def _short(value: object) -> str | None:
    if isinstance(value, bool | int | str):
        return str(value)[:80]
    return f"{value:.5g}" if isinstance(value, float) else None


def _curves(run: Run) -> str:
    bits = [Point(step, value) for step, value in run.numbers("train", "bits_per_dim")]
    looks = dict(run.numbers("evaluate", "bits_per_dim"))
    errors = dict(run.numbers("evaluate", "error"))
    tested = [Point(step, value, errors.get(step, 0.0)) for step, value in looks.items()]
    level = sorted(p.y for p in [*bits, *tested])
    # the first steps are far above the rest: the axis follows what comes after them
    high = (
        1.05 * max(level[int(0.95 * len(level))], max((p.y for p in tested), default=0.0)) if len(level) > 20 else None
    )
    steps = Axis("step", low=0.0)
    loss = [Series("training", bits, "soft"), Series("test, by the EMA", tested, "belief", dots=True)]
    drawn = {
        "Loss": chart("Loss", steps, Axis("bits per dimension", high=high), loss),
        "Learning rate": chart("Learning rate", steps, Axis("", low=0.0), [_series(run, "lr", "predict")]),
        "Samples per second": chart("Rate", steps, Axis("", low=0.0), [_series(run, "images_per_s", "soft")]),
        "Norm of the gradient": chart("Gradient", steps, Axis("", log=True), [_series(run, "grad_norm", "measure")]),
    }
    figures = [f"<figure><figcaption><b>{name}</b></figcaption>{svg}</figure>" for name, svg in drawn.items() if svg]
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


def _series(run: Run, name: str, role: Any) -> Series:
    return Series(name, [Point(step, value) for step, value in run.numbers("train", name)], role)


def _pictures(run: Run) -> str:
    """The last grid, and some before it, spread over the run."""
    count = len(run.pictures)
    if not count:
        return ""
    picked = (
        sorted({round(i * (count - 1) / max(1, MOST_PICTURES - 1)) for i in range(MOST_PICTURES)}) if count > 1 else [0]
    )
    figures = [
        f'<figure><img alt="Samples at step {run.pictures[i].step}" '
        f'src="data:image/png;base64,{base64.b64encode(run.pictures[i].png).decode("ascii")}">'
        f"<figcaption>step {run.pictures[i].step:,}</figcaption></figure>"
        for i in picked
    ]
    return f'<div class="grids">{"".join(figures)}</div>' + _note("Sample <i>i</i> has the same seed in every grid.")


def _quality(run: Run) -> str:
    """Distances against evaluations of the network, by solver: what `bsi eval` stored with its generation."""
    found: dict[str, list[Point]] = {}
    metric = "FID"
    for record in run.evaluations:
        generation = record.get("generation")
        if isinstance(generation, dict) and isinstance(record.get("value"), float):
            metric = str(record.get("metric", metric))
            point = Point(float(generation.get("evaluations", 0)), float(record["value"]))
            found.setdefault(str(generation.get("solver", "")), []).append(point)
    if not found:
        return ""
    roles: list[Any] = ["belief", "predict", "measure", "soft"]
    series = [
        Series(name, sorted(points, key=lambda p: p.x), roles[i % len(roles)], dots=True)
        for i, (name, points) in enumerate(sorted(found.items()))
    ]
    drawn = chart(f"{metric} against evaluations", Axis("evaluations", log=True), Axis(metric), series)
    table = _records([record for record in run.evaluations if "metric" in record])
    return f'<div class="pair"><figure>{drawn}</figure><div>{table}</div></div>'


def _recipe(run: Run) -> str:
    changed = [line.partition(": ") for line in run.changed]
    if changed:
        rows = [[f"<code>{escape(name)}</code>", escape(rest)] for name, _, rest in changed]
        differs = _note(f"Differs from <b>{escape(run.recipe.name)}</b> in:") + _table(rows)
    else:
        differs = _note(f"<b>{escape(run.recipe.name)}</b>, as it is.")
    rows = [[f"<code>{escape(name)}</code>", escape(str(value))] for name, value in flat(run.recipe).items()]
    network = _note(f"Network: <code>{escape(run.network)}</code>") if run.network else ""
    command = f"<pre>{escape(run.command)}</pre>" if run.command else ""
    return f"{differs}{command}{network}<details><summary>All values</summary>{_table(rows)}</details>"


def _environment(run: Run) -> str:
    facts = {name.removeprefix("variables."): escape(value) for name, value in run.environment.items()}
    if run.data_version:
        facts["data"] = f"<code>{escape(run.data_version[:16])}…</code>"
    shown = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    hashes = [[escape(h.file), f"{h.bytes:,}", f"<code>{escape(h.sha256)}</code>"] for h in run.hashes]
    table = _table(hashes, ("file", "bytes", "SHA-256"), "hashes") if hashes else ""
    return (f'<dl class="facts">{shown}</dl>' if shown else "") + table
