"""Triton kernels for gradients inside the branches of a DiT block, and for conversion to 8 bits.

    gelu_backward          the gradient of GELU's argument
    stack_qkv              the gradients of q, k and v, stacked as the gradient of the product that computes them
    quantize, transpose    any matrix in 8 bits; the transpose of an 8-bit matrix

Each kernel reads its inputs once and writes its outputs once, and computes the sums over tokens for biases in the same
pass. Both gradients can be written in 8 bits. Given a bound on their magnitude (a scalar on the device), they are
multiplied by the largest power of two that keeps the bound below the largest number of the format. The inverse of this
factor is returned for the product. Larger numbers are clamped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Shaped
from torch import Tensor

from bsi.kernels.layer_norm import CHUNK, block_of, warps_of

GRADIENT8 = torch.float8_e5m2  # three significant bits, a range of thirty powers of two


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


Rows = Shaped[Tensor, "rows features"]
Scalar = Float[Tensor, ""]


@dataclass(frozen=True)
class Matrix8:
    """An 8-bit matrix `rows`, which represents `rows * inverse`."""

    rows: Rows
    inverse: Scalar


@dataclass(frozen=True)
class GeluGradients:
    """The gradient of GELU's argument, its sum over tokens, and GELU's output if it was recomputed."""

    before: Rows
    inverse: Scalar | None
    bias: Float[Tensor, " features"]
    hidden: Rows | None

    @property
    def before8(self) -> Matrix8:
        assert self.inverse is not None
        return Matrix8(self.before, self.inverse)


def gelu_backward(dhidden: Rows, before: Rows, again: bool = False, largest: Scalar | None = None) -> GeluGradients:
    """The gradient of the argument of GELU (tanh form). It overwrites `dhidden`, or is in 8 bits with `largest`.

    `again` also recomputes GELU's output, for the lean form, which does not store it. `largest` bounds the gradient.
    """
    rows, width = before.shape
    chunks, block = triton.cdiv(rows, CHUNK), min(1024, block_of(width))
    hidden = torch.empty_like(before) if again else None
    sums = torch.empty(chunks, width, dtype=torch.float32, device=before.device)
    inverse = None if largest is None else torch.empty((), dtype=torch.float32, device=before.device)
    dbefore = dhidden if largest is None else torch.empty_like(dhidden, dtype=GRADIENT8)
    _gelu_backward[(chunks, triton.cdiv(width, block))](
        dhidden, before, dbefore, dhidden if hidden is None else hidden, sums, sums if largest is None else largest,
        sums if inverse is None else inverse, rows, width,
        HIDDEN=again, LIMIT=_limit(largest), CHUNK=CHUNK, TILE=1, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return GeluGradients(dbefore, inverse, sums.sum(0), hidden)


@dataclass(frozen=True)
class QkvGradient:
    """The gradient of the product that computes q, k and v, and its sum over tokens."""

    qkv: Rows
    inverse: Scalar | None
    bias: Float[Tensor, " features"]

    @property
    def qkv8(self) -> Matrix8:
        assert self.inverse is not None
        return Matrix8(self.qkv, self.inverse)


def stack_qkv(
    dq: Float[Tensor, "batch heads tokens size"],
    dk: Float[Tensor, "batch heads tokens size"],
    dv: Float[Tensor, "batch heads tokens size"],
    largest: Scalar | None = None,
) -> QkvGradient:
    """dq, dk and dv concatenated, a row for each token; in 8 bits if there is a bound `largest`."""
    batch, heads, tokens, size = dq.shape
    if not (dq.stride() == dk.stride() == dv.stride() and dq.stride(3) == 1):
        dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    rows, width = batch * tokens, heads * size
    chunks, block = triton.cdiv(rows, CHUNK), block_of(width)
    out = torch.empty(rows, 3 * width, dtype=dq.dtype if largest is None else GRADIENT8, device=dq.device)
    sums = torch.empty(chunks, 3 * width, dtype=torch.float32, device=dq.device)
    inverse = None if largest is None else torch.empty((), dtype=torch.float32, device=dq.device)
    _stack_qkv[(chunks, 3)](
        dq, dk, dv, out, sums, sums if largest is None else largest, sums if inverse is None else inverse,
        tokens, heads, rows, width, dq.stride(0), dq.stride(1), dq.stride(2),
        LIMIT=_limit(largest), SIZE=size, CHUNK=CHUNK, TILE=1, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return QkvGradient(out, inverse, sums.sum(0))


def _limit(largest: Scalar | None, kind: torch.dtype = GRADIENT8) -> float:
    return 0.0 if largest is None else float(torch.finfo(kind).max)


def quantize(x: Rows, largest: Scalar, kind: torch.dtype = GRADIENT8) -> Matrix8:
    """Convert x to 8 bits, with a scale computed from its largest magnitude `largest`."""
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=kind, device=x.device)
    inverse = torch.empty((), dtype=torch.float32, device=x.device)
    block, chunk = min(1024, block_of(width)), 8
    _quantize[(triton.cdiv(rows, chunk), triton.cdiv(width, block))](
        x, out, largest, inverse, rows, width,
        LIMIT=_limit(largest, kind), CHUNK=chunk, TILE=1, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return Matrix8(out, inverse)


def transpose(q: Rows) -> Rows:
    """The contiguous transpose of an 8-bit matrix: tensor cores sum over the contiguous axis of both factors.

    This is a separate kernel on bytes, because Triton 3.6 generates wrong code if it is part of the kernels above.
    """
    rows, width = q.shape
    qt = torch.empty(width, rows, dtype=q.dtype, device=q.device)
    tile = 128, 64
    _transpose[(triton.cdiv(rows, tile[0]), triton.cdiv(width, tile[1]))](
        q.view(torch.uint8), qt.view(torch.uint8), rows, width, R=tile[0], C=tile[1]
    )  # fmt: skip
    return qt
