"""Reference denoisers: predictions so simple that their expected error is known, correlated with the network's.

With rho = signal / noise of the encoder, a latent says as much about x as y = x + eps / rho. Some denoisers of y have,
for any given x, a squared error whose expectation over eps is known exactly, and between them they share most of what
eps does to a trained network's error. Here is the best linear one, in the axes of the data's separable principal
components. With z, e the coordinates of x - mean and eps there, and v the data's variances along them, the error along
each is

    z / (1 + rho^2 v)  -  rho v / (1 + rho^2 v) e,

and its square has expectation (z^2 + rho^2 v^2) / (1 + rho^2 v)^2. It knows how values depend on their neighbors:
what counts at all but the last levels. valuewise.py has those that know that values lie on a grid.

None needs a network, or data other than the samples that are evaluated: given x, only eps is random. All are taken at
fixed levels, the knots, with the eps of the evaluation between them. Everything here is float64 and in the units of the
integrand, 1/2 level |x - x_hat|^2, so that its integral over ln(level) is in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from bsi.methods.base import Method

__all__ = ["Reference", "Wiener"]

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
