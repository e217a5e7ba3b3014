"""Variational Diffusion Models (Kingma et al., 2021) in terms of the signal-to-noise ratio nu, Section "Discussion".

    q(z | x, nu) = N( sqrt(nu / (1 + nu)) x,  1 / (1 + nu) ),        nu from e^-5 to e^13.3,

with a log-SNR that is linear in t. Sampling starts from N(0, 1), which differs slightly from the encoder at the first
level, so that the ELBO has a prior term. The sample is the rescaled last latent, without another prediction. The
published decoder is a softmax over the bins' centers of N(z / signal, 1 / nu); `decoder="cdf"` uses the mass on the bin
instead, as BSI and BFN do.

The update from nu to nu' > nu of the paper's table is, in information coordinates s = sqrt(nu (1 + nu)) z, the same
addition of information as BSI's: no evaluation in log space is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float

from bsi.errors import UsageError
from bsi.methods.base import Data, Decoder, Encoder, LogUniform, Parametrization, Predictor, Tensor


@dataclass(frozen=True)
class VDM:
    """VDM(nu_min, nu_max): the fixed linear log-SNR schedule of the paper."""

    nu_min: float = math.exp(-5)
    nu_max: float = math.exp(13.3)
    decoder: Decoder = "softmax"
    clips: bool = False
    """Clip x_hat to the range of the bins, as BFN does; continuous data has no range."""

    c: ClassVar[float] = 0.0
    parametrization: ClassVar[Parametrization] = "epsilon"

    def __post_init__(self) -> None:
        if not 0 < self.nu_min < self.nu_max < math.inf:
            raise UsageError(
                f"signal-to-noise ratios are positive and rise from nu_min to nu_max: got nu_min={self.nu_min}, "
                f"nu_max={self.nu_max}. The paper uses e^-5 and e^13.3."
            )

    @property
    def levels(self) -> LogUniform:
        from bsi import levels

        return levels.LogUniform(self.nu_min, self.nu_max)

    @property
    def recon_precision(self) -> float:
        return self.nu_max

    @property
    def density_precision(self) -> float:
        return self.nu_max

    def prior(self, eps: Data) -> Data:
        """z ~ N(0, 1)."""
        return eps

    def encoder(self, level: Float[Tensor, "*batch"]) -> Encoder:
        from bsi import gaussian

        nu = level.double()
        noise = (1 + nu).rsqrt()
        return gaussian.Encoder(signal=nu.sqrt() * noise, noise=noise)

    def gain(self, level: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        return level.double()

    def level(self, gain: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        return gain.double()

    def decode(self, latent: Data, level: Float[Tensor, " batch"], predict: Predictor) -> Data:
        """z / signal: no network."""
        from bsi.gaussian import over

        return latent / over(self.encoder(level).signal, latent)

    def prior_kl(self, x: Data) -> Float[Tensor, " batch"]:
        """KL( q(z | x, nu_min) || N(0, 1) )."""
        import torch

        from bsi.gaussian import Normal, kl_divergence

        first = torch.full((len(x),), self.nu_min, dtype=torch.float64, device=x.device)
        encoded = self.encoder(first).distribution(x.double())
        return kl_divergence(encoded, Normal(torch.zeros_like(encoded.mean), torch.ones_like(encoded.std)))
