"""A reference denoiser of each value by itself that knows its context: what the sample's other values tell of it.

Under the Gaussian of the linear reference, with precision P = A diag(1 / v) A^T along the data's axes A, they predict

    E [x_i | the others] = x_i - (P (x - mean))_i / P_ii,

whatever x_i is. The data's values are counted by this prediction, in a few contexts of equal width, and the denoiser
is the posterior mean of each value given its own noisy one, y_i = x_i + eps_i / rho, with the histogram of its context
for a prior. A network that sees the others with little noise does much the same: it knows that values lie on a grid,
and which of them are likely just here.

No real denoiser could know the context: it is read from x, not from y. A control variate may: given x, only eps is
random. The error of each value is a function of (context, bin, eps_i) alone, tabulated over cells of eps_i, and its
expectation is a finite sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from bsi.evaluation.references import CELL, REACH, Wiener
from bsi.likelihood import Bins

__all__ = ["InContext", "from_the_others"]

CONTEXTS = 17  # odd: a sample of middle grey lies within one, not on the edge of two


def from_the_others(wiener: Wiener, rounding: float, x: Float[Tensor, "batch *data"]) -> Float64[Tensor, "batch *data"]:
    """E [x_i | the others] for each value, where values are known up to a variance of `rounding`."""
    precision = 1 / (wiener.variance + rounding)
    gained = _back(wiener.coordinates(x) * precision, wiener.axes, x)
    diagonal = _back(precision[None], tuple(axis.square() for axis in wiener.axes), x)
    return x.double() - gained / diagonal


def _back(z: Float64[Tensor, "batch n"], axes: tuple[Tensor, ...], like: Tensor) -> Float64[Tensor, "batch *data"]:
    """From coordinates along the axes to those of the data, in its shape."""
    x = z.unflatten(1, like.shape[1:])
    for matrix in axes:
        x = torch.tensordot(x, matrix, dims=([1], [1]))  # the new axis comes last: after all, the order is restored
    return x


@dataclass(frozen=True)
class InContext:
    """The posterior mean of each value in its context: its error by (knot, kind, cell of eps), less the expectation.

    A value's kind is its context and its bin.
    """

    wiener: Wiener
    bins: Bins
    deviation: Float64[Tensor, "knots kinds cells"]
    mean: Float64[Tensor, "knots kinds"]

    @classmethod
    def fit(cls, wiener: Wiener, x: Float[Tensor, "batch *data"], bins: Bins) -> InContext:
        """For data like x, at the wiener's knots."""
        centres = bins.values(torch.arange(bins.count, device=x.device), torch.float64)
        counts = torch.bincount(_kinds(wiener, bins, x).flatten(), minlength=CONTEXTS * bins.count)
        counts = counts.view(CONTEXTS, bins.count).double()
        overall = counts.sum(0) / counts.sum()
        prior = counts + overall  # as if each context had seen one value more, of any kind
        occurs = torch.log((overall > 0).double())  # -inf for values that do not: they are never predicted
        edges = torch.arange(-REACH, REACH + CELL / 2, CELL, dtype=torch.float64, device=x.device)
        below = torch.cat([edges.new_zeros(1), torch.special.ndtr(edges), edges.new_ones(1)])
        middles = torch.cat([edges[:1] - CELL / 2, edges + CELL / 2])
        table = centres.new_empty(len(wiener.rho), CONTEXTS, bins.count, len(middles))
        for knot, (rho, half_level) in enumerate(zip(wiener.rho, wiener.half_level, strict=True)):
            distance = rho * (centres[:, None] - centres)[:, None] + middles[:, None]  # bins, cells, bins
            exponent = occurs - 0.5 * distance.square()
            likelihood = torch.exp(exponent - exponent.amax(-1, keepdim=True))
            x_hat = (likelihood @ (prior * centres).T) / (likelihood @ prior.T)  # bins, cells, contexts
            table[knot] = half_level * (centres[:, None, None] - x_hat).square().movedim(2, 0)
        table = table.flatten(1, 2)
        mean = table @ torch.diff(below)
        return cls(wiener, bins, table.sub_(mean[..., None]), mean)

    def expected(self, x: Float[Tensor, "batch *data"]) -> Float64[Tensor, "batch knots"]:
        """E_eps of its integrand, for each sample and knot."""
        kinds = _kinds(self.wiener, self.bins, x)
        counts = self.mean.new_zeros(len(x), self.mean.shape[1])
        counts.scatter_add_(1, kinds, torch.ones_like(kinds, dtype=torch.float64))
        return counts @ self.mean.T

    def deviations(
        self, x: Float[Tensor, "batch *data"], eps: Float[Tensor, "batch *data"], left: Int[Tensor, " batch"]
    ) -> Float64[Tensor, "batch 2"]:
        """Its integrand less the expectation, at the knots left and left + 1, for the eps of an evaluation."""
        kinds = _kinds(self.wiener, self.bins, x)
        cells = self.deviation.shape[-1]
        cell = (torch.floor((eps.double().flatten(1) + REACH) / CELL) + 1).clamp(0, cells - 1).long()
        return torch.stack([self.deviation[knot[:, None], kinds, cell].sum(1) for knot in (left, left + 1)], 1)


def _kinds(wiener: Wiener, bins: Bins, x: Float[Tensor, "batch *data"]) -> Int[Tensor, "batch n"]:
    """Context and bin of each value, as one number."""
    told = from_the_others(wiener, bins.width**2 / 12, x)  # a bin hides the variance of a uniform distribution
    context = Bins(bins.low, bins.high, CONTEXTS).indices(told)
    return (context.long() * bins.count + bins.indices(x).long()).flatten(1)
