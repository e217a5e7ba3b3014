"""New: what sample quality costs in likelihood. The loss is weighed over the level, by its signal-to-noise ratio.

The ELBO gives every level its due, and most of its bits describe digits of a pixel that no one sees. Weights that fall
at high signal-to-noise ratios (objective.py) spend the network on what is visible. All are trained at levels drawn in
proportion to what is expected to be lost there, the ELBO too; how much that alone brings is told by a last row, the
ELBO at the paper's log-uniform levels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from bsi.objective import edm_weight, sigmoid_weight
from bsi.recipe import Objective, Recipe
from bsi.studies import figures
from bsi.studies.estimates import Estimate, bits, bits_difference, distance, distance_difference
from bsi.studies.job import Measure
from bsi.studies.report import Claim, Report, Study, Table, less
from bsi.studies.scale import Scale
from bsi.studies.standard import OURS, bounds, default_quality, qualities, seeded, solvers_said
from bsi.studies.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STUDY"]

LINES = {"elbo": "-", "sigmoid": "--", "edm": "-."}
ELBO, PAPER = Objective(levels="expected"), Objective()


def objectives(scale: Scale) -> dict[str, Objective]:
    found = {"ELBO": ELBO}
    found |= {f"sigmoid, b = {b:g}": replace(ELBO, weight="sigmoid", bias=b) for b in scale.varied.bias}
    return found | {"EDM": replace(ELBO, weight="edm"), "ELBO, the paper's levels": PAPER}


def networks(scale: Scale, objective: Objective) -> list[Recipe]:
    found = seeded(scale.parameter_recipe, "bsi", scale.parameter_seeds)
    return [replace(recipe, objective=objective) for recipe in found]


def measures(scale: Scale) -> list[Measure]:
    found: list[Measure] = []
    for objective in objectives(scale).values():
        for network in networks(scale, objective):
            found += [*bounds(scale, [network]), *qualities(scale, [network], max(scale.drawn.steps))]
            found.append(default_quality(scale, network))
    return found


def _measured(scale: Scale, store: Store, objective: Objective) -> tuple[Estimate, Estimate]:
    found = networks(scale, objective)
    return bits(store, bounds(scale, found)), distance(store, qualities(scale, found, max(scale.drawn.steps)))


def _draw(scale: Scale, store: Store) -> Figure:
    figure, (left, right) = figures.panels(2, width=3.5, height=2.9)
    method = scale.parameter_recipe("bsi").method
    level = method.levels.icdf(torch.linspace(0.05, 1, 400, dtype=torch.float64))
    gain = method.gain(level)
    log_snr = 2 * torch.log(gain) - torch.log(gain + method.c)
    points = []
    for (name, objective), color in zip(objectives(scale).items(), figures.PALETTE, strict=False):
        likelihood, quality = _measured(scale, store, objective)
        left.errorbar(
            [likelihood.value], [quality.value], xerr=[likelihood.error], yerr=[quality.error], fmt="o", color=color,
            capsize=2,
        )  # fmt: skip
        points.append(figures.Named(likelihood.value, quality.value, name, color))
        if objective == PAPER:
            continue
        if objective.weight == "elbo":
            weight = torch.ones_like(level)
        elif objective.weight == "sigmoid":
            weight = sigmoid_weight(method, objective.bias)(level)
        else:
            weight = edm_weight(method)(level)
            weight = weight / weight.max()
            name = f"{name}, over its largest"
        right.plot(log_snr, weight, LINES[objective.weight], color=color, label=name)
    left.set_xlabel("bits per dimension")
    left.set_ylabel(f"{scale.metric}, {max(scale.drawn.steps)} steps")
    left.margins(x=0.3, y=0.2)
    left.set_title("Likelihood against quality")
    right.set_xlabel("ln SNR")
    right.set_ylabel("factor on the ELBO's weight")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    right.set_title("The weights")
    figure.draw_without_rendering()  # the layout
    figures.label_points(left, points)
    return figure


def _claims(scale: Scale, store: Store, name: str, objective: Objective) -> list[Claim]:
    """It samples better than the ELBO, and has a worse bound."""
    weighed, plain, steps = networks(scale, objective), networks(scale, ELBO), max(scale.drawn.steps)
    (bits_weighed, fid_weighed), (bits_plain, fid_plain) = (_measured(scale, store, o) for o in (objective, ELBO))
    fid = distance_difference(store, qualities(scale, weighed, steps), qualities(scale, plain, steps))
    cost = bits_difference(store, bounds(scale, plain), bounds(scale, weighed))
    return [
        less(f"The weight {name} improves {scale.metric} over the ELBO's", fid_weighed, fid_plain, fid),
        less(f"The weight {name} costs likelihood: the ELBO's bound is below", bits_plain, bits_weighed, cost),
    ]


def _claim_of_levels(scale: Scale, store: Store) -> Claim:
    expected, paper = (bounds(scale, networks(scale, objective)) for objective in (ELBO, PAPER))
    difference = bits_difference(store, expected, paper)
    return less(
        "Levels drawn where loss is expected improve the ELBO over log-uniform ones",
        bits(store, expected),
        bits(store, paper),
        difference,
    )


def report(scale: Scale, store: Store) -> Report:
    rows = []
    for name, objective in objectives(scale).items():
        ours = distance(store, [default_quality(scale, network) for network in networks(scale, objective)])
        rows.append((name, *_measured(scale, store, objective), ours))
    steps = max(scale.drawn.steps)
    return Report(
        tables=(
            Table(
                "weights",
                ("weight", "bits/dim", f"{scale.metric} at {steps}", f"{scale.metric}, {OURS}"),
                tuple(rows),
            ),
        ),
        claims=(
            *(
                claim
                for name, objective in objectives(scale).items()
                if objective.weight != "elbo"
                for claim in _claims(scale, store, name, objective)
            ),
            _claim_of_levels(scale, store),
        ),
        draw=lambda: _draw(scale, store),
        notes=(solvers_said(scale.parameter_recipe, ("bsi",)),),
    )


STUDY = Study(
    name="weighting",
    paper="new",
    shows="bits/dim against FID when the loss is weighted over the level: what sample quality costs in likelihood",
    measures=measures,
    report=report,
)
