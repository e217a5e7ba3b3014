"""Files: atomic writing, untrusted reading, hashes, downloads and the data folder. Imports no torch.

    check_writable(path, "--out")                 # before the work
    with atomic(path, "--out") as temporary:      # after it
        picture.save(temporary)
    write_json(path, record)

An atomic write goes to a temporary file in the same folder, which is synced and renamed: readers see either the old
file or the new one, also after a crash. Symbolic links are followed. Devices and pipes are written to, not replaced. A
full disk is exit code 1, and the same command works once there is space; any other failure is exit code 2.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bsi.errors import BsiError, CorruptCheckpoint, DataError, UsageError
from bsi.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MAX_JSON_BYTES = 64 << 20
MAX_JSON_DEPTH = 64
STEM = 40  # characters of a file's name in the name of its temporary file: names are limited to 255 bytes
CHUNK = 1 << 18  # bytes of a download


def data_folder() -> Path:
    """The folder of datasets, reference statistics and downloads: $BSI_DATA, by default ~/.cache/bsi-data."""
    return Path(os.environ.get("BSI_DATA") or "~/.cache/bsi-data").expanduser()


# ---- Atomic writing --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic(path: Path, option: str | None = None) -> Iterator[Path]:
    """Yield a temporary path to write to, which replaces `path` at the end and is removed after any failure.

    `option` is the command-line option that sets the path, for the BsiError that a failed write raises.
    """
    try:
        with _replacing(path) as temporary:
            yield temporary
    except Exception as error:
        failure = system_error(error)
        if failure is None:
            raise
        raise cannot_write(path, failure, option) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically. An OSError names the file."""
    try:
        with _replacing(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        error.filename = str(path)  # the system reports no file name if the disk is full
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write JSON in its canonical form atomically."""
    write_text(path, canonical_json(value))


def canonical_json(value: Any) -> str:
    """JSON in a canonical form: equal content gives equal text."""
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"


def append_line(path: Path, line: str) -> None:
    """Append a line in one write, so that readers never see a part of it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    if not _is_regular(path):
        with tempfile.TemporaryDirectory() as folder:
            temporary = Path(folder) / path.name
            yield temporary
            # Without O_NONBLOCK, a pipe would block until it has a reader.
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.set_blocking(descriptor, True)
            with temporary.open("rb") as source, os.fdopen(descriptor, "wb", buffering=0) as sink:
                shutil.copyfileobj(source, sink)
        return
    target = path.resolve()
    temporary = target.with_name(f".{target.stem[:STEM]}.{os.getpid()}{target.suffix[:STEM]}")
    try:
        temporary.unlink(missing_ok=True)  # a link of this name would be written through
        yield temporary
        sync_file(temporary)
        temporary.replace(target)
        sync_folder(target.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _is_regular(path: Path) -> bool:
    """Whether a path is a regular file, through symbolic links, or names a file that does not exist yet."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return True
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return stat.S_ISREG(mode)


def sync_file(path: Path) -> None:
    """Wait until a file's bytes are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until a folder's entries are on the disk, where the file system can sync folders."""
    with contextlib.suppress(OSError):
        sync_file(path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, readable for everyone who can read its folder: safetensors (0.8) makes it private."""
    from safetensors.torch import save_file

    save_file(dict(tensors), path, metadata)
    path.chmod(path.parent.stat().st_mode & 0o666)


# ---- Failed writes ---------------------------------------------------------------------------------------------------


def cannot_write(path: Path | str, error: OSError, option: str | None = None) -> BsiError:
    """The error to raise for a file that cannot be written; `option` is the command-line option that sets its path."""
    what = f"cannot write {path}: {error.strerror or error}."
    if error.errno in FULL:
        again = f" Make room and run the same command again, or give another {option}." if option else ""
        return BsiError(what + again)
    return UsageError(what + (f" Give another {option}." if option else ""))


def system_error(error: Exception) -> OSError | None:
    """The OSError behind an error, if there is one.

    safetensors gives the error number only as text, `(os error 28)`. NumPy reports a short write to a full disk without
    a number.
    """
    if isinstance(error, OSError):
        short = error.errno is None and re.search(r"\d+ requested and \d+ written", str(error))
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if short else error
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


def is_full(error: Exception) -> bool:
    """Whether an error means a full disk, an exceeded quota or the limit on the size of a file."""
    failure = system_error(error)
    return failure is not None and failure.errno in FULL


def check_writable(path: Path, option: str) -> None:
    """Raise if a file cannot be written. Called before a long computation whose result goes to the file."""
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}. Make it, or give another {option}.")
    try:
        if _is_regular(path):
            _try(path.resolve().parent)
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise cannot_write(path, error, option) from error


def make_folder(folder: Path, option: str | None = None) -> None:
    """Make a folder if it does not exist, and raise if it cannot be written to."""
    try:
        with contextlib.suppress(FileExistsError):  # a file: the next line raises NotADirectoryError
            folder.mkdir(parents=True, exist_ok=True)
        _try(folder)
    except OSError as error:
        raise cannot_write(folder, error, option) from error


def _try(folder: Path) -> None:
    """Write a temporary file, since permissions alone are not conclusive (root, network disks, read-only mounts)."""
    with tempfile.TemporaryFile(dir=folder):
        pass


# ---- Untrusted files -------------------------------------------------------------------------------------------------


def open_untrusted(path: Path | str, limit: int | None = None) -> BufferedReader:
    """Open a regular file of at most `limit` bytes; anything else is a DataError: a pipe or device could block."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            # Without O_NONBLOCK, a pipe that has replaced the file since would block until it has a writer.
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
            found = os.fstat(file.fileno())
            mode = found.st_mode
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist. Check the path.") from error
    except ValueError as error:  # a null byte in the path
        raise DataError(f"{str(path)!r} is not a path: {error}.") from error
    except OSError as error:
        raise DataError(f"cannot read {path!s:.200}: {error.strerror or error}.") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise DataError(f"{path} is {kind}, expected a regular file.")
    if limit is not None and found.st_size > limit:
        file.close()
        raise DataError(f"{path} has {found.st_size} bytes, expected at most {limit}. The file is not read.")
    return file


def parse_json(data: bytes, name: Path | str) -> Any:
    """Parse untrusted JSON text of at most 64 levels. The message of a DataError starts with `name`."""
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise DataError(f"{name} is not valid: its JSON is nested too deeply.") from error
    except ValueError as error:  # also bytes that are not UTF-8, and integers of too many digits
        raise DataError(f"{name} is not valid JSON: {error}.") from error
    level, depth = [value], 0
    while level := [v for x in level if isinstance(x, dict | list) for v in (x.values() if isinstance(x, dict) else x)]:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise DataError(f"{name} is not valid: its JSON is nested deeper than {MAX_JSON_DEPTH} levels.")
    return value


def read_json(path: Path | str, limit: int = MAX_JSON_BYTES) -> Any:
    """Read an untrusted JSON file: `open_untrusted`, then `parse_json`."""
    with open_untrusted(path, limit) as file:
        return parse_json(file.read(limit + 1), path)


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of an untrusted safetensors file."""
    import safetensors

    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise CorruptCheckpoint(
            f"{path} is damaged or not a safetensors file ({error}). Copy it again, or write it again by `bsi export`. "
            f"Pickles (.pt, .pth, .ckpt) can run code: never loaded."
        ) from error


# ---- Hashes: SHA-256 in hexadecimal digits ---------------------------------------------------------------------------


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    with open_untrusted(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(content: Any) -> str:
    """The digest of JSON-serializable content."""
    return digest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


# ---- Downloads -------------------------------------------------------------------------------------------------------


def download(url: str, to: Path, sha256: str, instead: str, timeout_s: float = 30.0) -> Path:
    """Download a file once; it must have the pinned SHA-256. `instead` is what to do with a file from elsewhere.

    The file appears only when it is complete. An interrupted download is stored next to it and resumes.
    """
    import urllib.request
    from http.client import HTTPException

    if to.is_file():
        found = digest_file(to)
        if found != sha256:
            raise DataError(f"{to} is not the file of {url}: expected sha256 {sha256}, found {found}. Delete it.")
        return to
    part = to.with_name(to.name + ".part")
    have = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            have = have if response.status == 206 else 0  # a server that ignores the range sends everything
            total = have + int(response.headers.get("Content-Length") or 0)
            with (
                part.open("r+b" if have else "wb") as file,
                Progress(f"download {to.name}", total, "B", done=have) as progress,
            ):
                file.seek(have)
                while chunk := response.read(CHUNK):
                    file.write(chunk)
                    progress.advance(len(chunk))
        if part.stat().st_size < total:
            raise DataError(f"the download of {url} ended early. Run the same command again to resume.")
    except (OSError, HTTPException) as error:
        if getattr(error, "code", None) != 416:  # 416: everything was received; the hash decides
            fix = f"Fetch it by other means and {instead}, or run the same command again."
            raise DataError(f"cannot download {url}: {error}. {fix}") from error
    found = digest_file(part)
    if found != sha256:
        part.unlink()
        raise DataError(f"{url} is not the expected file: expected sha256 {sha256}, found {found}. It was deleted.")
    sync_file(part)
    part.replace(to)
    return to
