"""Fewer evaluations for the same error: a control variate and a proposal, both learned from a pilot.

The integrand g of one evaluation at (x, u = ln level, eps) is predicted, without the network, by a function
C(x, u, eps) whose integral over u and eps is known for every x. Then

    L_M(x) = int E C du  +  E_t [ weight (g - C) ],

and only the difference is left to chance. C is linear in u between knots, and at a knot

    C_k = sum_s a_ks steady_ks(x)  +  sum_r b_kr noisy_kr(x, eps)

in functions that basis.py describes: the noisy ones have mean 0, so that the integral is that of the steady ones.

The coefficients come from a regression on a pilot: evaluations of their own that never enter the estimate, so that it
stays unbiased whatever they said. The pilot evaluates every (x, u) twice. Samples differ from each other far more than
one sample does between two draws of eps: the differences within a pair tell the coefficients b of the noise, free of
the samples' differences, and the averages tell the rest, each weighted by its own residual variance. The prior is a
random walk over the knots, so that a few hundred evaluations are enough.

The proposal follows what is left: the variance of the estimate, int E (g - C)^2 / p du less a constant, is least for

    p*(u) ~ sqrt( E (g - C)^2 ),

which without a control is the sqrt(E |x - x_hat|^4) of importance sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from bsi.evaluation.basis import Basis
from bsi.evaluation.integral import Between, Integral
from bsi.levels import Fitted, LogUniform

__all__ = ["Control", "Observations", "fit_control", "fit_proposal"]

STEP = 0.1  # standard deviation of a coefficient from knot to knot, a priori
TURNS = 2  # of the regression, each with the residual variances of the one before
WIDE = 2  # knots over which residual variances are averaged
FLOOR = 0.1  # no level is proposed less than this times the average: what the pilot did not see stays visible


@dataclass(frozen=True)
class Observations:
    """Evaluations g at u, and the basis there: at the knots to the left and to the right of u."""

    u: Float64[Tensor, " batch"]
    g: Float64[Tensor, " batch"]
    steady: Float64[Tensor, "batch 2 steady"]
    noisy: Float64[Tensor, "batch 2 noisy"]

    @classmethod
    def of(
        cls,
        basis: Basis,
        steady: Float64[Tensor, "batch knots steady"],
        x: Float[Tensor, "batch *data"],
        eps: Float[Tensor, "batch *data"],
        u: Float64[Tensor, " batch"],
        g: Float64[Tensor, " batch"],
    ) -> Observations:
        """`steady` is the basis's of x, which does not change from one evaluation of x to the next."""
        left = Between.of(basis.knots, u).left
        rows = torch.arange(len(u), device=u.device)[:, None]
        return cls(u, g, steady[rows, torch.stack([left, left + 1], 1)], basis.noisy(x, eps, left))


@dataclass(frozen=True)
class Control:
    """C(x, u, eps): coefficients at each knot."""

    basis: Basis
    of_steady: Float64[Tensor, "knots steady"]
    of_noisy: Float64[Tensor, "knots noisy"]

    def known(self, steady: Float64[Tensor, "batch knots steady"], integral: Integral) -> Float64[Tensor, " batch"]:
        """The integral of E C for each sample."""
        return (steady * self.of_steady).sum(2) @ integral.hats(self.basis.knots)

    def predict(self, seen: Observations) -> Float64[Tensor, " batch"]:
        """C for each observation."""
        between = Between.of(self.basis.knots, seen.u)
        knot = torch.stack([between.left, between.left + 1], 1)
        value = (seen.steady * self.of_steady[knot]).sum(2) + (seen.noisy * self.of_noisy[knot]).sum(2)
        return value[:, 0] * (1 - between.along) + value[:, 1] * between.along


def _smoothed(
    knots: Float64[Tensor, " knots"], u: Float64[Tensor, " batch"], value: Float64[Tensor, " batch"], reach: int = 0
) -> Float64[Tensor, " knots"]:
    """The average of the values around each knot, `reach` knots to either side. A pilot sees them all."""
    between = Between.of(knots, u)
    sums = torch.stack([between.total(value, len(knots)), between.total(torch.ones_like(value), len(knots))])
    for _ in range(reach):
        sums = 2 * sums + torch.nn.functional.pad(sums[:, 1:], (0, 1)) + torch.nn.functional.pad(sums[:, :-1], (1, 0))
    return sums[0] / sums[1]


def fit_control(basis: Basis, seen: Observations) -> Control:
    """The regression on a pilot's pairs: observations 2i and 2i + 1 share x and u."""
    knots, u = basis.knots, seen.u[::2]
    between = Between.of(knots, u)
    curve = _smoothed(knots, seen.u, seen.g)
    units = _units(basis, curve)
    means, halves = (_design(between, units, seen, sign) for sign in (1, -1))
    pairs = seen.g.view(-1, 2)
    mean, half = 0.5 * (pairs[:, 0] + pairs[:, 1]), 0.5 * (pairs[:, 0] - pairs[:, 1])
    left_over = mean - between.at(curve), half
    smallest = 1e-12 * float(seen.g.square().mean()) + 1e-30  # a reference may be right to rounding
    for _ in range(TURNS):
        weights = [1 / (between.at(_smoothed(knots, u, rest.square(), WIDE)) + smallest) for rest in left_over]
        found = _regression(torch.cat([means, halves]), torch.cat([mean, half]), torch.cat(weights))
        left_over = mean - (means * found).sum((1, 2)), half - (halves * found).sum((1, 2))
    found = found * units
    return Control(basis, found[:, : basis.num_steady], found[:, basis.num_steady :])


def _units(basis: Basis, curve: Float64[Tensor, " knots"]) -> Float64[Tensor, "knots functions"]:
    """In which coefficients are numbers around 1, or 0: those of g for 1 and the traits, one nat for one nat for a
    reference. That is too much where it expects more than there is, but what the pilot saw there is no better guide:
    next to nothing on average may be large now and then.
    """
    of_sample = curve[:, None].expand(-1, basis.num_steady - basis.num_noisy)
    return torch.cat([of_sample, curve.new_ones(len(curve), 2 * basis.num_noisy)], 1)


def _design(
    between: Between, units: Float64[Tensor, "knots functions"], seen: Observations, sign: int
) -> Float64[Tensor, "pairs knots functions"]:
    """Half the sum or the difference of a pair's basis functions, dealt to their knots."""
    values = torch.cat([seen.steady, seen.noisy], 2).unflatten(0, (-1, 2))
    values = 0.5 * (values[:, 0] + sign * values[:, 1])
    design = values.new_zeros(len(values), *units.shape)
    rows = torch.arange(len(values), device=values.device)
    for side, share in ((0, 1 - between.along), (1, between.along)):
        knot = between.left + side
        design[rows, knot] = share[:, None] * units[knot] * values[:, side]
    return design


def _regression(
    design: Float64[Tensor, "rows knots functions"], target: Float64[Tensor, " rows"], weight: Float64[Tensor, " rows"]
) -> Float64[Tensor, "knots functions"]:
    """Weighted least squares under N(0, STEP^2) differences between neighbouring knots."""
    _, count, functions = design.shape
    flat = design.flatten(1)
    eye = torch.eye(count * functions, dtype=torch.float64, device=design.device)
    steps = torch.diff(torch.eye(count, dtype=torch.float64, device=design.device), dim=0)
    walk = torch.kron(steps.T @ steps / STEP**2, eye[:functions, :functions])
    gram = flat.T @ (weight[:, None] * flat) + walk + 1e-3 * eye
    return torch.linalg.solve(gram, flat.T @ (weight * target)).view(count, functions)


def fit_proposal(
    levels: LogUniform,
    knots: Float64[Tensor, " knots"],
    u: Float64[Tensor, " batch"],
    left_over: Float64[Tensor, " batch"],
) -> Fitted:
    """p* ~ sqrt(E left_over^2), with a floor."""
    density = torch.sqrt(_smoothed(knots, u, left_over.square(), WIDE))
    density = density + FLOOR * density.mean() + 1e-30
    return Fitted(levels.low, levels.high, tuple(density.tolist()))
