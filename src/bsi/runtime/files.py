"""Files that are whole or not there: written beside, synced, renamed.

A rename within a folder is atomic, and durable once the folder itself is synced; until then the old file, or none, is
what a crash leaves behind.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

__all__ = [
    "append_line",
    "canonical_json",
    "readable_as_folder",
    "sync_file",
    "sync_folder",
    "write_json",
    "write_text",
]


def sync_file(path: Path) -> None:
    """Wait until a file's bytes are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until a folder's entries are on the disk; some file systems sync no folders, and need not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def readable_as_folder(path: Path) -> None:
    """Let those read a file who may read its folder: safetensors writes for the owner alone (0.8)."""
    path.chmod(path.parent.stat().st_mode & 0o666)


def write_text(path: Path, text: str) -> None:
    """Replace a file by a whole one; where that fails, nothing is left beside it, and the error names the file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        error.filename = str(path)  # of a full disk, the system tells the number alone
        raise
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
    sync_folder(path.parent)


def canonical_json(value: Any) -> str:
    """JSON written in one way only, so that a text equals its content."""
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    write_text(path, canonical_json(value))


def append_line(path: Path, line: str) -> None:
    """One write of one line: readers see it whole."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
