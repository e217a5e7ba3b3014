"""Isotropic Gaussians: beliefs about a sample, and the encoders of latents.

A belief about an unknown x is N(mean, 1 / precision). A measurement y ~ N(x, 1 / alpha) sharpens it:

    lambda' = lambda + alpha,        mu' = (lambda mu + alpha y) / lambda'            (Lemma "Posterior Update")

and, before y is known, the new mean is itself Gaussian around the sample that will be measured:

    mu' | mu, x ~ N((lambda mu + alpha x) / lambda', alpha / lambda'^2)               (Lemma "Update Marginal")

A level is one number per sample (or one for all), the data has the shape `batch *data`. Standard deviations are used
rather than precisions, so that a deterministic belief (gamma_0 = inf) is noise = 0 and needs no branch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from bsi.errors import UsageError

Data = Float[Tensor, "batch *data"]
PerSample = Float[Tensor, " batch"]


def over(value: Float[Tensor, " *batch"], data: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """One number per sample, cast to the data's dtype and reshaped to broadcast over the data's dimensions.

    Levels and coefficients are computed in float64 and cast only here: lambda - lambda_0 loses digits near t = 0.
    """
    return value.to(data.dtype).reshape(value.shape + (1,) * (data.ndim - value.ndim))


def sum_over_data(value: Data) -> PerSample:
    """The sum over each sample's own dimensions. There may be none: a sample may be a single number."""
    return value.reshape(len(value), -1).sum(1)


def squared_norm(data: Data) -> PerSample:
    """|x|_2^2 for each sample."""
    return sum_over_data(data.square())


@dataclass(frozen=True)
class Normal:
    """N(mean, std^2), isotropic."""

    mean: Data
    std: Float[Tensor, "*batch"]

    def sample(self, eps: Data) -> Data:
        return self.mean + over(self.std, self.mean) * eps

    def log_prob(self, x: Data) -> PerSample:
        n = x[0].numel()
        distance = squared_norm((x - self.mean) / over(self.std, x))
        return -0.5 * distance - n * (torch.log(self.std).to(x.dtype) + 0.5 * math.log(2 * math.pi))


def kl_divergence(p: Normal, q: Normal) -> PerSample:
    """KL(p || q) of isotropic Normals, in nats."""
    n = p.mean[0].numel()
    ratio = (p.std / q.std).square().to(p.mean.dtype)
    distance = squared_norm((p.mean - q.mean) / over(q.std, p.mean))
    return 0.5 * (n * (ratio - 1 - torch.log(ratio)) + distance)


@dataclass(frozen=True)
class Encoder:
    """q(psi | x) = N(signal x, noise^2): the distribution of the latent given the sample x."""

    signal: Float[Tensor, "*batch"]
    noise: Float[Tensor, "*batch"]

    def encode(self, x: Data, eps: Data) -> Data:
        return over(self.signal, x) * x + over(self.noise, x) * eps

    def distribution(self, x: Data) -> Normal:
        return Normal(over(self.signal, x) * x, self.noise)


def _check_precision(what: str, precision: Float[Tensor, "*batch"]) -> None:
    # A compiled graph cannot read the values.
    if not torch.compiler.is_compiling() and not bool((precision > 0).all()):
        raise UsageError(f"{what} has a positive precision, an inverse variance: got {precision.tolist()}")


@dataclass(frozen=True)
class Belief:
    """N(mean, 1 / precision): the knowledge about the unknown sample."""

    mean: Data
    precision: Float[Tensor, "*batch"]

    def __post_init__(self) -> None:
        _check_precision("a belief", self.precision)

    def update(self, y: Data, alpha: Float[Tensor, "*batch"]) -> Belief:
        """Lemma "Posterior Update": the belief after the measurement y ~ N(x, 1 / alpha)."""
        _check_precision("a measurement", alpha)
        if y.shape != self.mean.shape:
            got = f"{tuple(y.shape)} for a mean of {tuple(self.mean.shape)}"
            raise UsageError(f"a measurement has the belief's shape: got {got}")
        precision = self.precision + alpha
        mean = over(self.precision / precision, y) * self.mean + over(alpha / precision, y) * y
        return Belief(mean, precision)

    def update_marginal(self, x: Data, alpha: Float[Tensor, "*batch"]) -> Normal:
        """Lemma "Update Marginal": the updated mean's distribution over all measurements of x at precision alpha."""
        return Normal(self.update(x, alpha).mean, torch.sqrt(alpha) / (self.precision + alpha))
