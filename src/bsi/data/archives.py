"""Files out of a folder or an archive, read in place. Nothing is ever unpacked to disk, so nothing can land outside.

An archive is checked whole before a byte of it is used: absolute names, `..`, links, devices and sizes beyond
`max_bytes` are refused, since an archive that contains them is not the one it is said to be.
"""

from __future__ import annotations

import gzip
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedIOBase, BufferedReader, RawIOBase
from pathlib import Path, PurePosixPath
from typing import IO, cast

from bsi.data.npy import check_zip
from bsi.errors import DataError
from bsi.progress import readable_bytes

__all__ = ["Member", "members"]

MAX_MEMBERS = 100_000
MAX_READ = 16 << 20


@dataclass(frozen=True)
class Member:
    """A file inside a folder or an archive."""

    name: str
    size: int
    open: Callable[[], BufferedIOBase]


@contextmanager
def members(path: Path, wanted: Collection[str], max_bytes: int) -> Iterator[dict[str, Member]]:
    """Those of the files named `wanted` that a folder (or a folder in it), a tar or a zip holds, by base name."""
    with ExitStack() as stack:
        found: Iterable[Member]
        if path.is_dir():
            found = _in_folder(path, wanted)
        elif not path.is_file():
            raise DataError(f"{path} does not exist.")
        elif zipfile.is_zipfile(path):
            archive = stack.enter_context(zipfile.ZipFile(path))
            found = _in_zip(archive, path, max_bytes)
        else:
            found = _in_tar(stack.enter_context(_opened_tar(path)), path, max_bytes)
        by_name: dict[str, Member] = {}
        for member in found:
            base = PurePosixPath(member.name).name
            if base not in wanted:
                continue
            if base in by_name:
                raise DataError(
                    f"{path} holds {base!r} twice: {by_name[base].name} and {member.name}. Keep one of them."
                )
            by_name[base] = member
        yield by_name


def _in_folder(folder: Path, wanted: Collection[str]) -> Iterator[Member]:
    for name in sorted(wanted):
        for path in sorted({*folder.glob(name), *folder.glob(f"*/{name}")}):
            if path.is_file():
                yield Member(str(path), path.stat().st_size, partial(_opened_file, path))


def _opened_file(path: Path) -> BufferedIOBase:
    return path.open("rb")


def _in_zip(archive: zipfile.ZipFile, path: Path, max_bytes: int) -> list[Member]:
    check_zip(archive, str(path))
    found: list[Member] = []
    total = 0
    for info in archive.infolist():
        mode = info.external_attr >> 16
        kind = stat.S_IFMT(mode)
        regular = info.is_dir() or kind in (0, stat.S_IFREG, stat.S_IFDIR)
        total += info.file_size
        _check(path, info.filename, regular, len(found), total, max_bytes)
        if not info.is_dir():
            found.append(Member(info.filename, info.file_size, partial(_unzipped, archive, info)))
    return found


@contextmanager
def _opened_tar(path: Path) -> Iterator[tarfile.TarFile]:
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        stream = _ShortReads(gzip.GzipFile(fileobj=raw) if packed else raw, path)
        try:
            with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r:") as archive:
                yield archive
        except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
            raise DataError(f"{path} is not a readable zip, tar or tar.gz archive: {error}") from error


class _ShortReads(RawIOBase):
    """A stream that refuses to be read in huge pieces, as a tar with a forged extended header asks for."""

    def __init__(self, stream: gzip.GzipFile | BufferedReader, path: Path) -> None:
        self.stream, self.path = stream, path

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_READ:
            raise DataError(
                f"{self.path} has an extended header of {size} bytes; a few hundred are usual. It is refused."
            )
        return self.stream.read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self.stream.seek(offset, whence)

    def tell(self) -> int:
        return self.stream.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _in_tar(archive: tarfile.TarFile, path: Path, max_bytes: int) -> list[Member]:
    found: list[Member] = []
    total = 0
    for info in archive:  # one header at a time: a bomb is refused before its data is decompressed
        total += info.size
        _check(path, info.name, info.isreg() or info.isdir(), len(found), total, max_bytes)
        if info.isreg():
            found.append(Member(info.name, info.size, partial(_extracted, archive, info)))
    return found


def _unzipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> BufferedIOBase:
    return cast(BufferedIOBase, archive.open(info))


def _extracted(archive: tarfile.TarFile, info: tarfile.TarInfo) -> BufferedIOBase:
    stream = archive.extractfile(info)
    assert stream is not None, "a regular file has content"
    return cast(BufferedIOBase, stream)


def _check(archive: Path, name: str, regular: bool, count: int, total: int, max_bytes: int) -> None:
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or (parts.parts and parts.parts[0].endswith(":")) or "\0" in name:
        raise DataError(f"{archive} holds {name!r}, a name that leads outside. The archive is refused.")
    if not regular:
        raise DataError(f"{archive} holds {name!r}, a link or a device. The archive is refused.")
    if total > max_bytes or count >= MAX_MEMBERS:
        raise DataError(
            f"{archive} unpacks to more than {readable_bytes(max_bytes)} or {MAX_MEMBERS} files (at {name!r}), more "
            f"than this dataset can have. The archive is refused."
        )
