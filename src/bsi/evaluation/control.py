"""Fewer evaluations for the same error: a control variate and a proposal, both learned from a pilot.

The integrand g of one evaluation at (x, u = ln level, eps) is predicted, without the network, by a function
C(x, u, eps) whose integral over u and eps is known for every x. Then

    L_M(x) = int E C du  +  E_t [ weight (g - C) ],

and only the difference is left to chance. C is linear in u between knots, and at a knot

    C_k = sum_s a_ks steady_ks(x)  +  sum_r b_kr noisy_kr(x, eps)

in functions that basis.py describes: the noisy ones have mean 0, so that the integral is that of the steady ones.

The coefficients come from a regression, at first on a pilot: evaluations of their own that never enter the estimate,
so that it stays unbiased whatever they said. The pilot evaluates every (x, u) twice. Samples differ from each other far
more than one sample does between two draws of eps: the differences within a pair tell the coefficients b of the noise,
free of the samples' differences, and the averages tell the rest, each weighted by its own residual variance. The prior
is a random walk over the knots, so that a few hundred evaluations are enough to begin with.

They do not tell how one sample differs from another as well as one would like, and the evaluations that make up the
estimate tell more: each part of the set is evaluated with a control learned from the pilot and from all parts before,
never from itself. So its error has mean 0 whatever came before: no bias, and the errors of two parts are uncorrelated.

The proposal follows what is left: the variance of the estimate, int E (g - C)^2 / p du less a constant, is least for

    p*(u) ~ sqrt( E (g - C)^2 ),

which without a control is the sqrt(E |x - x_hat|^4) of importance sampling.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

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

    @staticmethod
    def table(basis: Basis, samples: int, draws: int) -> Float64[Tensor, "samples draws columns"]:
        """Zeros, into which ranks put the `rows` that are theirs: the sum of their tables is exact."""
        columns = 2 + 2 * (basis.num_steady + basis.num_noisy)
        return torch.zeros(samples, draws, columns, dtype=torch.float64, device=basis.knots.device)

    @property
    def rows(self) -> Float64[Tensor, "batch columns"]:
        return torch.cat([self.u[:, None], self.g[:, None], self.steady.flatten(1), self.noisy.flatten(1)], 1)

    @classmethod
    def from_rows(cls, basis: Basis, rows: Float64[Tensor, "batch columns"]) -> Observations:
        steady, noisy = rows[:, 2:].split([2 * basis.num_steady, 2 * basis.num_noisy], 1)
        return cls(rows[:, 0], rows[:, 1], steady.unflatten(1, (2, -1)), noisy.unflatten(1, (2, -1)))

    def and_also(self, more: Observations) -> Observations:
        return Observations(*(torch.cat([getattr(each, f.name) for each in (self, more)]) for f in fields(self)))


@dataclass(frozen=True)
class Control:
    """C(x, u, eps): coefficients at each knot, and what they were learned from.

    Of the `pairs`, 2i and 2i + 1 share x and u; the `singles` share nothing.
    """

    basis: Basis
    of_steady: Float64[Tensor, "knots steady"]
    of_noisy: Float64[Tensor, "knots noisy"]
    pairs: Observations
    singles: Observations | None = None

    @property
    def learned(self) -> int:
        """From how many evaluations."""
        return len(self.pairs.u) + (0 if self.singles is None else len(self.singles.u))

    def after(self, more: Observations) -> Control:
        """Learned from these evaluations too."""
        return fit_control(self.basis, self.pairs, more if self.singles is None else self.singles.and_also(more))

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


def fit_control(basis: Basis, pairs: Observations, singles: Observations | None = None) -> Control:
    """The regression on the means and half differences of a pilot's pairs, and on what else was seen."""
    knots, u, two = basis.knots, pairs.u[::2], pairs.g.view(-1, 2)
    every = pairs if singles is None else pairs.and_also(singles)
    curve = _smoothed(knots, every.u, every.g)
    units = _units(basis, curve)
    between = Between.of(knots, u)
    values = torch.cat([pairs.steady, pairs.noisy], 2).unflatten(0, (-1, 2))
    means, halves = (_design(between, units, 0.5 * (values[:, 0] + sign * values[:, 1])) for sign in (1, -1))
    mean, half = 0.5 * (two[:, 0] + two[:, 1]), 0.5 * (two[:, 0] - two[:, 1])
    designs, targets, places = [means, halves], [mean, half], [between, between]
    if singles is not None:
        places.append(Between.of(knots, singles.u))
        designs.append(_design(places[2], units, torch.cat([singles.steady, singles.noisy], 2)))
        targets.append(singles.g)
    left_over = mean - between.at(curve), half
    smallest = 1e-12 * float(every.g.square().mean()) + 1e-30  # a reference may be right to rounding
    for _ in range(TURNS):
        of_mean, of_half = (_smoothed(knots, u, rest.square(), WIDE) for rest in left_over)
        # Noise counts by half in a pair's mean, and the other half is the difference's: a single evaluation has both.
        variances = zip(places, (of_mean, of_half, of_mean + of_half), strict=False)
        weights = [1 / (place.at(variance) + smallest) for place, variance in variances]
        found = _regression(torch.cat(designs), torch.cat(targets), torch.cat(weights))
        left_over = mean - (means * found).sum((1, 2)), half - (halves * found).sum((1, 2))
    found = found * units
    return Control(basis, found[:, : basis.num_steady], found[:, basis.num_steady :], pairs, singles)


def _units(basis: Basis, curve: Float64[Tensor, " knots"]) -> Float64[Tensor, "knots functions"]:
    """In which coefficients are numbers around 1, or 0: those of g for 1 and the traits, one nat for one nat for a
    reference. That is too much where it expects more than there is, but what the pilot saw there is no better guide:
    next to nothing on average may be large now and then.
    """
    of_sample = curve[:, None].expand(-1, basis.num_steady - basis.num_noisy)
    return torch.cat([of_sample, curve.new_ones(len(curve), 2 * basis.num_noisy)], 1)


def _design(
    between: Between, units: Float64[Tensor, "knots functions"], values: Float64[Tensor, "rows 2 functions"]
) -> Float64[Tensor, "rows knots functions"]:
    """The basis functions at the knots to the left and to the right, dealt to their knots."""
    design = values.new_zeros(len(values), *units.shape)
    rows = torch.arange(len(values), device=values.device)
    for side, share in ((0, 1 - between.along), (1, between.along)):
        knot = between.left + side
        design[rows, knot] = share[:, None] * units[knot] * values[:, side]
    return design


def _regression(
    design: Float64[Tensor, "rows knots functions"], target: Float64[Tensor, " rows"], weight: Float64[Tensor, " rows"]
) -> Float64[Tensor, "knots functions"]:
    """Weighted least squares under N(0, STEP^2) differences between neighboring knots."""
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
