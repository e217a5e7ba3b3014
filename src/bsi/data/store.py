"""A prepared dataset: a folder of memory-mapped arrays with a manifest.

    cifar10/
      manifest.json                          name, source, counts, shape, bins, options, SHA-256 of each file, version
      train.npy  test.npy                    (n, *shape): integers are bin indices, floats are values in their own units
      train_labels.npy  test_labels.npy      if the source has labels; the manifest names the classes if they have names
      autoencoder.safetensors                of latents: see `bsi.runtime.autoencoders`

Sizes and headers are checked each time, hashes on request: they detect damage, not tampering. `version` is a hash of
the files' hashes, the shape and the meaning of the numbers: two datasets with the same version hold the same data.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer, Shaped

from bsi.data.files import ArrayFile
from bsi.errors import BsiError, DataError, UsageError
from bsi.io import data_folder, digest_file, fingerprint, read_json
from bsi.values import KINDS, Bins, DataKind, Symbols, check_classes

DIGITS = Path(str(resources.files("bsi.data"))) / "digits"  # part of the package; ORIGIN.txt names its authors
FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "test")
AUTOENCODER = "autoencoder.safetensors"
FILES = ("train.npy", "test.npy", "train_labels.npy", "test_labels.npy", AUTOENCODER)
AGAIN = "Delete its folder and prepare the dataset again."
# Sources of one's own data, and what they are made from.
OWN = {"folder": "IMAGES", "arrays": "FILE", "wav": "FOLDER", "text": "FILE"}


@dataclass(frozen=True)
class FileRecord:
    """Size and hash of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The description of a dataset."""

    name: str
    source: str
    counts: Mapping[str, int]  # of the samples of each split
    shape: tuple[int, ...]  # of a sample
    dtype: str
    kind: DataKind  # what the stored numbers are
    files: Mapping[str, FileRecord]
    options: Mapping[str, Any]  # of the source
    input: str  # a hash or name of the files that the dataset was made from
    skipped: tuple[str, ...] = ()  # the input files that could not be read, with the reason
    classes: tuple[str, ...] = ()  # names of the labels 0, 1, ...; empty if there are none
    notes: tuple[str, ...] = ()  # what was assumed because it was not given

    @property
    def version(self) -> str:
        described = asdict(self.kind)
        content = {
            "files": {name: record.sha256 for name, record in self.files.items()},
            "shape": list(self.shape),
            "bins": described if isinstance(self.kind, Bins) else None,
        }
        return fingerprint(content | ({"symbols": described} if isinstance(self.kind, Symbols) else {}))

    def to_json(self) -> str:
        fields = asdict(self)
        kind = fields.pop("kind")
        described = {key: kind if type(self.kind) is cls else None for key, cls in KINDS.items()}
        return json.dumps({"format": FORMAT, "version": self.version, **fields, **described}, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """The manifest in a file that may be damaged: everything that is used later is validated here."""
        try:
            given = read_json(path)
            if given["format"] != FORMAT:
                raise DataError(f"it has format {given['format']!r}, expected {FORMAT}.")
            if not {"train.npy", "test.npy"} <= set(given["files"]) <= set(FILES):
                raise DataError(f"it lists the files {sorted(given['files'])}, expected some of {', '.join(FILES)}.")
            # Version 0.1.0 wrote the standardization under another key.
            kinds = {**given, "standardize": given.get("standardisation", given.get("standardize"))}
            [(key, kind)] = [(key, kinds[key]) for key in KINDS if kinds.get(key)]  # exactly one
            fields: Any = {name: tuple(v) if isinstance(v, list) else v for name, v in kind.items()}
            manifest = cls(
                name=str(given["name"]),
                source=str(given["source"]),
                counts={split: int(given["counts"][split]) for split in SPLITS},
                shape=tuple(int(d) for d in given["shape"]),
                dtype=str(np.dtype(given["dtype"])),
                kind=KINDS[key](**fields),
                files={name: FileRecord(**record) for name, record in given["files"].items()},
                options=dict(given["options"]),
                input=str(given["input"]),
                skipped=tuple(map(str, given["skipped"])),
                classes=check_classes(given.get("classes", [])),
                notes=tuple(map(str, given.get("notes", []))),
            )
            if manifest.version != given["version"]:
                raise DataError(f"it has version {manifest.version}, expected {given['version']}.")
        except (BsiError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            why = str(error) if isinstance(error, BsiError) else f"{error!r}."
            raise DataError(f"{path} is not a valid manifest: {why} {AGAIN}") from error
        return manifest


@dataclass(frozen=True)
class Labels:
    """Class indices of both splits, and the names of the classes if there are any."""

    train: Integer[np.ndarray, " train"]
    test: Integer[np.ndarray, " test"]
    names: tuple[str, ...] = ()

    @property
    def classes(self) -> int:
        """Labels are 0 .. classes - 1. A named class counts even if the training split has no sample of it."""
        return len(self.names) or (int(self.train.max()) + 1 if len(self.train) else 0)


@dataclass(frozen=True)
class Dataset:
    """Samples of both splits, memory-mapped and read-only, and their meaning."""

    manifest: Manifest
    train: Shaped[np.ndarray, "train *shape"]
    test: Shaped[np.ndarray, "test *shape"]
    labels: Labels | None
    folder: Path

    @property
    def name(self) -> str:
        """The name of its folder: the one by which it is opened."""
        return self.folder.resolve().name

    @property
    def version(self) -> str:
        """A hash of the content: the same for the same data, wherever it is stored."""
        return self.manifest.version

    @property
    def shape(self) -> tuple[int, ...]:
        return self.manifest.shape

    @property
    def kind(self) -> DataKind:
        """Bins, symbols or, for continuous data, the standardization that was fitted on the training split."""
        return self.manifest.kind

    @property
    def bins(self) -> Bins | None:
        """The values of binned data, else None."""
        return self.kind if isinstance(self.kind, Bins) else None

    def split(self, name: str) -> Shaped[np.ndarray, "n *shape"]:
        """`train` or `test`. Raises an error if it is empty."""
        if name not in SPLITS:
            raise UsageError(f"a dataset has the splits train and test: got {name!r}")
        rows = self.train if name == "train" else self.test
        if not len(rows):
            raise DataError(f"dataset {self.name!r} has no {name} samples. Prepare it with another --test-fraction.")
        return rows

    def verify(self) -> None:
        """Compare every file with its hash. Errors name the file, the expected and the found hash."""
        for name, record in self.manifest.files.items():
            if (found := digest_file(self.folder / name)) != record.sha256:
                path = self.folder / name
                raise DataError(f"{path} is damaged: expected sha256 {record.sha256}, found {found}. {AGAIN}")


def prepared(root: Path | None = None) -> list[Path]:
    """The folders of the prepared datasets in `root`, by default the data folder. Unfinished ones are not listed."""
    return sorted(manifest.parent for manifest in (root or data_folder()).glob(f"[!.]*/{MANIFEST}"))


def open_dataset(name_or_path: str | Path, version: str | None = None) -> Dataset:
    """The dataset of that name in the data folder, or in that folder. `digits` always exists.

    `version` is the content that a run was trained on. If the name has other content or none, any prepared dataset with
    this content is opened: a dataset that was renamed is still found.
    """
    for folder in [*_places(name_or_path), *prepared()] if version is not None else []:
        with suppress(DataError):  # missing or damaged: another one
            if (dataset := _open(folder)).version == version:
                return dataset
    return _open(_find(name_or_path))


def open_for_run(name: str, run: Path | None) -> Dataset:
    """The dataset of that name; if there is none, the one that the run was trained on, which may have been renamed."""
    try:
        return open_dataset(name)
    except DataError:
        with suppress(DataError, KeyError, TypeError):
            if run is not None:
                return open_dataset(name, version=str(read_json(run / "run.json")["data_version"]))
        raise


def find_dataset(name: str, version: str) -> Dataset | None:
    """A run's data, for its test samples. None if it has none, or if this content is not on this machine."""
    try:
        dataset = open_dataset(name, version=version)
    except BsiError:
        return None
    return dataset if dataset.version == version and len(dataset.test) else None


def _places(name_or_path: str | Path) -> list[Path]:
    """Where a dataset may be. A bare name is looked up in the data folder first, whatever the working directory."""
    folder = Path(name_or_path).expanduser()
    bare = isinstance(name_or_path, str) and os.sep not in name_or_path
    return [DIGITS] if str(name_or_path) == "digits" else [data_folder() / folder, folder] if bare else [folder]


def _find(name_or_path: str | Path) -> Path:
    wanted, places = str(name_or_path), _places(name_or_path)
    for place in places:
        if os.path.isfile(place / MANIFEST):
            return place
    near = difflib.get_close_matches(wanted, ["digits", *(path.name for path in prepared())], 1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    command = f"bsi data {wanted} --from {OWN[wanted]}" if wanted in OWN else "bsi data NAME"
    raise DataError(
        f"no prepared dataset {wanted!r} ({places[0] / MANIFEST} does not exist). {hint}`bsi data --list` lists the "
        f"prepared ones; `{command}` prepares one."
    )


def _open(folder: Path) -> Dataset:
    manifest = Manifest.read(folder / MANIFEST)
    arrays = {
        name.removesuffix(".npy"): _map(folder / name, manifest) for name in manifest.files if name[-4:] == ".npy"
    }
    labelled = "train_labels" in arrays and "test_labels" in arrays
    labels = Labels(arrays["train_labels"], arrays["test_labels"], manifest.classes) if labelled else None
    return Dataset(manifest, arrays["train"], arrays["test"], labels, folder)


def _map(path: Path, manifest: Manifest) -> Shaped[np.ndarray, "..."]:
    """Memory-map one file after comparing its size and header with the manifest."""
    expected = manifest.files[path.name].bytes
    found = path.stat().st_size if os.path.isfile(path) else 0
    if found != expected:
        raise DataError(f"{path} is missing or damaged: it has {found} bytes, expected {expected} bytes. {AGAIN}")
    with ArrayFile.at(path) as array:
        pass
    split, _, is_labels = path.stem.partition("_")
    shape = (manifest.counts[split], *(() if is_labels else manifest.shape))
    if array.shape != shape or not (array.dtype.kind in "iu" if is_labels else array.dtype == manifest.dtype):
        raise DataError(f"{path} holds {array.shape} of {array.dtype}, expected {shape} of {manifest.dtype}. {AGAIN}")
    if not math.prod(array.shape):  # an empty file cannot be mapped
        return np.empty(array.shape, array.dtype)
    # The digits are also for trying things out: changes stay in memory, and torch does not warn of read-only memory.
    return np.memmap(path, array.dtype, "c" if path.parent == DIGITS else "r", array.offset, array.shape)
