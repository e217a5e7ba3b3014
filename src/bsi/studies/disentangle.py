"""New: which of the three changes from BFN to BSI matters? The paper makes them at once; here each is made alone.

    hyper-prior       c = lambda_0^2 / gamma_0: the information of the initial belief. BSI 0.01, BFN 0
    offset            lambda_0: levels are uniform in ln(alpha + lambda_0), alpha the gain. BSI 0.01, BFN 1
    preconditioning   BSI a mixture of belief and correction ("edm"), BFN the noise ("epsilon")

In information coordinates (docs/architecture.md) a belief's content depends on alpha and c alone; lambda_0 is where the
grid of levels begins. So BSI(lambda_0, gamma_0) reaches all eight corners of this cube, BSI and BFN being opposite
ones. ("epsilon" takes the belief's mean as it is, so that there lambda_0 also sets the scale of the network's input.)
Two more differences are not of the method: BFN's published code clips predictions, and decodes with alpha_R = alpha_M.
The row "BFN as published" has both; the corner does not. A second cut keeps BSI and moves gamma_0 from lambda_0 to
infinity.

An unclipped prediction of the noise has no finite bound: alpha begins at 0, and an error e of the noise is one of
e sqrt(alpha + c) / alpha in the sample. Near t = 0 alpha is proportional to t, so that the squared error's mean over
levels is infinite, like the integral of 1 / t, or of 1 / t^2 with a hyper-prior. A few levels then make all of an
estimate, and changes are compared by the median image: at equal numbers of levels, for with more of them it would grow.

Samples are drawn by the paper's sampler, whose steps the offset spaces, and by our solver for BSI in few steps, whose
grid the offset does not move: what it changes there, it changes in the network.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from bsi.methods import BSI, Parametrization
from bsi.recipe import Recipe
from bsi.sampler import FLOW_SOLVER, Sampler
from bsi.studies import figures
from bsi.studies.estimates import (
    Estimate,
    bits,
    bits_difference,
    distance,
    distance_difference,
    median_bits,
    median_bits_difference,
    over_images,
    over_seeds,
)
from bsi.studies.job import Measure, Quality
from bsi.studies.report import Cell, Claim, Report, Study, Table, less
from bsi.studies.scale import Scale
from bsi.studies.standard import OURS, bounds, bsi_of, qualities, quality, seeded
from bsi.studies.store import Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CORNERS", "STUDY", "Corner"]

Factor = Literal["hyper-prior", "offset", "preconditioning"]
FACTORS: tuple[Factor, ...] = ("hyper-prior", "offset", "preconditioning")


@dataclass(frozen=True)
class Corner:
    """One of the eight; `True` is BSI's choice, `False` BFN's."""

    hyper_prior: bool
    offset: bool
    preconditioning: bool

    def method(self, bsi: BSI) -> BSI:
        """BSI with these choices; BSI's own hyper-prior is gamma_0 = lambda_0, left unsaid."""
        lambda_0, c = bsi.lambda_0 if self.offset else 1.0, bsi.lambda_0
        gamma_0 = math.inf if not self.hyper_prior else None if self.offset else lambda_0**2 / c
        return replace(bsi, lambda_0=lambda_0, gamma_0=gamma_0)

    @property
    def name(self) -> str:
        chosen = zip(FACTORS, (self.hyper_prior, self.offset, self.preconditioning), strict=True)
        return " + ".join(factor for factor, as_bsi in chosen if as_bsi) or "none"

    def without(self, factor: Factor) -> Corner:
        """The same with BFN's choice of one factor."""
        return replace(self, **{factor.replace("-", "_"): False})

    def has(self, factor: Factor) -> bool:
        return {"hyper-prior": self.hyper_prior, "offset": self.offset, "preconditioning": self.preconditioning}[factor]


MEDIAN = "bits/dim of the median image"
CORNERS = tuple(Corner(*choice) for choice in itertools.product((True, False), repeat=3))
BSI_CORNER, BFN_CORNER = CORNERS[0], CORNERS[-1]


def networks(scale: Scale, corner: Corner) -> list[Recipe]:
    """BSI's own preconditioning is left unsaid, so that BSI is the network of the other studies."""
    found = seeded(scale.parameter_recipe, "bsi", scale.parameter_seeds)
    parametrization: Parametrization | None = None if corner.preconditioning else "epsilon"
    return [replace(r, method=corner.method(bsi_of(r)), parametrization=parametrization) for r in found]


def _moved(scale: Scale, gamma_0: float) -> list[Recipe]:
    """BSI with another hyper-prior; at gamma_0 = lambda_0 it is BSI itself."""
    found = []
    for recipe in seeded(scale.parameter_recipe, "bsi", scale.parameter_seeds):
        method = bsi_of(recipe)
        found.append(replace(recipe, method=replace(method, gamma_0=None if gamma_0 == method.lambda_0 else gamma_0)))
    return found


def _published(scale: Scale) -> list[Recipe]:
    return seeded(scale.parameter_recipe, "bfn", scale.parameter_seeds)


def _ours(scale: Scale, some: list[Recipe]) -> list[Quality]:
    """By our solver for BSI, whatever the network."""
    return [quality(scale, network, Sampler.steps, FLOW_SOLVER, Sampler.grid) for network in some]


def measures(scale: Scale) -> list[Measure]:
    all_networks = [network for corner in CORNERS for network in networks(scale, corner)] + _published(scale)
    all_networks += [network for gamma_0 in scale.varied.gamma_0 for network in _moved(scale, gamma_0)]
    steps, found = max(scale.drawn.steps), list[Measure]()
    for each in all_networks:
        found += [*bounds(scale, [each]), *qualities(scale, [each], steps), *_ours(scale, [each])]
    return found


@dataclass(frozen=True)
class Found:
    """The median image's bits per dimension, and the Fréchet distance by the paper's sampler and by our solver; or
    changes of them."""

    median: Estimate
    paper: Estimate
    ours: Estimate


def _found(scale: Scale, store: Store, some: list[Recipe]) -> Found:
    return Found(
        median_bits(store, bounds(scale, some)),
        distance(store, qualities(scale, some, max(scale.drawn.steps))),
        distance(store, _ours(scale, some)),
    )


def _change(scale: Scale, store: Store, corner: Corner, factor: Factor) -> Found:
    """What BSI's choice of a factor changes there: along one edge of the cube."""
    steps, p, q = max(scale.drawn.steps), networks(scale, corner), networks(scale, corner.without(factor))
    return Found(
        median_bits_difference(store, bounds(scale, p), bounds(scale, q)),
        distance_difference(store, qualities(scale, p, steps), qualities(scale, q, steps)),
        distance_difference(store, _ours(scale, p), _ours(scale, q)),
    )


@dataclass(frozen=True)
class Effect:
    """What BSI's choice of one factor changes: from BSI's corner, from BFN's, and on average over the cube."""

    factor: Factor
    at_bsi: Found
    at_bfn: Found
    mean: Found


def _effect(scale: Scale, store: Store, factor: Factor) -> Effect:
    """The four edges of the cube count as seeds do: images are paired, and how the edges differ is in the error. They
    are four from however many seeds."""
    edges = {corner: _change(scale, store, corner, factor) for corner in CORNERS if corner.has(factor)}
    alone = next(corner for corner in edges if corner.without(factor) == BFN_CORNER)
    mean = Found(
        over_images([edge.median for edge in edges.values()]),
        over_seeds([edge.paper for edge in edges.values()]),
        over_seeds([edge.ours for edge in edges.values()]),
    )
    return Effect(factor, edges[BSI_CORNER], edges[alone], mean)


def _draw_effects(axes: Axes, effects: list[Effect], which: Literal["median", "paper", "ours"], unit: str) -> None:
    marks = (("s", "at_bsi", "the others as BSI"), ("o", "at_bfn", "the others as BFN"), ("D", "mean", "mean of four"))
    axes.axvline(0, color=figures.GREY, linewidth=0.9)
    for row, effect in enumerate(effects):
        for offset, (mark, name, words) in zip((-0.2, 0.0, 0.2), marks, strict=True):
            change = {"at_bsi": effect.at_bsi, "at_bfn": effect.at_bfn, "mean": effect.mean}[name]
            found = {"median": change.median, "paper": change.paper, "ours": change.ours}[which]
            color = figures.PALETTE[("at_bsi", "at_bfn", "mean").index(name) * 2 % 6]
            axes.errorbar(
                [found.value], [row + offset], xerr=[found.error], fmt=mark, color=color, capsize=2,
                label=words if row == 0 else None,
            )  # fmt: skip
    axes.set_yticks(range(len(effects)), [effect.factor for effect in effects] if which == "paper" else [])
    axes.set_ylim(len(effects) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel(f"{unit}: BSI's choice less BFN's")


def _draw(scale: Scale, store: Store) -> Figure:
    figure, axes = figures.panels(3, 2, width=3.5, height=2.6)
    effects = [_effect(scale, store, factor) for factor in FACTORS]
    _draw_effects(axes[0], effects, "paper", scale.metric)
    _draw_effects(axes[1], effects, "ours", scale.metric)
    _draw_effects(axes[2], effects, "median", "bits/dim")
    axes[0].set_title("One change: paper's sampler")
    axes[1].set_title("One change: our solver")
    axes[2].set_title("One change: the median image")
    axes[2].legend(loc="best", fontsize=7.5)
    gammas, steps = scale.varied.gamma_0, max(scale.drawn.steps)
    places = range(len(gammas))
    moved = [_moved(scale, g) for g in gammas]
    paper = [distance(store, qualities(scale, some, steps)) for some in moved]
    ours = [distance(store, _ours(scale, some)) for some in moved]
    likelihoods = [bits_difference(store, bounds(scale, some), bounds(scale, moved[0])) for some in moved]
    below = zip(axes[3:], (paper, ours, likelihoods), (scale.metric, scale.metric, "bits/dim less BSI's"), strict=True)
    for panel, found, name in below:
        figures.error_line(panel, list(places), found, figures.COLORS["bsi"])
        panel.set_xticks(places, ["∞" if math.isinf(g) else f"{g:g}" for g in gammas])
        panel.set_xlabel(r"$\gamma_0$, from $\lambda_0$ to a deterministic start")
        panel.set_ylabel(name)
        panel.margins(x=0.08, y=0.2)
    axes[3].set_title("Another hyper-prior: paper's sampler")
    axes[4].set_title("Another hyper-prior: our solver")
    axes[5].set_title("Another hyper-prior: likelihood")
    return figure


def _claims(scale: Scale, store: Store) -> tuple[Claim, ...]:
    """For each factor and sampler: does BSI's choice alone, the others being BSI's too, improve the samples?"""
    bsi, found = _found(scale, store, networks(scale, BSI_CORNER)), []
    for factor in FACTORS:
        other = _found(scale, store, networks(scale, BSI_CORNER.without(factor)))
        change = _change(scale, store, BSI_CORNER, factor)
        said = f"BSI's {factor} alone improves {scale.metric} over BFN's"
        found.append(less(said, bsi.paper, other.paper, change.paper))
        found.append(less(f"{said}, by our solver", bsi.ours, other.ours, change.ours))
    return tuple(found)


def report(scale: Scale, store: Store) -> Report:
    paper, ours = f"{scale.metric} at {max(scale.drawn.steps)}", f"{scale.metric}, {OURS}"

    def row(name: str, some: list[Recipe]) -> tuple[Cell, ...]:
        found = _found(scale, store, some)
        return name, bits(store, bounds(scale, some)), found.median, found.paper, found.ours

    label = {BSI_CORNER: " (BSI)", BFN_CORNER: " (BFN, not clipped)"}
    corners = [row(corner.name + label.get(corner, ""), networks(scale, corner)) for corner in CORNERS]
    effects = [_effect(scale, store, factor) for factor in FACTORS]
    return Report(
        tables=(
            Table(
                "corners",
                ("what is BSI's", "bits/dim", MEDIAN, paper, ours),
                (*corners, row("BFN as published", _published(scale))),
            ),
            Table(
                "effects",
                (
                    "BSI's choice of",
                    f"{MEDIAN}, mean",
                    f"{paper}, mean",
                    f"{paper}, others as BSI",
                    f"{paper}, others as BFN",
                    f"{ours}, mean",
                ),
                tuple(
                    (e.factor, e.mean.median, e.mean.paper, e.at_bsi.paper, e.at_bfn.paper, e.mean.ours)
                    for e in effects
                ),
            ),
            Table(
                "hyper-prior",
                ("gamma_0", "bits/dim", MEDIAN, paper, ours),
                tuple(row(f"{g:g}", _moved(scale, g)) for g in scale.varied.gamma_0),
            ),
        ),
        claims=_claims(scale, store),
        draw=lambda: _draw(scale, store),
        notes=(
            f"Our solver is {FLOW_SOLVER} here, for BFN as published too.",
            "Without BSI's preconditioning, and unclipped, the bound is infinite: a belief that begins with no "
            "information makes an unbounded error of the sample of any error of the noise. A few levels make all of "
            "its estimate. The median image's does not see them: it compares networks at equal numbers of levels, and "
            "is itself no bound there, for every image's is infinite.",
            "The error of the median image is that of having these test images and not others; a mean effect has in it "
            "how its four edges differ, too.",
        ),
    )


STUDY = Study(
    name="disentangle",
    paper="new",
    shows="which of the three changes between BFN and BSI matters: hyper-prior, offset of the levels, preconditioning",
    measures=measures,
    report=report,
)
