"""The bound of one network: its limit, where to evaluate it, and its transitions.

elbo-convergence      Figure "elbo-convergence". The paper's claims: L_M^k falls to L_M^inf from above, down to the
                      noise floor, and alpha_R = 2 alpha_M has a slight edge over alpha_M.
importance-sampling   Figure "importance-sampling". One draw of the bound is |x - x_hat|^2 / (2 p), with lambda ~ p. Its
                      mean is L_M^inf whatever p is; its spread is least for p* ~ sqrt(E |x - x_hat|^4). The fitted
                      proposal is fitted on one half of the images, and all are judged on the other.
proposal              Figure "log-uniform-proposal". The log-uniform proposal rests on f(mu, lambda) = mu, which is
                      crude for broad beliefs and right for sharp ones: |mu - f| / |mu| falls for lambda > 1.
variance-aware        New: the paper's transition treats a prediction as if it were the sample (`bsi.variance`). For few
                      steps a variance makes the bound tighter, and the samples of the solver posterior better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float64

from bsi.denoiser import edm
from bsi.levels import ExpectedError, Fitted, LogUniform, Proposal, Uniform
from bsi.recipe import Recipe
from bsi.sampler import FLOW_SOLVER, NOISY_SOLVER, Sampler, VarianceKind
from bsi.studies.job import OURS, Bound, LevelErrors, Measure, Rate, Reconstruction, quality
from bsi.studies.outcome import (
    COLORS,
    GREY,
    PALETTE,
    PRACTICAL_BITS,
    PRACTICAL_SHARE,
    Claim,
    Difference,
    Estimate,
    Outcome,
    Results,
    ResultTable,
    Verdict,
    all_of,
    curves,
    less,
    mean_of_images,
    panels,
    study,
)
from bsi.studies.scale import Scale

# elbo-convergence


EXCESS = r"$L_M^k - L_M^\infty$, bits/dim"
FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0)  # alpha_R / alpha_M


def _bound(scale: Scale, k: int | None) -> Bound:
    return Bound(scale.comparisons[0].networks("bsi")[0], scale.finite_levels, scale.recon, k)


def _reconstruction(scale: Scale) -> Reconstruction:
    return Reconstruction(scale.comparisons[0].networks("bsi")[0], FACTORS, scale.recon)


def converges(gaps: Sequence[Difference], steps: Sequence[Difference], total: Difference) -> Claim:
    """The claim that L_M^k falls to its limit from above.

    It is held if the first gap is positive and the gap falls in total, and not held if any gap is negative or rises.

    Args:
        gaps: L_M^k - L_M^inf for each k.
        steps: The differences from each k to the next, known more precisely than from the gaps.
        total: The difference from the first k to the last.
    """
    above, below = sum(gap.higher for gap in gaps), sum(gap.lower for gap in gaps)
    rising = sum(step.higher for step in steps)
    falls = gaps[0].higher and total.lower
    verdict: Verdict = "not held" if below or rising else "held" if falls else "undecided"
    because = (
        f"from {gaps[0]} to {gaps[-1]} bits/dim; beyond {PRACTICAL_BITS:g} and two standard errors {above} of "
        f"{len(gaps)} gaps are positive, {below} negative, and {rising} rise with k"
    )
    return Claim("L_M^k converges to L_M^inf from above, down to the noise floor", verdict, because)


@study(
    'Figure "elbo-convergence"',
    "L_M^k -> L_M^inf from above, down to the noise floor; L_R for several alpha_R",
    lambda scale: [*(_bound(scale, k) for k in (None, *scale.ks)), _reconstruction(scale)],
)
def elbo_convergence(results: Results) -> Outcome:
    scale, ks = results.scale, results.scale.ks
    gaps = [results.finite_gap(_bound(scale, k), _bound(scale, None)) for k in ks]
    steps = [results.finite_gap(_bound(scale, b), _bound(scale, a)) for a, b in itertools.pairwise(ks)]
    total = results.finite_gap(_bound(scale, ks[-1]), _bound(scale, ks[0]))
    bits = results.read(_reconstruction(scale)).arrays["bits"]  # (factors, images)
    means = {factor: Estimate(float(row.mean()), 0.0) for factor, row in zip(FACTORS, bits, strict=True)}
    one = bits[FACTORS.index(1.0)]
    gains = {factor: mean_of_images((row - one)[None]) for factor, row in zip(FACTORS, bits, strict=True)}
    gain = Difference(gains[2.0].value, gains[2.0].error, PRACTICAL_BITS)
    edge = "alpha_R = 2 alpha_M gives a slight edge in likelihood over alpha_M"

    figure, (left, right) = panels(2)
    floor = [gap.error for gap in gaps]
    left.fill_between(ks, floor, color="#E4E4EA", linewidth=0, label="noise floor: one standard error")
    curves(left, ks, {"BSI": gaps}, yscale="log", xlabel="k", ylabel=EXCESS, title="The finite bound")
    x, y = r"$\alpha_R / \alpha_M$", r"$L_R$, bits/dim"
    title = "The reconstruction term"
    curves(right, FACTORS, {"BSI": list(means.values())}, yscale="log", xlabel=x, ylabel=y, title=title)
    tables = [
        ResultTable("gap", [{"k": k, "L_M^k - L_M^inf, bits/dim": gap} for k, gap in zip(ks, gaps, strict=True)]),
        ResultTable(
            "reconstruction",
            [
                {"alpha_R / alpha_M": factor, "L_R, bits/dim": mean.value, "less that at 1": gains[factor]}
                for factor, mean in means.items()
            ],
        ),
    ]
    infinite = results.read(_bound(scale, None)).values
    note = f"L_M^inf is {infinite['measurement']:.4f} and L_R {infinite['reconstruction']:.2g} bits/dim."
    return Outcome(tables, [converges(gaps, steps, total), less(edge, means[2.0], means[1.0], gain)], figure, [note])


# importance-sampling


RESAMPLED = 200  # bootstrap samples of the images
KNOTS = 33

Errors = Float64[np.ndarray, "levels images"]
Curve = Float64[np.ndarray, " levels"]
Sets = Float64[np.ndarray, " sets"]
Statistic = Callable[[Curve, Errors, Proposal], float]


def _profile(scale: Scale, network: Recipe) -> LevelErrors:
    return LevelErrors(network, scale.profile_levels, scale.profile_images)


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


def _density(proposal: Proposal, level: Curve) -> Curve:
    return proposal.density(torch.from_numpy(level)).numpy()


def orders(level: Curve, errors: Errors, proposal: Proposal) -> float:
    """log10 of the largest over the smallest h / p."""
    ratio = errors.mean(1) / _density(proposal, level)
    return math.log10(ratio.max() / ratio.min())


def relative_spread(level: Curve, errors: Errors, proposal: Proposal) -> float:
    """The standard deviation of one draw over its mean."""
    u, density = np.log(level), level * _density(proposal, level)
    mean = np.trapezoid(0.5 * level * errors.mean(1), u)
    second = np.trapezoid(0.25 * level**2 * (errors**2).mean(1) / density, u)
    return math.sqrt(max(0.0, second / mean**2 - 1))


def resampled(statistic: Statistic, level: Curve, errors: Errors, proposal: Proposal) -> Sets:
    """The statistic of all images, and then of bootstrap sets of images, the same sets for every proposal."""
    generator, images = np.random.default_rng(0), errors.shape[1]
    chosen = [generator.integers(0, images, images) for _ in range(RESAMPLED)]
    return np.array([statistic(level, each, proposal) for each in (errors, *(errors[:, ids] for ids in chosen))])


def estimate(sets: Sets) -> Estimate:
    return Estimate(float(sets[0]), float(sets[1:].std(ddof=1)))


def _less(statement: str, a: Sets, b: Sets) -> Claim:
    paired = estimate(a - b)
    difference = Difference(paired.value, paired.error, PRACTICAL_SHARE * float(b[0]))
    return less(statement, estimate(a), estimate(b), difference)


@study(
    'Figure "importance-sampling"',
    "the range of h / p under uniform, log-uniform, exact and fitted proposals",
    lambda scale: [_profile(scale, scale.profiled("bsi"))],
)
def importance_sampling(results: Results) -> Outcome:
    arrays = results.read(_profile(results.scale, results.scale.profiled("bsi"))).arrays
    level, errors = arrays["level"], arrays["error"][:, 1::2]
    compared = proposals(level, arrays["error"][:, ::2])
    ranges, spreads = (
        {name: resampled(statistic, level, errors, proposal) for name, proposal in compared.items()}
        for statistic in (orders, relative_spread)
    )
    figure, (axes,) = panels(1, width=4.8, height=3.2)
    mean = np.trapezoid(errors.mean(1), level)
    for (name, proposal), color in zip(compared.items(), PALETTE, strict=False):
        ratio = errors.mean(1) / _density(proposal, level) / mean
        axes.plot(level, ratio, "--" if name == "exact" else "-", color=color, label=name)
    axes.set(xscale="log", yscale="log", xlabel=r"$\lambda$", ylabel=r"$h(\lambda) / p(\lambda)$ over its mean")
    axes.legend()
    axes.set_title("Draws of the bound: flat is better")
    rows = [
        {
            "proposal": name,
            "range of h / p, orders of magnitude": estimate(ranges[name]),
            "standard deviation of a draw / mean": estimate(spreads[name]),
        }
        for name in compared
    ]
    shrinks = "The log-uniform proposal shrinks the range of h / p (paper: by about 4 orders of magnitude)"
    claims = [
        _less(shrinks, ranges["log-uniform"], ranges["uniform"]),
        _less("The log-uniform proposal shrinks the spread of a draw", spreads["log-uniform"], spreads["uniform"]),
        _less("A fitted proposal shrinks the spread further", spreads["fitted"], spreads["log-uniform"]),
    ]
    return Outcome([ResultTable("proposals", rows)], claims, figure)


# proposal


LEVELS = (1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6)  # in the table of distances


@study(
    'Figure "log-uniform-proposal"',
    "relative distance between mu and f(mu, lambda) against lambda",
    lambda scale: [_profile(scale, _network(scale))],
)
def proposal(results: Results) -> Outcome:
    job = _profile(results.scale, _network(results.scale))
    arrays = results.read(job).arrays
    level, distance = arrays["level"], arrays["distance"]
    u = np.log(level)
    inside = [wanted for wanted in LEVELS if u[0] - 1e-6 <= math.log(wanted) <= u[-1] + 1e-6]
    nearest = {wanted: distance[np.abs(u - math.log(wanted)).argmin()] for wanted in inside}
    found = {wanted: mean_of_images(values[None]) for wanted, values in nearest.items()}
    paired = mean_of_images((nearest[1e2] - nearest[1.0])[None])
    gap = Difference(paired.value, paired.error, PRACTICAL_SHARE * found[1.0].value)
    falls = "For lambda > 1 the distance falls quickly: at 100 it is below that at 1"

    c_skip = edm(job.network.method.encoder(torch.from_numpy(level)), job.network.sigma_data).c_skip.numpy()
    low, middle, high = np.quantile(distance, (0.05, 0.5, 0.95), axis=1)
    figure, (axes,) = panels(1, width=4.4, height=3.0)
    axes.fill_between(level, low, high, color=COLORS["bsi"], alpha=0.2, linewidth=0)
    axes.plot(level, middle, color=COLORS["bsi"], label="network: median, 5 to 95 % of images")
    axes.plot(level, np.abs(1 - c_skip), "--", color=GREY, label=r"$c_\mathrm{skip}\,\mu$ alone")
    axes.set(xscale="log", yscale="log", xlabel=r"$\lambda$", ylabel=r"$|\mu - f(\mu, \lambda)|\, /\, |\mu|$")
    axes.set_title("Predictions approach the belief")
    axes.legend()
    table = ResultTable("distance", [{"lambda": at, "|mu - f| / |mu|": each} for at, each in found.items()])
    return Outcome([table], [less(falls, found[1e2], found[1.0], gap)], figure)


# variance-aware


KINDS: tuple[VarianceKind, ...] = ("none", "level", "dct", "learned")
SAMPLED: tuple[VarianceKind, ...] = ("none", "dct")
MOST = 64  # steps of the chain for rate-distortion, and of the samplers


def _network(scale: Scale) -> Recipe:
    return scale.parameters.networks("bsi")[0]


def _with_variance(scale: Scale, k: int | None, kind: VarianceKind = "none") -> Bound:
    return Bound(_network(scale), scale.finite_levels, scale.recon, k, kind)


def _samplers(scale: Scale) -> dict[str, list[Sampler]]:
    """Samplers by name, for every number of steps."""
    steps = [k for k in scale.convergence_steps if k <= MOST]
    aware = f"posterior, variance {SAMPLED[-1]}"
    return {
        "posterior": [Sampler(k, "posterior", OURS.grid) for k in steps],
        aware: [Sampler(k, "posterior", OURS.grid, variance=SAMPLED[-1]) for k in steps],
        **{solver: [Sampler(k, solver, OURS.grid) for k in steps] for solver in (NOISY_SOLVER, FLOW_SOLVER)},
    }


def _variance_measures(scale: Scale) -> list[Measure]:
    return [
        _with_variance(scale, None),
        *(_with_variance(scale, k, kind) for k in scale.ks for kind in KINDS),
        *(quality(scale, _network(scale), how) for curve in _samplers(scale).values() for how in curve),
        *(Rate(_network(scale), MOST, kind) for kind in SAMPLED),
    ]


@study(
    "new",
    "the bound and the samples for few steps, with a predictive variance in each step",
    _variance_measures,
)
def variance_aware(results: Results) -> Outcome:
    scale, network = results.scale, _network(results.scale)
    excess: dict[str, list[Difference]] = {
        kind: [results.finite_gap(_with_variance(scale, k, kind), _with_variance(scale, None)) for k in scale.ks]
        for kind in KINDS
    }
    gains: list[Claim] = []
    for kind, (i, k) in itertools.product(KINDS[1:], enumerate(scale.ks)):
        gap = results.finite_gap(_with_variance(scale, k, kind), _with_variance(scale, k))
        gains.append(less(f"{kind} at {k} steps", excess[kind][i], excess["none"][i], gap))
    found = {
        name: [results.distance([network], how) for how in samplers] for name, samplers in _samplers(scale).items()
    }
    steps, plain, aware = [how.steps for how in _samplers(scale)["posterior"]], *list(found.values())[:2]
    better = [less(f"{k} steps", a, b) for k, a, b in zip(steps, aware, plain, strict=True)]

    figure, (left, middle, right) = panels(3)
    curves(left, scale.ks, excess, yscale="log", xlabel="k", ylabel=EXCESS, title="The bound for k steps")
    curves(middle, steps, found, xlabel="steps", ylabel=scale.metric, yscale="log", title="Samples")
    for kind, color in zip(SAMPLED, PALETTE, strict=False):
        curve = results.read(Rate(network, MOST, kind)).values
        right.plot(curve["bits_per_dim"], curve["squared_error"], color=color, label=f"variance {kind}")
    right.set(xlabel="bits/dim", ylabel="mean squared error", yscale="log", title=f"The first steps of {MOST}")
    right.legend()
    bounds = [
        {"transition": f"bound, variance {kind}", **{f"k = {k}": gap for k, gap in zip(scale.ks, gaps, strict=True)}}
        for kind, gaps in excess.items()
    ]
    drawn = [
        {"sampler": name, **{f"{k} steps": each for k, each in zip(steps, estimates, strict=True)}}
        for name, estimates in found.items()
    ]
    tables = [ResultTable("L_M^k less L_M^inf, bits/dim", bounds), ResultTable(f"samples ({scale.metric})", drawn)]
    claims = [
        all_of("A predictive variance lowers the bound for k steps", gains),
        all_of("A predictive variance improves the samples of the solver posterior", better),
    ]
    return Outcome(tables, claims, figure)
