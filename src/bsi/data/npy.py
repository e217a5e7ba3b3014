"""NumPy's file format, read from the header first: what an array claims is checked before any memory is taken.

A `.npy` file is a magic number, a header (dtype, order, shape) and the raw elements; a `.npz` is a zip archive of such
files. `ArrayFile` reads the header alone, refuses what would run code (object arrays are pickles) or lies about its
size, and then streams rows: memory is that of one block, whatever the array's size.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BufferedIOBase, BytesIO
from pathlib import Path
from types import TracebackType
from typing import IO, cast

import numpy as np
from jaxtyping import Shaped

from bsi.errors import DataError

__all__ = ["HEADER_BYTES", "ArrayFile", "Header", "NpzFile", "header_bytes", "read_header"]

HEADER_BYTES = 256
MAX_HEADER = 1 << 12
# Deflate cannot do better than 1032 : 1. Real data above a few megabytes stays far below this.
MAX_RATIO = 200
RATIO_FREE_BYTES = 64 << 20


@dataclass(frozen=True)
class Header:
    """What a `.npy` file claims to hold; the elements begin at `offset`."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool
    offset: int

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def data_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def header_bytes(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """A header of fixed length, so that the number of rows can be written after the rows."""
    text = f"{{'descr': {np.lib.format.dtype_to_descr(dtype)!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    room = HEADER_BYTES - 10
    if len(text) >= room:
        raise DataError(
            f"a shape of {len(shape)} axes is too long to be stored: {shape}. Reshape the data to fewer axes."
        )
    return b"\x93NUMPY\x01\x00" + room.to_bytes(2, "little") + text.ljust(room - 1).encode("latin1") + b"\n"


def read_header(stream: BufferedIOBase, name: str) -> Header:
    """The header of the `.npy` data in `stream`; refuses object arrays, named fields and headers that do not parse."""
    prefix = stream.read(8)
    if len(prefix) < 8 or prefix[:6] != b"\x93NUMPY":
        raise DataError(
            f"{name} is not a .npy file (it begins with {prefix[:6]!r}). Save arrays with numpy.save or numpy.savez."
        )
    width, parse = {
        1: (2, np.lib.format.read_array_header_1_0),
        2: (4, np.lib.format.read_array_header_2_0),
    }.get(prefix[6], (0, None))
    if parse is None:
        raise DataError(f"{name} has .npy format version {prefix[6]}, which is for named fields. Save a plain array.")
    length = stream.read(width)
    size = int.from_bytes(length, "little")
    if size > MAX_HEADER:
        raise DataError(
            f"{name} claims a header of {size} bytes; a plain array's has about a hundred. The file is damaged."
        )
    try:
        shape, fortran, dtype = parse(BytesIO(length + stream.read(size)), max_header_size=MAX_HEADER)
    except Exception as error:  # a parser fed with garbage may raise anything
        raise DataError(f"{name} has a header that does not parse: {error}") from error
    if dtype.hasobject:
        raise DataError(
            f"{name} holds Python objects: loading them could run code, so they are never loaded. Save numbers."
        )
    if dtype.names is not None or dtype.kind not in "buif":
        raise DataError(f"{name} has dtype {dtype}; expected integers or real floats. Convert it with .astype first.")
    return Header(tuple(int(d) for d in shape), dtype, bool(fortran) and len(shape) > 1, 8 + width + size)


class ArrayFile(AbstractContextManager["ArrayFile"]):
    """Rows of one array, streamed. `stream` holds `.npy` data of `size` bytes; closing this closes it."""

    def __init__(self, stream: BufferedIOBase, size: int, name: str) -> None:
        self.stream, self.name = stream, name
        try:
            self.header = read_header(stream, name)
            claimed = self.header.offset + self.header.data_bytes
            if claimed != size:
                raise DataError(
                    f"{name} claims {self.header.shape} elements of {self.header.dtype}, {claimed} bytes with its "
                    f"header, but holds {size} bytes. The file is damaged."
                )
            if self.header.fortran:
                raise DataError(f"{name} is stored column by column. Save numpy.ascontiguousarray(array) instead.")
            if not self.header.shape:
                raise DataError(f"{name} is a single number; expected an array whose first axis counts the samples.")
        except BaseException:
            stream.close()
            raise

    @classmethod
    def at(cls, path: Path) -> ArrayFile:
        return cls(path.open("rb"), os.path.getsize(path), str(path))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stream.close()

    def __len__(self) -> int:
        return self.header.shape[0]

    def blocks(self, start: int, block_bytes: int) -> Iterator[Shaped[np.ndarray, "rows *shape"]]:
        """The rows from `start` on, in order, in blocks of about `block_bytes`."""
        header = self.header
        self.stream.seek(header.offset + start * header.row_bytes)
        each = max(1, block_bytes // max(1, header.row_bytes))
        for first in range(start, len(self), each):
            rows = min(each, len(self) - first)
            raw = self.stream.read(rows * header.row_bytes)
            if len(raw) != rows * header.row_bytes:
                raise DataError(
                    f"{self.name} ends at row {first + len(raw) // max(1, header.row_bytes)} of {len(self)}: it is "
                    f"truncated."
                )
            yield np.frombuffer(raw, header.dtype).reshape(rows, *header.shape[1:])


class NpzFile(AbstractContextManager["NpzFile"]):
    """The arrays of a `.npz`, opened one at a time, never loaded whole. Refuses encrypted members and bombs."""

    def __init__(self, stream: BufferedIOBase, name: str) -> None:
        self.stream, self.name = stream, name
        try:
            self.archive = zipfile.ZipFile(cast(IO[bytes], stream))
            check_zip(self.archive, name)
        except zipfile.BadZipFile as error:
            stream.close()
            raise DataError(f"{name} is not a .npz archive: {error}") from error
        except BaseException:
            stream.close()
            raise
        members = (info.filename for info in self.archive.infolist() if info.filename.endswith(".npy"))
        self.names = sorted(member.removesuffix(".npy") for member in members)

    @classmethod
    def at(cls, path: Path) -> NpzFile:
        return cls(path.open("rb"), str(path))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.archive.close()
        self.stream.close()

    def array(self, name: str) -> ArrayFile:
        if name not in self.names:
            raise DataError(f"{self.name} holds no array {name!r}; it holds {', '.join(self.names) or 'none'}.")
        info = self.archive.getinfo(f"{name}.npy")
        return ArrayFile(cast(BufferedIOBase, self.archive.open(info)), info.file_size, f"{self.name}[{name!r}]")


def check_zip(archive: zipfile.ZipFile, name: str) -> None:
    """Refuse members that are encrypted or that unpack to absurdly more than they occupy."""
    for info in archive.infolist():
        if info.flag_bits & 0x1:
            raise DataError(f"{name}: member {info.filename!r} is encrypted.")
        if info.file_size > RATIO_FREE_BYTES and info.file_size > MAX_RATIO * max(1, info.compress_size):
            raise DataError(
                f"{name}: member {info.filename!r} claims to unpack from {info.compress_size} to {info.file_size} "
                f"bytes, more than {MAX_RATIO} times. This is a decompression bomb, or constant data that needs no "
                f"model."
            )
