"""Text, binary images and arrays of symbols: every symbol arrives in order, and what is no such data is an error."""

import gzip
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from bsi.data.arrays import Arrays
from bsi.data.prepare import Plan, prepare
from bsi.data.published import Binary, Mnist
from bsi.data.sequences import Text
from bsi.data.store import open_dataset
from bsi.errors import DataError, UsageError
from bsi.values import Symbols

CORPUS = "Grüße, 世界! 🙂 one two three four five six seven eight nine ten.\n" * 40


def rows(plan: Plan, start: int = 0) -> np.ndarray:
    """The rows from one item on, of both splits in order."""
    empty = np.empty((0, *plan.shape), plan.dtype)
    return np.concatenate([empty, *(block.rows for block in plan.blocks(start))])


@pytest.mark.parametrize("chunk", [1 << 20, 7])
def test_the_text_of_a_dataset_is_the_text_of_the_file(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bsi.data.sequences.CHUNK", chunk)  # 7 bytes: characters are cut in two
    (tmp_path / "corpus.txt").write_text(CORPUS, "utf-8")
    dataset = prepare(Text(tmp_path / "corpus.txt", length=16, test_fraction=0.25).plan(), tmp_path / "out")
    assert isinstance(dataset.kind, Symbols)
    assert dataset.kind.names == tuple(sorted(set(CORPUS)))
    train = dataset.kind.text(dataset.train.reshape(-1))
    test = dataset.kind.text(dataset.test.reshape(-1))
    assert CORPUS.startswith(train)
    split = CORPUS.index(test[:32], len(train))
    assert split - len(train) < 16
    assert CORPUS[split:].startswith(test)
    assert len(CORPUS) - split - len(test) < 16
    assert len(train.encode()) / len(CORPUS.encode()) == pytest.approx(0.75, abs=0.01)
    counts = np.bincount(dataset.train.reshape(-1), minlength=dataset.kind.count) + 1
    np.testing.assert_allclose(dataset.kind.prior, counts / counts.sum())


def test_a_folder_is_read_in_order_and_each_file_has_its_own_end_for_testing(tmp_path: Path) -> None:
    for name, letter in (("b.txt", "b"), ("a.txt", "a"), ("c.md", "c")):
        (tmp_path / name).write_text(letter * 90 + letter.upper() * 10)
    dataset = prepare(Text(tmp_path, length=5).plan(), tmp_path / "out")
    assert dataset.kind.text(dataset.train.reshape(-1)) == "a" * 90 + "b" * 90
    assert dataset.kind.text(dataset.test.reshape(-1)) == "A" * 10 + "B" * 10
    assert "'A', 'B'" in dataset.manifest.notes[0]  # unknown in training


@pytest.mark.parametrize("vocabulary", ["chars", "bytes"])
def test_blocks_of_text_can_start_anywhere(vocabulary: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(CORPUS, "utf-8")
    (tmp_path / "b.txt").write_text(CORPUS[::-1], "utf-8")
    plan = Text(tmp_path, 16, vocabulary).plan()
    everything = rows(plan)
    assert len(everything) == plan.total
    if vocabulary == "bytes":
        train = prepare(plan, tmp_path / "out").train.tobytes()
        assert train.startswith(CORPUS.encode()[:1000])
    for start in (1, 17, plan.total - 1, plan.total):
        assert np.array_equal(rows(plan, start), everything[start:])


def test_the_memory_does_not_depend_on_the_size_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"To be, or not to be. " * (1 << 20))  # 21 MiB
    tracemalloc.start()
    plan = Text(tmp_path / "x.txt").plan()
    for _ in plan.blocks(0):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize(
    ("content", "options", "why"),
    [
        (b"", {}, "no text"),
        (b"caf\xe9 au lait", {}, "byte 3 is 0xe9"),
        (b"a\0b" * 100, {}, "binary"),
        (b"aaaa" * 100, {}, "one character"),
        (b"abc", {}, "--length"),
        (b"abc" * 100, {"length": 0}, "length"),
        (b"abc" * 100, {"length": 10**8}, "shorter samples"),
    ],
)
def test_what_is_no_text_is_an_error_before_anything_is_written(
    content: bytes, options: dict[str, object], why: str, tmp_path: Path
) -> None:
    (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises((DataError, UsageError), match=why):
        Text(tmp_path / "x.txt", **options).plan()


def test_binary_digits_are_above_the_threshold_and_keep_their_labels(tmp_path: Path) -> None:
    digits = open_dataset("digits")
    dataset = prepare(Binary("digits").plan(), tmp_path / "a")
    assert (dataset.kind.count, dataset.shape) == (2, (1, 8, 8))
    assert np.array_equal(dataset.train, digits.train > 8)
    assert np.array_equal(dataset.labels.test, digits.labels.test)
    for options in ({"threshold": 1.0}, {"threshold": 0.5, "stochastic": True}):
        with pytest.raises(UsageError, match="threshold"):
            Binary("digits", **options).plan()
    plan = Binary("digits", threshold=0.25).plan()
    assert np.array_equal(rows(plan, 100), np.concatenate([digits.train, digits.test])[100:] > 4)


def test_a_random_pixel_is_1_with_the_probability_of_its_value() -> None:
    digits = open_dataset("digits")
    plan = Binary("digits", stochastic=True).plan()
    drawn, gray = rows(plan), np.concatenate([digits.train, digits.test])
    assert np.array_equal(drawn[700:], rows(plan, 700))
    for level in (0, 3, 8, 13, 16):
        pixels = drawn[gray == level]
        error = np.sqrt(max(level * (16 - level), 1e-9)) / 16 / np.sqrt(len(pixels))
        assert abs(pixels.mean() - level / 16) <= 5 * error


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape) + array.tobytes()


def test_mnist_is_read_from_its_files_packed_or_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        f"{stem}-{kind}": rng.integers(0, 256, shape, dtype=np.uint8)
        for stem, n in (("train", 30), ("t10k", 7))
        for kind, shape in (("images-idx3", (n, 5, 5)), ("labels-idx1", (n,)))
    }
    versions = set()
    for form, between, pack in (("plain", "-", bytes), ("packed", ".", gzip.compress)):
        folder = tmp_path / form
        folder.mkdir()
        for name, array in arrays.items():
            end = "" if pack is bytes else ".gz"
            (folder / f"{name.replace('-idx', between + 'idx')}-ubyte{end}").write_bytes(pack(idx(array)))
        dataset = prepare(Mnist(folder).plan(), tmp_path / f"{form}-out")
        versions.add(dataset.version)
        assert np.array_equal(dataset.train[:, 0], arrays["train-images-idx3"])
        assert np.array_equal(dataset.labels.test, arrays["t10k-labels-idx1"])
        assert np.array_equal(rows(Binary(str(folder)).plan(), 30)[:, 0], arrays["t10k-images-idx3"] > 127)
    assert len(versions) == 1
    images = tmp_path / "plain" / "train-images-idx3-ubyte"
    for raw, why in ((images.read_bytes()[:-1], "damaged"), (b"\0\0\x0d\x03" + bytes(12), "not an idx file")):
        images.write_bytes(raw)
        with pytest.raises(DataError, match=why):
            Mnist(tmp_path / "plain").plan()
    images.unlink()
    with pytest.raises(DataError, match="holds no train-images"):
        Mnist(tmp_path / "plain").plan()


def test_arrays_of_integers_are_symbols(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    stored = np.random.default_rng(0).integers(0, 300, (50, 4))
    np.save(path, stored)
    dataset = prepare(Arrays(path, symbols=300, test_fraction=0.0).plan(), tmp_path / "out")
    assert (dataset.kind.count, dataset.train.dtype) == (300, np.dtype("<u2"))
    assert np.array_equal(dataset.train, stored)
    with pytest.raises(DataError, match=r"outside 0 \.\. 98"):
        prepare(Arrays(path, symbols=99).plan(), tmp_path / "b")
    for options in ({"symbols": 1}, {"symbols": 300, "bins": (0.0, 1.0, 300)}, {"symbols": 10**6}, {}):
        with pytest.raises(UsageError):
            Arrays(path, **options).plan()
    np.save(path, stored.astype(float))
    with pytest.raises(UsageError, match="astype"):
        Arrays(path, symbols=300).plan()
