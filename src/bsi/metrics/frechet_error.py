"""The standard error of a Fréchet distance from having drawn these samples and not others.

For fixed real moments the distance is a smooth function of the samples' mean m_1 and covariance S_1,

    d^2 = |m_1 - m_2|^2 + tr (S_1 + S_2) - 2 tr (S_2^1/2 S_1 S_2^1/2)^1/2,

and so, to first order in 1 / n, an average over the samples of their influence (the delta method):

    psi(x) = 2 (m_1 - m_2) . (x - m_1) + (x - m_1)^T G (x - m_1) - tr (G S_1),
    G      = I - S_2^1/2 (S_2^1/2 S_1 S_2^1/2)^-1/2 S_2^1/2.

Its variance over n is that of the distance. Where the second order counts, for samples that are hardly to be told from
the real ones, or no more than they have features, it is too large, as a jackknife's is, the error by up to about
sqrt 2: the moments in a sample's psi have that sample in them. Two sets of samples from the same noise share much of
it: the error of their difference is that of the mean of psi_a(x_i) - psi_b(x_i'), sample by sample. The bias of a
finite number of samples, of second order, is not in any of these: distances are compared at equal numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from bsi.metrics.frechet import Moments

__all__ = ["Measured", "Yardstick", "frechet_error"]


@dataclass(frozen=True)
class Measured:
    """A distance, and how much each sample moved it: the mean influence is 0."""

    distance: float
    influence: Float64[Tensor, " n"]

    @property
    def error(self) -> float:
        return float(self.influence.std()) / math.sqrt(len(self.influence))


class Yardstick:
    """Distances of many sets of samples to one set of real ones, whose covariance is taken apart once."""

    def __init__(self, real: Moments) -> None:
        values, vectors = torch.linalg.eigh(real.covariance)
        self.real, self.root = real, vectors * values.clamp(min=0).sqrt() @ vectors.T

    def __call__(self, samples: Float[Tensor, "n dim"]) -> Measured:
        x = samples.double()
        mean = x.mean(0)
        centerd = x - mean
        covariance = centerd.T @ centerd / (len(x) - 1)
        product = self.root @ covariance @ self.root
        values, vectors = torch.linalg.eigh((product + product.T) / 2)
        present = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
        offset, traces = mean - self.real.mean, covariance.trace() + self.real.covariance.trace()
        distance = offset.square().sum() + traces - 2 * values[present].sqrt().sum()
        half = self.root @ (vectors[:, present] / values[present].sqrt().sqrt())
        # G is I - half half^T, which need not be formed
        quadratic = centerd.square().sum(1) - (centerd @ half).square().sum(1)
        influence = 2 * centerd @ offset + quadratic
        return Measured(float(distance), influence - influence.mean())


def frechet_error(samples: Float[Tensor, "n dim"], real: Moments) -> float:
    """The standard error of frechet_distance(Moments.of(samples), real)."""
    return Yardstick(real)(samples).error
