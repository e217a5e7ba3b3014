"""What a run folder says about itself, read from its files alone. Only run.json must be there.

`bsi eval` leaves its results in `evaluations/`, one JSON file each; what is not there is not shown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bsi.errors import UsageError
from bsi.io import digest_file
from bsi.recipe import Recipe
from bsi.runtime.run_folder import RunFolder
from bsi.runtime.serialization import flat
from bsi.training.journal import Value, read_journal

__all__ = ["Hash", "Picture", "Run", "read_run"]


@dataclass(frozen=True)
class Picture:
    """A grid of samples drawn along the way."""

    step: int
    png: bytes


@dataclass(frozen=True)
class Hash:
    """A file by its content."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Run:
    """Everything that the files of a run say."""

    path: Path
    recipe: Recipe
    network: str
    changed: Sequence[str]
    command: str
    environment: Mapping[str, str]
    status: Mapping[str, Any]
    journal: Sequence[Mapping[str, Value]]
    pictures: Sequence[Picture]
    evaluations: Sequence[Mapping[str, Any]]
    hashes: Sequence[Hash]
    data_version: str

    @property
    def bounds(self) -> list[Mapping[str, Any]]:
        """What `bsi eval --bpd` found on the test set, oldest first."""
        return [r for r in self.evaluations if isinstance(r.get("bits_per_dim"), float) and r.get("split") == "test"]

    def events(self, kind: str) -> list[Mapping[str, Value]]:
        return [record for record in self.journal if record.get("event") == kind]

    def numbers(self, kind: str, name: str) -> list[tuple[float, float]]:
        """(step, value) of one quantity, where it is a number."""
        found = [(record["step"], record.get(name)) for record in self.events(kind)]
        return [(float(step), float(v)) for step, v in found if isinstance(v, int | float) and math.isfinite(v)]


def read_run(path: Path) -> Run:
    folder = RunFolder(path)
    record = folder.read_record() if path.is_dir() else None
    if record is None:
        raise UsageError(
            f"{path} is not a run folder: it has no run.json. `bsi train` makes one, `bsi view` opens files."
        )
    about = json.loads((path / "run.json").read_text("utf-8"))
    journal = read_journal(path) if folder.journal.is_file() else []
    hashes, data_version = _checkpoint(folder)
    return Run(
        path=path,
        recipe=record.recipe,
        network=record.network,
        changed=[str(change) for change in about.get("changed", [])],
        command=" ".join(str(word) for word in about.get("command", [])),
        environment={name: _plain(value) for name, value in flat(about.get("environment", {})).items()},
        status=folder.read_status(),
        journal=journal,
        pictures=_pictures(path, journal),
        evaluations=_evaluations(path),
        hashes=hashes,
        data_version=data_version,
    )


def _plain(value: object) -> str:
    return "none" if value is None else str(value)


def _pictures(path: Path, journal: Sequence[Mapping[str, Value]]) -> list[Picture]:
    """Grids that the journal names and that are still there; files outside the folder are never read."""
    found = []
    for record in journal:
        file = path / "samples" / Path(str(record.get("file", ""))).name
        if record.get("event") == "sample" and file.suffix == ".png" and file.is_file():
            found.append(Picture(int(record["step"]), file.read_bytes()))
    return found


def _evaluations(path: Path) -> list[Mapping[str, Any]]:
    """Results of `bsi eval`, oldest first; what is not JSON is passed over."""
    found: list[Mapping[str, Any]] = []
    for file in sorted(path.glob("evaluations/*.json")):
        try:
            record = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def _checkpoint(folder: RunFolder) -> tuple[list[Hash], str]:
    """The files of the latest checkpoint with their hashes, and the version of the data it was trained on."""
    hashes = [
        Hash(f.name, f.stat().st_size, digest_file(f))
        for f in (folder.path / "run.json", folder.journal)
        if f.is_file()
    ]
    try:
        latest = folder.checkpoints / Path((folder.checkpoints / "latest").read_text("utf-8").strip()).name
        files = json.loads((latest / "manifest.json").read_text("utf-8"))["files"]
        state = json.loads((latest / "state.json").read_text("utf-8"))
    except (OSError, ValueError, KeyError):
        return hashes, ""
    named = [Hash(f"{latest.name}/{name}", int(f["bytes"]), str(f["sha256"])) for name, f in sorted(files.items())]
    return hashes + named, str(state.get("data", {}).get("version", ""))
