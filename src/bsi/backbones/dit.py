"""DiT (Peebles & Xie, "Scalable Diffusion Models with Transformers") for data with any number of spatial axes.

    patches -> linear + fixed positions -> depth x [attention, MLP] with adaLN-Zero -> norm, linear -> patches

as published, with three additions from the paper: Fourier features at the input, a 32-dimensional precision embedding,
and dropout (0.05). Dropout is applied to the output of each branch before its gate, so that attention kernels do not
draw random numbers. layers.py implements adaLN-Zero and describes a block's memory traffic.
"""

from collections.abc import Iterator

from einops import rearrange
from jaxtyping import Float, Int, Int32
from torch import Tensor, nn

from bsi.backbones.config import DiTConfig, input_channels
from bsi.backbones.layers import (
    Backbone,
    ConditionEmbedding,
    FeedForward,
    ModulatedHead,
    Modulation,
    attend,
    draw_seeds,
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
        self,
        config: DiTConfig,
        shape: tuple[int, ...],
        bins_count: int | None = None,
        num_classes: int = 0,
        out_channels: int | None = None,
    ) -> None:
        config.check(shape)
        super().__init__(shape, bins_count, out_channels)
        self.config = config
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

    def network(
        self,
        features: Float[Tensor, "batch more_channels *space"],
        t: Float[Tensor, " batch"],
        cond: Int[Tensor, " batch"] | None,
    ) -> Float[Tensor, "batch out_channels *space"]:
        *per_block, last = self.modulation(self.condition(t, cond))
        x = self.embed(patchify(features, self.config.patch))
        x = x + self.positions.to(x.dtype)  # the residual stream has the compute dtype
        drops = self.training and self.config.dropout > 0
        seeds = draw_seeds(2 * self.config.depth, x.device).view(-1, 2, 2) if drops else None
        if self.fast is None:
            out = self.head(self.run_blocks(x, per_block, seeds), last)
        else:
            out = self.head.project(self.fast(self, x, per_block, last, seeds))
        return unpatchify(out, self.grid, self.config.patch)

    def run_blocks(
        self,
        x: Float[Tensor, "batch tokens width"],
        modulations: list[Float[Tensor, "batch 6 width"]],
        seeds: Int32[Tensor, "depth 2 2"] | None,
    ) -> Float[Tensor, "batch tokens width"]:
        """The residual stream after all blocks."""
        recompute = self.config.checkpoint and self.training
        for i, (block, modulation) in enumerate(zip(self.blocks, modulations, strict=True)):
            x = run_block(block, recompute, x, modulation, None if seeds is None else seeds[i])
        return x

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
        self,
        x: Float[Tensor, "batch tokens width"],
        modulation: Float[Tensor, "batch 6 width"],
        seeds: Int32[Tensor, "2 2"] | None,
    ) -> Float[Tensor, "batch tokens width"]:
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

    def forward(self, h: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        return self.out(attend(self.qkv(h), self.heads))


def patchify(x: Float[Tensor, "batch channels *space"], patch: int) -> Float[Tensor, "batch tokens inputs"]:
    """Split every spatial axis into patches. A token is one patch with its channels and pixels concatenated."""
    cut, grid, pixels = _axes(x.ndim - 2)
    return rearrange(x, f"b c {cut} -> b ({grid}) (c {pixels})", **dict.fromkeys(pixels.split(), patch))


def unpatchify(
    tokens: Float[Tensor, "batch tokens outputs"], grid: tuple[int, ...], patch: int
) -> Float[Tensor, "batch channels *space"]:
    """The inverse of `patchify` on a grid of patches."""
    cut, names, pixels = _axes(len(grid))
    sizes = dict(zip(names.split(), grid, strict=True)) | dict.fromkeys(pixels.split(), patch)
    return rearrange(tokens, f"b ({names}) (c {pixels}) -> b c {cut}", **sizes)


def _axes(count: int) -> tuple[str, str, str]:
    """Names for einops, e.g. for two axes: "(n0 p0) (n1 p1)", "n0 n1", "p0 p1"."""
    n, p = [f"n{i}" for i in range(count)], [f"p{i}" for i in range(count)]
    return " ".join(f"({a} {b})" for a, b in zip(n, p, strict=True)), " ".join(n), " ".join(p)
