"""A residual MLP for vectors, or for any data, which is flattened: a DiT without attention, on a single token.

flatten -> linear -> depth x [modulated norm, MLP, gate] -> norm, linear
"""

from jaxtyping import Float
from torch import Tensor, nn

from bsi.backbones.config import MLPConfig
from bsi.backbones.dit import FeedForward, ResidualNetwork, gated_residual, modulated_norm
from bsi.backbones.layers import Image, Labels, Seed, Times, Tokens


class MLP(ResidualNetwork):
    """A residual MLP for data of one shape."""

    config: MLPConfig

    def make_layers(self, inputs: int, num_classes: int) -> None:
        self.make_residual(inputs, num_classes, MLPBlock, modulations=3)

    def network(self, features: Image, t: Times, cond: Labels | None) -> Image:
        *per_block, last = self.modulation(self.condition(t, cond))
        x = self.embed(features.flatten(1))[:, None]
        seeds = self.seeds(self.config.depth, x.device)
        for i, (block, modulation) in enumerate(zip(self.blocks, per_block, strict=True)):
            x = block(x, modulation, None if seeds is None else seeds[i])
        return self.head(x, last).view(-1, *self.out_shape)


class MLPBlock(nn.Module):
    """x + gate * MLP(modulated norm of x)."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.mlp = FeedForward(config.width, config.mlp_ratio)

    def forward(self, x: Tokens, modulation: Float[Tensor, "batch 3 width"], seed: Seed | None) -> Tokens:
        shift, scale, gate = modulation.unbind(1)
        return gated_residual(x, gate, self.mlp(modulated_norm(x, shift, scale)), self.dropout, seed)
