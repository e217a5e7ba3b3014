"""Files that were asked for: whole or not there, and one message where the system does not let them be written.

check_writable(path, "--out")            # before the work
with whole(path, "--out") as beside:     # after it: written beside, synced, renamed; nothing is left if that fails
    picture.save(beside)

A full disk is exit code 1, and the same command again does it; any other place that cannot be written is a mistake in
the command, exit code 2. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bsi.errors import BsiError, UsageError

__all__ = ["cannot_write", "check_writable", "is_full", "make_folder", "system_error", "whole"]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cannot_write(path: Path | str, error: OSError, option: str | None = None) -> BsiError:
    """What to tell of a file that the system refused to write; `option` is the one that names another place."""
    told = f"cannot write {path}: {error.strerror or error}."
    if error.errno in FULL:
        again = f" Make room and run the same command again, or give another {option}." if option else ""
        return BsiError(told + again)
    return UsageError(told + (f" Give another {option}." if option else ""))


def system_error(error: Exception) -> OSError | None:
    """What the system said, if it was the system: safetensors tells its number in words alone, `(os error 28)`, and
    NumPy tells of a disk that took less than it was given without one.
    """
    if isinstance(error, OSError):
        short = error.errno is None and re.search(r"\d+ requested and \d+ written", str(error))
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if short else error
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


def is_full(error: Exception) -> bool:
    """Whether there was no room left, on the disk or in what we may use of it."""
    refused = system_error(error)
    return refused is not None and refused.errno in FULL


def check_writable(path: Path, option: str) -> None:
    """Refuse a file that could not be written, before the work that would be lost."""
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}. Make it, or give another {option}.")
    if path.is_dir():
        raise cannot_write(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)), option)
    _try(path.parent, path, option)


def make_folder(folder: Path, option: str | None = None) -> None:
    """A folder that can be written into, made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # a file
        raise cannot_write(folder, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)), option) from error
    except OSError as error:
        raise cannot_write(folder, error, option) from error
    _try(folder, folder, option)


def _try(folder: Path, path: Path, option: str | None) -> None:
    """Permissions do not tell (root, network disks, read-only mounts): a file that is gone at once does."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise cannot_write(path, error, option) from error


@contextlib.contextmanager
def whole(path: Path, option: str | None = None) -> Iterator[Path]:
    """A name beside `path` to write to. At the end it takes the path's place; after any failure it is gone."""
    beside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    except Exception as error:
        refused = system_error(error)
        if refused is None:
            raise
        raise cannot_write(path, refused, option) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
