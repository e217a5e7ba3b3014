"""BSI with other parameters: Figures "lambda0" and "train-finite-k", and three studies of ours.

initial-precision   The paper's claims: likelihood improves as lambda_0 falls; with many steps a larger lambda_0 samples
                    slightly better, with few steps an intermediate one does.
finite-k            The paper's claim: training on L_M^k, used for k' steps, has no consistent advantage over L_M^inf.
weighting           New: most bits of the ELBO describe the least significant, invisible digits of the pixels. Weights
                    that fall at high signal-to-noise ratios (`bsi.objective`) spend the network's capacity on what is
                    visible. All networks, also that of the ELBO, are trained at levels drawn in proportion to the
                    expected loss; the last row, the ELBO at the paper's levels, shows the effect of the levels alone.
parametrization     New: what the network predicts, and whether x_hat is clipped to the data's range. In the published
                    methods BSI uses "edm" without clipping, VDM predicts the noise, and BFN predicts it and clips.
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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bsi.methods import BSI, Parametrization
from bsi.recipe import Objective, Recipe
from bsi.sampler import FLOW_SOLVER, Sampler
from bsi.studies import outcome
from bsi.studies.comparison import EQUAL_BITS, our_solvers
from bsi.studies.measure import OURS, bound, bound_and_quality, paper_sampler, quality, samplers_of
from bsi.studies.outcome import Claim, Estimate, Outcome, Row, StudySteps, Verdict, study
from bsi.studies.scale import Scale


@study('Figure "lambda0"', "bits/dim and FID against lambda_0 and steps")
def initial_precision(scale: Scale) -> StudySteps:
    values = scale.lambda_0
    trained = {value: scale.parameters.networks("bsi", lambda_0=value) for value in values}
    samplers = {f"{scale.metric} at {k}": paper_sampler(k) for k in scale.parameter_steps}
    results = yield bound_and_quality(scale, samplers, *trained.values())

    rows = [{"lambda_0": value, **results.row(networks, samplers)} for value, networks in trained.items()]
    (few, *_, many), (low, *between, high) = samplers.values(), values
    best = min(between, key=lambda value: results.distance(trained[value], few).value)
    falling = [results.bits_difference(trained[a], trained[b]) for a, b in itertools.pairwise(values)]
    larger = f"With many steps ({many.steps}) larger lambda_0 sample better: {high:g} against {low:g}"
    intermediate = (
        f"With few steps ({few.steps}) an intermediate lambda_0, {best:g}, samples better than {low:g} and {high:g}"
    )
    to_ends = [results.distance_difference(trained[best], trained[end], few) for end in (low, high)]
    claims = [
        outcome.all_less("Likelihood improves with falling lambda_0, at each step of it", falling),
        results.less_distance(larger, trained[high], trained[low], many),
        outcome.all_less(intermediate, to_ends),
    ]
    figure, (left, right) = outcome.panels(2)
    x, bits = r"$\lambda_0$", {"BSI": [row["bits/dim"] for row in rows]}
    distances = {name: [row[name] for row in rows] for name in samplers}
    outcome.curves(left, values, bits, base=10, xlabel=x, ylabel="bits per dimension", title="Likelihood")
    outcome.curves(right, values, distances, base=10, xlabel=x, ylabel=scale.metric, title="Sample quality")
    return Outcome({"initial precision": rows}, claims, figure)


def advantage(differences: Mapping[str, Sequence[Estimate]]) -> Claim:
    """The claim that no training has a consistent advantage: one at every k', refuted by a disadvantage at one k'.

    The differences are those to training on L_M^inf at every k', for each trained k and quantity.
    """
    better = [name for name, gaps in differences.items() if all(gap.lower for gap in gaps)]
    worse = [name for name, gaps in differences.items() if any(gap.higher for gap in gaps)]
    verdict: Verdict = "not held" if better else "held" if len(worse) == len(differences) else "undecided"
    because = f"better at every k': {', '.join(better) or 'none'}; worse at some k': {', '.join(worse) or 'none'}"
    return Claim("Training on L_M^k confers no consistent advantage over L_M^inf", verdict, because)


def _with_objective(scale: Scale, objective: Objective) -> list[Recipe]:
    return [replace(recipe, objective=objective) for recipe in scale.parameters.networks("bsi")]


@study('Figure "train-finite-k"', "networks trained on L_M^k against L_M^inf, evaluated at k'")
def finite_k(scale: Scale) -> StudySteps:
    ks, infinite = scale.parameter_steps, _with_objective(scale, Objective())
    trained = {k: _with_objective(scale, Objective(finite_k=k)) for k in scale.trained_k}
    results = yield [
        job
        for network in itertools.chain(infinite, *trained.values())
        for k in ks
        for job in (bound(scale, network, k), quality(scale, network, paper_sampler(k)))
    ]

    found: dict[str, dict[str, list[Estimate]]] = {scale.metric: {}, "bits/dim": {}}
    for k, networks in trained.items():
        distances = [results.distance_difference(networks, infinite, paper_sampler(at)) for at in ks]
        found[scale.metric][f"k = {k}"] = distances
        found["bits/dim"][f"k = {k}"] = [results.bits_difference(networks, infinite, at) for at in ks]
    rows = [
        {"trained on": k, **{f"{q} at k' = {at}": each[k][i] for q, each in found.items() for i, at in enumerate(ks)}}
        for k in found["bits/dim"]
    ]
    figure, axes = outcome.panels(2)
    for panel, (quantity, each) in zip(axes, found.items(), strict=True):
        panel.axhline(0, color=outcome.GREY, linewidth=0.9)
        title = "Trained on $L_M^k$ less $L_M^\\infty$"
        outcome.curves(panel, ks, each, xlabel="evaluated for k' steps", ylabel=quantity, title=title)
    claim = advantage({f"{name} in {q}": gaps for q, each in found.items() for name, gaps in each.items()})
    return Outcome({"difference to training on L_M^inf": rows}, [claim], figure)


@study("new", "bits/dim against FID when the loss is weighted over the level: what sample quality costs in likelihood")
def weighting(scale: Scale) -> StudySteps:
    elbo = Objective(levels="expected")
    objectives = {"ELBO": elbo} | {f"sigmoid, b = {b:g}": replace(elbo, weight="sigmoid", bias=b) for b in scale.bias}
    objectives |= {"EDM": replace(elbo, weight="edm"), "ELBO, the paper's levels": Objective()}
    trained = {name: _with_objective(scale, objective) for name, objective in objectives.items()}
    samplers = samplers_of(scale, scale.most_steps)
    results = yield bound_and_quality(scale, samplers, *trained.values())

    column, sampler = next(iter(samplers.items()))
    unweighted, *weighted, paper_levels = trained
    claims = []
    for name in weighted:
        better = f"The weight {name} improves {scale.metric} over the ELBO's"
        worse = f"The weight {name} costs likelihood: the ELBO's bound is below"
        claims.append(results.less_distance(better, trained[name], trained[unweighted], sampler))
        claims.append(results.less_bits(worse, trained[unweighted], trained[name]))
    statement = "Levels drawn where loss is expected improve the ELBO over log-uniform ones"
    claims.append(results.less_bits(statement, trained[unweighted], trained[paper_levels]))

    rows = [{"weight": name, **results.row(networks, samplers)} for name, networks in trained.items()]
    figure, (axes,) = outcome.panels(1)
    for row, color in zip(rows, outcome.PALETTE, strict=False):
        x, y = row["bits/dim"], row[column]
        axes.errorbar(x.value, y.value, y.error, x.error, fmt="o", color=color, capsize=2, label=row["weight"])
    axes.set(xlabel="bits per dimension", ylabel=f"{scale.metric}, {sampler.steps} steps")
    axes.legend()
    return Outcome({"weights": rows}, claims, figure, [our_solvers(*trained[unweighted][:1])])


NETWORKS: dict[str, tuple[str, Parametrization | None, bool]] = {  # the method, its parametrization, its clipping
    "BSI": ("bsi", None, False),
    "BSI, clipped": ("bsi", None, True),
    "BSI blend, clipped": ("bsi", "blend", True),
    "BSI noise, clipped": ("bsi", "epsilon", True),
    "VDM": ("vdm", None, False),
    "VDM noise, clipped": ("vdm", None, True),
    "BFN noise, clipped": ("bfn", None, True),
}
AT_EVALUATION = "BSI, clipped at evaluation only"


@study("new", "what the network predicts, and whether predictions are clipped to the range of the data")
def parametrization(scale: Scale) -> StudySteps:
    trained = {
        name: [replace(n, parametrization=predicts) for n in scale.parameters.networks(method, clips=clips)]
        for name, (method, predicts, clips) in NETWORKS.items()
    }
    samplers, bsi = samplers_of(scale), trained["BSI"]
    clipped = [bound(scale, network, clips=True) for network in bsi]
    results = yield [*bound_and_quality(scale, samplers, *trained.values()), *clipped]

    own = results.image_bits(bsi)
    changes = {name: results.image_bits(networks) - own for name, networks in trained.items() if name != "BSI"}
    changes[AT_EVALUATION] = results.image_bits(bsi, clips=True) - own
    gaps = {name: outcome.mean_of_images(gap, outcome.PRACTICAL_BITS) for name, gap in changes.items()}
    claims = [
        Claim(f"{name}: the bound is below that of BSI", outcome.verdict(gap), f"difference {gap}")
        for name, gap in gaps.items()
        if name.startswith("BSI")
    ]
    for name in ("BSI, clipped", "BSI blend, clipped"):
        statement = f"{name}: {scale.metric} is below that of BSI, by our solver"
        claims.append(results.less_distance(statement, trained[name], bsi, OURS))
    ours, theirs = trained["BSI noise, clipped"], ("VDM noise, clipped", "BFN noise, clipped")
    equal = {f"BSI - {name[:3]}": results.bits_difference(ours, trained[name]) for name in theirs}
    claims.append(outcome.equal("Equal bits/dim of the three methods with noise, clipped", equal, EQUAL_BITS))

    rows = [{"network": name, **results.row(networks, samplers)} for name, networks in trained.items()]
    compared = [{"network": name, "bits/dim less BSI's": gap} for name, gap in gaps.items()]
    figure, (axes,) = outcome.panels(1, width=5.0)
    outcome.differences(axes, gaps, xlabel="bits per dimension less BSI's", title="Likelihood")
    return Outcome({"networks": rows, "difference to BSI": compared}, claims, figure, [our_solvers(*bsi[:1])])


FACTORS = ("hyper-prior", "offset", "preconditioning")
SOLVER = Sampler(solver=FLOW_SOLVER)


def parameters(undone: Collection[str]) -> dict[str, Any]:
    """The parameters of BSI with BFN's choice of these factors. Its own hyper-prior is gamma_0 = lambda_0."""
    own = BSI().lambda_0
    lambda_0 = 1.0 if "offset" in undone else own
    gamma_0 = math.inf if "hyper-prior" in undone else lambda_0**2 / own if "offset" in undone else None
    return {"lambda_0": lambda_0, "gamma_0": gamma_0}


@study("new", "which of the three changes between BFN and BSI matters: hyper-prior, offset of levels, preconditioning")
def disentangle(scale: Scale) -> StudySteps:
    networks_of = scale.parameters.networks

    def without(*undone: str) -> list[Recipe]:
        networks = networks_of("bsi", **parameters(undone))
        return [replace(n, parametrization="epsilon" if "preconditioning" in undone else None) for n in networks]

    trained = {
        "BSI": without(),
        **{f"without {factor}": without(factor) for factor in FACTORS},
        "without all (BFN, not clipped)": without(*FACTORS),
        "BFN as published": networks_of("bfn"),
        **{f"gamma_0 = {value:g}": networks_of("bsi", gamma_0=value) for value in scale.gamma_0},
    }
    samplers = samplers_of(scale, scale.most_steps, ours=SOLVER)
    results = yield bound_and_quality(scale, samplers, *trained.values())

    bsi, median = trained["BSI"], "bits/dim of the median image"
    bits = {name: results.image_bits(networks) for name, networks in trained.items()}
    rows, changes, claims = list[Row](), list[Row](), []
    for name, networks in trained.items():
        row: Row = {"network": name, "bits/dim": None, median: outcome.median_of_images(bits[name])}
        rows.append(row | results.row(networks, samplers))
        if name != "BSI":
            gaps = {unit: results.distance_difference(bsi, networks, how) for unit, how in samplers.items()}
            changes.append({"network": name, median: outcome.median_of_images(bits["BSI"] - bits[name]), **gaps})
        factor = name.removeprefix("without ")
        for how in samplers.values() if factor in FACTORS else ():
            by = ", by our solver" if how == SOLVER else ""
            statement = f"BSI's {factor} alone improves {scale.metric} over BFN's{by}"
            claims.append(results.less_distance(statement, bsi, networks, how))

    figure, axes = outcome.panels(3, width=2.8, height=3.2)
    for panel, unit in zip(axes, (median, *samplers), strict=True):
        outcome.differences(panel, {row["network"]: row[unit] for row in changes}, xlabel=unit)
    for panel in axes[1:]:
        panel.set_yticklabels([])
    figure.suptitle("BSI less the other network (below 0: BSI is better)", fontsize=9.5, fontweight="bold")
    notes = [
        f"Our solver is {FLOW_SOLVER} here, for BFN as published too.",
        "Without BSI's preconditioning and without clipping the bound is infinite, and its estimates are decided "
        "by a few levels. The median image compares networks at equal numbers of levels; it is no bound there.",
    ]
    return Outcome({"networks": rows, "BSI less the other network": changes}, claims, figure, notes)
