"""Sound in 16-bit WAV files: a folder of them cut into pieces of fixed length, and samples written as such files.

A sample is (channels, length); its integers are bin indices 0 .. 65535, the sound's -32768 .. 32767 shifted. The rest
of a file that is shorter than a piece is not used. All files must have the same rate and channels. The split is by
file, by the hash of its path.
"""

from __future__ import annotations

import hashlib
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import Integer

from bsi.data.files import BLOCK_BYTES, for_testing, walk
from bsi.data.prepare import Block, Plan, check_fraction
from bsi.errors import DataError, UsageError
from bsi.io import atomic, open_untrusted
from bsi.values import Bins

SUFFIXES = (".wav",)
MIDDLE = 2**15  # the bin index of silence


@dataclass(frozen=True)
class Wav:
    """Every WAV file below `path`, in pieces of `length` samples."""

    summary: ClassVar[str] = "a folder of 16-bit WAV files as pieces of fixed length; --length, --test-fraction"

    path: Path
    length: int = 16384
    test_fraction: float = 0.1

    def plan(self) -> Plan:
        if self.length < 1:
            raise UsageError(f"length must be at least 1, got {self.length}.")
        check_fraction(self.test_fraction)
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
            kind=Bins.int16(),
            options={
                "length": self.length,
                "rate": rate,
                "split": f"a file is for testing if sha256(relative path) < {self.test_fraction}",
            },
            input=listing.hexdigest(),
            total=rows,
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
                    frames = min(each, count - first) * self.length
                    raw = file.readframes(frames)
                    if len(raw) != 2 * channels * frames:
                        raise DataError(f"{path / name} is truncated: it has fewer samples than its header says.")
                    sound = np.frombuffer(raw, "<i2").reshape(-1, self.length, channels).transpose(0, 2, 1)
                    rows = (sound.astype(np.int32) + MIDDLE).astype("<u2")
                    yield Block(len(rows), {split: rows})


@contextmanager
def _opened(path: Path) -> Iterator[wave.Wave_read]:
    with open_untrusted(path) as raw:
        try:
            file = wave.open(raw)  # noqa: SIM115  closing it would close only `raw`
        except (wave.Error, EOFError, OSError) as error:
            raise DataError(f"{path} is not a PCM WAV file: {error}. Convert it first.") from error
        if file.getsampwidth() != 2:
            raise DataError(f"{path} has {8 * file.getsampwidth()} bits per sample, expected 16. Convert it first.")
        if file.getframerate() < 1:
            raise DataError(f"{path} has a rate of {file.getframerate()} Hz. Convert it first.")
        yield file


def write_wav(path: Path, index: Integer[np.ndarray, "channels length"], rate: int, option: str | None = None) -> None:
    """Write one sample of bin indices 0 .. 65535 as a 16-bit WAV file.

    Args:
        index: Channels and time; the indices that `Wav` stores and a model with `Bins.int16()` draws.
        rate: Samples per second: `options["rate"]` in the manifest of the dataset.
        option: The command-line option that names another place, for the error message.
    """
    if index.ndim != 2 or not 1 <= len(index) <= 65535:
        raise UsageError(f"sound must have the shape (channels, length), got {index.shape}.")
    if index.size and not (index.min() >= 0 and index.max() <= 65535):
        raise DataError(f"sound must be indices from 0 to 65535, got {index.min()} to {index.max()}.")
    sound = (index.astype(np.int32) - MIDDLE).astype("<i2")
    with atomic(path, option) as temporary, wave.open(str(temporary), "wb") as file:
        file.setnchannels(len(index))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(sound.T.tobytes())
