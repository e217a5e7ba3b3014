"""Bayesian Sample Inference, Sections "Sample Generation with Posterior Inference" and "Prior Distribution".

The latent is the mean mu of the belief N(mu, 1 / lambda), the level its precision lambda. The initial belief's mean
is drawn from the belief prior N(0, 1 / gamma_0) with gamma_0 in [lambda_0, inf], and the encoder is (Lemma "ELBO
encoder")

    q(mu | x, lambda) = N( (lambda - lambda_0) / lambda x,  (lambda - lambda_0 + lambda_0^2 / gamma_0) / lambda^2 ).

At gamma_0 = lambda_0 its variance is 1 / lambda: that is BSI. At gamma_0 = inf the initial belief is deterministic:
with lambda_0 = 1 that is BFN, and Posterior Mean Matching (Normal-Normal).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float

from bsi.errors import UsageError
from bsi.methods.base import Data, Decoder, Encoder, LogUniform, Parametrization, Predictor, Tensor


class BeliefMethod:
    """What BSI and BFN share: the latent is the mean of a belief, and the level its precision, from lambda_0 on."""

    @property
    @abstractmethod
    def levels(self) -> LogUniform: ...

    @property
    @abstractmethod
    def c(self) -> float: ...

    def prior(self, eps: Data) -> Data:
        """mu_0 ~ N(0, 1 / gamma_0); 0 for every sample of BFN."""
        return math.sqrt(self.c) / self.levels.low * eps

    def encoder(self, level: Float[Tensor, "*batch"]) -> Encoder:
        from bsi import gaussian

        level = level.double()
        alpha = self.gain(level)
        return gaussian.Encoder(signal=alpha / level, noise=(alpha + self.c).sqrt() / level)

    def gain(self, level: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        return level.double() - self.levels.low

    def level(self, gain: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        return gain.double() + self.levels.low

    def decode(self, latent: Data, level: Float[Tensor, " batch"], predict: Predictor) -> Data:
        """The last line of the algorithms "Sampling": x_hat* = f(mu_k, lambda_k)."""
        return predict(latent, level)

    def prior_kl(self, x: Data) -> Float[Tensor, " batch"]:
        """The encoder at lambda_0 is the belief prior: the term vanishes."""
        return x.new_zeros(len(x))


@dataclass(frozen=True)
class BSI(BeliefMethod):
    """BSI(lambda_0, gamma_0, alpha_M, alpha_R); by default gamma_0 = lambda_0, alpha_R = 2 alpha_M as in the paper."""

    lambda_0: float = 1e-2
    gamma_0: float | None = None
    alpha_M: float = 1e6
    alpha_R: float | None = None
    clips: bool = False
    """Clip x_hat to the range of the bins, as BFN does; continuous data has no range."""

    parametrization: ClassVar[Parametrization] = "edm"
    decoder: ClassVar[Decoder] = "cdf"

    def __post_init__(self) -> None:
        for name, value in (("lambda_0", self.lambda_0), ("alpha_M", self.alpha_M), ("alpha_R", self.alpha_R)):
            if value is not None and not 0 < value < math.inf:
                raise UsageError(
                    f"{name} is a precision, positive and finite: got {name}={value}. The paper uses lambda_0=1e-2, "
                    f"alpha_M=1e6, alpha_R=2e6."
                )
        if self.gamma_0 is not None and not self.gamma_0 >= self.lambda_0:
            raise UsageError(
                f"gamma_0 must be at least lambda_0 (a belief prior cannot be broader than the belief it draws): got "
                f"gamma_0={self.gamma_0}, lambda_0={self.lambda_0}. Use gamma_0=lambda_0 for BSI, gamma_0=inf for a "
                f"deterministic start."
            )

    @property
    def levels(self) -> LogUniform:
        from bsi import levels

        return levels.LogUniform(self.lambda_0, self.lambda_0 + self.alpha_M)

    @property
    def c(self) -> float:
        # lambda_0 (lambda_0 / gamma_0): exactly lambda_0 for BSI
        return self.lambda_0 * (self.lambda_0 / (self.lambda_0 if self.gamma_0 is None else self.gamma_0))

    @property
    def recon_precision(self) -> float:
        return 2 * self.alpha_M if self.alpha_R is None else self.alpha_R

    @property
    def density_precision(self) -> float:
        # The paper's 2 alpha_M is for bins. For a density it would be more precise than x_hat.
        return self.alpha_M if self.alpha_R is None else self.alpha_R
