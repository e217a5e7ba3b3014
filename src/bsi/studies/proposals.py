"""Where to evaluate: Figures "importance-sampling" and "log-uniform-proposal", from the errors of one network at many
levels.

One draw of the bound is |x - x_hat|^2 / (2 p), with lambda ~ p. Its mean is L_M^inf whatever p is; its spread is least
for p* ~ sqrt(E |x - x_hat|^4). The fitted proposal is fitted on one half of the images, and all are judged on the
other. The log-uniform proposal rests on f(mu, lambda) = mu, which is crude for broad beliefs and right for sharp ones:
the relative distance |mu - f(mu, lambda)| / |mu| falls for lambda > 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float64

from bsi.denoiser import edm
from bsi.levels import ExpectedError, Fitted, LogUniform, Proposal, Uniform
from bsi.studies import figures
from bsi.studies.job import LevelErrors
from bsi.studies.outcome import (
    PRACTICAL_SHARE,
    Claim,
    Difference,
    Estimate,
    Outcome,
    Results,
    ResultTable,
    less,
    mean_of_images,
)
from bsi.studies.scale import Scale

STYLES = {"uniform": "-", "log-uniform": "-", "exact": "--", "fitted": "-"}
RESAMPLED = 200  # bootstrap samples of the images
KNOTS = 33
LEVELS = (1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6)  # in the table of distances

Errors = Float64[np.ndarray, "levels images"]
Curve = Float64[np.ndarray, " levels"]
Statistic = Callable[[Curve, Errors, Proposal], float]


def level_errors(scale: Scale) -> LevelErrors:
    return LevelErrors(scale.profiled("bsi"), scale.profile_levels, scale.profile_images)


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


def resampled(statistic: Statistic, level: Curve, errors: Errors, proposal: Proposal) -> Float64[np.ndarray, " sets"]:
    """The statistic of all images, and then of bootstrap sets of images, the same sets for every proposal."""
    generator, images = np.random.default_rng(0), errors.shape[1]
    chosen = [generator.integers(0, images, images) for _ in range(RESAMPLED)]
    return np.array([statistic(level, each, proposal) for each in (errors, *(errors[:, ids] for ids in chosen))])


def estimate(sets: Float64[np.ndarray, " sets"]) -> Estimate:
    return Estimate(float(sets[0]), float(sets[1:].std(ddof=1)))


def _less(statement: str, a: Float64[np.ndarray, " sets"], b: Float64[np.ndarray, " sets"]) -> Claim:
    paired = estimate(a - b)
    difference = Difference(paired.value, paired.error, PRACTICAL_SHARE * float(b[0]))
    return less(statement, estimate(a), estimate(b), difference)


def report_spread(results: Results) -> Outcome:
    arrays = results.read(level_errors(results.scale)).arrays
    level, errors = arrays["level"], arrays["error"][:, 1::2]
    fitted = proposals(level, arrays["error"][:, ::2])
    ranges, spreads = (
        {name: resampled(statistic, level, errors, proposal) for name, proposal in fitted.items()}
        for statistic in (orders, relative_spread)
    )

    figure, (axes,) = figures.panels(1, width=4.8, height=3.2)
    mean = np.trapezoid(errors.mean(1), level)
    for (name, proposal), color in zip(fitted.items(), figures.PALETTE, strict=False):
        ratio = errors.mean(1) / _density(proposal, level) / mean
        axes.plot(level, ratio, STYLES[name], color=color, label=name)
    axes.set(xscale="log", yscale="log", xlabel=r"$\lambda$", ylabel=r"$h(\lambda) / p(\lambda)$ over its mean")
    axes.legend()
    axes.set_title("Draws of the bound: flat is better")
    columns = ("proposal", "range of h / p, orders of magnitude", "standard deviation of a draw / mean")
    rows = tuple((name, estimate(ranges[name]), estimate(spreads[name])) for name in fitted)
    shrinks = "The log-uniform proposal shrinks the range of h / p (paper: by about 4 orders of magnitude)"
    return Outcome(
        tables=(ResultTable("proposals", columns, rows),),
        claims=(
            _less(shrinks, ranges["log-uniform"], ranges["uniform"]),
            _less("The log-uniform proposal shrinks the spread of a draw", spreads["log-uniform"], spreads["uniform"]),
            _less("A fitted proposal shrinks the spread further", spreads["fitted"], spreads["log-uniform"]),
        ),
        figure=figure,
        seeds=1,
    )


def distance_errors(scale: Scale) -> LevelErrors:
    return LevelErrors(scale.parameters.networks("bsi")[0], scale.profile_levels, scale.profile_images)


def report_distance(results: Results) -> Outcome:
    job = distance_errors(results.scale)
    arrays, recipe = results.read(job).arrays, job.network
    level, distance = arrays["level"], arrays["distance"]
    u = np.log(level)
    inside = [wanted for wanted in LEVELS if u[0] - 1e-6 <= math.log(wanted) <= u[-1] + 1e-6]
    nearest = {wanted: distance[np.abs(u - math.log(wanted)).argmin()] for wanted in inside}
    found = {wanted: mean_of_images(values[None]) for wanted, values in nearest.items()}
    paired = mean_of_images((nearest[1e2] - nearest[1.0])[None])
    claim = less(
        "For lambda > 1 the distance falls quickly: at 100 it is below that at 1",
        found[1e2],
        found[1.0],
        Difference(paired.value, paired.error, PRACTICAL_SHARE * found[1.0].value),
    )

    c_skip = edm(recipe.method.encoder(torch.from_numpy(level)), recipe.sigma_data).c_skip.numpy()
    low, middle, high = np.quantile(distance, (0.05, 0.5, 0.95), axis=1)
    figure, (axes,) = figures.panels(1, width=4.4, height=3.0)
    color = figures.COLORS["bsi"]
    axes.fill_between(level, low, high, color=color, alpha=0.2, linewidth=0)
    axes.plot(level, middle, color=color, label="network: median, 5 to 95 % of images")
    axes.plot(level, np.abs(1 - c_skip), "--", color=figures.GREY, label=r"$c_\mathrm{skip}\,\mu$ alone")
    axes.set(xscale="log", yscale="log", xlabel=r"$\lambda$", ylabel=r"$|\mu - f(\mu, \lambda)|\, /\, |\mu|$")
    axes.set_title("Predictions approach the belief")
    axes.legend()
    rows = tuple((float(wanted), estimate) for wanted, estimate in found.items())
    table = ResultTable("distance", ("lambda", "|mu - f| / |mu|"), rows)
    return Outcome(tables=(table,), claims=(claim,), figure=figure, seeds=1)
