"""A dataset of the Hugging Face hub by name, read by the `datasets` package where it is installed: a column of images.

The images are treated as those of a folder. Parts named `train` and `test` (or `validation`) are kept; where there is
only `train`, the hash of the row's number splits it. A column `label` or `labels` of classes or of whole numbers gives
the labels, and the classes their names; it is left out where a part has rows without a label, which the hub marks by
-1. Code from the hub is never run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int64, UInt8
from PIL import Image

from bsi.data.images import Resampling, check_options, decode
from bsi.data.manifest import check_classes
from bsi.data.plan import BLOCK_BYTES, MOST_CLASSES, Block, Plan
from bsi.errors import DataError, UsageError
from bsi.io import fingerprint
from bsi.rng import uniforms
from bsi.values import Bins

__all__ = ["HuggingFace"]

SPLIT_SEED = 0
LABELS = ("label", "labels")


@dataclass(frozen=True)
class _Labels:
    """The numbers in `column` of each part, and the names of the classes where the column has them."""

    column: str
    numbers: Mapping[str, Int64[np.ndarray, " rows"]]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class HuggingFace:
    """The images in `column` of the dataset `path` (owner/name) on the hub."""

    summary: ClassVar[str] = (
        "images of a Hugging Face dataset: --from OWNER/NAME, --column, --revision and as for folder"
    )

    path: str
    column: str = "image"
    revision: str = "main"
    size: int = 64
    channels: int = 3
    resampling: Resampling = "lanczos"
    test_fraction: float = 0.1
    skip: int = 0

    def plan(self) -> Plan:
        check_options(self.size, self.channels, self.resampling, self.test_fraction)
        parts = self._parts()
        counts = {split: len(part) for split, part in parts.items()}
        total = sum(counts.values())
        labels = _labels(parts)
        return Plan(
            name=self.path.rsplit("/", 1)[-1],
            source=f"Hugging Face dataset {self.path}, column {self.column!r}",
            shape=(self.channels, self.size, self.size),
            dtype=np.dtype("uint8"),
            bins=Bins.uint8(),
            options={
                "revision": self.revision,
                "size": self.size,
                "channels": self.channels,
                "crop": "largest centerd square",
                "resampling": self.resampling,
                "split": "by name" if "test" in parts else f"row i is for testing if hash(i) < {self.test_fraction}",
                **({} if labels is None else {"labels": labels.column}),
            },
            input=fingerprint([self.path, self.column, counts]),
            total=total,
            rows=total,
            unit="image",
            blocks=self._blocks,
            label_dtype=None if labels is None else np.dtype("<i4"),
            classes=() if labels is None else labels.classes,
            skip=self.skip,
        )

    def _parts(self) -> dict[str, Any]:
        """The hub's parts under our names."""
        try:
            import datasets  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise UsageError("datasets of the hub need the package `datasets`: pip install datasets") from error
        try:
            loaded = datasets.load_dataset(self.path, revision=self.revision)
        except Exception as error:  # network, names and formats: the package has no common error
            raise DataError(f"cannot load the Hugging Face dataset {self.path!r}: {error}") from error
        names = {"train": "train", "test": "test" if "test" in loaded else "validation"}
        parts = {ours: loaded[theirs] for ours, theirs in names.items() if theirs in loaded}
        if "train" not in parts:
            raise DataError(f"{self.path!r} has no part named train; it has {', '.join(loaded)}.")
        for part in parts.values():
            if self.column not in part.column_names:
                raise UsageError(
                    f"{self.path!r} has no column {self.column!r}; it has {', '.join(part.column_names)}. Choose with "
                    f"--column."
                )
        return parts

    def _blocks(self, start: int) -> Iterator[Block]:
        each = max(1, min(256, BLOCK_BYTES // (self.channels * self.size**2)))
        parts = self._parts()
        labels = _labels(parts)
        first = 0
        for split, part in parts.items():
            for row in range(min(max(0, start - first), len(part)), len(part), each):
                rows: dict[str, list[UInt8[np.ndarray, "..."]]] = {"train": [], "test": []}
                known: dict[str, list[int]] = {"train": [], "test": []}
                skipped = []
                stop = min(row + each, len(part))
                draws = uniforms(SPLIT_SEED, row, stop - row)
                for index in range(row, stop):
                    testing = split == "test" or ("test" not in parts and draws[index - row] < self.test_fraction)
                    target = "test" if testing else "train"
                    try:
                        image = self._image(part, index)
                    except DataError as error:
                        skipped.append(str(error))
                    else:
                        rows[target].append(image)
                        if labels is not None:
                            known[target].append(int(labels.numbers[split][index]))
                yield Block(
                    items=stop - row,
                    rows={name: np.stack(images) for name, images in rows.items() if images},
                    labels={name: np.array(own, "<i4") for name, own in known.items() if own},
                    skipped=tuple(skipped),
                )
            first += len(part)

    def _image(self, part: Any, index: int) -> UInt8[np.ndarray, "c s s"]:
        name = f"row {index}"
        try:
            image = part[index][self.column]
        except Exception as error:  # the package decodes the image here
            raise DataError(f"{name} cannot be decoded ({type(error).__name__}: {error})") from error
        if not isinstance(image, Image.Image):
            raise DataError(f"{name} holds a {type(image).__name__}, not an image")
        return decode(image, name, self.size, self.channels, self.resampling)


def _labels(parts: Mapping[str, Any]) -> _Labels | None:
    """The labels that every row of every part has, or None."""
    import datasets  # type: ignore[import-not-found, unused-ignore]

    features = parts["train"].features
    for column in LABELS:
        feature = features.get(column)
        named = isinstance(feature, datasets.ClassLabel)
        if not (named or (isinstance(feature, datasets.Value) and "int" in feature.dtype)):
            continue
        if any(part.features.get(column) != feature for part in parts.values()):
            continue
        classes = check_classes(feature.names) if named else ()
        most = len(classes) or MOST_CLASSES
        cells = {split: part[column][:] for split, part in parts.items()}
        if any(cell is None or not 0 <= cell < most for part in cells.values() for cell in part):
            continue
        numbers = {split: np.array(part, np.int64) for split, part in cells.items()}
        return _Labels(column, numbers, classes)
    return None
