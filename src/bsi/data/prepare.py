"""From a source to a prepared dataset: written beside, synced, then renamed. There is never half a dataset.

A source describes what it will write before it reads a row (`Plan`) and then yields the rows in blocks, in a fixed
order. The blocks are appended to files in a hidden folder beside the target, so memory is that of one block at any
size. Every few seconds, and when interrupted, the files are synced and the number of input items consumed is noted: the
same command run again goes on from there. The header of each file, which holds the number of rows, and the manifest are
written last; then the folder is renamed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from bsi.data.manifest import MANIFEST, FileRecord, Manifest
from bsi.data.npy import HEADER_BYTES, ArrayFile, header_bytes
from bsi.data.plan import BLOCK_BYTES, Block, Plan
from bsi.data.store import Dataset, open_dataset
from bsi.errors import BsiError, DataError, UsageError
from bsi.io import FULL, cannot_write, digest_file, make_folder, sync_folder, write_text
from bsi.progress import Progress, readable_bytes
from bsi.values import Standardize

__all__ = ["prepare"]

SYNC_EVERY_S = 5.0
# Float32 keeps seven digits: beyond this ratio of mean to std, fewer than two of them are left to the data.
MAX_OFFSET = 1e5


@dataclass(frozen=True)
class _Done:
    """How far a preparation has come. Replaced as a whole, so that an interruption finds the old or the new one."""

    items: int
    counts: Mapping[str, int]
    skipped: tuple[str, ...]


def prepare(plan: Plan, folder: Path) -> Dataset:
    """Write what is planned into `folder`, go on if that was interrupted, or open the dataset if it is there."""
    folder = Path(os.path.abspath(folder.expanduser()))
    if (folder / MANIFEST).is_file():
        return _already_there(plan, folder)
    if folder.exists():
        raise UsageError(f"{folder} exists and is not a prepared dataset: give another folder with --to.")
    make_folder(folder.parent, "--to")
    try:
        with _locked(folder):
            if not (folder / MANIFEST).is_file():  # another process may have finished it meanwhile
                _write(plan, folder)
    except OSError as error:
        if error.errno in FULL:
            raise cannot_write(folder, error, "--to") from error
        raise DataError(f"cannot prepare {folder}: {error}") from error
    return open_dataset(folder)


def _already_there(plan: Plan, folder: Path) -> Dataset:
    there = open_dataset(folder)
    # Through JSON, as the stored ones went: tuples become lists.
    asked, found = json.loads(json.dumps(plan.options)), there.manifest.options
    different = [
        f"{key}: {found.get(key)!r} there, {asked.get(key)!r} asked for"
        for key in asked
        if asked[key] != found.get(key)
    ]
    why = [", whose files have changed since"] if plan.input != there.manifest.input else []
    why += [f", made with other options ({'; '.join(different[:5])})"] if different else []
    if why or there.name != plan.name:
        raise UsageError(
            f"{folder} already holds dataset {there.name!r}{''.join(why)}. Give another folder with --to, or delete "
            f"that one."
        )
    return there


def _write(plan: Plan, folder: Path) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    row_bytes = int(np.prod(plan.shape, dtype=np.int64)) * plan.dtype.itemsize
    free = shutil.disk_usage(folder.parent).free + sum(path.stat().st_size for path in partial.glob("*.npy"))
    if plan.rows * row_bytes > free:
        raise BsiError(
            f"{plan.name} needs {readable_bytes(plan.rows * row_bytes)}, but the disk of {folder} has "
            f"{readable_bytes(free)} free. Make room, or give another folder with --to."
        )
    staging = _Staging(partial, plan)
    try:
        with Progress(f"prepare {plan.name}", plan.total, plan.unit, done=staging.done.items) as progress:
            for block in plan.blocks(staging.done.items):
                staging.append(block)
                skipped = len(staging.done.skipped)
                progress.advance(block.items, note=f"{skipped} skipped" if skipped else None)
    except BaseException:
        try:
            staging.sync()  # also after Ctrl-C: what was read need not be read again
        finally:
            staging.close()
        raise
    staging.finish()
    os.rename(partial, folder)
    sync_folder(folder.parent)


class _Staging:
    """The hidden folder in which a dataset grows: append-only files and a note of how far they count."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path, self.plan = path, plan
        self.done = self._resumable() or self._fresh()
        self.files = {name: self._open(name) for name in self._names()}
        self.synced_at = time.monotonic()

    def _names(self) -> list[str]:
        splits = ("train", "test")
        return [*splits, *(f"{split}_labels" for split in splits if self.plan.label_dtype is not None)]

    def _layout(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Dtype and shape of one row of a file."""
        if name.endswith("_labels"):
            assert self.plan.label_dtype is not None
            return self.plan.label_dtype, ()
        return self.plan.dtype, self.plan.shape

    def _resumable(self) -> _Done | None:
        """What an interrupted preparation of the very same rows has left behind."""
        try:
            note = json.loads((self.path / "state.json").read_text())
            done = _Done(int(note["items"]), {k: int(v) for k, v in note["counts"].items()}, tuple(note["skipped"]))
            whole = all((self.path / f"{n}.npy").stat().st_size >= self._end(n, done) for n in self._names())
            return done if note["identity"] == self.plan.identity and whole else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def _fresh(self) -> _Done:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()
        return _Done(0, dict.fromkeys(self._names(), 0), ())

    def _end(self, name: str, done: _Done) -> int:
        dtype, shape = self._layout(name)
        return HEADER_BYTES + done.counts[name] * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize

    def _open(self, name: str) -> IO[bytes]:
        path = self.path / f"{name}.npy"
        path.touch()
        file = path.open("r+b")
        file.truncate(self._end(name, self.done))  # rows written after the last note are written again
        file.seek(0, os.SEEK_END)
        return file

    def append(self, block: Block) -> None:
        counts = dict(self.done.counts)
        skipped = self.done.skipped + block.skipped
        if len(skipped) > self.plan.skip:
            allowed = f"Only {self.plan.skip} may be skipped" if self.plan.skip else "Nothing may be skipped"
            raise DataError(
                f"{self.plan.source}: {skipped[self.plan.skip]}. {allowed}: repair or remove the file, or allow more "
                f"with --skip N."
            )
        for name in self._names():
            split, _, kind = name.partition("_")
            rows = (block.labels if kind else block.rows).get(split)
            if rows is None:
                continue
            dtype, shape = self._layout(name)
            assert rows.shape[1:] == shape, f"a row of {name} has shape {rows.shape[1:]}, planned was {shape}"
            self.files[name].write(np.ascontiguousarray(rows, dtype).data)
            counts[name] += len(rows)
        self.done = _Done(self.done.items + block.items, counts, skipped)
        if time.monotonic() - self.synced_at >= SYNC_EVERY_S:
            self.sync()

    def sync(self) -> None:
        """Make the rows durable, then the note that counts them."""
        for file in self.files.values():
            _sync(file)
        note = {"identity": self.plan.identity, **asdict(self.done)}
        write_text(self.path / "state.json", json.dumps(note))
        self.synced_at = time.monotonic()

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def finish(self) -> None:
        """Headers, hashes and the manifest; afterwards the folder is a dataset but for its name."""
        plan, counts = self.plan, self.done.counts
        if not counts["train"]:
            self.close()
            raise DataError(
                f"{plan.source}: no training samples ({counts['test']} for testing). Give it more, or --test-fraction "
                f"0."
            )
        self.sync()
        for name, file in self.files.items():
            dtype, shape = self._layout(name)
            file.seek(0)
            file.write(header_bytes(dtype, (counts[name], *shape)))
            _sync(file)
        self.close()
        paths = [self.path / f"{name}.npy" for name in self._names()]
        manifest = Manifest(
            name=plan.name,
            source=plan.source,
            counts={split: counts[split] for split in ("train", "test")},
            shape=plan.shape,
            dtype=plan.dtype.name,
            bins=plan.bins,
            standardize=None if plan.bins else _standardize(self.path / "train.npy"),
            files={path.name: FileRecord(path.stat().st_size, digest_file(path)) for path in paths},
            options=plan.options,
            input=plan.input,
            skipped=self.done.skipped,
            classes=plan.classes,
        )
        write_text(self.path / MANIFEST, manifest.to_json())
        (self.path / "state.json").unlink()
        sync_folder(self.path)


def _standardize(path: Path) -> Standardize:
    """Mean and std over all elements in one pass, block by block (Chan, Golub and LeVeque, 1979), in float64."""
    count, mean, squares = 0, 0.0, 0.0
    with ArrayFile.at(path) as array:
        for block in array.blocks(0, BLOCK_BYTES):
            x = block.astype(np.float64)
            delta, total = x.mean() - mean, count + x.size
            squares += float(((x - x.mean()) ** 2).sum() + delta**2 * count * x.size / total)
            mean += float(delta * x.size / total)
            count = total
    std = (squares / count) ** 0.5
    if not (std > 0 and abs(mean) <= MAX_OFFSET * std):
        raise DataError(
            f"the training part has mean {mean:.6g} and std {std:.6g}: in float32 nothing would be left of the data. "
            f"Subtract a constant first."
        )
    return Standardize(mean, std)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One preparation at a time. The system drops the lock when its process ends, however it ends."""
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"another process is preparing {folder}. Wait for it, or give another folder with --to."
            ) from error
        yield


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
