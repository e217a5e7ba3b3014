"""A DiT's blocks with one kernel between two matrix products, and an explicit backward pass.

The residual stream is passed between half-blocks as (stream, branch, gate): one kernel adds a branch and computes the
norm that follows (dit_kernels.py). A half-block is then one of

    gated_layer_norm -> product -> attention -> product
    gated_layer_norm -> product with GELU -> product

Outside its products and its attention, a block makes 8 passes over the stream forward, and 12 (norms and gates) + 12
(GELU) + 6 (stacking the gradients of q, k and v) backward. GELU's forward is an epilogue of its product (cublaslt.py).
Weights may be float32: they are rounded when they are used, and their gradients are computed in float32. The lean form
stores neither h nor GELU's output for the backward pass, and recomputes them by pointwise operations.

With 8-bit products (experimental), weights and activations are e4m3 and gradients e5m2. Each matrix has one scale, a
power of two, which depends on the current step alone:

    activations   Fixed. A norm bounds its output (by sqrt(width), before modulation), and e4m3 covers eighteen powers
                  of two.
    weights       From their largest magnitude, in every step; only once for a frozen network.
    gradients     Of a half-block's output and of q, k and v: from their largest magnitude. Of GELU's argument: from the
                  bound 1.13 max|d| sum_i |W_ij|, with d the gradient of the output and W the second weight. The bound
                  is loose, but e5m2 covers thirty powers of two.

Rounding to four significant bits has an error of 2.6 % (root mean square), which acts as noise in the prediction. If
the network explains a fraction R^2 of the variance, a relative noise e of its output raises the squared error by the
factor 1 + e^2 R^2 / (1 - R^2). So the loss reported while training in 8 bits is some tenths of a percent higher than
that of the same weights in bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bsi.backbones.dit import DiT
from bsi.backbones.layers import PerSample, Seed
from bsi.backbones.layers import Tokens as Stream
from bsi.kernels import dit_kernels as kernels
from bsi.kernels.cublaslt import Epilogue, input_gradient, product, weight_gradient
from bsi.kernels.dit_kernels import Matrix, PerChannel, Rows, Scalar

ACTIVATION8 = torch.float8_e4m3fn
H_SCALE, MIXED_SCALE, HIDDEN_SCALE = 4.0, 16.0, 2.0
GELU_SLOPE = 1.13 * 1.125 * 1.0625  # GELU's steepest slope, times the rounding of a gradient and of a weight


@dataclass(frozen=True)
class Weights8:
    """The two weights of a half-block. `bound` is that of the gradient of GELU for output gradients of 1."""

    first: Matrix
    second: Matrix
    bound: Scalar | None = None


@torch.no_grad()
def quantize_weights(blocks: Iterable[Any], for_training: bool) -> list[Weights8]:
    """The weights of all half-blocks in 8 bits; for training, with the bounds of gradients."""
    weights: list[Tensor] = []
    bounds: list[Scalar | None] = []
    for block in blocks:
        attention, mlp = block.attention, block.mlp
        weights += [attention.qkv.weight, attention.out.weight, mlp.expand.weight, mlp.contract.weight]
        bound = torch.linalg.vector_norm(mlp.contract.weight, 1, dim=0).amax().float() if for_training else None
        bounds += [None, None if bound is None else bound * GELU_SLOPE]
    largest = torch._foreach_norm(weights, ord=float("inf"))
    eight = [kernels.quantize(w.detach(), m, ACTIVATION8) for w, m in zip(weights, largest, strict=True)]
    return [Weights8(*each) for each in zip(eight[0::2], eight[1::2], bounds, strict=True)]


@functools.cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, device=device)


def _largest(*tensors: Tensor) -> Scalar:
    """The largest magnitude over all tensors."""
    return torch.stack([torch.linalg.vector_norm(t, float("inf")) for t in tensors]).amax()


def _activation(rows: Rows, scale: float, eight: Weights8 | None) -> Matrix:
    """In 8 bits, the rows are `scale` times the activation."""
    return Matrix(rows, None if eight is None else _constant(1.0 / scale, rows.device))


# A branch is a product with the first weight, a function, and a product with the second weight. `forward` returns its
# output, a tensor to store, and the input of the second product, which may be recomputed instead of stored. `backward`
# returns the gradients of the first product, of its bias and of the second weight.

Forward = tuple[Rows, Tensor | None, Rows | None]
Backward = tuple[Matrix, PerChannel, Rows]


@dataclass(frozen=True)
class _Attention:
    eight: Weights8 | None
    heads: int
    tokens: int

    def forward(self, ctx: Any, h: Matrix, first: Matrix, bias: PerChannel, second: Matrix, keep: bool) -> Forward:
        qkv = product(h, first, Epilogue.BIAS, bias)
        width = qkv.shape[1] // 3
        parts = qkv.view(-1, self.tokens, 3, self.heads, width // self.heads).transpose(1, 3).unbind(2)
        with torch.set_grad_enabled(keep):
            q, k, v = (part.detach().requires_grad_(keep) for part in parts)
            mixed = scaled_dot_product_attention(q, k, v)
        if keep:
            ctx.attention = (q, k, v), mixed
        rows = mixed.detach().transpose(1, 2).reshape(-1, width)
        if self.eight is None:
            return product(Matrix(rows), second), None, None  # `mixed` has the rows
        rows8 = kernels.quantize(rows, _constant(torch.finfo(ACTIVATION8).max / MIXED_SCALE, rows.device), ACTIVATION8)
        return product(rows8, second), rows8.inverse, rows8.rows

    def backward(
        self, ctx: Any, dout: Matrix, largest: Any, second: Matrix, inverse: Tensor | None, rows8: Rows | None
    ) -> Backward:
        if ctx.attention is None:
            fix = "For Jacobians (retain_graph=True), do not accelerate the network."
            raise RuntimeError(f"a fused DiT has one backward pass for each forward pass, got a second one. {fix}")
        (parts, mixed), ctx.attention = ctx.attention, None  # the graph of the attention is freed
        batch, heads, tokens, size = mixed.shape
        dmixed = input_gradient(dout, second).view(batch, tokens, heads, size).transpose(1, 2)
        rows = mixed.detach().transpose(1, 2).reshape(batch * tokens, heads * size) if rows8 is None else rows8
        dsecond = weight_gradient(dout, Matrix(rows, inverse), ctx.dtype)
        dq, dk, dv = torch.autograd.grad(mixed, parts, dmixed)
        bound = None if self.eight is None else _largest(*(grad.transpose(1, 2) for grad in (dq, dk, dv)))
        return *kernels.stack_qkv(dq, dk, dv, bound), dsecond


@dataclass(frozen=True)
class _Mlp:
    eight: Weights8 | None

    def forward(self, ctx: Any, h: Matrix, first: Matrix, bias: PerChannel, second: Matrix, keep: bool) -> Forward:
        before = torch.empty(len(h.rows), len(first.rows), dtype=bias.dtype, device=bias.device) if keep else None
        epilogue = Epilogue.GELU_AUX_BIAS if keep else Epilogue.GELU_BIAS
        if self.eight is None:
            hidden = product(h, first, epilogue, bias, before)
        else:
            hidden = product(h, first, epilogue, bias, before, ACTIVATION8, _constant(HIDDEN_SCALE, bias.device))
        return product(_activation(hidden, HIDDEN_SCALE, self.eight), second), before, hidden

    def backward(
        self, ctx: Any, dout: Matrix, largest: Any, second: Matrix, before: Rows, kept: Rows | None
    ) -> Backward:
        dhidden = input_gradient(dout, second)
        hidden = torch.empty_like(before) if kept is None else kept
        bound = None if self.eight is None else largest * self.eight.bound
        dbefore, dbias = kernels.gelu_backward(dhidden, before, hidden if kept is None else None, bound)
        return dbefore, dbias, weight_gradient(dout, _activation(hidden, HIDDEN_SCALE, self.eight), ctx.dtype)


class _HalfBlock(torch.autograd.Function):
    """Norm and branch. The bias of the branch's second product is added with its gate, by the next half-block.

    Tensors are stored by `save_for_backward`: the stream is an output, and as an attribute of the context it would form
    a reference cycle that only the garbage collector frees.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Stream, before: Stream | None, bias: PerChannel | None, gate: PerSample | None, shift: PerSample,
        scale: PerSample, first_weight: Rows, first_bias: PerChannel, second_weight: Rows,
        branch: _Attention | _Mlp, lean: bool, dropout: float, seed: Seed | None, keep: bool,
    ) -> tuple[Stream, Stream]:  # fmt: skip
        eight = branch.eight
        format8 = () if eight is None else (H_SCALE, ACTIVATION8)
        normed = kernels.gated_layer_norm(x, before, bias, gate, shift, scale, dropout, seed, *format8)
        if eight is None:
            first, second = Matrix(first_weight.to(x.dtype)), Matrix(second_weight.to(x.dtype))
        else:
            first, second = eight.first, eight.second
        h = _activation(normed.h.flatten(0, 1), H_SCALE, eight)
        out, own, rows = branch.forward(ctx, h, first, first_bias.to(x.dtype), second, keep)
        if keep:
            ctx.branch, ctx.dropout, ctx.dtype = branch, dropout, first_weight.dtype
            h_rows, rows = (None, None) if lean else (h.rows, rows)
            ctx.save_for_backward(
                normed.stream, normed.mean, normed.rstd, before, bias, gate, scale, seed, shift,
                h_rows, own, rows, first.rows, first.inverse, second.rows, second.inverse,
            )  # fmt: skip
        return normed.stream, out.view_as(x)

    @staticmethod
    def backward(ctx: Any, dstream: Stream, dout: Stream) -> tuple[Tensor | None, ...]:
        *norm, shift, h, own, rows, first_rows, first_inverse, second_rows, second_inverse = ctx.saved_tensors
        branch, (stream, _, _, _, _, _, scale, _) = ctx.branch, norm
        first, second = Matrix(first_rows, first_inverse), Matrix(second_rows, second_inverse)
        largest = None if branch.eight is None else _largest(dout)
        dout_rows = dout.flatten(0, 1)
        dout_matrix = Matrix(dout_rows) if largest is None else kernels.quantize(dout_rows, largest)
        dfirst, dbias, dsecond = branch.backward(ctx, dout_matrix, largest, second, own, rows)
        if h is None:
            h = kernels.gated_layer_norm(stream, None, None, None, shift, scale, 0.0, None).h.flatten(0, 1)
        dfirst_weight = weight_gradient(dfirst, _activation(h, H_SCALE, branch.eight), ctx.dtype)
        dh = input_gradient(dfirst, first).view_as(dout)
        inputs = kernels.gated_layer_norm_backward(dstream.contiguous(), dh, ctx.dropout, *norm)
        return *inputs, dfirst_weight, dbias, dsecond, *[None] * 5


class _LastNorm(torch.autograd.Function):
    """Add the last branch, and compute the head's norm."""

    @staticmethod
    def forward(
        ctx: Any, x: Stream, branch: Stream, bias: PerChannel, gate: PerSample, shift: PerSample, scale: PerSample,
        dropout: float, seed: Seed | None, keep: bool,
    ) -> Stream:  # fmt: skip
        normed = kernels.gated_layer_norm(x, branch, bias, gate, shift, scale, dropout, seed)
        if keep:
            ctx.save_for_backward(normed.stream, normed.mean, normed.rstd, branch, bias, gate, scale, seed)
            ctx.dropout = dropout
        return normed.h

    @staticmethod
    def backward(ctx: Any, dh: Stream) -> tuple[Tensor | None, ...]:
        dh = dh.contiguous()
        inputs = kernels.gated_layer_norm_backward(torch.zeros_like(dh), dh, ctx.dropout, *ctx.saved_tensors)
        return *inputs, None, None, None


@dataclass
class FusedDiT:
    """`DiT.fast`: all blocks and the head's norm, for a bfloat16 stream on a CUDA device."""

    lean: bool = False
    fp8: bool = False
    frozen: list[Weights8] | None = None  # used when gradients are disabled

    def __call__(
        self, network: DiT, x: Stream, modulations: Sequence[Float[Tensor, "batch 6 width"]],
        last: Float[Tensor, "batch 2 width"], seeds: Int32[Tensor, "twice_depth 2"] | None,
    ) -> Stream:  # fmt: skip
        blocks: Sequence[Any] = list(network.blocks)
        halves, keep = 2 * len(blocks), torch.is_grad_enabled()
        eight: Sequence[Weights8 | None] = [None] * halves
        if self.fp8:
            eight = self.frozen if self.frozen and not keep else quantize_weights(blocks, keep)
        dropout = 0.0 if seeds is None else network.config.dropout
        each: Sequence[Tensor | None] = [None] * halves if seeds is None else list(seeds)
        branch = bias = gate = seed = None
        for i, (block, modulation) in enumerate(zip(blocks, modulations, strict=True)):
            shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation.unbind(1)
            attention, mlp = block.attention, block.mlp
            x, branch = _HalfBlock.apply(
                x, branch, bias, gate, shift_a, scale_a, attention.qkv.weight, attention.qkv.bias, attention.out.weight,
                _Attention(eight[2 * i], attention.heads, x.shape[1]), self.lean, dropout, seed, keep,
            )  # fmt: skip
            x, branch = _HalfBlock.apply(
                x, branch, attention.out.bias, gate_a, shift_m, scale_m, mlp.expand.weight, mlp.expand.bias,
                mlp.contract.weight, _Mlp(eight[2 * i + 1]), self.lean, dropout, each[2 * i], keep,
            )  # fmt: skip
            bias, gate, seed = mlp.contract.bias, gate_m, each[2 * i + 1]
        return _LastNorm.apply(x, branch, bias, gate, *last.unbind(1), dropout, seed, keep)

    def freeze(self, network: DiT) -> None:
        """Store the blocks' weights in 8 bits, before they are rounded to 16 bits."""
        if self.fp8:
            self.frozen = quantize_weights(network.blocks, for_training=False)
