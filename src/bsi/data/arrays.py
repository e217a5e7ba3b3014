"""Arrays, text and sound: the sources of data that is not images.

`.npy` or `.npz` files hold arrays of any shape. With bins, integers are bin indices, and floats are values that are
stored as the index of the nearest bin. With a number of symbols, integers are symbols. Otherwise the data is continuous
and stored as float32 in its own units. An archive with arrays named `train` and `test` keeps these splits; a single
array is split by a hash of the row's number. Labels are arrays named `train_labels` and `test_labels`; those of a
single array can also be named `labels` or `y`.

Text is characters or the bytes of UTF-8, as symbols. The last part of each file is for testing, as is usual for
character models; the parts for training make one stream, in sorted order of the files, and the parts for testing
another, and each stream is cut into samples. What is left at the end of a stream is not used.

Sound comes from 16-bit WAV files of one rate and number of channels. A sample is (channels, length); its integers are
bin indices 0 .. 65535, the sound's -32768 .. 32767 shifted. The split is by file, by the hash of its path.

Files are read in chunks: the memory does not depend on their size.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import os
import wave
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Integer, Shaped, UInt

from bsi.data.files import BLOCK_BYTES, ArrayFile, for_testing, open_arrays, walk
from bsi.data.prepare import MAX_CLASSES, Block, Part, Preparation, check_fraction, rows_for_testing
from bsi.data.store import SPLITS
from bsi.errors import DataError, UsageError
from bsi.io import atomic, data_folder, digest_file, make_folder, open_untrusted
from bsi.values import Bins, Symbols

Kind = Bins | Symbols | None
LABELS = ("labels", "y")  # names of the labels of a single array
CHUNK = 1 << 20  # bytes of text
UNICODE = 0x110000
SHOWN = 20  # characters in a note
MIDDLE = 2**15  # the bin index of silence
FOR_A_CPU = 1024  # the longest pieces of sound that a CPU learns within an hour or so


@dataclass(frozen=True)
class Arrays:
    """The rows of an array, with the arguments of their `Bins`, the number of their `Symbols`, or neither."""

    summary: ClassVar[str] = "arrays of any shape from a .npy or .npz file; --bins LOW HIGH COUNT, --symbols COUNT"

    path: Path
    bins: tuple[float, float, int] | None = None
    symbols: int | None = None
    test_fraction: float = 0.1

    def plan(self) -> Preparation:
        check_fraction(self.test_fraction)
        path = self.path.expanduser()
        if self.bins and self.symbols is not None:
            raise UsageError("--bins are for numbers and --symbols for integers without an order: leave one out.")
        kind: Kind = Bins(*self.bins) if self.bins else Symbols(self.symbols) if self.symbols is not None else None
        with ExitStack() as stack:
            arrays = _opened(path, stack)
            data, shape = {n: arrays[n] for n in ("train", "test") if n in arrays}, arrays["train"].shape[1:]
            for split, array in data.items():
                _labels(arrays, split)
                if array.shape[1:] != shape:
                    shapes = f"{array.shape[1:]}, train of {shape}"
                    raise DataError(f"{array.name} has samples of shape {shapes}. Give both one shape.")
                if not array.row_bytes:
                    raise DataError(f"{array.name} has shape {array.shape}: its samples are empty.")
                if kind is None and array.dtype.kind != "f":
                    fix = "Give --bins LOW HIGH COUNT (8-bit images: -1 1 256), --symbols COUNT, or convert it to float"
                    raise UsageError(f"{array.name} holds {array.dtype}. {fix}.")
                if isinstance(kind, Symbols) and array.dtype.kind == "f":
                    raise UsageError(f"{array.name} holds {array.dtype}, and symbols are integers. Use .astype(int).")
                if isinstance(kind, Bins) and array.dtype.kind == "f":
                    fix = f"Use --bins 0 1 {kind.count}, or rescale the data to [{kind.low:g}, {kind.high:g}]."
                    kind.check_scale(array.blocks(), fix)
        if isinstance(kind, Symbols):
            kind.latent_shape(shape)  # raises for samples that are too large when they are embedded
        return Preparation(
            name=path.stem,
            source=f"arrays of {path.name}",
            shape=shape,
            kind=kind,
            options={
                "split": "by name" if "test" in data else f"row i is for testing if hash(i) < {self.test_fraction}",
                "bins": asdict(kind) if isinstance(kind, Bins) else None,
                **({"symbols": kind.count} if isinstance(kind, Symbols) else {}),
            },
            input=digest_file(path),
            parts=[Part(len(array), partial(self._blocks, path, split, kind)) for split, array in data.items()],
            label_dtype=np.dtype("<i4") if "train_labels" in arrays else None,
        )

    def _blocks(self, path: Path, split: str, kind: Kind, start: int) -> Iterator[Block]:
        with ExitStack() as stack:
            arrays = _opened(path, stack)
            array, labels = arrays[split], _labels(arrays, split)
            for rows in array.blocks(start):
                here = slice(start, start + len(rows))
                is_test: Any = split == "test"
                if "test" not in arrays:
                    is_test = rows_for_testing(start, len(rows), self.test_fraction)
                yield Block(_stored(rows, kind, array.name, start), is_test, None if labels is None else labels[here])
                start += len(rows)


def _opened(path: Path, stack: ExitStack) -> dict[str, ArrayFile]:
    """The arrays by name: `train`, and those that exist of `test`, `train_labels`, `test_labels`."""
    arrays = stack.enter_context(open_arrays(path))
    return {name: stack.enter_context(arrays[theirs]()) for name, theirs in _names(path, arrays).items()}


def _names(path: Path, names: Collection[str]) -> dict[str, str]:
    """The names of the arrays in a file, by the names used here."""
    known = {name: name for name in ("train", "test", "train_labels", "test_labels") if name in names}
    labels = [name for name in LABELS if name in names]
    if "train" not in known:
        data = [name for name in names if name not in labels]
        if len(data) != 1 or len(labels) > 1:
            held = f"{path} holds the arrays {', '.join(names) or 'none'}"
            raise DataError(f"{held}: name one of them `train`, or keep only one, with its labels as `labels`.")
        known = {"train": data[0]}
    if labels and ("test" in known or "train_labels" in known or len(labels) > 1):
        unclear = f"it is unclear what {labels[-1]} belongs to"
        raise DataError(f"{path} holds {', '.join([*known, *labels])}: {unclear}. Name it train_labels or test_labels.")
    if "test" in known and ("train_labels" in known) != ("test_labels" in known):
        raise DataError(f"{path} has labels for one split only: give both train_labels and test_labels, or neither.")
    return {**known, **({"train_labels": labels[0]} if labels else {})}


def _labels(arrays: Mapping[str, ArrayFile], split: str) -> Integer[np.ndarray, " count"] | None:
    found = arrays.get(f"{split}_labels")
    return None if found is None else found.labels(len(arrays[split]), 0, MAX_CLASSES - 1)


def _stored(
    rows: Shaped[np.ndarray, "rows *shape"], kind: Kind, name: str, first: int
) -> Shaped[np.ndarray, "rows *shape"]:
    """Rows as they are stored. Errors name the first invalid row."""
    low: Any
    high: Any
    if rows.dtype.kind != "f":
        assert kind is not None, "the plan rejects integers without bins or symbols"
        low, high, problem = 0, kind.count - 1, f"integers outside 0 .. {kind.count - 1}"
    elif isinstance(kind, Bins):
        low, high, problem = kind.low, kind.high, f"values outside [{kind.low}, {kind.high}]"
    else:
        high = np.finfo(np.float32).max
        low, problem = -high, "values that are NaN, infinite or beyond float32"
    good = (rows >= low) & (rows <= high)
    if not good.all():
        row = first + int(np.flatnonzero(~good.reshape(len(rows), -1).all(1))[0])
        fix = f"or describe the data with other --{type(kind).__name__.lower()}" if kind else "or repair them"
        raise DataError(f"{name}: row {row} has {problem}. Remove such rows, {fix}.")
    if rows.dtype.kind == "f" and isinstance(kind, Bins):
        return kind.indices(rows)
    return rows.astype(kind.dtype if kind else "<f4")


@dataclass(frozen=True)
class Text:
    """The text of a file, or of the .txt files below a folder, as samples of `length` symbols.

    Without a path it is the reference of the language that every Python contains for `help()`. It depends on the
    version of Python; that of 3.11 has 465,126 characters.
    """

    summary: ClassVar[str] = "text of a file or of a folder's .txt files, or Python's manual; --length, --vocabulary"

    path: Path | None = None
    length: int = 256
    vocabulary: Literal["chars", "bytes"] = "chars"
    test_fraction: float = 0.1

    def plan(self) -> Preparation:
        _check(self.length, self.test_fraction)
        path, chars = _manual() if self.path is None else self.path.expanduser(), self.vocabulary == "chars"
        files = {"": path}
        if os.path.isdir(path):
            files = {name: path / name for name in walk(path, (".txt",))}
        # Everything is read once, for the number of symbols and the code points that occur.
        counts, seen = dict.fromkeys(SPLITS, 0), {split: np.zeros(UNICODE, bool) for split in SPLITS}
        contents = hashlib.sha256()
        for name, file in files.items():
            with open_untrusted(file) as opened:
                size = os.fstat(opened.fileno()).st_size
            contents.update(f"{name}\0{size}\n".encode("utf-8", "surrogateescape"))
            for split in SPLITS:
                for codes in self._read(file, split):
                    counts[split] += len(codes)
                    seen[split][codes] = True
                    contents.update(codes.tobytes())
        if not counts["train"]:
            raise DataError(f"{path} holds no text. Give a text file, or a folder of .txt files, with --from.")
        used = np.flatnonzero(seen["train"] | seen["test"]).tolist()
        if len(used) < 2 and chars:
            raise DataError(f"{path} holds one character only, {chr(used[0])!r}, and no information. Give other text.")
        symbols = Symbols(len(used), tuple(map(chr, used))) if chars else Symbols.bytes()
        symbols.latent_shape((self.length,))  # raises for samples that are too large when they are embedded
        samples = {split: count // self.length for split, count in counts.items()}
        if not samples["train"]:
            raise DataError(f"{path} holds only {counts['train']} symbols for training. Choose a smaller --length.")
        new = [repr(chr(code)) for code in np.flatnonzero(seen["test"] & ~seen["train"]).tolist()]
        listed = ", ".join(new[:SHOWN]) + (f" and {len(new) - SHOWN} more" if len(new) > SHOWN else "")
        last = f"the last {self.test_fraction:g} of each file is for testing"
        return Preparation(
            name="text" if self.path is None else path.resolve().stem if path.is_file() else path.resolve().name,
            source=f"the text of {path.resolve().name!r}",
            shape=(self.length,),
            kind=symbols,
            options={"length": self.length, "vocabulary": self.vocabulary, "split": last},
            input=contents.hexdigest(),
            parts=[Part(n, partial(self._blocks, [*files.values()], symbols, split)) for split, n in samples.items()],
            notes=(f"unknown in training, they occur in the test set only: {listed}",) if new else (),
        )

    def _blocks(self, files: list[Path], symbols: Symbols, split: str, start: int) -> Iterator[Block]:
        code = np.zeros(UNICODE, symbols.dtype)  # the symbol of each code point or byte
        code[[ord(name) for name in symbols.names] or range(256)] = np.arange(symbols.count)
        unused = start * self.length  # symbols of samples that were prepared before an interruption
        rest = np.zeros(0, symbols.dtype)
        for codes in itertools.chain.from_iterable(self._read(file, split) for file in files):
            rest = np.concatenate([rest, code[codes[unused:]]])
            unused = max(0, unused - len(codes))
            usable = len(rest) // self.length * self.length
            if usable:
                yield Block(rest[:usable].reshape(-1, self.length), split == "test")
            rest = rest[usable:]

    def _read(self, path: Path, split: str) -> Iterator[UInt[np.ndarray, " symbols"]]:
        """The code points or bytes of one split of a file, in chunks."""
        chars, decoder = self.vocabulary == "chars", codecs.getincrementaldecoder("utf-8")()
        with open_untrusted(path) as file:
            size = os.fstat(file.fileno()).st_size
            cut = size - round(self.test_fraction * size)
            file.seek(cut)
            while chars and (byte := file.read(1)) and 0x80 <= byte[0] < 0xC0:  # inside a character
                cut += 1
            first, end = (0, cut) if split == "train" else (cut, size)
            file.seek(first)
            while first < end:
                data = file.read(min(CHUNK, end - first))
                if not data:
                    raise DataError(f"{path} was changed while it was read. Run the same command again.")
                first += len(data)
                if not chars:
                    yield np.frombuffer(data, np.uint8)
                    continue
                try:
                    text = decoder.decode(data, final=first == end)
                except UnicodeDecodeError as error:
                    at, byte = first - len(error.object) + error.start, error.object[error.start : error.start + 1]
                    found = f"is not text in UTF-8: byte {at} is 0x{byte.hex()}"
                    raise DataError(f"{path} {found}. Convert it, or use --vocabulary bytes.") from error
                if "\0" in text:
                    raise DataError(f"{path} is binary: it holds zero bytes. Give text, or --vocabulary bytes.")
                yield np.frombuffer(text.encode("utf-32-le"), "<u4")


def _manual() -> Path:
    """A file in the data folder with the topics of Python's `help()`, sorted by name."""
    from pydoc_data.topics import topics

    path = data_folder() / "python-manual.txt"
    make_folder(path.parent)
    with atomic(path) as temporary:
        temporary.write_text("\n\n".join(topics[name] for name in sorted(topics)), "utf-8")
    return path


@dataclass(frozen=True)
class Wav:
    """Every WAV file below `path`, in pieces of `length` samples."""

    summary: ClassVar[str] = "a folder of 16-bit WAV files as pieces of fixed length; --length, --test-fraction"

    path: Path
    length: int = 16384
    test_fraction: float = 0.1

    def plan(self) -> Preparation:
        _check(self.length, self.test_fraction)
        path = self.path.expanduser()
        counts, listing = dict[str, int](), hashlib.sha256()
        form = where = ""
        for name in walk(path, (".wav",)):
            with _open_wav(path / name) as file:
                rate, channels, frames = file.getframerate(), file.getnchannels(), file.getnframes()
            found = f"{channels} channels at {rate} Hz"
            form, where = form or found, where or name
            if found != form:
                raise DataError(f"{path / name} has {found}, expected {form} as {where}. Convert them to one format.")
            counts[name] = frames // self.length
            listing.update(f"{name}\0{frames}\n".encode("utf-8", "surrogateescape"))
        if not counts:
            raise DataError(f"{path} holds no WAV file. Give the folder with --from.")
        if not any(counts.values()):
            raise DataError(f"{path} holds no WAV file of at least {self.length} samples. Choose a smaller --length.")
        split = f"a file is for testing if sha256(relative path) < {self.test_fraction}"
        slow = f"training on pieces of {self.length} samples takes hours on a CPU, where --length 256 takes minutes"
        return Preparation(
            name=path.resolve().name,
            source=f"the WAV files of a folder {path.resolve().name!r}",
            shape=(channels, self.length),
            kind=Bins.int16(),
            options={"length": self.length, "rate": rate, "split": split},
            input=listing.hexdigest(),
            parts=[Part(count, partial(self._blocks, path / name, name)) for name, count in counts.items()],
            notes=(slow,) if self.length > FOR_A_CPU else (),
        )

    def _blocks(self, path: Path, name: str, start: int) -> Iterator[Block]:
        with _open_wav(path) as file:
            channels, count = file.getnchannels(), file.getnframes() // self.length
            each = max(1, BLOCK_BYTES // (2 * channels * self.length))
            file.setpos(start * self.length)
            for first in range(start, count, each):
                frames = min(each, count - first) * self.length
                raw = file.readframes(frames)
                if len(raw) != 2 * channels * frames:
                    raise DataError(f"{path} is truncated: it has fewer samples than its header says.")
                sound = np.frombuffer(raw, "<i2").reshape(-1, self.length, channels).transpose(0, 2, 1)
                rows = (sound.astype(np.int32) + MIDDLE).astype("<u2")
                yield Block(rows, for_testing(name, self.test_fraction))


def _check(length: int, test_fraction: float) -> None:
    if length < 1:
        raise UsageError(f"length must be at least 1, got {length}.")
    check_fraction(test_fraction)


@contextmanager
def _open_wav(path: Path) -> Iterator[wave.Wave_read]:
    with open_untrusted(path) as raw:
        try:
            file = wave.open(raw)  # noqa: SIM115  closing it would close only `raw`
        except (wave.Error, EOFError, OSError) as error:
            raise DataError(f"{path} is not a PCM WAV file: {error}. Convert it first.") from error
        if file.getsampwidth() != 2 or file.getframerate() < 1:
            found = f"{8 * file.getsampwidth()} bits per sample at {file.getframerate()} Hz"
            raise DataError(f"{path} has {found}, expected 16 bits. Convert it first.")
        yield file


def write_wav(path: Path, index: Integer[np.ndarray, "channels length"], rate: int, option: str | None = None) -> None:
    """Write one sample of bin indices 0 .. 65535 as a 16-bit WAV file.

    Args:
        index: Channels and time; the indices that `Wav` stores and a model with `Bins.int16()` draws.
        rate: Samples per second: `options["rate"]` in the manifest of the dataset.
        option: The command-line option that names another place, for the error message.
    """
    low, high = index.min(initial=0), index.max(initial=0)
    if index.ndim != 2 or low < 0 or high > 65535:
        raise DataError(f"sound is (channels, length) of 0 to 65535, got shape {index.shape} of {low} to {high}.")
    sound = (index.astype(np.int32) - MIDDLE).astype("<i2")
    with atomic(path, option) as temporary, wave.open(str(temporary), "wb") as file:
        file.setnchannels(len(index))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(sound.T.tobytes())
