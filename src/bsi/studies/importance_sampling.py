"""Figure "importance-sampling": the range of h(lambda) / p(lambda) under four proposals, and what they do to the error.

A draw of the estimate is |x - x_hat|^2 / (2 p), with lambda ~ p. Its mean is L_M^inf whatever p is; its spread is
least for p* ~ sqrt(E |x - x_hat|^4). Everything is computed in u = ln lambda from the errors of one network at many
levels; the fitted proposal is fitted on one half of the images, and all are judged on the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float64

from bsi.levels import ExpectedError, Fitted, LogUniform, Proposal, Uniform
from bsi.studies import figures
from bsi.studies.estimates import Estimate
from bsi.studies.job import Measure, Profile
from bsi.studies.report import Claim, Report, Study, Table, less
from bsi.studies.scale import Scale
from bsi.studies.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STUDY", "profile", "proposals", "relative_spread"]

COLORS = {
    "uniform": figures.PALETTE[1],
    "log-uniform": figures.PALETTE[0],
    "exact": figures.PALETTE[4],
    "fitted": figures.PALETTE[3],
}
LINES = {"log-uniform": ("-", 3.5), "exact": ("--", 1.2)}  # where one lies on the other, both are seen
RESAMPLED = 200  # bootstrap samples of the images
KNOTS = 33

Errors = Float64[np.ndarray, "levels images"]
Curve = Float64[np.ndarray, " levels"]
Statistic = Callable[[Curve, Errors, Proposal], float]


def profile(scale: Scale) -> Profile:
    return Profile(scale.profiled("bsi"), scale.measured.profile_levels, scale.measured.profile_images)


def measures(scale: Scale) -> list[Measure]:
    return [profile(scale)]


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


def _integral(values: Curve, at: Curve) -> float:
    """By trapezia."""
    return float((0.5 * np.diff(at) * (values[1:] + values[:-1])).sum())


def _orders(level: Curve, errors: Errors, proposal: Proposal) -> float:
    """log10 of the largest over the smallest h / p."""
    ratio = errors.mean(1) / _density(proposal, level)
    return math.log10(ratio.max() / ratio.min())


def relative_spread(level: Curve, errors: Errors, proposal: Proposal) -> float:
    """The standard deviation of one draw over its mean."""
    u, density = np.log(level), level * _density(proposal, level)
    mean = _integral(0.5 * level * errors.mean(1), u)
    second = _integral(0.25 * level**2 * (errors**2).mean(1) / density, u)
    return math.sqrt(max(0.0, second / mean**2 - 1))


def _judged(scale: Scale, store: Store) -> tuple[Curve, Errors, dict[str, Proposal]]:
    """Levels, the errors of one half of the images, and proposals that have seen the other half alone."""
    arrays = store.read(profile(scale)).arrays
    level, errors = arrays["level"], arrays["error"]
    return level, errors[:, 1::2], proposals(level, errors[:, ::2])


@dataclass(frozen=True)
class Resampled:
    """A statistic of all images, and of sets of as many drawn from them: the same sets for every proposal."""

    value: float
    again: Float64[np.ndarray, " sets"]

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.value, float(self.again.std(ddof=1)))

    def __sub__(self, other: Resampled) -> Resampled:
        return Resampled(self.value - other.value, self.again - other.again)


def resampled(statistic: Statistic, level: Curve, errors: Errors, proposal: Proposal) -> Resampled:
    generator, images = np.random.default_rng(0), errors.shape[1]
    sets = [generator.integers(0, images, images) for _ in range(RESAMPLED)]
    again = np.array([statistic(level, errors[:, chosen], proposal) for chosen in sets])
    return Resampled(statistic(level, errors, proposal), again)


def _less(statement: str, a: Resampled, b: Resampled) -> Claim:
    return less(statement, a.estimate, b.estimate, (a - b).estimate)


def _draw(scale: Scale, store: Store) -> Figure:
    level, errors, all_proposals = _judged(scale, store)
    figure, (axes,) = figures.panels(1, width=4.8, height=3.2)
    for name, proposal in all_proposals.items():
        ratio = errors.mean(1) / _density(proposal, level)
        mean = _integral(errors.mean(1), level)
        line, width = LINES.get(name, ("-", 1.6))
        axes.plot(level, ratio / mean, color=COLORS[name], linestyle=line, linewidth=width, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(r"$\lambda$")
    axes.set_ylabel(r"$h(\lambda) / p(\lambda)$ over its mean")
    axes.legend(loc="best")
    axes.set_title("Flat is good: what a draw of the bound can be")
    return figure


def report(scale: Scale, store: Store) -> Report:
    level, errors, all_proposals = _judged(scale, store)
    orders, spreads = (
        {name: resampled(statistic, level, errors, proposal) for name, proposal in all_proposals.items()}
        for statistic in (_orders, relative_spread)
    )
    return Report(
        tables=(
            Table(
                "proposals",
                ("proposal", "range of h / p, orders of magnitude", "standard deviation of a draw / mean"),
                tuple((name, orders[name].estimate, spreads[name].estimate) for name in all_proposals),
            ),
        ),
        claims=(
            _less(
                "The log-uniform proposal shrinks the range of h / p (paper: by about 4 orders of magnitude)",
                orders["log-uniform"],
                orders["uniform"],
            ),
            _less("The log-uniform proposal shrinks the spread of a draw", spreads["log-uniform"], spreads["uniform"]),
            _less("A fitted proposal shrinks the spread further", spreads["fitted"], spreads["log-uniform"]),
        ),
        draw=lambda: _draw(scale, store),
    )


STUDY = Study(
    name="importance-sampling",
    paper='Figure "importance-sampling"',
    shows="the range of h/p under uniform, log-uniform, exact and fitted proposals",
    measures=measures,
    report=report,
)
