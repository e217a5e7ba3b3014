"""The division of a global batch into virtual shards, whose number does not depend on the number of ranks.

A global batch is the next `batch` positions of the training stream (`bsi.rng.sample_ids`), cut into a fixed number of
*virtual shards*. A rank takes complete shards, so that what is drawn for a shard (noise, levels, dropout) does not
depend on the number of ranks.
"""

from __future__ import annotations

from bsi.errors import UsageError

__all__ = ["SHARDS", "check_batch", "shards_of"]

SHARDS = 64


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def shards_of(rank: int, world: int, shards: int = SHARDS) -> range:
    """The virtual shards of a rank: consecutive, and the same number for each rank."""
    if world < 1 or shards < 1 or shards % world:
        fit = ", ".join(map(str, _divisors(max(shards, 1))))
        raise UsageError(
            f"{world} ranks cannot share {shards} virtual shards evenly: use a world size of {fit}, or another number "
            f"of shards (which gives another run)."
        )
    if not 0 <= rank < world:
        raise UsageError(f"a rank must be in 0 .. {world - 1}, got rank={rank} of world={world}")
    each = shards // world
    return range(rank * each, (rank + 1) * each)


def check_batch(batch: int, world: int = 1, accumulation: int = 1, shards: int = SHARDS) -> None:
    """Raise for a global batch that cannot be shared evenly, with the values that can."""
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
