"""A model as a denoiser of azula, for azula's samplers and guidance (https://azula.readthedocs.io).

    denoiser = AzulaDenoiser(model)                                          # needs pip install "bsi[azula]"
    sampler = DDIMSampler(denoiser, steps=64)
    x_1 = sampler.init((16, 3, 32, 32))
    x_0 = sampler(x_1)                                                       # the latent of the last level
    images = model.data(denoiser(x_0, torch.tensor(0.0)).mean)               # and the sample that it determines

azula's time runs from 1, the noisy end, to 0: it is 1 - t with our t = F(level). Its perturbation kernel N(alpha_t x,
sigma_t^2) is the method's encoder, so that x_t is the latent: the mean of the belief for BSI and BFN.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from bsi.errors import extra
from bsi.methods.base import Method
from bsi.model import Model

with extra("azula", "AzulaDenoiser"):
    from azula.denoise import Denoiser as AzulaBase
    from azula.denoise import DiracPosterior
    from azula.noise import Schedule as AzulaSchedule


class EncoderSchedule(AzulaSchedule):
    """The signal and the noise of a method's encoder, as functions of azula's time."""

    def __init__(self, method: Method) -> None:
        self.method = method

    def __call__(self, t: Tensor) -> tuple[Tensor, Tensor]:
        encoder = self.method.encoder(self.method.levels.icdf(1 - t.double()))
        return encoder.signal.to(t.dtype), encoder.noise.to(t.dtype)


class AzulaDenoiser(AzulaBase):
    """E[x | x_t] of a model. A condition is passed as `cond=...`, also to azula's samplers."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, self.schedule = model, EncoderSchedule(model.method)

    def forward(self, x_t: Float[Tensor, "batch *data"], t: Tensor, **given: Any) -> DiracPosterior:
        level = self.model.method.levels.icdf(1 - t.double()).expand(len(x_t))
        return DiracPosterior(mean=self.model.denoiser.given(given.get("cond"))(x_t, level))
