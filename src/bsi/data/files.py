"""Input files: folders, archives and NumPy arrays, validated before any of their content is used, and streamed.

Nothing is unpacked to disk, so nothing can be written outside. Archives with absolute names, `..`, links, devices or
sizes beyond a limit are rejected. A `.npy` file is a magic number, a header (dtype, order, shape) and the raw elements;
a `.npz` is a zip archive of such files. Arrays of objects, which are pickles, and headers that disagree with the file's
size are rejected. The memory is that of one block, whatever the size of the array.
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
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedIOBase, BufferedReader
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any, cast

import numpy as np
from jaxtyping import Integer, Shaped

from bsi.errors import DataError
from bsi.io import open_untrusted
from bsi.progress import readable_bytes

BLOCK_BYTES = 8 << 20
HEADER_BYTES = 256
MAX_RATIO = 200  # deflate reaches 1032 : 1; real data of more than a few megabytes stays far below this ratio
RATIO_FREE_BYTES = 64 << 20
MAX_MEMBERS = 100_000
MAX_READ = 16 << 20
# What the standard library raises for a damaged or unsupported archive.
UNREADABLE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError)


def walk(root: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Relative paths of the files with one of the suffixes, folder by folder, sorted; without hidden ones."""
    if not os.path.isdir(root):
        raise DataError(f"{root} is not a folder. Give the folder with --from.")

    def fail(error: OSError) -> None:
        raise DataError(f"cannot read the folder {error.filename}: {error}") from error

    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (os.path.join(folder, name) for name in folders):
            if os.path.islink(path):
                raise DataError(f"{path} is a link to a folder, which could form a cycle. Replace it by the folder.")
        for name in sorted(files):
            if name.lower().endswith(suffixes) and not name.startswith("."):
                yield os.path.relpath(os.path.join(folder, name), root)


def for_testing(name: str, fraction: float) -> bool:
    """Whether the hash of a name, as a number in [0, 1), is below `fraction`: more files do not move the others."""
    sha = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(sha[:8], "big") < fraction * 2**64


@dataclass(frozen=True)
class Member:
    """A file inside a folder or an archive."""

    name: str
    size: int
    open: Callable[[], Any]
    kind: int = stat.S_IFREG


@contextmanager
def members(path: Path, wanted: Collection[str], max_bytes: int) -> Iterator[dict[str, Member]]:
    """The files named `wanted` in a folder (or a folder directly in it), a tar or a zip archive, by base name."""
    by_name: dict[str, Member] = {}
    with ExitStack() as stack:
        try:
            if os.path.isdir(path):
                names = (where + name for name in sorted(wanted) for where in ("", "*/"))
                files = (file for name in names for file in sorted(path.glob(name)) if file.is_file())
                found = iter([Member(str(file), file.stat().st_size, partial(open_untrusted, file)) for file in files])
            else:
                file = stack.enter_context(open_untrusted(path))
                entries = zip_members(file, str(path)) if zipfile.is_zipfile(file) else _tar_members(file)
                found = _checked(entries, path, max_bytes)
            for member in found:
                base = PurePosixPath(member.name).name
                if base in by_name:
                    first = by_name[base].name
                    raise DataError(f"{path} holds {base!r} twice: {first} and {member.name}. Keep one of them.")
                if base in wanted:
                    by_name[base] = member
            yield by_name
        except UNREADABLE as error:
            raise DataError(f"{path} is not a readable zip, tar or tar.gz archive: {error}.") from error


def _checked(entries: Iterator[Member], path: Path, max_bytes: int) -> Iterator[Member]:
    """The regular files of an archive. One header is read at a time: a bomb is rejected before it is decompressed."""
    total, most = 0, f"{readable_bytes(max_bytes)} or {MAX_MEMBERS} files"
    for count, member in enumerate(entries):
        total += member.size
        name, where = member.name, PureWindowsPath(member.name)  # knows both slashes, and drives
        if where.anchor or ".." in where.parts:
            raise DataError(f"{path} holds {name!r}, a name that leads outside. The archive is not used.")
        if member.kind not in (stat.S_IFREG, stat.S_IFDIR):
            raise DataError(f"{path} holds {name!r}, a link or a device. The archive is not used.")
        if total > max_bytes or count >= MAX_MEMBERS:
            raise DataError(f"{path} unpacks to more than {most} (at {name!r}). The archive is not used.")
        if member.kind == stat.S_IFREG:
            yield member


def _tar_members(file: BufferedReader) -> Iterator[Member]:
    file.seek(0)
    packed = file.peek(2).startswith(b"\x1f\x8b")
    stream = _ShortReads(gzip.GzipFile(fileobj=file) if packed else cast(Any, file))
    archive = tarfile.open(fileobj=stream, mode="r:")  # noqa: SIM115  the members are read later
    for info in archive:
        kind = stat.S_IFREG if info.isreg() else stat.S_IFDIR if info.isdir() else stat.S_IFLNK
        yield Member(info.name, info.size, partial(archive.extractfile, info), kind)


class _ShortReads(BufferedReader):
    """A stream that rejects very long reads, which a tar archive with a forged extended header would cause."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= MAX_READ:
            raise EOFError(f"it has an extended header of {size} bytes, expected a few hundred")
        return super().read(size)


def zip_members(stream: BufferedIOBase, name: str) -> Iterator[Member]:
    """All members of a zip archive. Rejects claims to unpack to far more bytes than a member occupies."""

    def opened(info: zipfile.ZipInfo) -> Any:
        try:
            return archive.open(info)
        except UNREADABLE as error:
            raise DataError(f"{name}: member {info.filename!r} cannot be read: {error}. Save it again.") from error

    archive = zipfile.ZipFile(cast(IO[bytes], stream))
    for info in archive.infolist():
        if info.file_size > RATIO_FREE_BYTES and info.file_size > MAX_RATIO * max(1, info.compress_size):
            claim = f"claims to unpack from {info.compress_size} to {info.file_size} bytes"
            raise DataError(f"{name}: member {info.filename!r} {claim}: a decompression bomb, or constant data.")
        kind = stat.S_IFDIR if info.is_dir() else stat.S_IFMT(info.external_attr >> 16) or stat.S_IFREG
        yield Member(info.filename, info.file_size, partial(opened, info), kind)


def header_bytes(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """A header of fixed length, so that the number of rows can be written after the rows."""
    text = f"{{'descr': {np.lib.format.dtype_to_descr(dtype)!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    length = HEADER_BYTES - 10
    if len(text) >= length:
        raise DataError(f"a shape of {len(shape)} axes does not fit into a header: {shape}. Use fewer axes.")
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.ljust(length - 1).encode("latin1") + b"\n"


class ArrayFile(AbstractContextManager["ArrayFile"]):
    """The rows of one array, streamed from `.npy` data of `size` bytes. Closing it closes the stream."""

    def __init__(self, stream: BufferedIOBase, size: int, name: str) -> None:
        self.stream, self.name = stream, name
        try:
            self.shape, self.dtype = self._read_header()
            self.offset, self.row_bytes = stream.tell(), math.prod(self.shape[1:]) * self.dtype.itemsize
            claimed = self.offset + len(self) * self.row_bytes
            if claimed != size:
                claim = f"claims {self.shape} elements of {self.dtype}, {claimed} bytes with its header"
                raise DataError(f"{name} {claim}, but holds {size} bytes. The file is damaged: save it again.")
        except BaseException:
            stream.close()
            raise

    @classmethod
    def at(cls, path: Path) -> ArrayFile:
        file = open_untrusted(path)
        return cls(file, os.fstat(file.fileno()).st_size, str(path))

    def __exit__(self, *error: object) -> None:
        self.stream.close()

    def __len__(self) -> int:
        return self.shape[0]

    def _read_header(self) -> tuple[tuple[int, ...], np.dtype]:
        try:
            if (version := np.lib.format.read_magic(self.stream)) != (1, 0):  # others: very long headers
                raise ValueError(f"its format version is {version}, expected (1, 0)")
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(self.stream)
        except Exception as error:  # the parser evaluates a literal: damaged text may raise anything
            raise DataError(f"{self.name} is not a valid .npy file: {error}. Use numpy.save.") from error
        if dtype.hasobject:
            raise DataError(f"{self.name} holds Python objects, whose loading could run code. Save numbers.")
        if dtype.names is not None or dtype.kind not in "buif" or not shape or min(shape) < 0:
            wanted = "integers or real floats whose first axis counts the samples"
            raise DataError(f"{self.name} holds {shape} of {dtype}, expected an array of {wanted}.")
        if fortran and len(shape) > 1:
            raise DataError(f"{self.name} is stored column by column. Save numpy.ascontiguousarray(array) instead.")
        return tuple(int(d) for d in shape), dtype

    def blocks(self, start: int = 0, block_bytes: int = BLOCK_BYTES) -> Iterator[Shaped[np.ndarray, "rows *shape"]]:
        """The rows from `start` on, in order, in blocks of about `block_bytes`. To be called once.

        The rows before are read, too: seeking would skip bytes that the checksum of an archive covers.
        """
        each, skip = max(1, block_bytes // max(1, self.row_bytes)), start * self.row_bytes
        while skip > 0 and (data := self._read(min(skip, BLOCK_BYTES))):
            skip -= len(data)
        for first in range(start, len(self), each):
            rows = min(each, len(self) - first)
            raw = self._read(rows * self.row_bytes)
            if len(raw) != rows * self.row_bytes:
                row = first + len(raw) // max(1, self.row_bytes)
                raise DataError(f"{self.name} is truncated: it ends at row {row} of {len(self)}. Save it again.")
            yield np.frombuffer(raw, self.dtype).reshape(rows, *self.shape[1:])

    def labels(self, count: int, low: int, high: int) -> Integer[np.ndarray, " count"]:
        """All rows, if they are `count` integers from `low` to `high`. They fit into memory: one number per sample."""
        if self.shape != (count,) or self.dtype.kind not in "iu":
            raise DataError(f"{self.name} holds {self.shape} of {self.dtype}, expected one integer per sample, {count}")
        labels = np.concatenate([np.empty(0, self.dtype), *self.blocks()])
        bad = np.flatnonzero((labels < low) | (labels > high))
        if len(bad):
            raise DataError(f"{self.name}: row {bad[0]} is {labels[bad[0]]}, expected labels from {low} to {high}.")
        return labels

    def _read(self, size: int) -> bytes:
        try:
            return self.stream.read(size)
        except UNREADABLE as error:
            raise DataError(f"{self.name} is damaged: {error}. Save or download it again.") from error


@contextmanager
def open_arrays(path: Path, stream: BufferedIOBase | None = None) -> Iterator[dict[str, Callable[[], ArrayFile]]]:
    """The arrays of a `.npz` file by name, to be opened one at a time, or the one of a `.npy` file, named "".

    `stream` is the content of a `.npz` file that is itself a member of an archive.
    """
    if path.suffix == ".npy":
        yield {"": partial(ArrayFile.at, path)}
        return
    if path.suffix != ".npz":
        raise DataError(f"{path} is not a .npy or .npz file. Save arrays with numpy.save or numpy.savez.")

    def opened(name: str, member: Member) -> ArrayFile:
        return ArrayFile(member.open(), member.size, f"{path}[{name!r}]")

    with stream or open_untrusted(path) as file:
        try:
            found = {member.name.removesuffix(".npy"): member for member in zip_members(file, str(path))}
        except UNREADABLE as error:
            raise DataError(f"{path} is not a .npz archive: {error}. Save it with numpy.savez.") from error
        yield {name: partial(opened, name, m) for name, m in sorted(found.items()) if m.name.endswith(".npy")}
