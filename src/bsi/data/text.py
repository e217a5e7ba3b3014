"""Text as samples of a fixed number of symbols, which are characters or the bytes of UTF-8.

The files are read one after another, in sorted order. The last part of each file is for testing, as is usual for
character models; the parts for training make one stream and the parts for testing another, and each stream is cut into
samples. What is left at the end of a stream is not used. Files are read in chunks: the memory does not depend on their
size.
"""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, ClassVar, Literal

import numpy as np
from jaxtyping import Bool, UInt

from bsi.data.files import walk
from bsi.data.prepare import Block, Plan, check_fraction
from bsi.errors import DataError, UsageError
from bsi.io import open_untrusted
from bsi.values import Symbols

SUFFIXES = (".txt",)
CHUNK = 1 << 20  # bytes
UNICODE = 0x110000
ROWS = 4096  # samples in a block
SHOWN = 20  # characters in a note

Codes = UInt[np.ndarray, " symbols"]


@dataclass(frozen=True)
class Text:
    """The text of a file, or of the .txt files below a folder, as samples of `length` symbols."""

    summary: ClassVar[str] = (
        "text in UTF-8, from a file or a folder of .txt files; --length, --vocabulary chars|bytes, --test-fraction"
    )

    path: Path
    length: int = 256
    vocabulary: Literal["chars", "bytes"] = "chars"
    test_fraction: float = 0.1

    def plan(self) -> Plan:
        if self.length < 1:
            raise UsageError(f"length must be at least 1, got {self.length}.")
        if self.vocabulary not in ("chars", "bytes"):
            raise UsageError(f"vocabulary is chars or bytes, got {self.vocabulary!r}.")
        check_fraction(self.test_fraction)
        path = self.path.expanduser()
        found = _survey(path, self.vocabulary == "chars", self.test_fraction)
        if not found.counts["train"]:
            raise DataError(f"{path} holds no text. Give a text file, or a folder of .txt files, with --from.")
        symbols = _symbols(path, found) if self.vocabulary == "chars" else Symbols.bytes()
        symbols.latent_shape((self.length,))  # raises for samples that are too large when they are embedded
        samples = {split: count // self.length for split, count in found.counts.items()}
        if not samples["train"]:
            raise DataError(
                f"{path} holds {found.counts['train']} symbols for training, fewer than one sample. Choose a smaller "
                f"--length."
            )
        return Plan(
            name=path.resolve().stem if path.is_file() else path.resolve().name,
            source=f"the text of {path.resolve().name!r}",
            shape=(self.length,),
            kind=symbols,
            options={
                "length": self.length,
                "vocabulary": self.vocabulary,
                "split": f"the last {self.test_fraction:g} of each file is for testing",
            },
            input=found.sha256,
            total=sum(samples.values()),
            unit="sample",
            blocks=lambda start: self._blocks(found, symbols, samples, start),
            notes=_notes(found),
        )

    def _blocks(self, found: _Survey, symbols: Symbols, samples: dict[str, int], start: int) -> Iterator[Block]:
        code = np.zeros(UNICODE if symbols.names else 256, symbols.dtype)  # the symbol of each code point or byte
        code[[ord(name) for name in symbols.names] if symbols.names else range(256)] = np.arange(symbols.count)
        for split, count in samples.items():
            skip = min(start, count)
            start -= skip
            unused = skip * self.length  # symbols of samples that were prepared before an interruption
            rest = np.zeros(0, symbols.dtype)
            for part in found.parts:
                for codes in part.read(split, bool(symbols.names)):
                    fresh, unused = codes[unused:], max(0, unused - len(codes))
                    rest = np.concatenate([rest, code[fresh]])
                    usable = len(rest) // self.length * self.length
                    rows, rest = rest[:usable].reshape(-1, self.length), rest[usable:]
                    for first in range(0, len(rows), ROWS):
                        block = rows[first : first + ROWS]
                        yield Block(len(block), {split: block})


@dataclass(frozen=True)
class _Part:
    """A file, whose bytes from `cut` on are for testing."""

    path: Path
    name: str
    cut: int
    size: int

    def read(self, split: str, chars: bool) -> Iterator[Codes]:
        """The code points or bytes of one split, in chunks."""
        first, end = (0, self.cut) if split == "train" else (self.cut, self.size)
        decoder = codecs.getincrementaldecoder("utf-8")()
        with open_untrusted(self.path) as file:
            file.seek(first)
            while first < end:
                data = file.read(min(CHUNK, end - first))
                if not data:
                    raise DataError(f"{self.name} was changed while it was read. Run the same command again.")
                first += len(data)
                if not chars:
                    yield np.frombuffer(data, np.uint8)
                    continue
                try:
                    text = decoder.decode(data, final=first == end)
                except UnicodeDecodeError as error:
                    at = first - len(error.object) + error.start
                    raise DataError(
                        f"{self.name} is not text in UTF-8: byte {at} is {error.object[error.start]:#04x}. Convert it, "
                        f"or use --vocabulary bytes."
                    ) from error
                if "\0" in text:
                    raise DataError(
                        f"{self.name} is binary: it holds zero bytes. Give text, or use --vocabulary bytes."
                    )
                yield np.frombuffer(text.encode("utf-32-le"), "<u4")


@dataclass
class _Survey:
    """The files, how many symbols each split has, and which code points occur in it."""

    parts: list[_Part] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"train": 0, "test": 0})
    seen: dict[str, Bool[np.ndarray, " points"]] = field(
        default_factory=lambda: {split: np.zeros(UNICODE, bool) for split in ("train", "test")}
    )
    sha256: str = ""


def _survey(path: Path, chars: bool, test_fraction: float) -> _Survey:
    """Read everything once."""
    found, contents = _Survey(), hashlib.sha256()
    for name in walk(path, SUFFIXES) if os.path.isdir(path) else [""]:
        file = path / name if name else path
        with open_untrusted(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            cut = size - round(test_fraction * size)
            cut = _boundary(opened, cut, size) if chars else cut
        part = _Part(file, str(file), cut, size)
        contents.update(f"{name}\0{size}\n".encode("utf-8", "surrogateescape"))
        for split in ("train", "test"):
            for codes in part.read(split, chars):
                found.counts[split] += len(codes)
                found.seen[split][codes] = True
                contents.update(codes.tobytes())
        found.parts.append(part)
    found.sha256 = contents.hexdigest()
    return found


def _boundary(file: BinaryIO, at: int, size: int) -> int:
    """The first byte from `at` on that begins a character."""
    file.seek(at)
    while at < size and (byte := file.read(1)) and 0x80 <= byte[0] < 0xC0:
        at += 1
    return at


def _symbols(path: Path, found: _Survey) -> Symbols:
    """One symbol for each character, in the order of their code points."""
    names = tuple(map(chr, np.flatnonzero(found.seen["train"] | found.seen["test"]).tolist()))
    if len(names) < 2:
        raise DataError(f"{path} holds one character only, {names[0]!r}, and no information. Give other text.")
    return Symbols(len(names), names)


def _notes(found: _Survey) -> tuple[str, ...]:
    """The characters that a model meets for the first time in the test set."""
    new = list(map(chr, np.flatnonzero(found.seen["test"] & ~found.seen["train"]).tolist()))
    if not new or not found.counts["test"]:
        return ()
    more = f" and {len(new) - SHOWN} more" if len(new) > SHOWN else ""
    return (f"unknown in training, they occur in the test set only: {', '.join(map(repr, new[:SHOWN]))}{more}",)
