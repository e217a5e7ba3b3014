"""The normal random numbers of rng.py in one Triton kernel; torch.compile would be slow for so many operations.

A program computes 4 * QUADS elements of one sample. Philox is Triton's own implementation. Its words are converted to
Normals as in rng.py and summed in the order of the terms, so that the result does not depend on the batch.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

QUADS = 256


@triton.jit
@no_type_check
def _uniform(word):
    return (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32


@triton.jit
@no_type_check
def _normal_pair(radius_word, angle_word):
    radius = tl.sqrt_rn(-2 * tl.log(_uniform(radius_word)))
    angle = 6.283185307179586 * _uniform(angle_word)
    return tl.cos(angle) * radius, tl.sin(angle) * radius


@triton.jit(do_not_specialize=["terms"])
@no_type_check
def _weighted_normals(seed, samples, places, weights, out, n, terms, QUADS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    quad = tl.program_id(1) * QUADS + tl.arange(0, QUADS)
    sample = tl.load(samples + row)
    key = tl.load(seed) + (tl.load(seed + 1) << 32)
    nothing = tl.zeros([QUADS], tl.uint32)
    low, high = nothing + sample.to(tl.uint32), nothing + (sample >> 32).to(tl.uint32)
    a, b, c, d = nothing.to(tl.float32), nothing.to(tl.float32), nothing.to(tl.float32), nothing.to(tl.float32)
    for i in range(terms):
        weight = tl.load(weights + i)
        place = nothing + tl.load(places + i).to(tl.uint32)
        words = tl.philox(key, low, quad.to(tl.uint32), high, place)
        first, second = _normal_pair(words[0], words[1])
        third, fourth = _normal_pair(words[2], words[3])
        a, b, c, d = a + weight * first, b + weight * second, c + weight * third, d + weight * fourth
    four = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    place_out = tl.program_id(1) * (4 * QUADS) + tl.arange(0, 4 * QUADS)
    tl.store(out + row * n + place_out, four, mask=place_out < n)


def weighted_normals(
    seed: Int[Tensor, "2"], samples: Int[Tensor, " batch"], places: Int[Tensor, " terms"],
    weights: Float[Tensor, " terms"], n: int,
) -> Float[Tensor, "batch n"]:  # fmt: skip
    """`rng.weighted_normals` in float32."""
    out = torch.empty(len(samples), n, dtype=torch.float32, device=samples.device)
    grid = (len(samples), triton.cdiv(n, 4 * QUADS))
    if out.numel():
        with torch.cuda.device_of(out):
            _weighted_normals[grid](
                seed, samples.contiguous(), places, weights, out, n, len(places), QUADS=QUADS, num_warps=4
            )
    return out
