"""Figure "importance-sampling": the range of h(lambda) / p(lambda) under four proposals, and the error of the bound.

One draw of the bound is |x - x_hat|^2 / (2 p), with lambda ~ p. Its mean is L_M^inf whatever p is; its spread is least
for p* ~ sqrt(E |x - x_hat|^4). Everything is computed in u = ln lambda from the errors of one network at many levels.
The fitted proposal is fitted on one half of the images, and all are judged on the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float64

from bsi.levels import ExpectedError, Fitted, LogUniform, Proposal, Uniform
from bsi.studies import figures
from bsi.studies.job import Measure, Profile
from bsi.studies.report import PRACTICAL_SHARE, Claim, Difference, Estimate, Report, Results, Study, Table, less
from bsi.studies.scale import Scale

__all__ = ["STUDY", "estimate", "orders", "proposals", "relative_spread", "resampled"]

STYLES = {"uniform": "-", "log-uniform": "-", "exact": "--", "fitted": "-"}
RESAMPLED = 200  # bootstrap samples of the images
KNOTS = 33

Errors = Float64[np.ndarray, "levels images"]
Curve = Float64[np.ndarray, " levels"]
Statistic = Callable[[Curve, Errors, Proposal], float]


def _profile(scale: Scale) -> Profile:
    return Profile(scale.profiled("bsi"), scale.profile_levels, scale.profile_images)


def measures(scale: Scale) -> list[Measure]:
    return [_profile(scale)]


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


def report(results: Results) -> Report:
    arrays = results.read(_profile(results.scale)).arrays
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
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(r"$\lambda$")
    axes.set_ylabel(r"$h(\lambda) / p(\lambda)$ over its mean")
    axes.legend()
    axes.set_title("Draws of the bound: flat is better")
    columns = ("proposal", "range of h / p, orders of magnitude", "standard deviation of a draw / mean")
    shrinks = "The log-uniform proposal shrinks the range of h / p (paper: by about 4 orders of magnitude)"
    return Report(
        tables=(
            Table(
                "proposals", columns, tuple((name, estimate(ranges[name]), estimate(spreads[name])) for name in fitted)
            ),
        ),
        claims=(
            _less(shrinks, ranges["log-uniform"], ranges["uniform"]),
            _less("The log-uniform proposal shrinks the spread of a draw", spreads["log-uniform"], spreads["uniform"]),
            _less("A fitted proposal shrinks the spread further", spreads["fitted"], spreads["log-uniform"]),
        ),
        figure=figure,
        seeds=1,
    )


STUDY = Study(
    name="importance-sampling",
    paper='Figure "importance-sampling"',
    shows="the range of h / p under uniform, log-uniform, exact and fitted proposals",
    measures=measures,
    report=report,
)
