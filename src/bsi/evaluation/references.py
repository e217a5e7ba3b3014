"""Reference denoisers: predictions so simple that their expected error is known, correlated with the network's.

With rho = signal / noise of the encoder, a latent says as much about x as y = x + eps / rho. Two denoisers of y have,
for any given x, a squared error whose expectation over eps is known exactly, and between them they share most of what
eps does to a trained network's error:

wiener      the best linear one, in the axes of the data's separable principal components. With z, e the coordinates of
            x - mean and eps there, and v the data's variances along them, the error along each is
                z / (1 + rho^2 v)  -  rho v / (1 + rho^2 v) e,
            and its square has expectation (z^2 + rho^2 v^2) / (1 + rho^2 v)^2. It knows how values depend on their
            neighbours, which is what counts at all but the last levels.

pixelwise   the posterior mean of each value by itself, under the histogram of all values in the data. It knows that
            values lie on a grid, which is what counts at the last levels, and that most pixels may be black. Its error
            is a function of (bin of x, eps) alone, tabulated over cells of eps: the expectation is a finite sum.

Neither needs a network, or data other than the samples that are evaluated: given x, only eps is random. Both are taken
at fixed levels, the knots, with the eps of the evaluation between them. Everything here is float64 and in the units of
the integrand, 1/2 level |x - x_hat|^2, so that its integral over ln(level) is in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from bsi.likelihood import Bins
from bsi.methods.base import Method

__all__ = ["Pixelwise", "Reference", "Wiener", "references"]

PIXELWISE_BINS = 256  # more bins than this lie closer than the last noise: there is no grid to know of
CELL, REACH = 0.125, 6.0  # eps in cells of this width up to this far, and one cell for each tail
SMALLEST = 1e-6  # of the variance: no direction is taken to be known exactly


@runtime_checkable
class Reference(Protocol):
    """A denoiser at each of the knots."""

    def expected(self, x: Float[Tensor, "batch *data"]) -> Float64[Tensor, "batch knots"]:
        """E_eps of its integrand, for each sample and knot."""
        ...

    def deviations(
        self, x: Float[Tensor, "batch *data"], eps: Float[Tensor, "batch *data"], left: Int[Tensor, " batch"]
    ) -> Float64[Tensor, "batch 2"]:
        """Its integrand less the expectation, at the knots left and left + 1, for the eps of an evaluation."""
        ...


def references(
    method: Method, levels: Float64[Tensor, " knots"], x: Float[Tensor, "batch *data"], bins: Bins | None
) -> tuple[Reference, ...]:
    """The references for data like x; without bins, or with very many, there is no grid to know of."""
    wiener = Wiener.fit(method, levels, x)
    if bins is None or bins.count > PIXELWISE_BINS:
        return (wiener,)
    return (wiener, Pixelwise.fit(method, levels, x, bins))


def _signal_to_noise(method: Method, levels: Float64[Tensor, " knots"]) -> Float64[Tensor, " knots"]:
    """rho = signal / noise, and 0 where there is neither."""
    encoder = method.encoder(levels)
    nothing = encoder.signal == 0
    return torch.where(nothing, 0.0, encoder.signal / torch.where(nothing, 1.0, encoder.noise))


@dataclass(frozen=True)
class Wiener:
    """The best linear denoiser for the data's mean and variances along `axes`, one orthogonal matrix per dimension."""

    mean: Float64[Tensor, "*data"]
    axes: tuple[Float64[Tensor, "_ _"], ...]
    variance: Float64[Tensor, " n"]
    rho: Float64[Tensor, " knots"]
    half_level: Float64[Tensor, " knots"]

    @classmethod
    def fit(cls, method: Method, levels: Float64[Tensor, " knots"], x: Float[Tensor, "batch *data"]) -> Wiener:
        mean = x.double().mean(0)
        offset = x.double() - mean
        axes = tuple(torch.linalg.eigh(_covariance(offset, axis))[1] for axis in range(1, x.ndim))
        variance = _rotate(offset, axes).square().mean(0)
        variance = torch.clamp(variance, min=SMALLEST * float(variance.mean()) + 1e-30)
        return cls(mean, axes, variance, _signal_to_noise(method, levels), 0.5 * levels)

    def coordinates(self, x: Float[Tensor, "batch *data"]) -> Float64[Tensor, "batch n"]:
        """z: x less its mean, along the axes."""
        return _rotate(x.double() - self.mean, self.axes)

    def expected(self, x: Float[Tensor, "batch *data"]) -> Float64[Tensor, "batch knots"]:
        z = self.coordinates(x)
        rho, v = self.rho, self.variance[:, None]
        known = 1 / (1 + rho.square() * v)
        return self.half_level * (z.square() @ known.square() + (rho * v * known).square().sum(0))

    def deviations(
        self, x: Float[Tensor, "batch *data"], eps: Float[Tensor, "batch *data"], left: Int[Tensor, " batch"]
    ) -> Float64[Tensor, "batch 2"]:
        z, e = self.coordinates(x), _rotate(eps.double(), self.axes)
        found = []
        for knot in (left, left + 1):
            rho = self.rho[knot][:, None]
            known = 1 / (1 + rho.square() * self.variance)
            gain = rho * self.variance * known
            error = gain.square() * (e.square() - 1) - 2 * gain * known * z * e
            found.append(self.half_level[knot] * error.sum(1))
        return torch.stack(found, 1)


def _covariance(offset: Float64[Tensor, "batch *data"], axis: int) -> Float64[Tensor, "d d"]:
    """The covariance along one axis, pooled over the others."""
    rows = offset.movedim(axis, -1).flatten(0, -2)
    return rows.T @ rows / len(rows)


def _rotate(x: Float64[Tensor, "batch *data"], axes: tuple[Tensor, ...]) -> Float64[Tensor, "batch n"]:
    """The coordinates along the axes: orthonormal, so that standard noise stays standard noise."""
    for matrix in axes:
        x = torch.tensordot(x, matrix, dims=([1], [0]))  # the new axis comes last: after all, the order is restored
    return x.flatten(1)


@dataclass(frozen=True)
class Pixelwise:
    """The posterior mean of each value alone: its error by (knot, bin, cell of eps), less the expectation."""

    bins: Bins
    deviation: Float64[Tensor, "knots bins cells"]
    mean: Float64[Tensor, "knots bins"]

    @classmethod
    def fit(
        cls, method: Method, levels: Float64[Tensor, " knots"], x: Float[Tensor, "batch *data"], bins: Bins
    ) -> Pixelwise:
        centres = bins.values(torch.arange(bins.count, device=x.device), torch.float64)
        histogram = torch.bincount(bins.indices(x).long().flatten(), minlength=bins.count).double()
        prior = torch.log(histogram / histogram.sum())  # -inf for values that do not occur: they are never predicted
        edges = torch.arange(-REACH, REACH + CELL / 2, CELL, dtype=torch.float64, device=x.device)
        below = torch.cat([edges.new_zeros(1), torch.special.ndtr(edges), edges.new_ones(1)])
        middles = torch.cat([edges[:1] - CELL / 2, edges + CELL / 2])
        tables = []
        for rho, level in zip(_signal_to_noise(method, levels), levels, strict=True):
            distance = rho * (centres[:, None] - centres)[:, None] + middles[:, None]  # bins, cells, bins
            x_hat = torch.softmax(prior - 0.5 * distance.square(), -1) @ centres
            tables.append(0.5 * level * (centres[:, None] - x_hat).square())
        table = torch.stack(tables)
        mean = table @ torch.diff(below)
        return cls(bins, table - mean[..., None], mean)

    def expected(self, x: Float[Tensor, "batch *data"]) -> Float64[Tensor, "batch knots"]:
        index = self.bins.indices(x).long().flatten(1)
        counts = self.mean.new_zeros(len(x), self.bins.count)
        counts.scatter_add_(1, index, torch.ones_like(index, dtype=torch.float64))
        return counts @ self.mean.T

    def deviations(
        self, x: Float[Tensor, "batch *data"], eps: Float[Tensor, "batch *data"], left: Int[Tensor, " batch"]
    ) -> Float64[Tensor, "batch 2"]:
        index = self.bins.indices(x).long().flatten(1)
        cells = self.deviation.shape[-1]
        cell = (torch.floor((eps.double().flatten(1) + REACH) / CELL) + 1).clamp(0, cells - 1).long()
        return torch.stack([self.deviation[knot[:, None], index, cell].sum(1) for knot in (left, left + 1)], 1)
