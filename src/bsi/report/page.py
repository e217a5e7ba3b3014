"""The report as one HTML file: result, samples, training, quality, recipe, environment.

Text from files is escaped. There is no script, and nothing is loaded when the file is opened. A section without content
is left out.
"""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

from bsi import __version__
from bsi.data.baselines import baselines_text
from bsi.io import atomic, check_writable
from bsi.progress import readable_seconds
from bsi.recipe import flat, to_plain
from bsi.report.charts import Axis, Point, Role, Series, chart
from bsi.report.contents import Measurements, RunContents, TextStep, measure, number
from bsi.runtime.distributed import pick_device
from bsi.runtime.run_folder import check_inside
from bsi.values import unit_of_bounds

TERMS = ("reconstruction", "measurement", "prior")
ELEMENTS = {"dim": "dimension", "char": "character"}
BOUND_COLUMNS = ("monte_carlo_error", "data_error", "split", "images", "finite_k", "proposal", "step")
QUALITY_COLUMNS = ("metric", "value", "error", "guidance", "n", "reference", "reference_split", "reference_n", "step")
ROLES: tuple[Role, ...] = ("belief", "predict", "measure", "soft")


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
    found = RunContents(Path(run))
    target = found.path / "report.html" if out is None else Path(out)
    if out is None:
        check_inside(found.path, target)
    check_writable(target, "--out")
    if ask_model:
        known = any(record.get("step") == found.step for record in found.bounds)
        measured = measure(found, pick_device(device, 0), backbone, bound_known=known)
    else:
        measured = Measurements(missing=["the model was not evaluated, as requested by --no-model"])
    with atomic(target, "--out") as temporary:
        temporary.write_text(document(found, measured), "utf-8")
    return target


def document(run: RunContents, measured: Measurements) -> str:
    best = best_bound(run, measured)
    missing = "".join(f"<li>{escape(line)}</li>" for line in measured.missing)
    sections = {
        "A belief sharpens": _animation(measured),
        "Likelihood": _likelihood(run, measured, best),
        "Samples over training": _pictures(run),
        "Training": _curves(run),
        "Sample quality": _quality(run),
        "Recipe": _recipe(run),
        "Environment and files": _environment(run),
        "Left out": f'<ul class="note">{missing}</ul>' if missing else "",
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


def best_bound(run: RunContents, measured: Measurements) -> Mapping[str, Any] | None:
    """The best known bound, and its origin as `about`.

    In this order: the last one of `bsi eval` if it is of the last step, the one measured for this report, an earlier
    one of `bsi eval`, the last evaluation during training.
    """
    if run.bounds and (measured.bound is None or run.bounds[-1].get("step") == run.step):
        last = run.bounds[-1]
        num, step = (escape(_short(last.get(name))) for name in ("images", "step"))
        return {**last, "about": f"By <code>bsi eval</code>: {num} test samples, at step {step}."}
    if measured.bound is not None:
        num = f"{measured.bound['images']:,} test samples (a random subset if there are more)"
        return {**measured.bound, "about": f"An upper bound for {num}, by the EMA."}
    for record in reversed(run.events("evaluate")):
        if number(record.get("bits_per_dim")) is not None:
            about = f"The last evaluation during training, at step {_short(record['step'])}."
            return {**record, "monte_carlo_error": record.get("error"), "about": about}
    return None


def _unit(record: Mapping[str, Any]) -> tuple[str, float]:
    """The unit of a bound and its number in a bit per dimension, in which records have all their values."""
    unit, scale = unit_of_bounds(record.get("binned") is not False)
    element = str(record.get("element", "dim"))
    return f"{unit} per {ELEMENTS.get(element, element)}", scale


def _errors(best: Mapping[str, Any], digits: int) -> dict[str, str]:
    """The known errors of a bound. Monte Carlo noise can hide that of the test set, which then has a limit only."""
    limit, (_, scale) = "" if best.get("data_resolved") is not False else "at most ", _unit(best)
    known = {"monte_carlo_error": "Monte Carlo", "data_error": "test set"}
    errors = {name: scale * error for key, name in known.items() if (error := number(best.get(key))) is not None}
    return {name: f"{limit if name == 'test set' else ''}{error:.{digits}f}" for name, error in errors.items()}


def _header(run: RunContents, measured: Measurements, best: Mapping[str, Any] | None) -> str:
    recipe, figures = run.recipe, {}
    if best is not None:
        errors = (f' <span class="error">± {value} ({name})</span>' for name, value in _errors(best, 3).items())
        unit, scale = _unit(best)
        figures[unit] = f"{scale * float(best['bits_per_dim']):.3f}{''.join(errors)}"
    figures["steps"] = f"{run.step:,}" + ("" if run.step == recipe.steps else f" of {recipe.steps:,}")
    if measured.parameters is not None:
        figures["parameters"] = f"{measured.parameters:,}"
    if rates := [rate for _, rate in run.numbers("train", "images_per_s")]:
        figures["samples per second"] = f"{median(rates):,.0f}"
    times = [stamp for _, stamp in run.numbers("train", "time")]
    if len(times) > 1:
        figures["first to last entry"] = readable_seconds(times[-1] - times[0])
    method, state = str(to_plain(recipe.method).get("kind", "")).upper(), escape(run.state)
    return (
        f"<header><h1>{escape(run.path.resolve().name)}</h1>"
        f'<p class="what">{escape(recipe.name)} · {method} on {escape(recipe.data.name)} · '
        f'<span class="state {state}">{state}</span></p>{_list(figures, "figures")}</header>'
    )


def _animation(measured: Measurements) -> str:
    if measured.texts:
        return _text(measured.texts)
    if measured.animation is None:
        return ""
    picture = _image(measured.animation, "webp", "Belief mean, prediction and measurement, step by step", "animation")
    return picture + _note(
        'The belief about a sample is a Gaussian with mean <i class="belief">μ</i>. The network predicts the sample, '
        '<i class="predict">x̂</i>; a noisy measurement <i class="measure">y</i> of the prediction sharpens the belief.'
    )


def _text(steps: Sequence[TextStep]) -> str:
    rows = []
    for step in steps:
        parts = []  # of equal color
        pairs = zip(step.probabilities, step.letters, strict=True)
        for p, found in itertools.groupby(pairs, lambda pair: round(pair[0], 1)):
            letters = escape("".join(letter for _, letter in found))
            parts.append(f'<span style="background: rgb(37 102 173 / {0.6 * p:.2f})">{letters}</span>')
        rows.append((f"{step.level:.3g}", f'<code class="letters">{"".join(parts)}</code>'))
    return _table(rows, ("precision", "most probable symbols")) + _note(
        "One sample as it is drawn: the symbols that the network predicts, on a color for their probabilities."
    )


def _likelihood(run: RunContents, measured: Measurements, best: Mapping[str, Any] | None) -> str:
    parts, (unit, scale) = list[str](), _unit(best or {})
    if best is not None:
        bits = float(best["bits_per_dim"])
        terms = {name: value for name in TERMS if (value := number(best.get(name))) is not None}
        units = bits - sum(terms.values())
        if len(terms) == len(TERMS) and abs(units) > 1e-6:
            terms["change of units"] = units
        rows = [(name, f"{scale * value:.4f}") for name, value in terms.items()]
        rows.append((f"<b>{unit}</b>", f"<b>{scale * bits:.4f}</b>"))
        rows += [(f"± {name.replace('test set', 'choice of test samples')}", v) for name, v in _errors(best, 4).items()]
        if scale != 1:
            rows.append(("in bits per dimension", f"{bits:.4f}"))
        if measured.baselines:
            compared = baselines_text(measured.baselines, best.get("binned") is not False, best.get("element", "dim"))
            rows.append(("for comparison", escape(compared)))
        note = f"{best['about']} More evaluations reduce the first error, more test samples the second."
        parts.append(f"<div>{_table(rows, kind='numbers')}{_note(note)}</div>")
    if measured.by_level:
        x, y = Axis("precision", log=True), Axis(f"{unit} and decade", low=0.0)
        points = [Point(level, scale * value, scale * error) for level, value, error in measured.by_level]
        title = f"Where the {unit.partition(' ')[0]} are"
        drawn = chart(title, x, y, [Series("measurement term", points, dots=True, filled=True)])
        caption = f"{title}: the area is the measurement term."
        parts.append(f"<figure>{drawn}<figcaption>{caption}</figcaption></figure>")
    shown = f'<div class="pair">{"".join(parts)}</div>' if parts else ""
    stored = [_in_units(record) for record in run.evaluations if number(record.get("bits_per_dim")) is not None]
    columns = (*dict.fromkeys(_unit(record)[0] for record in stored), *BOUND_COLUMNS)
    return shown + (_records(stored, columns) if len(stored) > 1 else "")  # a single one is shown above


def _in_units(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with its bound, under the name of its unit, and its errors in this unit."""
    unit, scale = _unit(record)
    values = {unit: "bits_per_dim", "monte_carlo_error": "monte_carlo_error", "data_error": "data_error"}
    found = {name: number(record.get(key)) for name, key in values.items()}
    return {**record, **{name: None if value is None else scale * value for name, value in found.items()}}


def _pictures(run: RunContents) -> str:
    if not run.pictures:
        return ""
    figures = []
    for step, found in run.pictures.items():
        alt = f"Samples at step {step}"
        shown = f"<pre>{escape(found)}</pre>" if isinstance(found, str) else _image(found, "png", alt)
        figures.append(f"<figure>{shown}<figcaption>step {step:,}</figcaption></figure>")
    return f'<div class="grids">{"".join(figures)}</div>' + _note("Sample <i>i</i> has the same seed in every grid.")


def _curves(run: RunContents) -> str:
    unit, scale = _unit((run.events("evaluate") or [{}])[-1])

    def curve(name: str, role: Role, shown: str = "", scale: float = 1.0) -> Series:
        return Series(shown or name, [Point(step, scale * value) for step, value in run.numbers("train", name)], role)

    # Training minimizes the measurement term, so this is the term of the test set to compare with. For images it is
    # most of the bound.
    errors, trained = dict(run.numbers("evaluate", "error")), curve("bits_per_dim", "soft", "training", scale)
    measured = run.numbers("evaluate", "measurement")
    tested = [Point(step, scale * value, scale * errors.get(step, 0.0)) for step, value in measured]
    values, high = sorted(p.y for p in [*trained.points, *tested]), None
    if len(values) > 20:  # the first losses are far above the rest, so the axis ignores the highest 5 %
        high = 1.05 * max(values[int(0.95 * len(values))], max((p.y for p in tested), default=0.0))
    loss, steps = [trained, Series("test, by the EMA", tested, dots=True)], Axis("step", low=0.0)
    drawn = {
        "Loss": chart("Loss", steps, Axis(f"measurement term, {unit}", high=high), loss),
        "Learning rate": chart("Learning rate", steps, Axis("", low=0.0), [curve("lr", "predict")]),
        "Samples per second": chart("Rate", steps, Axis("", low=0.0), [curve("images_per_s", "soft")]),
        "Norm of the gradient": chart("Gradient", steps, Axis("", log=True), [curve("grad_norm", "measure")]),
    }
    figures = [f"<figure><figcaption><b>{name}</b></figcaption>{svg}</figure>" for name, svg in drawn.items() if svg]
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


def _quality(run: RunContents) -> str:
    """The distances that `bsi eval` stored, against evaluations of the network, by solver and guidance."""
    found, metric, compared = dict[str, list[Point]](), "FID", []
    for record in (r for r in run.evaluations if "metric" in r):
        drawing, generation, guidance = record.get("drawing"), record.get("generation"), None
        if isinstance(drawing, dict):  # guidance 1 follows the labels as learned; without labels it means nothing
            guidance = number(drawing.get("guidance"))
            labeled = bool(drawing.get("classes")) or drawing.get("label") is not None
            guidance = guidance if labeled or guidance != 1 else None
        compared.append({**record, "guidance": guidance})
        value, error = number(record.get("value")), number(record.get("error"))
        if isinstance(generation, dict) and value is not None:
            metric, evaluations = str(record["metric"]), number(generation.get("evaluations"))
            name = str(generation.get("solver", "")) + ("" if guidance is None else f", guidance {guidance:g}")
            found.setdefault(name, []).append(Point(evaluations or 0.0, value, error or 0.0))
    if not found:
        return ""
    named = zip(ROLES * len(found), sorted(found.items()), strict=False)
    series = [Series(name, sorted(points), role, dots=True) for role, (name, points) in named]
    drawn = chart(f"{metric} against evaluations", Axis("evaluations", log=True), Axis(metric), series)
    return f'<div class="pair"><figure>{drawn}</figure><div>{_records(compared, QUALITY_COLUMNS)}</div></div>'


def _recipe(run: RunContents) -> str:
    name = escape(run.recipe.name)
    difference = _note(f"<b>{name}</b>, without changes.")
    if run.changed:
        changes = [line.partition(": ") for line in run.changed]
        rows = [[f"<code>{escape(field)}</code>", escape(change)] for field, _, change in changes]
        difference = _note(f"Differs from <b>{name}</b> in:") + _table(rows)
    rows = [[f"<code>{escape(field)}</code>", escape(str(value))] for field, value in flat(run.recipe).items()]
    network = _note(f"Network: <code>{escape(run.network)}</code>") if run.network else ""
    command = f"<pre>{escape(run.command)}</pre>" if run.command else ""
    return f"{difference}{command}{network}<details><summary>All values</summary>{_table(rows)}</details>"


def _environment(run: RunContents) -> str:
    facts = {escape(name.removeprefix("variables.")): escape(value) for name, value in run.environment.items()}
    if run.data_version:
        facts["data"] = f"<code>{escape(run.data_version[:16])}…</code>"
    hashes = [[escape(name), f"{size:,}", f"<code>{escape(sha256)}</code>"] for name, size, sha256 in run.hashes]
    files = _table(hashes, ("file", "bytes", "SHA-256"), "hashes") if hashes else ""
    return (_list(facts, "facts") if facts else "") + files


# Pieces of HTML: their arguments are HTML


def _note(text: str) -> str:
    return f'<p class="note">{text}</p>'


def _image(data: bytes, kind: str, alt: str, style: str = "") -> str:
    encoded = base64.b64encode(data).decode("ascii")
    return f'<img class="{style}" alt="{alt}" src="data:image/{kind};base64,{encoded}">'


def _list(values: Mapping[str, str], kind: str) -> str:
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in values.items())
    return f'<dl class="{kind}">{items}</dl>'


def _table(rows: Sequence[Sequence[str]], head: Sequence[str] = (), kind: str = "") -> str:
    """The first cell of a row is its heading."""
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
