"""Images from files and from the Hugging Face hub.

An image is resampled so that its smaller side is `size`, and the centered square is stored; the manifest records this.
At the edges of the square, resampling uses the pixels beyond them.

Files that cannot be converted faithfully are rejected by name: truncated files, more than eight bits per channel, CMYK,
transparency, several frames, more than 2^26 pixels, and images smaller than the size. The memory is that of the names
and one block.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Integer, UInt8
from PIL import Image, ImageOps

from bsi.data.files import BLOCK_BYTES, for_testing, walk
from bsi.data.prepare import MAX_CLASSES, Block, Part, Preparation, check_fraction, rows_for_testing
from bsi.errors import DataError, UsageError, extra
from bsi.io import fingerprint, open_untrusted
from bsi.values import Bins, check_classes

# Formats with decoders in Pillow that are pure image readers; others call programs (EPS) or are rarely fuzzed.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
MAX_PIXELS = 1 << 26
DEFAULT_SIZE = 64
DIVISOR = 4  # of default sizes, for a U-Net at three resolutions
GRAY = ("1", "L", "LA")  # modes
HUB_SURVEYED = 256  # images of each part that are decoded to choose size and channels


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """A decoder given damaged data may raise anything."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{name} cannot be decoded ({type(error).__name__}: {error})") from error


def open_image(path: Path, name: str) -> Image.Image:
    """The image in a file, upright and opaque, with 8 bits per channel. Errors begin with `name`."""
    with open_untrusted(path) as file:
        if not os.fstat(file.fileno()).st_size:
            raise DataError(f"{name} is empty")
        with _decoding(name), Image.open(file, formats=FORMATS) as image:
            return checked(image, name)


def checked(image: Image.Image, name: str) -> Image.Image:
    """The decoded image, upright and opaque. Raises an error for what cannot be converted faithfully to 8-bit RGB."""
    width, height = image.size
    # Pillow opens a 16-bit color PNG as RGB: only the decoder's own mode shows its depth.
    tiles = getattr(image, "tile", ()) if image.format in ("PNG", "TIFF") else ()
    why = ""
    if width * height > MAX_PIXELS:
        why = f"has {width} x {height} pixels, more than {MAX_PIXELS}: shrink it first"
    elif getattr(image, "is_animated", False) and image.format != "MPO":  # an MPO of a camera starts with the picture
        why = "is animated or has several pages: save one of them"
    elif image.mode == "CMYK":
        why = "is CMYK, whose colors depend on a profile: convert it to RGB first"
    elif image.mode.startswith(("I", "F")) or any(re.search(r";(16|32)", str(tile[3])) for tile in tiles):
        why = "has more than eight bits per channel: convert it to 8 bits first"
    elif image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA"):
        why = f"has the color mode {image.mode}: convert it to RGB first"
    else:
        image = ImageOps.exif_transpose(image)
        if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
            image = image.convert("RGBA")
            if image.getchannel("A").getextrema() != (255, 255):
                fix = "`mogrify -path NEW -background white -alpha remove FILES` (ImageMagick)"
                why = f"is partly transparent: put it on a background, such as by {fix}"
    if why:
        raise DataError(f"{name} {why}")
    return image


def pixels(image: Image.Image, name: str, size: int, channels: int) -> UInt8[np.ndarray, "c size size"]:
    """The centered square of an image whose smaller side is resampled to `size`, as (channels, size, size)."""
    side = min(image.size)
    if side < size:
        raise DataError(f"{name} has {image.size} pixels, fewer than the size {size}: choose a smaller --size")
    image = image.convert("RGB" if channels == 3 else "L")
    left, top = (image.width - side) // 2, (image.height - side) // 2
    array = np.asarray(image.resize((size, size), Image.Resampling.LANCZOS, box=(left, top, left + side, top + side)))
    return np.ascontiguousarray(array.transpose(2, 0, 1) if channels == 3 else array[None])


class ImageList(NamedTuple):
    """A list of images. `load(i)` opens the i-th one; its errors begin with `names[i]`."""

    names: Sequence[str]
    load: Callable[[int], Image.Image]
    for_testing: Bool[np.ndarray, " images"]
    labels: Integer[np.ndarray, " images"] | None


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The options of sources of images; see `bsi data --help`."""

    threads: ClassVar[int] = min(8, os.cpu_count() or 1)

    size: int | None = None
    channels: int | Literal["auto"] = "auto"
    test_fraction: float = 0.1
    skip: int = 0

    def __post_init__(self) -> None:
        if self.size is not None and not 1 <= self.size <= 4096:
            raise UsageError(f"size is the side of the images in pixels, 1 to 4096: got {self.size}")
        if self.skip < 0:
            raise UsageError(f"skip must be at least 0, got {self.skip}.")
        check_fraction(self.test_fraction)

    def planned(
        self,
        parts: Sequence[ImageList],
        headers: Counter[tuple[str, int, int]],
        options: dict[str, str],
        **described: Any,
    ) -> Preparation:
        """The plan of images whose size and channels, if they are not given, are chosen by modes, widths and heights.

        Images are gray if all of them are stored as gray. Their size is the smallest side of all, if none has a smaller
        side above 64, less up to three pixels: the networks of the recipes need a multiple of 4. Otherwise it is 64.
        """
        size, channels, notes = self.size, self.channels, []
        if size is None:
            sides = {min(width, height) for _, width, height in headers}
            size = min(sides) if max(sides, default=MAX_PIXELS) <= DEFAULT_SIZE else DEFAULT_SIZE
            size = size - size % DIVISOR or size
            notes.append(f"--size was not given: images are stored as {size} x {size} pixels")
        if wide := sum(count for (_, width, height), count in headers.items() if width != height):
            notes.append(f"{wide} of {headers.total()} images are not square: their largest centered square is used")
        if channels == "auto":
            channels = 1 if headers and all(mode in GRAY for mode, _, _ in headers) else 3
            if channels == 1:
                notes.append("all images are gray: they are stored with one channel (--channels 3 for color)")
        return Preparation(
            **described,
            shape=(channels, size, size),
            kind=Bins.uint8(),
            options={"size": size, "channels": channels, "resampling": "lanczos", **options},
            parts=[Part(len(images.names), partial(self._blocks, images, size, channels)) for images in parts],
            label_dtype=None if parts[0].labels is None else np.dtype("<i4"),
            skip=self.skip,
            notes=tuple(notes),
        )

    def _blocks(self, images: ImageList, size: int, channels: int, start: int) -> Iterator[Block]:
        def read(index: int) -> UInt8[np.ndarray, "c size size"] | str:
            try:
                return pixels(images.load(index), images.names[index], size, channels)
            except DataError as error:
                return str(error)

        each = max(1, min(512, BLOCK_BYTES // (channels * size**2)))
        with ThreadPoolExecutor(self.threads) as pool:
            for first in range(start, len(images.names), each):
                batch = range(first, min(first + each, len(images.names)))
                found = list(pool.map(read, batch))
                used = [index for index, image in zip(batch, found, strict=True) if not isinstance(image, str)]
                rows = np.array([image for image in found if not isinstance(image, str)], np.uint8)
                yield Block(
                    rows=rows.reshape(-1, channels, size, size),
                    for_testing=images.for_testing[used],
                    labels=None if images.labels is None else images.labels[used],
                    skipped=tuple(reason for reason in found if isinstance(reason, str)),
                )


@dataclass(frozen=True)
class Folder(ImageOptions):
    """Every image below `path`; with `labels`, the folder directly below it is its class, in sorted order.

    The hash of its relative path decides whether an image is for testing: adding or removing files moves no other file.
    """

    summary: ClassVar[str] = "images in a folder; --labels, --size, --channels, --test-fraction, --skip"

    path: Path
    labels: bool = False

    def plan(self) -> Preparation:
        path = self.path.expanduser()
        names, listing, headers = list(walk(path, SUFFIXES)), hashlib.sha256(), Counter[tuple[str, int, int]]()
        if not names:
            raise DataError(f"{path} holds no images ({', '.join(SUFFIXES)}). Give the folder of images with --from.")
        for name in names:
            size = -1
            with suppress(Exception):  # a file without access or a damaged one: reported by name when it is read
                size = (path / name).stat().st_size
                with open_untrusted(path / name) as file, Image.open(file, formats=FORMATS) as image:
                    headers[image.mode, *image.size] += 1
            listing.update(f"{name}\0{size}\n".encode("utf-8", "surrogateescape"))
        options = {"split": f"an image is for testing if sha256(relative path) < {self.test_fraction}"}
        labels: Integer[np.ndarray, " images"] | None = None
        classes: tuple[str, ...] = ()
        if self.labels:
            labels, classes = _folder_labels(path, names)
            options["labels"] = "the folder below the root"
        is_test = np.array([for_testing(name, self.test_fraction) for name in names])
        images = ImageList(names, lambda index: open_image(path / names[index], names[index]), is_test, labels)
        return self.planned(
            [images],
            headers,
            options,
            name=path.resolve().name,
            source=f"the images of a folder {path.resolve().name!r}, cropped to their largest centered square",
            input=listing.hexdigest(),
            classes=classes,
        )


def _folder_labels(path: Path, names: Sequence[str]) -> tuple[Integer[np.ndarray, " images"], tuple[str, ...]]:
    """The number of each image's class, and the names of the classes."""
    for name in names:
        if "/" not in name:
            raise DataError(f"{path / name} is in no class. Move it into a folder of its class, or omit --labels.")
    folders = [name.partition("/")[0] for name in names]
    classes = check_classes(sorted(set(folders)))
    if len(classes) == 1:
        fix = f"Use --from {path / classes[0]} if it holds the classes, or omit --labels."
        raise DataError(f"all images of {path} are in {classes[0]}, which makes one class. {fix}")
    return np.searchsorted(classes, folders).astype("<i4"), classes


@dataclass(frozen=True)
class HuggingFace(ImageOptions):
    """The images in `column` of the dataset `path` (owner/name) on the hub. Code from the hub is never run.

    Parts named `train` and `test` (or `validation`) are kept; a dataset with only `train` is split by a hash of the
    row's number. A column `label` or `labels` of classes or integers gives the labels, and the classes their names; it
    is not used if rows of some part have no label, which the hub marks by -1.
    """

    summary: ClassVar[str] = "a Hugging Face dataset of images: --from OWNER/NAME, --column, --revision, as for folder"
    threads: ClassVar[int] = 1  # the package decodes

    path: str
    column: str = "image"
    revision: str = "main"

    def plan(self) -> Preparation:
        with extra("hub", "a dataset of the hub"):
            import datasets  # type: ignore[import-not-found, unused-ignore]
        try:
            loaded = datasets.load_dataset(self.path, revision=self.revision)
        except Exception as error:  # network, names and formats: the package has no common error
            raise DataError(f"cannot load the Hugging Face dataset {self.path!r}: {error}") from error
        names = {"train": "train", "test": "test" if "test" in loaded else "validation"}
        parts = {split: loaded[name] for split, name in names.items() if name in loaded}
        if "train" not in parts:
            raise DataError(f"{self.path!r} has no part named train; it has {', '.join(loaded)}.")
        if self.column not in (has := parts["train"].column_names):
            raise UsageError(f"{self.path!r} has no column {self.column!r}; it has {', '.join(has)}. Give a --column.")
        column, classes = _hub_labels(parts)
        sets, headers = [], Counter[tuple[str, int, int]]()
        for split, part in parts.items():
            is_test = np.full(len(part), split == "test")
            if "test" not in parts:
                is_test = rows_for_testing(0, len(part), self.test_fraction)
            labels = np.array(part[column][:], "<i4") if column else None
            images = ImageList([f"row {i}" for i in range(len(part))], partial(self._image, part), is_test, labels)
            sets.append(images)
            for index in range(min(HUB_SURVEYED, len(part))):
                with suppress(DataError):  # reported when the row is read
                    image = images.load(index)
                    headers[image.mode, *image.size] += 1
        split = "by name" if "test" in parts else f"row i is for testing if hash(i) < {self.test_fraction}"
        return self.planned(
            sets,
            headers,
            {"revision": self.revision, "split": split, **({"labels": column} if column else {})},
            name=self.path.rsplit("/", 1)[-1],
            source=f"Hugging Face dataset {self.path}, column {self.column!r}, cropped to the largest centered square",
            input=fingerprint([self.path, self.column, {split: len(part) for split, part in parts.items()}]),
            classes=classes,
        )

    def _image(self, part: Any, index: int) -> Image.Image:
        name = f"row {index}"
        with _decoding(name):
            image = part[index][self.column]
            if not isinstance(image, Image.Image):
                raise DataError(f"{name} holds a {type(image).__name__}, not an image")
            return checked(image, name)


def _hub_labels(parts: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The column of the labels and the names of the classes; an empty name if not every row has a label."""
    for column in ("label", "labels"):
        features = [part.features.get(column) for part in parts.values()]
        names = getattr(features[0], "names", ())  # of a ClassLabel
        if not (names or "int" in getattr(features[0], "dtype", "")) or any(f != features[0] for f in features):
            continue
        most = len(names) or MAX_CLASSES
        if all(cell is not None and 0 <= cell < most for part in parts.values() for cell in part[column][:]):
            return column, check_classes(names)
    return "", ()
