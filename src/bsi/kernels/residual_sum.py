"""Triton kernels for sums of a U-Net's images, given as rows of channels, one row for each pixel.

residual_sum              y = x + branch + bias
residual_sum_with_skip    y = x W_x' + skip W_s' + branch + bias
pixel_sums                the sum of each channel over the pixels of an image
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor


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


Rows = Float[Tensor, "batch pixels channels"]
PerChannel = Float[Tensor, " channels"]


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
