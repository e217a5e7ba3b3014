"""Figure "lambda0": bits per dimension and sample quality against the initial precision lambda_0.

The paper's claims: likelihood improves with falling lambda_0; with many steps larger lambda_0 sample slightly better,
with few steps an intermediate one does.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from bsi.recipe import Recipe
from bsi.studies import figures
from bsi.studies.estimates import Estimate, bits, bits_difference, distance, distance_difference
from bsi.studies.job import Measure
from bsi.studies.report import Cell, Claim, Report, Study, Table, Verdict, all_of, less
from bsi.studies.scale import Scale
from bsi.studies.standard import bounds, bsi_of, qualities, quality, seeded
from bsi.studies.store import Store

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
            found += [*bounds(scale, [network]), *(quality(scale, network, k) for k in scale.varied.steps)]
    return found


def _distances(scale: Scale, store: Store, steps: int) -> list[Estimate]:
    return [distance(store, qualities(scale, networks(scale, l), steps)) for l in scale.varied.lambda_0]


def _draw(scale: Scale, store: Store) -> Figure:
    precisions = scale.varied.lambda_0
    figure, (left, right) = figures.panels(2, width=3.4, height=2.8)
    found = [bits(store, bounds(scale, networks(scale, l))) for l in precisions]
    figures.error_line(left, precisions, found, figures.COLORS["bsi"])
    left.set_ylabel("bits per dimension")
    left.set_title("Likelihood")
    ends = []
    for steps, (color, mark) in zip(scale.varied.steps, figures.SHADES, strict=False):
        each = _distances(scale, store, steps)
        figures.error_line(right, precisions, each, color, mark)
        ends.append(figures.Named(precisions[-1], each[-1].value, f"{steps} steps", color))
    right.set_ylabel(scale.metric)
    right.set_title("Sample quality")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel(r"$\lambda_0$")
        axes.margins(x=0.15)
    figures.label_ends(right, ends)
    return figure


def _gap(scale: Scale, store: Store, a: float, b: float, steps: int) -> Estimate:
    """The distance with lambda_0 = a less that with b, seed by seed."""
    p, q = (qualities(scale, networks(scale, lambda_0), steps) for lambda_0 in (a, b))
    return distance_difference(store, p, q)


def _intermediate(scale: Scale, store: Store) -> Claim:
    """Some lambda_0 in between is better than both ends; not so if an end is better than all in between. Both beyond
    two standard errors."""
    few, precisions = min(scale.varied.steps), scale.varied.lambda_0
    found = _distances(scale, store, few)
    ends, between = (precisions[0], precisions[-1]), precisions[1:-1]

    def better(a: float, b: float) -> bool:
        gap = _gap(scale, store, a, b, few)
        return gap.value < -2 * gap.error

    verdict: Verdict = "undecided"
    if any(all(better(each, end) for end in ends) for each in between):
        verdict = "held"
    elif any(all(better(end, each) for each in between) for end in ends):
        verdict = "not held"
    best = min(range(len(found)), key=lambda i: found[i].value)
    return Claim(
        f"With few steps ({few}) an intermediate lambda_0 samples best",
        verdict,
        f"best at lambda_0 = {precisions[best]:g}: {found[best]}; at the ends {found[0]} and {found[-1]}",
    )


def _falling(scale: Scale, store: Store) -> Claim:
    """Every lambda_0 against the next larger one."""
    measured = {l: bounds(scale, networks(scale, l)) for l in scale.varied.lambda_0}
    gaps = [
        less(
            f"{a:g} against {b:g}",
            bits(store, measured[a]),
            bits(store, measured[b]),
            bits_difference(store, measured[a], measured[b]),
        )
        for a, b in itertools.pairwise(scale.varied.lambda_0)
    ]
    return all_of("Likelihood improves with falling lambda_0, at each step of it", gaps)


def report(scale: Scale, store: Store) -> Report:
    precisions, few, many = scale.varied.lambda_0, min(scale.varied.steps), max(scale.varied.steps)
    measured = {l: bounds(scale, networks(scale, l)) for l in precisions}
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            float(l),
            bits(store, measured[l]),
            *(distance(store, qualities(scale, networks(scale, l), k)) for k in scale.varied.steps),
        )
        for l in precisions
    )
    lowest, highest = precisions[0], precisions[-1]
    at_many = _distances(scale, store, many)
    return Report(
        tables=(
            Table(
                "initial precision",
                ("lambda_0", "bits/dim", *(f"{scale.metric} at {k}" for k in scale.varied.steps)),
                rows,
            ),
        ),
        claims=(
            _falling(scale, store),
            less(
                f"With many steps ({many}) larger lambda_0 sample better: {highest:g} against {lowest:g}",
                at_many[-1],
                at_many[0],
                _gap(scale, store, highest, lowest, many),
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
