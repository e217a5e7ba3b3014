"""Reference denoisers of each value by itself, which know that values lie on a grid: what counts at the last levels.

Each is the posterior mean of a value given its own noisy one, y_i = x_i + eps_i / rho, with a histogram for a prior.
With one context that is the histogram of all values: most pixels may be black. With more, the data's values are counted
by what the sample's other values tell of them. Under the Gaussian of the linear reference, with precision
P = A diag(1 / v) A^T along the data's axes A, they predict

    E [x_i | the others] = x_i - (P (x - mean))_i / P_ii,

whatever x_i is, and contexts are intervals of this prediction, of equal width. A network that sees the others with
little noise does much the same: it knows which values are likely just here.

No real denoiser could know the context: it is read from x, not from y. A control variate may: given x, only eps is
random. The error of each value is a function of (context, bin, eps_i) alone, tabulated over cells of eps_i, and its
expectation is a finite sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from bsi.evaluation.references import Wiener
from bsi.values import Bins

__all__ = ["GRID_BINS", "Valuewise", "from_the_others"]

GRID_BINS = 256  # more bins than this lie closer than the last noise: there is no grid to know of
CELL, REACH = 0.125, 6.0  # eps in cells of this width up to this far, and one cell for each tail


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
class Valuewise:
    """The posterior mean of each value in its context: its error by (knot, kind, cell of eps), less the expectation.

    A value's kind is its context and its bin.
    """

    wiener: Wiener
    bins: Bins
    contexts: int
    deviation: Float64[Tensor, "knots kinds cells"]
    mean: Float64[Tensor, "knots kinds"]

    @classmethod
    def fit(cls, wiener: Wiener, x: Float[Tensor, "batch *data"], bins: Bins, contexts: int) -> Valuewise:
        """For data like x, at the wiener's knots."""
        centers = bins.values(torch.arange(bins.count, device=x.device), torch.float64)
        counts = torch.bincount(_kinds(wiener, bins, contexts, x).flatten(), minlength=contexts * bins.count)
        counts = counts.view(contexts, bins.count).double()
        overall = counts.sum(0) / counts.sum()
        prior = counts + overall  # as if each context had seen one value more, of any kind
        occurs = torch.log((overall > 0).double())  # -inf for values that do not: they are never predicted
        edges = torch.arange(-REACH, REACH + CELL / 2, CELL, dtype=torch.float64, device=x.device)
        below = torch.cat([edges.new_zeros(1), torch.special.ndtr(edges), edges.new_ones(1)])
        middles = torch.cat([edges[:1] - CELL / 2, edges + CELL / 2])
        table = centers.new_empty(len(wiener.rho), contexts, bins.count, len(middles))
        for knot, (rho, half_level) in enumerate(zip(wiener.rho, wiener.half_level, strict=True)):
            distance = rho * (centers[:, None] - centers)[:, None] + middles[:, None]  # bins, cells, bins
            exponent = occurs - 0.5 * distance.square()
            likelihood = torch.exp(exponent - exponent.amax(-1, keepdim=True))
            x_hat = (likelihood @ (prior * centers).T) / (likelihood @ prior.T)  # bins, cells, contexts
            table[knot] = half_level * (centers[:, None, None] - x_hat).square().movedim(2, 0)
        table = table.flatten(1, 2)
        mean = table @ torch.diff(below)
        return cls(wiener, bins, contexts, table.sub_(mean[..., None]), mean)

    def expected(self, x: Float[Tensor, "batch *data"]) -> Float64[Tensor, "batch knots"]:
        """E_eps of its integrand, for each sample and knot."""
        kinds = _kinds(self.wiener, self.bins, self.contexts, x)
        counts = self.mean.new_zeros(len(x), self.mean.shape[1])
        counts.scatter_add_(1, kinds, torch.ones_like(kinds, dtype=torch.float64))
        return counts @ self.mean.T

    def deviations(
        self, x: Float[Tensor, "batch *data"], eps: Float[Tensor, "batch *data"], left: Int[Tensor, " batch"]
    ) -> Float64[Tensor, "batch 2"]:
        """Its integrand less the expectation, at the knots left and left + 1, for the eps of an evaluation."""
        kinds = _kinds(self.wiener, self.bins, self.contexts, x)
        cells = self.deviation.shape[-1]
        cell = (torch.floor((eps.double().flatten(1) + REACH) / CELL) + 1).clamp(0, cells - 1).long()
        return torch.stack([self.deviation[knot[:, None], kinds, cell].sum(1) for knot in (left, left + 1)], 1)


def _kinds(wiener: Wiener, bins: Bins, contexts: int, x: Float[Tensor, "batch *data"]) -> Int[Tensor, "batch n"]:
    """Context and bin of each value, as one number."""
    index = bins.indices(x).long()
    if contexts > 1:
        told = from_the_others(wiener, bins.width**2 / 12, x)  # a bin hides the variance of a uniform distribution
        index = index + bins.count * Bins(bins.low, bins.high, contexts).indices(told).long()
    return index.flatten(1)
