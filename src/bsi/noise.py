"""Noise that depends on (seed, sample, draw) alone: not on batch, ranks or device.

Philox-4x32-10 (Salmon et al., 2011) is a function from a counter to random bits, so that sample 17 of seed 0 can be
drawn by itself. Here it is in plain tensor operations, which compile to one kernel. Box and Muller turn its bits into
Normals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Noise", "SeededNoise", "normals", "philox", "standard_normal"]

# noise(start, end) -> standard noise: the increment of a Brownian path between two informations Lambda, over its
# standard deviation. The prior's is drawn from 0 to the first information, then one for each step.
Noise = Callable[[float, float], Float[Tensor, "batch *data"]]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = Int[Tensor, "*shape"]
Key = int | Int[Tensor, ""]


def _multiply(word: Words, multiplier: int) -> tuple[Words, Words]:
    """High and low halves of the 64-bit product of two 32-bit words, held in int64.

    The product with multiplier - 2^32 fits into int64, and word 2^32 is added to its high half: an overflow would be
    undefined behaviour to a C++ compiler, which then drops a mask that is needed.
    """
    product = word * (multiplier - (1 << 32))
    return (product >> 32) + word, product & _MASK


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Key, Key]) -> tuple[Words, Words, Words, Words]:
    """Four random 32-bit words for each counter, as int64."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high_a, low_a = _multiply(a, _MULTIPLIERS[0])
        high_c, low_c = _multiply(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ k0, low_c, high_a ^ d ^ k1, low_a
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return a, b, c, d


def normals(
    counter: tuple[Words, Words, Words, Words], key: tuple[Key, Key], dtype: torch.dtype
) -> list[Float[Tensor, "*shape"]]:
    """Four standard Normals for each counter, by Box and Muller, in float32 or wider.

    Four arrays and not one: a compiled kernel would make all four of them for each element of one.
    """
    wide = dtype if dtype == torch.float64 else torch.float32
    uniform = [(word.to(wide) + 0.5) * 2.0**-32 for word in philox(counter, key)]
    radius = [torch.sqrt(-2 * torch.log(uniform[0])), torch.sqrt(-2 * torch.log(uniform[2]))]
    angle = [2 * math.pi * uniform[1], 2 * math.pi * uniform[3]]
    return [f(a) * r for r, a in zip(radius, angle, strict=True) for f in (torch.cos, torch.sin)]


def standard_normal(
    seed: Key,
    samples: Int[Tensor, " batch"],
    draw: int,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "batch *data"]:
    """N(0, 1) noise of `shape` for each of `samples`: the `draw`-th that sample takes under this seed.

    Compiled, it wants the seed as a tensor: numbers are written into a kernel, each new one into a new kernel.
    """
    n = math.prod(shape)
    block, sample = torch.broadcast_tensors(
        torch.arange((n + 3) // 4, device=samples.device)[None, :], samples[:, None]
    )
    # The words that Philox multiplies first are the sample's: a product of an index alone is an index expression to the
    # compiler for GPUs, which then does not fit 32 bits.
    counter = (sample & _MASK, block, (sample >> 32) & _MASK, torch.full_like(block, draw))
    drawn = normals(counter, (seed & _MASK, (seed >> 32) & _MASK), dtype)
    return torch.stack(drawn, dim=-1).flatten(1)[:, :n].reshape(len(samples), *shape).to(dtype)


@dataclass
class SeededNoise:
    """Independent noise for each step: `Noise` for the given samples of one seed."""

    seed: int
    samples: Int[Tensor, " batch"]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    draws: int = field(default=0, init=False)

    def __call__(self, start: float, end: float) -> Float[Tensor, "batch *data"]:
        self.draws += 1
        return standard_normal(self.seed, self.samples, self.draws - 1, self.shape, self.dtype)
