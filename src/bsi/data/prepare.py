"""Prepare a dataset from a source.

A source is a frozen dataclass of options whose `plan()` describes what will be written before a row is read. The rows
then arrive in blocks, in a fixed order, and are appended to files in a hidden folder next to the target: the memory is
that of one block. Every few seconds, and when interrupted, the files are synced together with the number of input items
consumed, and the same command resumes from there. The headers, which hold the number of rows, and the manifest are
written last; then the folder is renamed. A folder of the target's name is therefore always a complete dataset.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Integer, Shaped

from bsi.data.files import BLOCK_BYTES, HEADER_BYTES, ArrayFile, header_bytes
from bsi.data.store import FORMAT, MANIFEST, SPLITS, Dataset, FileRecord, Manifest, open_dataset
from bsi.errors import BsiError, DataError, UsageError
from bsi.io import (
    FULL,
    cannot_write,
    digest_file,
    fingerprint,
    make_folder,
    read_json,
    sync_file,
    sync_folder,
    write_json,
    write_text,
)
from bsi.progress import Progress, readable_bytes
from bsi.rng import uniforms
from bsi.values import Bins, DataKind, Latents, Standardize, Symbols

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
    """The rows made from the next items of the input, and the reason for each item that could not be read."""

    rows: Shaped[np.ndarray, "rows *shape"]
    for_testing: bool | Bool[np.ndarray, " rows"]
    labels: Integer[np.ndarray, " rows"] | None = None
    skipped: tuple[str, ...] = ()

    @property
    def items(self) -> int:
        return len(self.rows) + len(self.skipped)


class Part(NamedTuple):
    """A part of the input, such as a file, of `items` items. `blocks(i)` reads those from its item i on."""

    items: int
    blocks: Callable[[int], Iterable[Block]]


def array_part(
    rows: Shaped[np.ndarray, "n *shape"], labels: Integer[np.ndarray, " n"] | None, for_testing: bool
) -> Part:
    """The rows of an array or memory map."""
    each = max(1, BLOCK_BYTES // max(1, rows[:1].nbytes))

    def blocks(start: int) -> Iterator[Block]:
        for first in range(start, len(rows), each):
            here = slice(first, first + each)
            yield Block(rows[here], for_testing, None if labels is None else labels[here])

    return Part(len(rows), blocks)


@dataclass(frozen=True)
class Preparation:
    """A description of the data that a source will write. See `Manifest` for the fields that they share."""

    name: str
    source: str
    shape: tuple[int, ...]
    kind: Bins | Symbols | Latents | None  # None for other continuous data, stored as float32
    options: Mapping[str, Any]
    input: str
    parts: Sequence[Part]  # in order
    label_dtype: np.dtype | None = None
    classes: tuple[str, ...] = ()
    skip: int = 0  # how many unreadable items may be skipped
    notes: tuple[str, ...] = ()
    extra: Mapping[str, Callable[[Path], object]] = field(default_factory=dict)  # writes further files, by name

    @property
    def total(self) -> int:
        """Number of input items, and an upper bound on the number of rows."""
        return sum(part.items for part in self.parts)

    @property
    def dtype(self) -> np.dtype:
        return self.kind.dtype if self.kind else np.dtype("<f4")

    @property
    def identity(self) -> str:
        """A hash of everything that determines the rows."""
        return fingerprint([FORMAT, self.name, list(self.shape), self.dtype.str, dict(self.options), self.input])

    def blocks(self, start: int) -> Iterator[Block]:
        """The rows of the input items from `start` on."""
        for part in self.parts:
            if start < part.items:
                yield from part.blocks(start)
            start = max(0, start - part.items)


class Source(Protocol):
    """The origin of a dataset. `path` is among its options if it needs one."""

    summary: ClassVar[str]

    def plan(self) -> Preparation: ...


def prepare(plan: Preparation, folder: Path) -> Dataset:
    """Write the planned dataset into `folder`, resume an interrupted preparation, or open the dataset if it exists."""
    folder = Path(os.path.abspath(folder.expanduser()))
    if folder.name.startswith(".") or not folder.name.isprintable():
        raise UsageError(f"a dataset is named by its folder: {folder.name!r} is hidden or not printable. Change --to.")
    if os.path.isfile(folder / MANIFEST):
        return _existing(plan, folder)
    if os.path.lexists(folder):
        raise UsageError(f"{folder} exists and is not a prepared dataset. Give another folder with --to.")
    make_folder(folder.parent, "--to")
    try:
        with exclusive(folder, wait=False):
            if not (folder / MANIFEST).is_file():  # another process may have finished it in the meantime
                _write(plan, folder)
    except OSError as error:
        if error.errno in FULL:
            raise cannot_write(folder, error, "--to") from error
        raise DataError(f"cannot prepare {folder}: {error}") from error
    return open_dataset(folder)


@contextmanager
def exclusive(path: Path, wait: bool) -> Iterator[None]:
    """Keep other processes from making `path`. The system releases the lock when its process ends, however it ends."""
    with path.with_name(f".{path.name}.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise DataError(f"another process is preparing {path}. Wait for it, or give another --to.") from error
        yield


def _existing(plan: Preparation, folder: Path) -> Dataset:
    found = open_dataset(folder)
    reasons = ["from other files, or before they changed"] if plan.input != found.manifest.input else []
    for key, value in json.loads(json.dumps(plan.options)).items():  # in JSON, tuples are lists
        if value != (stored := found.manifest.options.get(key)):
            reasons.append(f"with other options ({key}: {stored!r} there, {value!r} requested)")
    if reasons:
        made = " and ".join(reasons)
        raise UsageError(f"{folder} already holds a dataset, made {made}. Give another folder with --to, or delete it.")
    return found


def _write(plan: Preparation, folder: Path) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    needed = plan.total * math.prod(plan.shape) * plan.dtype.itemsize
    free = shutil.disk_usage(folder.parent).free + sum(path.stat().st_size for path in partial.glob("*.npy"))
    if needed > free:
        found = f"needs {readable_bytes(needed)}, but the disk has {readable_bytes(free)} free"
        raise BsiError(f"{folder} {found}. Free some space, or give another folder with --to.")
    staging = _Staging(partial, plan)
    try:
        with Progress(f"prepare {folder.name}", plan.total, "sample", done=staging.note["items"]) as progress:
            for block in staging.missing():
                staging.append(block)
                skipped = len(staging.note["skipped"])
                progress.advance(block.items, note=f"{skipped} skipped" if skipped else None)
        staging.finish(folder.name)
    except BaseException:
        staging.sync()  # also after Ctrl-C, so that the next run does not read these rows again
        raise
    os.rename(partial, folder)
    sync_folder(folder.parent)


class _Staging:
    """The hidden folder of an incomplete dataset: append-only files, and a note of how much of them is valid.

    `layout` has the path, the dtype and the shape of a row of each file. The note is replaced as one object, so that
    an interruption finds the old or the new one.
    """

    def __init__(self, folder: Path, plan: Preparation) -> None:
        self.folder, self.plan, self.state = folder, plan, folder / "state.json"
        self.layout = {split: (folder / f"{split}.npy", plan.dtype, plan.shape) for split in SPLITS}
        if plan.label_dtype is not None:
            labels = [f"{split}_labels" for split in SPLITS]
            self.layout |= {name: (folder / f"{name}.npy", plan.label_dtype, ()) for name in labels}
        try:  # to resume an interrupted preparation of exactly the same rows
            state = read_json(self.state)
            self.note: dict[str, Any] = state["note"]
            intact = state["sha256"] == fingerprint(self.note) and self.note["identity"] == plan.identity
            resumes = intact and all(p.stat().st_size >= self._end(name) for name, (p, _, _) in self.layout.items())
        except (OSError, ValueError, KeyError, TypeError):
            resumes = False
        if not resumes:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            counts = dict.fromkeys(self.layout, 0)
            self.note = {"identity": plan.identity, "items": 0, "counts": counts, "skipped": []}
        for name, (path, _, _) in self.layout.items():
            path.touch()
            os.truncate(path, self._end(name))  # rows written after the last note are written again
        self.synced_at = time.monotonic()

    def _end(self, name: str) -> int:
        _, dtype, shape = self.layout[name]
        return HEADER_BYTES + self.note["counts"][name] * math.prod(shape) * dtype.itemsize

    def missing(self) -> Iterator[Block]:
        """The rows not yet written. Damaged input discards what was read from it: it is read again from the start."""
        try:
            yield from self.plan.blocks(self.note["items"])
        except DataError:
            shutil.rmtree(self.folder)
            raise

    def append(self, block: Block) -> None:
        plan, counts, skipped = self.plan, dict(self.note["counts"]), [*self.note["skipped"], *block.skipped]
        if len(skipped) > plan.skip:
            allowed = f"Only {plan.skip} may be skipped" if plan.skip else "Nothing may be skipped"
            fix = "repair or remove the file, or allow more with --skip N."
            raise DataError(f"{plan.name}: {skipped[plan.skip]}. {allowed}: {fix}")
        is_test = np.broadcast_to(block.for_testing, len(block.rows))
        for name, (path, dtype, _) in self.layout.items():
            values = block.labels if name.endswith("_labels") else block.rows
            assert values is not None, "a plan with a type of labels has labels"
            chosen = values[is_test == name.startswith("test")]
            with path.open("ab") as file:
                file.write(np.ascontiguousarray(chosen, dtype).data)
            counts[name] += len(chosen)
        self.note = self.note | {"items": self.note["items"] + block.items, "counts": counts, "skipped": skipped}
        if time.monotonic() - self.synced_at >= SYNC_EVERY_S:
            self.sync()

    def sync(self) -> None:
        """Make the rows durable, then the note that counts them."""
        if self.folder.exists():  # not discarded
            for path, _, _ in self.layout.values():
                sync_file(path)
            write_json(self.state, {"note": self.note, "sha256": fingerprint(self.note)})
            self.synced_at = time.monotonic()

    def finish(self, name: str) -> None:
        """Write headers, hashes and the manifest. The folder is then a dataset except for its name."""
        plan, counts = self.plan, self.note["counts"]
        if not counts["train"]:
            raise DataError(f"{plan.name} has no training samples. Add more, or use --test-fraction 0.")
        for file, (path, dtype, shape) in self.layout.items():
            with path.open("r+b") as opened:
                opened.write(header_bytes(dtype, (counts[file], *shape)))
        for file, write in plan.extra.items():
            write(self.folder / file)
        self.sync()
        paths = [*(path for path, _, _ in self.layout.values()), *(self.folder / file for file in plan.extra)]
        manifest = Manifest(
            name=name,
            source=plan.source,
            counts={split: counts[split] for split in SPLITS},
            shape=plan.shape,
            dtype=plan.dtype.name,
            kind=_fitted(plan.kind, paths[0]),
            files={path.name: FileRecord(path.stat().st_size, digest_file(path)) for path in paths},
            options=plan.options,
            input=plan.input,
            skipped=tuple(self.note["skipped"]),
            classes=plan.classes,
            notes=plan.notes,
        )
        write_text(self.folder / MANIFEST, manifest.to_json())
        self.state.unlink()
        sync_folder(self.folder)


def _fitted(kind: Bins | Symbols | Latents | None, path: Path) -> DataKind:
    """The kind of the data with what is measured on the training samples in one pass.

    These are the frequencies of symbols, or mean and std per element or channel (Chan, Golub and LeVeque, 1979).
    """
    if isinstance(kind, Bins):
        return kind
    with ArrayFile.at(path) as array:
        if isinstance(kind, Symbols):
            counts = np.zeros(kind.count, np.int64)
            for block in array.blocks():
                counts += np.bincount(block.reshape(-1), minlength=kind.count)
            return kind.counted(counts)
        count, mean, squares = 0, np.zeros(1), np.zeros(1)
        channels = array.shape[1] if len(array.shape) > 1 else 1
        for block in array.blocks():
            x = np.moveaxis(block.astype(np.float64).reshape(len(block), channels, -1), 1, 0).reshape(channels, -1)
            added = x.shape[1]
            middle, total = x.mean(1), count + added
            squares = squares + ((x - middle[:, None]) ** 2).sum(1) + (middle - mean) ** 2 * count * added / total
            mean = mean + (middle - mean) * added / total
            count = total
    if isinstance(kind, Latents):
        return kind.fitted(mean, squares / count)
    return Standardize.of(mean.tolist(), np.sqrt(squares / count).tolist())
