"""Counter-based random numbers: every draw is a function of a seed and of its purpose, without any state.

A draw does not depend on the batch, the number of ranks, the order of computation or interruptions. The streams:

    purpose                       function                            generator
    noise of samples, data        standard_normal(seed, sample, draw)     Philox, Box and Muller
    Brownian paths                weighted_normals (brownian.py)          Philox, Box and Muller
    levels of the bound           uniform(seed, block, replicate, round)  Philox
    order of the training data    sample_ids(seed, n, position)           a keyed permutation (Feistel, splitmix64)
    random subsets                subset(n, count)                        the start of such a permutation
    flips, hidden labels, splits  coins, uniforms(seed, position)         splitmix64
    dropout                       backbones: dropout(x, p, seed)          Squares, in 32 bits that a compiler can redo
    seeds for all of these        derive(seed, purpose, *numbers)         SHA-256

The trainer uses torch's generator only for initial weights and for the seeds of dropout masks, and seeds it with
`derive` before each piece. `Model.forward` and `bsi.variance.fit_variance` draw from torch's generators.

Philox-4x32-10 (Salmon et al., 2011) is a function from a counter to random bits, so that sample 17 of seed 0 can be
drawn by itself. Here it is written in tensor operations; on a GPU with Triton one kernel does the same (kernels/).
Importing this file imports no torch.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Float64, Int, Int64, UInt64

from bsi.devices import compiles
from bsi.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    Tensor = Any


def derive(seed: int, purpose: str, *numbers: int) -> int:
    """A 63-bit seed for one purpose and its numbers, independent of all other seeds."""
    text = ":".join(map(str, ("bsi", seed, purpose, *numbers)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


# noise(start, end) -> standard noise: the increment of a Brownian path between two informations Lambda, over its
# standard deviation. The prior's is drawn from 0 to the first information, then one for each step.
Noise = Callable[[float, float], Float[Tensor, "batch *data"]]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

Words = Int[Tensor, "*shape"]
Counter = tuple[Words, Words, Words, Words]
Key = int | Int[Tensor, ""]
Ids = Int[Tensor, " batch"]
Seed = Int[Tensor, "2"]  # the low and the high 32 bits of a seed, on the device


def _multiply(word: Words, multiplier: int) -> tuple[Words, Words]:
    """High and low halves of the 64-bit product of two 32-bit words, held in int64.

    The product with multiplier - 2^32 fits into int64; `word` is then added to its high half. An overflow would be
    undefined behavior in C++, and the compiler would remove a mask that is needed.
    """
    product = word * (multiplier - (1 << 32))
    return (product >> 32) + word, product & _MASK


def philox(counter: Counter, key: tuple[Key, Key]) -> Counter:
    """Four random 32-bit words for each counter, as int64."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        high_a, low_a = _multiply(a, _MULTIPLIERS[0])
        high_c, low_c = _multiply(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ k0, low_c, high_a ^ d ^ k1, low_a
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return a, b, c, d


def normals(counter: Counter, key: tuple[Key, Key], dtype: torch.dtype) -> list[Float[Tensor, "*shape"]]:
    """Four standard Normals for each counter, by Box and Muller, in float32 or wider."""
    import torch

    wide = dtype if dtype == torch.float64 else torch.float32
    uniform = [(word.to(wide) + 0.5) * 2.0**-32 for word in philox(counter, key)]
    radius = [torch.sqrt(-2 * torch.log(uniform[0])), torch.sqrt(-2 * torch.log(uniform[2]))]
    angle = [2 * math.pi * uniform[1], 2 * math.pi * uniform[3]]
    return [f(a) * r for r, a in zip(radius, angle, strict=True) for f in (torch.cos, torch.sin)]


def uniform(seed: int, block: Ids, replicate: int, turn: int) -> Float64[Tensor, " batch"]:
    """U(0, 1) with 53 bits for each block, replicate and round."""
    import torch

    rest = (torch.full_like(block, replicate), torch.full_like(block, turn), torch.zeros_like(block))
    words = philox((block, *rest), (seed & _MASK, (seed >> 32) & _MASK))
    return ((words[0] << 21) + (words[1] >> 11)).double() * 2.0**-53


def seed_words(seed: int, device: torch.device) -> Seed:
    """A seed in the form that Philox takes, copied to the device asynchronously."""
    import torch

    return torch.tensor([seed & _MASK, (seed >> 32) & _MASK]).to(device, non_blocking=True)


def weighted_normals(
    seed: Seed, samples: Int[Tensor, " batch"], places: Int[Tensor, " terms"], weights: Float[Tensor, " terms"], n: int
) -> Float[Tensor, "batch n"]:
    """For each sample and each of its n elements the sum of weights[i] times the Normal of places[i]."""
    import torch

    samples = samples.long()  # narrower integers have no high word, and the products would overflow
    if samples.is_cuda and weights.dtype == torch.float32 and compiles(samples.device):
        from bsi.kernels import philox as kernel  # needs Triton, which only some machines have

        return kernel.weighted_normals(seed, samples, places, weights, n)
    block, sample, place = torch.broadcast_tensors(
        torch.arange((n + 3) // 4, device=samples.device)[None, None, :], samples[None, :, None], places[:, None, None]
    )
    counter = (sample & _MASK, block, (sample >> 32) & _MASK, place)
    drawn = normals(counter, (seed[0], seed[1]), weights.dtype)
    # Added in a fixed order: the order in sum(0), and with it the last bit, may depend on the batch.
    each = [functools.reduce(torch.add, [w * z for w, z in zip(weights, one, strict=True)]) for one in drawn]
    return torch.stack(each, dim=-1).flatten(1)[:, :n]


def standard_normal(
    seed: int | Seed, samples: Ids, draw: int, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> Float[Tensor, "batch *data"]:
    """N(0, 1) noise of `shape` for each of `samples`: draw number `draw` under this seed. float32 by default."""
    import torch

    dtype = torch.float32 if dtype is None else dtype
    device, wide = samples.device, torch.promote_types(dtype, torch.float32)
    words = seed_words(seed, device) if isinstance(seed, int) else seed
    places, weights = torch.full((1,), draw, device=device), torch.ones(1, dtype=wide, device=device)
    drawn = weighted_normals(words, samples, places, weights, math.prod(shape))
    return drawn.reshape(len(samples), *shape).to(dtype)


@dataclass
class SeededNoise:
    """Independent noise for each step: `Noise` for the given samples of one seed."""

    seed: int
    samples: Ids
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    draws: int = field(default=0, init=False)

    def __call__(self, start: float, end: float) -> Float[Tensor, "batch *data"]:
        self.draws += 1
        return standard_normal(self.seed, self.samples, self.draws - 1, self.shape, self.dtype)


_GOLDEN = 0x9E3779B97F4A7C15
_FEISTEL_ROUNDS = 24  # with 12, orders of five samples were measurably not uniform; with 20, they were


def sample_ids(seed: int, n: int, start: int, count: int) -> Int64[np.ndarray, " count"]:
    """The samples at positions start .. start + count - 1 of a training stream over n samples.

    Position p belongs to epoch p // n, and an epoch is a permutation of the n samples keyed by (seed, epoch). It is a
    Feistel network on Z_a x Z_b, a b >= n, a ~ sqrt n, whose rounds add a hash of one half to the other; a value that
    falls outside 0 .. n - 1 is permuted again until it falls inside (cycle walking), which keeps it a bijection.
    """
    if not 1 <= n < 2**62:
        raise UsageError(f"an order needs 1 to 2**62 - 1 samples, got n={n}")
    if start < 0 or count < 0 or start + count >= 2**62:
        raise UsageError(f"positions of a stream lie in 0 .. 2**62 - 1, got start={start}, count={count}")
    epoch, offset = np.divmod(_positions(start, count), np.uint64(n))
    keys = _hash(_key(seed, purpose=1) + epoch * np.uint64(_GOLDEN))
    return _permute(offset, keys, n).astype(np.int64)


def subset(n: int, count: int, seed: int = 2**63) -> Int64[np.ndarray, " chosen"]:
    """min(count, n) random samples of n in increasing order. The default seed is larger than that of any run."""
    return np.sort(sample_ids(seed, n, 0, min(count, n)))


def uniforms(seed: int, start: int, count: int) -> Float64[np.ndarray, " count"]:
    """One number in [0, 1) for each position start .. start + count - 1 of a stream, a multiple of 2^-53."""
    bits = _hash(_key(seed, purpose=2) + _positions(start, count) * np.uint64(_GOLDEN)) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def coins(seed: int, start: int, count: int) -> Bool[np.ndarray, " count"]:
    """One fair coin for each position of a stream: True where the image is flipped."""
    return uniforms(seed, start, count) >= 0.5


def _positions(start: int, count: int) -> UInt64[np.ndarray, " count"]:
    return np.uint64(start) + np.arange(count, dtype=np.uint64)


def _hash(x: UInt64[np.ndarray, "*shape"]) -> UInt64[np.ndarray, "*shape"]:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014): every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _key(seed: int, purpose: int) -> UInt64[np.ndarray, "1"]:
    """A 64-bit key, different for every seed and for every purpose of the same seed."""
    if not 0 <= seed < 2**64:
        raise UsageError(f"a seed lies in 0 .. 2**64 - 1, got {seed}")
    # Arrays of one element: NumPy warns when a scalar wraps around, which is intended here.
    mixed = _hash(np.array([(seed + _GOLDEN) % 2**64], np.uint64))
    return _hash(mixed + np.array([purpose * _GOLDEN % 2**64], np.uint64))


Counts = UInt64[np.ndarray, " count"]


def _permute(x: Counts, key: Counts, n: int) -> Counts:
    """The image of each x under the permutation of 0 .. n - 1 that is selected by its key."""
    a = math.isqrt(n - 1) + 1
    a += a % 2  # cycles of odd length are even permutations: odd a and b would make half of all orders unreachable
    b = -(-n // a)
    moduli = (np.uint64(b), np.uint64(a))
    out = x.copy()
    outside = np.arange(len(x))
    while len(outside):
        still: np.ndarray = out[outside] // moduli[0]
        moving: np.ndarray = out[outside] % moduli[0]
        keys = key[outside]
        for round_ in range(_FEISTEL_ROUNDS):
            keys = keys + np.uint64(_GOLDEN)
            # 63 bits of the hash, so that the sum does not wrap around: that would not be a bijection.
            moving = (moving + (_hash(keys + still) >> np.uint64(1))) % moduli[round_ % 2]
            still, moving = moving, still
        out[outside] = still * moduli[0] + moving
        outside = outside[out[outside] >= np.uint64(n)]
    return out
