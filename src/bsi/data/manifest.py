"""What a prepared dataset says about itself: `manifest.json`, its fields, and the hash that names its content.

`version` is a hash over the files' hashes, the shape and the meaning of the numbers. Two datasets with the same version
hold the same data; a run stores the version of the data it was trained on and compares it when it goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bsi.errors import BsiError, DataError
from bsi.io import fingerprint
from bsi.values import Bins, Standardize

__all__ = [
    "FILES",
    "FORMAT",
    "MANIFEST",
    "FileRecord",
    "Manifest",
    "check_classes",
]

FORMAT = 1
MANIFEST = "manifest.json"
FILES = ("train.npy", "test.npy", "train_labels.npy", "test_labels.npy")


@dataclass(frozen=True)
class FileRecord:
    """The size and the hash of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A dataset described: `counts` per split, `shape` and `dtype` of a sample, `options` of its source, its files.

    `bins` gives stored integers their values; it is None for continuous data, which has a `standardize` instead.
    `input` names what the dataset was made from, `skipped` the input files that could not be read and why. `classes`
    are the names of the labels 0, 1, ..., empty where there are no labels or they have no names.
    """

    name: str
    source: str
    counts: Mapping[str, int]
    shape: tuple[int, ...]
    dtype: str
    bins: Bins | None
    standardize: Standardize | None
    files: Mapping[str, FileRecord]
    options: Mapping[str, Any]
    input: str
    skipped: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        content = {
            "files": {name: record.sha256 for name, record in sorted(self.files.items())},
            "shape": list(self.shape),
            "bins": asdict(self.bins) if self.bins else None,
        }
        return fingerprint(content)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": self.version, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: bytes, where: Path) -> Manifest:
        """Read a manifest that may be damaged: everything that is used later is checked here."""
        try:
            given = json.loads(text)
            if given["format"] != FORMAT:
                raise DataError(
                    f"{where} has format {given['format']!r}; this version of bsi reads format {FORMAT}. Prepare the "
                    f"dataset again."
                )
            unknown = set(given["files"]) - set(FILES)
            if unknown or not {"train.npy", "test.npy"} <= set(given["files"]):
                raise ValueError(f"files {sorted(given['files'])}, expected some of {', '.join(FILES)}")
            manifest = cls(
                name=str(given["name"]),
                source=str(given["source"]),
                counts={split: int(given["counts"][split]) for split in ("train", "test")},
                shape=tuple(int(d) for d in given["shape"]),
                dtype=str(given["dtype"]),
                bins=Bins(**given["bins"]) if given["bins"] else None,
                standardize=_standardize(given),
                files={name: FileRecord(**record) for name, record in given["files"].items()},
                options=dict(given["options"]),
                input=str(given["input"]),
                skipped=tuple(str(line) for line in given["skipped"]),
                classes=check_classes([*given.get("classes", ())]),
            )
        except BsiError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{where} is not a dataset's manifest: {error!r}. Delete its folder and prepare the dataset again."
            ) from error
        if manifest.version != given["version"]:
            raise DataError(
                f"{where} is damaged: expected version {given['version']}, found {manifest.version}. Prepare the "
                f"dataset again."
            )
        return manifest


def _standardize(given: Mapping[str, Any]) -> Standardize | None:
    """The record of continuous data; version 0.1.0 wrote it under another name."""
    found = given["standardisation"] if "standardisation" in given else given["standardize"]
    return Standardize(**found) if found else None


def check_classes(given: Iterable[object]) -> tuple[str, ...]:
    """The names of classes, refused if one could not be shown, asked for or told from another."""
    names: list[str] = []
    for name in given:
        if not (isinstance(name, str) and name and name.strip() == name and name.isprintable()):
            raise DataError(
                f"a class has the name {name!r:.80}; names are printable, without spaces around: rename it."
            )
        names.append(name)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"two classes have the name {twice!r}: rename one.")
    return tuple(names)
