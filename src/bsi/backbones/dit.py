"""DiT (Peebles & Xie, "Scalable Diffusion Models with Transformers") for data with any number of spatial axes.

    patches -> linear + fixed positions -> depth x [attention, MLP] with adaLN-Zero -> norm, linear -> patches

as published, with three additions from the paper: Fourier features at the input, a 32-dimensional precision embedding,
and dropout (0.05) of the output of each branch before its gate. With `kernel` > 1 patches overlap.

adaLN-Zero surrounds each branch (attention or MLP) of a block by

    h = modulated_norm(x, shift, scale)   = LayerNorm(x) * (1 + scale) + shift
    x = gated_residual(x, gate, branch)   = x + gate * dropout(branch)

with shifts, scales and gates computed from the condition. The residual stream x has the compute dtype (bfloat16 under
autocast); means and variances are float32. Apart from products and attention, a block's memory traffic is 17 passes
over the stream. After `compile_regions` it stores 11 for the backward pass (x, q, k, v, the attention's output, both
branches, and the four of GELU's input) and recomputes the rest, which is pointwise; eager autograd stores 22.
"""

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int32
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm

from bsi.backbones import layers
from bsi.backbones.config import DiTConfig, MLPConfig
from bsi.backbones.layers import NORM_EPS, Backbone, ConditionEmbedding, Image, Labels, PerSample, Seed, Times, Tokens


class ResidualNetwork(Backbone):
    """What the DiT and the MLP share: a token is a number of pixels, and one linear layer modulates all blocks."""

    config: DiTConfig | MLPConfig

    def make_residual(self, inputs: int, num_classes: int, block: Callable[..., nn.Module], modulations: int) -> None:
        config = self.config
        pixels = math.prod(self.shape[1:]) // math.prod(config.grid(self.shape))  # of a token
        embed = nn.Linear(inputs * pixels, config.width)
        self.embed: nn.Module = embed
        self.condition = ConditionEmbedding(config.width, num_classes)
        self.modulation = Modulation(config.width, modulations, config.depth)
        self.blocks = nn.ModuleList(block(config) for _ in range(config.depth))
        self.head = ModulatedHead(config.width, self.out_shape[0] * pixels)
        layers.xavier_(embed)

    def regions(self) -> Iterator[nn.Module]:
        yield from self.blocks
        yield self.head


class DiT(ResidualNetwork):
    """A DiT for data of one shape (channels, *space)."""

    config: DiTConfig

    def make_layers(self, inputs: int, num_classes: int) -> None:
        self.make_residual(inputs, num_classes, DiTBlock, modulations=6)
        if self.config.kernel > 1:
            self.embed = Window(inputs, self.config, len(self.shape) - 1)
        self.grid = self.config.grid(self.shape)
        self.register_buffer("positions", layers.positions(self.grid, self.config.width), persistent=False)
        self.positions: Tensor

    def network(self, features: Image, t: Times, cond: Labels | None) -> Image:
        *per_block, last = self.modulation(self.condition(t, cond))
        x = self.embed(features) if self.config.kernel > 1 else self.embed(patchify(features, self.config.patch))
        x = x + self.positions.to(x.dtype)  # the residual stream has the compute dtype
        seeds = self.seeds(2 * self.config.depth, x.device)
        if self.fast is None:
            recompute = self.config.checkpoint and self.training
            for i, (block, modulation) in enumerate(zip(self.blocks, per_block, strict=True)):
                pair = None if seeds is None else seeds[2 * i : 2 * i + 2]
                x = layers.run_block(block, recompute, x, modulation, pair)
            tokens = self.head(x, last)
        else:
            tokens = self.head.project(self.fast(self, x, per_block, last, seeds))
        return unpatchify(tokens, self.grid, self.config.patch)


class Window(nn.Module):
    """A convolution over patches and their neighbors, as tokens."""

    def __init__(self, inputs: int, config: DiTConfig, axes: int) -> None:
        super().__init__()
        side, padding = config.kernel * config.patch, config.kernel // 2 * config.patch
        self.conv = layers.CONVOLUTIONS[axes - 1](inputs, config.width, side, stride=config.patch, padding=padding)
        layers.xavier_(self.conv)

    def forward(self, x: Image) -> Tokens:
        return self.conv(x).flatten(2).mT.contiguous()


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
        layers.xavier_(self.qkv)
        layers.xavier_(self.out)

    def forward(self, h: Tokens) -> Tokens:
        return self.out(layers.attend(self.qkv(h), self.heads))


def modulated_norm(x: Tokens, shift: PerSample, scale: PerSample) -> Tokens:
    """LayerNorm(x) * (1 + scale) + shift, in the dtype of x."""
    normed = layer_norm(x, x.shape[-1:], eps=NORM_EPS)
    return (normed * (1 + scale[:, None]) + shift[:, None]).to(x.dtype)


def gated_residual(x: Tokens, gate: PerSample, branch: Tokens, p: float, seed: Seed | None) -> Tokens:
    """x + gate * dropout(branch), without dropout if there is no seed."""
    if seed is not None:
        branch = layers.dropout(branch, p, seed)
    return torch.addcmul(x, gate[:, None], branch)


class FeedForward(nn.Module):
    """Linear, GELU (tanh form), Linear."""

    def __init__(self, width: int, ratio: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, ratio * width)
        self.contract = nn.Linear(ratio * width, width)
        layers.xavier_(self.expand)
        layers.xavier_(self.contract)

    def forward(self, h: Tokens) -> Tokens:
        return self.contract(gelu(self.expand(h), approximate="tanh"))


class Modulation(nn.Module):
    """Shifts, scales and gates of all blocks and of the head, by one linear layer that is initialized to 0."""

    def __init__(self, width: int, per_block: int, depth: int) -> None:
        super().__init__()
        self.width = width
        self.sizes = [per_block] * depth + [2]
        self.project = nn.Linear(width, sum(self.sizes) * width)
        layers.zero_(self.project)

    def forward(self, condition: PerSample) -> tuple[Float[Tensor, "batch _ width"], ...]:
        """One (batch, per_block, width) for each block, then (batch, 2, width) for the head."""
        return self.project(condition).unflatten(1, (-1, self.width)).split(self.sizes, dim=1)


class ModulatedHead(nn.Module):
    """Modulated norm, then a linear layer that is initialized to 0."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, outputs)
        layers.zero_(self.project)

    def forward(self, x: Tokens, modulation: Float[Tensor, "batch 2 width"]) -> Float[Tensor, "batch tokens outputs"]:
        shift, scale = modulation.unbind(1)
        return self.project(modulated_norm(x, shift, scale))


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
