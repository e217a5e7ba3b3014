"""Bayesian Flow Networks for continuous data (Graves et al., 2023), Appendix "Bayesian Flow Networks".

BFN is BSI with a deterministic initial belief (mu_0, lambda_0) = (0, 1), gamma_0 = inf. In BFN's notation
alpha = lambda - 1, t is our t, and the encoder

    q(mu | x, lambda) = N( alpha / (1 + alpha) x,  alpha / (1 + alpha)^2 )

is its flow distribution. BFN differs in three points: the final precision is sigma_1^-2, also in the decoder; the
network predicts the noise; and x_hat is clipped to the data's range, as in the published code (unless clips=False).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bsi.errors import UsageError
from bsi.methods.base import Decoder, LogUniform, Parametrization
from bsi.methods.bsi import BeliefMethod


@dataclass(frozen=True)
class BFN(BeliefMethod):
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
    def levels(self) -> LogUniform:
        from bsi import levels

        return levels.LogUniform(1.0, 1.0 + (self.recon_precision - 1))

    @property
    def recon_precision(self) -> float:
        return self.sigma_1**-2

    @property
    def density_precision(self) -> float:
        return self.recon_precision
