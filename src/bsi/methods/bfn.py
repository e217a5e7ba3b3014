"""Bayesian Flow Networks for continuous data (Graves et al., 2023), Appendix "Bayesian Flow Networks".

BFN is BSI with a deterministic initial belief (mu_0, lambda_0) = (0, 1), gamma_0 = inf, and this class delegates to
that BSI. In BFN's notation alpha = lambda - 1, t is our t, and the encoder

    q(mu | x, lambda) = N( alpha / (1 + alpha) x,  alpha / (1 + alpha)^2 )

is its flow distribution. BFN differs in three points: the final precision is sigma_1^-2, also in the decoder; the
network predicts the noise; and x_hat is clipped to the data's range, as in the published code (unless clips=False).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float

from bsi.errors import UsageError
from bsi.methods.base import Decoder, Encoder, LogUniform, Parametrization, Predictor, Tensor
from bsi.methods.bsi import BSI


@dataclass(frozen=True)
class BFN:
    """BFN(sigma_1): the belief ends with standard deviation sigma_1."""

    sigma_1: float = 1e-3
    clips: bool = True

    c: ClassVar[float] = 0.0
    parametrization: ClassVar[Parametrization] = "epsilon"
    decoder: ClassVar[Decoder] = "cdf"

    def __post_init__(self) -> None:
        if not 0 < self.sigma_1 < 1:
            raise UsageError(
                f"sigma_1 is the belief's last standard deviation, between 0 and 1, the first: got {self.sigma_1}. "
                f"The paper uses 1e-3."
            )

    @property
    def belief(self) -> BSI:
        """The BSI with gamma_0 = inf and lambda_0 = 1 that this class delegates to."""
        last = self.sigma_1**-2
        return BSI(lambda_0=1.0, gamma_0=math.inf, alpha_M=last - 1, alpha_R=last)

    @property
    def levels(self) -> LogUniform:
        return self.belief.levels

    @property
    def recon_precision(self) -> float:
        return self.belief.recon_precision

    @property
    def density_precision(self) -> float:
        return self.belief.density_precision

    def prior(self, eps: Float[Tensor, "batch *data"]) -> Float[Tensor, "batch *data"]:
        """mu_0 = 0 for every sample."""
        return self.belief.prior(eps)

    def encoder(self, level: Float[Tensor, "*batch"]) -> Encoder:
        return self.belief.encoder(level)

    def gain(self, level: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        return self.belief.gain(level)

    def level(self, gain: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        return self.belief.level(gain)

    def decode(
        self, latent: Float[Tensor, "batch *data"], level: Float[Tensor, " batch"], predict: Predictor
    ) -> Float[Tensor, "batch *data"]:
        return self.belief.decode(latent, level, predict)

    def prior_kl(self, x: Float[Tensor, "batch *data"]) -> Float[Tensor, " batch"]:
        return self.belief.prior_kl(x)
