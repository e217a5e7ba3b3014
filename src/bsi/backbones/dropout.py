"""Dropout whose mask is a function of a seed: keep(i) = hash(i; seed) >= threshold for the i-th element.

`torch.nn.functional.dropout` draws from a generator inside the network. Its mask must then be stored for the backward
(one byte per element: with bfloat16, half of what it masks), checkpointing must save and restore generators, and the
compiled form draws other numbers than the eager one. Here the seeds are drawn once per pass, from torch's generator,
and the mask is pointwise arithmetic that the compiler computes again in the backward: nothing is stored, and eager,
compiled, fused, checkpointed and channels-last forms drop the same elements.
"""

import torch
from jaxtyping import Float, Int32
from torch import Tensor

WEYL = 0x9E3779B9 - 2**32, 0x7FEB352D  # odd, as signed 32-bit integers


def draw_seeds(count: int, device: torch.device) -> Int32[Tensor, "count 2"]:
    """Seeds for `count` masks, from torch's generator on that device."""
    return torch.randint(-(2**31), 2**31, (count, 2), dtype=torch.int32, device=device)


def dropout(x: Float[Tensor, "..."], p: float, seed: Int32[Tensor, " 2"]) -> Float[Tensor, "..."]:
    """x / (1 - p) where the mask keeps it, else 0."""
    index = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    threshold = round(p * 2**32) - 2**31
    return torch.where(_hash(index, seed) >= threshold, x * (1 / (1 - p)), 0.0)


def _hash(index: Int32[Tensor, "..."], seed: Int32[Tensor, " 2"]) -> Int32[Tensor, "..."]:
    """Three rounds of Widynski's Squares (square, add, swap the halves) in 32-bit integers that wrap around.

    Only operations on the compiler's list of what is cheap to compute again: it has shifts, sums and products, but no
    xor.
    """
    # The seed is added first: a product of the index alone is an index expression to the compiler, which folds the
    # factors of shapes into it until they no longer fit 32 bits.
    a, b = (index + seed[0]) * WEYL[0], (index + seed[1]) * WEYL[1]
    h = _swap(a * a + b)
    h = _swap(h * h + a)
    return h * h + b


def _swap(h: Int32[Tensor, "..."]) -> Int32[Tensor, "..."]:
    return (h >> 16) + (h << 16)
