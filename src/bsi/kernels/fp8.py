"""A DiT's blocks with their matrix products in 8 bits, forward and backward (experimental).

The half-blocks are those of fused_dit.py, with e4m3 for weights and activations and e5m2 for gradients. Each matrix has
one scale, a power of two, which depends on the current step alone:

    activations   Fixed. A norm bounds its output (by sqrt(width), before modulation), and e4m3 covers eighteen powers
                  of two.
    weights       From their largest magnitude, in every step; only once for a frozen network.
    gradients     Of a half-block's output and of q, k and v: from their largest magnitude. Of GELU's argument: from the
                  bound 1.13 max|d| sum_i |W_ij|, with d the gradient of the output and W the second weight. The bound
                  is loose, but e5m2 covers thirty powers of two.

Residual stream, norms, GELU, attention, biases and all sums are as in fused_dit.py: bfloat16 between kernels, float32
inside. Gradients of weights, which are sums over all tokens, are accumulated in float32. A product of 8-bit matrices
sums over the axis along which both are contiguous, so the matrices of these gradients are transposed first.

Rounding to four significant bits has an error of 2.6 % (root mean square), which acts as noise in the prediction. If
the network explains a fraction R^2 of the variance, a relative noise e of its output raises the squared error by the
factor 1 + e^2 R^2 / (1 - R^2). So the loss reported while training in 8 bits is some tenths of a percent higher than
that of the same weights in bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bsi.backbones.dit import DiT, DiTBlock
from bsi.kernels import cublaslt
from bsi.kernels.branch_gradients import Matrix8, gelu_backward, quantize, stack_qkv, transpose
from bsi.kernels.cublaslt import Epilogue
from bsi.kernels.fused_dit import NO_GRADIENT, BlockForm, FusedDiT, Half, PerSample, Stream
from bsi.kernels.layer_norm import gated_layer_norm

ACTIVATION = torch.float8_e4m3fn
H_SCALE, MIXED_SCALE, HIDDEN_SCALE = 4.0, 16.0, 2.0
GELU_SLOPE = 1.13 * 1.125 * 1.0625  # GELU's steepest slope, times the rounding of a gradient and of a weight


@dataclass(frozen=True)
class Weights8:
    """The four weights of a block. `contract_bound` bounds the gradient of GELU for output gradients of 1."""

    qkv: Matrix8
    out: Matrix8
    expand: Matrix8
    contract: Matrix8
    contract_bound: Tensor | None


def quantize_weights(blocks: Sequence[DiTBlock], for_training: bool) -> list[Weights8]:
    """All weights of all blocks in 8 bits; for training, with the bounds of gradients."""
    each = [
        (b.attention.qkv.weight, b.attention.out.weight, b.mlp.expand.weight, b.mlp.contract.weight) for b in blocks
    ]
    with torch.no_grad():
        weights = [w for four in each for w in four]
        largest = torch._foreach_norm(weights, ord=float("inf"))
        eight = [quantize(w.detach(), m, ACTIVATION) for w, m in zip(weights, largest, strict=True)]
        bounds = [
            torch.linalg.vector_norm(four[3], 1, dim=0).amax().float() * GELU_SLOPE if for_training else None
            for four in each
        ]
    fours = zip(eight[0::4], eight[1::4], eight[2::4], eight[3::4], bounds, strict=True)
    return [Weights8(qkv, out, expand, contract, bound) for qkv, out, expand, contract, bound in fours]


@functools.cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, device=device)


def _largest(*tensors: Tensor) -> Tensor:
    """The largest magnitude over all tensors."""
    return torch.stack([torch.linalg.vector_norm(t, float("inf")) for t in tensors]).amax()


def _transposed(matrix: Matrix8) -> Matrix8:
    return Matrix8(transpose(matrix.rows), matrix.inverse)


def _weight_grad(dy: Matrix8, x: Matrix8, master: Tensor) -> Tensor:
    """dW = dy^T x, in the dtype of the weight."""
    return cublaslt.product8(_transposed(dy), _transposed(x), out_dtype=master.dtype, fast=False)


class _AttentionHalf8(torch.autograd.Function):
    """Norm, q k v, attention, output product."""

    @staticmethod
    def forward(
        ctx: Any, x: Stream, branch: Stream | None, bias: Tensor | None, gate: PerSample | None, shift: PerSample,
        scale: PerSample, qkv_weight: Tensor, qkv_bias: Tensor, out_weight: Tensor,
        weights: Weights8, heads: int, dropout: float, seed: Tensor | None, keep: bool,
    ) -> tuple[Stream, Stream]:  # fmt: skip
        normed = gated_layer_norm(x, branch, bias, gate, shift, scale, dropout, seed, H_SCALE, ACTIVATION)
        batch, tokens, width = x.shape
        h = Matrix8(normed.h.flatten(0, 1), _constant(1.0 / H_SCALE, x.device))
        qkv = cublaslt.product8(h, weights.qkv, Epilogue.BIAS, qkv_bias.to(x.dtype))
        parts = qkv.view(batch, tokens, 3, heads, width // heads).transpose(1, 3).unbind(2)
        with torch.set_grad_enabled(keep):
            q, k, v = (part.detach().requires_grad_(keep) for part in parts)
            mixed = scaled_dot_product_attention(q, k, v)
        rows = mixed.detach().transpose(1, 2).reshape(batch * tokens, width)
        mixed8 = quantize(rows, _constant(torch.finfo(ACTIVATION).max / MIXED_SCALE, x.device), ACTIVATION)
        out = cublaslt.product8(mixed8, weights.out).view_as(x)
        if keep:
            inputs = (branch, bias, gate, shift, scale, seed)
            Half.save(ctx, normed, inputs, dropout, False, mixed8.rows, mixed8.inverse, qkv_weight)
            ctx.attention, ctx.weights = ((q, k, v), mixed), weights
        return normed.stream, out

    @staticmethod
    def backward(ctx: Any, dstream: Stream, dout: Stream) -> tuple[Tensor | None, ...]:
        half, weights = Half(ctx), ctx.weights
        (mixed_rows, mixed_inverse, master), (parts, mixed) = half.own, half.attention(ctx)
        batch, heads, tokens, size = mixed.shape
        dout8 = quantize(dout.flatten(0, 1), _largest(dout))
        dmixed = cublaslt.product8(dout8, _transposed(weights.out)).view(batch, tokens, heads, size)
        grads = dq, dk, dv = torch.autograd.grad(mixed, parts, dmixed.transpose(1, 2))
        gathered = stack_qkv(dq, dk, dv, _largest(*(g.transpose(1, 2) for g in grads)))
        dqkv, h = gathered.qkv8, Matrix8(half.h(), _constant(1.0 / H_SCALE, dout.device))
        dh = cublaslt.product8(dqkv, _transposed(weights.qkv)).view_as(dout)
        return (
            *half.finish(dstream, dh),
            _weight_grad(dqkv, h, master),
            gathered.bias,
            _weight_grad(dout8, Matrix8(mixed_rows, mixed_inverse), master),
            *NO_GRADIENT,
        )


class _MlpHalf8(torch.autograd.Function):
    """Norm, product with GELU, product."""

    @staticmethod
    def forward(
        ctx: Any, x: Stream, branch: Stream, bias: Tensor, gate: PerSample, shift: PerSample, scale: PerSample,
        expand_weight: Tensor, expand_bias: Tensor, contract_weight: Tensor,
        weights: Weights8, dropout: float, seed: Tensor | None, keep: bool,
    ) -> tuple[Stream, Stream]:  # fmt: skip
        normed = gated_layer_norm(x, branch, bias, gate, shift, scale, dropout, seed, H_SCALE, ACTIVATION)
        h = Matrix8(normed.h.flatten(0, 1), _constant(1.0 / H_SCALE, x.device))
        before = torch.empty(len(h.rows), len(expand_weight), dtype=x.dtype, device=x.device) if keep else None
        epilogue = Epilogue.GELU_AUX_BIAS if keep else Epilogue.GELU_BIAS
        hidden = cublaslt.product8(
            h, weights.expand, epilogue, expand_bias.to(x.dtype), before, ACTIVATION, _constant(HIDDEN_SCALE, x.device)
        )
        hidden8 = Matrix8(hidden, _constant(1.0 / HIDDEN_SCALE, x.device))
        out = cublaslt.product8(hidden8, weights.contract).view_as(x)
        if keep:
            inputs = (branch, bias, gate, shift, scale, seed)
            Half.save(ctx, normed, inputs, dropout, False, before, hidden, expand_weight)
            ctx.weights = weights
        return normed.stream, out

    @staticmethod
    def backward(ctx: Any, dstream: Stream, dout: Stream) -> tuple[Tensor | None, ...]:
        half, weights = Half(ctx), ctx.weights
        before, hidden, master = half.own
        largest = _largest(dout)
        dout8 = quantize(dout.flatten(0, 1), largest)
        dhidden = cublaslt.product8(dout8, _transposed(weights.contract))
        grads = gelu_backward(dhidden, before, largest=largest * weights.contract_bound)
        dbefore, h = grads.before8, Matrix8(half.h(), _constant(1.0 / H_SCALE, dout.device))
        dh = cublaslt.product8(dbefore, _transposed(weights.expand)).view_as(dout)
        return (
            *half.finish(dstream, dh),
            _weight_grad(dbefore, h, master),
            grads.bias,
            _weight_grad(dout8, Matrix8(hidden, _constant(1.0 / HIDDEN_SCALE, dout.device)), master),
            *NO_GRADIENT[:4],
        )


def fp8_forms(blocks: Sequence[DiTBlock], frozen: Sequence[Weights8] | None = None) -> list[BlockForm]:
    """The form of each block. `frozen` are weights already in 8 bits, used when gradients are disabled."""
    training = torch.is_grad_enabled()
    eight = frozen if frozen is not None and not training else quantize_weights(blocks, training)
    return [BlockForm(_AttentionHalf8, _MlpHalf8, weights) for weights in eight]


@dataclass
class FusedDiT8(FusedDiT):
    """The blocks of a DiT with 8-bit products: `DiT.fast`."""

    frozen: list[Weights8] | None = None

    def forms(self, blocks: Sequence[DiTBlock]) -> list[BlockForm]:
        return fp8_forms(blocks, self.frozen)

    def freeze(self, network: DiT) -> None:
        """Store the blocks' weights in 8 bits, for evaluation without gradients."""
        self.frozen = quantize_weights([cast(DiTBlock, block) for block in network.blocks], for_training=False)
