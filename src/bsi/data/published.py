"""Published sets of images, from the official files: CIFAR-10, downsampled ImageNet and MNIST; and binary images.

CIFAR-10 (Krizhevsky, 2009), the binary version: six files of 10,000 records, each of which is a label byte and 3072
pixels, channel by channel. Every file is compared with its known SHA-256 before a record is used.

Downsampled ImageNet (Chrabaszcz, Loshchilov and Hutter, 2017) at 32 or 64 pixels: `train_data_batch_1.npz` ..
`train_data_batch_10.npz` and `val_data.npz` hold `data`, (N, 3 size^2) bytes channel by channel, and `labels` from 1 to
1000, stored here as 0 to 999, in a folder, unpacked or in the zip archives in which they are distributed.

MNIST (LeCun, Cortes and Burges, 1998): four idx files, packed with gzip or not.

Pickled versions are never read, because loading a pickle can run code.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import math
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import UInt8

from bsi.data.files import ArrayFile, Member, members, open_arrays
from bsi.data.images import Folder
from bsi.data.prepare import Block, Part, Preparation, array_part
from bsi.data.store import MANIFEST, open_dataset
from bsi.errors import DataError, UsageError
from bsi.io import data_folder, digest, download, fingerprint
from bsi.progress import Progress
from bsi.values import Bins, Symbols

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
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGENET = "https://image-net.org/download-images.php (downsampled images, npz format; needs an account)"
BATCHES = (*(f"train_data_batch_{i}.npz" for i in range(1, 11)), "val_data.npz")
IDX = [f"{stem}-{kind}" for stem in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
IDX_FILES = {f"{name}-ubyte{end}": name for name in IDX for end in ("", ".gz")}
IDX_FILES |= {file.replace("-idx", ".idx"): name for file, name in IDX_FILES.items()}  # the other published spelling
MAX_BYTES, MAX_IMAGENET_BYTES = 1 << 30, 64 << 30  # unpacked
PIECE = 1 << 20


def _images(
    name: str, source: str, shape: tuple[int, ...], input: str, parts: Sequence[Part], labels: str = "u1"
) -> Preparation:
    """The plan of 8-bit images with labels, without options."""
    return Preparation(name, source, shape, Bins.uint8(), {}, input, parts, np.dtype(labels))


def _require(path: Path, found: Collection[str], names: Iterable[str], instead: str) -> None:
    """Raise if a file is missing."""
    if missing := [name for name in names if name not in found]:
        hint = "Versions made of pickles, which are never loaded, do not help"
        raise DataError(f"{path} holds no {', '.join(missing[:3])}. {hint}: give {instead}.")


def _read(file: Any, size: int) -> bytes:
    """Read the content, at most one piece more than `size` bytes. Long reads of an archive are rejected."""
    return b"".join(itertools.islice(iter(partial(file.read, PIECE), b""), size // PIECE + 1))


@dataclass(frozen=True)
class Cifar10:
    """50,000 training and 10,000 test images of 32 x 32 pixels in ten classes."""

    summary: ClassVar[str] = "CIFAR-10, from the official binary archive or folder; downloaded when --from is not given"

    path: Path | None = None

    def plan(self) -> Preparation:
        folder, archive = (data_folder() / name for name in ("cifar-10-batches-bin", "cifar-10-binary.tar.gz"))
        if self.path is not None:
            path = self.path.expanduser()
        else:
            path = folder if folder.is_dir() else download(CIFAR10, archive, CIFAR10_SHA256, "give it with --from")
        parts = []
        with members(path, CIFAR10_FILES, MAX_BYTES) as found:
            _require(path, found, CIFAR10_FILES, f"the binary version ({CIFAR10}), packed or unpacked")
            for name, expected in CIFAR10_FILES.items():
                with found[name].open() as file:
                    raw = _read(file, MAX_BYTES)
                if (found_hash := digest(raw)) != expected:
                    raise DataError(f"{path}: {name} is damaged: expected sha256 {expected}, found {found_hash}.")
                records = np.frombuffer(raw, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
                images = records[:, 1:].reshape(-1, 3, 32, 32)
                parts.append(array_part(images, records[:, 0], name == "test_batch.bin"))
        plan = _images("cifar10", CIFAR10, (3, 32, 32), fingerprint(CIFAR10_FILES), parts)
        return replace(plan, classes=CIFAR10_CLASSES)


@dataclass(frozen=True)
class ImageNet32:
    """1,281,167 training and 50,000 validation images of 32 x 32 pixels in a thousand classes."""

    summary: ClassVar[str] = "downsampled ImageNet, 32 x 32, from a folder with the official npz batches or their zips"
    size: ClassVar[int] = 32

    path: Path

    def plan(self) -> Preparation:
        path, size, counts = self.path.expanduser(), self.size, {}
        # Decompressing up to a header inside a zip inside a zip takes minutes for the larger set.
        with _batches(path) as found, Progress(f"check imagenet{size}", len(BATCHES), "batch") as progress:
            for name in BATCHES:
                with _arrays(found[name]) as arrays, arrays["data"]() as data:
                    if data.shape[1:] != (3 * size * size,) or data.dtype != np.uint8:
                        expected = f"expected (N, {3 * size * size}) of uint8 at {size} pixels"
                        raise UsageError(f"{data.name} holds {data.shape} of {data.dtype}, {expected}.")
                    counts[name] = (len(data), found[name].size)
                progress.advance()
        parts = [Part(count, partial(self._blocks, path, name, count)) for name, (count, _) in counts.items()]
        return _images(f"imagenet{size}", IMAGENET, (3, size, size), fingerprint(counts), parts, "<u2")

    def _blocks(self, path: Path, name: str, count: int, start: int) -> Iterator[Block]:
        with _batches(path) as found, _arrays(found[name]) as arrays:
            with arrays["labels"]() as array:  # before the images: alternating would rewind a nested archive
                labels = array.labels(count, 1, 1000)[start:] - 1
            with arrays["data"]() as data:
                for rows in data.blocks(start):
                    here, labels = labels[: len(rows)], labels[len(rows) :]
                    yield Block(rows.reshape(-1, 3, self.size, self.size), name == "val_data.npz", here)


@dataclass(frozen=True)
class ImageNet64(ImageNet32):
    """The same images of 64 x 64 pixels."""

    summary: ClassVar[str] = "downsampled ImageNet, 64 x 64, from a folder with the official npz batches or their zips"
    size: ClassVar[int] = 64


@contextmanager
def _batches(path: Path) -> Iterator[dict[str, Member]]:
    """The batches found in a folder, in the zips of a folder, or in one zip."""
    with ExitStack() as stack:
        found: dict[str, Member] = {}
        for place in [path, *sorted(path.glob("*.zip"))] if os.path.isdir(path) else [path]:
            found = stack.enter_context(members(place, BATCHES, MAX_IMAGENET_BYTES)) | found
        _require(path, found, BATCHES, f"the npz version from {IMAGENET}")
        yield found


@contextmanager
def _arrays(batch: Member) -> Iterator[dict[str, Callable[[], ArrayFile]]]:
    with open_arrays(Path(batch.name), batch.open()) as arrays:
        _require(Path(batch.name), arrays, ("data", "labels"), f"the npz version from {IMAGENET}")
        yield arrays


@dataclass(frozen=True)
class Mnist:
    """60,000 training and 10,000 test images of 28 x 28 gray pixels in ten classes."""

    summary: ClassVar[str] = "MNIST, or another set in its format, from a folder with the four idx files, packed or not"

    path: Path

    def plan(self) -> Preparation:
        path = self.path.expanduser()
        with members(path, IDX_FILES, MAX_BYTES) as files:
            found = {IDX_FILES[name]: member for name, member in files.items()}
            _require(path, found, IDX, "the folder with MNIST's four idx files")
            train, train_labels, test, test_labels = (_idx(path, found[name], name) for name in IDX)
        for rows, labels in ((train, train_labels), (test, test_labels)):
            if rows.shape[1:] != train.shape[1:] or labels.shape != rows.shape[:1]:
                shapes = f"images of shape {rows.shape} and labels of shape {labels.shape}"
                raise DataError(f"{path} holds {shapes}. Download them again.")
        content = fingerprint([digest(array.tobytes()) for array in (train, test, train_labels, test_labels)])
        parts = [array_part(train[:, None], train_labels, False), array_part(test[:, None], test_labels, True)]
        return _images("mnist", "MNIST (LeCun, Cortes and Burges, 1998)", (1, *train.shape[1:]), content, parts)


def _idx(path: Path, given: Member, name: str) -> UInt8[np.ndarray, "..."]:
    """An array of bytes in the idx format: two zeros, the type, the number of axes, the axes, the elements."""
    axes = 3 if "idx3" in name else 1
    try:
        with given.open() as file:
            stream = gzip.GzipFile(fileobj=file) if given.name.endswith(".gz") else file
            header = stream.read(4 + 4 * axes)
            shape = tuple(int.from_bytes(header[i : i + 4], "big") for i in range(4, 4 + 4 * axes, 4))
            size = math.prod(shape)
            if header[:4] != bytes([0, 0, 8, axes]) or size > MAX_BYTES:
                raise DataError(f"{path}: {name} is not an idx file of bytes with {axes} axes. Download it again.")
            raw = _read(stream, size)
            if len(raw) != size:
                raise EOFError(f"expected {size} bytes, found {len(raw)}")
            return np.frombuffer(raw, np.uint8).reshape(shape)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path}: {name} is damaged: {error}. Download it again.") from error


@dataclass(frozen=True)
class Binary:
    """The images of a prepared dataset, of a folder, or of MNIST's four files, as symbols 0 and 1.

    By a threshold, a pixel is 1 if its value is above it. Drawn at random, a pixel is 1 with the probability of its
    value in [0, 1], once and for all: this is the static binarization of the literature on MNIST. The random numbers of
    an image are derived from its content, so they depend neither on the order of the images nor on interruptions.
    """

    summary: ClassVar[str] = "binary images of a dataset, a folder or MNIST's files; --threshold or --stochastic"

    path: str
    threshold: float | None = None
    stochastic: bool = False

    def plan(self) -> Preparation:
        if self.stochastic and self.threshold is not None:
            raise UsageError(f"--stochastic and --threshold {self.threshold:g} exclude each other: leave one out.")
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise UsageError(f"threshold is a value between 0 (black) and 1 (white), got {self.threshold:g}.")
        path = Path(self.path).expanduser()
        if not os.path.isdir(path) or os.path.isfile(path / MANIFEST):
            images = of_dataset(self.path)
        else:
            is_mnist = any((path / name).is_file() for name in IDX_FILES)
            images = Mnist(path).plan() if is_mnist else Folder(path, channels=1).plan()
        if not isinstance(images.kind, Bins) or len(images.shape) != 3 or images.shape[0] != 1:
            expected = "gray images, of shape (1, height, width): prepare them with --channels 1"
            raise UsageError(f"{self.path} holds samples of shape {images.shape}, expected {expected}.")
        binary = "at random" if self.stochastic else f"above {self.threshold or 0.5:g}"
        return replace(
            images,
            name=f"{images.name}-binary",
            source=f"{images.source}, binarized",
            kind=Symbols(2),
            options={**images.options, "binary": binary},
            parts=[Part(images.total, partial(self._blocks, images, images.kind.count - 1))],
        )

    def _blocks(self, images: Preparation, white: int, start: int) -> Iterator[Block]:
        for block in images.blocks(start):
            levels = np.full(block.rows.shape, self.threshold or 0.5)
            for image, level in zip(block.rows, levels, strict=True) if self.stochastic else ():
                key = hashlib.sha256(np.ascontiguousarray(image).tobytes()).digest()[:16]
                generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key, "<u8")))
                level[:] = generator.random(image.shape)
            yield replace(block, rows=(block.rows / white > levels).astype(np.uint8))


def of_dataset(name: str) -> Preparation:
    """A prepared dataset as a plan of its rows."""
    dataset = open_dataset(name)
    labels = dataset.labels
    train, test = (None, None) if labels is None else (labels.train, labels.test)
    return Preparation(
        name=dataset.name,
        source=dataset.manifest.source,
        shape=dataset.shape,
        kind=dataset.bins,
        options=dataset.manifest.options,
        input=dataset.version,
        parts=[array_part(dataset.train, train, False), array_part(dataset.test, test, True)],
        label_dtype=None if train is None else train.dtype,
        classes=dataset.manifest.classes,
    )
