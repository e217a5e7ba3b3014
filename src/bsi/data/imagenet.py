"""Downsampled ImageNet (Chrabaszcz, Loshchilov and Hutter, 2017) at 32 or 64 pixels, from the official `.npz` batches.

`train_data_batch_1.npz` .. `train_data_batch_10.npz` and `val_data.npz` hold `data`, (N, 3 size^2) bytes channel by
channel, and `labels` from 1 to 1000, stored here as 0 to 999. The files may be in a folder, unpacked or in the zip
archives in which they are distributed (one for 32 pixels, two for 64, and one for validation). They are read in place
as a stream: the memory is that of one block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import UInt16

from bsi.data.archives import Member, members
from bsi.data.npy import NpzFile
from bsi.data.prepare import Block, Plan
from bsi.errors import DataError, UsageError
from bsi.io import fingerprint
from bsi.progress import Progress
from bsi.values import Bins

__all__ = ["ImageNet32", "ImageNet64"]

TRAIN = tuple(f"train_data_batch_{i}.npz" for i in range(1, 11))
BATCHES = (*TRAIN, "val_data.npz")
WHERE = "https://image-net.org/download-images.php (downsampled images, npz format; needs an account)"
MAX_BYTES = 64 << 30


@dataclass(frozen=True)
class ImageNet32:
    """1,281,167 training and 50,000 validation images of 32 x 32 pixels in a thousand classes."""

    summary: ClassVar[str] = "downsampled ImageNet, 32 x 32, from a folder with the official npz batches or their zips"
    size: ClassVar[int] = 32

    path: Path

    def plan(self) -> Plan:
        return _plan(self.path, self.size)


@dataclass(frozen=True)
class ImageNet64(ImageNet32):
    """The same images of 64 x 64 pixels."""

    summary: ClassVar[str] = "downsampled ImageNet, 64 x 64, from a folder with the official npz batches or their zips"
    size: ClassVar[int] = 64


def _plan(path: Path, size: int) -> Plan:
    path = path.expanduser()
    counts = {}
    # Decompressing up to a header inside a zip inside a zip takes minutes for the larger set.
    with _batches(path) as found, Progress(f"check imagenet{size}", len(BATCHES), "batch") as progress:
        for name in BATCHES:
            with _opened(found, name) as batch, batch.array("data") as data:
                if len(data.shape) != 2 or data.shape[1] != 3 * size * size or data.dtype != np.uint8:
                    raise UsageError(
                        f"{data.name} holds {data.shape} of {data.dtype}, expected (N, {3 * size * size}) of uint8 at "
                        f"{size} pixels."
                    )
                counts[name] = (len(data), found[name].size)
            progress.advance()
    return Plan(
        name=f"imagenet{size}",
        source=WHERE,
        shape=(3, size, size),
        bins=Bins.uint8(),
        options={},
        input=fingerprint(counts),
        total=sum(count for count, _ in counts.values()),
        unit="image",
        blocks=lambda start: _blocks(path, size, start),
        label_dtype=np.dtype("<u2"),
    )


@contextmanager
def _batches(path: Path) -> Iterator[dict[str, Member]]:
    """The batches found in a folder, in the zips of a folder, or in one zip."""
    with ExitStack() as stack:
        places = [path, *sorted(path.glob("*.zip"))] if os.path.isdir(path) else [path]
        found: dict[str, Member] = {}
        for place in places:
            for name, member in stack.enter_context(members(place, BATCHES, MAX_BYTES)).items():
                found.setdefault(name, member)
        missing = [name for name in BATCHES if name not in found]
        if missing:
            pickled = os.path.exists(path / "train_data_batch_1")
            hint = "It holds the pickled version, which is never loaded. " if pickled else ""
            raise DataError(f"{path} holds no {', '.join(missing[:3])}. {hint}Get the npz version from {WHERE}.")
        yield found


def _opened(found: dict[str, Member], name: str) -> NpzFile:
    return NpzFile(found[name].open(), found[name].name)


def _labels(batch: NpzFile, count: int) -> UInt16[np.ndarray, " count"]:
    with batch.array("labels") as array:
        if array.shape != (count,) or array.dtype.kind not in "iu":
            raise DataError(f"{array.name} holds {array.shape} of {array.dtype}, expected {count} integers.")
        labels = np.concatenate([np.empty(0, array.dtype), *array.blocks()])
    if count and (labels.min() < 1 or labels.max() > 1000):
        raise DataError(f"{batch.name} has labels from {labels.min()} to {labels.max()}, expected 1 to 1000.")
    return (labels - 1).astype(np.uint16)


def _blocks(path: Path, size: int, start: int) -> Iterator[Block]:
    first = 0
    with _batches(path) as found:
        for name in BATCHES:
            split = "train" if name in TRAIN else "test"
            with _opened(found, name) as batch:
                with batch.array("data") as data:
                    count = len(data)
                if start < first + count:
                    labels = _labels(batch, count)  # before the images: alternating would rewind a nested archive
                    row = max(0, start - first)
                    with batch.array("data") as data:
                        for rows in data.blocks(row):
                            images = rows.reshape(-1, 3, size, size)
                            yield Block(len(rows), {split: images}, {split: labels[row : row + len(rows)]})
                            row += len(rows)
            first += count
