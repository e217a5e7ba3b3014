"""A dataset of the Hugging Face hub, read with the package `datasets` if it is installed: a column of images.

The images are treated like those of a folder. Parts named `train` and `test` (or `validation`) are kept; a dataset with
only `train` is split by a hash of the row's number. A column `label` or `labels` of classes or integers gives the
labels, and the classes their names; it is not used if rows of some part have no label, which the hub marks by -1. Code
from the hub is never run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int64
from PIL import Image

from bsi.data.image_folder import Geometry, ImageOptions, Item, checked, geometry, image_block, items_per_block, pixels
from bsi.data.prepare import MAX_CLASSES, Block, Plan, rows_for_testing
from bsi.data.store import check_classes
from bsi.errors import DataError, UsageError, extra
from bsi.io import fingerprint
from bsi.values import Bins

LABELS = ("label", "labels")
SURVEYED = 256  # images of each part that are decoded to choose size and channels


@dataclass(frozen=True)
class _Labels:
    """The numbers in `column` of each part, and the names of the classes if the column has them."""

    column: str
    numbers: Mapping[str, Int64[np.ndarray, " rows"]]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class HuggingFace(ImageOptions):
    """The images in `column` of the dataset `path` (owner/name) on the hub."""

    summary: ClassVar[str] = (
        "images of a Hugging Face dataset: --from OWNER/NAME, --column, --revision and as for folder"
    )

    path: str
    column: str = "image"
    revision: str = "main"

    def plan(self) -> Plan:
        parts = self._parts()
        counts = {split: len(part) for split, part in parts.items()}
        labels = _labels(parts)
        form = geometry(self._headers(parts), self.size, self.channels)
        return Plan(
            name=self.path.rsplit("/", 1)[-1],
            source=f"Hugging Face dataset {self.path}, column {self.column!r}, cropped to the largest centered square",
            shape=(form.channels, form.size, form.size),
            kind=Bins.uint8(),
            options={
                "revision": self.revision,
                "size": form.size,
                "channels": form.channels,
                "resampling": self.resampling,
                "split": "by name" if "test" in parts else f"row i is for testing if hash(i) < {self.test_fraction}",
                **({} if labels is None else {"labels": labels.column}),
            },
            input=fingerprint([self.path, self.column, counts]),
            total=sum(counts.values()),
            unit="image",
            blocks=lambda start: self._blocks(form, start),
            label_dtype=None if labels is None else np.dtype("<i4"),
            classes=() if labels is None else labels.classes,
            skip=self.skip,
            notes=form.notes,
        )

    def _parts(self) -> dict[str, Any]:
        """The hub's parts by our names."""
        with extra("hub", "a dataset of the hub"):
            import datasets  # type: ignore[import-not-found, unused-ignore]
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
                    f"{self.path!r} has no column {self.column!r}; it has {', '.join(part.column_names)}. Choose one "
                    f"with --column."
                )
        return parts

    def _headers(self, parts: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
        """Mode, width and height of the first images of each part."""
        for part in parts.values():
            for index in range(min(SURVEYED, len(part))):
                try:
                    image = self._image(part, index)
                except DataError:
                    continue  # reported when the row is read
                yield image.mode, *image.size

    def _blocks(self, form: Geometry, start: int) -> Iterator[Block]:
        parts = self._parts()
        labels = _labels(parts)

        def read(split: str, index: int) -> Item | str:
            try:
                array = pixels(
                    self._image(parts[split], index), f"row {index}", form.size, form.channels, self.resampling
                )
            except DataError as error:
                return str(error)
            by_hash = "test" not in parts and bool(rows_for_testing(index, 1, self.test_fraction)[0])
            label = None if labels is None else int(labels.numbers[split][index])
            return "test" if by_hash else split, array, label

        everything = ((split, index) for split, part in parts.items() for index in range(len(part)))
        rows = itertools.islice(everything, start, None)
        while batch := list(itertools.islice(rows, items_per_block(form))):
            yield image_block(read(split, index) for split, index in batch)

    def _image(self, part: Any, index: int) -> Image.Image:
        name = f"row {index}"
        try:
            image = part[index][self.column]
        except Exception as error:  # the package decodes the image here
            raise DataError(f"{name} cannot be decoded ({type(error).__name__}: {error})") from error
        if not isinstance(image, Image.Image):
            raise DataError(f"{name} holds a {type(image).__name__}, not an image")
        return checked(image, name)


def _labels(parts: Mapping[str, Any]) -> _Labels | None:
    """The labels, if every row of every part has one."""
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
        most = len(classes) or MAX_CLASSES
        cells = {split: part[column][:] for split, part in parts.items()}
        if any(cell is None or not 0 <= cell < most for part in cells.values() for cell in part):
            continue
        numbers = {split: np.array(part, np.int64) for split, part in cells.items()}
        return _Labels(column, numbers, classes)
    return None
