"""BSI with other parameters: Figures "lambda0" and "train-finite-k", and two studies of ours.

initial-precision   The paper's claims: likelihood improves as lambda_0 falls; with many steps a larger lambda_0 samples
                    slightly better, with few steps an intermediate one does.
finite-k            The paper's claim: training on L_M^k, used for k' steps, has no consistent advantage over L_M^inf.
weighting           New: most bits of the ELBO describe the least significant, invisible digits of the pixels. Weights
                    that fall at high signal-to-noise ratios (`bsi.objective`) spend the network's capacity on what is
                    visible. All networks, also that of the ELBO, are trained at levels drawn in proportion to the
                    expected loss; the last row, the ELBO at the paper's levels, shows the effect of the levels alone.
disentangle         New: which of the three changes from BFN to BSI matters? Each one is undone alone.

The three changes are the hyper-prior (c = lambda_0^2 / gamma_0, the information of the initial belief: BSI 0.01, BFN
0), the offset (lambda_0: levels are uniform in ln(alpha + lambda_0): BSI 0.01, BFN 1) and the preconditioning (BSI
"edm", BFN "epsilon"). In information coordinates (docs/architecture.md) a belief depends on alpha and c alone, so
BSI(lambda_0, gamma_0) covers every combination. BFN's published code also clips predictions and decodes with
alpha_R = alpha_M; the row "BFN as published" does both. Noise prediction without clipping has no finite bound: an error
e of the noise is an error e sqrt(alpha + c) / alpha of the sample, and alpha begins at 0. A few levels near t = 0 then
decide every estimate, so likelihoods are compared by the median image. The paper's sampler has steps that depend on the
offset; the grid of our solver does not: there the offset acts through the network alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bsi.methods import BSI
from bsi.recipe import Objective, Recipe
from bsi.sampler import FLOW_SOLVER, Sampler
from bsi.studies import figures
from bsi.studies.comparison import our_solvers
from bsi.studies.job import OURS, OURS_NAME, Measure, bound, measures_of, paper_sampler, quality
from bsi.studies.outcome import (
    Cell,
    Claim,
    Difference,
    Estimate,
    Outcome,
    Results,
    ResultTable,
    Verdict,
    all_of,
    less,
    median_of_images,
)
from bsi.studies.scale import Scale

Networks = dict[str, list[Recipe]]
"""Networks, one for each seed, by their names in the tables."""


def _with_objective(scale: Scale, objective: Objective) -> list[Recipe]:
    return [replace(recipe, objective=objective) for recipe in scale.parameters.networks("bsi")]


# initial-precision


def precision_measures(scale: Scale) -> list[Measure]:
    samplers = [paper_sampler(k) for k in scale.lambda_0_steps]
    groups = [scale.parameters.networks("bsi", lambda_0=value) for value in scale.lambda_0]
    return [job for networks in groups for job in measures_of(scale, networks, *samplers)]


def intermediate_is_best(values: Sequence[float], difference: Callable[[float, float], Difference]) -> Verdict:
    """Held if a value in between is better than both ends, not held if one end is better than all in between.

    Args:
        values: From the lowest to the highest.
        difference: The quantity at one value less that at another; lower is better.
    """
    ends, between = (values[0], values[-1]), values[1:-1]
    if any(all(difference(value, end).lower for end in ends) for value in between):
        return "held"
    if any(all(difference(end, value).lower for value in between) for end in ends):
        return "not held"
    return "undecided"


def report_precision(results: Results) -> Outcome:
    scale, values = results.scale, results.scale.lambda_0
    few, many, low, high = min(scale.lambda_0_steps), max(scale.lambda_0_steps), values[0], values[-1]
    trained = {value: scale.parameters.networks("bsi", lambda_0=value) for value in values}
    bits = {value: results.bits(networks) for value, networks in trained.items()}

    def distance(value: float, steps: int) -> Estimate:
        return results.distance(trained[value], paper_sampler(steps))

    def gap(a: float, b: float, steps: int = few) -> Difference:
        return results.distance_difference(trained[a], trained[b], paper_sampler(steps))

    falling = [
        less(f"{a:g} against {b:g}", bits[a], bits[b], results.bits_difference(trained[a], trained[b]))
        for a, b in itertools.pairwise(values)
    ]
    larger = f"With many steps ({many}) larger lambda_0 sample better: {high:g} against {low:g}"
    shown = ", ".join(f"{distance(value, few)} at {value:g}" for value in values)
    intermediate = f"With few steps ({few}) an intermediate lambda_0 samples best"

    figure, (left, right) = figures.panels(2)
    figures.line(left, values, list(bits.values()), figures.COLORS["bsi"])
    left.set(ylabel="bits per dimension", title="Likelihood")
    for steps, (color, mark) in zip(scale.lambda_0_steps, figures.SHADES, strict=False):
        figures.line(right, values, [distance(v, steps) for v in values], color, mark, label=f"{steps} steps")
    right.set(ylabel=scale.metric, title="Sample quality")
    right.legend()
    for axes in (left, right):
        figures.log_axis(axes, values, base=10)
        axes.set_xlabel(r"$\lambda_0$")
    samplers = {f"{scale.metric} at {k}": paper_sampler(k) for k in scale.lambda_0_steps}
    return Outcome(
        tables=(results.table("initial precision", "lambda_0", trained, samplers),),
        claims=(
            all_of("Likelihood improves with falling lambda_0, at each step of it", falling),
            less(larger, distance(high, many), distance(low, many), gap(high, low, many)),
            Claim(intermediate, intermediate_is_best(values, gap), shown),
        ),
        figure=figure,
        seeds=len(scale.parameters.seeds),
    )


# finite-k


def _trained_on(scale: Scale, k: int | None) -> list[Recipe]:
    return _with_objective(scale, Objective(finite_k=k))


def finite_measures(scale: Scale) -> list[Measure]:
    networks = [network for k in (None, *scale.trained_k) for network in _trained_on(scale, k)]
    return [
        job
        for network in networks
        for k in scale.evaluated_k
        for job in (bound(scale, network, k), quality(scale, network, paper_sampler(k)))
    ]


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


def report_finite(results: Results) -> Outcome:
    scale, evaluated = results.scale, results.scale.evaluated_k
    infinite, quantities = _trained_on(scale, None), (scale.metric, "bits/dim")
    differences: dict[tuple[int, str], list[Difference]] = {}
    for k in scale.trained_k:
        networks = _trained_on(scale, k)
        differences[k, scale.metric] = [
            results.distance_difference(networks, infinite, paper_sampler(at)) for at in evaluated
        ]
        differences[k, "bits/dim"] = [results.bits_difference(networks, infinite, at) for at in evaluated]

    figure, panels = figures.panels(2)
    for axes, quantity in zip(panels, quantities, strict=True):
        axes.axhline(0, color=figures.GREY, linewidth=0.9)
        for k, (color, mark) in zip(scale.trained_k, figures.SHADES, strict=False):
            figures.line(axes, evaluated, differences[k, quantity], color, mark, label=f"k = {k}")
        figures.log_axis(axes, evaluated)
        axes.set(xlabel="evaluated for k' steps", title="Trained on $L_M^k$ less $L_M^\\infty$", ylabel=quantity)
        axes.legend()
    columns = [f"{quantity} at k' = {at}" for quantity in quantities for at in evaluated]
    rows: list[tuple[Cell, ...]] = [
        (k, *itertools.chain.from_iterable(differences[k, quantity] for quantity in quantities))
        for k in scale.trained_k
    ]
    return Outcome(
        tables=(ResultTable("difference to training on L_M^inf", ("trained on k", *columns), tuple(rows)),),
        claims=(advantage({f"k = {k} in {quantity}": found for (k, quantity), found in differences.items()}),),
        figure=figure,
        seeds=len(infinite),
    )


# weighting


ELBO, PAPER_LEVELS = "ELBO", "ELBO, the paper's levels"


def objectives(scale: Scale) -> dict[str, Objective]:
    elbo = Objective(levels="expected")
    found = {ELBO: elbo} | {f"sigmoid, b = {b:g}": replace(elbo, weight="sigmoid", bias=b) for b in scale.bias}
    return found | {"EDM": replace(elbo, weight="edm"), PAPER_LEVELS: Objective()}


def _weighted(scale: Scale) -> Networks:
    return {name: _with_objective(scale, objective) for name, objective in objectives(scale).items()}


def weighting_measures(scale: Scale) -> list[Measure]:
    samplers = paper_sampler(scale.most_steps), OURS
    return [job for networks in _weighted(scale).values() for job in measures_of(scale, networks, *samplers)]


def report_weighting(results: Results) -> Outcome:
    scale, sampler, trained = results.scale, paper_sampler(results.scale.most_steps), _weighted(results.scale)
    bits = {name: results.bits(found) for name, found in trained.items()}
    distances = {name: results.distance(found, sampler) for name, found in trained.items()}
    elbo, claims = trained[ELBO], []
    for name in [name for name in trained if name not in (ELBO, PAPER_LEVELS)]:
        gap, cost = (
            results.distance_difference(trained[name], elbo, sampler),
            results.bits_difference(elbo, trained[name]),
        )
        better = f"The weight {name} improves {scale.metric} over the ELBO's"
        worse = f"The weight {name} costs likelihood: the ELBO's bound is below"
        claims.append(less(better, distances[name], distances[ELBO], gap))
        claims.append(less(worse, bits[ELBO], bits[name], cost))
    statement = "Levels drawn where loss is expected improve the ELBO over log-uniform ones"
    change = results.bits_difference(elbo, trained[PAPER_LEVELS])
    claims.append(less(statement, bits[ELBO], bits[PAPER_LEVELS], change))

    figure, (axes,) = figures.panels(1)
    for name, color in zip(trained, figures.PALETTE, strict=False):
        x, y = [bits[name].value], [distances[name]]
        figures.line(axes, x, y, color, xerr=[bits[name].error], linestyle="", label=name)
    axes.set(xlabel="bits per dimension", ylabel=f"{scale.metric}, {sampler.steps} steps")
    axes.legend()
    samplers = {f"{scale.metric} at {sampler.steps}": sampler, f"{scale.metric}, {OURS_NAME}": OURS}
    return Outcome(
        tables=(results.table("weights", "weight", trained, samplers),),
        claims=tuple(claims),
        figure=figure,
        notes=(our_solvers({"BSI": elbo[0]}, scale),),
        seeds=len(elbo),
    )


# disentangle


FACTORS = ("hyper-prior", "offset", "preconditioning")
SOLVER = Sampler(solver=FLOW_SOLVER)


def parameters(undone: Collection[str]) -> dict[str, Any]:
    """The parameters of BSI with BFN's choice of these factors. Its own hyper-prior is gamma_0 = lambda_0."""
    own = BSI().lambda_0
    lambda_0 = 1.0 if "offset" in undone else own
    gamma_0 = math.inf if "hyper-prior" in undone else lambda_0**2 / own if "offset" in undone else None
    return {"lambda_0": lambda_0, "gamma_0": gamma_0}


def _without(scale: Scale, *undone: str) -> list[Recipe]:
    networks = scale.parameters.networks("bsi", **parameters(undone))
    return [replace(n, parametrization="epsilon" if "preconditioning" in undone else None) for n in networks]


def _undone(scale: Scale) -> Networks:
    found = {"BSI": _without(scale)} | {f"without {factor}": _without(scale, factor) for factor in FACTORS}
    found["without all (BFN, not clipped)"] = _without(scale, *FACTORS)
    found["BFN as published"] = scale.parameters.networks("bfn")
    moved = {f"gamma_0 = {value:g}": scale.parameters.networks("bsi", gamma_0=value) for value in scale.gamma_0}
    return found | moved


def disentangle_measures(scale: Scale) -> list[Measure]:
    samplers = paper_sampler(scale.most_steps), SOLVER
    return [job for networks in _undone(scale).values() for job in measures_of(scale, networks, *samplers)]


def report_disentangle(results: Results) -> Outcome:
    scale, trained = results.scale, _undone(results.scale)
    bsi, sampler = trained["BSI"], paper_sampler(scale.most_steps)
    samplers = {f"{scale.metric} at {sampler.steps}": sampler, f"{scale.metric}, {OURS_NAME}": SOLVER}
    bits = {name: results.image_bits(networks) for name, networks in trained.items()}
    changes: dict[str, list[Difference | Estimate]] = {}
    claims: list[Claim] = []
    for name, networks in trained.items():
        gaps = [results.distance_difference(bsi, networks, how) for how in samplers.values()]
        if name != "BSI":
            changes[name] = [median_of_images(bits["BSI"] - bits[name]), *gaps]
        factor = name.removeprefix("without ")
        for how, gap in zip(samplers.values(), gaps if factor in FACTORS else (), strict=False):
            by = ", by our solver" if how == SOLVER else ""
            statement = f"BSI's {factor} alone improves {scale.metric} over BFN's{by}"
            claims.append(less(statement, results.distance(bsi, how), results.distance(networks, how), gap))

    figure, axes = figures.panels(3, width=2.8, height=3.2)
    units = ("bits/dim of the median image", *samplers)
    for column, (panel, unit) in enumerate(zip(axes, units, strict=True)):
        shown = [found[column] for found in changes.values()]
        values, errors = [each.value for each in shown], [each.error for each in shown]
        panel.errorbar(values, range(len(shown)), xerr=errors, fmt="o", color=figures.COLORS["bsi"], capsize=2)
        panel.axvline(0, color=figures.GREY, linewidth=0.9)
        panel.set_yticks(range(len(shown)), changes if column == 0 else [])
        panel.invert_yaxis()
        panel.set_xlabel(unit)
    figure.suptitle("BSI less the other network (below 0: BSI is better)", fontsize=9.5, fontweight="bold")
    table = results.table("networks", "network", trained, samplers)
    rows: list[tuple[Cell, ...]] = [(name, *found) for name, found in changes.items()]
    return Outcome(
        tables=(
            table.with_columns(2, {units[0]: [median_of_images(each) for each in bits.values()]}),
            ResultTable("BSI less the other network", ("network", *units), tuple(rows)),
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
