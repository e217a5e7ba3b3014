"""Exact predictors: E[x | psi] for mixtures of Gaussians, and for few symbols with a known joint distribution.

With psi = signal x + noise eps, psi is a Gaussian measurement of x with precision snr = (signal /
noise)^2: a component N(m, C) of the data's mixture has

    E[x | psi, component] = m + signal C (signal^2 C + noise^2 I)^-1 (psi - signal m),

and its posterior weight follows from the marginal N(signal m, signal^2 C + noise^2 I) of psi. For n symbols the sum
over all K^n sequences is taken. The tests and the documentation use these predictors as ground truth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bsi.errors import UsageError
from bsi.gaussian import Data, Encoder
from bsi.methods.base import Method, Predictor
from bsi.symbols import SymbolPredictor, evidence
from bsi.values import Symbols

PerComponent = Float[Tensor, "batch components n"]


@dataclass(frozen=True)
class Mixture:
    """sum_j weights[j] N(means[j], covariances[j]): data with a closed-form posterior.

    Covariances are stored as eigendecompositions, so that computations at any level are diagonal.
    """

    weights: Float[Tensor, " components"]
    means: Float[Tensor, "components n"]
    variances: Float[Tensor, "components n"]
    axes: Float[Tensor, "components n n"] | None = None  # columns are eigenvectors; None: the coordinate axes

    def __post_init__(self) -> None:
        weights, means, variances = (tuple(each.shape) for each in (self.weights, self.means, self.variances))
        if weights != means[:1] or variances != means:
            got = f"weights {weights}, means {means}, variances {variances}"
            raise UsageError(f"a mixture has one weight, one mean and one row of variances per component: got {got}")
        if bool((self.weights <= 0).any()) or bool((self.variances < 0).any()):
            raise UsageError("a mixture needs positive weights and non-negative variances")

    @classmethod
    def isotropic(
        cls, means: Float[Tensor, "components n"], std: float, weights: Float[Tensor, " components"] | None = None
    ) -> Mixture:
        """Components of one standard deviation; with std = 0, the data points themselves."""
        weights = torch.ones_like(means[:, 0]) if weights is None else weights
        return cls(weights / weights.sum(), means, torch.full_like(means, std**2))

    @classmethod
    def gaussian(cls, mean: Float[Tensor, " n"], covariance: Float[Tensor, "n n"]) -> Mixture:
        """A single Gaussian with any covariance."""
        return cls.general(torch.ones_like(mean[:1]), mean[None], covariance[None])

    @classmethod
    def general(
        cls,
        weights: Float[Tensor, " components"],
        means: Float[Tensor, "components n"],
        covariances: Float[Tensor, "components n n"],
    ) -> Mixture:
        variances, axes = torch.linalg.eigh(covariances)
        return cls(weights / weights.sum(), means, variances.clamp(min=0.0), axes)

    def _along(self, offsets: PerComponent) -> PerComponent:
        return offsets if self.axes is None else torch.einsum("bcn,cnm->bcm", offsets, self.axes)

    def _log_weights(self, offsets: PerComponent, spread: PerComponent) -> Float[Tensor, "batch components"]:
        log_density = -0.5 * (offsets.square() / spread + torch.log(2 * math.pi * spread)).sum(-1)
        return log_density + torch.log(self.weights)

    def posterior_mean(self, encoder: Encoder, psi: Data) -> Data:
        """E[x | psi]; the prior mean where psi has no information."""
        signal, noise = (v.to(psi.dtype).expand(len(psi))[:, None, None] for v in (encoder.signal, encoder.noise))
        noise = torch.where(noise == 0, torch.ones_like(noise), noise)
        offsets = self._along(psi.reshape(len(psi), 1, -1) - signal * self.means)
        spread = signal.square() * self.variances + noise.square()
        moved = signal * self.variances / spread * offsets
        means = self.means + (moved if self.axes is None else torch.einsum("bcm,cnm->bcn", moved, self.axes))
        responsibilities = torch.softmax(self._log_weights(offsets, spread), dim=-1)
        return torch.einsum("bc,bcn->bn", responsibilities, means).reshape(psi.shape)

    def predictor(self, method: Method) -> Predictor:
        """The optimal f_theta(latent, level) for this data."""
        return lambda latent, level: self.posterior_mean(method.encoder(level), latent)

    def log_density(self, x: Data) -> Float[Tensor, " batch"]:
        """ln p(x), in nats."""
        offsets = self._along(x.reshape(len(x), 1, -1) - self.means)
        return torch.logsumexp(self._log_weights(offsets, self.variances.expand_as(offsets)), dim=-1)

    def sample(self, component: Float[Tensor, " batch"], eps: Float[Tensor, "batch n"]) -> Float[Tensor, "batch n"]:
        """Samples from standard normal noise `eps` and uniform numbers in [0, 1), which select the component."""
        chosen = torch.searchsorted(torch.cumsum(self.weights, 0), component, right=True)
        chosen = chosen.clamp(max=len(self.weights) - 1)
        offsets = torch.sqrt(self.variances[chosen]) * eps
        if self.axes is not None:
            offsets = torch.einsum("bm,bnm->bn", offsets, self.axes[chosen])
        return self.means[chosen] + offsets


@dataclass(frozen=True)
class Sequences:
    """Sequences of n symbols whose joint distribution is a table with K entries along each of n axes."""

    table: Float[Tensor, "..."]

    @property
    def all(self) -> Int[Tensor, "sequences n"]:
        """All sequences, in the order of the flattened table."""
        return torch.cartesian_prod(*(torch.arange(size) for size in self.table.shape)).view(-1, self.table.ndim)

    @property
    def log_prob(self) -> Float[Tensor, " sequences"]:
        return self.table.flatten().log()

    def logits(self, evidence: Float[Tensor, "batch symbols n"]) -> Float[Tensor, "batch symbols n"]:
        """ln p(x_i = k | psi) from ln p(psi_i | k)."""
        one_hot = torch.nn.functional.one_hot(self.all, len(self.table)).mT  # sequences, symbols, n
        matches = one_hot.to(evidence.dtype).flatten(1)
        joint = self.log_prob.to(evidence.dtype) + evidence.flatten(1) @ matches.T
        return (torch.softmax(joint, 1) @ matches).view_as(evidence).log()

    def predictor(self, method: Method) -> SymbolPredictor:
        """The optimal predictor for this data."""
        symbols = Symbols(len(self.table))
        return SymbolPredictor(symbols, lambda psi, level: self.logits(evidence(method.encoder(level), psi)))
