"""CIFAR-10 (Krizhevsky, 2009) from the official binary version: six files of 10,000 records.

A record is one label byte and 3072 pixels, channel by channel. The pickled version is never read, because loading a
pickle can run code. Every file is compared with its known SHA-256 before a record is used. The classes have
the names in `batches.meta.txt`, one per line, if that file exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from bsi.data.archives import Member, members
from bsi.data.prepare import Block, Plan
from bsi.data.store import check_classes
from bsi.download import download
from bsi.errors import DataError
from bsi.io import data_folder, digest, fingerprint
from bsi.values import Bins

__all__ = ["Cifar10"]

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
SHA256 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
NAMES = "batches.meta.txt"
PICKLES = ("data_batch_1", "test_batch", "batches.meta", "cifar-10-python.tar.gz")
CLASSES = 10
RECORD = 1 + 3 * 32 * 32
ROWS = 1000
MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Cifar10:
    """50,000 training and 10,000 test images of 32 x 32 pixels in ten classes."""

    summary: ClassVar[str] = "CIFAR-10, from the official binary archive or folder; downloaded when --from is not given"

    path: Path | None = None

    def plan(self) -> Plan:
        path = _located() if self.path is None else self.path.expanduser()
        with members(path, {*SHA256, *PICKLES, NAMES}, MAX_BYTES) as found:
            counts = {name: _checked(path, found, name) for name in SHA256}
            classes = _names(path, found[NAMES]) if NAMES in found else ()
        return Plan(
            name="cifar10",
            source=URL,
            shape=(3, 32, 32),
            bins=Bins.uint8(),
            options={},
            input=fingerprint(SHA256),
            total=sum(counts.values()),
            unit="image",
            blocks=lambda start: _blocks(path, start),
            label_dtype=np.dtype("uint8"),
            classes=classes,
        )


def _located() -> Path:
    """The unpacked folder or the archive in the data folder, or else a download of the archive."""
    folder = data_folder() / "cifar-10-batches-bin"
    archive = data_folder() / "cifar-10-binary.tar.gz"
    return folder if folder.is_dir() else download(URL, archive, ARCHIVE_SHA256, "give it with --from")


def _checked(path: Path, found: dict[str, Member], name: str) -> int:
    """The number of records of one file, after comparing its hash."""
    if name not in found:
        pickled = any(pickle in found for pickle in PICKLES)
        hint = "It holds the Python version, made of pickles, which are never loaded. " if pickled else ""
        raise DataError(f"{path} holds no {name}. {hint}Give the binary version ({URL}), packed or unpacked.")
    with found[name].open() as file:
        sha256 = digest(iter(lambda: file.read(1 << 20), b""))
    if sha256 != SHA256[name]:
        raise DataError(
            f"{path}: {name} is damaged: expected sha256 {SHA256[name]}, found {sha256}. Download it again."
        )
    return found[name].size // RECORD


def _names(path: Path, member: Member) -> tuple[str, ...]:
    with member.open() as file:
        names = file.read(1024).decode("ascii", "backslashreplace").split()
    if len(names) != CLASSES:
        raise DataError(f"{path}: {NAMES} holds {len(names)} names of classes, expected {CLASSES}. Download it again.")
    return check_classes(names)


def _blocks(path: Path, start: int) -> Iterator[Block]:
    first = 0
    with members(path, SHA256, MAX_BYTES) as found:
        for name in SHA256:
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
