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
from torch.nn.functional import scaled_dot_product_attention, silu
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
    """Two convolutions with the condition added between them, and a shortcut; on the way up, `skip` joins the input."""

    def __init__(self, inputs: int, config: UNetConfig, dim: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        convolution = CONVOLUTIONS[dim]
        self.norm_in = group_norm(inputs)
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
        if skip is not None:
            x = torch.cat([x, skip], dim=1)
        h = self.conv_in(silu(self.norm_in(x)))
        h = h + shift.view(*shift.shape, *[1] * (x.ndim - 2))
        h = silu(self.norm_out(h))
        if seed is not None:
            h = dropout(h, self.dropout, seed)
        return (x if self.shortcut is None else self.shortcut(x)) + self.conv_out(h)


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
        h = self.norm(x).flatten(2).transpose(1, 2)
        batch, pixels, width = h.shape
        qkv = self.qkv(h).view(batch, pixels, 3, self.heads, width // self.heads)
        q, k, v = qkv.transpose(1, 3).unbind(2)
        mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, pixels, width)
        return x + self.out(mixed).transpose(1, 2).reshape(x.shape)


class Head(nn.Module):
    """Norm, SiLU, and a convolution that starts at 0."""

    def __init__(self, width: int, channels: int, dim: int) -> None:
        super().__init__()
        self.norm = group_norm(width)
        self.conv = CONVOLUTIONS[dim](width, channels, 3, padding=1)
        zero_(self.conv)

    def forward(self, x: Float[Tensor, "batch width *space"]) -> Float[Tensor, "batch channels *space"]:
        return self.conv(silu(self.norm(x)))


def group_norm(channels: int) -> nn.GroupNorm:
    """32 groups, or fewer where they would have less than four channels (the paper's narrowest have four).

    A group of one channel would subtract the condition, which is added to whole channels, as part of the mean.
    """
    groups = max(g for g in range(1, 33) if channels % g == 0 and (4 * g <= channels or g == 1))
    return nn.GroupNorm(groups, channels, eps=NORM_EPS)
