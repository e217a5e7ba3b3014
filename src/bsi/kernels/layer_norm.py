"""Triton kernel for the pointwise work between two branches of an adaLN-Zero block, forward and backward.

    gated_layer_norm    stream = x + gate * dropout(branch + bias),  h = LayerNorm(stream) * (1 + scale) + shift

Each kernel reads its inputs once and writes its outputs once. The gradients of gates, shifts, scales and biases are
sums over tokens. The same kernel accumulates them in float32 over chunks of tokens, and the partial sums are added
afterwards in a fixed order. Dropout masks are those of backbones/layers.py; they are recomputed in the backward pass
and never stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from bsi.backbones.layers import DROPOUT_WEYL, NORM_EPS

CHUNK = 64  # tokens whose contributions to a sum are added before they are written to memory


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


Stream = Float[Tensor, "batch tokens width"]
PerSample = Float[Tensor, "batch width"]


@dataclass(frozen=True)
class Normed:
    """The stream after the branch was added, its modulated norm, and the norm's statistics."""

    stream: Stream
    h: Shaped[Tensor, "batch tokens width"]
    mean: Float[Tensor, "batch tokens"]
    rstd: Float[Tensor, "batch tokens"]


@dataclass(frozen=True)
class LayerNormGradients:
    """Gradients of the inputs of `gated_layer_norm`; None for those of a missing branch."""

    x: Stream
    branch: Stream | None
    bias: Float[Tensor, " width"] | None
    gate: PerSample | None
    shift: PerSample
    scale: PerSample


def block_of(width: int) -> int:
    """Columns of a program: all of them, rounded up to a power of two."""
    return triton.next_power_of_2(width)


def warps_of(block: int) -> int:
    """Warps of a program, for eight elements per thread: a 16-byte load of bfloat16, and few warps to reduce over."""
    return min(16, max(1, block // 256))


def mask_constants(dropout: float) -> dict[str, float]:
    """The compile-time constants of `dropout_keeps`."""
    threshold, (first, second) = round(dropout * 2**32) - 2**31, DROPOUT_WEYL
    return {"DROPOUT": dropout, "THRESHOLD": threshold, "WEYL_0": first, "WEYL_1": second}


def gated_layer_norm(
    x: Stream,
    branch: Stream | None,
    bias: Float[Tensor, " width"] | None,
    gate: PerSample | None,
    shift: PerSample,
    scale: PerSample,
    dropout: float,
    seed: Int32[Tensor, " 2"] | None,
    h_scale: float = 1.0,
    h_type: torch.dtype | None = None,
) -> Normed:
    """x + gate * dropout(branch + bias) and its modulated norm; without a branch the stream is x itself.

    With an 8-bit `h_type`, h is multiplied by `h_scale` and clamped to the range of that type.
    """
    batch, tokens, width = x.shape
    stream, h = x if branch is None else torch.empty_like(x), torch.empty_like(x, dtype=h_type)
    mean, rstd = (torch.empty(batch, tokens, dtype=torch.float32, device=x.device) for _ in range(2))
    block = block_of(width)
    _gated_layer_norm[(batch * tokens,)](
        x, x if branch is None else branch, x if bias is None else bias, scale if gate is None else gate, shift, scale,
        x if seed is None else seed, stream, h, mean, rstd, 0 if gate is None else gate.stride(0), scale.stride(0),
        tokens, width, NORM_EPS,
        **mask_constants(dropout), BRANCH=branch is not None, H_SCALE=h_scale, H_LIMIT=float(torch.finfo(h.dtype).max),
        BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return Normed(stream, h, mean, rstd)


def gated_layer_norm_backward(
    dstream: Stream,
    dh: Stream,
    normed: Normed,
    branch: Stream | None,
    bias: Float[Tensor, " width"] | None,
    gate: PerSample | None,
    scale: PerSample,
    dropout: float,
    seed: Int32[Tensor, " 2"] | None,
) -> LayerNormGradients:
    """Gradients of the inputs of `gated_layer_norm` from those of its two outputs."""
    batch, tokens, width = dh.shape
    chunks = triton.cdiv(tokens, CHUNK)
    dx = torch.empty_like(dh)
    dbranch = None if branch is None else torch.empty_like(dh)
    sums = torch.empty(batch, chunks, 4, width, dtype=torch.float32, device=dh.device)
    block = block_of(width)
    _gated_layer_norm_backward[(batch * chunks,)](
        dstream, dh, normed.stream, dh if branch is None else branch, dh if bias is None else bias,
        scale if gate is None else gate, scale,
        dh if seed is None else seed, normed.mean, normed.rstd, dx, dx if dbranch is None else dbranch, sums,
        0 if gate is None else gate.stride(0), scale.stride(0), tokens, width, chunks,
        **mask_constants(dropout), BRANCH=branch is not None, CHUNK=CHUNK, TILE=2,
        BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    total = sums.sum(1)
    dgate, dshift, dscale = total[:, :3].to(scale.dtype).unbind(1)
    if branch is None:
        return LayerNormGradients(dx, None, None, None, dshift, dscale)
    return LayerNormGradients(dx, dbranch, total[:, 3].sum(0), dgate, dshift, dscale)
