"""Triton kernels for norms, gates and the residual stream of an adaLN-Zero block.

    gate_norm        stream = x + gate * dropout(branch + bias),  h = LayerNorm(stream) * (1 + scale) + shift

Each reads its inputs once and writes its outputs once, forward and backward. Sums over tokens (the gradients of
gates, shifts, scales and biases) are taken on the way, in float32, over chunks whose partial sums are added
afterwards: always in the same order. Dropout masks are those of dropout.py, computed again where they are needed and
never stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from bsi.backbones.adaln import NORM_EPS
from bsi.backbones.dropout import WEYL

__all__ = [
    "CHUNK",
    "Gradients",
    "Normed",
    "block_of",
    "gate_norm",
    "gate_norm_backward",
    "keeps",
    "mask_of",
    "warps_of",
]

CHUNK = 64  # tokens whose contributions to a sum are added before they leave the chip


@triton.jit
@no_type_check
def keeps(index, seed, THRESHOLD: tl.constexpr, WEYL_0: tl.constexpr, WEYL_1: tl.constexpr):
    """dropout.py's mask: three rounds of Squares in 32-bit integers that wrap around."""
    a = (index + tl.load(seed)) * WEYL_0
    b = (index + tl.load(seed + 1)) * WEYL_1
    h = a * a + b
    h = (h >> 16) + (h << 16)
    h = h * h + a
    h = (h >> 16) + (h << 16)
    return h * h + b >= THRESHOLD


@triton.jit
@no_type_check
def _gate_norm(
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
            kept = keeps(place.to(tl.int32), seed, THRESHOLD, WEYL_0, WEYL_1)
            added = tl.where(kept, added * (1.0 / (1.0 - DROPOUT)), 0.0)
        value += tl.load(gate + sample * stride_gate + column, mask=inside, other=0.0).to(tl.float32) * added
        # The norm sees the stream as it is stored, so that the backward, which reads it, sees the same.
        value = value.to(stream.dtype.element_ty).to(tl.float32)
        tl.store(stream + place, value, mask=inside)
    center = tl.sum(value, axis=0) / width
    centerd = tl.where(inside, value - center, 0.0)
    inverse = tl.rsqrt(tl.sum(centerd * centerd, axis=0) / width + eps)
    tl.store(mean + row, center)
    tl.store(rstd + row, inverse)
    scale_here = tl.load(scale + sample * stride_norm + column, mask=inside, other=0.0).to(tl.float32)
    shift_here = tl.load(shift + sample * stride_norm + column, mask=inside, other=0.0).to(tl.float32)
    out = centerd * inverse * (1.0 + scale_here) + shift_here
    if H_SCALE != 1.0:
        out = tl.minimum(tl.maximum(out * H_SCALE, -H_LIMIT), H_LIMIT)
    tl.store(h + place, out.to(h.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _gate_norm_backward(
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
                kept = keeps(place.to(tl.int32), seed, THRESHOLD, WEYL_0, WEYL_1)
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
    """The stream after a branch was added, what the next branch sees of it, and the norm's statistics."""

    stream: Stream
    h: Shaped[Tensor, "batch tokens width"]
    mean: Float[Tensor, "batch tokens"]
    rstd: Float[Tensor, "batch tokens"]


@dataclass(frozen=True)
class Gradients:
    """Gradients of `gate_norm`'s inputs; those of a branch that was not there are None."""

    x: Stream
    branch: Stream | None
    bias: Float[Tensor, " width"] | None
    gate: PerSample | None
    shift: PerSample
    scale: PerSample


def block_of(width: int) -> int:
    """Columns of a program: all of them, up to a power of two."""
    return triton.next_power_of_2(width)


def warps_of(block: int) -> int:
    """Eight elements to a thread: a 16-byte load of bfloat16. More warps to a tile cost exchanges between them."""
    return min(16, max(1, block // 256))


def mask_of(dropout: float) -> dict[str, float]:
    """The constants of dropout.py's mask."""
    return {"DROPOUT": dropout, "THRESHOLD": round(dropout * 2**32) - 2**31, "WEYL_0": WEYL[0], "WEYL_1": WEYL[1]}


def gate_norm(
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

    With an `h_type` of 8 bits, h is multiplied by `h_scale` and cut off where that type ends.
    """
    batch, tokens, width = x.shape
    stream, h = x if branch is None else torch.empty_like(x), torch.empty_like(x, dtype=h_type)
    mean, rstd = (torch.empty(batch, tokens, dtype=torch.float32, device=x.device) for _ in range(2))
    block = block_of(width)
    _gate_norm[(batch * tokens,)](
        x, x if branch is None else branch, x if bias is None else bias, scale if gate is None else gate, shift, scale,
        x if seed is None else seed, stream, h, mean, rstd, 0 if gate is None else gate.stride(0), scale.stride(0),
        tokens, width, NORM_EPS,
        **mask_of(dropout), BRANCH=branch is not None, H_SCALE=h_scale, H_LIMIT=float(torch.finfo(h.dtype).max),
        BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return Normed(stream, h, mean, rstd)


def gate_norm_backward(
    dstream: Stream,
    dh: Stream,
    normed: Normed,
    branch: Stream | None,
    bias: Float[Tensor, " width"] | None,
    gate: PerSample | None,
    scale: PerSample,
    dropout: float,
    seed: Int32[Tensor, " 2"] | None,
) -> Gradients:
    """Gradients of `gate_norm` from those of its two outputs."""
    batch, tokens, width = dh.shape
    chunks = triton.cdiv(tokens, CHUNK)
    dx = torch.empty_like(dh)
    dbranch = None if branch is None else torch.empty_like(dh)
    sums = torch.empty(batch, chunks, 4, width, dtype=torch.float32, device=dh.device)
    block = block_of(width)
    _gate_norm_backward[(batch * chunks,)](
        dstream, dh, normed.stream, dh if branch is None else branch, dh if bias is None else bias,
        scale if gate is None else gate, scale,
        dh if seed is None else seed, normed.mean, normed.rstd, dx, dx if dbranch is None else dbranch, sums,
        0 if gate is None else gate.stride(0), scale.stride(0), tokens, width, chunks,
        **mask_of(dropout), BRANCH=branch is not None, CHUNK=CHUNK, TILE=2, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    total = sums.sum(1)
    dgate, dshift, dscale = total[:, :3].to(scale.dtype).unbind(1)
    if branch is None:
        return Gradients(dx, None, None, None, dshift, dscale)
    return Gradients(dx, dbranch, total[:, 3].sum(0), dgate, dshift, dscale)
