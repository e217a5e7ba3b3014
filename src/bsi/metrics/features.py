"""Features of images: images of files and arrays, the protocol of extractors, and features in one pass.

    features = collect(batches, extractor, keep=True)      # batches: uint8 (n, 3, h, w)
    everybody = features.over_ranks()                      # equal on all ranks, for any number of ranks

Distances between sets of images are distances between their features, so a value has a meaning only together with its
extractor. The moments of the features suffice for the Frechet distance; its error and the other metrics need `keep`.

Images are not resized, cropped or requantized: the extractor gets what a file holds in 8 bits. Files with other content
(16 bits, CMYK, transparency, an animation) are rejected with an error that names the file, and not converted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor

from bsi.data.images import SUFFIXES, open_image
from bsi.errors import DataError
from bsi.metrics.frechet import Moments

KEPT = 100_000  # the largest number of samples whose features are kept for the error: 0.8 GB of Inception's


class QualityWarning(UserWarning):
    """A warning that a value is of limited comparability."""


@runtime_checkable
class Extractor(Protocol):
    """`dim` features of 8-bit images, on `device`. `Inception` is one; a classifier of your own data can be another.

    The Frechet distance is called "fd-" + `name`. `hash` is the SHA-256 of the weights, `resize` the name of the resize
    between the images and the network, "none" without one, and `precision` that of the products: "float32", ...
    """

    @property
    def name(self) -> str: ...
    @property
    def hash(self) -> str: ...
    @property
    def resize(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    def __call__(self, images: UInt8[Tensor, "n 3 h w"]) -> Float[Tensor, "n dim"]: ...


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

    With `keep`, the features stay in memory (4 bytes x dim each: 0.4 GB for 50,000 of Inception's).
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


def require_images(images: Tensor) -> UInt8[Tensor, "n 3 h w"]:
    """`images`, if they are 8-bit color images. Floats that are truncated are half a step too dark: the FID changes."""
    if images.dtype != torch.uint8:
        fix = "Round, never truncate: ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8) for values in [-1, 1]"
        raise DataError(f"images must be 8-bit, 0 to 255, got {images.dtype}. {fix}.")
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape[2:]:
        fix = "Repeat a single gray channel three times; use permute(0, 3, 1, 2) if channels come last"
        raise DataError(f"images must have the shape (n, 3, height, width), got {tuple(images.shape)}. {fix}.")
    return images


def _interleaved(vectors: Float[Tensor, "n dim"]) -> Float[Tensor, "total dim"]:
    counts = [torch.zeros(1, dtype=torch.int64, device=vectors.device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([len(vectors)], device=vectors.device))
    numbers = [int(count) for count in counts]
    # Every rank sends the same shape, so that unequal counts cannot leave one of them waiting.
    padded = vectors.new_zeros(max(numbers), vectors.shape[1])
    padded[: len(vectors)] = vectors
    gathered = [torch.empty_like(padded) for _ in numbers]
    dist.all_gather(gathered, padded)
    turns = torch.cat([torch.arange(number, device=vectors.device) for number in numbers])
    together = torch.cat([piece[:number] for piece, number in zip(gathered, numbers, strict=True)])
    return together[turns.argsort(stable=True)]


# ---- Images of files and arrays --------------------------------------------------------------------------------------


def image_files(folder: Path) -> list[Path]:
    """The image files in `folder` and below, sorted by path."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise DataError(f"{folder} holds no images: none of its files ends in {', '.join(SUFFIXES)}.")
    return files


def file_batches(files: Iterable[Path], size: int) -> Iterator[UInt8[Tensor, "n 3 h w"]]:
    """The files' images in order, gray ones in three equal channels. A batch ends before an image of another size."""
    batch: list[np.ndarray] = []
    for path in files:
        image = np.asarray(open_image(path, str(path)).convert("RGB")).transpose(2, 0, 1)
        if batch and (len(batch) == size or batch[0].shape != image.shape):
            yield torch.from_numpy(np.stack(batch))
            batch = []
        batch.append(image)
    if batch:
        yield torch.from_numpy(np.stack(batch))


def array_batches(
    blocks: Iterable[Shaped[np.ndarray, "..."]], size: int, name: str
) -> Iterator[UInt8[Tensor, "n 3 h w"]]:
    """Batches of at most `size` from arrays of shape (n, h, w), (n, c, h, w) or (n, h, w, c) with c of 1 or 3."""
    for block in blocks:
        if block.dtype != np.uint8:
            fix = "Round, never truncate: np.clip(np.rint((x + 1) * 127.5), 0, 255).astype(np.uint8) for [-1, 1]"
            raise DataError(f"{name} holds {block.dtype}; images must be uint8, 0 to 255. {fix}.")
        images = block[:, None] if block.ndim == 3 else block
        if images.ndim != 4 or (block.ndim == 4 and (block.shape[1] in (1, 3)) == (block.shape[3] in (1, 3))):
            shapes = "(n, h, w), (n, c, h, w) or (n, h, w, c) with 1 or 3 channels"
            raise DataError(f"{name} must have the shape {shapes}, got {block.shape}.")
        if images.shape[1] not in (1, 3):
            images = images.transpose(0, 3, 1, 2)
        for start in range(0, len(images), size):
            piece = images[start : start + size]
            yield torch.from_numpy(np.broadcast_to(piece, (len(piece), 3, *piece.shape[2:])).copy())
