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
from bsi.studies.comparison import our_solvers
from bsi.studies.job import Measure, bound, measures_of, paper_sampler, quality, samplers_of
from bsi.studies.outcome import (
    COLORS,
    GREY,
    PALETTE,
    Claim,
    Difference,
    Outcome,
    Results,
    ResultTable,
    Row,
    Verdict,
    all_of,
    curves,
    median_of_images,
    panels,
    study,
)
from bsi.studies.scale import Scale


def _with_objective(scale: Scale, objective: Objective) -> list[Recipe]:
    return [replace(recipe, objective=objective) for recipe in scale.parameters.networks("bsi")]


def _measures(scale: Scale, groups: Mapping[Any, list[Recipe]], samplers: Mapping[str, Sampler]) -> list[Measure]:
    return [job for networks in groups.values() for job in measures_of(scale, networks, samplers)]


# initial-precision


def _precisions(scale: Scale) -> dict[float, list[Recipe]]:
    return {value: scale.parameters.networks("bsi", lambda_0=value) for value in scale.lambda_0}


def _precision_samplers(scale: Scale) -> dict[str, Sampler]:
    return {f"{scale.metric} at {k}": paper_sampler(k) for k in scale.lambda_0_steps}


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


@study(
    'Figure "lambda0"',
    "bits/dim and FID against lambda_0 and steps",
    lambda scale: _measures(scale, _precisions(scale), _precision_samplers(scale)),
)
def initial_precision(results: Results) -> Outcome:
    scale, trained = results.scale, _precisions(results.scale)
    few, many = paper_sampler(min(scale.lambda_0_steps)), paper_sampler(max(scale.lambda_0_steps))
    values, samplers = list(trained), _precision_samplers(scale)
    low, high = values[0], values[-1]
    rows = [{"lambda_0": value, **results.row(networks, samplers)} for value, networks in trained.items()]

    def gap(a: float, b: float) -> Difference:
        return results.distance_difference(trained[a], trained[b], few)

    falling = [results.less_bits(f"{a:g} against {b:g}", trained[a], trained[b]) for a, b in itertools.pairwise(values)]
    larger = f"With many steps ({many.steps}) larger lambda_0 sample better: {high:g} against {low:g}"
    intermediate = f"With few steps ({few.steps}) an intermediate lambda_0 samples best"
    shown = ", ".join(f"{results.distance(networks, few)} at {value:g}" for value, networks in trained.items())
    claims = [
        all_of("Likelihood improves with falling lambda_0, at each step of it", falling),
        results.less_distance(larger, trained[high], trained[low], many),
        Claim(intermediate, intermediate_is_best(values, gap), shown),
    ]
    figure, (left, right) = panels(2)
    x = r"$\lambda_0$"
    bits = {"BSI": [row["bits/dim"] for row in rows]}
    distances = {name: [row[name] for row in rows] for name in samplers}
    curves(left, values, bits, base=10, xlabel=x, ylabel="bits per dimension", title="Likelihood")
    curves(right, values, distances, base=10, xlabel=x, ylabel=scale.metric, title="Sample quality")
    return Outcome([ResultTable("initial precision", rows)], claims, figure)


# finite-k


def _finite_measures(scale: Scale) -> list[Measure]:
    return [
        job
        for trained_k in (None, *scale.trained_k)
        for network in _with_objective(scale, Objective(finite_k=trained_k))
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


@study(
    'Figure "train-finite-k"',
    "networks trained on L_M^k against L_M^inf, evaluated at k'",
    _finite_measures,
)
def finite_k(results: Results) -> Outcome:
    scale, evaluated = results.scale, results.scale.evaluated_k
    infinite = _with_objective(scale, Objective())
    found: dict[str, dict[str, list[Difference]]] = {scale.metric: {}, "bits/dim": {}}
    rows = []
    for k in scale.trained_k:
        networks, name = _with_objective(scale, Objective(finite_k=k)), f"k = {k}"
        found[scale.metric][name] = [
            results.distance_difference(networks, infinite, paper_sampler(at)) for at in evaluated
        ]
        found["bits/dim"][name] = [results.bits_difference(networks, infinite, at) for at in evaluated]
        row: dict[str, Any] = {"trained on k": k}
        for quantity, gaps in found.items():
            row |= {f"{quantity} at k' = {at}": gap for at, gap in zip(evaluated, gaps[name], strict=True)}
        rows.append(row)
    figure, axes = panels(2)
    for panel, (quantity, each) in zip(axes, found.items(), strict=True):
        panel.axhline(0, color=GREY, linewidth=0.9)
        curves(panel, evaluated, each, xlabel="evaluated for k' steps", ylabel=quantity)
        panel.set_title("Trained on $L_M^k$ less $L_M^\\infty$")
    claim = advantage({f"{name} in {q}": gaps for q, each in found.items() for name, gaps in each.items()})
    return Outcome([ResultTable("difference to training on L_M^inf", rows)], [claim], figure)


# weighting


ELBO, PAPER_LEVELS = "ELBO", "ELBO, the paper's levels"


def _weighted(scale: Scale) -> dict[str, list[Recipe]]:
    elbo = Objective(levels="expected")
    objectives = {ELBO: elbo} | {f"sigmoid, b = {b:g}": replace(elbo, weight="sigmoid", bias=b) for b in scale.bias}
    objectives |= {"EDM": replace(elbo, weight="edm"), PAPER_LEVELS: Objective()}
    return {name: _with_objective(scale, objective) for name, objective in objectives.items()}


@study(
    "new",
    "bits/dim against FID when the loss is weighted over the level: what sample quality costs in likelihood",
    lambda scale: _measures(scale, _weighted(scale), samplers_of(scale, scale.most_steps)),
)
def weighting(results: Results) -> Outcome:
    scale, trained = results.scale, _weighted(results.scale)
    samplers, sampler = samplers_of(scale, scale.most_steps), paper_sampler(scale.most_steps)
    elbo, claims = trained[ELBO], []
    for name, networks in trained.items():
        if name not in (ELBO, PAPER_LEVELS):
            better = f"The weight {name} improves {scale.metric} over the ELBO's"
            worse = f"The weight {name} costs likelihood: the ELBO's bound is below"
            claims.append(results.less_distance(better, networks, elbo, sampler))
            claims.append(results.less_bits(worse, elbo, networks))
    statement = "Levels drawn where loss is expected improve the ELBO over log-uniform ones"
    claims.append(results.less_bits(statement, elbo, trained[PAPER_LEVELS]))

    rows = [{"weight": name, **results.row(networks, samplers)} for name, networks in trained.items()]
    figure, (axes,) = panels(1)
    for row, color in zip(rows, PALETTE, strict=False):
        x, y = row["bits/dim"], row[f"{scale.metric} at {sampler.steps}"]
        axes.errorbar(x.value, y.value, y.error, x.error, fmt="o", color=color, capsize=2, label=row["weight"])
    axes.set(xlabel="bits per dimension", ylabel=f"{scale.metric}, {sampler.steps} steps")
    axes.legend()
    return Outcome([ResultTable("weights", rows)], claims, figure, [our_solvers(elbo[0])])


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


def _undone(scale: Scale) -> dict[str, list[Recipe]]:
    found = {"BSI": _without(scale)} | {f"without {factor}": _without(scale, factor) for factor in FACTORS}
    found["without all (BFN, not clipped)"] = _without(scale, *FACTORS)
    found["BFN as published"] = scale.parameters.networks("bfn")
    moved = {f"gamma_0 = {value:g}": scale.parameters.networks("bsi", gamma_0=value) for value in scale.gamma_0}
    return found | moved


@study(
    "new",
    "which of the three changes between BFN and BSI matters: hyper-prior, offset of the levels, preconditioning",
    lambda scale: _measures(scale, _undone(scale), samplers_of(scale, scale.most_steps, ours=SOLVER)),
)
def disentangle(results: Results) -> Outcome:
    scale, trained = results.scale, _undone(results.scale)
    samplers = samplers_of(scale, scale.most_steps, ours=SOLVER)
    bsi, median = trained["BSI"], "bits/dim of the median image"
    bits = {name: results.image_bits(networks) for name, networks in trained.items()}
    rows, changes, claims = list[Row](), list[Row](), []
    for name, networks in trained.items():
        row: Row = {"network": name, "bits/dim": None, median: median_of_images(bits[name])}
        rows.append(row | results.row(networks, samplers))
        if name != "BSI":
            gaps = {unit: results.distance_difference(bsi, networks, how) for unit, how in samplers.items()}
            changes.append({"network": name, median: median_of_images(bits["BSI"] - bits[name]), **gaps})
        factor = name.removeprefix("without ")
        for how in samplers.values() if factor in FACTORS else ():
            by = ", by our solver" if how == SOLVER else ""
            statement = f"BSI's {factor} alone improves {scale.metric} over BFN's{by}"
            claims.append(results.less_distance(statement, bsi, networks, how))

    figure, axes = panels(3, width=2.8, height=3.2)
    for panel, unit in zip(axes, (median, *samplers), strict=True):
        shown, names = [row[unit] for row in changes], [row["network"] for row in changes]
        values, errors = [each.value for each in shown], [each.error for each in shown]
        panel.errorbar(values, range(len(shown)), xerr=errors, fmt="o", color=COLORS["bsi"], capsize=2)
        panel.axvline(0, color=GREY, linewidth=0.9)
        panel.set_yticks(range(len(shown)), names if unit == median else [])
        panel.invert_yaxis()
        panel.set_xlabel(unit)
    figure.suptitle("BSI less the other network (below 0: BSI is better)", fontsize=9.5, fontweight="bold")
    notes = [
        f"Our solver is {FLOW_SOLVER} here, for BFN as published too.",
        "Without BSI's preconditioning and without clipping the bound is infinite, and its estimates are decided "
        "by a few levels. The median image compares networks at equal numbers of levels; it is no bound there.",
    ]
    tables = [ResultTable("networks", rows), ResultTable("BSI less the other network", changes)]
    return Outcome(tables, claims, figure, notes)
