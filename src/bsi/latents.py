"""Models of the latents of an autoencoder: the bound of images, and what an autoencoder has to do.

    encoder   q(z | x) = N(mean(x), std(x)^2)      decoder   p(x | z) = N'(x | x_hat(z), precision)      prior   p(z)

A model of latents is the prior. With its own bound of z it bounds the probability of images,

    -ln p(x) <= E_q(z|x) [ -ln p(z) + ln q(z | x) - ln p(x | z) ],

where N' is the discretized Normal of `bsi.likelihood`. The middle term is the negative entropy of q, which is exact.
The two others are estimated from independent draws of z.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int, Num
from torch import Tensor

from bsi.errors import UsageError
from bsi.gaussian import Data, PerSample, sum_over_data
from bsi.likelihood import discretized_normal
from bsi.values import Latents

Image = Float[Tensor, "batch _ _ _"]
Ids = Int[Tensor, " batch"]


@runtime_checkable
class EncoderDecoder(Protocol):
    """What a model of latents needs of an autoencoder. Images are values in [-1, 1]."""

    def encode(self, x: Image) -> tuple[Image, Image]:
        """The mean and the standard deviation of the latents of images; zeros if the latents have no noise."""

    def decode(self, z: Image) -> Image:
        """The images of latents."""


@dataclass(frozen=True)
class Encoded:
    """Images, or their stored latents, as a prior and an autoencoder see them. `take(ids)` returns some of them."""

    kind: Latents
    autoencoder: EncoderDecoder
    take: Callable[[Ids], Num[Tensor, "batch channels *space"]]

    @property
    def n(self) -> int:
        """Dimensions of an image."""
        return math.prod(self.kind.shape)

    def latents(self, ids: Ids, eps: Image) -> Image:
        """Latents of these images, drawn with the noise `eps`."""
        mean, std = moments(self.kind, self.autoencoder, self.take(ids))
        return mean + std * eps.to(mean)

    def entropy(self, ids: Ids) -> PerSample:
        """The entropy of q(z | x) in nats."""
        _, std = moments(self.kind, self.autoencoder, self.take(ids))
        if not bool((std > 0).all()):
            raise UsageError(
                "this autoencoder has no distribution of latents, only a mean, and images have no bound through it. "
                "Use an autoencoder with a distribution (autoencoder-f4, AutoencoderKL), or --fid."
            )
        return sum_over_data(std.double().log() + 0.5 * math.log(2 * math.pi * math.e))

    def distortion(self, ids: Ids, eps: Image) -> PerSample:
        """-ln p(x | z) in nats, for latents drawn with the noise `eps`."""
        index = self.take(ids)
        x_hat = self.autoencoder.decode(self.latents(ids, eps))
        return -discretized_normal(self.kind.bins, index, x_hat.to(eps), self.kind.precision)


def moments(
    kind: Latents, autoencoder: EncoderDecoder, data: Num[Tensor, "batch channels *space"]
) -> tuple[Data, Data]:
    """Mean and standard deviation of the latents of images (integers), or of stored latents (floats)."""
    if not data.is_floating_point():
        return autoencoder.encode(kind.bins.values(data))
    mean, std = data.chunk(2, dim=1)
    return mean, std
