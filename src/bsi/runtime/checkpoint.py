"""Checkpoints: folders of safetensors and JSON with a SHA-256 manifest, written atomically.

    checkpoints/
      step-00001000/
        model.safetensors  ema.safetensors  optimizer.safetensors  (powers.safetensors with `ema.powers`)
        state.json                     the step, the recipe, the data's description: everything that is not a tensor
        manifest.json                  size and SHA-256 of each file above, and of itself
      latest                           the name of the folder to resume from

A save writes a hidden folder, syncs it, renames it, and updates `latest` last: after a crash at any time the previous
checkpoint is valid, and the next save removes incomplete folders. Reading verifies every hash first. The hashes detect
damage, not tampering: whoever can change a file can change its hash. No file is ever unpickled.

If ranks have parts of the tensors (FSDP), each writes and hashes its own files, `model-00001-of-00008.safetensors`,
with some rows of each tensor. The first rank makes the folder, waits for the hashes of all, and does the rest. Any
number of ranks can read them: every tensor is the concatenation of its rows in the order of the files.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import safetensors
import torch
from torch import Tensor

from bsi import io
from bsi.devices import host_memory
from bsi.errors import BsiError, CorruptCheckpoint, DataError, UsageError
from bsi.io import canonical_json, digest_file, fingerprint, sync_file
from bsi.progress import readable_bytes
from bsi.recipe import Keep
from bsi.runtime.distributed import Mail

FORMAT, SHARDED_FORMAT = 1, 2
STATE, MANIFEST, LATEST = "state.json", "manifest.json", "latest"
FORMER = {"optimizer": "optimiser"}  # file names of version 0.1.0
LAST_WAIT_S = 5.0  # for other ranks' parts, after an error
SPARE_BYTES = 16 << 20  # disk space that a checkpoint leaves free, for the journal and the samples


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint in memory: tensors by file and name, and JSON-serializable state."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose hashes have been verified."""

    folder: Path
    step: int
    state: Mapping[str, Any]


# ---- Writing ---------------------------------------------------------------------------------------------------------


def save(
    root: Path, snapshot: Snapshot, keep: Keep, check: Callable[[], None] = lambda: None, peers: Peers | None = None
) -> Path:
    """Write a checkpoint into `root` and make it the latest. `check` raises if the run folder's lock is lost.

    A full disk is detected before anything is written if possible; the previous checkpoint remains. If ranks have
    parts, all that write some must call it with their `peers`, and all raise if one fails.
    """
    if peers is not None and not peers.first:
        peers.contribute(lambda folder, part: write_files(root / folder, snapshot, part))
        return root / f"step-{snapshot.step:08d}"
    with nullcontext() if peers is None else peers.concluding():
        return _save(root, snapshot, keep, check, peers)


def _save(root: Path, snapshot: Snapshot, keep: Keep, check: Callable[[], None], peers: Peers | None) -> Path:
    check()
    root.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(root)
    final = root / f"step-{snapshot.step:08d}"
    temporary = root / f".{final.name}.{os.getpid()}"
    needed = sum(tensor.nbytes for tensors in snapshot.tensors.values() for tensor in tensors.values())
    needed *= 1 if peers is None else peers.size
    free = shutil.disk_usage(root).free
    try:
        if free < needed + SPARE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        temporary.mkdir()
        if peers is None:
            files = write_files(temporary, snapshot)
        else:
            peers.mail.send(f"{peers.saves}/folder", temporary.name)  # the others write into it too
            files = write_files(temporary, snapshot, peers.part) | peers.collect()
        version = FORMAT if peers is None else SHARDED_FORMAT
        state = {"format": version, "step": snapshot.step, **snapshot.state}
        (temporary / STATE).write_text(canonical_json(state), "utf-8")
        manifest = {"format": version, "files": files | _synced(temporary / STATE)}
        io.write_json(temporary / MANIFEST, {**manifest, "sha256": fingerprint(manifest)})
        io.sync_folder(temporary)
        check()
        publish(temporary, final)
        move_latest(root, final.name)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not io.is_full(error):
            raise
        limit = "" if free < needed + SPARE_BYTES else ", but a quota or the file size limit (ulimit -f) is reached"
        raise BsiError(
            f"no space for a checkpoint in {root}: it takes {readable_bytes(needed)}, {readable_bytes(free)} are free"
            f"{limit}. The previous checkpoint is unchanged. Free some space, or lower --keep.last, and run the same "
            f"command again."
        ) from error
    prune(root, keep, snapshot.step)
    return final


Files = dict[str, dict[str, Any]]  # size and SHA-256 by name


def write_files(folder: Path, snapshot: Snapshot, part: str = "") -> Files:
    """Write and sync the tensors, or this rank's `part` of them."""
    files: Files = {}
    for name, tensors in snapshot.tensors.items():
        path = folder / f"{name}{part}.safetensors"
        io.write_tensors(path, tensors)
        files |= _synced(path)
    return files


def _synced(path: Path) -> Files:
    sync_file(path)
    return {path.name: {"bytes": path.stat().st_size, "sha256": digest_file(path)}}


class Peers:
    """The ranks that write parts of a checkpoint together. They exchange messages from the threads that write, since
    collectives belong to the main thread: the first rank's folder, everyone's hashes, and how the save has ended.
    """

    def __init__(self, mail: Mail, rank: int, size: int) -> None:
        self.mail, self.rank, self.size, self.saves = mail, rank, size, 0
        self.first, self.part = rank == 0, f"-{rank:05d}-of-{size:05d}"

    def collect(self) -> Files:
        """The files of the others, once they are durable."""
        files: Files = {}
        for rank in range(1, self.size):
            report = json.loads(self.mail.receive(f"{self.saves}/files/{rank}"))
            if "error" in report:
                raise OSError(report["errno"], f"rank {rank}: {report['error']}")
            files |= report["files"]
        return files

    @contextmanager
    def concluding(self) -> Iterator[None]:
        """Tell the others how a save of the first rank has ended."""
        end = "another rank has failed"
        try:
            yield
            end = ""
        except Exception as error:
            end = str(error) or type(error).__name__
            raise
        finally:
            with suppress(RuntimeError):  # the store is gone
                self.mail.send(f"{self.saves}/folder", "")  # for those that wait for one
                self.mail.send(f"{self.saves}/end", end)
            self.saves += 1

    def contribute(self, write: Callable[[str, str], Files]) -> None:
        """Write this rank's part when the first rank is ready, and raise if the save fails."""
        number, self.saves = self.saves, self.saves + 1
        if folder := self.mail.receive(f"{number}/folder"):
            try:
                report: dict[str, Any] = {"files": write(folder, self.part)}
            except (OSError, safetensors.SafetensorError) as error:
                full = errno.ENOSPC if io.is_full(error) else errno.EIO
                report = {"error": str(error), "errno": full}
            self.mail.send(f"{number}/files/{self.rank}", json.dumps(report))
        if end := self.mail.receive(f"{number}/end"):
            raise BsiError(f"this rank stops because the first could not save: {end}")


def publish(temporary: Path, final: Path) -> None:
    """Rename a complete folder. An existing folder of that name is replaced: only a damaged one can exist."""
    if final.exists():
        final.rename(final.with_name(f".{final.name}.replaced.{os.getpid()}"))
    temporary.rename(final)
    io.sync_folder(final.parent)


def move_latest(root: Path, name: str) -> None:
    io.write_text(root / LATEST, name + "\n")


def prune(root: Path, keep: Keep, step: int) -> None:
    """Delete all but the last few checkpoints up to `step` and those at multiples of `keep.every`."""
    past = [(at, folder) for at, folder in _steps(root).items() if at <= step]
    for at, folder in past[keep.last :]:
        if not (keep.every and at % keep.every == 0):
            hidden = folder.with_name(f".{folder.name}.old.{os.getpid()}")
            folder.rename(hidden)  # so that a partly deleted checkpoint is never found
            shutil.rmtree(hidden, ignore_errors=True)
    _clear_leftovers(root)


def _clear_leftovers(root: Path) -> None:
    for path in root.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(f".{LATEST}.*"):
        path.unlink(missing_ok=True)


class Saver:
    """Writes checkpoints in a background thread, while the next steps run.

    `latest` is updated only when all files are on the disk, so a crash loses only the new checkpoint. At most one save
    runs at a time; its error is raised by the next call, or at the end.
    """

    def __init__(self, root: Path, keep: Keep, check: Callable[[], None], peers: Peers | None = None) -> None:
        self.root, self.keep, self.check, self.peers = root, keep, check, peers
        self._saved_at = time.monotonic()
        self.has_saved = (root / LATEST).is_file()  # a resumed run has a checkpoint already
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="bsi-save")
        self._running: Future[None] | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the end of the last save, or since the start."""
        return time.monotonic() - self._saved_at

    def save(self, snapshot: Snapshot) -> None:
        self.wait()
        self._running = self._pool.submit(self._write, snapshot)
        if not self.keep.background:
            self.wait()

    def _write(self, snapshot: Snapshot) -> None:
        save(self.root, snapshot, self.keep, self.check, self.peers)
        self._saved_at, self.has_saved = time.monotonic(), True

    def wait(self) -> None:
        """Wait until the save is on the disk, and raise its error."""
        running, self._running = self._running, None
        if running is not None:
            # In short intervals, so that the main thread can handle signals that another thread has received.
            while not wait([running], timeout=0.2).done:
                pass
            running.result()

    def close(self) -> None:
        """Wait for the running save without raising its error: `close` may be called while another error is raised."""
        if self.peers is not None:  # of which some may have failed
            self.peers.mail.limit(LAST_WAIT_S)
        with suppress(Exception):
            self.wait()
        self._pool.shutdown()


# ---- Reading ---------------------------------------------------------------------------------------------------------


def find(root: Path, warn: Callable[[str], None], step: int | None = None) -> Checkpoint | None:
    """The checkpoint to resume from, or the one of a given step; None if there has never been one.

    `latest` names it; newer ones were not completed. If it is damaged, the previous one is used after a call of `warn`;
    if all of them are, this raises CorruptCheckpoint. A training that runs meanwhile may delete checkpoints, and has
    newer ones then.
    """
    name, by_step = _latest(root), _steps(root)
    if step is not None:
        if step not in by_step:
            steps = ", ".join(map(str, by_step)) or "none"
            raise UsageError(f"{root} has no checkpoint of step {step}. There are: {steps}.")
        return verify(by_step[step])
    folders = list(by_step.values())
    if any(folder.name == name for folder in folders):
        while folders[0].name != name:
            del folders[0]
    elif _latest(root) != name:
        return find(root, warn)
    elif folders:
        warn(f"DAMAGED CHECKPOINT: {root / LATEST} does not name one of the checkpoints: got {name!r:.40}")
    for folder in folders:
        try:
            return verify(folder)
        except CorruptCheckpoint as error:
            if not folder.exists():
                return find(root, warn)
            then = "there is no earlier one" if folder == folders[-1] else "falling back to the previous one"
            warn(f"DAMAGED CHECKPOINT: {error}\n{then}")
    if folders:
        raise CorruptCheckpoint(
            f"all {len(folders)} checkpoints in {root} are damaged, see above. Restore one from a copy, or train again "
            f"with another --out."
        )
    if (root / LATEST).is_file():
        raise CorruptCheckpoint(
            f"{root / LATEST} names a checkpoint, but there is none. Restore it, or use another --out."
        )
    return None


def _steps(root: Path) -> dict[int, Path]:
    """The checkpoint folders by their steps, the newest first."""
    named = [path for path in root.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return dict(sorted(((int(path.name[5:]), path) for path in named), reverse=True))


def _latest(root: Path) -> str:
    """The content of `latest`, empty if it cannot be read."""
    try:
        with io.open_untrusted(root / LATEST) as file:
            return file.read(1000).decode().strip()
    except (DataError, UnicodeDecodeError):
        return ""


def verify(folder: Path) -> Checkpoint:
    """The checkpoint in a folder. Raises if a file does not match its hash."""
    try:
        for name, expected in _hashes(folder / MANIFEST).items():
            found = digest_file(folder / name)
            if found != expected:
                raise CorruptCheckpoint(f"{folder / name} is damaged: expected sha256 {expected}, got {found}.")
        state = io.read_json(folder / STATE)
    except DataError as error:
        raise CorruptCheckpoint(str(error)) from error
    if not isinstance(state, dict) or not isinstance(state.get("step"), int) or "format" not in state:
        raise CorruptCheckpoint(f"{folder / STATE} is not the state of a checkpoint.")
    if state["format"] not in (FORMAT, SHARDED_FORMAT):
        formats = f"formats {FORMAT} and {SHARDED_FORMAT}"
        raise UsageError(
            f"{folder} has checkpoint format {state['format']!r}, and this version of bsi reads {formats}. "
            f"Resume with the version that wrote it, or start a new run with --init-from an export of it."
        )
    return Checkpoint(folder, state["step"], state)


def _hashes(path: Path) -> dict[str, str]:
    """The files' hashes in a manifest. It is canonical and has its own hash, so that any changed byte is detected."""
    with io.open_untrusted(path, io.MAX_JSON_BYTES) as file:
        text = file.read()
    manifest = io.parse_json(text, path)
    try:
        hashes = {name: record["sha256"] for name, record in manifest["files"].items()}
        intact = fingerprint({"format": manifest["format"], "files": manifest["files"]}) == manifest["sha256"]
        if not intact or canonical_json(manifest).encode() != text or STATE not in hashes:
            raise ValueError("its hash is another")
        if any(Path(name).name != name for name in hashes):
            raise ValueError("it names a file in another folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{path} is damaged: {type(error).__name__}: {error}.") from error
    return hashes


@dataclass(frozen=True)
class OnDisk:
    """A tensor of a checkpoint, read when it is indexed; its rows may lie in several files."""

    name: str
    shape: tuple[int, ...]
    files: Sequence[tuple[Any, int]]  # and the number of rows in each

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        if len(self.files) == 1 and rows is ...:
            whole: Tensor = self.files[0][0].get_tensor(self.name)
            return whole
        start, stop, _ = (slice(None) if rows is ... else rows).indices(self.shape[0])
        found, offset = torch.empty(max(0, stop - start), *self.shape[1:]), 0
        for file, count in self.files:
            low, high = max(start, offset), min(stop, offset + count)
            if low < high:
                found[low - start : high - start] = file.get_slice(self.name)[low - offset : high - offset]
            offset += count
        return found


Stored = Tensor | OnDisk  # both are indexed by rows


def open_tensors(checkpoint: Checkpoint, name: str) -> dict[str, OnDisk]:
    """The tensors of a checkpoint by name, to be read in whole or by rows."""
    path = checkpoint.folder / f"{name}.safetensors"
    if not path.is_file() and name in FORMER:
        path = checkpoint.folder / f"{FORMER[name]}.safetensors"
    parts = sorted(checkpoint.folder.glob(f"{name}-*-of-*.safetensors"))
    found: dict[str, OnDisk] = {}
    for part in [path] if os.path.lexists(path) or not parts else parts:
        if os.path.lexists(part) and not part.is_file():  # a pipe would block; without a file, it was deleted meanwhile
            raise CorruptCheckpoint(f"{part} is damaged: it is not a regular file.")
        try:
            file = safetensors.safe_open(part, framework="pt")
        except safetensors.SafetensorError as error:
            raise CorruptCheckpoint(f"{part} is damaged: {error}.") from error
        for key in file.keys():  # noqa: SIM118
            shape, before = tuple(file.get_slice(key).get_shape()), found.get(key)
            if before is not None and (not shape or before.shape[1:] != shape[1:]):
                raise CorruptCheckpoint(f"{part} is damaged: its rows of {key} do not fit those of other files.")
            files = [*(before.files if before else ()), (file, shape[0] if shape else 1)]
            found[key] = OnDisk(key, (sum(rows for _, rows in files), *shape[1:]) if shape else (), files)
    return found


def read_tensors(checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint, gathered if ranks have written parts of them; they are read one at a time."""
    tensors = open_tensors(checkpoint, name)
    needed, there = sum(4 * math.prod(tensor.shape) for tensor in tensors.values()), host_memory()
    if needed > there:
        raise UsageError(
            f"the tensors of {checkpoint.folder} take {readable_bytes(needed)}, and this process can have "
            f"{readable_bytes(there)}. Use a machine with more memory; training resumes with several ranks, which read "
            f"their parts alone."
        )
    return {key: tensor[...] for key, tensor in tensors.items()}
