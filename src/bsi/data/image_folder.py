"""Images from files: decoding, cropping and resampling, and the source `folder`.

An image becomes its largest centered square, resampled to size x size; the manifest records this. Files that cannot be
converted faithfully are rejected by name: truncated files, more than eight bits per channel, CMYK, transparency,
several frames, more than 2^26 pixels, and images smaller than the size.

In a folder, the hash of its relative path decides whether an image is for testing: adding or removing files moves no
other file. With `labels`, the folder directly below the root is an image's class; classes are numbered in sorted order.
The tree is walked in sorted order, one folder at a time, and images are decoded by a few threads: the memory is that of
one folder's listing and one block, at any number of images.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, get_args

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError

from bsi.data.files import BLOCK_BYTES, for_testing, walk
from bsi.data.prepare import Block, Plan, check_fraction
from bsi.data.store import check_classes
from bsi.errors import DataError, UsageError
from bsi.io import open_untrusted
from bsi.values import Bins

# Formats with decoders in Pillow that are pure image readers; others call programs (EPS) or are rarely fuzzed.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
MAX_PIXELS = 1 << 26
MAX_THREADS = 8
DEFAULT_SIZE = 64
GRAY = ("1", "L", "LA")

Resampling = Literal["lanczos", "bicubic", "bilinear", "box"]


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The options of sources of images; see `bsi data --help`."""

    size: int | None = None
    channels: int | Literal["auto"] = "auto"
    resampling: Resampling = "lanczos"
    test_fraction: float = 0.1
    skip: int = 0

    def __post_init__(self) -> None:
        if self.size is not None and not 1 <= self.size <= 4096:
            raise UsageError(f"size is the side of the images in pixels, 1 to 4096: got {self.size}")
        if self.channels not in (1, 3, "auto"):
            raise UsageError(f"channels must be 3 (color), 1 (gray) or auto: got {self.channels}")
        if self.resampling not in get_args(Resampling):
            raise UsageError(f"resampling is one of {', '.join(get_args(Resampling))}: got {self.resampling!r}")
        if self.skip < 0:
            raise UsageError(f"skip must be at least 0, got {self.skip}.")
        check_fraction(self.test_fraction)


def open_image(path: Path, name: str) -> Image.Image:
    """The image in a file, upright and opaque, with 8 bits per channel. Errors begin with `name`."""
    try:
        with open_untrusted(path) as file:
            if not os.fstat(file.fileno()).st_size:
                raise DataError(f"{name} is empty")
            with Image.open(file, formats=FORMATS) as image:
                return checked(image, name)
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise DataError(f"{name} cannot be decoded: it is no {', '.join(FORMATS)} image") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{name} is too large to decode: {error}") from error
    except Exception as error:  # a decoder given damaged data may raise anything
        raise DataError(f"{name} cannot be decoded ({type(error).__name__}: {error})") from error


def checked(image: Image.Image, name: str) -> Image.Image:
    """The decoded image, upright and opaque. Raises an error for what cannot be converted faithfully to 8-bit RGB."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise DataError(f"{name} has {width} x {height} pixels, more than {MAX_PIXELS}: shrink it first")
    if getattr(image, "is_animated", False) and image.format != "MPO":  # an MPO of a camera starts with the picture
        raise DataError(f"{name} is animated or has several pages: save one of them")
    if image.mode == "CMYK":
        raise DataError(f"{name} is CMYK, whose colors depend on a profile: convert it to RGB first")
    # Pillow opens a 16-bit color PNG as RGB: only the decoder's own mode shows its depth.
    tiles = getattr(image, "tile", ()) if image.format in ("PNG", "TIFF") else ()
    if image.mode.startswith(("I", "F")) or any(re.search(r";(16|32)", str(tile[3])) for tile in tiles):
        raise DataError(f"{name} has more than eight bits per channel: convert it to 8 bits first")
    if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA"):
        raise DataError(f"{name} has the color mode {image.mode}: convert it to RGB first")
    image = ImageOps.exif_transpose(image)
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema() != (255, 255):
            raise DataError(f"{name} is partly transparent: flatten it first")
    return image


def pixels(
    image: Image.Image, name: str, size: int, channels: int, resampling: Resampling
) -> UInt8[np.ndarray, "c size size"]:
    """The largest centered square of an image, resampled to (channels, size, size)."""
    side = min(image.size)
    if side < size:
        raise DataError(
            f"{name} has {image.width} x {image.height} pixels, fewer than the size {size}: choose a smaller --size"
        )
    image = image.convert("RGB" if channels == 3 else "L")
    left, top = (image.width - side) // 2, (image.height - side) // 2
    method = Image.Resampling[resampling.upper()]
    array = np.asarray(image.resize((size, size), method, box=(left, top, left + side, top + side)))
    return np.ascontiguousarray(array.transpose(2, 0, 1) if channels == 3 else array[None])


@dataclass(frozen=True)
class Geometry:
    """The size and channels that images are stored with, and what was assumed about them."""

    size: int
    channels: int
    notes: tuple[str, ...]


def geometry(headers: Iterable[tuple[str, int, int]], size: int | None, channels: int | Literal["auto"]) -> Geometry:
    """Choose what was not given by mode, width and height of the images.

    Images are gray if all of them are stored as gray. Their size is their smaller side, if that is the same for all of
    them and at most 64; otherwise it is 64.
    """
    total, wide, gray = 0, 0, True
    sides = set[int]()
    for mode, width, height in headers:
        total += 1
        wide += width != height
        gray &= mode in GRAY
        sides.add(min(width, height))
    chosen = (1 if gray and total else 3) if channels == "auto" else channels
    notes = []
    if size is None:
        size = min(*sides, DEFAULT_SIZE) if len(sides) == 1 else DEFAULT_SIZE
        notes.append(f"--size was not given: images are stored as {size} x {size} pixels")
    if wide:
        notes.append(f"{wide} of {total} images are not square: their largest centered square is used")
    if channels == "auto" and chosen == 1:
        notes.append("all images are gray: they are stored with one channel (--channels 3 for color)")
    return Geometry(size, chosen, tuple(notes))


@dataclass(frozen=True)
class Folder(ImageOptions):
    """Every image below `path`, cropped to its largest centered square and resampled to `size`."""

    summary: ClassVar[str] = (
        "a folder of images in any tree; --labels, --size, --channels, --resampling, --test-fraction, --skip"
    )

    path: Path
    labels: bool = False

    def plan(self) -> Plan:
        path = self.path.expanduser()
        total, listing, found = 0, hashlib.sha256(), set[str]()
        for name in walk(path, SUFFIXES):
            total += 1
            listing.update(f"{name}\0{_size(path / name)}\n".encode("utf-8", "surrogateescape"))
            if self.labels:
                found.add(_class_of(path, name))
        if not total:
            raise DataError(f"{path} holds no images ({', '.join(SUFFIXES)}). Give the folder of images with --from.")
        if len(found) == 1:
            only = path / found.pop()
            raise DataError(
                f"all images of {path} are in {only.name}, which makes one class. If the folders in there are the "
                f"classes, use --from {only}; otherwise omit --labels."
            )
        classes = check_classes(sorted(found))
        form = geometry(_headers(path), self.size, self.channels)
        return Plan(
            name=path.resolve().name,
            source=f"the images of a folder {path.resolve().name!r}, cropped to their largest centered square",
            shape=(form.channels, form.size, form.size),
            kind=Bins.uint8(),
            options={
                "size": form.size,
                "channels": form.channels,
                "resampling": self.resampling,
                "split": f"an image is for testing if sha256(relative path) < {self.test_fraction}",
                **({"labels": "the folder below the root"} if self.labels else {}),
            },
            input=listing.hexdigest(),
            total=total,
            unit="image",
            blocks=partial(self._blocks, classes, form),
            label_dtype=np.dtype("<i4") if self.labels else None,
            classes=classes,
            skip=self.skip,
            notes=form.notes,
        )

    def _blocks(self, classes: tuple[str, ...], form: Geometry, start: int) -> Iterator[Block]:
        path, numbers = self.path.expanduser(), {name: number for number, name in enumerate(classes)}
        names = itertools.islice(walk(path, SUFFIXES), start, None)

        def read(name: str) -> Item | str:
            try:
                image = open_image(path / name, name)
                array = pixels(image, name, form.size, form.channels, self.resampling)
            except DataError as error:
                return str(error)
            split = "test" if for_testing(name, self.test_fraction) else "train"
            if not self.labels:
                return split, array, None
            if _class_of(path, name) not in numbers:
                raise DataError(
                    f"{path / name} is of a class that appeared in the meantime: run the same command again."
                )
            return split, array, numbers[_class_of(path, name)]

        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
            while batch := list(itertools.islice(names, items_per_block(form))):
                yield image_block(pool.map(read, batch))


Item = tuple[str, UInt8[np.ndarray, "c size size"], int | None]  # split, pixels, label


def items_per_block(form: Geometry) -> int:
    return max(1, min(512, BLOCK_BYTES // (form.channels * form.size**2)))


def image_block(items: Iterable[Item | str]) -> Block:
    """A block of images, each with its split and label, or the reason why it was skipped."""
    rows: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    labels: dict[str, list[int]] = {"train": [], "test": []}
    count, skipped = 0, []
    for item in items:
        count += 1
        if isinstance(item, str):
            skipped.append(item)
            continue
        split, image, label = item
        rows[split].append(image)
        if label is not None:
            labels[split].append(label)
    return Block(
        items=count,
        rows={split: np.stack(images) for split, images in rows.items() if images},
        labels={split: np.array(own, "<i4") for split, own in labels.items() if own},
        skipped=tuple(skipped),
    )


def _headers(root: Path) -> Iterator[tuple[str, int, int]]:
    """Mode, width and height of each image that has a readable header."""
    for name in walk(root, SUFFIXES):
        try:
            with open_untrusted(root / name) as file, Image.open(file, formats=FORMATS) as image:
                yield image.mode, *image.size
        except Exception:  # a damaged image: reported by name when it is read
            continue


def _class_of(root: Path, name: str) -> str:
    """The folder below the root that a relative path begins with."""
    folder, slash, _ = name.partition("/")
    if not slash:
        raise DataError(
            f"{root / name} is in no class: with --labels, each folder in {root} is a class. Move it into one, or omit "
            f"--labels."
        )
    return folder


def _size(path: Path) -> int:
    """In bytes; -1 for a file without access, which is reported when it is read."""
    try:
        return path.stat().st_size
    except OSError:
        return -1
