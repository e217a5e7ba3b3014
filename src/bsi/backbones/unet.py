"""VDM's U-Net (Kingma et al., "Variational Diffusion Models", the authors' code): every level at full resolution.

    conv -> levels blocks down -> block, attention, block -> levels + 1 blocks up -> norm, SiLU, conv
    block(h) = shortcut(h) + conv(dropout(SiLU(norm(conv(SiLU(norm(h))) + projection of the condition))))

An up block reads the concatenation of the stream and the output of the down block it answers to (the last one, the
input convolution's). As published, the second convolution of each block, the projections of the condition,
attention's output and the last convolution start at 0. The paper adds zero padding (VDM's too), a 32-dimensional
precision embedding and dropout 0.1. The projections of the condition for all blocks are one product.

Runs in the memory format of its parameters: `network.to(memory_format=torch.channels_last)` is the fast one on a GPU.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from bsi.backbones.base import Backbone
from bsi.backbones.config import UNetConfig, input_channels
from bsi.backbones.dropout import draw_seeds, dropout
from bsi.backbones.embeddings import ConditionEmbedding
from bsi.backbones.starts import lecun_, zero_

NORM_EPS = 1e-6  # as VDM's (Flax's default)
Convolution = type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]
CONVOLUTIONS: dict[int, Convolution] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class UNet(Backbone):
    """The U-Net for data of one shape (channels, *space) with one to three spatial axes."""

    def __init__(
        self, config: UNetConfig, shape: tuple[int, ...], bins_count: int | None = None, num_classes: int = 0
    ) -> None:
        config.check(shape)
        super().__init__(shape, bins_count)
        self.config = config
        width, dim = config.width, len(shape) - 1
        self.condition = ConditionEmbedding(4 * width, num_classes)
        self.project = nn.Linear(4 * width, (2 * config.levels + 3) * width, bias=False)
        self.stem = CONVOLUTIONS[dim](input_channels(shape[0], bins_count), width, 3, padding=1)
        self.down = nn.ModuleList(Block(width, config, dim) for _ in range(config.levels))
        self.before = Block(width, config, dim)
        self.attention = Attention(config)
        self.after = Block(width, config, dim)
        self.up = nn.ModuleList(Block(2 * width, config, dim) for _ in range(config.levels + 1))
        self.head = Head(width, shape[0], dim)
        lecun_(self.stem)
        zero_(self.project)

    def network(
        self,
        features: Float[Tensor, "batch more_channels *space"],
        t: Float[Tensor, " batch"],
        cond: Int[Tensor, " batch"] | None,
    ) -> Float[Tensor, "batch channels *space"]:
        shifts = self.project(self.condition(t, cond)).unflatten(1, (-1, self.config.width)).unbind(1)
        drops = self.training and self.config.dropout > 0
        seeds = draw_seeds(len(shifts), t.device) if drops else [None] * len(shifts)
        inputs = zip(shifts, seeds, strict=True)
        x = self.stem(features)
        skips = [x]
        for block in self.down:
            x = self._run(block, x, None, *next(inputs))
            skips.append(x)
        x = self._run(self.before, x, None, *next(inputs))
        x = self.attention(x)
        x = self._run(self.after, x, None, *next(inputs))
        for block in self.up:
            x = self._run(block, x, skips.pop(), *next(inputs))
        return self.head(x)

    def _run(self, block: nn.Module, x: Tensor, skip: Tensor | None, shift: Tensor, seed: Tensor | None) -> Tensor:
        if self.config.checkpoint and self.training:
            return checkpoint(block, x, skip, shift, seed, use_reentrant=False)
        return block(x, skip, shift, seed)

    def regions(self) -> Iterator[nn.Module]:
        yield from self.down
        yield from (self.before, self.attention, self.after)
        yield from self.up
        yield self.head


class Block(nn.Module):
    """Two convolutions with the condition added between them, and a shortcut; on the way up, `skip` joins the input.

    The input and the skip are normed, and taken through the shortcut, each by itself: the groups and the 1x1 weights
    fall apart between them. Concatenating them first would give gradients that are slices, and copies of them.
    """

    def __init__(self, inputs: int, config: UNetConfig, dim: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        convolution = CONVOLUTIONS[dim]
        self.norm_in = group_norm(inputs, parts=inputs // config.width)
        self.conv_in = convolution(inputs, config.width, 3, padding=1)
        self.norm_out = group_norm(config.width)
        self.conv_out = convolution(config.width, config.width, 3, padding=1)
        self.shortcut = convolution(inputs, config.width, 1) if inputs != config.width else None
        lecun_(self.conv_in)
        zero_(self.conv_out)
        if self.shortcut is not None:
            lecun_(self.shortcut)

    def forward(
        self,
        x: Float[Tensor, "batch width *space"],
        skip: Float[Tensor, "batch width *space"] | None,
        shift: Float[Tensor, "batch width"],
        seed: Int32[Tensor, " 2"] | None,
    ) -> Float[Tensor, "batch width *space"]:
        h = silu(self.norm_in(x))
        if skip is not None:
            h = torch.cat([h, silu(self.norm_in(skip, first=x.shape[1]))], dim=1)
        h = self.conv_in(h)
        h = h + shift.view(*shift.shape, *[1] * (x.ndim - 2))
        h = silu(self.norm_out(h))
        if seed is not None:
            h = dropout(h, self.dropout, seed)
        return self._short(x, skip) + self.conv_out(h)

    def _short(self, x: Tensor, skip: Tensor | None) -> Tensor:
        if self.shortcut is None or skip is None:
            return x
        weights = self.shortcut.weight.flatten(1).split(x.shape[1], dim=1)
        return on_pixels(linear(pixels(x), weights[0]) + linear(pixels(skip), weights[1], self.shortcut.bias), x)


def pixels(x: Float[Tensor, "batch channels *space"]) -> Float[Tensor, "batch pixels channels"]:
    """A row of channels for each pixel: a view of a channels-last image."""
    return x.flatten(2).transpose(1, 2)


def on_pixels(
    rows: Float[Tensor, "batch pixels channels"], like: Float[Tensor, "batch _ *space"]
) -> Float[Tensor, "batch channels *space"]:
    """Back to an image of `like`'s height and width."""
    return rows.transpose(1, 2).unflatten(2, like.shape[2:])


class GroupNorm(nn.GroupNorm):
    """Group normalisation that leaves a channels-last image as it lies in memory.

    Moments of each channel first, then of each group: var = mean of variances + variance of means. The compiler would
    otherwise copy every image into the other order and back.
    """

    def forward(
        self, x: Float[Tensor, "batch channels *space"], first: int = 0
    ) -> Float[Tensor, "batch channels *space"]:
        """The norm of the channels from `first` on, which are whole groups: the others are not needed for it."""
        rows = pixels(x.to(torch.promote_types(x.dtype, torch.float32)))
        batch, _, channels = rows.shape
        size = self.num_channels // self.num_groups
        var, mean = (part.view(batch, -1, size) for part in torch.var_mean(rows, dim=1, correction=0))
        var = var.mean(2, keepdim=True) + mean.var(2, correction=0, keepdim=True)
        chosen = slice(first, first + channels)
        scale = torch.rsqrt(var + self.eps) * self.weight[chosen].view(-1, size)
        shift = self.bias[chosen].view(-1, size) - mean.mean(2, keepdim=True) * scale
        return on_pixels(rows * scale.view(batch, 1, channels) + shift.view(batch, 1, channels), x)


class Attention(nn.Module):
    """Self-attention over all pixels, added to its input."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm = group_norm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        lecun_(self.qkv)
        zero_(self.out)

    def forward(self, x: Float[Tensor, "batch width *space"]) -> Float[Tensor, "batch width *space"]:
        h = pixels(self.norm(x))
        batch, count, width = h.shape
        qkv = self.qkv(h).view(batch, count, 3, self.heads, width // self.heads)
        q, k, v = qkv.transpose(1, 3).unbind(2)
        mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, count, width)
        return x + on_pixels(self.out(mixed), x)


class Head(nn.Module):
    """Norm, SiLU, and a convolution that starts at 0."""

    def __init__(self, width: int, channels: int, dim: int) -> None:
        super().__init__()
        self.norm = group_norm(width)
        self.conv = CONVOLUTIONS[dim](width, channels, 3, padding=1)
        zero_(self.conv)

    def forward(self, x: Float[Tensor, "batch width *space"]) -> Float[Tensor, "batch channels *space"]:
        return self.conv(silu(self.norm(x)))


def group_norm(channels: int, parts: int = 1) -> GroupNorm:
    """32 groups, or fewer where they would have less than four channels (the paper's narrowest have four).

    A group of one channel would subtract the condition, which is added to whole channels, as part of the mean. Each of
    `parts` equal parts of the channels has whole groups.
    """
    fitting = (g for g in range(parts, 33) if channels % g == 0 and g % parts == 0)
    return GroupNorm(max(g for g in fitting if 4 * g <= channels or g == parts), channels, eps=NORM_EPS)
