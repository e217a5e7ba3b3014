"""Published sets of images, from the official files: CIFAR-10, downsampled ImageNet and MNIST.

CIFAR-10 (Krizhevsky, 2009), the binary version: six files of 10,000 records, each of which is a label byte and 3072
pixels, channel by channel. Every file is compared with its known SHA-256 before a record is used. The classes have the
names in `batches.meta.txt`, one per line, if that file exists.

Downsampled ImageNet (Chrabaszcz, Loshchilov and Hutter, 2017) at 32 or 64 pixels: `train_data_batch_1.npz` ..
`train_data_batch_10.npz` and `val_data.npz` hold `data`, (N, 3 size^2) bytes channel by channel, and `labels` from 1 to
1000, stored here as 0 to 999. The files may be in a folder, unpacked or in the zip archives in which they are
distributed (one for 32 pixels, two for 64, and one for validation).

MNIST (LeCun, Cortes and Burges, 1998): four idx files, packed with gzip or not.

Files are read in place as a stream. Pickled versions are never read, because loading a pickle can run code.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import UInt8, UInt16

from bsi.data.files import Member, NpzFile, members
from bsi.data.prepare import Block, Plan
from bsi.data.store import check_classes
from bsi.download import download
from bsi.errors import DataError, UsageError
from bsi.io import data_folder, digest, fingerprint
from bsi.progress import Progress
from bsi.values import Bins

CIFAR10 = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CIFAR10_FILES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
CIFAR10_NAMES = "batches.meta.txt"
CIFAR10_PICKLES = ("data_batch_1", "test_batch", "batches.meta", "cifar-10-python.tar.gz")
RECORD = 1 + 3 * 32 * 32
ROWS = 1000

IMAGENET = "https://image-net.org/download-images.php (downsampled images, npz format; needs an account)"
BATCHES = (*(f"train_data_batch_{i}.npz" for i in range(1, 11)), "val_data.npz")

STEMS = {"train": "train", "test": "t10k"}
IDX = {  # the names of the arrays, and those under which they are distributed
    f"{stem}-{kind}": [f"{stem}-{kind.replace('-', between)}-ubyte{end}" for between in "-." for end in ("", ".gz")]
    for stem in STEMS.values()
    for kind in ("images-idx3", "labels-idx1")
}
IDX_FILES = [name for names in IDX.values() for name in names]

MAX_BYTES = {"cifar10": 1 << 30, "imagenet": 64 << 30}  # unpacked


@dataclass(frozen=True)
class Cifar10:
    """50,000 training and 10,000 test images of 32 x 32 pixels in ten classes."""

    summary: ClassVar[str] = "CIFAR-10, from the official binary archive or folder; downloaded when --from is not given"

    path: Path | None = None

    def plan(self) -> Plan:
        path = _downloaded() if self.path is None else self.path.expanduser()
        wanted = {*CIFAR10_FILES, *CIFAR10_PICKLES, CIFAR10_NAMES}
        with members(path, wanted, MAX_BYTES["cifar10"]) as found:
            counts = {name: _records(path, found, name) for name in CIFAR10_FILES}
            classes = _names(path, found[CIFAR10_NAMES]) if CIFAR10_NAMES in found else ()
        return Plan(
            name="cifar10",
            source=CIFAR10,
            shape=(3, 32, 32),
            kind=Bins.uint8(),
            options={},
            input=fingerprint(CIFAR10_FILES),
            total=sum(counts.values()),
            unit="image",
            blocks=lambda start: _cifar10_blocks(path, start),
            label_dtype=np.dtype("uint8"),
            classes=classes,
        )


def _downloaded() -> Path:
    """The unpacked folder or the archive in the data folder, or else a download of the archive."""
    folder = data_folder() / "cifar-10-batches-bin"
    archive = data_folder() / "cifar-10-binary.tar.gz"
    return folder if folder.is_dir() else download(CIFAR10, archive, CIFAR10_SHA256, "give it with --from")


def _records(path: Path, found: dict[str, Member], name: str) -> int:
    """The number of records of one file, after comparing its hash."""
    if name not in found:
        pickled = any(pickle in found for pickle in CIFAR10_PICKLES)
        hint = "It holds the Python version, made of pickles, which are never loaded. " if pickled else ""
        raise DataError(f"{path} holds no {name}. {hint}Give the binary version ({CIFAR10}), packed or unpacked.")
    with found[name].open() as file:
        sha256 = digest(iter(lambda: file.read(1 << 20), b""))
    if sha256 != CIFAR10_FILES[name]:
        raise DataError(
            f"{path}: {name} is damaged: expected sha256 {CIFAR10_FILES[name]}, found {sha256}. Download it again."
        )
    return found[name].size // RECORD


def _names(path: Path, member: Member) -> tuple[str, ...]:
    with member.open() as file:
        names = file.read(1024).decode("ascii", "backslashreplace").split()
    if len(names) != 10:
        raise DataError(f"{path}: {CIFAR10_NAMES} holds {len(names)} names of classes, expected 10. Download it again.")
    return check_classes(names)


def _cifar10_blocks(path: Path, start: int) -> Iterator[Block]:
    first = 0
    with members(path, CIFAR10_FILES, MAX_BYTES["cifar10"]) as found:
        for name in CIFAR10_FILES:
            split = "test" if name == "test_batch.bin" else "train"
            count = found[name].size // RECORD
            if start < first + count:
                with found[name].open() as file:
                    file.seek(max(0, start - first) * RECORD)
                    while raw := file.read(ROWS * RECORD):
                        records = np.frombuffer(raw, np.uint8).reshape(-1, RECORD)
                        images = records[:, 1:].reshape(-1, 3, 32, 32)
                        yield Block(len(records), {split: images}, {split: records[:, 0]})
            first += count


@dataclass(frozen=True)
class ImageNet32:
    """1,281,167 training and 50,000 validation images of 32 x 32 pixels in a thousand classes."""

    summary: ClassVar[str] = "downsampled ImageNet, 32 x 32, from a folder with the official npz batches or their zips"
    size: ClassVar[int] = 32

    path: Path

    def plan(self) -> Plan:
        path, size, counts = self.path.expanduser(), self.size, {}
        # Decompressing up to a header inside a zip inside a zip takes minutes for the larger set.
        with _batches(path) as found, Progress(f"check imagenet{size}", len(BATCHES), "batch") as progress:
            for name in BATCHES:
                with _opened(found, name) as batch, batch.array("data") as data:
                    if len(data.shape) != 2 or data.shape[1] != 3 * size * size or data.dtype != np.uint8:
                        raise UsageError(
                            f"{data.name} holds {data.shape} of {data.dtype}, expected (N, {3 * size * size}) of uint8 "
                            f"at {size} pixels."
                        )
                    counts[name] = (len(data), found[name].size)
                progress.advance()
        return Plan(
            name=f"imagenet{size}",
            source=IMAGENET,
            shape=(3, size, size),
            kind=Bins.uint8(),
            options={},
            input=fingerprint(counts),
            total=sum(count for count, _ in counts.values()),
            unit="image",
            blocks=lambda start: _imagenet_blocks(path, size, start),
            label_dtype=np.dtype("<u2"),
        )


@dataclass(frozen=True)
class ImageNet64(ImageNet32):
    """The same images of 64 x 64 pixels."""

    summary: ClassVar[str] = "downsampled ImageNet, 64 x 64, from a folder with the official npz batches or their zips"
    size: ClassVar[int] = 64


@contextmanager
def _batches(path: Path) -> Iterator[dict[str, Member]]:
    """The batches found in a folder, in the zips of a folder, or in one zip."""
    with ExitStack() as stack:
        places = [path, *sorted(path.glob("*.zip"))] if os.path.isdir(path) else [path]
        found: dict[str, Member] = {}
        for place in places:
            for name, member in stack.enter_context(members(place, BATCHES, MAX_BYTES["imagenet"])).items():
                found.setdefault(name, member)
        missing = [name for name in BATCHES if name not in found]
        if missing:
            pickled = os.path.exists(path / "train_data_batch_1")
            hint = "It holds the pickled version, which is never loaded. " if pickled else ""
            raise DataError(f"{path} holds no {', '.join(missing[:3])}. {hint}Get the npz version from {IMAGENET}.")
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


def _imagenet_blocks(path: Path, size: int, start: int) -> Iterator[Block]:
    first = 0
    with _batches(path) as found:
        for name in BATCHES:
            split = "test" if name == "val_data.npz" else "train"
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


@dataclass(frozen=True)
class Mnist:
    """60,000 training and 10,000 test images of 28 x 28 gray pixels in ten classes."""

    summary: ClassVar[str] = "MNIST, or another set in its format, from a folder with the four idx files, packed or not"

    path: Path

    def plan(self) -> Plan:
        path = self.path.expanduser()
        with members(path, IDX_FILES, MAX_BYTES["cifar10"]) as found:
            images = {split: _idx(path, found, f"{stem}-images-idx3") for split, stem in STEMS.items()}
            labels = {split: _idx(path, found, f"{stem}-labels-idx1") for split, stem in STEMS.items()}
        for split, rows in images.items():
            if rows.shape[1:] != images["train"].shape[1:] or labels[split].shape != (len(rows),):
                raise DataError(
                    f"{path}: {split} has images of shape {rows.shape} and labels of shape {labels[split].shape}. "
                    f"Download them again."
                )
        return Plan(
            name="mnist",
            source="MNIST (LeCun, Cortes and Burges, 1998)",
            shape=(1, *images["train"].shape[1:]),
            kind=Bins.uint8(),
            options={},
            input=fingerprint([digest([array.tobytes()]) for array in (*images.values(), *labels.values())]),
            total=sum(map(len, images.values())),
            unit="image",
            blocks=lambda start: _mnist_blocks(images, labels, start),
            label_dtype=np.dtype("uint8"),
        )

    @staticmethod
    def found_in(folder: Path) -> bool:
        """Whether a folder holds the images of a set in this format."""
        return any((folder / name).is_file() for name in IDX_FILES)


def _idx(path: Path, found: dict[str, Member], name: str) -> UInt8[np.ndarray, "..."]:
    """An array of bytes in the idx format: two zeros, the type, the number of axes, the axes, the elements."""
    given = next((found[known] for known in IDX[name] if known in found), None)
    if given is None:
        raise DataError(f"{path} holds no {name}-ubyte. Give the folder with MNIST's four idx files.")
    axes = 3 if "idx3" in name else 1
    try:
        with given.open() as file:
            stream = gzip.GzipFile(fileobj=file) if given.name.endswith(".gz") else file
            header = stream.read(4 + 4 * axes)
            shape = tuple(int.from_bytes(header[i : i + 4], "big") for i in range(4, 4 + 4 * axes, 4))
            size = math.prod(shape)
            if header[:4] != bytes([0, 0, 8, axes]) or size > MAX_BYTES["cifar10"]:
                raise DataError(f"{path}: {name} is not an idx file of bytes with {axes} axes. Download it again.")
            raw = stream.read(size + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path}: {name} is damaged: {error}. Download it again.") from error
    if len(raw) != size:
        raise DataError(f"{path}: {name} is damaged: expected {size} bytes, found {len(raw)}. Download it again.")
    return np.frombuffer(raw, np.uint8).reshape(shape)


def _mnist_blocks(
    images: dict[str, UInt8[np.ndarray, "n h w"]], labels: dict[str, UInt8[np.ndarray, " n"]], start: int
) -> Iterator[Block]:
    for split, rows in images.items():
        skip = min(start, len(rows))
        start -= skip
        for first in range(skip, len(rows), ROWS):
            block = rows[first : first + ROWS, None]
            yield Block(len(block), {split: block}, {split: labels[split][first : first + ROWS]})
