"""Where weights and references are kept, and how a file gets there: whole, or not at all."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def data_folder() -> Path:
    """The data cache: $BSI_DATA, by default ~/.cache/bsi-data."""
    return Path(os.environ.get("BSI_DATA") or "~/.cache/bsi-data").expanduser()


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, sync it and rename it: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Until no other process is making `path`: ranks that all need a file wait for the one that fetches it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing lets go
        yield
