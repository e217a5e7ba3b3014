"""New: which of the three changes from BFN to BSI matters? The paper makes all three; here each one is undone alone.

    hyper-prior       c = lambda_0^2 / gamma_0: the information of the initial belief. BSI 0.01, BFN 0
    offset            lambda_0: levels are uniform in ln(alpha + lambda_0), alpha the gain. BSI 0.01, BFN 1
    preconditioning   BSI a mixture of belief and correction ("edm"), BFN the noise ("epsilon")

In information coordinates (docs/architecture.md) a belief depends on alpha and c alone, and lambda_0 is where the grid
of levels begins, so BSI(lambda_0, gamma_0) covers every combination of these choices. ("epsilon" uses the belief's mean
unscaled, so there lambda_0 also sets the scale of the network's input.) BFN's published code also clips predictions and
decodes with alpha_R = alpha_M; the row "BFN as published" does both. More networks move gamma_0 from lambda_0 to
infinity.

Unclipped noise prediction has no finite bound: an error e of the noise is an error e sqrt(alpha + c) / alpha of the
sample, and alpha begins at 0. A few levels near t = 0 then decide every estimate, so the likelihood is compared by the
median image, at equal numbers of levels.

Samples are drawn by the paper's sampler, whose steps depend on the offset, and by our solver for BSI, whose grid does
not: there the offset acts through the network alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from bsi.methods import BSI, Parametrization
from bsi.recipe import Recipe
from bsi.sampler import FLOW_SOLVER, Sampler
from bsi.studies import figures
from bsi.studies.job import OURS_NAME, Measure, measures_of, paper_sampler
from bsi.studies.report import Cell, Claim, Estimate, Report, Results, Study, Table, less, median_of_images
from bsi.studies.scale import Scale

__all__ = ["FACTORS", "STUDY", "parameters"]

FACTORS = ("hyper-prior", "offset", "preconditioning")
SOLVER = Sampler(solver=FLOW_SOLVER)


def parameters(undone: Collection[str]) -> dict[str, Any]:
    """The parameters of BSI with BFN's choice of these factors. Its own hyper-prior is gamma_0 = lambda_0."""
    own = BSI().lambda_0
    lambda_0 = 1.0 if "offset" in undone else own
    gamma_0 = math.inf if "hyper-prior" in undone else lambda_0**2 / own if "offset" in undone else None
    return {"lambda_0": lambda_0, "gamma_0": gamma_0}


def _without(scale: Scale, *undone: str) -> list[Recipe]:
    parametrization: Parametrization | None = "epsilon" if "preconditioning" in undone else None
    return [replace(recipe, parametrization=parametrization) for recipe in scale.bsi_networks(**parameters(undone))]


def _trained(scale: Scale) -> dict[str, list[Recipe]]:
    """All networks, by their names in the tables."""
    found = {"BSI": _without(scale)}
    found |= {f"without {factor}": _without(scale, factor) for factor in FACTORS}
    found["without all (BFN, not clipped)"] = _without(scale, *FACTORS)
    found["BFN as published"] = scale.parameters.networks("bfn")
    moved = [gamma_0 for gamma_0 in scale.gamma_0 if gamma_0 != BSI().lambda_0 and gamma_0 < math.inf]
    return found | {f"gamma_0 = {gamma_0:g}": scale.bsi_networks(gamma_0=gamma_0) for gamma_0 in moved}


def measures(scale: Scale) -> list[Measure]:
    samplers = paper_sampler(scale.most_steps), SOLVER
    return [job for networks in _trained(scale).values() for job in measures_of(scale, networks, *samplers)]


def report(results: Results) -> Report:
    scale, trained = results.scale, _trained(results.scale)
    bsi, sampler = trained["BSI"], paper_sampler(scale.most_steps)
    names = {sampler: f"{scale.metric} at {sampler.steps}", SOLVER: f"{scale.metric}, {OURS_NAME}"}
    claims: list[Claim] = []
    rows: list[tuple[Cell, ...]] = []
    changes: dict[str, list[Estimate]] = {}
    for name, networks in trained.items():
        distances = [results.distance(networks, how) for how in names]
        rows.append((name, results.bits(networks), median_of_images(results.image_bits(networks)), *distances))
        gaps = [results.distance_difference(bsi, networks, how) for how in names]
        if networks != bsi:
            median = median_of_images(results.image_bits(bsi) - results.image_bits(networks))
            changes[name] = [median, *gaps]
        factor = name.removeprefix("without ")
        if factor in FACTORS:
            for how, distance, gap in zip(names, distances, gaps, strict=True):
                by = ", by our solver" if how == SOLVER else ""
                statement = f"BSI's {factor} alone improves {scale.metric} over BFN's{by}"
                claims.append(less(statement, results.distance(bsi, how), distance, gap))

    figure, axes = figures.panels(3, width=2.8, height=3.2)
    units = ("bits/dim, median image", *names.values())
    for column, (panel, unit) in enumerate(zip(axes, units, strict=True)):
        shown = [found[column] for found in changes.values()]
        values, errors = [each.value for each in shown], [each.error for each in shown]
        panel.errorbar(values, range(len(shown)), xerr=errors, fmt="o", color=figures.COLORS["bsi"], capsize=2)
        panel.axvline(0, color=figures.GREY, linewidth=0.9)
        panel.set_yticks(range(len(shown)), changes if column == 0 else [])
        panel.invert_yaxis()
        panel.set_xlabel(unit)
    figure.suptitle("BSI less the other network (below 0: BSI is better)", fontsize=9.5, fontweight="bold")
    columns = ("network", "bits/dim of the median image", *names.values())
    return Report(
        tables=(
            Table("networks", (columns[0], "bits/dim", *columns[1:]), tuple(rows)),
            Table("BSI less the other network", columns, tuple((name, *found) for name, found in changes.items())),
        ),
        claims=tuple(claims),
        figure=figure,
        notes=(
            f"Our solver is {FLOW_SOLVER} here, for BFN as published too.",
            "Without BSI's preconditioning and without clipping the bound is infinite, and its estimates are decided "
            "by a few levels. The median image compares networks at equal numbers of levels; it is no bound there.",
        ),
        seeds=len(bsi),
    )


STUDY = Study(
    name="disentangle",
    paper="new",
    shows="which of the three changes between BFN and BSI matters: hyper-prior, offset of the levels, preconditioning",
    measures=measures,
    report=report,
)
