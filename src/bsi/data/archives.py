"""Files in a folder or an archive, read in place. Nothing is unpacked to disk, so nothing can be written outside.

An archive is validated before any of its content is used: absolute names, `..`, links, devices and sizes beyond
`max_bytes` are rejected.
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

from bsi.data.npy import check_zip, unzipped
from bsi.errors import DataError
from bsi.io import open_untrusted
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
    """The files named `wanted` in a folder (or a folder directly in it), a tar or a zip archive, by base name."""
    with ExitStack() as stack:
        by_name: dict[str, Member] = {}
        try:
            found: Iterable[Member]
            if os.path.isdir(path):
                found = _in_folder(path, wanted)
            else:
                file = stack.enter_context(open_untrusted(path))
                found = _in_zip(file, path, max_bytes) if zipfile.is_zipfile(file) else _in_tar(file, path, max_bytes)
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
        except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as error:
            raise DataError(f"{path} is not a readable zip, tar or tar.gz archive: {error}.") from error


def _in_folder(folder: Path, wanted: Collection[str]) -> Iterator[Member]:
    for name in sorted(wanted):
        for path in sorted({*folder.glob(name), *folder.glob(f"*/{name}")}):
            if path.is_file():
                yield Member(str(path), path.stat().st_size, partial(open_untrusted, path))


def _in_zip(file: BufferedReader, path: Path, max_bytes: int) -> list[Member]:
    archive = zipfile.ZipFile(file)
    check_zip(archive, str(path))
    found: list[Member] = []
    total = 0
    for info in archive.infolist():
        kind = stat.S_IFMT(info.external_attr >> 16)
        regular = info.is_dir() or kind in (0, stat.S_IFREG, stat.S_IFDIR)
        total += info.file_size
        _check(path, info.filename, regular, len(found), total, max_bytes)
        if not info.is_dir():
            found.append(Member(info.filename, info.file_size, partial(unzipped, archive, info, str(path))))
    return found


def _in_tar(file: BufferedReader, path: Path, max_bytes: int) -> Iterator[Member]:
    file.seek(0)
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    stream = _ShortReads(gzip.GzipFile(fileobj=file) if packed else file, path)
    archive = tarfile.open(fileobj=cast(IO[bytes], stream), mode="r:")  # noqa: SIM115  the members are read later
    total = 0
    for count, info in enumerate(archive):  # one header at a time: a bomb is rejected before it is decompressed
        total += info.size
        _check(path, info.name, info.isreg() or info.isdir(), count, total, max_bytes)
        if info.isreg():
            yield Member(info.name, info.size, partial(_extracted, archive, info))


def _extracted(archive: tarfile.TarFile, info: tarfile.TarInfo) -> BufferedIOBase:
    return cast(BufferedIOBase, archive.extractfile(info))


class _ShortReads(RawIOBase):
    """A stream that rejects very long reads, which a tar archive with a forged extended header would ask for."""

    def __init__(self, stream: gzip.GzipFile | BufferedReader, path: Path) -> None:
        self.stream, self.path = stream, path
        self.seek, self.tell = stream.seek, stream.tell  # type: ignore[method-assign]

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_READ:
            raise DataError(f"{self.path} has an extended header of {size} bytes, expected a few hundred.")
        return self.stream.read(size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _check(archive: Path, name: str, regular: bool, count: int, total: int, max_bytes: int) -> None:
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or (parts.parts and parts.parts[0].endswith(":")) or "\0" in name:
        raise DataError(f"{archive} holds {name!r}, a name that leads outside. The archive is not used.")
    if not regular:
        raise DataError(f"{archive} holds {name!r}, a link or a device. The archive is not used.")
    if total > max_bytes or count >= MAX_MEMBERS:
        raise DataError(
            f"{archive} unpacks to more than {readable_bytes(max_bytes)} or {MAX_MEMBERS} files (at {name!r}), more "
            f"than this dataset can have. The archive is not used."
        )
