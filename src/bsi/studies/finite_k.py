"""Figure "train-finite-k": networks trained on L_M^k against one trained on L_M^inf, both used for k' steps.

The paper's claim: training on L_M^k confers no consistent advantage in sample quality or likelihood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bsi.recipe import Objective, Recipe
from bsi.studies import figures
from bsi.studies.job import Measure, bound, paper_sampler, quality
from bsi.studies.report import Cell, Claim, Difference, Report, Results, Study, Table, Verdict
from bsi.studies.scale import Scale

__all__ = ["STUDY", "advantage"]


def networks(scale: Scale, trained_k: int | None) -> list[Recipe]:
    return [replace(recipe, objective=Objective(finite_k=trained_k)) for recipe in scale.parameters.networks("bsi")]


def measures(scale: Scale) -> list[Measure]:
    found: list[Measure] = []
    for trained in (None, *scale.trained_k):
        for network in networks(scale, trained):
            for k in scale.evaluated_k:
                found += [bound(scale, network, k), quality(scale, network, paper_sampler(k))]
    return found


def advantage(differences: Mapping[str, Sequence[Difference]]) -> Claim:
    """The claim that no training has a consistent advantage.

    Args:
        differences: For each trained k and quantity, the difference to training on L_M^inf at every k'. An advantage
            is consistent if it is there at every k', and refuted by a disadvantage at one k'.
    """
    better = [name for name, gaps in differences.items() if all(gap.lower for gap in gaps)]
    worse = [name for name, gaps in differences.items() if any(gap.higher for gap in gaps)]
    verdict: Verdict = "not held" if better else "held" if len(worse) == len(differences) else "undecided"
    because = f"better at every k': {', '.join(better) or 'none'}; worse at some k': {', '.join(worse) or 'none'}"
    return Claim("Training on L_M^k confers no consistent advantage over L_M^inf", verdict, because)


def report(results: Results) -> Report:
    scale, evaluated = results.scale, results.scale.evaluated_k
    plain = networks(scale, None)
    distances = {
        k: [results.distance_difference(networks(scale, k), plain, paper_sampler(at)) for at in evaluated]
        for k in scale.trained_k
    }
    bits = {k: [results.bits_difference(networks(scale, k), plain, at) for at in evaluated] for k in scale.trained_k}
    columns = [f"{name} at k' = {at}" for name in (scale.metric, "bits/dim") for at in evaluated]
    differences: dict[str, list[Difference]] = {}
    for k in scale.trained_k:
        differences |= {f"k = {k} in {scale.metric}": distances[k], f"k = {k} in bits/dim": bits[k]}

    figure, panels = figures.panels(2)
    for axes, found, name in zip(panels, (distances, bits), (scale.metric, "bits/dim"), strict=True):
        axes.axhline(0, color=figures.GREY, linewidth=0.9)
        for (k, gaps), (color, mark) in zip(found.items(), figures.SHADES, strict=False):
            figures.line(axes, evaluated, gaps, color, mark, label=f"k = {k}")
        figures.log_axis(axes, evaluated)
        axes.set_xlabel("evaluated for k' steps")
        axes.set_ylabel(rf"{name}: trained on $L_M^k$ less $L_M^\infty$")
        axes.legend()
    panels[0].set_title("Sample quality (below 0: k helps)")
    panels[1].set_title("Likelihood (below 0: k helps)")
    rows: list[tuple[Cell, ...]] = [(k, *distances[k], *bits[k]) for k in scale.trained_k]
    return Report(
        tables=(Table("difference to training on L_M^inf", ("trained on k", *columns), tuple(rows)),),
        claims=(advantage(differences),),
        figure=figure,
        seeds=len(plain),
    )


STUDY = Study(
    name="finite-k",
    paper='Figure "train-finite-k"',
    shows="networks trained on L_M^k against L_M^inf, evaluated at k'",
    measures=measures,
    report=report,
)
