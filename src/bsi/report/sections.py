"""The sections of the document, each an HTML fragment; an empty one where there is nothing to show.

All text that comes from files is escaped.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from bsi.elbo import Elbo
from bsi.report.charts import Axis, Point, Role, Series, chart
from bsi.report.folder import Run
from bsi.report.measured import Measured
from bsi.runtime.serialization import flat

__all__ = ["Terms", "animation", "curves", "environment", "likelihood", "pictures", "quality", "recipe"]

MOST_PICTURES = 6
TERMS = ("reconstruction", "measurement", "prior")
EVALUATED = ("bits_per_dim", "monte_carlo_error", "data_error", "split", "images", "finite_k", "proposal", "step")
COMPARED = ("metric", "value", "error", "guidance", "n", "reference", "reference_split", "reference_n", "step")


def note(text: str) -> str:
    return f'<p class="note">{text}</p>'


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = (), kind: str = "") -> str:
    """Cells are HTML already; the first of a row is its name."""
    top = f"<thead><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr></thead>" if head else ""
    body = "".join(f"<tr><th>{row[0]}</th>{''.join(f'<td>{cell}</td>' for cell in row[1:])}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'


@dataclass(frozen=True)
class Terms:
    """A bound in bits per dimension: its terms, its errors, and what it is the bound of."""

    parts: Mapping[str, float]
    total: float
    monte_carlo_error: float | None
    data_error: float | None
    data_resolved: bool
    about: str

    @classmethod
    def best(cls, run: Run, asked: Measured) -> Terms | None:
        """What is known best: the last that `bsi eval` stored of the last step, what this report measured, what `bsi
        eval` stored before, the trainer's last look.
        """
        stored = run.bounds
        if stored and stored[-1].get("step") == run.status.get("step"):
            return cls._stored(stored[-1])
        if asked.bound is not None:
            return cls._measured(asked.bound)
        if stored:
            return cls._stored(stored[-1])
        for look in reversed(run.events("evaluate")):
            if isinstance(look.get("bits_per_dim"), float):
                return cls._of(look, ("error", ""), f"The trainer's last look, at step {int(look['step']):,}.")
        return None

    @classmethod
    def _stored(cls, record: Mapping[str, Any]) -> Terms:
        num, step = (escape(_short(record.get(name))) for name in ("images", "step"))
        about = f"By <code>bsi eval</code>: {num} test samples, at step {step}."
        return cls._of(record, ("monte_carlo_error", "data_error"), about)

    @classmethod
    def _of(cls, record: Mapping[str, Any], errors: tuple[str, str], about: str) -> Terms:
        known = {name: record.get(name) for name in TERMS}
        parts = {name: value for name, value in known.items() if isinstance(value, float)}
        total = float(record["bits_per_dim"])
        units = record.get("change_of_units")
        if not isinstance(units, float):  # a record from before it was stored: what the terms lack, if all are there
            units = total - sum(parts.values()) if len(parts) == len(TERMS) else 0.0
        if abs(units) > 1e-6:
            parts["change of units"] = units
        found = [value if isinstance(value, float) else None for value in (record.get(name) for name in errors)]
        resolved = record.get("data_resolved") is not False
        return cls(parts, total, found[0], found[1], resolved, about)

    @classmethod
    def _measured(cls, bound: Elbo) -> Terms:
        unit = bound.n * math.log(2)
        nats = {"reconstruction": bound.reconstruction, "measurement": bound.measurement, "prior": bound.prior}
        parts = {name: float(value.mean()) / unit for name, value in nats.items()}
        if bound.log_determinant:
            parts["change of units"] = bound.log_determinant / math.log(2)
        about = f"An upper bound for the first {len(bound.nats):,} test samples, by the EMA."
        errors = bound.monte_carlo_error, bound.data_error
        return cls(parts, bound.bits_per_dim, *errors, bound.data_resolved, about)


def animation(asked: Measured) -> str:
    if asked.animation is None:
        return ""
    data = base64.b64encode(asked.animation).decode("ascii")
    return (
        f'<img class="animation" alt="Belief mean, prediction and measurement, step by step" '
        f'src="data:image/webp;base64,{data}">'
        + note(
            'The belief about a sample is a Gaussian with mean <i class="belief">μ</i>. The network predicts the '
            'sample, <i class="predict">x̂</i>; a noisy measurement <i class="measure">y</i> of the prediction sharpens '
            "the belief."
        )
    )


def likelihood(run: Run, asked: Measured) -> str:
    parts = []
    terms = Terms.best(run, asked)
    if terms is not None:
        rows = [(name, f"{value:.4f}") for name, value in terms.parts.items()]
        rows.append(("<b>bits per dimension</b>", f"<b>{terms.total:.4f}</b>"))
        if terms.monte_carlo_error is not None:
            rows.append(("± of the estimate", f"{terms.monte_carlo_error:.4f}"))
        if terms.data_error is not None:
            limit = "" if terms.data_resolved else "at most "
            rows.append(("± of having these samples", f"{limit}{terms.data_error:.4f}"))
        more = " More evaluations shrink the first error, more test data the second."
        parts.append(f"<div>{table(rows, kind='numbers')}{note(terms.about + more)}</div>")
    if asked.by_level:
        drawn = chart(
            "Where the bits are",
            Axis("precision", log=True),
            Axis("bits per dimension, for each factor of ten", low=0.0),
            [Series("measurement term", asked.by_level, "belief", dots=True, filled=True)],
        )
        told = "Where the bits are: the area is the measurement term."
        parts.append(f"<figure>{drawn}<figcaption>{told}</figcaption></figure>")
    shown = f'<div class="pair">{"".join(parts)}</div>' if parts else ""
    stored = [record for record in run.evaluations if "bits_per_dim" in record]
    return shown + (_records(stored, EVALUATED) if len(stored) > 1 else "")  # one alone is told above


def _records(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Results as `bsi eval` left them, one in a row; columns that are empty throughout are left out."""
    names = [name for name in names if any(record.get(name) is not None for record in records)]
    rows = [[escape(_short(record.get(name))) for name in names] for record in records]
    return table(rows, [escape(name.replace("_", " ")) for name in names], "records") if rows and names else ""


def _short(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)[:80]


def curves(run: Run) -> str:
    bits = [Point(step, value) for step, value in run.numbers("train", "bits_per_dim")]
    # What training minimizes of the bound, and so what can be drawn beside it; for images it is nearly all of it.
    looks = dict(run.numbers("evaluate", "measurement"))
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
        "Loss": chart("Loss", steps, Axis("measurement term, bits per dimension", high=high), loss),
        "Learning rate": chart("Learning rate", steps, Axis("", low=0.0), [_series(run, "lr", "predict")]),
        "Samples per second": chart("Rate", steps, Axis("", low=0.0), [_series(run, "images_per_s", "soft")]),
        "Norm of the gradient": chart("Gradient", steps, Axis("", log=True), [_series(run, "grad_norm", "measure")]),
    }
    figures = [f"<figure><figcaption><b>{name}</b></figcaption>{svg}</figure>" for name, svg in drawn.items() if svg]
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


def _series(run: Run, name: str, role: Role) -> Series:
    return Series(name, [Point(step, value) for step, value in run.numbers("train", name)], role)


def pictures(run: Run) -> str:
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
    return f'<div class="grids">{"".join(figures)}</div>' + note("Sample <i>i</i> has the same seed in every grid.")


def quality(run: Run) -> str:
    """Distances against evaluations of the network, by solver and guidance: what `bsi eval` stored of them."""
    found: dict[str, list[Point]] = {}
    metric, compared = "FID", []
    for record in run.evaluations:
        if "metric" not in record:
            continue
        guidance = _guidance(record)
        compared.append({**record, "guidance": guidance})
        generation = record.get("generation")
        if isinstance(generation, dict) and isinstance(record.get("value"), float):
            metric = str(record.get("metric", metric))
            error = record.get("error")
            spread = error if isinstance(error, float) else 0.0
            point = Point(float(generation.get("evaluations", 0)), float(record["value"]), spread)
            name = str(generation.get("solver", "")) + ("" if guidance is None else f", guidance {guidance:g}")
            found.setdefault(name, []).append(point)
    if not found:
        return ""
    roles: list[Role] = ["belief", "predict", "measure", "soft"]
    series = [
        Series(name, sorted(points, key=lambda p: p.x), roles[i % len(roles)], dots=True)
        for i, (name, points) in enumerate(sorted(found.items()))
    ]
    drawn = chart(f"{metric} against evaluations", Axis("evaluations", log=True), Axis(metric), series)
    found_at = _records(compared, COMPARED)
    return f'<div class="pair"><figure>{drawn}</figure><div>{found_at}</div></div>'


def _guidance(record: Mapping[str, Any]) -> float | None:
    """How strongly labels were followed, 1 as they were learned; None where none were asked for."""
    drawing = record.get("drawing")
    said = drawing.get("guidance") if isinstance(drawing, dict) else None
    if not isinstance(drawing, dict) or not isinstance(said, int | float):
        return None
    labeled = bool(drawing.get("classes")) or drawing.get("label") is not None
    return float(said) if labeled or said != 1 else None


def recipe(run: Run) -> str:
    changed = [line.partition(": ") for line in run.changed]
    if changed:
        rows = [[f"<code>{escape(name)}</code>", escape(rest)] for name, _, rest in changed]
        differs = note(f"Differs from <b>{escape(run.recipe.name)}</b> in:") + table(rows)
    else:
        differs = note(f"<b>{escape(run.recipe.name)}</b>, as it is.")
    rows = [[f"<code>{escape(name)}</code>", escape(str(value))] for name, value in flat(run.recipe).items()]
    network = note(f"Network: <code>{escape(run.network)}</code>") if run.network else ""
    command = f"<pre>{escape(run.command)}</pre>" if run.command else ""
    return f"{differs}{command}{network}<details><summary>All values</summary>{table(rows)}</details>"


def environment(run: Run) -> str:
    facts = {name.removeprefix("variables."): escape(value) for name, value in run.environment.items()}
    if run.data_version:
        facts["data"] = f"<code>{escape(run.data_version[:16])}…</code>"
    shown = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    hashes = [[escape(h.file), f"{h.bytes:,}", f"<code>{escape(h.sha256)}</code>"] for h in run.hashes]
    files = table(hashes, ("file", "bytes", "SHA-256"), "hashes") if hashes else ""
    return (f'<dl class="facts">{shown}</dl>' if shown else "") + files
