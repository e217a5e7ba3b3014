"""One pass over images: moments of the features, and the features themselves when a metric needs them.

    features = collect(batches, extractor, keep=True)      # batches: uint8 (n, 3, h, w)
    everybody = features.over_ranks()                      # the same on every rank, whatever each of them held

The moments are enough for the Frechet distance; its error, KID, precision and recall need `keep`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor

from bsi.metrics.extractor import Extractor, require_images
from bsi.metrics.frechet import Moments

KEPT = 100_000  # samples whose features are kept for the error of their distance: 0.8 GB of Inception's


@dataclass(frozen=True)
class Features:
    """Moments of n samples' features; with `vectors`, also the features, on the device that computed them."""

    moments: Moments
    vectors: Float[Tensor, "n dim"] | None = None

    @property
    def n(self) -> int:
        return self.moments.n

    def over_ranks(self) -> Features:
        """All ranks' features together, on every rank; these ones without a process group.

        The order is that of one rank that takes turns through the ranks' samples, as when rank r of w holds the samples
        r, r + w, r + 2w, ...: metrics that depend on the order then do not depend on the number of ranks.
        """
        if not dist.is_initialized():
            return self
        vectors = None if self.vectors is None else _interleaved(self.vectors)
        return Features(self.moments.over_ranks(), vectors)


def collect(images: Iterable[Tensor], extractor: Extractor, keep: bool = False) -> Features:
    """The features of all `images`, batch by batch. Batches may differ in size, and images between batches too.

    `keep` holds the features in memory (4 bytes x dim each: 0.4 GB for 50,000 of Inception's).
    """
    moments = Moments.empty(extractor.dim, extractor.device)
    kept = [torch.empty(0, extractor.dim, device=extractor.device)]
    for batch in images:
        if len(batch) == 0:
            continue
        features = extractor(require_images(batch))
        moments = moments + Moments.of(features)
        if keep:
            kept.append(features.float())
    return Features(moments, torch.cat(kept) if keep else None)


def _interleaved(vectors: Float[Tensor, "n dim"]) -> Float[Tensor, "total dim"]:
    world = dist.get_world_size()
    counts = [torch.zeros(1, dtype=torch.int64, device=vectors.device) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([len(vectors)], device=vectors.device))
    numbers = [int(count) for count in counts]
    # Every rank sends the same shape, so that unequal counts cannot leave one of them waiting.
    padded = vectors.new_zeros(max(numbers), vectors.shape[1])
    padded[: len(vectors)] = vectors
    gathered = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(gathered, padded)
    turns: Int64[Tensor, " total"] = torch.cat([torch.arange(number, device=vectors.device) for number in numbers])
    together = torch.cat([piece[:number] for piece, number in zip(gathered, numbers, strict=True)])
    return together[turns.argsort(stable=True)]
