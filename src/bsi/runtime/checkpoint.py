"""Checkpoints: folders of safetensors and JSON with a SHA-256 manifest, never half there.

    checkpoints/
      step-00001000/
        model.safetensors  ema.safetensors  optimizer.safetensors
        state.json                     the step, the recipe, the data's description: everything that is not a tensor
        manifest.json                  size and SHA-256 of each file above, and of itself
      latest                           the name of the folder to go on from

A save writes a hidden folder beside, syncs it, renames it, and moves `latest` last; a crash at any moment leaves the
previous checkpoint, and leftovers that the next save clears away. Reading compares every hash first. The hashes detect
damage, not tampering: whoever can change a file can change its hash. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from bsi.errors import BsiError, CorruptCheckpoint, UsageError
from bsi.io import canonical_json, digest_file, fingerprint, is_full, share, sync_file, sync_folder, write_text
from bsi.recipe import Keep

__all__ = ["FORMAT", "Checkpoint", "DiskFull", "Snapshot", "differences", "find", "read_tensors", "save", "verify"]

FORMAT = 1
STATE, MANIFEST, LATEST = "state.json", "manifest.json", "latest"
SPARE_BYTES = 16 << 20  # left free beside a checkpoint, for the journal and the samples
SHOWN = 7  # differences in a message of at most ten lines


class DiskFull(BsiError):
    """There is no room for a checkpoint; the one before stays as it is."""


@dataclass(frozen=True)
class Snapshot:
    """All that a checkpoint holds, in memory: tensors by file and name, and plain data."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for group in self.tensors.values() for t in group.values())


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose hashes were right when it was found."""

    folder: Path
    step: int
    state: Mapping[str, Any]


def save(root: Path, snapshot: Snapshot, keep: Keep, still_ours: Callable[[], None] = lambda: None) -> Path:
    """Write a checkpoint into `root` and make it the latest. `still_ours` raises if the folder was taken over."""
    still_ours()
    root.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(root)
    check_space(root, snapshot.bytes)
    final = root / f"step-{snapshot.step:08d}"
    beside = root / f".{final.name}.{os.getpid()}"
    try:
        write_files(beside, snapshot)
        still_ours()
        publish(beside, final)
        move_latest(root, final.name)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        if is_full(error):
            raise _disk_full(root, snapshot.bytes) from error
        raise
    prune(root, keep, snapshot.step)
    return final


def check_space(root: Path, needed: int) -> None:
    """Refuse before the first byte is written."""
    if shutil.disk_usage(root).free < needed + SPARE_BYTES:
        raise _disk_full(root, needed)


def _disk_full(root: Path, needed: int) -> DiskFull:
    free = shutil.disk_usage(root).free
    limit = "" if free < needed + SPARE_BYTES else ", but a quota or a limit on the size of a file (ulimit -f) is met"
    return DiskFull(
        f"no room for a checkpoint in {root}: it takes {needed / 2**20:.1f} MiB, {free / 2**20:.1f} MiB are free"
        f"{limit}. The previous checkpoint is untouched; free some space, or lower --keep.last, and run the same "
        f"command again."
    )


def write_files(folder: Path, snapshot: Snapshot) -> None:
    """Every file, synced; the manifest last."""
    folder.mkdir()
    for name, tensors in snapshot.tensors.items():
        safetensors.torch.save_file(dict(tensors), folder / f"{name}.safetensors")
        share(folder / f"{name}.safetensors")
    (folder / STATE).write_text(canonical_json({"format": FORMAT, "step": snapshot.step, **snapshot.state}), "utf-8")
    files = {}
    for path in sorted(folder.iterdir()):
        sync_file(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": digest_file(path)}
    manifest = {"format": FORMAT, "files": files}
    write_text(folder / MANIFEST, canonical_json({**manifest, "sha256": fingerprint(manifest)}))
    sync_folder(folder)


def publish(beside: Path, final: Path) -> None:
    """Give a finished folder its name. One of that name is a damaged one that was trained past: it makes way."""
    if final.exists():
        final.rename(final.with_name(f".{final.name}.replaced.{os.getpid()}"))
    beside.rename(final)
    sync_folder(final.parent)


def move_latest(root: Path, name: str) -> None:
    """The moment at which the new checkpoint counts."""
    write_text(root / LATEST, name + "\n")


def prune(root: Path, keep: Keep, step: int) -> None:
    """Delete what need not stay: all but the last few up to `step`, and those at multiples of `keep.every`."""
    past = [(s, folder) for s, folder in _steps(root) if s <= step]
    for s, folder in past[keep.last :]:
        if not (keep.every and s % keep.every == 0):
            hidden = folder.with_name(f".{folder.name}.old.{os.getpid()}")
            folder.rename(hidden)  # half a deleted checkpoint is never taken for one
            shutil.rmtree(hidden, ignore_errors=True)
    _clear_leftovers(root)


def _clear_leftovers(root: Path) -> None:
    for path in root.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(f".{LATEST}.*"):
        path.unlink(missing_ok=True)


def _steps(root: Path) -> list[tuple[int, Path]]:
    """The checkpoint folders by their step, the newest first."""
    named = [(re.fullmatch(r"step-(\d{8,})", path.name), path) for path in root.glob("step-*")]
    return sorted(((int(match[1]), path) for match, path in named if match), reverse=True)


def find(root: Path, warn: Callable[[str], None], step: int | None = None) -> Checkpoint | None:
    """The checkpoint to go on from, or the one of a given step; None if there was never one.

    `latest` names it. If it is damaged, the one before is taken, and `warn` is told so; if none is whole, that is an
    error.
    """
    if step is not None:
        folder = root / f"step-{step:08d}"
        if not folder.is_dir():
            steps = ", ".join(str(s) for s, _ in _steps(root)) or "none"
            raise UsageError(f"no checkpoint of step {step} in {root}; there are: {steps}")
        return verify(folder)
    candidates = list(_candidates(root, warn))
    for folder in candidates:
        try:
            return verify(folder)
        except CorruptCheckpoint as error:
            then = "there is none before it" if folder == candidates[-1] else "falling back to the one before"
            warn(f"DAMAGED CHECKPOINT: {error}\n{then}")
    if candidates:
        raise CorruptCheckpoint(
            f"no checkpoint in {root} is whole: all of {len(candidates)} are damaged, see above. Restore one from a "
            f"copy, or train again with another --out."
        )
    if (root / LATEST).is_file():
        raise CorruptCheckpoint(
            f"{root / LATEST} names a checkpoint, but there is none: restore it, or use another --out"
        )
    return None


def _candidates(root: Path, warn: Callable[[str], None]) -> Iterator[Path]:
    """`latest` and what is older, the newest first. What is newer than `latest` was never finished."""
    steps = _steps(root)
    try:
        name = (root / LATEST).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        name = ""
    if name not in [folder.name for _, folder in steps]:
        if steps:
            warn(f"DAMAGED CHECKPOINT: {root / LATEST} does not name one of the checkpoints: got {name!r:.40}")
        yield from (folder for _, folder in steps)
        return
    yield from (folder for _, folder in steps if folder.name <= name)


def verify(folder: Path) -> Checkpoint:
    """The checkpoint in a folder, if every file is the one that was written."""
    files = _manifest(folder)
    for name, record in files.items():
        path = folder / name
        if not path.is_file():
            raise CorruptCheckpoint(f"{path} is missing: expected sha256 {record['sha256']}")
        found = digest_file(path)
        if found != record["sha256"]:
            raise CorruptCheckpoint(
                f"{path} is damaged: expected {record['bytes']} bytes of sha256 {record['sha256']}, found "
                f"{path.stat().st_size} bytes of sha256 {found}"
            )
    state = json.loads((folder / STATE).read_text("utf-8"))
    if state["format"] != FORMAT:
        raise UsageError(
            f"{folder} has checkpoint format {state['format']!r}; this version of bsi reads format {FORMAT}. Go on "
            f"with the version that wrote it, or start anew with --init-from an export of it."
        )
    return Checkpoint(folder, state["step"], state)


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """The table of files. Written in one way only, and with its own hash: any other byte is noticed."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CorruptCheckpoint(f"{path} is missing")
    try:
        text = path.read_text("utf-8")
        manifest = json.loads(text)
        files: dict[str, dict[str, Any]] = manifest["files"]
        expected, found = manifest["sha256"], fingerprint({"format": manifest["format"], "files": files})
        same = canonical_json(manifest) == text
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"{path} is damaged: it is not a manifest ({type(error).__name__})") from error
    if expected != found or not same or any(Path(name).name != name for name in files) or STATE not in files:
        raise CorruptCheckpoint(f"{path} is damaged: expected sha256 {expected} of its table, found {found}")
    return files


def read_tensors(checkpoint: Checkpoint, name: str, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint."""
    return safetensors.torch.load_file(checkpoint.folder / f"{name}.safetensors", device=device)


def differences(there: Mapping[str, Tensor], here: Mapping[str, Tensor]) -> list[str]:
    """A line for each tensor that only one side has or that has another shape, but at most a few."""

    def shape(tensor: Tensor | None) -> str:
        return "nothing" if tensor is None else str(tuple(tensor.shape))

    both = [(name, shape(there.get(name)), shape(here.get(name))) for name in {**here, **there}]
    lines = [f"  {name}: {theirs} there, {ours} here" for name, theirs, ours in both if theirs != ours]
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"  and {len(lines) - SHOWN} more"]
