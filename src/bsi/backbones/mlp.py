"""A residual MLP for vectors, or for any data, which is flattened: a DiT without attention, on a single token.

flatten -> linear -> depth x [modulated norm, MLP, gate] -> norm, linear
"""

import math
from collections.abc import Iterator

from jaxtyping import Float, Int, Int32
from torch import Tensor, nn

from bsi.backbones.config import MLPConfig, input_channels
from bsi.backbones.layers import (
    Backbone,
    ConditionEmbedding,
    FeedForward,
    ModulatedHead,
    Modulation,
    draw_seeds,
    gated_residual,
    modulated_norm,
    xavier_,
)


class MLP(Backbone):
    """A residual MLP for data of one shape."""

    config: MLPConfig

    def __init__(
        self,
        config: MLPConfig,
        shape: tuple[int, ...],
        bins_count: int | None = None,
        num_classes: int = 0,
        out_channels: int | None = None,
    ) -> None:
        config.check(shape)
        super().__init__(shape, bins_count, out_channels)
        self.config = config
        self.embed = nn.Linear(input_channels(math.prod(shape), bins_count), config.width)
        self.condition = ConditionEmbedding(config.width, num_classes)
        self.modulation = Modulation(config.width, per_block=3, depth=config.depth)
        self.blocks = nn.ModuleList(MLPBlock(config) for _ in range(config.depth))
        self.head = ModulatedHead(config.width, math.prod(self.out_shape))
        xavier_(self.embed)

    def network(
        self,
        features: Float[Tensor, "batch more_channels *space"],
        t: Float[Tensor, " batch"],
        cond: Int[Tensor, " batch"] | None,
    ) -> Float[Tensor, "batch out_channels *space"]:
        *per_block, last = self.modulation(self.condition(t, cond))
        x = self.embed(features.flatten(1))[:, None]
        drops = self.training and self.config.dropout > 0
        seeds = draw_seeds(self.config.depth, x.device) if drops else [None] * self.config.depth
        for block, modulation, seed in zip(self.blocks, per_block, seeds, strict=True):
            x = block(x, modulation, seed)
        return self.head(x, last).view(-1, *self.out_shape)

    def regions(self) -> Iterator[nn.Module]:
        yield from self.blocks
        yield self.head


class MLPBlock(nn.Module):
    """x + gate * MLP(modulated norm of x)."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.mlp = FeedForward(config.width, config.mlp_ratio)

    def forward(
        self,
        x: Float[Tensor, "batch tokens width"],
        modulation: Float[Tensor, "batch 3 width"],
        seed: Int32[Tensor, " 2"] | None,
    ) -> Float[Tensor, "batch tokens width"]:
        shift, scale, gate = modulation.unbind(1)
        return gated_residual(x, gate, self.mlp(modulated_norm(x, shift, scale)), self.dropout, seed)
