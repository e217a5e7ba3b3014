"""Features of images: the protocol of extractors, and their computation in one pass.

    features = collect(batches, extractor, keep=True)      # batches: uint8 (n, 3, h, w)
    everybody = features.over_ranks()                      # equal on all ranks, for any number of ranks

Distances between sets of images are distances between their features, so a value has a meaning only together with its
extractor. An `Extractor` has a `name`, the `hash` of its weights, its resize and its precision; every record carries
these. The moments of the features suffice for the Frechet distance; its error, KID, precision and recall need `keep`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from bsi.errors import DataError
from bsi.metrics.frechet import Moments

KEPT = 100_000  # the largest number of samples whose features are kept for the error: 0.8 GB of Inception's


class QualityWarning(UserWarning):
    """A warning that a value is of limited comparability."""


@runtime_checkable
class Extractor(Protocol):
    """Features of 8-bit images. `Inception` is one; a classifier of your own data can be another."""

    @property
    def name(self) -> str:
        """Part of the metric's name: the Frechet distance is called "fd-" + name."""

    @property
    def hash(self) -> str:
        """SHA-256 of the weights."""

    @property
    def resize(self) -> str:
        """Name of the resize between the images and the network, "none" without one."""

    @property
    def precision(self) -> str:
        """The precision of its computation: "float32", "tf32", ..."""

    @property
    def dim(self) -> int:
        """Number of features."""

    @property
    def device(self) -> torch.device:
        """Device of the features."""

    def __call__(self, images: UInt8[Tensor, "n 3 h w"]) -> Float[Tensor, "n dim"]: ...


def require_images(images: Tensor) -> UInt8[Tensor, "n 3 h w"]:
    """`images`, if they are 8-bit color images.

    Floats are rejected rather than converted: truncating them makes every value half a step too dark, and the FID
    changes.
    """
    if images.dtype != torch.uint8:
        raise DataError(
            f"images must be 8-bit (torch.uint8, values 0 to 255), got {images.dtype}. Round first, never truncate: "
            "for values in [-1, 1], ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)."
        )
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape[2:]:
        raise DataError(
            f"images must have the shape (n, 3, height, width), got {tuple(images.shape)}. "
            "Repeat a single gray channel three times; use permute(0, 3, 1, 2) if channels come last."
        )
    return images


@dataclass(frozen=True)
class Features:
    """Moments of n samples' features; with `vectors`, also the features, on the device that computed them."""

    moments: Moments
    vectors: Float[Tensor, "n dim"] | None = None

    @property
    def n(self) -> int:
        return self.moments.n

    def over_ranks(self) -> Features:
        """All ranks' features together, on every rank; `self` without a process group.

        The samples of the ranks are interleaved, as if rank r of w had the samples r, r + w, r + 2w, ...:
        metrics that depend on the order then do not depend on the number of ranks.
        """
        if not dist.is_initialized():
            return self
        vectors = None if self.vectors is None else _interleaved(self.vectors)
        return Features(self.moments.over_ranks(), vectors)


def collect(images: Iterable[Tensor], extractor: Extractor, keep: bool = False) -> Features:
    """The features of all `images`, batch by batch. Batches may differ in the number and size of their images.

    Args:
        keep: Hold the features in memory (4 bytes x dim each: 0.4 GB for 50,000 of Inception's).
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
