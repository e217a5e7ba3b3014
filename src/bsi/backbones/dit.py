"""DiT (Peebles & Xie, "Scalable Diffusion Models with Transformers") for data with any number of spatial axes.

    patches -> linear + fixed positions -> depth x [attention, MLP] with adaLN-Zero -> norm, linear -> patches

as published, with three additions from the paper: Fourier features at the input, a 32-dimensional precision embedding,
and dropout (0.05). Dropout is applied to the output of each branch before its gate, so that attention kernels do not
draw random numbers. layers.py implements adaLN-Zero and describes a block's memory traffic.
"""

from collections.abc import Iterator

from jaxtyping import Float, Int32
from torch import Tensor, nn

from bsi.backbones.config import DiTConfig, input_channels
from bsi.backbones.layers import (
    Backbone,
    ConditionEmbedding,
    FeedForward,
    Image,
    Labels,
    ModulatedHead,
    Modulation,
    Times,
    Tokens,
    attend,
    gated_residual,
    modulated_norm,
    positions,
    run_block,
    xavier_,
)


class DiT(Backbone):
    """A DiT for data of one shape (channels, *space)."""

    config: DiTConfig

    def __init__(
        self, config: DiTConfig, shape: tuple[int, ...], bins_count: int | None, num_classes: int, outputs: int | None
    ) -> None:
        super().__init__(config, shape, bins_count, outputs)
        self.grid = config.grid(shape)
        pixels = config.patch ** len(self.grid)
        self.register_buffer("positions", positions(self.grid, config.width), persistent=False)
        self.positions: Tensor
        self.embed = nn.Linear(input_channels(shape[0], bins_count) * pixels, config.width)
        self.condition = ConditionEmbedding(config.width, num_classes)
        self.modulation = Modulation(config.width, per_block=6, depth=config.depth)
        self.blocks = nn.ModuleList(DiTBlock(config) for _ in range(config.depth))
        self.head = ModulatedHead(config.width, self.out_shape[0] * pixels)
        xavier_(self.embed)

    def network(self, features: Image, t: Times, cond: Labels | None) -> Image:
        *per_block, last = self.modulation(self.condition(t, cond))
        x = self.embed(patchify(features, self.config.patch))
        x = x + self.positions.to(x.dtype)  # the residual stream has the compute dtype
        seeds = self.seeds(2 * self.config.depth, x.device)
        if self.fast is None:
            recompute = self.config.checkpoint and self.training
            for i, (block, modulation) in enumerate(zip(self.blocks, per_block, strict=True)):
                pair = None if seeds is None else seeds[2 * i : 2 * i + 2]
                x = run_block(block, recompute, x, modulation, pair)
            tokens = self.head(x, last)
        else:
            tokens = self.head.project(self.fast(self, x, per_block, last, seeds))
        return unpatchify(tokens, self.grid, self.config.patch)

    def regions(self) -> Iterator[nn.Module]:
        yield from self.blocks
        yield self.head


class DiTBlock(nn.Module):
    """Attention and MLP, each with a modulated norm before and a gate after."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention = SelfAttention(config.width, config.heads)
        self.mlp = FeedForward(config.width, config.mlp_ratio)

    def forward(
        self, x: Tokens, modulation: Float[Tensor, "batch 6 width"], seeds: Int32[Tensor, "2 2"] | None
    ) -> Tokens:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation.unbind(1)
        seed_a, seed_m = (None, None) if seeds is None else seeds.unbind(0)
        x = gated_residual(x, gate_a, self.attention(modulated_norm(x, shift_a, scale_a)), self.dropout, seed_a)
        return gated_residual(x, gate_m, self.mlp(modulated_norm(x, shift_m, scale_m)), self.dropout, seed_m)


class SelfAttention(nn.Module):
    """Multi-head self-attention; queries, keys and values are computed in one matrix product."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        xavier_(self.qkv)
        xavier_(self.out)

    def forward(self, h: Tokens) -> Tokens:
        return self.out(attend(self.qkv(h), self.heads))


def patchify(x: Image, patch: int) -> Tokens:
    """Split every spatial axis into patches. A token is one patch with its channels and pixels concatenated."""
    axes = x.ndim - 2
    for axis in range(axes):
        x = x.unflatten(2 + 2 * axis, (-1, patch))
    x = x.movedim(tuple(range(2, 2 + 2 * axes, 2)), tuple(range(1, 1 + axes)))  # the patches' axes before the channels
    return x.flatten(1 + axes).flatten(1, axes)


def unpatchify(tokens: Tokens, grid: tuple[int, ...], patch: int) -> Image:
    """The inverse of `patchify` on a grid of patches."""
    axes = len(grid)
    x = tokens.unflatten(2, (-1, *[patch] * axes)).unflatten(1, grid)
    x = x.movedim(tuple(range(1, 1 + axes)), tuple(range(2, 2 + 2 * axes, 2)))
    return x.reshape(*x.shape[:2], *(patch * n for n in grid))
