"""Sound from a folder of 16-bit WAV files, cut into pieces of fixed length.

A sample is (channels, length); its integers are bin indices 0 .. 65535, the sound's -32768 .. 32767 shifted. What is
left at the end of a file, shorter than a piece, is dropped. All files must agree in rate and channels. The split is by
file, by the hash of its path.
"""

from __future__ import annotations

import hashlib
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from bsi.data.folder import for_testing, walk
from bsi.data.plan import BLOCK_BYTES, Block, Plan
from bsi.errors import DataError, UsageError
from bsi.values import Bins

__all__ = ["Wav"]


SUFFIXES = (".wav",)


@dataclass(frozen=True)
class Wav:
    """Every WAV file below `path`, in pieces of `length` samples."""

    summary: ClassVar[str] = "a folder of 16-bit WAV files as pieces of fixed length; --length, --test-fraction"

    path: Path
    length: int = 16384
    test_fraction: float = 0.1

    def plan(self) -> Plan:
        if self.length < 1 or not 0 <= self.test_fraction < 1:
            raise UsageError(
                f"length is at least 1 and test_fraction lies in [0, 1): got {self.length} and {self.test_fraction}"
            )
        path = self.path.expanduser()
        rows, listing = 0, hashlib.sha256()
        first: tuple[str, int, int] | None = None
        for name in walk(path, SUFFIXES):
            with _opened(path / name) as file:
                rate, channels, frames = file.getframerate(), file.getnchannels(), file.getnframes()
            first = first or (name, rate, channels)
            if (rate, channels) != first[1:]:
                raise DataError(
                    f"{path / name} has {channels} channels at {rate} Hz, {first[0]} has {first[2]} at {first[1]} Hz. "
                    f"Convert them to one format."
                )
            rows += frames // self.length
            listing.update(f"{name}\0{frames}\n".encode("utf-8", "surrogateescape"))
        if first is None:
            raise DataError(f"{path} holds no WAV file. Give the folder with --from.")
        if not rows:
            raise DataError(f"{path} holds no WAV file of at least {self.length} samples. Choose a smaller --length.")
        return Plan(
            name=path.resolve().name,
            source=f"the WAV files of a folder {path.resolve().name!r}",
            shape=(channels, self.length),
            dtype=np.dtype("<u2"),
            bins=Bins(-1.0, 1.0, 65536),
            options={
                "length": self.length,
                "rate": rate,
                "split": f"a file is for testing if sha256(relative path) < {self.test_fraction}",
            },
            input=listing.hexdigest(),
            total=rows,
            rows=rows,
            unit="piece",
            blocks=self._blocks,
        )

    def _blocks(self, start: int) -> Iterator[Block]:
        path = self.path.expanduser()
        for name in walk(path, SUFFIXES):
            split = "test" if for_testing(name, self.test_fraction) else "train"
            with _opened(path / name) as file:
                channels, count = file.getnchannels(), file.getnframes() // self.length
                each = max(1, BLOCK_BYTES // (2 * channels * self.length))
                done, start = min(start, count), max(0, start - count)
                file.setpos(done * self.length)
                for first in range(done, count, each):
                    rows = _pieces(file, path / name, min(each, count - first), channels, self.length)
                    yield Block(len(rows), {split: rows})


def _pieces(file: wave.Wave_read, path: Path, count: int, channels: int, length: int) -> np.ndarray:
    raw = file.readframes(count * length)
    if len(raw) != 2 * channels * count * length:
        raise DataError(f"{path} is truncated: its header promises more samples than it holds.")
    sound = np.frombuffer(raw, "<i2").reshape(count, length, channels).transpose(0, 2, 1)
    return (sound.astype(np.int32) + 32768).astype("<u2")


def _opened(path: Path) -> wave.Wave_read:
    try:
        file = wave.open(str(path), "rb")  # noqa: SIM115  the caller closes it
    except (wave.Error, EOFError, OSError) as error:
        raise DataError(f"{path} is not a PCM WAV file: {error}") from error
    if file.getsampwidth() != 2:
        width = 8 * file.getsampwidth()
        file.close()
        raise DataError(f"{path} has {width} bits per sample; expected 16. Convert it first.")
    return file
