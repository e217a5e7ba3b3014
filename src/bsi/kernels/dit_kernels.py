"""Triton kernels for the work between two matrix products of a DiT.

    gated_layer_norm       stream = x + gate * dropout(branch + bias),  h = LayerNorm(stream) * (1 + scale) + shift
    gelu_backward          the gradient of GELU's argument
    stack_qkv              the gradients of q, k and v, stacked as the gradient of the product that computes them
    quantize, transpose    any matrix in 8 bits; the transpose of an 8-bit matrix

Each kernel reads its inputs once and writes its outputs once. The gradients of gates, shifts, scales and biases are
sums over tokens. The same kernel accumulates them in float32 over chunks of tokens, and the partial sums are added
afterwards in a fixed order. Dropout masks are those of backbones/layers.py; they are recomputed in the backward pass
and never stored.

To convert to 8 bits, numbers are multiplied by the largest power of two that keeps a bound on their magnitude (a scalar
on the device) below the largest number of the format. Larger numbers are clamped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Shaped
from torch import Tensor

from bsi.backbones.layers import DROPOUT_WEYL, NORM_EPS, PerSample, Seed
from bsi.backbones.layers import Tokens as Stream

CHUNK = 64  # tokens whose contributions to a sum are added before they are written to memory
GRADIENT8 = torch.float8_e5m2  # three significant bits, a range of thirty powers of two

Rows = Shaped[Tensor, "rows features"]
Scalar = Float[Tensor, ""]
PerChannel = Float[Tensor, " features"]


@triton.jit
@no_type_check
def dropout_keeps(index, seed, THRESHOLD: tl.constexpr, WEYL_0: tl.constexpr, WEYL_1: tl.constexpr):
    """The mask of `layers.dropout`: three rounds of Squares in 32-bit integers that wrap around."""
    a = (index + tl.load(seed)) * WEYL_0
    b = (index + tl.load(seed + 1)) * WEYL_1
    h = a * a + b
    h = (h >> 16) + (h << 16)
    h = h * h + a
    h = (h >> 16) + (h << 16)
    return h * h + b >= THRESHOLD


@triton.jit
@no_type_check
def _gated_layer_norm(
    x, branch, bias, gate, shift, scale, seed, stream, h, mean, rstd,
    stride_gate, stride_norm, tokens, width, eps,
    DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr, WEYL_0: tl.constexpr, WEYL_1: tl.constexpr,
    BRANCH: tl.constexpr, H_SCALE: tl.constexpr, H_LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    sample = row // tokens
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if BRANCH:
        added = tl.load(branch + place, mask=inside, other=0.0).to(tl.float32)
        added += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        if DROPOUT > 0.0:
            kept = dropout_keeps(place.to(tl.int32), seed, THRESHOLD, WEYL_0, WEYL_1)
            added = tl.where(kept, added * (1.0 / (1.0 - DROPOUT)), 0.0)
        value += tl.load(gate + sample * stride_gate + column, mask=inside, other=0.0).to(tl.float32) * added
        # The norm is computed from the stream as rounded for storage, which is what the backward pass reads.
        value = value.to(stream.dtype.element_ty).to(tl.float32)
        tl.store(stream + place, value, mask=inside)
    center = tl.sum(value, axis=0) / width
    centered = tl.where(inside, value - center, 0.0)
    inverse = tl.rsqrt(tl.sum(centered * centered, axis=0) / width + eps)
    tl.store(mean + row, center)
    tl.store(rstd + row, inverse)
    scale_here = tl.load(scale + sample * stride_norm + column, mask=inside, other=0.0).to(tl.float32)
    shift_here = tl.load(shift + sample * stride_norm + column, mask=inside, other=0.0).to(tl.float32)
    out = centered * inverse * (1.0 + scale_here) + shift_here
    if H_SCALE != 1.0:
        out = tl.minimum(tl.maximum(out * H_SCALE, -H_LIMIT), H_LIMIT)
    tl.store(h + place, out.to(h.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _gated_layer_norm_backward(
    dstream, dh, stream, branch, bias, gate, scale, seed, mean, rstd, dx, dbranch, sums,
    stride_gate, stride_norm, tokens, width, chunks,
    DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr, WEYL_0: tl.constexpr, WEYL_1: tl.constexpr,
    BRANCH: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    sample, chunk = program // chunks, program % chunks
    column = tl.arange(0, BLOCK)
    inside = column < width
    one_plus_scale = 1.0 + tl.load(scale + sample * stride_norm + column, mask=inside, other=0.0).to(tl.float32)
    gate_here = tl.zeros([BLOCK], tl.float32)
    bias_here = tl.zeros([BLOCK], tl.float32)
    if BRANCH:
        bias_here = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        gate_here = tl.load(gate + sample * stride_gate + column, mask=inside, other=0.0).to(tl.float32)
    sum_gate = tl.zeros([BLOCK], tl.float32)
    sum_shift = tl.zeros([BLOCK], tl.float32)
    sum_scale = tl.zeros([BLOCK], tl.float32)
    sum_branch = tl.zeros([BLOCK], tl.float32)
    for i in range(0, CHUNK, TILE):
        token = chunk * CHUNK + i + tl.arange(0, TILE)
        present = token < tokens
        row = sample * tokens + token
        here = present[:, None] & inside[None, :]
        place = row[:, None] * width + column[None, :]
        d_h = tl.load(dh + place, mask=here, other=0.0).to(tl.float32)
        value = tl.load(stream + place, mask=here, other=0.0).to(tl.float32)
        d_stream = tl.load(dstream + place, mask=here, other=0.0).to(tl.float32)
        inverse = tl.load(rstd + row, mask=present, other=0.0)[:, None]
        center = tl.load(mean + row, mask=present, other=0.0)[:, None]
        normed = tl.where(here, (value - center) * inverse, 0.0)
        sum_shift += tl.sum(d_h, axis=0)
        sum_scale += tl.sum(d_h * normed, axis=0)
        d_normed = d_h * one_plus_scale[None, :]
        mean_of_d = tl.sum(d_normed, axis=1)[:, None] / width
        along = tl.sum(d_normed * normed, axis=1)[:, None] / width
        d = (d_normed - mean_of_d - normed * along) * inverse + d_stream
        tl.store(dx + place, d, mask=here)
        if BRANCH:
            added = tl.load(branch + place, mask=here, other=0.0).to(tl.float32) + bias_here[None, :]
            d_branch = d * gate_here[None, :]
            if DROPOUT > 0.0:
                kept = dropout_keeps(place.to(tl.int32), seed, THRESHOLD, WEYL_0, WEYL_1)
                added = tl.where(kept, added * (1.0 / (1.0 - DROPOUT)), 0.0)
                d_branch = tl.where(kept, d_branch * (1.0 / (1.0 - DROPOUT)), 0.0)
            sum_gate += tl.sum(tl.where(here, d * added, 0.0), axis=0)
            sum_branch += tl.sum(tl.where(here, d_branch, 0.0), axis=0)
            tl.store(dbranch + place, d_branch, mask=here)
    base = sums + program * 4 * width + column
    tl.store(base, sum_gate, mask=inside)
    tl.store(base + width, sum_shift, mask=inside)
    tl.store(base + 2 * width, sum_scale, mask=inside)
    tl.store(base + 3 * width, sum_branch, mask=inside)


@triton.jit
@no_type_check
def _scaled(value, largest, inverse, first, LIMIT: tl.constexpr):
    """The value times the power of two that brings `largest` below LIMIT; the first program writes the inverse."""
    bound = tl.load(largest).to(tl.float32)
    exponent = tl.minimum(tl.floor(tl.log2(LIMIT / tl.maximum(bound, 1e-30))), 100.0)
    scale = tl.where(bound > 0.0, tl.exp2(exponent), 1.0)
    if first:
        tl.store(inverse, 1.0 / scale)
    return tl.minimum(tl.maximum(value * scale, -LIMIT), LIMIT)


@triton.jit
@no_type_check
def _gelu_backward(
    dhidden, before, dbefore, hidden, sums, largest, inverse, rows, width,
    HIDDEN: tl.constexpr, LIMIT: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    for i in range(0, CHUNK, TILE):
        row = chunk * CHUNK + i + tl.arange(0, TILE)
        here = (row < rows)[:, None] & inside[None, :]
        place = row[:, None] * width + column[None, :]
        a = tl.load(before + place, mask=here, other=0.0).to(tl.float32)
        # gelu(a) = a sigmoid(2 u) with u = sqrt(2 / pi) (a + 0.044715 a^3): the tanh form
        sigmoid = tl.sigmoid(2.0 * 0.7978845608028654 * (a + 0.044715 * a * a * a))
        slope = 2.0 * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * a * a)
        derivative = sigmoid + a * sigmoid * (1.0 - sigmoid) * slope
        d = derivative * tl.load(dhidden + place, mask=here, other=0.0).to(tl.float32)
        total += tl.sum(d, axis=0)
        if HIDDEN:
            tl.store(hidden + place, a * sigmoid, mask=here)
        if LIMIT > 0.0:
            d = _scaled(d, largest, inverse, first, LIMIT)
        tl.store(dbefore + place, d.to(dbefore.dtype.element_ty), mask=here)
    tl.store(sums + chunk * width + column, total, mask=inside)


@triton.jit
@no_type_check
def _stack_qkv(
    dq, dk, dv, out, sums, largest, inverse, tokens, heads, rows, width,
    stride_batch, stride_head, stride_token,
    LIMIT: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    source = dq
    if part == 1:
        source = dk
    if part == 2:
        source = dv
    column = tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    first = (tl.program_id(0) == 0) & (part == 0)
    for i in range(0, CHUNK, TILE):
        row = chunk * CHUNK + i + tl.arange(0, TILE)
        here = (row < rows)[:, None] & inside[None, :]
        start = (row // tokens) * stride_batch + (row % tokens) * stride_token
        place = start[:, None] + ((column // SIZE) * stride_head + column % SIZE)[None, :]
        d = tl.load(source + place, mask=here, other=0.0).to(tl.float32)
        total += tl.sum(d, axis=0)
        if LIMIT > 0.0:
            d = _scaled(d, largest, inverse, first, LIMIT)
        there = out + row[:, None] * (3 * width) + part * width + column[None, :]
        tl.store(there, d.to(out.dtype.element_ty), mask=here)
    tl.store(sums + (chunk * 3 + part) * width + column, total, mask=inside)


@triton.jit
@no_type_check
def _quantize(
    x, out, largest, inverse, rows, width,
    LIMIT: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    for i in range(0, CHUNK, TILE):
        row = tl.program_id(0).to(tl.int64) * CHUNK + i + tl.arange(0, TILE)
        here = (row < rows)[:, None] & (column < width)[None, :]
        place = row[:, None] * width + column[None, :]
        value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
        value = _scaled(value, largest, inverse, first, LIMIT)
        tl.store(out + place, value.to(out.dtype.element_ty), mask=here)


@triton.jit
@no_type_check
def _transpose(q, qt, rows, width, R: tl.constexpr, C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.program_id(1).to(tl.int64) * C + tl.arange(0, C)
    here = (row < rows)[:, None] & (column < width)[None, :]
    bits = tl.load(q + row[:, None] * width + column[None, :], mask=here, other=0)
    tl.store(qt + column[:, None] * rows + row[None, :], tl.trans(bits), mask=tl.trans(here))


@dataclass(frozen=True)
class Matrix:
    """A matrix in 16 bits, or an 8-bit matrix that represents `rows * inverse`."""

    rows: Rows
    inverse: Scalar | None = None


@dataclass(frozen=True)
class Normed:
    """The stream after the branch was added, its modulated norm, and the norm's statistics."""

    stream: Stream
    h: Shaped[Tensor, "batch tokens width"]
    mean: Float[Tensor, "batch tokens"]
    rstd: Float[Tensor, "batch tokens"]


def _columns(width: int, most: int = 1 << 16) -> dict[str, int]:
    """Columns and warps of a program, for eight elements per thread: 16-byte loads, and few warps to reduce over."""
    block = min(most, triton.next_power_of_2(width))
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 256))}


def mask_constants(dropout: float) -> dict[str, float]:
    """The compile-time constants of `dropout_keeps`."""
    threshold, (first, second) = round(dropout * 2**32) - 2**31, DROPOUT_WEYL
    return {"DROPOUT": dropout, "THRESHOLD": threshold, "WEYL_0": first, "WEYL_1": second}


def gated_layer_norm(
    x: Stream, branch: Stream | None, bias: PerChannel | None, gate: PerSample | None, shift: PerSample,
    scale: PerSample, dropout: float, seed: Seed | None, h_scale: float = 1.0, h_type: torch.dtype | None = None,
) -> Normed:  # fmt: skip
    """x + gate * dropout(branch + bias) and its modulated norm; without a branch the stream is x itself.

    With an 8-bit `h_type`, h is multiplied by `h_scale` and clamped to the range of that type.
    """
    batch, tokens, width = x.shape
    stream, h = x if branch is None else torch.empty_like(x), torch.empty_like(x, dtype=h_type)
    mean, rstd = (torch.empty(batch, tokens, dtype=torch.float32, device=x.device) for _ in range(2))
    _gated_layer_norm[(batch * tokens,)](
        x, x if branch is None else branch, x if bias is None else bias, scale if gate is None else gate, shift, scale,
        x if seed is None else seed, stream, h, mean, rstd, 0 if gate is None else gate.stride(0), scale.stride(0),
        tokens, width, NORM_EPS,
        **mask_constants(dropout), BRANCH=branch is not None, H_SCALE=h_scale, H_LIMIT=float(torch.finfo(h.dtype).max),
        **_columns(width),
    )  # fmt: skip
    return Normed(stream, h, mean, rstd)


def gated_layer_norm_backward(
    dstream: Stream, dh: Stream, dropout: float, stream: Stream, mean: Tensor, rstd: Tensor, branch: Stream | None,
    bias: PerChannel | None, gate: PerSample | None, scale: PerSample, seed: Seed | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of x, branch, bias, gate, shift and scale from those of the two outputs."""
    batch, tokens, width = dh.shape
    chunks = triton.cdiv(tokens, CHUNK)
    dx = torch.empty_like(dh)
    dbranch = None if branch is None else torch.empty_like(dh)
    sums = torch.empty(batch, chunks, 4, width, dtype=torch.float32, device=dh.device)
    _gated_layer_norm_backward[(batch * chunks,)](
        dstream, dh, stream, dh if branch is None else branch, dh if bias is None else bias,
        scale if gate is None else gate, scale,
        dh if seed is None else seed, mean, rstd, dx, dx if dbranch is None else dbranch, sums,
        0 if gate is None else gate.stride(0), scale.stride(0), tokens, width, chunks,
        **mask_constants(dropout), BRANCH=branch is not None, CHUNK=CHUNK, TILE=2, **_columns(width),
    )  # fmt: skip
    total = sums.sum(1)
    dgate, dshift, dscale = total[:, :3].to(scale.dtype).unbind(1)
    if branch is None:
        return dx, None, None, None, dshift, dscale
    return dx, dbranch, total[:, 3].sum(0), dgate, dshift, dscale


def _scaling(largest: Scalar | None, device: torch.device, kind: torch.dtype = GRADIENT8) -> tuple[Any, float]:
    """The scalar that receives the inverse of the scale, and the largest number; None and 0 without a bound."""
    if largest is None:
        return None, 0.0
    return torch.empty((), dtype=torch.float32, device=device), float(torch.finfo(kind).max)


def gelu_backward(
    dhidden: Rows, before: Rows, hidden: Rows | None = None, largest: Scalar | None = None
) -> tuple[Matrix, PerChannel]:
    """The gradient of the argument `before` of GELU (tanh form), and its sum over tokens.

    It overwrites `dhidden`, or with a bound `largest` it is in 8 bits. GELU's output is written to `hidden` if given.
    """
    rows, width = before.shape
    chunks, columns = triton.cdiv(rows, CHUNK), _columns(width, most=1024)
    sums = torch.empty(chunks, width, dtype=torch.float32, device=before.device)
    inverse, limit = _scaling(largest, before.device)
    dbefore = dhidden if largest is None else torch.empty_like(dhidden, dtype=GRADIENT8)
    _gelu_backward[(chunks, triton.cdiv(width, columns["BLOCK"]))](
        dhidden, before, dbefore, dhidden if hidden is None else hidden, sums, sums if largest is None else largest,
        sums if inverse is None else inverse, rows, width,
        HIDDEN=hidden is not None, LIMIT=limit, CHUNK=CHUNK, TILE=1, **columns,
    )  # fmt: skip
    return Matrix(dbefore, inverse), sums.sum(0)


def stack_qkv(dq: Tensor, dk: Tensor, dv: Tensor, largest: Scalar | None = None) -> tuple[Matrix, PerChannel]:
    """dq, dk and dv concatenated, a row for each token, and their sum over tokens; in 8 bits with a bound `largest`."""
    batch, heads, tokens, size = dq.shape
    if not (dq.stride() == dk.stride() == dv.stride() and dq.stride(3) == 1):
        dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    rows, width = batch * tokens, heads * size
    chunks = triton.cdiv(rows, CHUNK)
    out = torch.empty(rows, 3 * width, dtype=dq.dtype if largest is None else GRADIENT8, device=dq.device)
    sums = torch.empty(chunks, 3 * width, dtype=torch.float32, device=dq.device)
    inverse, limit = _scaling(largest, dq.device)
    _stack_qkv[(chunks, 3)](
        dq, dk, dv, out, sums, sums if largest is None else largest, sums if inverse is None else inverse,
        tokens, heads, rows, width, dq.stride(0), dq.stride(1), dq.stride(2),
        LIMIT=limit, SIZE=size, CHUNK=CHUNK, TILE=1, **_columns(width),
    )  # fmt: skip
    return Matrix(out, inverse), sums.sum(0)


def quantize(x: Rows, largest: Scalar, kind: torch.dtype = GRADIENT8) -> Matrix:
    """Convert x to 8 bits, with a scale computed from its largest magnitude `largest`."""
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=kind, device=x.device)
    inverse, limit = _scaling(largest, x.device, kind)
    columns, chunk = _columns(width, most=1024), 8
    _quantize[(triton.cdiv(rows, chunk), triton.cdiv(width, columns["BLOCK"]))](
        x, out, largest, inverse, rows, width, LIMIT=limit, CHUNK=chunk, TILE=1, **columns
    )
    return Matrix(out, inverse)


def transpose(matrix: Matrix) -> Matrix:
    """The contiguous transpose of an 8-bit matrix: tensor cores sum over the contiguous axis of both factors.

    This is a separate kernel on bytes, because Triton 3.6 generates wrong code if it is part of the kernels above.
    """
    q = matrix.rows
    rows, width = q.shape
    qt = torch.empty(width, rows, dtype=q.dtype, device=q.device)
    grid = triton.cdiv(rows, 128), triton.cdiv(width, 64)
    _transpose[grid](q.view(torch.uint8), qt.view(torch.uint8), rows, width, R=128, C=64)
    return Matrix(qt, matrix.inverse)
