"""The report as one HTML file: result, samples, training, quality, recipe, environment.

Text from files is escaped. There is no script, and nothing is loaded when the file is opened. A section without content
is left out.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

from bsi import __version__
from bsi.elbo import Elbo
from bsi.io import atomic, check_writable
from bsi.progress import readable_seconds
from bsi.report.charts import Axis, Point, Role, Series, chart
from bsi.report.contents import Measured, Run, measure, number, read_run
from bsi.runtime.baselines import baselines_text
from bsi.runtime.distributed import pick_device
from bsi.runtime.serialization import flat, to_plain

TERMS = ("reconstruction", "measurement", "prior")
BOUND_COLUMNS = ("bits_per_dim", "monte_carlo_error", "data_error", "split", "images", "finite_k", "proposal", "step")
QUALITY_COLUMNS = ("metric", "value", "error", "guidance", "n", "reference", "reference_split", "reference_n", "step")


def write_report(
    run: str | Path,
    out: str | Path | None = None,
    backbone: nn.Module | None = None,
    device: str | None = None,
    ask_model: bool = True,
) -> Path:
    """Write the report of a run and return its path.

    Args:
        run: The run folder.
        out: The file to write, by default `report.html` in the run folder.
        backbone: Your own network, if the run was trained with one.
        device: Where to evaluate the model, by default a GPU if there is one.
        ask_model: Load and evaluate the model; otherwise only files are read.
    """
    path = Path(run)
    found = read_run(path)
    target = path / "report.html" if out is None else Path(out)
    check_writable(target, "--out")
    if ask_model:
        known = any(record.get("step") == found.step for record in found.bounds)
        measured = measure(found, pick_device(device, 0), backbone, bound_known=known)
    else:
        measured = Measured(None, None, None, (), ["the model was not evaluated, as requested by --no-model"])
    with atomic(target, "--out") as temporary:
        temporary.write_text(document(found, measured), "utf-8")
    return target


def document(run: Run, measured: Measured) -> str:
    best = Terms.best(run, measured)
    sections = {
        "A belief sharpens": _animation(measured),
        "Likelihood": _likelihood(run, measured, best),
        "Samples over training": _pictures(run),
        "Training": _curves(run),
        "Sample quality": _quality(run),
        "Recipe": _recipe(run),
        "Environment and files": _environment(run),
        "Left out": f'<ul class="note">{"".join(f"<li>{escape(line)}</li>" for line in measured.missing)}</ul>'
        if measured.missing
        else "",
    }
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections.items() if content)
    style = (resources.files("bsi.report") / "report.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(run.path.resolve().name)}: a report</title><style>{style}</style></head><body>"
        f"{_header(run, measured, best)}{body}"
        f"<footer>bsi {__version__}, {time.strftime('%Y-%m-%d %H:%M')}</footer></body></html>\n"
    )


# ---- The bound -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Terms:
    """A bound in bits per dimension: its terms, its errors, and a sentence on its origin."""

    parts: Mapping[str, float]
    total: float
    monte_carlo_error: float | None
    data_error: float | None
    data_resolved: bool
    about: str

    @classmethod
    def best(cls, run: Run, measured: Measured) -> Terms | None:
        """The best known bound.

        In this order: the last one of `bsi eval` if it is of the last step, the one measured for this report, an
        earlier one of `bsi eval`, the last evaluation during training.
        """
        stored = run.bounds
        if stored and (measured.bound is None or stored[-1].get("step") == run.step):
            num, step = (escape(_short(stored[-1].get(name))) for name in ("images", "step"))
            about = f"By <code>bsi eval</code>: {num} test samples, at step {step}."
            return cls._from_record(stored[-1], ("monte_carlo_error", "data_error"), about)
        if measured.bound is not None:
            return cls._from_elbo(measured.bound)
        for record in reversed(run.events("evaluate")):
            if number(record.get("bits_per_dim")) is not None:
                about = f"The last evaluation during training, at step {_short(record['step'])}."
                return cls._from_record(record, ("error", "data_error"), about)
        return None

    @classmethod
    def _from_record(cls, record: Mapping[str, Any], errors: tuple[str, str], about: str) -> Terms:
        known = {name: number(record.get(name)) for name in TERMS}
        parts = {name: value for name, value in known.items() if value is not None}
        total = float(record["bits_per_dim"])
        units = number(record.get("change_of_units"))
        if units is None:  # a record of an older version: the difference to the sum, if all terms are known
            units = total - sum(parts.values()) if len(parts) == len(TERMS) else 0.0
        if abs(units) > 1e-6:
            parts["change of units"] = units
        monte_carlo, data = (number(record.get(name)) for name in errors)
        return cls(parts, total, monte_carlo, data, record.get("data_resolved") is not False, about)

    @classmethod
    def _from_elbo(cls, bound: Elbo) -> Terms:
        unit = bound.n * math.log(2)
        nats = {"reconstruction": bound.reconstruction, "measurement": bound.measurement, "prior": bound.prior}
        parts = {name: float(value.mean()) / unit for name, value in nats.items()}
        if bound.log_determinant:
            parts["change of units"] = bound.log_determinant / math.log(2)
        about = f"An upper bound for {len(bound.nats):,} test samples (a random subset if there are more), by the EMA."
        errors = bound.monte_carlo_error, bound.data_error
        return cls(parts, bound.bits_per_dim, *errors, bound.data_resolved, about)


def _header(run: Run, measured: Measured, best: Terms | None) -> str:
    recipe = run.recipe
    method = str(to_plain(recipe.method).get("kind", "")).upper()
    figures = []
    if best is not None:
        limit = "" if best.data_resolved else "at most "
        errors = {"Monte Carlo": ("", best.monte_carlo_error), "test set": (limit, best.data_error)}
        shown = f"{best.total:.3f}" + "".join(
            f' <span class="error">± {most}{error:.3f} ({name})</span>'
            for name, (most, error) in errors.items()
            if error is not None
        )
        figures.append(("bits per dimension", shown))
    figures.append(("steps", f"{run.step:,}" + ("" if run.step == recipe.steps else f" of {recipe.steps:,}")))
    if measured.parameters is not None:
        figures.append(("parameters", f"{measured.parameters:,}"))
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
        f'<span class="state {escape(run.state)}">{escape(run.state)}</span></p>'
        f'<dl class="figures">{numbers}</dl></header>'
    )


# ---- Sections --------------------------------------------------------------------------------------------------------


def _animation(measured: Measured) -> str:
    if measured.animation is None:
        return ""
    data = base64.b64encode(measured.animation).decode("ascii")
    return (
        f'<img class="animation" alt="Belief mean, prediction and measurement, step by step" '
        f'src="data:image/webp;base64,{data}">'
        + _note(
            'The belief about a sample is a Gaussian with mean <i class="belief">μ</i>. The network predicts the '
            'sample, <i class="predict">x̂</i>; a noisy measurement <i class="measure">y</i> of the prediction sharpens '
            "the belief."
        )
    )


def _likelihood(run: Run, measured: Measured, best: Terms | None) -> str:
    parts = []
    if best is not None:
        rows = [(name, f"{value:.4f}") for name, value in best.parts.items()]
        rows.append(("<b>bits per dimension</b>", f"<b>{best.total:.4f}</b>"))
        if best.monte_carlo_error is not None:
            rows.append(("± Monte Carlo", f"{best.monte_carlo_error:.4f}"))
        if best.data_error is not None:
            limit = "" if best.data_resolved else "at most "
            rows.append(("± choice of test samples", f"{limit}{best.data_error:.4f}"))
        if measured.baselines:
            rows.append(("for comparison", escape(baselines_text(measured.baselines))))
        errors = " More evaluations reduce the first error, more test samples the second."
        parts.append(f"<div>{_table(rows, kind='numbers')}{_note(best.about + errors)}</div>")
    if measured.by_level:
        drawn = chart(
            "Where the bits are",
            Axis("precision", log=True),
            Axis("bits per dimension and decade", low=0.0),
            [Series("measurement term", measured.by_level, "belief", dots=True, filled=True)],
        )
        caption = "Where the bits are: the area is the measurement term."
        parts.append(f"<figure>{drawn}<figcaption>{caption}</figcaption></figure>")
    shown = f'<div class="pair">{"".join(parts)}</div>' if parts else ""
    stored = [record for record in run.evaluations if "bits_per_dim" in record]
    return shown + (_records(stored, BOUND_COLUMNS) if len(stored) > 1 else "")  # a single one is shown above


def _pictures(run: Run) -> str:
    if not run.pictures:
        return ""
    figures = [
        f'<figure><img alt="Samples at step {picture.step}" '
        f'src="data:image/png;base64,{base64.b64encode(picture.png).decode("ascii")}">'
        f"<figcaption>step {picture.step:,}</figcaption></figure>"
        for picture in run.pictures
    ]
    return f'<div class="grids">{"".join(figures)}</div>' + _note("Sample <i>i</i> has the same seed in every grid.")


def _curves(run: Run) -> str:
    bits = [Point(step, value) for step, value in run.numbers("train", "bits_per_dim")]
    # Training minimizes the measurement term, so this is the term of the test set to compare with. For images it is
    # most of the bound.
    errors = dict(run.numbers("evaluate", "error"))
    tested = [Point(step, value, errors.get(step, 0.0)) for step, value in run.numbers("evaluate", "measurement")]
    values = sorted(p.y for p in [*bits, *tested])
    high = None
    if len(values) > 20:  # the first losses are far above the rest, so the axis ignores the highest 5 %
        high = 1.05 * max(values[int(0.95 * len(values))], max((p.y for p in tested), default=0.0))
    steps = Axis("step", low=0.0)
    loss = [Series("training", bits, "soft"), Series("test, by the EMA", tested, "belief", dots=True)]
    drawn = {
        "Loss": chart("Loss", steps, Axis("measurement term, bits per dimension", high=high), loss),
        "Learning rate": chart("Learning rate", steps, Axis("", low=0.0), [_curve(run, "lr", "predict")]),
        "Samples per second": chart("Rate", steps, Axis("", low=0.0), [_curve(run, "images_per_s", "soft")]),
        "Norm of the gradient": chart("Gradient", steps, Axis("", log=True), [_curve(run, "grad_norm", "measure")]),
    }
    figures = [f"<figure><figcaption><b>{name}</b></figcaption>{svg}</figure>" for name, svg in drawn.items() if svg]
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


def _curve(run: Run, name: str, role: Role) -> Series:
    return Series(name, [Point(step, value) for step, value in run.numbers("train", name)], role)


def _quality(run: Run) -> str:
    """The distances that `bsi eval` stored, against evaluations of the network, by solver and guidance."""
    found: dict[str, list[Point]] = {}
    metric, compared = "FID", []
    for record in (r for r in run.evaluations if "metric" in r):
        guidance = _guidance(record)
        compared.append({**record, "guidance": guidance})
        generation, value = record.get("generation"), number(record.get("value"))
        if isinstance(generation, dict) and value is not None:
            metric = str(record["metric"])
            evaluations, error = number(generation.get("evaluations")), number(record.get("error"))
            name = str(generation.get("solver", "")) + ("" if guidance is None else f", guidance {guidance:g}")
            found.setdefault(name, []).append(Point(evaluations or 0.0, value, error or 0.0))
    if not found:
        return ""
    roles: list[Role] = ["belief", "predict", "measure", "soft"]
    series = [
        Series(name, sorted(points, key=lambda p: p.x), roles[i % len(roles)], dots=True)
        for i, (name, points) in enumerate(sorted(found.items()))
    ]
    drawn = chart(f"{metric} against evaluations", Axis("evaluations", log=True), Axis(metric), series)
    return f'<div class="pair"><figure>{drawn}</figure><div>{_records(compared, QUALITY_COLUMNS)}</div></div>'


def _guidance(record: Mapping[str, Any]) -> float | None:
    """The guidance of samples with labels, 1 without exaggeration; None for samples without labels."""
    drawing = record.get("drawing")
    guidance = number(drawing.get("guidance")) if isinstance(drawing, dict) else None
    if not isinstance(drawing, dict) or guidance is None:
        return None
    labeled = bool(drawing.get("classes")) or drawing.get("label") is not None
    return guidance if labeled or guidance != 1 else None


def _recipe(run: Run) -> str:
    changed = [line.partition(": ") for line in run.changed]
    name = escape(run.recipe.name)
    if changed:
        rows = [[f"<code>{escape(field)}</code>", escape(change)] for field, _, change in changed]
        difference = _note(f"Differs from <b>{name}</b> in:") + _table(rows)
    else:
        difference = _note(f"<b>{name}</b>, without changes.")
    rows = [[f"<code>{escape(field)}</code>", escape(str(value))] for field, value in flat(run.recipe).items()]
    network = _note(f"Network: <code>{escape(run.network)}</code>") if run.network else ""
    command = f"<pre>{escape(run.command)}</pre>" if run.command else ""
    return f"{difference}{command}{network}<details><summary>All values</summary>{_table(rows)}</details>"


def _environment(run: Run) -> str:
    facts = {name.removeprefix("variables."): escape(value) for name, value in run.environment.items()}
    if run.data_version:
        facts["data"] = f"<code>{escape(run.data_version[:16])}…</code>"
    shown = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    hashes = [[escape(h.file), f"{h.bytes:,}", f"<code>{escape(h.sha256)}</code>"] for h in run.hashes]
    files = _table(hashes, ("file", "bytes", "SHA-256"), "hashes") if hashes else ""
    return (f'<dl class="facts">{shown}</dl>' if shown else "") + files


# ---- Pieces of HTML --------------------------------------------------------------------------------------------------


def _note(text: str) -> str:
    return f'<p class="note">{text}</p>'


def _table(rows: Sequence[Sequence[str]], head: Sequence[str] = (), kind: str = "") -> str:
    """Cells are HTML; the first of a row is its heading."""
    top = f"<thead><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr></thead>" if head else ""
    body = "".join(f"<tr><th>{row[0]}</th>{''.join(f'<td>{cell}</td>' for cell in row[1:])}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'


def _records(records: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Results of `bsi eval`, one per row, without empty columns."""
    columns = [name for name in columns if any(record.get(name) is not None for record in records)]
    rows = [[escape(_short(record.get(name))) for name in columns] for record in records]
    return _table(rows, [escape(name.replace("_", " ")) for name in columns], "records") if rows and columns else ""


def _short(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)[:80]
