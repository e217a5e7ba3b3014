"""Prepare a dataset from a source.

A source describes what it will write before it reads a row (`Plan`) and then yields the rows in blocks, in a fixed
order. The blocks are appended to files in a hidden folder next to the target, so the memory is that of one block at any
size. Every few seconds, and when interrupted, the files are synced together with the number of input items consumed:
the same command resumes from there. The headers, which hold the number of rows, and the manifest are written last; then
the folder is renamed. A folder of the target's name is therefore always a complete dataset.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Integer, Shaped

from bsi.data.files import HEADER_BYTES, ArrayFile, header_bytes
from bsi.data.store import FORMAT, MANIFEST, Dataset, FileRecord, Manifest, open_dataset
from bsi.errors import BsiError, DataError, UsageError
from bsi.io import FULL, cannot_write, digest_file, fingerprint, make_folder, sync_folder, write_text
from bsi.progress import Progress, readable_bytes
from bsi.rng import uniforms
from bsi.values import Bins, DataKind, Standardize, Symbols

MAX_CLASSES = 2**31  # labels are stored as int32
SPLIT_SEED = 0
SYNC_EVERY_S = 5.0


def check_fraction(test_fraction: float) -> None:
    if not 0 <= test_fraction < 1:
        raise UsageError(f"test_fraction must be in [0, 1): got {test_fraction}")


def rows_for_testing(first: int, count: int, fraction: float) -> Bool[np.ndarray, " count"]:
    """Whether each of the rows from `first` on is for testing, by a hash of its number."""
    return uniforms(SPLIT_SEED, first, count) < fraction


@dataclass(frozen=True)
class Block:
    """The rows and labels of each split made from the next `items` items of the input.

    `skipped` has one line for each item that could not be read, with the reason.
    """

    items: int
    rows: Mapping[str, Shaped[np.ndarray, "rows *shape"]]
    labels: Mapping[str, Integer[np.ndarray, " rows"]] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A description of the data that a source will write.

    Attributes:
        kind: What stored integers are; None for continuous data, stored as float32.
        options: The options of the source, for the manifest.
        input: A hash of the input.
        total: Number of input items, and an upper bound on the number of rows.
        unit: The name of an item in the progress display.
        blocks: `blocks(i)` yields the rows of the input items from i on, the same ones in every call.
        classes: Names of the labels 0, 1, ..., if they have names.
        skip: How many unreadable items may be skipped.
        notes: What was assumed because it was not given.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    kind: Bins | Symbols | None
    options: Mapping[str, Any]
    input: str
    total: int
    unit: str
    blocks: Callable[[int], Iterator[Block]]
    label_dtype: np.dtype | None = None
    classes: tuple[str, ...] = ()
    skip: int = 0
    notes: tuple[str, ...] = ()

    @property
    def dtype(self) -> np.dtype:
        return self.kind.dtype if self.kind else np.dtype("<f4")

    @property
    def identity(self) -> str:
        """A hash of everything that determines the rows."""
        return fingerprint([FORMAT, self.name, list(self.shape), self.dtype.str, dict(self.options), self.input])

    def layout(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """The dtype and shape of a row of each file."""
        files: dict[str, tuple[np.dtype, tuple[int, ...]]] = dict.fromkeys(("train", "test"), (self.dtype, self.shape))
        if self.label_dtype is not None:
            files |= {f"{split}_labels": (self.label_dtype, ()) for split in ("train", "test")}
        return files


@runtime_checkable
class Source(Protocol):
    """The origin of a dataset: a frozen dataclass of options, `path` among them if it needs one."""

    summary: ClassVar[str]

    def plan(self) -> Plan: ...


def prepare(plan: Plan, folder: Path) -> Dataset:
    """Write the planned dataset into `folder`, resume an interrupted preparation, or open the dataset if it exists."""
    folder = Path(os.path.abspath(folder.expanduser()))
    if folder.name.startswith(".") or not folder.name.isprintable():
        raise UsageError(
            f"a dataset is named by its folder, got {folder.name!r}, which is hidden or not printable. Give another "
            f"folder with --to."
        )
    if os.path.isfile(folder / MANIFEST):
        return _existing(plan, folder)
    if os.path.lexists(folder):
        raise UsageError(f"{folder} exists and is not a prepared dataset. Give another folder with --to.")
    make_folder(folder.parent, "--to")
    try:
        with _locked(folder):
            if not (folder / MANIFEST).is_file():  # another process may have finished it in the meantime
                _write(plan, folder)
    except OSError as error:
        if error.errno in FULL:
            raise cannot_write(folder, error, "--to") from error
        raise DataError(f"cannot prepare {folder}: {error}") from error
    return open_dataset(folder)


def _existing(plan: Plan, folder: Path) -> Dataset:
    found = open_dataset(folder)
    planned, stored = json.loads(json.dumps(plan.options)), found.manifest.options  # in JSON, tuples are lists
    changed = [
        f"{key}: {stored.get(key)!r} there, {value!r} requested"
        for key, value in planned.items()
        if value != stored.get(key)
    ]
    reasons = ["from other files, or before they changed"] if plan.input != found.manifest.input else []
    reasons += [f"with other options ({'; '.join(changed[:5])})"] if changed else []
    if reasons:
        raise UsageError(
            f"{folder} already holds a dataset, made {' and '.join(reasons)}. Give another folder with --to, or delete "
            f"that one."
        )
    return found


def _write(plan: Plan, folder: Path) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    needed = plan.total * int(np.prod(plan.shape, dtype=np.int64)) * plan.dtype.itemsize
    free = shutil.disk_usage(folder.parent).free + sum(path.stat().st_size for path in partial.glob("*.npy"))
    if needed > free:
        raise BsiError(
            f"{folder.name} needs {readable_bytes(needed)}, but the disk of {folder} has {readable_bytes(free)} free. "
            f"Free some space, or give another folder with --to."
        )
    staging = _Staging(partial, plan, folder.name)
    blocks = plan.blocks(staging.done.items)
    try:
        with Progress(f"prepare {folder.name}", plan.total, plan.unit, done=staging.done.items) as progress:
            while (block := staging.next(blocks)) is not None:
                staging.append(block)
                skipped = len(staging.done.skipped)
                progress.advance(block.items, note=f"{skipped} skipped" if skipped else None)
    except BaseException:
        try:
            staging.sync()  # also after Ctrl-C, so that the next run does not read these rows again
        finally:
            staging.close()
        raise
    staging.finish()
    os.rename(partial, folder)
    sync_folder(folder.parent)


@dataclass(frozen=True)
class _Done:
    """The progress of a preparation. Replaced as one object, so that an interruption finds the old or the new one."""

    items: int
    counts: Mapping[str, int]
    skipped: tuple[str, ...]


class _Staging:
    """The hidden folder of an incomplete dataset: append-only files, and a note of how much of them is valid."""

    def __init__(self, path: Path, plan: Plan, name: str) -> None:
        self.path, self.plan, self.name, self.layout = path, plan, name, plan.layout()
        done = self._resumable()
        if done is None:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
            done = _Done(0, dict.fromkeys(self.layout, 0), ())
        self.done = done
        self.files = {name: self._open(name) for name in self.layout}
        self.synced_at = time.monotonic()

    def _resumable(self) -> _Done | None:
        """The progress of an interrupted preparation of exactly the same rows."""
        try:
            note = json.loads((self.path / "state.json").read_text())
            done = _Done(int(note["items"]), {k: int(v) for k, v in note["counts"].items()}, tuple(note["skipped"]))
            sizes = {name: (self.path / f"{name}.npy").stat().st_size for name in self.layout}
            complete = all(size >= self._end(name, done) for name, size in sizes.items())
            return done if note["identity"] == self.plan.identity and complete else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def _end(self, name: str, done: _Done) -> int:
        dtype, shape = self.layout[name]
        return HEADER_BYTES + done.counts[name] * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize

    def _open(self, name: str) -> IO[bytes]:
        path = self.path / f"{name}.npy"
        path.touch()
        file = path.open("r+b")
        file.truncate(self._end(name, self.done))  # rows written after the last note are written again
        file.seek(0, os.SEEK_END)
        return file

    def next(self, blocks: Iterator[Block]) -> Block | None:
        """The next block; None at the end. Damaged input discards what was read from it: it is read again from 0."""
        try:
            return next(blocks, None)
        except DataError:
            self.close()
            self.files = {}
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def append(self, block: Block) -> None:
        counts = dict(self.done.counts)
        skipped = self.done.skipped + block.skipped
        if len(skipped) > self.plan.skip:
            allowed = f"Only {self.plan.skip} may be skipped" if self.plan.skip else "Nothing may be skipped"
            raise DataError(
                f"{self.plan.name}: {skipped[self.plan.skip]}. {allowed}: repair or remove the file, or allow more "
                f"with --skip N."
            )
        for name, (dtype, shape) in self.layout.items():
            split, _, kind = name.partition("_")
            rows = (block.labels if kind else block.rows).get(split)
            if rows is None:
                continue
            assert rows.shape[1:] == shape, f"a row of {name} has shape {rows.shape[1:]}, expected {shape}"
            self.files[name].write(np.ascontiguousarray(rows, dtype).data)
            counts[name] += len(rows)
        self.done = _Done(self.done.items + block.items, counts, skipped)
        if time.monotonic() - self.synced_at >= SYNC_EVERY_S:
            self.sync()

    def sync(self) -> None:
        """Make the rows durable, then the note that counts them."""
        if not self.files:  # discarded
            return
        for file in self.files.values():
            _sync(file)
        note = {"identity": self.plan.identity, **asdict(self.done)}
        write_text(self.path / "state.json", json.dumps(note))
        self.synced_at = time.monotonic()

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def finish(self) -> None:
        """Write headers, hashes and the manifest. The folder is then a dataset except for its name."""
        plan, counts = self.plan, self.done.counts
        if not counts["train"]:
            self.close()
            raise DataError(
                f"{plan.name} has no training samples ({counts['test']} for testing). Add more, or use --test-fraction "
                f"0."
            )
        self.sync()
        for name, (dtype, shape) in self.layout.items():
            self.files[name].seek(0)
            self.files[name].write(header_bytes(dtype, (counts[name], *shape)))
            _sync(self.files[name])
        self.close()
        paths = [self.path / f"{name}.npy" for name in self.layout]
        manifest = Manifest(
            name=self.name,
            source=plan.source,
            counts={split: counts[split] for split in ("train", "test")},
            shape=plan.shape,
            dtype=plan.dtype.name,
            kind=_fitted(plan.kind, self.path / "train.npy"),
            files={path.name: FileRecord(path.stat().st_size, digest_file(path)) for path in paths},
            options=plan.options,
            input=plan.input,
            skipped=self.done.skipped,
            classes=plan.classes,
            notes=plan.notes,
        )
        write_text(self.path / MANIFEST, manifest.to_json())
        (self.path / "state.json").unlink()
        sync_folder(self.path)


def _fitted(kind: Bins | Symbols | None, path: Path) -> DataKind:
    """The kind of the data with what is measured on the training samples: frequencies of symbols, or units."""
    if isinstance(kind, Symbols):
        with ArrayFile.at(path) as array:
            counts = np.zeros(kind.count, np.int64)
            for block in array.blocks():
                counts += np.bincount(block.reshape(-1), minlength=kind.count)
        return kind.counted(counts)
    return kind or _standardize(path)


def _standardize(path: Path) -> Standardize:
    """Mean and std per element or channel, in one pass (Chan, Golub and LeVeque, 1979), in float64."""
    count, mean, squares = 0, np.zeros(1), np.zeros(1)
    with ArrayFile.at(path) as array:
        channels = array.shape[1] if len(array.shape) > 1 else 1
        for block in array.blocks():
            x = np.moveaxis(block.astype(np.float64).reshape(len(block), channels, -1), 1, 0).reshape(channels, -1)
            added = x.shape[1]
            middle, total = x.mean(1), count + added
            squares = squares + ((x - middle[:, None]) ** 2).sum(1) + (middle - mean) ** 2 * count * added / total
            mean = mean + (middle - mean) * added / total
            count = total
    return Standardize.of(mean.tolist(), np.sqrt(squares / count).tolist())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Allow one preparation at a time. The system releases the lock when its process ends, however it ends."""
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"another process is preparing {folder}. Wait for it, or give another folder with --to."
            ) from error
        yield


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
