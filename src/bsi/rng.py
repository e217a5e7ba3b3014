"""Noise that depends on (seed, sample, draw) alone: not on batch, ranks or device.

Philox-4x32-10 (Salmon et al., 2011) is a function from a counter to random bits, so that sample 17 of seed 0 can be
drawn by itself. Box and Muller turn its bits into Normals. Here it is in plain tensor operations; on a GPU that has
Triton, one kernel does it all (noise_kernels.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bsi.devices import compiles

__all__ = ["Noise", "SeededNoise", "normals", "philox", "seed_words", "standard_normal", "weighted_normals"]

# noise(start, end) -> standard noise: the increment of a Brownian path between two informations Lambda, over its
# standard deviation. The prior's is drawn from 0 to the first information, then one for each step.
Noise = Callable[[float, float], Float[Tensor, "batch *data"]]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = Int[Tensor, "*shape"]
Key = int | Int[Tensor, ""]
Seed = Int[Tensor, "2"]  # the low and the high 32 bits of one, on the device


def _multiply(word: Words, multiplier: int) -> tuple[Words, Words]:
    """High and low halves of the 64-bit product of two 32-bit words, held in int64.

    The product with multiplier - 2^32 fits into int64, and word 2^32 is added to its high half: an overflow would be
    undefined behavior to a C++ compiler, which then drops a mask that is needed.
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
    """Four standard Normals for each counter, by Box and Muller, in float32 or wider."""
    wide = dtype if dtype == torch.float64 else torch.float32
    uniform = [(word.to(wide) + 0.5) * 2.0**-32 for word in philox(counter, key)]
    radius = [torch.sqrt(-2 * torch.log(uniform[0])), torch.sqrt(-2 * torch.log(uniform[2]))]
    angle = [2 * math.pi * uniform[1], 2 * math.pi * uniform[3]]
    return [f(a) * r for r, a in zip(radius, angle, strict=True) for f in (torch.cos, torch.sin)]


def seed_words(seed: int, device: torch.device) -> Seed:
    """A seed as Philox takes it, without waiting for the device."""
    return torch.tensor([seed & _MASK, (seed >> 32) & _MASK]).to(device, non_blocking=True)


def weighted_normals(
    seed: Seed,
    samples: Int[Tensor, " batch"],
    places: Int[Tensor, " terms"],
    weights: Float[Tensor, " terms"],
    n: int,
) -> Float[Tensor, "batch n"]:
    """For each sample and each of its n elements the sum of weights[i] times the Normal of places[i]."""
    samples = samples.long()  # in fewer bits there is no high word to shift down, and the products overflow
    if weights.dtype == torch.float32 and compiles(samples.device):
        from bsi.kernels import philox as noise_kernels  # which needs Triton, and only some machines have it

        return noise_kernels.weighted_normals(seed, samples, places, weights, n)
    block, sample, place = torch.broadcast_tensors(
        torch.arange((n + 3) // 4, device=samples.device)[None, None, :], samples[None, :, None], places[:, None, None]
    )
    counter = (sample & _MASK, block, (sample >> 32) & _MASK, place)
    drawn = normals(counter, (seed[0], seed[1]), weights.dtype)
    # One after the other: sum(0) may add in an order that depends on the batch, and the last bit with it.
    each = [functools.reduce(torch.add, [w * z for w, z in zip(weights, one, strict=True)]) for one in drawn]
    return torch.stack(each, dim=-1).flatten(1)[:, :n]


def standard_normal(
    seed: int | Seed,
    samples: Int[Tensor, " batch"],
    draw: int,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "batch *data"]:
    """N(0, 1) noise of `shape` for each of `samples`: the `draw`-th that sample takes under this seed."""
    device, wide = samples.device, torch.promote_types(dtype, torch.float32)
    words = seed_words(seed, device) if isinstance(seed, int) else seed
    places, weights = torch.full((1,), draw, device=device), torch.ones(1, dtype=wide, device=device)
    drawn = weighted_normals(words, samples, places, weights, math.prod(shape))
    return drawn.reshape(len(samples), *shape).to(dtype)


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
