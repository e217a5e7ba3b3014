"""The Frechet distance between two sets of features, each taken as a Gaussian, its moments and its standard error.

    d^2 = |m_1 - m_2|^2 + tr S_1 + tr S_2 - 2 tr (S_1 S_2)^(1/2)

With S_1 = F F^T, the matrix S_1 S_2 has the nonzero eigenvalues of the symmetric F^T S_2 F, so the last trace is the
sum of their square roots: two symmetric eigenproblems on the device, no general matrix root and no complex remainder.

Moments are kept as (n, mean, scatter about the mean) in float64 and added by the rule of Chan, Golub and LeVeque,

    scatter = scatter_1 + scatter_2 + n_1 n_2 / (n_1 + n_2) (m_2 - m_1)(m_2 - m_1)^T,

which, unlike sums of squares, loses no digits when the mean is large. Any split into batches and ranks gives the same
value.

The standard error is that of having drawn these samples and not others. For fixed moments of the real data the
distance is, to first order in 1 / n, an average over the samples of their influence (the delta method), whose variance
over n is that of the distance:

    psi(x) = 2 (m_1 - m_2) . (x - m_1) + (x - m_1)^T G (x - m_1) - tr (G S_1),
    G      = I - S_2^1/2 (S_2^1/2 S_1 S_2^1/2)^-1/2 S_2^1/2.

For samples that can hardly be distinguished from the real ones, or no more samples than features, the second order
matters, and the error is too large by up to about sqrt 2, as that of a jackknife is. The error does not include the
bias of a finite number of samples, which is of second order: compare distances at equal numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from bsi.errors import DataError, NonFinite


@dataclass(frozen=True)
class Moments:
    """Number, mean and scatter (sum of outer products about the mean) of features."""

    n: int
    mean: Float64[Tensor, " dim"]
    scatter: Float64[Tensor, "dim dim"]

    @classmethod
    def empty(cls, dim: int, device: torch.device | str = "cpu") -> Moments:
        zeros = torch.zeros(dim, dim, dtype=torch.float64, device=device)
        return cls(0, zeros[0].clone(), zeros)

    @classmethod
    def of(cls, features: Float[Tensor, "n dim"]) -> Moments:
        if len(features) == 0:
            return cls.empty(features.shape[1], features.device)
        x = features.double()
        mean = x.mean(0)
        centered = x - mean
        return cls(len(x), mean, centered.T @ centered)

    def __add__(self, other: Moments) -> Moments:
        """The moments of both sets together."""
        n = self.n + other.n
        if n == 0:
            return self
        step = other.mean - self.mean
        mean = self.mean + step * (other.n / n)
        scatter = self.scatter + other.scatter
        return Moments(n, mean, scatter.addr_(step, step, alpha=self.n * other.n / n))

    @property
    def covariance(self) -> Float64[Tensor, "dim dim"]:
        """The unbiased estimate, divided by n - 1."""
        if self.n < 2:
            raise DataError(f"a covariance needs at least 2 samples, got {self.n}.")
        return self.scatter / (self.n - 1)

    def over_ranks(self) -> Moments:
        """The moments of all ranks' features together, on every rank; `self` without a process group.

        There are always two reductions, so a rank without samples does not block the others. A NaN of one rank
        reaches all, so that all raise the same error.
        """
        if not dist.is_initialized():
            return self
        total = torch.cat([self.mean * self.n, self.mean.new_tensor([self.n])])
        dist.all_reduce(total)
        n = round(total[-1].item())
        mean = total[:-1] / max(n, 1)
        step = self.mean - mean
        scatter = torch.addr(self.scatter, step, step, alpha=self.n)
        dist.all_reduce(scatter)
        return Moments(n, mean, scatter)


def frechet_distance(a: Moments, b: Moments) -> float:
    """d^2 of the module's formula: with Inception's published features, the FID."""
    for moments in (a, b):
        if not (moments.mean.isfinite().all() and moments.scatter.isfinite().all()):
            fix = "Check the extractor's weights, and use precision float32 if it was float16"
            raise NonFinite(f"the features of {moments.n} images hold NaN or infinity. {fix}.")
    if len(a.mean) != len(b.mean):
        raise DataError(f"features must have one dimension, got {len(a.mean)} and {len(b.mean)}. Use one extractor.")
    m_1, S_1, m_2, S_2 = a.mean, a.covariance, b.mean, b.covariance
    values, vectors = torch.linalg.eigh(S_1)
    present = _positive(values)
    factor = vectors[:, present] * values[present].sqrt()
    product = factor.T @ S_2 @ factor
    trace_sqrt = torch.linalg.eigvalsh((product + product.T) / 2).clamp(min=0).sqrt().sum()
    distance = (m_1 - m_2).square().sum() + S_1.trace() + S_2.trace() - 2 * trace_sqrt
    return max(0.0, distance.item())  # for equal sets, rounding errors may be negative


def _positive(values: Float64[Tensor, " dim"]) -> Bool[Tensor, " dim"]:
    """The eigenvalues that are larger than rounding errors: the root of an error of 1e-16 would be 1e-8."""
    return values > values[-1] * len(values) * torch.finfo(values.dtype).eps


def frechet_error(samples: Float[Tensor, "n dim"], real: Moments) -> float:
    """The standard error of frechet_distance(Moments.of(samples), real)."""
    values, vectors = torch.linalg.eigh(real.covariance)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    x = samples.double()
    mean = x.mean(0)
    centered = x - mean
    product = root @ (centered.T @ centered / (len(x) - 1)) @ root
    values, vectors = torch.linalg.eigh((product + product.T) / 2)
    present = _positive(values)
    half = root @ (vectors[:, present] / values[present].sqrt().sqrt())
    # G is I - half half^T; it is not formed.
    quadratic = centered.square().sum(1) - (centered @ half).square().sum(1)
    influence = 2 * centered @ (mean - real.mean) + quadratic
    return float((influence - influence.mean()).std()) / math.sqrt(len(x))
