"""DiT (Peebles & Xie, "Scalable Diffusion Models with Transformers") for data with any number of spatial axes.

    patches -> linear + fixed positions -> depth x [attention, MLP] with adaLN-Zero -> norm, linear -> patches

as published, with three things from the paper: Fourier features at the input, a 32-dimensional precision embedding, and
dropout (0.05), here on the output of each branch before its gate, where no attention kernel has to draw random numbers.
adaln.py holds the rest of a block and the account of its memory traffic.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, cast

from einops import rearrange
from jaxtyping import Float, Int, Int32
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bsi.backbones.adaln import FeedForward, Head, Modulation, gated_residual, modulated_norm
from bsi.backbones.attention import attend
from bsi.backbones.base import Backbone
from bsi.backbones.config import DiTConfig, input_channels
from bsi.backbones.dropout import draw_seeds
from bsi.backbones.embeddings import ConditionEmbedding, positions
from bsi.backbones.starts import xavier_

if TYPE_CHECKING:
    from bsi.kernels.fp8 import Weights8


class DiT(Backbone):
    """A DiT for data of one shape (channels, *space). `trunk` is the form of its blocks: acceleration.py chooses it."""

    config: DiTConfig
    trunk: Literal["plain", "fused", "lean", "fp8"] = "plain"
    _frozen: "list[Weights8] | None" = None

    def __init__(
        self, config: DiTConfig, shape: tuple[int, ...], bins_count: int | None = None, num_classes: int = 0
    ) -> None:
        config.check(shape)
        super().__init__(shape, bins_count)
        self.config = config
        self.grid = config.grid(shape)
        pixels = config.patch ** len(self.grid)
        self.register_buffer("positions", positions(self.grid, config.width), persistent=False)
        self.positions: Tensor
        self.embed = nn.Linear(input_channels(shape[0], bins_count) * pixels, config.width)
        self.condition = ConditionEmbedding(config.width, num_classes)
        self.modulation = Modulation(config.width, per_block=6, depth=config.depth)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.head = Head(config.width, shape[0] * pixels)
        xavier_(self.embed)

    def network(
        self,
        features: Float[Tensor, "batch more_channels *space"],
        t: Float[Tensor, " batch"],
        cond: Int[Tensor, " batch"] | None,
    ) -> Float[Tensor, "batch channels *space"]:
        *per_block, last = self.modulation(self.condition(t, cond))
        x = self.embed(patchify(features, self.config.patch))
        x = x + self.positions.to(x.dtype)  # the stream keeps the type of the computation
        drops = self.training and self.config.dropout > 0
        seeds = draw_seeds(2 * self.config.depth, x.device).view(-1, 2, 2) if drops else None
        if self.trunk == "plain":
            out = self.head(self._blocks(x, per_block, seeds), last)
        else:
            out = self.head.project(self._fused(x, per_block, last, seeds))
        return unpatchify(out, self.grid, self.config.patch)

    def _fused(
        self,
        x: Float[Tensor, "batch tokens width"],
        modulations: list[Float[Tensor, "batch 6 width"]],
        last: Float[Tensor, "batch 2 width"],
        seeds: Int32[Tensor, "depth 2 2"] | None,
    ) -> Float[Tensor, "batch tokens width"]:
        from bsi.kernels.fused_dit import bf16, fused_trunk  # which need Triton, and only some machines have it

        blocks = [cast(Block, block) for block in self.blocks]
        if self.trunk == "fp8":
            from bsi.kernels.fp8 import fp8_forms

            forms = fp8_forms(blocks, self._frozen)
        else:
            forms = [bf16(lean=self.trunk == "lean")] * len(blocks)
        return fused_trunk(x, blocks, modulations, last, self.config.heads, self.config.dropout, seeds, forms)

    def freeze_fp8(self) -> None:
        """Keep the blocks' weights in 8 bits, for evaluations without gradients: they will not change any more."""
        from bsi.kernels.fp8 import quantize_weights

        self._frozen = quantize_weights([cast(Block, block) for block in self.blocks], for_training=False)

    def _blocks(
        self,
        x: Float[Tensor, "batch tokens width"],
        modulations: list[Float[Tensor, "batch 6 width"]],
        seeds: Int32[Tensor, "depth 2 2"] | None,
    ) -> Float[Tensor, "batch tokens width"]:
        for i, (block, modulation) in enumerate(zip(self.blocks, modulations, strict=True)):
            seed = None if seeds is None else seeds[i]
            if self.config.checkpoint and self.training:
                # Nothing inside draws random numbers: generators, which a recorded step may not read, are left alone.
                x = checkpoint(block, x, modulation, seed, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, modulation, seed)
        return x

    def regions(self) -> Iterator[nn.Module]:
        yield from self.blocks
        yield self.head


class Block(nn.Module):
    """Attention and MLP, each with a modulated norm before and a gate after."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention = Attention(config.width, config.heads)
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


class Attention(nn.Module):
    """Multi-head self-attention; queries, keys and values come from one product."""

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
    """Cut every spatial axis into pieces of `patch`: a token is one patch, all its channels and pixels side by side."""
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
