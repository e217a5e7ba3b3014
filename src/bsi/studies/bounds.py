"""The bound of one network: its limit, where to evaluate it, and its transitions.

elbo-convergence      Figure "elbo-convergence". The paper's claims: L_M^k falls to L_M^inf from above, down to the
                      noise floor, and alpha_R = 2 alpha_M has a slight edge over alpha_M.
importance-sampling   Figure "importance-sampling". One draw of the bound is |x - x_hat|^2 / (2 p), with lambda ~ p. Its
                      mean is L_M^inf whatever p is; its spread is least for p* ~ sqrt(E |x - x_hat|^4). The fitted
                      proposal is fitted on one half of the images, and all are judged on the other.
proposal              Figure "log-uniform-proposal". The log-uniform proposal rests on f(mu, lambda) = mu, which is
                      crude for broad beliefs and right for sharp ones: |mu - f| / |mu| falls for lambda > 1.
variance-aware        New: the paper's transition treats a prediction as if it were the sample (`bsi.variance`). For few
                      steps a variance makes the bound tighter. Does it improve the samples of the solver posterior?
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float64

from bsi.denoiser import edm
from bsi.levels import ExpectedError, Fitted, LogUniform, Proposal, Uniform
from bsi.methods import BSI
from bsi.sampler import FLOW_SOLVER, NOISY_SOLVER, Sampler, VarianceKind
from bsi.studies import outcome
from bsi.studies.measure import OURS, Bound, LevelErrors, Rates, quality
from bsi.studies.outcome import PRACTICAL_BITS, PRACTICAL_SHARE, Claim, Estimate, Outcome, StudySteps, study
from bsi.studies.scale import DATASETS, Scale

EXCESS = r"$L_M^k - L_M^\infty$, bits/dim"
FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0)  # alpha_R / alpha_M


def converges(gaps: Sequence[Estimate], steps: Sequence[Estimate], total: Estimate) -> Claim:
    """The claim that L_M^k falls to its limit from above.

    It is held if the first of the gaps L_M^k - L_M^inf is positive and they fall in total, and not held if any gap is
    negative or rises. The differences from each k to the next, and in total, are known more precisely than the gaps.
    """
    above, below = sum(gap.higher for gap in gaps), sum(gap.lower for gap in gaps)
    rising, falls = sum(step.higher for step in steps), gaps[0].higher and total.lower
    because = (
        f"from {gaps[0]} to {gaps[-1]} bits/dim; beyond {PRACTICAL_BITS:g} and two standard errors {above} of "
        f"{len(gaps)} gaps are positive, {below} negative, and {rising} rise with k"
    )
    statement = "L_M^k converges to L_M^inf from above, down to the noise floor"
    return Claim(statement, "not held" if below or rising else "held" if falls else "undecided", because)


@study('Figure "elbo-convergence"', "L_M^k -> L_M^inf from above, down to the noise floor; L_R for several alpha_R")
def elbo_convergence(scale: Scale) -> StudySteps:
    network, ks = scale.comparisons[0].networks("bsi")[0], scale.ks
    assert isinstance(network.method, BSI)
    infinite, *finite = (Bound(network, scale.finite_levels, scale.recon, k) for k in (None, *ks))
    decoders = {f: Bound(network, 2, scale.recon, alpha_R=f * network.method.alpha_M) for f in FACTORS}
    results = yield [infinite, *finite, *decoders.values()]

    gaps = [results.finite_gap(bound, infinite) for bound in finite]
    steps = [results.finite_gap(b, a) for a, b in itertools.pairwise(finite)]
    unit = math.prod(DATASETS[network.data.name].shape) * math.log(2)
    bits = {factor: results.elbo(bound).reconstruction.numpy() / unit for factor, bound in decoders.items()}
    means = {factor: Estimate(float(each.mean()), 0.0) for factor, each in bits.items()}
    gains = {f: outcome.mean_of_images((each - bits[1.0])[None], PRACTICAL_BITS) for f, each in bits.items()}
    edge = "alpha_R = 2 alpha_M gives a slight edge in likelihood over alpha_M"

    figure, (left, right) = outcome.panels(2)
    floor = [gap.error for gap in gaps]
    left.fill_between(ks, floor, color=outcome.PALE, linewidth=0, label="noise floor: one standard error")
    outcome.curves(left, ks, {"BSI": gaps}, yscale="log", xlabel="k", ylabel=EXCESS, title="The finite bound")
    x, title = r"$\alpha_R / \alpha_M$", "The reconstruction term"
    found = {"BSI": list(means.values())}
    outcome.curves(right, FACTORS, found, yscale="log", xlabel=x, ylabel=r"$L_R$, bits/dim", title=title)
    tables = {
        "gap": [{"k": k, "L_M^k - L_M^inf, bits/dim": gap} for k, gap in zip(ks, gaps, strict=True)],
        "reconstruction": [
            {"alpha_R / alpha_M": factor, "L_R, bits/dim": means[factor].value, "less that at 1": gains[factor]}
            for factor in FACTORS
        ],
    }
    terms = results.read(infinite).values
    note = f"L_M^inf is {terms['measurement']:.4f} and L_R {terms['reconstruction']:.2g} bits/dim."
    total = results.finite_gap(finite[-1], finite[0])
    claims = [converges(gaps, steps, total), outcome.less(edge, means[2.0], means[1.0], gains[2.0])]
    return Outcome(tables, claims, figure, [note])


RESAMPLED = 200  # bootstrap samples of the images
KNOTS = 33

Errors = Float64[np.ndarray, "levels images"]
Curve = Float64[np.ndarray, " levels"]
Sets = Float64[np.ndarray, " sets"]
Statistic = Callable[[Curve, Errors, Proposal], float]


def proposals(level: Curve, errors: Errors) -> dict[str, Proposal]:
    """Uniform, the paper's, its exact form (Equation "expected-h"), and the best one for these errors."""
    low, high = float(level[0]), float(level[-1])
    best = level * np.sqrt((errors**2).mean(1))  # density over ln(level)
    knots = np.interp(np.linspace(0, 1, KNOTS), np.linspace(0, 1, len(level)), best)
    return {
        "uniform": Uniform(low, high),
        "log-uniform": LogUniform(low, high),
        "exact": ExpectedError(low, high, offset=low**2),
        "fitted": Fitted(low, high, tuple(np.maximum(knots, 1e-3 * knots.max()).tolist())),
    }


def _ratio(level: Curve, errors: Errors, proposal: Proposal) -> Curve:
    """h / p."""
    return errors.mean(1) / proposal.density(torch.from_numpy(level)).numpy()


def orders(level: Curve, errors: Errors, proposal: Proposal) -> float:
    """log10 of the largest over the smallest h / p."""
    ratio = _ratio(level, errors, proposal)
    return math.log10(ratio.max() / ratio.min())


def relative_spread(level: Curve, errors: Errors, proposal: Proposal) -> float:
    """The standard deviation of one draw over its mean."""
    u, density = np.log(level), level * proposal.density(torch.from_numpy(level)).numpy()
    mean = np.trapezoid(0.5 * level * errors.mean(1), u)
    second = np.trapezoid(0.25 * level**2 * (errors**2).mean(1) / density, u)
    return math.sqrt(max(0.0, second / mean**2 - 1))


def resampled(statistic: Statistic, level: Curve, errors: Errors, proposal: Proposal) -> Sets:
    """The statistic of all images, and then of bootstrap sets of images, the same sets for every proposal."""
    generator, images = np.random.default_rng(0), errors.shape[1]
    chosen = [generator.integers(0, images, images) for _ in range(RESAMPLED)]
    return np.array([statistic(level, each, proposal) for each in (errors, *(errors[:, ids] for ids in chosen))])


def estimate(sets: Sets, size: float = 0.0) -> Estimate:
    return Estimate(float(sets[0]), float(sets[1:].std(ddof=1)), size)


def _less(statement: str, a: Sets, b: Sets) -> Claim:
    return outcome.less(statement, estimate(a), estimate(b), estimate(a - b, PRACTICAL_SHARE * float(b[0])))


@study('Figure "importance-sampling"', "the range of h / p under uniform, log-uniform, exact and fitted proposals")
def importance_sampling(scale: Scale) -> StudySteps:
    job = LevelErrors(scale.profiled("bsi"), scale.profile_levels, scale.profile_images)
    results = yield [job]

    arrays = results.read(job).arrays
    level, errors = arrays["level"], arrays["error"][:, 1::2]
    compared = proposals(level, arrays["error"][:, ::2])
    ranges, spreads = (
        {name: resampled(statistic, level, errors, proposal) for name, proposal in compared.items()}
        for statistic in (orders, relative_spread)
    )
    figure, (axes,) = outcome.panels(1, width=4.8, height=3.2)
    mean = np.trapezoid(errors.mean(1), level)
    for (name, proposal), color in zip(compared.items(), outcome.PALETTE, strict=False):
        ratio = _ratio(level, errors, proposal) / mean
        axes.plot(level, ratio, "--" if name == "exact" else "-", color=color, label=name)
    axes.set(xscale="log", yscale="log", xlabel=r"$\lambda$", ylabel=r"$h(\lambda) / p(\lambda)$ over its mean")
    axes.legend()
    axes.set_title("Draws of the bound: flat is better")
    columns = ("range of h / p, orders of magnitude", "standard deviation of a draw / mean")
    rows = outcome.table("proposal", columns, {n: [estimate(ranges[n]), estimate(spreads[n])] for n in compared})
    shrinks = "The log-uniform proposal shrinks the range of h / p (paper: by about 4 orders of magnitude)"
    claims = [
        _less(shrinks, ranges["log-uniform"], ranges["uniform"]),
        _less("The log-uniform proposal shrinks the spread of a draw", spreads["log-uniform"], spreads["uniform"]),
        _less("A fitted proposal shrinks the spread further", spreads["fitted"], spreads["log-uniform"]),
    ]
    return Outcome({"proposals": rows}, claims, figure)


LEVELS = (1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6)  # in the table of distances


@study('Figure "log-uniform-proposal"', "relative distance between mu and f(mu, lambda) against lambda")
def proposal(scale: Scale) -> StudySteps:
    network = scale.parameters.networks("bsi")[0]
    job = LevelErrors(network, scale.profile_levels, scale.profile_images)
    results = yield [job]

    arrays = results.read(job).arrays
    level, distance = arrays["level"], arrays["distance"]
    inside = [wanted for wanted in LEVELS if wanted / level[0] >= 1 - 1e-6 and wanted / level[-1] <= 1 + 1e-6]
    nearest = {wanted: distance[np.abs(np.log(level / wanted)).argmin()] for wanted in inside}
    found = {wanted: outcome.mean_of_images(values[None]) for wanted, values in nearest.items()}
    gap = outcome.mean_of_images((nearest[1e2] - nearest[1.0])[None], PRACTICAL_SHARE * found[1.0].value)
    falls = "For lambda > 1 the distance falls quickly: at 100 it is below that at 1"

    c_skip = edm(network.method.encoder(torch.from_numpy(level)), network.sigma_data).c_skip.numpy()
    low, middle, high = np.quantile(distance, (0.05, 0.5, 0.95), axis=1)
    figure, (axes,) = outcome.panels(1, width=4.4, height=3.0)
    color = outcome.COLORS["bsi"]
    axes.fill_between(level, low, high, color=color, alpha=0.2, linewidth=0)
    axes.plot(level, middle, color=color, label="network: median, 5 to 95 % of images")
    axes.plot(level, np.abs(1 - c_skip), "--", color=outcome.GREY, label=r"$c_\mathrm{skip}\,\mu$ alone")
    axes.set(xscale="log", yscale="log", xlabel=r"$\lambda$", ylabel=r"$|\mu - f(\mu, \lambda)|\, /\, |\mu|$")
    axes.set_title("Predictions approach the belief")
    axes.legend()
    rows = [{"lambda": at, "|mu - f| / |mu|": each} for at, each in found.items()]
    return Outcome({"distance": rows}, [outcome.less(falls, found[1e2], found[1.0], gap)], figure)


KINDS: tuple[VarianceKind, ...] = ("none", "level", "dct", "learned")
FEWEST, MOST = 4, 64  # steps of the samplers
SHOWN = 8  # points of a rate-distortion curve in its table


@study("new", "the bound and the samples for few steps, with a predictive variance in each step")
def variance_aware(scale: Scale) -> StudySteps:
    network, ks = scale.transitions("bsi"), scale.ks
    steps = sorted({FEWEST, *(k for k in ks if k <= MOST)})
    infinite = Bound(network, scale.finite_levels, scale.recon, images=scale.profile_images)
    bounds = {kind: [replace(infinite, finite_k=k, variance=kind) for k in ks] for kind in KINDS}
    solvers = ("posterior", NOISY_SOLVER, FLOW_SOLVER)
    samplers = {solver: [Sampler(k, solver, OURS.grid) for k in steps] for solver in solvers}
    samplers["posterior, variance dct"] = [replace(sampler, variance="dct") for sampler in samplers["posterior"]]
    drawn = [quality(scale, network, sampler) for curve in samplers.values() for sampler in curve]
    chains = {f"variance {kind}": Rates(network, steps[-1], scale.profile_images, kind) for kind in KINDS}
    results = yield [infinite, *itertools.chain(*bounds.values()), *drawn, *chains.values()]

    excess = {f"variance {kind}": [results.finite_gap(b, infinite) for b in each] for kind, each in bounds.items()}
    pairs = [pair for kind in KINDS[1:] for pair in zip(bounds[kind], bounds["none"], strict=True)]
    found = {name: [results.distance([network], how) for how in curve] for name, curve in samplers.items()}
    distances = zip(found["posterior, variance dct"], found["posterior"], strict=True)

    rates = {name: results.read(job).arrays for name, job in chains.items()}
    psnr = {name: -10 * np.log10(each["error"] / 4) for name, each in rates.items()}  # values lie in [-1, 1]

    figure, (left, middle, right) = outcome.panels(3)
    outcome.curves(left, ks, excess, xlabel="k", ylabel=EXCESS, title="The bound for k steps")
    left.set_yscale("symlog", linthresh=0.1)  # a weak network's bound with a variance can be below that without
    for (name, each), color in zip(rates.items(), outcome.PALETTE, strict=False):
        middle.plot(each["rate"], psnr[name], color=color, label=name)
    middle.set(xlabel="bits/dim spent", ylabel="PSNR of the prediction, dB", title=f"The first of {steps[-1]} steps")
    middle.legend()
    outcome.curves(right, steps, found, xlabel="steps", ylabel=scale.metric, yscale="log", title="Samples")
    chosen = np.linspace(0, steps[-1], min(SHOWN, steps[-1]) + 1).astype(int)
    tables = {
        "L_M^k less L_M^inf, bits/dim": outcome.table("transition", ks, excess, "k = {}"),
        f"samples ({scale.metric})": outcome.table("sampler", steps, found, "{} steps"),
        f"rate and distortion after the first of {steps[-1]} steps": [
            {"transition": name, "steps": int(j), "bits/dim": float(each["rate"][j]), "PSNR, dB": float(psnr[name][j])}
            for name, each in rates.items()
            for j in chosen
        ],
    }
    claims = [
        outcome.all_less("A predictive variance lowers the bound for k steps", (results.finite_gap(*p) for p in pairs)),
        outcome.all_less(
            "A predictive variance improves the samples of the solver posterior", (a - b for a, b in distances)
        ),
    ]
    return Outcome(tables, claims, figure)
