"""Input files: folders, archives and NumPy arrays, validated before any of their content is used, and streamed.

Nothing is unpacked to disk, so nothing can be written outside. Archives with absolute names, `..`, links, devices,
encrypted members or sizes beyond a limit are rejected. A `.npy` file is a magic number, a header (dtype, order, shape)
and the raw elements; a `.npz` is a zip archive of such files. `ArrayFile` rejects arrays that would run code when
loaded (object arrays are pickles) and headers that disagree with the file's size, and yields rows in blocks: the memory
is that of one block, whatever the size of the array.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedIOBase, BufferedReader, BytesIO, RawIOBase
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, Any, cast

import numpy as np
from jaxtyping import Shaped

from bsi.errors import DataError
from bsi.io import open_untrusted
from bsi.progress import readable_bytes

BLOCK_BYTES = 8 << 20
HEADER_BYTES = 256
MAX_HEADER = 1 << 12
# Deflate reaches at most 1032 : 1. Real data of more than a few megabytes stays far below this ratio.
MAX_RATIO = 200
RATIO_FREE_BYTES = 64 << 20
MAX_MEMBERS = 100_000
MAX_READ = 16 << 20
# What the standard library raises for a damaged or unsupported archive.
UNREADABLE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError)


# ---- Folders ---------------------------------------------------------------------------------------------------------


def walk(root: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Relative paths of the files with one of the suffixes, folder by folder, sorted; without hidden ones."""
    if not os.path.isdir(root):
        raise DataError(f"{root} is not a folder. Give the folder with --from.")
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(root / folder) as entries:
                found = sorted((entry.name, entry.is_dir(), entry.is_symlink()) for entry in entries)
        except OSError as error:
            raise DataError(f"cannot read the folder {root / folder}: {error}") from error
        below = []
        for name, is_folder, is_link in found:
            inside = f"{folder}/{name}" if folder else name
            if name.startswith("."):
                continue
            if is_folder and is_link:
                raise DataError(
                    f"{root / inside} is a link to a folder, which could form a cycle. Replace it by the folder itself."
                )
            if is_folder:
                below.append(inside)
            elif name.lower().endswith(suffixes):
                yield inside
        folders.extend(reversed(below))


def for_testing(name: str, fraction: float) -> bool:
    """Whether the hash of a name, as a number in [0, 1), is below `fraction`: more files do not move the others."""
    sha = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(sha[:8], "big") < fraction * 2**64


# ---- Archives --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """A file inside a folder or an archive."""

    name: str
    size: int
    open: Callable[[], Any]


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
        except UNREADABLE as error:
            raise DataError(f"{path} is not a readable zip, tar or tar.gz archive: {error}.") from error


def _in_folder(folder: Path, wanted: Collection[str]) -> Iterator[Member]:
    for name in sorted(wanted):
        for path in sorted({*folder.glob(name), *folder.glob(f"*/{name}")}):
            if path.is_file():
                yield Member(str(path), path.stat().st_size, partial(open_untrusted, path))


def _in_zip(file: BufferedReader, path: Path, max_bytes: int) -> list[Member]:
    archive = zipfile.ZipFile(file)
    _check_zip(archive, str(path))
    found: list[Member] = []
    total = 0
    for info in archive.infolist():
        kind = stat.S_IFMT(info.external_attr >> 16)
        regular = info.is_dir() or kind in (0, stat.S_IFREG, stat.S_IFDIR)
        total += info.file_size
        _check(path, info.filename, regular, len(found), total, max_bytes)
        if not info.is_dir():
            found.append(Member(info.filename, info.file_size, partial(_unzipped, archive, info, str(path))))
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
            yield Member(info.name, info.size, partial(archive.extractfile, info))


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


def _check_zip(archive: zipfile.ZipFile, name: str) -> None:
    """Raise if a member is encrypted or claims to unpack to far more bytes than it occupies."""
    for info in archive.infolist():
        if info.flag_bits & 0x1:
            raise DataError(f"{name}: member {info.filename!r} is encrypted. Save it without a password.")
        if info.file_size > RATIO_FREE_BYTES and info.file_size > MAX_RATIO * max(1, info.compress_size):
            raise DataError(
                f"{name}: member {info.filename!r} claims to unpack from {info.compress_size} to {info.file_size} "
                f"bytes, more than {MAX_RATIO} times. It is a decompression bomb, or constant data."
            )


def _unzipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> BufferedIOBase:
    """A stream of one member's content."""
    try:
        return cast(BufferedIOBase, archive.open(info))
    except UNREADABLE as error:
        raise DataError(f"{name}: member {info.filename!r} cannot be read: {error}. Save it again.") from error


# ---- Arrays ----------------------------------------------------------------------------------------------------------


def header_bytes(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """A header of fixed length, so that the number of rows can be written after the rows."""
    text = f"{{'descr': {np.lib.format.dtype_to_descr(dtype)!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    length = HEADER_BYTES - 10
    if len(text) >= length:
        raise DataError(f"a shape of {len(shape)} axes does not fit into a header: {shape}. Use fewer axes.")
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.ljust(length - 1).encode("latin1") + b"\n"


class ArrayFile(AbstractContextManager["ArrayFile"]):
    """The rows of one array, streamed. Closing it closes the stream.

    Args:
        stream: `.npy` data of `size` bytes, at its start.
        name: The name of the array in error messages.
        seekable: Whether to skip rows by seeking. Members of archives are read from the start instead: seeking would
            skip the bytes that their checksum covers.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int

    def __init__(self, stream: BufferedIOBase, size: int, name: str, seekable: bool = True) -> None:
        self.stream, self.name, self.seekable = stream, name, seekable
        try:
            self._read_header()
            claimed = self.offset + math.prod(self.shape) * self.dtype.itemsize
            if claimed != size:
                raise DataError(
                    f"{name} claims {self.shape} elements of {self.dtype}, {claimed} bytes with its header, but holds "
                    f"{size} bytes. The file is damaged: save it again."
                )
        except BaseException:
            stream.close()
            raise

    @classmethod
    def at(cls, path: Path) -> ArrayFile:
        file = open_untrusted(path)
        return cls(file, os.fstat(file.fileno()).st_size, str(path))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stream.close()

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def _read_header(self) -> None:
        prefix = self._read(8)
        if len(prefix) < 8 or prefix[:6] != b"\x93NUMPY":
            raise DataError(
                f"{self.name} is not a .npy file (it begins with {prefix[:6]!r}). Use numpy.save or numpy.savez."
            )
        parsers = {1: (2, np.lib.format.read_array_header_1_0), 2: (4, np.lib.format.read_array_header_2_0)}
        if prefix[6] not in parsers:
            raise DataError(f"{self.name} has .npy format version {prefix[6]}, expected 1 or 2. Save a plain array.")
        width, parse = parsers[prefix[6]]
        length = self._read(width)
        size = int.from_bytes(length, "little")
        if size > MAX_HEADER:
            raise DataError(f"{self.name} claims a header of {size} bytes, expected about 100. The file is damaged.")
        try:
            shape, fortran, dtype = parse(BytesIO(length + self._read(size)), max_header_size=MAX_HEADER)
        except Exception as error:  # the parser evaluates a literal: damaged text may raise anything
            raise DataError(f"{self.name} has an invalid header: {error}. The file is damaged.") from error
        if dtype.hasobject:
            raise DataError(
                f"{self.name} holds Python objects. They are never loaded, since loading them could run code: save "
                f"numbers."
            )
        if dtype.names is not None or dtype.kind not in "buif":
            raise DataError(f"{self.name} has dtype {dtype}, expected integers or real floats. Convert with .astype.")
        if not shape:
            raise DataError(f"{self.name} is a single number, expected an array whose first axis counts the samples.")
        if min(shape) < 0:
            raise DataError(f"{self.name} has a negative shape {shape}. The file is damaged: save it again.")
        if fortran and len(shape) > 1:
            raise DataError(f"{self.name} is stored column by column. Save numpy.ascontiguousarray(array) instead.")
        self.shape, self.dtype, self.offset = tuple(int(d) for d in shape), dtype, 8 + width + size

    def blocks(self, start: int = 0, block_bytes: int = BLOCK_BYTES) -> Iterator[Shaped[np.ndarray, "rows *shape"]]:
        """The rows from `start` on, in order, in blocks of about `block_bytes`. Call it once for a member."""
        if self.seekable:
            self.stream.seek(self.offset + start * self.row_bytes)
        else:
            skip = start * self.row_bytes
            while skip > 0 and (data := self._read(min(skip, BLOCK_BYTES))):
                skip -= len(data)
        each = max(1, block_bytes // max(1, self.row_bytes))
        for first in range(start, len(self), each):
            rows = min(each, len(self) - first)
            raw = self._read(rows * self.row_bytes)
            if len(raw) != rows * self.row_bytes:
                row = first + len(raw) // max(1, self.row_bytes)
                raise DataError(f"{self.name} is truncated: it ends at row {row} of {len(self)}. Save it again.")
            yield np.frombuffer(raw, self.dtype).reshape(rows, *self.shape[1:])

    def _read(self, size: int) -> bytes:
        try:
            return self.stream.read(size)
        except UNREADABLE as error:
            raise DataError(f"{self.name} is damaged: {error}. Save or download it again.") from error


class NpzFile(AbstractContextManager["NpzFile"]):
    """The arrays of a `.npz` file, opened one at a time. Rejects encrypted members and decompression bombs."""

    def __init__(self, stream: BufferedIOBase, name: str) -> None:
        self.stream, self.name = stream, name
        try:
            self.archive = zipfile.ZipFile(cast(IO[bytes], stream))
            _check_zip(self.archive, name)
        except BaseException as error:
            stream.close()
            if isinstance(error, UNREADABLE):
                raise DataError(f"{name} is not a .npz archive: {error}. Save it with numpy.savez.") from error
            raise
        members = (info.filename for info in self.archive.infolist() if info.filename.endswith(".npy"))
        self.names = sorted(member.removesuffix(".npy") for member in members)

    @classmethod
    def at(cls, path: Path) -> NpzFile:
        return cls(open_untrusted(path), str(path))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.archive.close()
        self.stream.close()

    def array(self, name: str) -> ArrayFile:
        if name not in self.names:
            raise DataError(f"{self.name} holds no array {name!r}; it holds {', '.join(self.names) or 'none'}.")
        info = self.archive.getinfo(f"{name}.npy")
        stream = _unzipped(self.archive, info, self.name)
        return ArrayFile(stream, info.file_size, f"{self.name}[{name!r}]", seekable=False)
