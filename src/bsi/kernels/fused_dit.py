"""A DiT's blocks with one kernel between two matrix products, and an explicit backward pass.

The residual stream is passed between half-blocks as (stream, branch, gate): one kernel adds a branch and computes the
norm that follows (layer_norm.py). A half-block is then one of

    gated_layer_norm -> product -> attention -> product
    gated_layer_norm -> product with GELU -> product

Outside its products and its attention, a block makes 8 passes over the stream forward, and 12 (norms and gates) + 12
(GELU) + 6 (stacking the gradients of q, k and v) backward. The same kernels compute the sums for biases and
modulations. GELU's forward is an epilogue of its product (cublaslt.py).

Weights may be float32: they are rounded when they are used, and their gradients are computed in float32.

The lean form stores neither h nor GELU's output for the backward pass and recomputes them from the stored tensors by
pointwise operations. No product or attention is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bsi.backbones.dit import DiT, DiTBlock
from bsi.kernels import cublaslt
from bsi.kernels.branch_gradients import gelu_backward, stack_qkv
from bsi.kernels.layer_norm import Normed, gated_layer_norm, gated_layer_norm_backward

Stream = Float[Tensor, "batch tokens width"]
PerSample = Float[Tensor, "batch width"]
Inputs = tuple[Tensor | None, ...]

NO_GRADIENT = (None,) * 5  # gradients of the non-tensor arguments, which come last


class Half:
    """Common part of the half-blocks: the fused norm before the branch, and its gradients after those of the branch.

    Tensors are stored by `save_for_backward`: the stream is an output, and as an attribute of the context it would form
    a reference cycle that only the garbage collector frees.
    """

    @staticmethod
    def save(ctx: Any, normed: Normed, inputs: Inputs, dropout: float, lean: bool, *own: Tensor | None) -> None:
        """Store `inputs` (branch, bias, gate, shift, scale, seed) and `own`, the tensors that the branch needs."""
        h = None if lean else normed.h
        ctx.save_for_backward(normed.stream, h, normed.mean, normed.rstd, *inputs, *own)
        ctx.dropout = dropout

    def __init__(self, ctx: Any) -> None:
        stream, h, mean, rstd, *rest = ctx.saved_tensors
        self.branch, self.bias, self.gate, self.shift, self.scale, self.seed, *self.own = rest
        self.normed = Normed(stream, stream if h is None else h, mean, rstd)
        self.lean, self.dropout = h is None, ctx.dropout

    @staticmethod
    def attention(ctx: Any) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """q, k and v, and the attention's output with its graph, which the first backward pass frees."""
        kept, ctx.attention = ctx.attention, None
        if kept is None:
            raise RuntimeError(
                "a fused DiT has one backward pass for each forward pass, got a second one. For Jacobians "
                "(retain_graph=True), do not accelerate the network."
            )
        return kept

    def h(self) -> Float[Tensor, "rows width"]:
        again = (
            gated_layer_norm(self.normed.stream, None, None, None, self.shift, self.scale, 0.0, None)
            if self.lean
            else self.normed
        )
        return again.h.flatten(0, 1)

    def finish(self, dstream: Stream, dh: Stream) -> tuple[Tensor | None, ...]:
        """Gradients of x, branch, bias, gate, shift and scale."""
        grads = gated_layer_norm_backward(
            dstream.contiguous(),
            dh,
            self.normed,
            self.branch,
            self.bias,
            self.gate,
            self.scale,
            self.dropout,
            self.seed,
        )
        return grads.x, grads.branch, grads.bias, grads.gate, grads.shift, grads.scale


class _AttentionHalf(torch.autograd.Function):
    """Norm, q k v, attention, output product. The output's bias is added with its gate, in the next half-block."""

    @staticmethod
    def forward(
        ctx: Any, x: Stream, branch: Stream | None, bias: Tensor | None, gate: PerSample | None, shift: PerSample,
        scale: PerSample, qkv_weight: Tensor, qkv_bias: Tensor, out_weight: Tensor,
        lean: bool, heads: int, dropout: float, seed: Tensor | None, keep: bool,
    ) -> tuple[Stream, Stream]:  # fmt: skip
        normed = gated_layer_norm(x, branch, bias, gate, shift, scale, dropout, seed)
        batch, tokens, width = x.shape
        qkv_half, out_half = qkv_weight.to(x.dtype), out_weight.to(x.dtype)
        qkv = cublaslt.linear(normed.h.flatten(0, 1), qkv_half, qkv_bias.to(x.dtype))
        parts = qkv.view(batch, tokens, 3, heads, width // heads).transpose(1, 3).unbind(2)
        with torch.set_grad_enabled(keep):
            q, k, v = (part.detach().requires_grad_(keep) for part in parts)
            mixed = scaled_dot_product_attention(q, k, v)
        rows = mixed.detach().transpose(1, 2).reshape(batch * tokens, width)
        out = cublaslt.product(rows, out_half, transpose_b=True).view(batch, tokens, width)
        if keep:
            inputs = (branch, bias, gate, shift, scale, seed)
            Half.save(ctx, normed, inputs, dropout, lean, qkv_half, out_half, qkv_weight)
            ctx.attention = (q, k, v), mixed
        return normed.stream, out

    @staticmethod
    def backward(ctx: Any, dstream: Stream, dout: Stream) -> tuple[Tensor | None, ...]:
        half = Half(ctx)
        (qkv_half, out_half, master), (parts, mixed) = half.own, half.attention(ctx)
        batch, heads, tokens, size = mixed.shape
        rows = dout.flatten(0, 1)
        dmixed = cublaslt.product(rows, out_half).view(batch, tokens, heads, size).transpose(1, 2)
        kept = mixed.detach().transpose(1, 2).reshape(batch * tokens, heads * size)
        dout_weight = cublaslt.weight_grad(rows, kept, master)
        dqkv = stack_qkv(*torch.autograd.grad(mixed, parts, dmixed))
        dqkv_weight = cublaslt.weight_grad(dqkv.qkv, half.h(), master)
        dh = cublaslt.product(dqkv.qkv, qkv_half).view_as(dout)
        return *half.finish(dstream, dh), dqkv_weight, dqkv.bias, dout_weight, *NO_GRADIENT


class _MlpHalf(torch.autograd.Function):
    """Norm, product with GELU, product. The last bias is added with its gate, in the next half-block."""

    @staticmethod
    def forward(
        ctx: Any, x: Stream, branch: Stream, bias: Tensor, gate: PerSample, shift: PerSample, scale: PerSample,
        expand_weight: Tensor, expand_bias: Tensor, contract_weight: Tensor,
        lean: bool, dropout: float, seed: Tensor | None, keep: bool,
    ) -> tuple[Stream, Stream]:  # fmt: skip
        normed = gated_layer_norm(x, branch, bias, gate, shift, scale, dropout, seed)
        rows = normed.h.flatten(0, 1)
        expand_half, contract_half = expand_weight.to(x.dtype), contract_weight.to(x.dtype)
        before = torch.empty(len(rows), len(expand_weight), dtype=rows.dtype, device=rows.device) if keep else None
        hidden = cublaslt.linear_gelu(rows, expand_half, expand_bias.to(x.dtype), before)
        out = cublaslt.product(hidden, contract_half, transpose_b=True).view_as(x)
        if keep:
            inputs, own = (branch, bias, gate, shift, scale, seed), (before, None if lean else hidden)
            Half.save(ctx, normed, inputs, dropout, lean, *own, expand_half, contract_half, expand_weight)
        return normed.stream, out

    @staticmethod
    def backward(ctx: Any, dstream: Stream, dout: Stream) -> tuple[Tensor | None, ...]:
        half = Half(ctx)
        before, kept, expand_half, contract_half, master = half.own
        rows = dout.flatten(0, 1)
        grads = gelu_backward(cublaslt.product(rows, contract_half), before, again=kept is None)
        hidden = kept if grads.hidden is None else grads.hidden
        dcontract_weight = cublaslt.weight_grad(rows, hidden, master)
        dexpand_weight = cublaslt.weight_grad(grads.before, half.h(), master)
        dh = cublaslt.product(grads.before, expand_half).view_as(dout)
        return *half.finish(dstream, dh), dexpand_weight, grads.bias, dcontract_weight, *NO_GRADIENT[:4]


class LastNorm(torch.autograd.Function):
    """Add the last branch, and compute the head's norm."""

    @staticmethod
    def forward(
        ctx: Any, x: Stream, branch: Stream, bias: Tensor, gate: PerSample, shift: PerSample, scale: PerSample,
        dropout: float, seed: Tensor | None, keep: bool,
    ) -> Stream:  # fmt: skip
        normed = gated_layer_norm(x, branch, bias, gate, shift, scale, dropout, seed)
        if keep:
            Half.save(ctx, normed, (branch, bias, gate, shift, scale, seed), dropout, lean=True)
        return normed.h

    @staticmethod
    def backward(ctx: Any, dh: Stream) -> tuple[Tensor | None, ...]:
        return *Half(ctx).finish(torch.zeros_like(dh), dh.contiguous()), *NO_GRADIENT[:3]


@dataclass(frozen=True)
class BlockForm:
    """The implementation of a block: its two half-blocks, and a setting of both (lean or not, or 8-bit weights)."""

    attention: type[torch.autograd.Function]
    mlp: type[torch.autograd.Function]
    setting: Any


def bf16(lean: bool = False) -> BlockForm:
    return BlockForm(_AttentionHalf, _MlpHalf, lean)


def fused_trunk(
    x: Stream,
    blocks: Sequence[DiTBlock],
    modulations: Sequence[Float[Tensor, "batch 6 width"]],
    last: Float[Tensor, "batch 2 width"],
    heads: int,
    dropout: float,
    seeds: Int32[Tensor, "depth 2 2"] | None,
    forms: Sequence[BlockForm],
) -> Stream:
    """All blocks and the head's norm: the input of the head's linear layer. x is bfloat16, on a CUDA device.

    Each branch's dropout has the same seed as in `DiTBlock`. Without seeds nothing is dropped.
    """
    dropout = 0.0 if seeds is None else dropout
    pairs = [(None, None)] * len(blocks) if seeds is None else [tuple(pair.unbind()) for pair in seeds]
    keep = torch.is_grad_enabled()
    branch = bias = gate = seed = None
    for block, form, modulation, (seed_a, seed_m) in zip(blocks, forms, modulations, pairs, strict=True):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation.unbind(1)
        attention, mlp = block.attention, block.mlp
        x, branch = form.attention.apply(
            x, branch, bias, gate, shift_a, scale_a, attention.qkv.weight, attention.qkv.bias, attention.out.weight,
            form.setting, heads, dropout, seed, keep,
        )  # fmt: skip
        x, branch = form.mlp.apply(
            x, branch, attention.out.bias, gate_a, shift_m, scale_m, mlp.expand.weight, mlp.expand.bias,
            mlp.contract.weight, form.setting, dropout, seed_a, keep,
        )  # fmt: skip
        bias, gate, seed = mlp.contract.bias, gate_m, seed_m
    return LastNorm.apply(x, branch, bias, gate, *last.unbind(1), dropout, seed, keep)


@dataclass
class FusedDiT:
    """The blocks of a DiT by `fused_trunk`: `DiT.fast`."""

    lean: bool = False

    def __call__(
        self,
        network: DiT,
        x: Stream,
        modulations: Sequence[Float[Tensor, "batch 6 width"]],
        last: Float[Tensor, "batch 2 width"],
        seeds: Int32[Tensor, "depth 2 2"] | None,
    ) -> Stream:
        blocks = [cast(DiTBlock, block) for block in network.blocks]
        config = network.config
        return fused_trunk(x, blocks, modulations, last, config.heads, config.dropout, seeds, self.forms(blocks))

    def forms(self, blocks: Sequence[DiTBlock]) -> list[BlockForm]:
        return [bf16(self.lean)] * len(blocks)

    def freeze(self, network: DiT) -> None:
        """Nothing to prepare: weights that are already rounded are used as they are."""
