"""Fewer evaluations for the same error: a control variate and a proposal, both learned from a pilot.

The integrand g of one evaluation at (x, u = ln level, eps) is predicted, without the network, by a function
C(x, u, eps) whose integral over u and eps is known for every x. Then

    L_M(x) = int E C du  +  E_t [ weight (g - C) ],

and only the difference is left to chance. C is linear between knots in u. At each knot it is a curve common to all
samples, a correction for this sample, and a correction for this noise:

    C_k = a_k  +  sum_r  b_kr (expected_r(x) - its mean)  +  c_kr deviation_r(x, eps)

over the reference denoisers r, whose expectations are known (references.py). The coefficients come from a regression on
a pilot: evaluations of their own that never enter the estimate, so that it stays unbiased whatever they said. The
regression is Bayesian, with a random walk over the knots as the prior, so that a few hundred evaluations are enough.

The proposal follows what is left: the variance of the estimate, int E (g - C)^2 / p du less a constant, is least for

    p*(u) ~ sqrt( E (g - C)^2 ),

which without a control is the sqrt(E |x - x_hat|^4) of the paper's importance sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from bsi.evaluation.integral import Between, Integral
from bsi.evaluation.references import Reference
from bsi.levels import Fitted, LogUniform

__all__ = ["Control", "Observations", "fit_control", "fit_proposal", "knots"]

KNOTS = 33
STEP = 0.2  # standard deviation of a relative coefficient from knot to knot, a priori
FLOOR = 0.1  # no level is proposed less than this times the average: what the pilot did not see stays visible


def knots(levels: LogUniform, count: int = KNOTS) -> Float64[Tensor, " {count}"]:
    """Equally spaced in u = ln(level)."""
    return torch.linspace(math.log(levels.low), math.log(levels.high), count, dtype=torch.float64)


@dataclass(frozen=True)
class Observations:
    """Evaluations, and what the references say about them. Everything in nats per unit of u."""

    u: Float64[Tensor, " batch"]
    g: Float64[Tensor, " batch"]
    expected: Float64[Tensor, "batch references 2"]  # at the knots left and right of u
    deviations: Float64[Tensor, "batch references 2"]

    @classmethod
    def of(
        cls,
        knots: Float64[Tensor, " knots"],
        references: tuple[Reference, ...],
        x: Float[Tensor, "batch *data"],
        eps: Float[Tensor, "batch *data"],
        u: Float64[Tensor, " batch"],
        g: Float64[Tensor, " batch"],
    ) -> Observations:
        left = Between.of(knots, u).left
        both = torch.stack([left, left + 1], 1)
        expected = [reference.expected(x).gather(1, both) for reference in references]
        deviations = [reference.deviations(x, eps, left) for reference in references]
        return cls(u, g, torch.stack(expected, 1), torch.stack(deviations, 1))


@dataclass(frozen=True)
class Control:
    """C(x, u, eps): coefficients of the references at each knot, and the curve common to all samples."""

    knots: Float64[Tensor, " knots"]
    references: tuple[Reference, ...]
    curve: Float64[Tensor, " knots"]
    centre: Float64[Tensor, "references knots"]  # the references' expectation over the pilot's samples
    of_expected: Float64[Tensor, "references knots"]
    of_deviation: Float64[Tensor, "references knots"]

    def known(self, x: Float[Tensor, "batch *data"], integral: Integral) -> Float64[Tensor, " batch"]:
        """The integral of E C for each sample."""
        at_knots = self.curve.expand(len(x), -1)
        for r, reference in enumerate(self.references):
            at_knots = at_knots + self.of_expected[r] * (reference.expected(x) - self.centre[r])
        return at_knots @ integral.hats(self.knots)

    def predict(self, seen: Observations) -> Float64[Tensor, " batch"]:
        """C for each observation."""
        between = Between.of(self.knots, seen.u)
        predicted = torch.zeros_like(seen.u)
        for side, share in ((0, 1 - between.along), (1, between.along)):
            knot = between.left + side
            value = self.curve[knot]
            value = value + (self.of_expected[:, knot].T * (seen.expected[..., side] - self.centre[:, knot].T)).sum(1)
            value = value + (self.of_deviation[:, knot].T * seen.deviations[..., side]).sum(1)
            predicted = predicted + share * value
        return predicted


def _smoothed(
    knots: Float64[Tensor, " knots"], u: Float64[Tensor, " batch"], value: Float64[Tensor, " batch"]
) -> Float64[Tensor, " knots"]:
    """The average of the values around each knot. A pilot sees them all."""
    between = Between.of(knots, u)
    return between.total(value, len(knots)) / between.total(torch.ones_like(value), len(knots))


def fit_control(knots: Float64[Tensor, " knots"], references: tuple[Reference, ...], seen: Observations) -> Control:
    """The regression. Coefficients are relative to the curve: numbers around 1, or 0."""
    between = Between.of(knots, seen.u)
    curve = _smoothed(knots, seen.u, seen.g).clamp(min=1e-30)
    at = curve[between.left] * (1 - between.along) + curve[between.left + 1] * between.along
    scale = torch.sqrt(_smoothed(knots, seen.u, (seen.g - at).square())) + 1e-3 * curve
    middle = seen.expected[..., 0] + (seen.expected[..., 1] - seen.expected[..., 0]) * between.along[:, None]
    centre = torch.stack([_smoothed(knots, seen.u, column) for column in middle.T])
    unit = curve / centre.clamp(min=1e-30)  # what one nat of a reference is worth
    design = seen.g.new_zeros(len(seen.g), len(knots), 1 + 2 * len(references))
    rows = torch.arange(len(seen.g), device=seen.g.device)
    for side, share in ((0, 1 - between.along), (1, between.along)):
        knot = between.left + side
        design[rows, knot, 0] = share * curve[knot]
        for r in range(len(references)):
            design[rows, knot, 1 + 2 * r] = share * unit[r, knot] * (seen.expected[:, r, side] - centre[r, knot])
            design[rows, knot, 2 + 2 * r] = share * unit[r, knot] * seen.deviations[:, r, side]
    noise = (scale[between.left] * (1 - between.along) + scale[between.left + 1] * between.along)[:, None]
    coefficients = _random_walk_regression(design / noise[..., None], seen.g[:, None] / noise)
    return Control(
        knots=knots,
        references=references,
        curve=coefficients[:, 0] * curve,
        centre=centre,
        of_expected=coefficients[:, 1::2].T * unit,
        of_deviation=coefficients[:, 2::2].T * unit,
    )


def _random_walk_regression(
    design: Float64[Tensor, "batch knots features"], target: Float64[Tensor, "batch 1"]
) -> Float64[Tensor, "knots features"]:
    """Least squares with unit noise, under N(0, STEP^2) differences between neighbouring knots."""
    _, count, features = design.shape
    flat = design.flatten(1)
    steps = torch.diff(torch.eye(count, dtype=torch.float64, device=design.device), dim=0)
    walk = torch.kron(steps.T @ steps / STEP**2, torch.eye(features, dtype=torch.float64, device=design.device))
    weak = 1e-3 * torch.eye(flat.shape[1], dtype=torch.float64, device=design.device)
    return torch.linalg.solve(flat.T @ flat + walk + weak, flat.T @ target).view(count, features)


def fit_proposal(
    levels: LogUniform,
    knots: Float64[Tensor, " knots"],
    u: Float64[Tensor, " batch"],
    left_over: Float64[Tensor, " batch"],
) -> Fitted:
    """p* ~ sqrt(E left_over^2), with a floor."""
    density = torch.sqrt(_smoothed(knots, u, left_over.square()))
    density = density + FLOOR * density.mean() + 1e-30
    return Fitted(levels.low, levels.high, tuple(density.tolist()))
