"""Figure "train-finite-k": networks trained on L_M^k beside one trained on L_M^inf, both used for k' steps.

The paper's claim: training on L_M^k confers no consistent advantage in sample quality or likelihood.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bsi.recipe import Objective, Recipe
from bsi.studies import figures
from bsi.studies.estimates import Estimate, bits_difference, distance_difference
from bsi.studies.job import Measure
from bsi.studies.report import Cell, Claim, Report, Study, Table, Verdict
from bsi.studies.scale import Scale
from bsi.studies.standard import bound, qualities, quality, seeded
from bsi.studies.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STUDY", "advantage"]


def networks(scale: Scale, trained_k: int | None) -> list[Recipe]:
    found = seeded(scale.parameter_recipe, "bsi", scale.parameter_seeds)
    return [replace(recipe, objective=Objective(finite_k=trained_k)) for recipe in found]


def measures(scale: Scale) -> list[Measure]:
    found: list[Measure] = []
    for trained in (None, *scale.varied.trained_k):
        for network in networks(scale, trained):
            for k in scale.varied.evaluated_k:
                found += [bound(scale, network, k), quality(scale, network, k)]
    return found


def _bits(scale: Scale, store: Store, trained: int, k: int) -> Estimate:
    """Bits per dimension at k' = k steps: trained on L_M^k less trained on L_M^inf."""
    a, b = ([bound(scale, network, k) for network in networks(scale, which)] for which in (trained, None))
    return bits_difference(store, a, b)


def _distance(scale: Scale, store: Store, trained: int, k: int) -> Estimate:
    return distance_difference(
        store, qualities(scale, networks(scale, trained), k), qualities(scale, networks(scale, None), k)
    )


def _draw(scale: Scale, store: Store) -> Figure:
    evaluated = scale.varied.evaluated_k
    figure, both = figures.panels(2, width=3.4, height=2.8)
    for axes, statistic, name in zip(both, (_distance, _bits), (scale.metric, "bits/dim"), strict=True):
        axes.axhline(0, color=figures.GREY, linewidth=0.9)
        ends, last = [], evaluated[-1] * 1.08 ** (len(scale.varied.trained_k) - 1)
        for i, (trained, (color, mark)) in enumerate(zip(scale.varied.trained_k, figures.SHADES, strict=False)):
            found = [statistic(scale, store, trained, k) for k in evaluated]
            beside = [k * 1.08**i for k in evaluated]  # bars do not hide each other
            figures.error_line(axes, beside, found, color, mark)
            ends.append(figures.Named(last, found[-1].value, f"k = {trained}", color))
        axes.set_xscale("log", base=2)
        axes.set_xticks(evaluated, [str(k) for k in evaluated])
        axes.set_xlabel("evaluated for k' steps")
        axes.set_ylabel(rf"{name}: trained on $L_M^k$ less $L_M^\infty$")
        axes.margins(x=0.2)
        figures.label_ends(axes, ends)
    both[0].set_title("Sample quality (below 0: k helps)")
    both[1].set_title("Likelihood (below 0: k helps)")
    return figure


def advantage(found: dict[int, dict[str, list[Estimate]]]) -> Claim:
    """found[k]: for each measure, the differences at every k'. An advantage is consistent if it is there at every k',
    and refuted by one k' at which it is a disadvantage; the claim is that all of them are."""
    curves = [(f"k = {k} in {kind}", gaps) for k, kinds in found.items() for kind, gaps in kinds.items()]
    better = [name for name, gaps in curves if all(gap.value < -2 * gap.error for gap in gaps)]
    worse = [name for name, gaps in curves if any(gap.value > 2 * gap.error for gap in gaps)]
    verdict: Verdict = "not held" if better else "held" if len(worse) == len(curves) else "undecided"
    because = (
        f"better at every k' beyond two standard errors: {', '.join(better) or 'none'}; "
        f"worse at some k': {', '.join(worse) or 'none'}"
    )
    return Claim("Training on L_M^k confers no consistent advantage over L_M^inf", verdict, because)


def report(scale: Scale, store: Store) -> Report:
    evaluated, rows, found = scale.varied.evaluated_k, [], {}
    for trained in scale.varied.trained_k:
        distances = [_distance(scale, store, trained, k) for k in evaluated]
        likelihoods = [_bits(scale, store, trained, k) for k in evaluated]
        found[trained] = {scale.metric: distances, "bits/dim": likelihoods}
        row: tuple[Cell, ...] = (trained, *distances, *likelihoods)
        rows.append(row)
    columns = [f"{scale.metric} at k' = {k}" for k in evaluated] + [f"bits/dim at k' = {k}" for k in evaluated]
    return Report(
        tables=(Table("difference to training on L_M^inf", ("trained on k", *columns), tuple(rows)),),
        claims=(advantage(found),),
        draw=lambda: _draw(scale, store),
    )


STUDY = Study(
    name="finite-k",
    paper='Figure "train-finite-k"',
    shows="networks trained on L_M^k against L_M^inf, evaluated at k'",
    measures=measures,
    report=report,
)
