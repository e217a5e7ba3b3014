"""An array that is computed part by part, and survives being interrupted. NumPy alone.

samples.npz.parts/            while it is being made: one .npy for each part, written beside and renamed
  about.json                  what is being made; parts of something else are never joined to these
  000000000.npy ...
samples.npz                   when all parts are there: arr_0, `about` as JSON, and `labels`, if samples have them
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Shaped

from bsi.errors import BsiError, DataError, UsageError
from bsi.io import atomic, make_folder

__all__ = ["PART", "Parts"]

PART = 1024  # rows


@dataclass(frozen=True)
class Parts:
    """`num` rows of what `about` describes, on their way into the file `path`."""

    path: Path
    num: int
    about: dict[str, Any]

    @property
    def folder(self) -> Path:
        return self.path.with_name(self.path.name + ".parts")

    def missing(self) -> list[range]:
        """The rows still to be computed, part by part; none if the file is whole. Refuses what belongs to others."""
        if self.path.exists():
            self._check(self._about_of_file(), str(self.path))
            return []
        about = self.folder / "about.json"
        if about.exists():
            self._check(self._about_of_parts(about), str(self.folder))
        else:
            make_folder(self.folder, "--npz")
            try:
                with atomic(about, "--npz") as temporary:
                    temporary.write_text(json.dumps(self.about, indent=2), "utf-8")
            except BsiError:
                self.folder.rmdir()  # nothing is in it yet
                raise
        return [ids for ids in self._ranges() if not self._is_there(ids)]

    def write(self, ids: range, rows: Shaped[np.ndarray, "rows ..."]) -> None:
        """Keep a part. It is whole or not there."""
        with atomic(self._file(ids), "--npz") as temporary:
            np.save(temporary, rows, allow_pickle=False)

    def join(self, labels: Int64[np.ndarray, " num"] | None = None) -> Shaped[np.ndarray, "num ..."]:
        """All rows; the parts become the file, with the rows' labels if they have any."""
        if self.path.exists():
            with np.load(self.path, allow_pickle=False) as arrays:
                return arrays["arr_0"]
        rows = np.concatenate([np.load(self._file(ids), allow_pickle=False) for ids in self._ranges()])
        about = np.array(json.dumps({**self.about, "num": self.num}))
        arrays = {"arr_0": rows, "about": about} | ({} if labels is None else {"labels": labels})
        with atomic(self.path, "--npz") as temporary, temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        shutil.rmtree(self.folder)
        return rows

    def _ranges(self) -> list[range]:
        return [range(start, min(start + PART, self.num)) for start in range(0, self.num, PART)]

    def _file(self, ids: range) -> Path:
        return self.folder / f"{ids.start:09d}.npy"

    def _is_there(self, ids: range) -> bool:
        """A part of another length was the last one of a smaller number: it is made again, as a damaged one is."""
        try:
            return len(np.load(self._file(ids), mmap_mode="r", allow_pickle=False)) == len(ids)
        except (OSError, ValueError, EOFError):
            return False

    def _about_of_parts(self, file: Path) -> dict[str, Any]:
        try:
            return dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{file} is damaged, and does not say whose parts these are: remove {self.folder}"
            ) from error

    def _about_of_file(self) -> dict[str, Any]:
        try:
            with np.load(self.path, allow_pickle=False) as arrays:
                found = json.loads(str(arrays["about"]))
        except (KeyError, ValueError, OSError) as error:
            raise DataError(f"{self.path} is there, but was not written here: choose another name") from error
        if found.pop("num", None) != self.num:
            raise UsageError(f"{self.path} holds another number of samples: remove it, or choose another name")
        return dict(found)

    def _check(self, found: dict[str, Any], where: str) -> None:
        differing = [
            f"{name} {found.get(name)!r} there, {self.about.get(name)!r} here"
            for name in {**found, **self.about}
            if found.get(name) != self.about.get(name)
        ]
        if differing:
            raise UsageError(f"{where} holds other samples ({'; '.join(differing)}): remove it, or choose another name")
