"""VDM's U-Net (Kingma et al., "Variational Diffusion Models", the authors' code): every level at full resolution.

    conv -> levels blocks down -> block, attention, block -> levels + 1 blocks up -> norm, SiLU, conv
    block(h) = shortcut(h) + conv(dropout(SiLU(norm(conv(SiLU(norm(h))) + projection of the condition))))

An up block reads the concatenation of the stream and the output of the down block it answers to (the last one, the
input convolution's). As published, the second convolution of each block, the projections of the condition,
attention's output and the last convolution start at 0. The paper adds zero padding (VDM's too), a 32-dimensional
precision embedding and dropout 0.1. The projections of the condition for all blocks are one product.

Coarser resolutions are not VDM's, but those of Ho et al., "Denoising Diffusion Probabilistic Models": a convolution
halves the image before their blocks and another doubles it after, the halved image is one more skip, and attention
follows every block (theirs: at 16 x 16 alone).

Images go through it channels-last, from the first convolution to the last and back. Give the weights the same order,
`network.to(memory_format=torch.channels_last)`, on a GPU: otherwise every convolution copies its weights first. (With
three spatial axes that order has a name of its own; acceleration.py knows it.)
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor, nn
from torch.nn.functional import conv1d, conv2d, conv3d, interpolate, linear, silu
from torch.utils.checkpoint import checkpoint

from bsi.backbones.attention import attend
from bsi.backbones.base import Backbone
from bsi.backbones.config import UNetConfig, input_channels
from bsi.backbones.dropout import draw_seeds, dropout
from bsi.backbones.embeddings import ConditionEmbedding
from bsi.backbones.norms import group_norm, on_pixels, pixels
from bsi.backbones.starts import lecun_, zero_

if TYPE_CHECKING:
    from bsi.kernels.fused_unet import Rounded

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
CONVOLUTIONS: dict[int, type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]] = {
    1: nn.Conv1d,
    2: nn.Conv2d,
    3: nn.Conv3d,
}
CONVOLVE = {1: conv1d, 2: conv2d, 3: conv3d}


class UNet(Backbone):
    """The U-Net for data of one shape (channels, *space) with one to three spatial axes."""

    config: UNetConfig
    trunk: Literal["plain", "fused", "lean"] = "plain"  # the form its blocks are computed in: fused_unet.py

    def __init__(
        self, config: UNetConfig, shape: tuple[int, ...], bins_count: int | None = None, num_classes: int = 0
    ) -> None:
        config.check(shape)
        super().__init__(shape, bins_count)
        self.config = config
        width, deepest, dim = config.width, config.widths[-1], len(shape) - 1
        self.condition = ConditionEmbedding(4 * width, num_classes)
        self.widths = _widths(config)
        self.project = nn.Linear(4 * width, sum(self.widths), bias=False)
        self.stem = CONVOLUTIONS[dim](input_channels(shape[0], bins_count), width, 3, padding=1)
        self.down = nn.ModuleList(_down(config, dim))
        self.before = Block(deepest, config, dim)
        self.attention = Attention(deepest, config.heads)
        self.after = Block(deepest, config, dim)
        self.up = nn.ModuleList(_up(config, dim))
        self.head = Head(width, shape[0], dim)
        lecun_(self.stem)
        zero_(self.project)

    def network(
        self,
        features: Float[Tensor, "batch more_channels *space"],
        t: Float[Tensor, " batch"],
        cond: Int[Tensor, " batch"] | None,
    ) -> Float[Tensor, "batch channels *space"]:
        x = self.stem(on_pixels(pixels(features).contiguous(), features))
        shifts = self.project(self.condition(t, cond))
        rounded: list["Rounded | None"] = [None] * len(self.widths)
        if self.trunk != "plain":
            from bsi.kernels.fused_unet import round_weights  # which needs Triton, and only some machines have it

            blocks = list(self.blocks())
            shifts = shifts + torch.cat([bias_of(block.conv_in, torch.float32) for block in blocks])
            rounded = [*round_weights(blocks, x.dtype)]
        shifts = shifts.split(self.widths, dim=1)
        drops = self.training and self.config.dropout > 0
        # Two numbers of every four: kernels expect their inputs at multiples of 16 bytes, and copy others first.
        seeds = draw_seeds(2 * len(shifts), t.device)[::2] if drops else [None] * len(shifts)
        inputs = zip(shifts, seeds, rounded, strict=True)
        skips = [x]
        for layer in [*self.down, self.before]:
            if isinstance(layer, Block):
                x, skips[-1] = self._run(layer, x, None, *next(inputs))
            else:
                x = layer(x)
            skips.append(x)
        x = self._attend(self.attention, skips.pop())
        x, _ = self._run(self.after, x, None, *next(inputs))
        for layer in self.up:
            x = self._run(layer, x, skips.pop(), *next(inputs))[0] if isinstance(layer, Block) else layer(x)
        return self._read_out(x)

    def _run(
        self,
        block: "Block",
        x: Tensor,
        skip: Tensor | None,
        shift: Tensor,
        seed: Tensor | None,
        rounded: "Rounded | None",
    ) -> tuple[Tensor, Tensor]:
        """What the block makes of x, and x, as others should use it."""
        if rounded is not None:
            from bsi.kernels.fused_unet import fused_block

            out, x = fused_block(block, x, skip, shift, seed, rounded, self.trunk == "lean")
            return out if block.attention is None else self._attend(block.attention, out), x
        if self.config.checkpoint and self.training:
            # Nothing inside draws random numbers: generators, which a recorded step may not read, are left alone.
            return checkpoint(block, x, skip, shift, seed, use_reentrant=False, preserve_rng_state=False), x
        return block(x, skip, shift, seed), x

    def _attend(self, attention: "Attention", x: Tensor) -> Tensor:
        if self.trunk == "plain":
            return attention(x)
        from bsi.kernels.fused_unet import fused_attention

        return fused_attention(attention, x)

    def _read_out(self, x: Tensor) -> Tensor:
        if self.trunk == "plain":
            return self.head(x)
        from bsi.kernels.fused_unet import fused_norm

        return self.head.conv(fused_norm(self.head.norm, x, act=True))

    def blocks(self) -> Iterator["Block"]:
        """In the order in which they run."""
        layers = [*self.down, self.before, self.after, *self.up]
        yield from (layer for layer in layers if isinstance(layer, Block))

    def regions(self) -> Iterator[nn.Module]:
        yield from self.down
        yield from (self.before, self.attention, self.after)
        yield from self.up
        yield self.head


def _widths(config: UNetConfig) -> list[int]:
    """Of all blocks, in the order in which they run."""
    down = [width for width in config.widths for _ in range(config.levels)]
    up = [width for width in reversed(config.widths) for _ in range(config.levels + 1)]
    return [*down, *2 * [config.widths[-1]], *up]


def _down(config: UNetConfig, dim: int) -> Iterator[nn.Module]:
    for i, width in enumerate(config.widths):
        if i > 0:
            yield Halve(config.widths[i - 1], width, dim)
        for _ in range(config.levels):
            yield Block(width, config, dim, attends=i > 0)


def _up(config: UNetConfig, dim: int) -> Iterator[nn.Module]:
    for i, width in reversed(list(enumerate(config.widths))):
        for _ in range(config.levels + 1):
            yield Block(width, config, dim, joins=True, attends=i > 0)
        if i > 0:
            yield Double(width, config.widths[i - 1], dim)


class Block(nn.Module):
    """Two convolutions with the condition added between them, and a shortcut; on the way up, `skip` joins the input.

    The input and the skip are normed, and taken through the shortcut, each by itself: the groups and the 1x1 weights
    fall apart between them. Concatenating them first would give gradients that are slices, and copies of them.
    """

    def __init__(self, width: int, config: UNetConfig, dim: int, joins: bool = False, attends: bool = False) -> None:
        super().__init__()
        self.dropout = config.dropout
        convolution, inputs = CONVOLUTIONS[dim], 2 * width if joins else width
        self.norm_in = group_norm(inputs, parts=inputs // width)
        self.conv_in = convolution(inputs, width, 3, padding=1)
        self.norm_out = group_norm(width)
        self.conv_out = convolution(width, width, 3, padding=1)
        self.shortcut = convolution(inputs, width, 1) if joins else None
        self.attention = Attention(width, config.heads) if attends else None
        lecun_(self.conv_in)
        zero_(self.conv_out)
        if self.shortcut is not None:
            lecun_(self.shortcut)

    def layers(self) -> list[Convolution]:
        """Its convolutions."""
        return [self.conv_in, self.conv_out, *([] if self.shortcut is None else [self.shortcut])]

    def forward(
        self,
        x: Float[Tensor, "batch width *space"],
        skip: Float[Tensor, "batch width *space"] | None,
        shift: Float[Tensor, "batch width"],
        seed: Int32[Tensor, " 2"] | None,
    ) -> Float[Tensor, "batch width *space"]:
        images = [x] if skip is None else [x, skip]
        h = weigh(self.conv_in, torch.cat([silu(image) for image in self.norm_in.each(images)], dim=1))
        h = silu(self.norm_out(h, shift + bias_of(self.conv_in, shift.dtype)))
        if seed is not None:  # the mask is drawn for rows of channels, the order in which they lie in memory
            h = on_pixels(dropout(pixels(h), self.dropout, seed), h)
        h = weigh(self.conv_out, h)
        bias = bias_of(self.conv_out, h.dtype)
        if self.shortcut is not None and skip is not None:
            weights = self.shortcut.weight.flatten(1).split(x.shape[1], dim=1)
            x = on_pixels(linear(pixels(x), weights[0]) + linear(pixels(skip), weights[1]), x)
            bias = bias + bias_of(self.shortcut, h.dtype)
        x = x + on_pixels(pixels(h) + bias, h)
        return x if self.attention is None else self.attention(x)


def weigh(conv: Convolution, x: Float[Tensor, "batch inputs *space"]) -> Float[Tensor, "batch outputs *space"]:
    """A convolution without its bias: a block adds it together with what else it adds to whole channels."""
    return CONVOLVE[x.ndim - 2](x, conv.weight, padding=1)


def bias_of(conv: Convolution, dtype: torch.dtype) -> Float[Tensor, " outputs"]:
    assert conv.bias is not None
    return conv.bias.to(dtype)


class Attention(nn.Module):
    """Self-attention over all pixels, added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = group_norm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        lecun_(self.qkv)
        zero_(self.out)

    def forward(self, x: Float[Tensor, "batch width *space"]) -> Float[Tensor, "batch width *space"]:
        return x + on_pixels(self.out(attend(self.qkv(pixels(self.norm(x))), self.heads)), x)


class Halve(nn.Module):
    """A convolution that reads every second place along each axis."""

    def __init__(self, width: int, coarser: int, dim: int) -> None:
        super().__init__()
        self.conv = CONVOLUTIONS[dim](width, coarser, 3, stride=2, padding=1)
        lecun_(self.conv)

    def forward(self, x: Float[Tensor, "batch width *space"]) -> Float[Tensor, "batch coarser *half"]:
        return self.conv(x)


class Double(nn.Module):
    """Every pixel twice along each axis, and a convolution."""

    def __init__(self, coarser: int, width: int, dim: int) -> None:
        super().__init__()
        self.conv = CONVOLUTIONS[dim](coarser, width, 3, padding=1)
        lecun_(self.conv)

    def forward(self, x: Float[Tensor, "batch coarser *space"]) -> Float[Tensor, "batch width *double"]:
        return self.conv(interpolate(x, scale_factor=2, mode="nearest"))


class Head(nn.Module):
    """Norm, SiLU, and a convolution that starts at 0."""

    def __init__(self, width: int, channels: int, dim: int) -> None:
        super().__init__()
        self.norm = group_norm(width)
        self.conv = CONVOLUTIONS[dim](width, channels, 3, padding=1)
        zero_(self.conv)

    def forward(self, x: Float[Tensor, "batch width *space"]) -> Float[Tensor, "batch channels *space"]:
        return self.conv(silu(self.norm(x)))
