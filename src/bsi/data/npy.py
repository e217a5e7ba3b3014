"""NumPy's file formats, validated from the header and streamed.

A `.npy` file is a magic number, a header (dtype, order, shape) and the raw elements; a `.npz` is a zip archive of such
files. `ArrayFile` reads the header, rejects arrays that would run code when loaded (object arrays are pickles) and
headers that disagree with the file's size, and then yields rows in blocks: the memory is that of one block, whatever
the size of the array.
"""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from io import BufferedIOBase, BytesIO
from pathlib import Path
from types import TracebackType
from typing import IO, cast

import numpy as np
from jaxtyping import Shaped

from bsi.errors import DataError
from bsi.io import open_untrusted

__all__ = ["BLOCK_BYTES", "HEADER_BYTES", "ArrayFile", "NpzFile", "check_zip", "header_bytes", "unzipped"]

BLOCK_BYTES = 8 << 20
HEADER_BYTES = 256
MAX_HEADER = 1 << 12
# Deflate reaches at most 1032 : 1. Real data of more than a few megabytes stays far below this ratio.
MAX_RATIO = 200
RATIO_FREE_BYTES = 64 << 20


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
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
            raise DataError(f"{self.name} is damaged: {error}. Save or download it again.") from error


class NpzFile(AbstractContextManager["NpzFile"]):
    """The arrays of a `.npz` file, opened one at a time. Rejects encrypted members and decompression bombs."""

    def __init__(self, stream: BufferedIOBase, name: str) -> None:
        self.stream, self.name = stream, name
        try:
            self.archive = zipfile.ZipFile(cast(IO[bytes], stream))
            check_zip(self.archive, name)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as error:
            stream.close()
            raise DataError(f"{name} is not a .npz archive: {error}. Save it with numpy.savez.") from error
        except BaseException:
            stream.close()
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
        stream = unzipped(self.archive, info, self.name)
        return ArrayFile(stream, info.file_size, f"{self.name}[{name!r}]", seekable=False)


def check_zip(archive: zipfile.ZipFile, name: str) -> None:
    """Raise if a member is encrypted or claims to unpack to far more bytes than it occupies."""
    for info in archive.infolist():
        if info.flag_bits & 0x1:
            raise DataError(f"{name}: member {info.filename!r} is encrypted. Save it without a password.")
        if info.file_size > RATIO_FREE_BYTES and info.file_size > MAX_RATIO * max(1, info.compress_size):
            raise DataError(
                f"{name}: member {info.filename!r} claims to unpack from {info.compress_size} to {info.file_size} "
                f"bytes, more than {MAX_RATIO} times. It is a decompression bomb, or constant data."
            )


def unzipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> BufferedIOBase:
    """A stream of one member's content."""
    try:
        return cast(BufferedIOBase, archive.open(info))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, EOFError) as error:
        raise DataError(f"{name}: member {info.filename!r} cannot be read: {error}. Save it again.") from error
