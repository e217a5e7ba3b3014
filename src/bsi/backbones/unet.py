"""VDM's U-Net (Kingma et al., "Variational Diffusion Models", the authors' code): every level at full resolution.

    conv -> levels blocks down -> block, attention, block -> levels + 1 blocks up -> norm, SiLU, conv
    block(h) = shortcut(h) + conv(dropout(SiLU(norm(conv(SiLU(norm(h))) + projection of the condition))))

An up block reads the concatenation of the stream and the output of its down block (the last one: that of the first
convolution). As published, the second convolution of each block, the projections of the condition, attention's output
and the last convolution start at 0. The paper adds zero padding (which VDM has too), a 32-dimensional precision
embedding and dropout 0.1. The projections of the condition for all blocks are one product.

Coarser resolutions are not VDM's, but those of Ho et al., "Denoising Diffusion Probabilistic Models": a convolution
halves the image before their blocks and another doubles it after them, the halved image is one more skip, and attention
follows every block (there: at 16 x 16 only).

Images are channels-last from the first convolution to the last and in the backward pass. On a GPU the weights should
have the same memory format, which `accelerate` sets; otherwise every convolution copies its weights first.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import conv1d, conv2d, conv3d, interpolate, linear, silu

from bsi.backbones import layers
from bsi.backbones.config import UNetConfig
from bsi.backbones.layers import NORM_EPS, Backbone, ConditionEmbedding, Image, Labels, PerSample, Seed, Times, Wide

Rows = Float[Tensor, "batch pixels channels"]
CONVOLVE = [conv1d, conv2d, conv3d]


class UNet(Backbone):
    """The U-Net for data of one shape (channels, *space) with one to three spatial axes."""

    config: UNetConfig

    def make_layers(self, inputs: int, num_classes: int) -> None:
        config, dim = self.config, len(self.shape) - 1
        width, deepest = config.width, config.widths[-1]
        down = [w for w in config.widths for _ in range(config.levels)]
        up = [w for w in reversed(config.widths) for _ in range(config.levels + 1)]
        self.widths = [*down, deepest, deepest, *up]  # of all blocks in the order in which they run
        self.condition = ConditionEmbedding(4 * width, num_classes)
        self.project = nn.Linear(4 * width, sum(self.widths), bias=False)
        self.stem = convolution(inputs, width, dim)
        self.down = nn.ModuleList(_down(config, dim))
        self.before = UNetBlock(deepest, config, dim)
        self.attention = PixelAttention(deepest, config.heads)
        self.after = UNetBlock(deepest, config, dim)
        self.up = nn.ModuleList(_up(config, dim))
        self.head = ConvHead(width, self.out_shape[0], dim)
        layers.lecun_(self.stem)
        layers.zero_(self.project)

    def network(self, features: Image, t: Times, cond: Labels | None) -> Image:
        x = self.stem(to_image(to_rows(features).contiguous(), features))
        shifts = self.project(self.condition(t, cond))
        drawn = self.seeds(2 * len(self.widths), t.device)
        # Every second seed is used: kernels expect inputs aligned to 16 bytes, and copy others first.
        seeds = [None] * len(self.widths) if drawn is None else list(drawn[::2])
        if self.fast is not None:
            return self.head.conv(self.fast(self, x, shifts, seeds))

        recompute = self.config.checkpoint and self.training
        inputs = zip(shifts.split(self.widths, dim=1), seeds, strict=True)

        def run(block: UNetBlock, x: Image, skip: Image | None) -> tuple[Image, Image]:
            return layers.run_block(block, recompute, x, skip, *next(inputs)), x

        return self.head(self.walk(x, run, self.attention))

    def walk(
        self, x: Image, run: Callable[["UNetBlock", Image, Image | None], tuple[Image, Image]],
        attend: Callable[[Image], Image],
    ) -> Image:  # fmt: skip
        """All layers between the first and the last.

        `run` takes a block, its input and its skip; it returns the output, and the input as a later block's skip.
        """
        skips = [x]
        for layer in [*self.down, self.before]:
            if isinstance(layer, UNetBlock):
                x, skips[-1] = run(layer, x, None)
            else:
                x = layer(x)
            skips.append(x)
        x, _ = run(self.after, attend(skips.pop()), None)
        for layer in self.up:
            x = run(layer, x, skips.pop())[0] if isinstance(layer, UNetBlock) else layer(x)
        return x

    def blocks(self) -> Iterator["UNetBlock"]:
        """The blocks in the order in which they run."""
        for layer in [*self.down, self.before, self.after, *self.up]:
            if isinstance(layer, UNetBlock):
                yield layer

    def regions(self) -> Iterator[nn.Module]:
        yield from [*self.down, self.before, self.attention, self.after, *self.up, self.head]


def _down(config: UNetConfig, dim: int) -> Iterator[nn.Module]:
    for i, width in enumerate(config.widths):
        if i > 0:
            yield Resample(config.widths[i - 1], width, dim, up=False)
        for _ in range(config.levels):
            yield UNetBlock(width, config, dim, attends=i > 0)


def _up(config: UNetConfig, dim: int) -> Iterator[nn.Module]:
    for i, width in reversed(list(enumerate(config.widths))):
        for _ in range(config.levels + 1):
            yield UNetBlock(width, config, dim, joins=True, attends=i > 0)
        if i > 0:
            yield Resample(width, config.widths[i - 1], dim, up=True)


class UNetBlock(nn.Module):
    """Two convolutions with the condition added between them, and a shortcut; on the way up, `skip` joins the input.

    The norm and the shortcut take the input and the skip separately, which is possible because no group of channels
    contains channels of both. If they were concatenated, their gradients would be slices, which have to be copied.
    """

    def __init__(self, width: int, config: UNetConfig, dim: int, joins: bool = False, attends: bool = False) -> None:
        super().__init__()
        self.dropout = config.dropout
        inputs = 2 * width if joins else width
        self.norm_in = group_norm(inputs, parts=inputs // width)
        self.conv_in = convolution(inputs, width, dim)
        self.norm_out = group_norm(width)
        self.conv_out = convolution(width, width, dim)
        self.shortcut = layers.CONVOLUTIONS[dim - 1](inputs, width, 1) if joins else None
        self.attention = PixelAttention(width, config.heads) if attends else None
        layers.lecun_(self.conv_in)
        layers.zero_(self.conv_out)
        if self.shortcut is not None:
            layers.lecun_(self.shortcut)

    def forward(self, x: Image, skip: Image | None, shift: PerSample, seed: Seed | None) -> Image:
        images = [x] if skip is None else [x, skip]
        h = convolve(torch.cat([silu(image) for image in self.norm_in.each(images)], dim=1), self.conv_in.weight)
        h = silu(self.norm_out(h, shift + bias_of(self.conv_in).to(shift.dtype)))
        if seed is not None:  # the mask is indexed by rows, the order of the image in memory
            h = to_image(layers.dropout(to_rows(h), self.dropout, seed), h)
        h = convolve(h, self.conv_out.weight)
        bias = bias_of(self.conv_out).to(h.dtype)
        if self.shortcut is not None and skip is not None:
            weights = self.shortcut.weight.flatten(1).split(x.shape[1], dim=1)
            x = to_image(linear(to_rows(x), weights[0]) + linear(to_rows(skip), weights[1]), x)
            bias = bias + bias_of(self.shortcut).to(h.dtype)
        x = x + to_image(to_rows(h) + bias, h)
        return x if self.attention is None else self.attention(x)


def convolution(inputs: int, outputs: int, dim: int, stride: int = 1) -> layers.Convolution:
    return layers.CONVOLUTIONS[dim - 1](inputs, outputs, 3, stride=stride, padding=1)


def convolve(x: Image, weight: Tensor) -> Image:
    """A convolution without its bias, which the block adds together with other terms."""
    return CONVOLVE[x.ndim - 3](x, weight, padding=1)


def bias_of(conv: layers.Convolution) -> Float[Tensor, " outputs"]:
    assert conv.bias is not None
    return conv.bias


class PixelAttention(nn.Module):
    """Self-attention over all pixels, added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = group_norm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        layers.lecun_(self.qkv)
        layers.zero_(self.out)

    def forward(self, x: Image) -> Image:
        return x + to_image(self.out(layers.attend(self.qkv(to_rows(self.norm(x))), self.heads)), x)


class Resample(nn.Module):
    """A convolution with stride 2, or one after nearest-neighbor upsampling by 2."""

    def __init__(self, inputs: int, outputs: int, dim: int, up: bool) -> None:
        super().__init__()
        self.up = up
        self.conv = convolution(inputs, outputs, dim, stride=1 if up else 2)
        layers.lecun_(self.conv)

    def forward(self, x: Image) -> Float[Tensor, "batch outputs *resampled"]:
        return self.conv(interpolate(x, scale_factor=2, mode="nearest") if self.up else x)


class ConvHead(nn.Module):
    """Norm, SiLU, and a convolution initialized to 0."""

    def __init__(self, width: int, channels: int, dim: int) -> None:
        super().__init__()
        self.norm = group_norm(width)
        self.conv = convolution(width, channels, dim)
        layers.zero_(self.conv)

    def forward(self, x: Image) -> Image:
        return self.conv(silu(self.norm(x)))


class GroupNorm(Wide, nn.GroupNorm):
    """Group normalization that preserves the channels-last memory format. The result is float32 or wider.

        y = x scale + offset,   scale = w (var + eps)^(-1/2),   offset = b - (mean - shift) scale

    is the norm of x + shift, where mean and var are those of a group of channels and shift is one number per channel.
    x + shift is never formed. The moments of each channel are computed first, then those of the groups: the mean of the
    means (each with its shift), and the mean of the variances plus the variance of the means. PyTorch's own group norm
    would copy each image to the contiguous format and back.
    """

    def forward(self, x: Image, shift: PerSample | None = None) -> Image:
        """The norm of x + shift."""
        return self.each([x], shift)[0]

    def each(self, images: list[Image], shift: PerSample | None = None) -> list[Image]:
        """The norm of images concatenated along the channels, as one part per image, without concatenating them."""
        groups = self.num_groups, self.num_channels // self.num_groups
        rows = [to_rows(_wide(image)) for image in images]
        moments = zip(*(torch.var_mean(part, dim=1, correction=0) for part in rows), strict=True)
        var, mean = (torch.cat(parts, dim=1).unflatten(1, groups) for parts in moments)
        shifts = torch.zeros_like(mean) if shift is None else _wide(shift).unflatten(1, groups)
        mean = mean + shifts
        center = mean.mean(2, keepdim=True)
        var = var.mean(2, keepdim=True) + (mean - center).square().mean(2, keepdim=True)
        scale = torch.rsqrt(var + self.eps) * self.weight.view(groups)
        offset = self.bias.view(groups) - (center - shifts) * scale
        sizes = [image.shape[1] for image in images]
        factors = (part.flatten(1)[:, None].split(sizes, dim=2) for part in (scale, offset))
        return [to_image(r * s + o, x) for r, s, o, x in zip(rows, *factors, images, strict=True)]


def group_norm(channels: int, parts: int = 1) -> GroupNorm:
    """A norm with 32 groups, or fewer if they would have less than four channels (as in the paper's narrowest network).

    With one channel per group, the norm would remove the condition, which is added to all pixels of a channel. Each of
    `parts` equal parts of the channels consists of complete groups.
    """
    fitting = (g for g in range(parts, 33) if channels % g == 0 and g % parts == 0)
    return GroupNorm(max(g for g in fitting if 4 * g <= channels or g == parts), channels, eps=NORM_EPS)


def to_rows(x: Image) -> Rows:
    """A row of channels for each pixel: a view of a channels-last image."""
    return x.flatten(2).transpose(1, 2)


def to_image(rows: Rows, like: Image) -> Image:
    """The inverse of `to_rows`, with the spatial sizes of `like`."""
    return rows.transpose(1, 2).unflatten(2, like.shape[2:])


def _wide(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return x.to(torch.promote_types(x.dtype, torch.float32))
