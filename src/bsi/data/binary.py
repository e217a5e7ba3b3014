"""Binary images: the gray images of another source as symbols 0 and 1.

By a threshold, a pixel is 1 if its value is above it. Drawn at random, a pixel is 1 with the probability of its value
in [0, 1], once and for all: this is the static binarization of the literature on MNIST. The random numbers of an image
are derived from its content, so they depend neither on the order of the images nor on interruptions.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import Shaped, UInt8

from bsi.data.files import BLOCK_BYTES
from bsi.data.image_folder import Folder
from bsi.data.prepare import Block, Plan
from bsi.data.published import Mnist
from bsi.data.store import MANIFEST, open_dataset
from bsi.errors import UsageError
from bsi.values import Bins, Symbols


@dataclass(frozen=True)
class Binary:
    """The images of a prepared dataset, of a folder, or of MNIST's four files, as symbols 0 and 1."""

    summary: ClassVar[str] = (
        "binary images: --from a prepared dataset, a folder of images or MNIST's files; --threshold or --stochastic"
    )

    path: str
    threshold: float | None = None
    stochastic: bool = False

    def plan(self) -> Plan:
        if self.stochastic and self.threshold is not None:
            raise UsageError(f"--stochastic and --threshold {self.threshold:g} exclude each other: leave one out.")
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise UsageError(f"threshold is a value between 0 (black) and 1 (white), got {self.threshold:g}.")
        images = self._images()
        if not isinstance(images.kind, Bins) or len(images.shape) != 3 or images.shape[0] != 1:
            raise UsageError(
                f"{self.path} holds samples of shape {images.shape}. Binary images are made from gray ones, of "
                f"shape (1, height, width): prepare them with --channels 1."
            )
        how = "at random" if self.stochastic else f"above {0.5 if self.threshold is None else self.threshold:g}"
        return replace(
            images,
            name=f"{images.name}-binary",
            source=f"{images.source}, binarized",
            kind=Symbols(2),
            options={**images.options, "binary": how},
            blocks=lambda start: self._blocks(images, start),
        )

    def _images(self) -> Plan:
        """The gray images that are binarized, as their source describes them."""
        path = Path(self.path).expanduser()
        if os.path.isdir(path) and not os.path.isfile(path / MANIFEST):
            return Mnist(path).plan() if Mnist.found_in(path) else Folder(path, channels=1).plan()
        return _of_dataset(self.path)

    def _blocks(self, images: Plan, start: int) -> Iterator[Block]:
        assert isinstance(images.kind, Bins)
        for block in images.blocks(start):
            yield replace(
                block, rows={split: self._binary(rows, images.kind.count) for split, rows in block.rows.items()}
            )

    def _binary(self, rows: Shaped[np.ndarray, "n c h w"], count: int) -> UInt8[np.ndarray, "n c h w"]:
        if self.stochastic:
            levels = np.stack([_uniforms(image) for image in rows])
        else:
            levels = np.full(rows.shape, 0.5 if self.threshold is None else self.threshold)
        return (rows / (count - 1) > levels).astype(np.uint8)


def _uniforms(image: Shaped[np.ndarray, "c h w"]) -> Shaped[np.ndarray, "c h w"]:
    """Random numbers in [0, 1), derived from the image."""
    key = np.frombuffer(hashlib.sha256(np.ascontiguousarray(image).tobytes()).digest()[:16], "<u8")
    return np.random.Generator(np.random.Philox(key=key)).random(image.shape)


def _of_dataset(name: str) -> Plan:
    """A prepared dataset as a plan of its rows."""
    dataset = open_dataset(name)
    counts = {"train": len(dataset.train), "test": len(dataset.test)}
    labels = dataset.labels

    def blocks(start: int) -> Iterator[Block]:
        each = max(1, BLOCK_BYTES // max(1, dataset.train[:1].nbytes))
        for split, rows in (("train", dataset.train), ("test", dataset.test)):
            skip = min(start, len(rows))
            start -= skip
            for first in range(skip, len(rows), each):
                block = rows[first : first + each]
                known = {} if labels is None else {split: getattr(labels, split)[first : first + each]}
                yield Block(len(block), {split: block}, known)

    return Plan(
        name=dataset.name,
        source=dataset.manifest.source,
        shape=dataset.shape,
        kind=dataset.bins,
        options=dataset.manifest.options,
        input=dataset.version,
        total=sum(counts.values()),
        unit="image",
        blocks=blocks,
        label_dtype=None if labels is None else labels.train.dtype,
        classes=dataset.manifest.classes,
    )
