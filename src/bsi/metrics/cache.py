"""Where weights and references are kept, and how a file gets there: whole, or not at all."""

import os
import tempfile
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
