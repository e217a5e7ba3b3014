"""Images in any tree of folders.

An image is for testing if the hash of its relative path says so: adding or removing files moves no other file. With
`labels`, the folder directly below the root that an image lies in is its class, and the classes are numbered in sorted
order.

The tree is walked in sorted order, one folder at a time, and images are decoded by a few threads block by block: memory
is that of one folder's listing, one block and the images being decoded, at any number of images.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import UInt8

from bsi.data.images import SUFFIXES, Resampling, check_options, read
from bsi.data.manifest import check_classes
from bsi.data.plan import BLOCK_BYTES, Block, Plan
from bsi.errors import DataError
from bsi.values import Bins

__all__ = ["Folder", "for_testing", "walk"]

MAX_THREADS = 8


@dataclass(frozen=True)
class Folder:
    """Every image below `path`, center-cropped to a square and resampled to `size`."""

    summary: ClassVar[str] = (
        "a folder of images in any tree; --labels, --size, --channels, --resampling, --test-fraction, --skip"
    )

    path: Path
    labels: bool = False
    size: int = 64
    channels: int = 3
    resampling: Resampling = "lanczos"
    test_fraction: float = 0.1
    skip: int = 0

    def plan(self) -> Plan:
        check_options(self.size, self.channels, self.resampling, self.test_fraction)
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
                f"all images of {path} lie in {only.name}, which makes one class. If the folders in there are the "
                f"classes, give --from {only}; otherwise leave --labels out."
            )
        classes = check_classes(sorted(found))
        return Plan(
            name=path.resolve().name,
            source=f"the images of a folder {path.resolve().name!r}",
            shape=(self.channels, self.size, self.size),
            dtype=np.dtype("uint8"),
            bins=Bins.uint8(),
            options={
                "size": self.size,
                "channels": self.channels,
                "crop": "largest centerd square",
                "resampling": self.resampling,
                "split": f"an image is for testing if sha256(relative path) < {self.test_fraction}",
                **({"labels": "the folder below the root"} if self.labels else {}),
            },
            input=listing.hexdigest(),
            total=total,
            rows=total,
            unit="image",
            blocks=partial(self._blocks, classes),
            label_dtype=np.dtype("<i4") if self.labels else None,
            classes=classes,
            skip=self.skip,
        )

    def _blocks(self, classes: tuple[str, ...], start: int) -> Iterator[Block]:
        path, numbers = self.path.expanduser(), {name: number for number, name in enumerate(classes)}
        names = itertools.islice(walk(path, SUFFIXES), start, None)
        each = max(1, min(512, BLOCK_BYTES // (self.channels * self.size**2)))
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
            while batch := list(itertools.islice(names, each)):
                rows: dict[str, list[UInt8[np.ndarray, "..."]]] = {"train": [], "test": []}
                labels: dict[str, list[int]] = {"train": [], "test": []}
                skipped = []
                for name, result in zip(batch, pool.map(partial(self._read, path), batch), strict=True):
                    if isinstance(result, DataError):
                        skipped.append(str(result))
                    else:
                        split = "test" if for_testing(name, self.test_fraction) else "train"
                        rows[split].append(result)
                        if self.labels:
                            labels[split].append(_number(numbers, path, name))
                yield Block(
                    items=len(batch),
                    rows={split: np.stack(images) for split, images in rows.items() if images},
                    labels={split: np.array(own, "<i4") for split, own in labels.items() if own},
                    skipped=tuple(skipped),
                )

    def _read(self, path: Path, name: str) -> UInt8[np.ndarray, "c s s"] | DataError:
        try:
            return read(path / name, name, self.size, self.channels, self.resampling)
        except DataError as error:
            return error


def _class_of(root: Path, name: str) -> str:
    """The folder below the root that a relative path begins with."""
    folder, slash, _ = name.partition("/")
    if not slash:
        raise DataError(
            f"{root / name} lies in no folder of its own class: with --labels, each folder in {root} is a class. Move "
            f"it into one, or leave --labels out."
        )
    return folder


def _number(numbers: Mapping[str, int], root: Path, name: str) -> int:
    """The label of an image."""
    folder = _class_of(root, name)
    if folder not in numbers:
        raise DataError(f"{root / name} is of a class that came while {root} was read: run the same command again.")
    return numbers[folder]


def _size(path: Path) -> int:
    """In bytes; -1 for a file that cannot be looked at, which is reported when it is to be read."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def for_testing(name: str, fraction: float) -> bool:
    """Whether the hash of a relative path, as a number in [0, 1), is below `fraction`."""
    sha = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(sha[:8], "big") < fraction * 2**64


def walk(root: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Relative paths of the files with one of the suffixes, folder by folder, sorted; hidden ones are left out."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder. Give the folder with --from.")
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(root / folder) as entries:
                found = sorted((entry.name, entry.is_dir(), entry.is_symlink()) for entry in entries)
        except OSError as error:
            raise DataError(f"cannot read the folder {root / folder}: {error}") from error
        below = []
        for name, is_folder, is_link in found:
            inside = f"{folder}/{name}" if folder else name
            if name.startswith("."):
                continue
            if is_folder and is_link:
                raise DataError(
                    f"{root / inside} links to a folder, which could lead in a circle. Replace it by the folder itself."
                )
            if is_folder:
                below.append(inside)
            elif name.lower().endswith(suffixes):
                yield inside
        folders.extend(reversed(below))
