"""`Method`: one row of the paper's table "Central structures".

BSI, BFN and VDM share one ELBO, one importance-sampled estimator, one precision encoding and, in information
coordinates, one family of samplers. They differ in the Gaussian encoder q(psi | x, level) = N(signal x, noise^2), in
where sampling starts, and in how the last latent becomes a sample. A method is a frozen dataclass of floats: no
tensors, no network, no device.

Information coordinates: alpha = gain(level) is the precision gained from measurements, c the information of the
belief prior, Lambda = alpha + c, and s = alpha psi / signal the information. Then s | x ~ N(alpha x, Lambda), and
generation is

    ds = x_hat dLambda + dW,

of which the paper's update is the exact solution for a constant prediction. A latent by itself is a measurement of x
with precision rho^2, rho = signal / noise; `rho_at` and `level_at` convert between rho and the level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from jaxtyping import Float

if TYPE_CHECKING:
    from torch import Tensor as Tensor

    from bsi.gaussian import Encoder as Encoder
    from bsi.levels import LogUniform as LogUniform
else:
    Encoder = LogUniform = Tensor = Any  # importing a method does not import torch; shapes are still checked

Data = Float[Tensor, "batch *data"]

# f_theta(latent, level): a Denoiser, its DDP or compiled form, the EMA, or an oracle.
Predictor = Callable[[Data, Float[Tensor, " batch"]], Data]

# How a network's output becomes x_hat: EDM's preconditioning, the prediction of the latent's noise, or between the two.
Parametrization = Literal["edm", "epsilon", "blend", "reconstruction"]

# How binned data is decoded from x_hat: the mass of a Normal on a bin, or a softmax over the bins' centers.
Decoder = Literal["cdf", "softmax"]


@runtime_checkable
class Method(Protocol):
    """The paper's interface; bsi.py, bfn.py and vdm.py implement it. Levels and gains are computed in float64."""

    @property
    def levels(self) -> LogUniform:
        """The range of the level, and the default proposal over it."""

    @property
    def c(self) -> float:
        """Information of the belief prior: lambda_0^2 / gamma_0, and 0 for BFN and VDM."""

    @property
    def recon_precision(self) -> float:
        """Precision of the decoder p(x | x_hat) of binned data at the last level."""

    @property
    def density_precision(self) -> float:
        """Precision of the decoder of continuous data: that of the last belief, since x_hat cannot be more precise."""

    @property
    def parametrization(self) -> Parametrization:
        """What this method's networks predict by default."""

    @property
    def decoder(self) -> Decoder: ...

    @property
    def clips(self) -> bool:
        """Whether x_hat is clipped to the range of the bins."""

    def prior(self, eps: Data) -> Data:
        """The latent that sampling starts from, computed from standard normal noise."""

    def encoder(self, level: Float[Tensor, "*batch"]) -> Encoder:
        """q(psi | x, level)."""

    def gain(self, level: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """alpha: the precision gained from measurements when the level is reached."""

    def level(self, gain: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """The inverse of `gain`."""

    def decode(self, latent: Data, level: Float[Tensor, " batch"], predict: Predictor) -> Data:
        """The sample for a last latent: BSI and BFN predict once more, VDM rescales."""

    def prior_kl(self, x: Data) -> Float[Tensor, " batch"]:
        """KL of the encoder at the first level from the prior, in nats; 0 where they agree."""


def rho_at(method: Method, level: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """rho = signal / noise = gain / sqrt(Lambda), in float64, and 0 where Lambda is 0."""
    import torch

    gain = method.gain(level)
    # not sqrt(Lambda) - c / sqrt(Lambda): that cancels at the start, where BSI's rho is exactly 0
    return gain / torch.sqrt(torch.where(gain + method.c > 0, gain + method.c, 1.0))


def level_at(method: Method, rho: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """The level where signal / noise is rho, in float64: the gain solves alpha^2 / (alpha + c) = rho^2."""
    rho = rho.double()
    return method.level(0.5 * rho * (rho + (rho.square() + 4 * method.c).sqrt()))
