"""A convolutional autoencoder of images: a few numbers for each patch of pixels, with a known amount of noise.

    u = encoder(x)        mean = u / rms(u)        z = mean + noise eps        x_hat = decoder(z)

The latents of an image have mean square 1, and noise of a fixed standard deviation is added to them: an image is sent
through a Gaussian channel of limited power, whose best use are latents that are themselves nearly Gaussian. So
q(z | x) = N(mean, noise^2) needs no term of its own in the training loss, which is the error of x_hat alone (see
`bsi.objective`). Groups of 2 x 2 pixels are the channels of the first convolution, each further resolution is half of
the previous one, and everything is convolutional: images of other sizes than in training can be encoded too.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle, silu

from bsi.backbones import layers
from bsi.backbones.config import AutoencoderConfig
from bsi.backbones.layers import Backbone, Image, Labels, Times
from bsi.backbones.unet import ConvHead, Resample, convolution, group_norm

RMS_EPS = 1e-6


class Autoencoder(Backbone):
    """The autoencoder for images of one shape. As a backbone, it maps an image to its reconstruction."""

    config: AutoencoderConfig

    def make_layers(self, inputs: int, num_classes: int) -> None:
        config, packed = self.config, 4 * self.shape[0]
        ends = ConvHead(config.widths[-1], config.channels, 2), ConvHead(config.widths[0], packed, 2)
        layers.lecun_(ends[0].conv)  # not 0: latents of zeros have no direction
        self.encoder = nn.ModuleList([_stem(packed, config.widths[0]), *_blocks(config, up=False), ends[0]])
        self.decoder = nn.ModuleList([_stem(config.channels, config.widths[-1]), *_blocks(config, up=True), ends[1]])

    def network(self, features: Image, t: Times, cond: Labels | None) -> Image:
        mean, std = self.encode(features[:, : self.shape[0]])  # without Fourier features
        return self.decode(mean + std * torch.randn_like(mean) if self.training else mean)

    def encode(self, x: Float[Tensor, "batch _ height width"]) -> tuple[Image, Image]:
        """The mean and the standard deviation of the latents of images in [-1, 1]."""
        u = pixel_unshuffle(x, 2).contiguous(memory_format=torch.channels_last)
        for layer in self.encoder:
            u = layer(u)
        mean = u.float() * torch.rsqrt(u.float().square().mean((1, 2, 3), keepdim=True) + RMS_EPS)
        return mean, torch.full_like(mean, self.config.noise)

    def decode(self, z: Image) -> Float[Tensor, "batch _ height width"]:
        """The reconstruction of images in [-1, 1]."""
        h = z.contiguous(memory_format=torch.channels_last)
        for layer in self.decoder:
            h = layer(h)
        return pixel_shuffle(h, 2)

    def regions(self) -> Iterator[nn.Module]:
        yield from [*self.encoder[1:], *self.decoder[1:]]  # a convolution alone is not compiled


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_in, self.norm_out = group_norm(width), group_norm(width)
        self.conv_in, self.conv_out = convolution(width, width, 2), convolution(width, width, 2)
        layers.lecun_(self.conv_in)
        layers.zero_(self.conv_out)

    def forward(self, x: Image) -> Image:
        return x + self.conv_out(silu(self.norm_out(self.conv_in(silu(self.norm_in(x))))))


def _stem(inputs: int, width: int) -> nn.Module:
    conv = convolution(inputs, width, 2)
    layers.lecun_(conv)
    return conv


def _blocks(config: AutoencoderConfig, up: bool) -> Iterator[nn.Module]:
    widths = config.widths[::-1] if up else config.widths
    for i, width in enumerate(widths):
        if i > 0:
            yield Resample(widths[i - 1], width, 2, up)
        for _ in range(config.blocks):
            yield ResidualBlock(width)
