"""New: which of the three changes from BFN to BSI matters? The paper makes them at once; here each is made alone.

    hyper-prior       c = lambda_0^2 / gamma_0: the information of the initial belief. BSI 0.01, BFN 0
    offset            lambda_0: levels are uniform in ln(alpha + lambda_0), alpha the gain. BSI 0.01, BFN 1
    preconditioning   BSI a mixture of belief and correction ("edm"), BFN the noise ("epsilon")

In information coordinates (docs/architecture.md) a belief depends on alpha and c alone, and lambda_0 is where the grid
of levels begins. So BSI(lambda_0, gamma_0) reaches all eight corners of this cube, with BSI and BFN at opposite
corners. ("epsilon" uses the belief's mean unscaled, so there lambda_0 also sets the scale of the network's input.)
BFN's published code also clips predictions and decodes with alpha_R = alpha_M; the row "BFN as published" does both. A
second series of networks keeps BSI and moves gamma_0 from lambda_0 to infinity.

Unclipped noise prediction has no finite bound: an error e of the noise is an error e sqrt(alpha + c) / alpha of the
sample, and alpha begins at 0. A few levels near t = 0 then decide every estimate, so the likelihood is compared by the
median image, at equal numbers of levels.

Samples are drawn by the paper's sampler, whose steps depend on the offset, and by our solver for BSI, whose grid does
not: there the offset acts through the network alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

from bsi.methods import BSI, Parametrization
from bsi.recipe import Recipe
from bsi.sampler import FLOW_SOLVER, Sampler
from bsi.studies import figures
from bsi.studies.job import OURS_NAME, Measure, measures_of, paper_sampler
from bsi.studies.report import Claim, Estimate, Report, Results, Study, Table, less, median_of_images
from bsi.studies.scale import Scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["CORNERS", "FACTORS", "STUDY", "Corner", "change", "networks"]

FACTORS = ("hyper-prior", "offset", "preconditioning")
MEDIAN = "bits/dim of the median image"
BSI_SAMPLER = Sampler(solver=FLOW_SOLVER)


@dataclass(frozen=True)
class Corner:
    """A corner of the cube; `True` is BSI's choice, `False` BFN's."""

    hyper_prior: bool
    offset: bool
    preconditioning: bool

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of BSI with these choices. Its own hyper-prior is gamma_0 = lambda_0, the default."""
        lambda_0 = BSI().lambda_0 if self.offset else 1.0
        gamma_0 = math.inf if not self.hyper_prior else None if self.offset else lambda_0**2 / BSI().lambda_0
        return {"lambda_0": lambda_0, "gamma_0": gamma_0}

    @property
    def name(self) -> str:
        chosen = " + ".join(factor for factor, as_bsi in zip(FACTORS, astuple(self), strict=True) if as_bsi) or "none"
        return chosen + (" (BSI)" if all(astuple(self)) else " (BFN, not clipped)" if not any(astuple(self)) else "")

    def using(self, factor: str, as_bsi: bool = True) -> Corner:
        """The same with BSI's choice of one factor, or with BFN's."""
        return replace(self, **{factor.replace("-", "_"): as_bsi})


CORNERS = tuple(Corner(*choice) for choice in itertools.product((True, False), repeat=3))


def networks(scale: Scale, corner: Corner) -> list[Recipe]:
    """The networks of a corner; those of BSI's corner are shared with other studies."""
    parametrization: Parametrization | None = None if corner.preconditioning else "epsilon"
    return [replace(recipe, parametrization=parametrization) for recipe in scale.bsi_networks(**corner.parameters)]


def _with_gamma(scale: Scale, gamma_0: float) -> list[Recipe]:
    """BSI with another hyper-prior; with gamma_0 = lambda_0 it is BSI itself."""
    return scale.bsi_networks(gamma_0=None if gamma_0 == BSI().lambda_0 else gamma_0)


def _trained(scale: Scale) -> dict[str, list[Recipe]]:
    """All networks by their names in the tables."""
    found = {corner.name: networks(scale, corner) for corner in CORNERS}
    found["BFN as published"] = scale.parameters.networks("bfn")
    return found | {f"gamma_0 = {gamma_0:g}": _with_gamma(scale, gamma_0) for gamma_0 in scale.gamma_0}


def measures(scale: Scale) -> list[Measure]:
    samplers = paper_sampler(scale.most_steps), BSI_SAMPLER
    return [job for trained in _trained(scale).values() for job in measures_of(scale, trained, *samplers)]


@dataclass(frozen=True)
class Change:
    """What BSI's choice of one factor changes, the other two being those of BSI or of BFN."""

    paper: Estimate
    """The Fréchet distance by the paper's sampler."""
    ours: Estimate
    """The Fréchet distance by our solver."""
    median: Estimate
    """Bits per dimension of the median image."""


def change(results: Results, factor: str, corner: Corner) -> Change:
    """BSI's choice less BFN's along the edge of the cube from a corner."""
    a, b = networks(results.scale, corner), networks(results.scale, corner.using(factor, as_bsi=False))
    return Change(
        results.distance_difference(a, b, paper_sampler(results.scale.most_steps)),
        results.distance_difference(a, b, BSI_SAMPLER),
        median_of_images(results.image_bits(a) - results.image_bits(b)),
    )


def _draw(results: Results, changes: Mapping[str, Sequence[Change]]) -> Figure:
    scale = results.scale
    moved = [_with_gamma(scale, gamma_0) for gamma_0 in scale.gamma_0]
    below = [
        [results.distance(found, paper_sampler(scale.most_steps)) for found in moved],
        [results.distance(found, BSI_SAMPLER) for found in moved],
        [results.bits_difference(found, moved[0]) for found in moved],
    ]
    titles, units = ("paper's sampler", "our solver", "likelihood"), (scale.metric, scale.metric, "bits/dim")
    figure, axes = figures.panels(3, 2)
    for column, (title, unit, found) in enumerate(zip(titles, units, below, strict=True)):
        upper, lower = axes[column], axes[column + 3]
        upper.axvline(0, color=figures.GREY, linewidth=0.9)
        for offset, (name, edges), color in zip((-0.1, 0.1), changes.items(), figures.PALETTE, strict=False):
            each = [astuple(edge)[column] for edge in edges]
            rows = [row + offset for row in range(len(each))]
            values, errors = [value for value, _ in each], [error for _, error in each]
            upper.errorbar(values, rows, xerr=errors, fmt="o", color=color, capsize=2, label=name)
        upper.set_yticks(range(len(FACTORS)), FACTORS if column == 0 else [])
        upper.set_ylim(len(FACTORS) - 0.5, -0.5)
        upper.set_xlabel(f"{unit}: BSI's choice less BFN's")
        upper.set_title(f"One change: {title}")
        figures.line(lower, range(len(moved)), found, figures.COLORS["bsi"])
        lower.set_xticks(range(len(moved)), [f"{gamma_0:g}" for gamma_0 in scale.gamma_0])
        lower.set_xlabel(r"$\gamma_0$, from $\lambda_0$ to a deterministic start")
        lower.set_ylabel(unit if column < 2 else "bits/dim less BSI's")
        lower.set_title(f"Another hyper-prior: {title}")
    axes[0].legend()
    return figure


def _claims(results: Results) -> list[Claim]:
    """For each factor and sampler: does BSI's choice improve the samples if the others are BSI's too?"""
    scale, bsi, found = results.scale, networks(results.scale, CORNERS[0]), []
    for factor in FACTORS:
        other = networks(scale, CORNERS[0].using(factor, as_bsi=False))
        for sampler, by in ((paper_sampler(scale.most_steps), ""), (BSI_SAMPLER, ", by our solver")):
            statement = f"BSI's {factor} alone improves {scale.metric} over BFN's{by}"
            a, b = results.distance(bsi, sampler), results.distance(other, sampler)
            found.append(less(statement, a, b, results.distance_difference(bsi, other, sampler)))
    return found


def report(results: Results) -> Report:
    scale, sampler = results.scale, paper_sampler(results.scale.most_steps)
    paper, ours = f"{scale.metric} at {sampler.steps}", f"{scale.metric}, {OURS_NAME}"
    rows = [
        (
            name,
            results.bits(trained),
            median_of_images(results.image_bits(trained)),
            results.distance(trained, sampler),
            results.distance(trained, BSI_SAMPLER),
        )
        for name, trained in _trained(scale).items()
    ]
    others = {"others as BSI": CORNERS[0], "others as BFN": CORNERS[-1]}
    changes = {
        name: [change(results, factor, corner.using(factor)) for factor in FACTORS] for name, corner in others.items()
    }
    edges = [
        (factor, name, edge.paper, edge.ours, edge.median)
        for name, found in changes.items()
        for factor, edge in zip(FACTORS, found, strict=True)
    ]
    return Report(
        tables=(
            Table("networks", ("what is BSI's", "bits/dim", MEDIAN, paper, ours), tuple(rows)),
            Table("changes", ("BSI's choice of", "with", paper, ours, MEDIAN), tuple(edges)),
        ),
        claims=tuple(_claims(results)),
        figure=_draw(results, changes),
        notes=(
            f"Our solver is {FLOW_SOLVER} here, for BFN as published too.",
            "Without BSI's preconditioning and without clipping the bound is infinite, and its estimates are decided "
            "by a few levels. The median image compares networks at equal numbers of levels; it is no bound there.",
        ),
        seeds=len(scale.parameters.seeds),
    )


STUDY = Study(
    name="disentangle",
    paper="new",
    shows="which of the three changes between BFN and BSI matters: hyper-prior, offset of the levels, preconditioning",
    measures=measures,
    report=report,
)
