"""A prepared dataset: a folder of memory-mapped arrays with a manifest.

    cifar10/
      manifest.json                          name, source, counts, shape, bins, options, SHA-256 of each file, version
      train.npy  test.npy                    (n, *shape): integers are bin indices, floats are values in their own units
      train_labels.npy  test_labels.npy      where the source has labels; the manifest names the classes if it can

A dataset is opened by its name in the data folder ($BSI_DATA, by default ~/.cache/bsi-data) or by the path of its
folder. Sizes and headers are checked each time, hashes on request: they detect damage, not tampering.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Integer, Shaped

from bsi.data import digits
from bsi.data.manifest import MANIFEST, FileRecord, Manifest
from bsi.data.npy import ArrayFile, header_bytes
from bsi.errors import DataError, UsageError
from bsi.io import data_folder, digest, digest_file
from bsi.values import Bins, Standardize

__all__ = ["Dataset", "Labels", "open_dataset", "prepared", "verify"]

OWN = {"folder": "IMAGES", "arrays": "FILE", "wav": "FOLDER"}  # sources of one's own data, and what they are given


@dataclass(frozen=True)
class Labels:
    """Class indices of both splits, and the classes' names where they have any."""

    train: Integer[np.ndarray, " train"]
    test: Integer[np.ndarray, " test"]
    names: tuple[str, ...] = ()

    @property
    def classes(self) -> int:
        """Labels are 0 .. classes - 1. A class with a name counts, even if chance left it no sample for training."""
        return len(self.names) or (int(self.train.max()) + 1 if len(self.train) else 0)


@dataclass(frozen=True)
class Dataset:
    """Samples of both splits, memory-mapped and read-only, and what they mean."""

    manifest: Manifest
    train: Shaped[np.ndarray, "train *shape"]
    test: Shaped[np.ndarray, "test *shape"]
    labels: Labels | None
    folder: Path | None = None

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def version(self) -> str:
        """A hash of the content: the same for the same data, wherever it lies."""
        return self.manifest.version

    @property
    def shape(self) -> tuple[int, ...]:
        return self.manifest.shape

    @property
    def bins(self) -> Bins | None:
        """What the stored integers stand for; None for continuous data."""
        return self.manifest.bins

    @property
    def standardize(self) -> Standardize | None:
        """Mean and std of the training part of continuous data; None for binned data."""
        return self.manifest.standardize

    def split(self, name: str) -> Shaped[np.ndarray, "n *shape"]:
        """`train` or `test`, refused if empty."""
        if name not in ("train", "test"):
            raise UsageError(f"a dataset has the splits train and test: got {name!r}")
        rows = self.train if name == "train" else self.test
        if not len(rows):
            raise DataError(f"dataset {self.name!r} has no {name} samples. Prepare it with another --test-fraction.")
        return rows


def prepared(root: Path | None = None) -> list[Path]:
    """The folders of the prepared datasets in `root`, by default the data folder; unfinished ones are left out."""
    root = data_folder() if root is None else root
    return sorted(manifest.parent for manifest in root.glob(f"[!.]*/{MANIFEST}"))


def open_dataset(name_or_path: str | Path, root: Path | None = None, check_hashes: bool = False) -> Dataset:
    """The dataset of that name in `root` (by default the data folder) or of that folder; `digits` is always there."""
    if name_or_path == "digits":
        return _embedded_digits()
    root = data_folder() if root is None else root
    folder = Path(name_or_path).expanduser()
    # A bare name is looked for in the data folder first: what it means must not depend on the working directory.
    bare = isinstance(name_or_path, str) and os.sep not in name_or_path
    places = [root / folder, folder] if bare else [folder]
    folder = next((place for place in places if (place / MANIFEST).is_file()), places[0])
    if not (folder / MANIFEST).is_file():
        raise DataError(_not_found(str(name_or_path), folder, root))
    manifest = Manifest.from_json((folder / MANIFEST).read_bytes(), folder / MANIFEST)
    arrays = {name: _map(folder / name, manifest) for name in manifest.files}
    if check_hashes:
        verify(folder, manifest)
    labels = None
    if "train_labels.npy" in arrays and "test_labels.npy" in arrays:
        labels = Labels(arrays["train_labels.npy"], arrays["test_labels.npy"], manifest.classes)
    return Dataset(manifest, arrays["train.npy"], arrays["test.npy"], labels, folder)


def verify(folder: Path, manifest: Manifest) -> None:
    """Compare every file with its hash; raises with the file, the expected and the found hash."""
    for name, record in manifest.files.items():
        found = digest_file(folder / name)
        if found != record.sha256:
            raise DataError(
                f"{folder / name} is damaged: expected sha256 {record.sha256}, found {found}. Delete the folder and "
                f"prepare it again."
            )


def _map(path: Path, manifest: Manifest) -> Shaped[np.ndarray, "..."]:
    """Memory-map one file after its size and header agreed with the manifest."""
    expected = manifest.files[path.name].bytes
    found = path.stat().st_size if path.is_file() else None
    if found != expected:
        state = "is missing" if found is None else f"has {found} bytes"
        raise DataError(f"{path} {state}, expected {expected} bytes. Delete the folder and prepare it again.")
    with ArrayFile.at(path) as array:
        header = array.header
    is_labels = path.stem.endswith("_labels")
    count = manifest.counts[path.stem.removesuffix("_labels")]
    shape = (count,) if is_labels else (count, *manifest.shape)
    if header.shape != shape or not (is_labels or header.dtype == np.dtype(manifest.dtype)):
        raise DataError(
            f"{path} holds {header.shape} of {header.dtype}, expected {shape} of {manifest.dtype}. Delete the folder "
            f"and prepare it again."
        )
    if not header.data_bytes:  # an empty file cannot be mapped
        return np.empty(header.shape, header.dtype)
    return np.memmap(path, header.dtype, "r", header.offset, header.shape)


def _not_found(wanted: str, folder: Path, root: Path) -> str:
    names = ["digits", *(path.name for path in prepared(root))]
    near = difflib.get_close_matches(wanted, names, 1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    command = f"bsi data {wanted} --from {OWN[wanted]}" if wanted in OWN else "bsi data NAME"
    return (
        f"no prepared dataset {wanted!r} ({folder / MANIFEST} does not exist). {hint}`bsi data --list` shows what is "
        f"there; `{command}` prepares one."
    )


def _record(array: Shaped[np.ndarray, "..."]) -> FileRecord:
    """What the file of an array would be, so that the embedded dataset and its prepared copy have one version."""
    header, data = header_bytes(array.dtype, array.shape), array.tobytes()
    return FileRecord(len(header) + len(data), digest([header, data]))


def _embedded_digits() -> Dataset:
    loaded = digits.load()
    arrays = {
        "train.npy": loaded.train,
        "test.npy": loaded.test,
        "train_labels.npy": loaded.train_labels,
        "test_labels.npy": loaded.test_labels,
    }
    return Dataset(
        Manifest(
            name="digits",
            source=digits.SOURCE,
            counts={"train": len(loaded.train), "test": len(loaded.test)},
            shape=(1, 8, 8),
            dtype="uint8",
            bins=digits.BINS,
            standardize=None,
            files={name: _record(array) for name, array in arrays.items()},
            options=digits.OPTIONS,
            input="embedded",
        ),
        loaded.train,
        loaded.test,
        Labels(loaded.train_labels, loaded.test_labels),
    )
