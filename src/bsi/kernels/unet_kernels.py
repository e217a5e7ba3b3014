"""Triton kernels for a U-Net, on images given as rows of channels, one row for each pixel.

    group_norm_act            y = dropout(act(GroupNorm(x + shift))),   act the identity or SiLU
    residual_sum              y = x + branch + bias
    residual_sum_with_skip    y = x W_x' + skip W_s' + branch + bias
    pixel_sums                the sum of each channel over the pixels of an image

A program of group_norm_act handles some complete groups of channels (a slab) of one image, so that it can compute
their norm by itself. It reads the pixels twice: first for the sums, then in reverse order for the result, since the
pixels read last are still in the cache. Moments are computed as in `unet.GroupNorm`, in float32: first for each
channel, relative to its first pixel (to avoid cancellation), then for the groups. The gradient is

    z = xn w + b,  xn = (x + shift - mean) rstd,  d = act'(z) dropout(dy)
    dx = rstd (w d - A - xn B),                   A, B = sums of w d and of w d xn over the group / its size

and all other gradients follow from the sums of d and d xn over each channel: these are the gradients of b and w, and
that of shift (the sum of dx) also needs the mean of xn. Gradients that reach x on other paths are added before dx is
written, and the first of them is also summed, for a bias. Dropout masks are those of backbones/layers.py; they are
recomputed and never stored.

The cost is memory traffic and arithmetic: about 15 instructions per element forward and 35 backward, and twice as many
with a dropout mask. So z, xn and dx are expressed as linear functions of x, one instruction each, and SiLU uses the
hardware's approximate 2^x and 1/x.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from bsi.backbones.layers import NORM_EPS, PerSample, Seed
from bsi.backbones.unet import Rows
from bsi.kernels.dit_kernels import PerChannel, dropout_keeps, mask_constants

SLAB = 64  # channels of a program; larger if a group has more
REGISTERS = 128  # maximum per thread


@triton.jit
@no_type_check
def _over_groups(values, GROUP: tl.constexpr, SLAB: tl.constexpr):
    """The sum over each column's group."""
    if SLAB // GROUP == 1:
        total = tl.sum(tl.where(tl.arange(0, SLAB) < GROUP, values, 0.0), axis=0)
        sums = tl.zeros([SLAB], tl.float32) + total
    elif SLAB % GROUP == 0:
        each = tl.sum(tl.reshape(values, [SLAB // GROUP, GROUP]), axis=1)
        sums = tl.reshape(tl.broadcast_to(each[:, None], [SLAB // GROUP, GROUP]), [SLAB])
    else:
        group = tl.arange(0, SLAB) // GROUP
        sums = tl.sum(tl.where(group[:, None] == group[None, :], values[None, :], 0.0), axis=1)
    return sums


@triton.jit
@no_type_check
def _sigmoid(z, FAST: tl.constexpr):
    """With FAST, by the hardware's approximate 2^x and 1/x: accurate to 1e-6, with a third of the instructions."""
    if FAST:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3f800000; rcp.approx.ftz.f32 $0, e; }",
            "=r,r",
            [z * -1.4426950408889634],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.sigmoid(z)


@triton.jit
@no_type_check
def _own(channels, GROUP: tl.constexpr, SLAB: tl.constexpr):
    """A program's image, its channels, and a mask of the channels that exist.

    Programs start with the last image, which is still in the cache after the preceding convolution. Images and slabs
    share one axis of the grid: its other axes are limited to 65535, which batches of small images can exceed.
    """
    whole: tl.constexpr = SLAB // GROUP * GROUP
    slabs = tl.cdiv(channels, whole)
    image = (tl.num_programs(0) - 1 - tl.program_id(0)) // slabs
    column = tl.arange(0, SLAB)
    channel = tl.program_id(0) % slabs * whole + column
    return image.to(tl.int64), channel, (column < whole) & (channel < channels)


@triton.jit
@no_type_check
def _tile(start, pixels, channels, channel, inside, TILE: tl.constexpr, EVEN: tl.constexpr):
    """Pixels from `start` on: their indices, their places in an image of `channels`, and a mask of those that exist."""
    pixel = (start + tl.arange(0, TILE))[:, None]
    return pixel, pixel * channels + channel[None, :], EVEN | ((pixel < pixels) & inside[None, :])


@triton.jit
@no_type_check
def _group_norm_act(
    x, weight, bias, shift, seed, y, mean, rstd, own,
    pixels, channels, stride_y, stride_shift, eps,
    GROUP: tl.constexpr, ACT: tl.constexpr, SHIFT: tl.constexpr,
    DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr, WEYL_0: tl.constexpr, WEYL_1: tl.constexpr,
    SLAB: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    sample, channel, inside = _own(channels, GROUP, SLAB)
    first = sample * pixels
    x += first * channels  # so that indices within one image fit 32 bits
    y += first * stride_y
    pivot = tl.load(x + channel, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    added = tl.zeros([SLAB], tl.float32)
    if SHIFT:
        added = tl.load(shift + sample * stride_shift + channel, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([TILE, SLAB], tl.float32)
    squares = tl.zeros([TILE, SLAB], tl.float32)
    for i in range(0, pixels, TILE):
        _, place, here = _tile(i, pixels, channels, channel, inside, TILE, EVEN)
        value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
        value = tl.where(here, value - pivot[None, :], 0.0)
        sums += value
        squares += value * value
    off = tl.sum(sums, axis=0) / pixels
    spread = tl.sum(squares, axis=0) / pixels - off * off
    center = pivot + off
    tl.store(own + sample * channels + channel, center, mask=inside)
    center += added
    middle = _over_groups(center, GROUP, SLAB) / GROUP
    spread += (center - middle) * (center - middle)
    inverse = tl.rsqrt(_over_groups(spread, GROUP, SLAB) / GROUP + eps)
    middle -= added  # of x itself
    tl.store(mean + sample * channels + channel, middle, mask=inside)
    tl.store(rstd + sample * channels + channel, inverse, mask=inside)
    scale *= inverse
    offset -= middle * scale
    last = (pixels - 1) // TILE * TILE
    for i in range(0, pixels, TILE):
        # In reverse order: the pixels read last are still in the cache.
        pixel, place, here = _tile(last - i, pixels, channels, channel, inside, TILE, EVEN)
        value = tl.load(x + place, mask=here, other=0.0, eviction_policy="evict_first").to(tl.float32)
        z = value * scale[None, :] + offset[None, :]
        if ACT:
            z = z * _sigmoid(z, FAST)
        if DROPOUT > 0.0:
            kept = dropout_keeps((first * channels).to(tl.int32) + place, seed, THRESHOLD, WEYL_0, WEYL_1)
            z = tl.where(kept, z * (1.0 / (1.0 - DROPOUT)), 0.0)
        tl.store(y + pixel * stride_y + channel[None, :], z, mask=here)


@triton.jit
@no_type_check
def _gradient(
    value, dy, place, scale, offset, seed,
    ACT: tl.constexpr, DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr, WEYL_0: tl.constexpr, WEYL_1: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """(1 - dropout) d at some pixels; 0 outside the image, where dy is 0."""
    d = dy.to(tl.float32)
    if DROPOUT > 0.0:
        d = tl.where(dropout_keeps(place, seed, THRESHOLD, WEYL_0, WEYL_1), d, 0.0)
    if ACT:
        z = value * scale[None, :] + offset[None, :]
        s = _sigmoid(z, FAST)
        d *= (z - z * s) * s + s
    return d


@triton.jit
@no_type_check
def _group_norm_act_backward(
    dy, x, mean, rstd, own, weight, bias, seed, add, more, dx, sums,
    pixels, channels, stride_dy, stride_add, stride_sums, stride_row,
    GROUP: tl.constexpr, ACT: tl.constexpr, ADD: tl.constexpr, MORE: tl.constexpr,
    DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr, WEYL_0: tl.constexpr, WEYL_1: tl.constexpr,
    SLAB: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    sample, channel, inside = _own(channels, GROUP, SLAB)
    first = sample * pixels
    x += first * channels
    dx += first * channels
    add += first * stride_add
    more += first * channels
    dy += first * stride_dy
    start = (first * channels).to(tl.int32)
    middle = tl.load(mean + sample * channels + channel, mask=inside, other=0.0)
    inverse = tl.load(rstd + sample * channels + channel, mask=inside, other=0.0)
    scale = inverse * tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32) - middle * scale
    own_centered = tl.load(own + sample * channels + channel, mask=inside, other=0.0) - middle
    sum_d = tl.zeros([TILE, SLAB], tl.float32)
    sum_dx = tl.zeros([TILE, SLAB], tl.float32)
    for i in range(0, pixels, TILE):
        pixel, place, here = _tile(i, pixels, channels, channel, inside, TILE, EVEN)
        value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
        d = tl.load(dy + pixel * stride_dy + channel[None, :], mask=here, other=0.0)
        d = _gradient(
            value, d, start + place, scale, offset, seed, ACT, DROPOUT, THRESHOLD, WEYL_0, WEYL_1, FAST
        )  # fmt: skip
        sum_d += d
        sum_dx += d * value
    total_d = tl.sum(sum_d, axis=0) * (1.0 / (1.0 - DROPOUT))
    total_dx = (tl.sum(sum_dx, axis=0) * (1.0 / (1.0 - DROPOUT)) - middle * total_d) * inverse
    level = _over_groups(scale * total_d, GROUP, SLAB) / (GROUP * pixels)  # A and B, and one factor rstd of dx
    slope = _over_groups(scale * total_dx, GROUP, SLAB) / (GROUP * pixels) * inverse
    d_shift = scale * total_d - pixels * (level + slope * own_centered)
    level -= slope * middle
    factor = scale * (1.0 / (1.0 - DROPOUT))
    sum_add = tl.zeros([TILE, SLAB], tl.float32)
    last = (pixels - 1) // TILE * TILE
    for i in range(0, pixels, TILE):
        pixel, place, here = _tile(last - i, pixels, channels, channel, inside, TILE, EVEN)
        value = tl.load(x + place, mask=here, other=0.0, eviction_policy="evict_first").to(tl.float32)
        d = tl.load(dy + pixel * stride_dy + channel[None, :], mask=here, other=0.0, eviction_policy="evict_first")
        d = _gradient(
            value, d, start + place, scale, offset, seed, ACT, DROPOUT, THRESHOLD, WEYL_0, WEYL_1, FAST
        )  # fmt: skip
        d = factor[None, :] * d - (value * slope[None, :] + level[None, :])
        if ADD:
            place_add = pixel * stride_add + channel[None, :]
            other = tl.load(add + place_add, mask=here, other=0.0, eviction_policy="evict_first").to(tl.float32)
            sum_add += other
            d += other
        if MORE:
            d += tl.load(more + place, mask=here, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(dx + place, d, mask=here)
    base = sums + sample * stride_sums + channel
    tl.store(base, total_dx, mask=inside)
    tl.store(base + stride_row, total_d, mask=inside)
    tl.store(base + 2 * stride_row, d_shift, mask=inside)
    tl.store(base + 3 * stride_row, tl.sum(sum_add, axis=0), mask=inside)


@triton.jit
@no_type_check
def _residual_sum(x, branch, bias, y, count, channels, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = place < count
    value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
    value += tl.load(branch + place, mask=here, other=0.0).to(tl.float32)
    value += tl.load(bias + place % channels, mask=here, other=0.0).to(tl.float32)
    tl.store(y + place, value, mask=here)


@triton.jit
@no_type_check
def _residual_sum_with_skip(
    x, skip, weight, branch, bias, y, rows, channels,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, channels, DEPTH):
        depth = k + tl.arange(0, DEPTH)
        place = row[:, None] * channels + depth[None, :]
        here = (row < rows)[:, None] & (depth < channels)[None, :]
        place_w = column[None, :] * (2 * channels) + depth[:, None]
        here_w = (column < channels)[None, :] & (depth < channels)[:, None]
        a, b = tl.load(x + place, mask=here, other=0.0), tl.load(weight + place_w, mask=here_w, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        a, b = tl.load(skip + place, mask=here, other=0.0), tl.load(weight + channels + place_w, mask=here_w, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    place = row[:, None] * channels + column[None, :]
    here = (row < rows)[:, None] & (column < channels)[None, :]
    total += tl.load(branch + place, mask=here, other=0.0).to(tl.float32)
    total += tl.load(bias + column, mask=column < channels, other=0.0).to(tl.float32)[None, :]
    tl.store(y + place, total, mask=here)


@triton.jit
@no_type_check
def _pixel_sums(x, sums, pixels, channels, SLAB: tl.constexpr, TILE: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * SLAB + tl.arange(0, SLAB)
    x += sample * pixels * channels
    total = tl.zeros([TILE, SLAB], tl.float32)
    for i in range(0, pixels, TILE):
        pixel = i + tl.arange(0, TILE)
        here = (pixel < pixels)[:, None] & (channel < channels)[None, :]
        total += tl.load(x + pixel[:, None] * channels + channel[None, :], mask=here, other=0.0).to(tl.float32)
    tl.store(sums + sample * channels + channel, tl.sum(total, axis=0), mask=channel < channels)


class GroupMoments(NamedTuple):
    """For each image and channel: the group's mean minus the shift, 1 / the group's deviation, the channel's mean."""

    mean: PerSample
    rstd: PerSample
    own: PerSample


def group_norm_act(
    x: Rows, weight: PerChannel, bias: PerChannel, groups: int, y: Rows, act: bool = True,
    shift: PerSample | None = None, dropout: float = 0.0, seed: Seed | None = None,
) -> GroupMoments:  # fmt: skip
    """Write dropout(act(norm of x + shift)) to y, whose rows may be slices of longer rows. Return the moments."""
    batch, pixels, channels = x.shape
    moments = GroupMoments(*(torch.empty(batch, channels, dtype=torch.float32, device=x.device) for _ in range(3)))
    grid, cut = _cut(x, groups)
    _group_norm_act[grid](
        x, weight, bias, weight if shift is None else shift, x if seed is None else seed, y, *moments,
        pixels, channels, _row(y), 0 if shift is None else shift.stride(0), NORM_EPS,
        GROUP=channels // groups, ACT=act, SHIFT=shift is not None, **mask_constants(dropout), **cut,
    )  # fmt: skip
    return moments


def group_norm_act_backward(
    dy: Rows, x: Rows, moments: GroupMoments, weight: PerChannel, bias: PerChannel, groups: int,
    sums: Float[Tensor, "batch 4 channels"], act: bool = True, dropout: float = 0.0, seed: Seed | None = None,
    add: Rows | None = None, more: Rows | None = None,
) -> Rows:  # fmt: skip
    """The gradient of x from that of y, plus `add` and `more`.

    Each image's part of the gradients of weight, bias and shift, and the sum of `add` over its pixels, are written to
    `sums`. The rows of `dy`, `add` and `sums` may be slices of longer rows.
    """
    _, pixels, channels = x.shape
    dx = torch.empty_like(x)
    grid, cut = _cut(x, groups)
    _group_norm_act_backward[grid](
        dy, x, *moments, weight, bias,
        x if seed is None else seed, x if add is None else add, x if more is None else more, dx, sums,
        pixels, channels, _row(dy), 0 if add is None else _row(add), sums.stride(0), sums.stride(1),
        GROUP=channels // groups, ACT=act, ADD=add is not None, MORE=more is not None, **mask_constants(dropout), **cut,
    )  # fmt: skip
    return dx


def _row(rows: Rows) -> int:
    """The stride between rows. For images of a single pixel it is the stride between images, since the stride of an
    axis of size 1 is arbitrary even if a tensor is contiguous."""
    return rows.stride(1 if rows.shape[1] > 1 else 0)


def _cut(x: Rows, groups: int) -> tuple[tuple[int], dict[str, int | bool]]:
    """The grid, a program for each image and slab, and its launch parameters; EVEN if the tiles cover images exactly.

    For a large image, one program fills a multiprocessor, since the data of several would exceed the cache. For small
    images, programs have half as many warps and two run at a time, so that one computes while the other waits for
    memory.
    """
    batch, pixels, channels = x.shape
    tile, warps = (64, 16) if pixels >= 1024 else (32, 8)
    group = channels // groups
    slab = max(SLAB, triton.next_power_of_2(group))  # at least one complete group
    tile = max(1, tile * SLAB // slab)
    even = pixels % tile == 0 and channels % slab == 0 and slab % group == 0
    fast = x.dtype == torch.bfloat16
    cut = {"SLAB": slab, "TILE": tile, "EVEN": even, "FAST": fast, "num_warps": warps, "maxnreg": REGISTERS}
    return (batch * triton.cdiv(groups, slab // group),), cut


def residual_sum(x: Rows, branch: Rows, bias: PerChannel) -> Rows:
    """x + branch + bias."""
    y = torch.empty_like(x)
    _residual_sum[(triton.cdiv(x.numel(), 2048),)](x, branch, bias, y, x.numel(), x.shape[2], BLOCK=2048, num_warps=8)
    return y


def residual_sum_with_skip(
    x: Rows, skip: Rows, weight: Float[Tensor, "channels twice_channels"], branch: Rows, bias: PerChannel
) -> Rows:
    """x W_x' + skip W_s' + branch + bias, with both weights concatenated in `weight`."""
    y, channels = torch.empty_like(x), x.shape[2]
    rows = x.numel() // channels
    columns, depth = (max(16, min(most, triton.next_power_of_2(channels))) for most in (128, 32))
    _residual_sum_with_skip[triton.cdiv(rows, 128), triton.cdiv(channels, columns)](
        x, skip, weight, branch, bias, y, rows, channels,
        ROWS=128, COLUMNS=columns, DEPTH=depth, num_warps=4, num_stages=3,
    )  # fmt: skip
    return y


def pixel_sums(x: Rows) -> Float[Tensor, "batch channels"]:
    batch, pixels, channels = x.shape
    sums = torch.empty(batch, channels, dtype=torch.float32, device=x.device)
    _pixel_sums[batch, triton.cdiv(channels, 64)](x, sums, pixels, channels, SLAB=64, TILE=128, num_warps=8)
    return sums
