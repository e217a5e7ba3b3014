"""Which sample comes when: a pure function of the seed and of the number of samples seen.

Training sees an infinite stream of samples. Position p of it belongs to epoch p // n, and an epoch is a permutation of
the n samples keyed by (seed, epoch), so that

    sample_ids(seed, n, start, count)

is the same whatever the world size, the loader's workers or the interruptions: there is no state to lose, and any
position costs the same. The permutation is a Feistel network on Z_a x Z_b, a b >= n, a ~ sqrt n, whose rounds add a
hash of one half to the other; a value that falls outside 0 .. n - 1 is sent through again until it falls inside (cycle
walking), which keeps it a bijection. It is integer arithmetic alone: unlike a library's shuffle it will not change with
the library's version.

A global batch is the next `batch` positions, cut into a fixed number of *virtual shards*. A rank takes whole shards, so
that what is drawn per shard (noise, levels, dropout) does not depend on the number of ranks.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt64

from bsi.errors import UsageError

__all__ = ["SHARDS", "check_batch", "coins", "sample_ids", "shards_of", "uniforms"]

SHARDS = 64
ROUNDS = 24  # with 12, orders of five samples were measurably not uniform; with 20, they were

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def _hash(x: UInt64[np.ndarray, "*shape"]) -> UInt64[np.ndarray, "*shape"]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _key(seed: int, purpose: int) -> UInt64[np.ndarray, "1"]:
    """A 64-bit key: different for every seed and for every purpose of the same seed."""
    if not 0 <= seed <= _MASK:
        raise UsageError(f"a seed must lie in 0 .. 2**64 - 1: got {seed}")
    # Arrays of one element, since NumPy warns when a scalar wraps around, as is meant here.
    mixed = _hash(np.array([(seed + _GOLDEN) & _MASK], np.uint64))
    return _hash(mixed + np.array([purpose * _GOLDEN & _MASK], np.uint64))


def _permute(
    x: UInt64[np.ndarray, " count"], key: UInt64[np.ndarray, " count"], n: int
) -> UInt64[np.ndarray, " count"]:
    """The image of each x under the permutation of 0 .. n - 1 that its key names."""
    a = math.isqrt(n - 1) + 1
    a += a % 2  # cycles of odd length are even permutations: odd a and b would put half of all orders out of reach
    b = -(-n // a)
    moduli = (np.uint64(b), np.uint64(a))
    out = x.copy()
    outside = np.arange(len(x))
    while len(outside):
        still: np.ndarray = out[outside] // moduli[0]
        moving: np.ndarray = out[outside] % moduli[0]
        keys = key[outside]
        for round_ in range(ROUNDS):
            keys = keys + np.uint64(_GOLDEN)
            # 63 bits of hash, lest the sum wrap around: that would not be a bijection.
            moving = (moving + (_hash(keys + still) >> np.uint64(1))) % moduli[round_ % 2]
            still, moving = moving, still
        out[outside] = still * moduli[0] + moving
        outside = outside[out[outside] >= np.uint64(n)]
    return out


def sample_ids(seed: int, n: int, start: int, count: int) -> Int64[np.ndarray, " count"]:
    """The samples at positions start .. start + count - 1 of the stream. Every epoch visits each of the n once."""
    if not 1 <= n < 2**62:
        raise UsageError(f"an order needs at least one sample: got n={n}")
    if start < 0 or count < 0 or start + count >= 2**62:
        raise UsageError(f"positions of the stream lie in 0 .. 2**62 - 1: got start={start}, count={count}")
    positions = np.uint64(start) + np.arange(count, dtype=np.uint64)
    epoch, offset = positions // np.uint64(n), positions % np.uint64(n)
    keys = _hash(_key(seed, purpose=1) + epoch * np.uint64(_GOLDEN))
    return _permute(offset, keys, n).astype(np.int64)


def uniforms(seed: int, start: int, count: int) -> Float64[np.ndarray, " count"]:
    """One number in [0, 1) for each position start .. start + count - 1 of a stream, a multiple of 2^-53."""
    positions = np.uint64(start) + np.arange(count, dtype=np.uint64)
    bits = _hash(_key(seed, purpose=2) + positions * np.uint64(_GOLDEN)) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def coins(seed: int, start: int, count: int) -> Bool[np.ndarray, " count"]:
    """One fair coin for each position start .. start + count - 1 of the stream: is the image seen there flipped?"""
    return uniforms(seed, start, count) >= 0.5


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def shards_of(rank: int, world: int, shards: int = SHARDS) -> range:
    """The virtual shards of a rank: whole ones, consecutive, the same number for each rank."""
    if world < 1 or shards < 1 or shards % world:
        fit = ", ".join(map(str, _divisors(max(shards, 1))))
        raise UsageError(
            f"{world} ranks cannot share {shards} virtual shards evenly: use a world size of {fit}, or another number "
            f"of shards (which gives another run)."
        )
    if not 0 <= rank < world:
        raise UsageError(f"a rank lies in 0 .. {world - 1}: got rank={rank} of world={world}")
    each = shards // world
    return range(rank * each, (rank + 1) * each)


def check_batch(batch: int, world: int = 1, accumulation: int = 1, shards: int = SHARDS) -> None:
    """Refuse a global batch that gives no whole shards to each rank and accumulation step; say which would."""
    if min(batch, world, accumulation, shards) < 1:
        raise UsageError(
            f"batch, ranks, accumulation steps and shards are at least 1: got batch={batch}, world={world}, "
            f"accumulation={accumulation}, shards={shards}"
        )
    shards_of(0, world, shards)
    if (shards // world) % accumulation:
        fit = ", ".join(map(str, _divisors(shards // world)))
        raise UsageError(
            f"{accumulation} accumulation steps cannot share the {shards // world} virtual shards of each of {world} "
            f"ranks evenly: use accumulation {fit}."
        )
    if batch % shards:
        below, above = batch // shards * shards, -(-batch // shards) * shards
        batches = " or ".join(str(b) for b in (below, above) if b)
        counts = [d for d in _divisors(batch) if d % (world * accumulation) == 0 and d <= shards]
        fewer = f", or {counts[-1]} shards (which gives another run)" if counts else ""
        raise UsageError(
            f"a global batch of {batch} cannot be cut into {shards} virtual shards ({world} ranks x {accumulation} "
            f"accumulation steps): use a batch of {batches}{fewer}."
        )
