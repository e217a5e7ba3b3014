"""Triton kernels for a U-Net's images, which lie as rows of channels, one row for each pixel.

    norm_act         y = dropout(act(GroupNorm(x + shift))),   act the identity or SiLU
    join             y = x + branch + bias

A program has one image and some whole groups of its channels, a slab: everything that a norm needs. It goes over its
pixels twice, once for the sums and once for the result, and the second time finds them in the cache: each image comes
from memory once and goes there once, forward and backward. Moments are those of norms.py, in float32: of each channel
first, about its first pixel (so that nothing cancels), then of the groups. In the gradient

    z = xn w + b,  xn = (x + shift - mean) rstd,  d = act'(z) dropout(dy)
    dx = rstd (w d - A - xn B),                   A, B = sums of w d and of w d xn over the group / its size

all that others need follows from the sums of d and d xn over each channel: they are the gradients of b and w, and that
of shift, the sum of dx, takes the mean of xn beside them. The gradient that reaches x by another way is added before dx
is written, and summed too: it is that of a bias. Dropout masks are those of dropout.py, computed again and never
stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from bsi.backbones.norm_kernels import keeps, mask_of
from bsi.backbones.norms import NORM_EPS

__all__ = ["Gradients", "Moments", "join", "norm_act", "norm_act_backward"]

SLAB = 32  # channels of a program: 64 bytes of each row in bfloat16, two whole sectors of memory
TILE = 128  # pixels at a time
WARPS = 8


@triton.jit
def _over_groups(values, column, GROUP: tl.constexpr):
    """For each column, the sum over its group."""
    group = column // GROUP
    return tl.sum(tl.where(group[:, None] == group[None, :], values[None, :], 0.0), axis=1)


@triton.jit
def _norm_act(
    x, weight, bias, shift, seed, y, mean, rstd, own,
    pixels, channels, stride_y, stride_shift, eps,
    GROUP: tl.constexpr, ACT: tl.constexpr, SHIFT: tl.constexpr,
    DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr, WEYL_0: tl.constexpr, WEYL_1: tl.constexpr,
    SLAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SLAB)
    channel = tl.program_id(1) * (SLAB // GROUP * GROUP) + column
    inside = (column < SLAB // GROUP * GROUP) & (channel < channels)
    first = sample * pixels
    x += first * channels  # so that places within one image are 32-bit numbers
    y += first * stride_y
    pivot = tl.load(x + channel, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([TILE, SLAB], tl.float32)
    squares = tl.zeros([TILE, SLAB], tl.float32)
    for i in range(0, pixels, TILE):
        pixel = i + tl.arange(0, TILE)
        here = (pixel < pixels)[:, None] & inside[None, :]
        place = pixel[:, None] * channels + channel[None, :]
        value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
        value = tl.where(here, value - pivot[None, :], 0.0)
        sums += value
        squares += value * value
    off = tl.sum(sums, axis=0) / pixels
    spread = tl.sum(squares, axis=0) / pixels - off * off
    centre = pivot + off
    tl.store(own + sample * channels + channel, centre, mask=inside)
    added = tl.zeros([SLAB], tl.float32)
    if SHIFT:
        added = tl.load(shift + sample * stride_shift + channel, mask=inside, other=0.0).to(tl.float32)
    centre += added
    middle = _over_groups(centre, column, GROUP) / GROUP
    spread += (centre - middle) * (centre - middle)
    inverse = tl.rsqrt(_over_groups(spread, column, GROUP) / GROUP + eps)
    middle -= added  # of x itself
    tl.store(mean + sample * channels + channel, middle, mask=inside)
    tl.store(rstd + sample * channels + channel, inverse, mask=inside)
    scale = inverse * tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32) - middle * scale
    for i in range(0, pixels, TILE):
        pixel = i + tl.arange(0, TILE)
        here = (pixel < pixels)[:, None] & inside[None, :]
        place = pixel[:, None] * channels + channel[None, :]
        z = tl.load(x + place, mask=here, other=0.0).to(tl.float32) * scale[None, :] + offset[None, :]
        if ACT:
            z = z * tl.sigmoid(z)
        if DROPOUT > 0.0:
            kept = keeps((first * channels).to(tl.int32) + place, seed, THRESHOLD, WEYL_0, WEYL_1)
            z = tl.where(kept, z * (1.0 / (1.0 - DROPOUT)), 0.0)
        tl.store(y + pixel[:, None] * stride_y + channel[None, :], z, mask=here)


@triton.jit
def _centred_and_gradient(
    x, dy, place, place_dy, here, middle, scale, b, seed, start,
    ACT: tl.constexpr, DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr, WEYL_0: tl.constexpr, WEYL_1: tl.constexpr,
):  # fmt: skip
    """x + shift - mean and d at some pixels; d is 0 where there are none."""
    centred = tl.load(x + place, mask=here, other=0.0).to(tl.float32) - middle[None, :]
    d = tl.load(dy + place_dy, mask=here, other=0.0).to(tl.float32)
    if DROPOUT > 0.0:
        kept = keeps(start + place, seed, THRESHOLD, WEYL_0, WEYL_1)
        d = tl.where(kept, d * (1.0 / (1.0 - DROPOUT)), 0.0)
    if ACT:
        z = centred * scale[None, :] + b[None, :]
        s = tl.sigmoid(z)
        d *= s * (1.0 + z * (1.0 - s))
    return centred, d


@triton.jit
def _norm_act_backward(
    dy, x, mean, rstd, own, weight, bias, seed, add, dx, sums,
    pixels, channels, stride_dy,
    GROUP: tl.constexpr, ACT: tl.constexpr, ADD: tl.constexpr,
    DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr, WEYL_0: tl.constexpr, WEYL_1: tl.constexpr,
    SLAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SLAB)
    channel = tl.program_id(1) * (SLAB // GROUP * GROUP) + column
    inside = (column < SLAB // GROUP * GROUP) & (channel < channels)
    first = sample * pixels
    x += first * channels
    dx += first * channels
    add += first * channels
    dy += first * stride_dy
    start = (first * channels).to(tl.int32)
    middle = tl.load(mean + sample * channels + channel, mask=inside, other=0.0)
    inverse = tl.load(rstd + sample * channels + channel, mask=inside, other=0.0)
    scale = inverse * tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    sum_d = tl.zeros([TILE, SLAB], tl.float32)
    sum_dx = tl.zeros([TILE, SLAB], tl.float32)
    for i in range(0, pixels, TILE):
        pixel = i + tl.arange(0, TILE)
        here = (pixel < pixels)[:, None] & inside[None, :]
        place = pixel[:, None] * channels + channel[None, :]
        place_dy = pixel[:, None] * stride_dy + channel[None, :]
        centred, d = _centred_and_gradient(
            x, dy, place, place_dy, here, middle, scale, b, seed, start, ACT, DROPOUT, THRESHOLD, WEYL_0, WEYL_1
        )
        sum_d += d
        sum_dx += d * centred
    total_d = tl.sum(sum_d, axis=0)
    total_dx = tl.sum(sum_dx, axis=0) * inverse
    level = _over_groups(scale * total_d, column, GROUP) / (GROUP * pixels)  # A and B, and one factor rstd of dx
    slope = _over_groups(scale * total_dx, column, GROUP) / (GROUP * pixels) * inverse
    own_centred = tl.load(own + sample * channels + channel, mask=inside, other=0.0) - middle
    d_shift = scale * total_d - pixels * (level + slope * own_centred)
    sum_add = tl.zeros([TILE, SLAB], tl.float32)
    for i in range(0, pixels, TILE):
        pixel = i + tl.arange(0, TILE)
        here = (pixel < pixels)[:, None] & inside[None, :]
        place = pixel[:, None] * channels + channel[None, :]
        place_dy = pixel[:, None] * stride_dy + channel[None, :]
        centred, d = _centred_and_gradient(
            x, dy, place, place_dy, here, middle, scale, b, seed, start, ACT, DROPOUT, THRESHOLD, WEYL_0, WEYL_1
        )
        d = scale[None, :] * d - level[None, :] - centred * slope[None, :]
        if ADD:
            other = tl.load(add + place, mask=here, other=0.0).to(tl.float32)
            sum_add += other
            d += other
        tl.store(dx + place, d, mask=here)
    base = sums + sample * 4 * channels + channel
    tl.store(base, total_dx, mask=inside)
    tl.store(base + channels, total_d, mask=inside)
    tl.store(base + 2 * channels, d_shift, mask=inside)
    tl.store(base + 3 * channels, tl.sum(sum_add, axis=0), mask=inside)


@triton.jit
def _join(x, branch, bias, y, count, channels, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = place < count
    value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
    value += tl.load(branch + place, mask=here, other=0.0).to(tl.float32)
    value += tl.load(bias + place % channels, mask=here, other=0.0).to(tl.float32)
    tl.store(y + place, value, mask=here)


Rows = Float[Tensor, "batch pixels channels"]
PerChannel = Float[Tensor, " channels"]


@dataclass(frozen=True)
class Moments:
    """Of x, for each image and channel: its group's mean less its shift, 1 / its group's deviation, its own mean."""

    mean: Float[Tensor, "batch channels"]
    rstd: Float[Tensor, "batch channels"]
    own: Float[Tensor, "batch channels"]


@dataclass(frozen=True)
class Gradients:
    """Of `norm_act`'s inputs; `added` is the sum over pixels and images of what was added to x's."""

    x: Rows
    weight: PerChannel
    bias: PerChannel
    shift: Float[Tensor, "batch channels"]
    added: PerChannel


def norm_act(
    x: Rows,
    weight: PerChannel,
    bias: PerChannel,
    groups: int,
    y: Rows,
    act: bool = True,
    shift: Float[Tensor, "batch channels"] | None = None,
    dropout: float = 0.0,
    seed: Int32[Tensor, " 2"] | None = None,
) -> Moments:
    """dropout(act(norm of x + shift)), written into y, whose rows may be part of longer ones."""
    batch, pixels, channels = x.shape
    moments = Moments(*(torch.empty(batch, channels, dtype=torch.float32, device=x.device) for _ in range(3)))
    _norm_act[_grid(x, groups)](
        x, weight, bias, weight if shift is None else shift, x if seed is None else seed, y,
        moments.mean, moments.rstd, moments.own,
        pixels, channels, y.stride(1), 0 if shift is None else shift.stride(0), NORM_EPS,
        GROUP=channels // groups, ACT=act, SHIFT=shift is not None, **mask_of(dropout),
        SLAB=_slab(channels // groups), TILE=TILE, num_warps=WARPS,
    )  # fmt: skip
    return moments


def norm_act_backward(
    dy: Rows,
    x: Rows,
    moments: Moments,
    weight: PerChannel,
    bias: PerChannel,
    groups: int,
    act: bool = True,
    dropout: float = 0.0,
    seed: Int32[Tensor, " 2"] | None = None,
    add: Rows | None = None,
) -> Gradients:
    """Gradients of `norm_act` from that of y, whose rows may be part of longer ones; `add` is added to x's."""
    batch, pixels, channels = x.shape
    dx = torch.empty_like(x)
    sums = torch.empty(batch, 4, channels, dtype=torch.float32, device=x.device)
    _norm_act_backward[_grid(x, groups)](
        dy, x, moments.mean, moments.rstd, moments.own, weight, bias,
        x if seed is None else seed, x if add is None else add, dx, sums, pixels, channels, dy.stride(1),
        GROUP=channels // groups, ACT=act, ADD=add is not None, **mask_of(dropout),
        SLAB=_slab(channels // groups), TILE=TILE, num_warps=WARPS,
    )  # fmt: skip
    dweight, dbias, _, added = sums.sum(0).unbind(0)
    return Gradients(dx, dweight, dbias, sums[:, 2], added)


def join(x: Rows, branch: Rows, bias: PerChannel) -> Rows:
    """x + branch + bias."""
    y = torch.empty_like(x)
    _join[(triton.cdiv(x.numel(), 2048),)](x, branch, bias, y, x.numel(), x.shape[2], BLOCK=2048, num_warps=WARPS)
    return y


def _slab(group: int) -> int:
    """Channels of a program, up to a power of two: whole groups."""
    return max(SLAB, triton.next_power_of_2(group))


def _grid(x: Rows, groups: int) -> tuple[int, int]:
    group = x.shape[2] // groups
    return len(x), triton.cdiv(groups, _slab(group) // group)
