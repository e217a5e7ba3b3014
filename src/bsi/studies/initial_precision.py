"""Figure "lambda0": bits per dimension and sample quality against the initial precision lambda_0.

The paper's claims: likelihood improves with falling lambda_0; with many steps larger lambda_0 sample slightly better,
with few steps an intermediate one does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bsi.studies import figures
from bsi.studies.estimates import Estimate, bits, bits_difference, distance
from bsi.studies.job import Measure
from bsi.studies.report import Cell, Claim, Report, Study, Table, Verdict, less
from bsi.studies.scale import Scale
from bsi.studies.standard import bounds, bsi_of, qualities, quality, seeded
from bsi.studies.store import Store
from bsi.training.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STUDY"]


def networks(scale: Scale, lambda_0: float) -> list[Recipe]:
    found = seeded(scale.parameter_recipe, "bsi", scale.parameter_seeds)
    return [replace(recipe, method=replace(bsi_of(recipe), lambda_0=lambda_0)) for recipe in found]


def measures(scale: Scale) -> list[Measure]:
    found: list[Measure] = []
    for lambda_0 in scale.varied.lambda_0:
        for network in networks(scale, lambda_0):
            found += [*bounds(scale, [network]), *(quality(scale, network, k) for k in scale.drawn.steps)]
    return found


def _distances(scale: Scale, store: Store, steps: int) -> list[Estimate]:
    return [distance(store, qualities(scale, networks(scale, l), steps)) for l in scale.varied.lambda_0]


def _draw(scale: Scale, store: Store) -> Figure:
    precisions = scale.varied.lambda_0
    figure, (left, right) = figures.panels(2, width=3.4, height=2.8)
    found = [bits(store, bounds(scale, networks(scale, l))) for l in precisions]
    figures.error_line(left, precisions, [e.value for e in found], [e.error for e in found], figures.COLOURS["bsi"])
    left.set_ylabel("bits per dimension")
    left.set_title("Likelihood")
    ends = []
    for steps, colour in zip(scale.drawn.steps, figures.PALETTE, strict=False):
        each = _distances(scale, store, steps)
        figures.error_line(right, precisions, [e.value for e in each], [e.error for e in each], colour)
        ends.append(figures.End(precisions[-1], each[-1].value, f"{steps} steps", colour))
    right.set_ylabel(scale.metric)
    right.set_title("Sample quality")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel(r"$\lambda_0$")
        axes.margins(x=0.15)
    figures.label_ends(right, ends)
    return figure


def _intermediate(scale: Scale, store: Store) -> Claim:
    """The best lambda_0 at the fewest steps is neither the smallest nor the largest, beyond two standard errors."""
    found = _distances(scale, store, min(scale.drawn.steps))
    best = min(range(len(found)), key=lambda i: found[i].value)
    ends = [found[i] - found[best] for i in (0, len(found) - 1)]
    sure = all(gap.value > 2 * gap.error for gap in ends)
    verdict: Verdict = "held" if sure else "undecided" if 0 < best < len(found) - 1 else "not held"
    return Claim(
        f"With few steps ({min(scale.drawn.steps)}) an intermediate lambda_0 samples best",
        verdict,
        f"best at lambda_0 = {scale.varied.lambda_0[best]:g}: {found[best]}; at the ends {found[0]} and {found[-1]}",
    )


def report(scale: Scale, store: Store) -> Report:
    precisions, few, many = scale.varied.lambda_0, min(scale.drawn.steps), max(scale.drawn.steps)
    measured = {l: bounds(scale, networks(scale, l)) for l in precisions}
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            float(l),
            bits(store, measured[l]),
            *(distance(store, qualities(scale, networks(scale, l), k)) for k in scale.drawn.steps),
        )
        for l in precisions
    )
    lowest, highest = precisions[0], precisions[-1]
    at_many = _distances(scale, store, many)
    return Report(
        tables=(
            Table("lambda_0", ("lambda_0", "bits/dim", *(f"{scale.metric} at {k}" for k in scale.drawn.steps)), rows),
        ),
        claims=(
            less(
                f"Likelihood improves with falling lambda_0: {lowest:g} against {highest:g}",
                bits(store, measured[lowest]),
                bits(store, measured[highest]),
                bits_difference(store, measured[lowest], measured[highest]),
            ),
            less(
                f"With many steps ({many}) larger lambda_0 sample better: {highest:g} against {lowest:g}",
                at_many[-1],
                at_many[0],
            ),
            _intermediate(scale, store),
        ),
        draw=lambda: _draw(scale, store),
        notes=(f"Few steps are {few}, many are {many}, of the paper's sampler.",),
    )


STUDY = Study(
    name="initial-precision",
    paper='Figure "lambda0"',
    shows="bits/dim and FID against lambda_0 and steps",
    measures=measures,
    report=report,
)
