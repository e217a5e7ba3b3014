"""Arrays, text and binary images: every row arrives in order, and errors name what is wrong."""

import gzip
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from bsi.data.arrays import Arrays
from bsi.data.files import NpzFile
from bsi.data.prepare import Plan, prepare
from bsi.data.published import Binary, Mnist
from bsi.data.sequences import Text
from bsi.data.store import open_dataset
from bsi.errors import DataError, UsageError
from bsi.values import Standardize, Symbols

# ---- Arrays ----------------------------------------------------------------------------------------------------------

rng = np.random.default_rng(0)


def saved(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


def test_continuous_data_keeps_its_units_and_is_standardized_per_column(tmp_path: Path) -> None:
    """Columns in different units, as in a table: the moments are those of the training split, column by column."""
    units = np.array([1e-6, 1.0, 1e5])
    data = rng.normal(3.0, 1.0, (3000, 3)) * units
    dataset = prepare(Arrays(saved(tmp_path / "table.npy", data)).plan(), tmp_path / "out")
    assert (dataset.name, dataset.shape, dataset.bins, dataset.train.dtype) == ("out", (3,), None, np.float32)
    assert len(dataset.train) + len(dataset.test) == 3000
    assert abs(len(dataset.test) - 300) < 4 * np.sqrt(3000 * 0.1 * 0.9)
    train = np.array(dataset.train, np.float64)
    assert dataset.kind.mean == pytest.approx(train.mean(0), rel=1e-12)
    assert dataset.kind.std == pytest.approx(train.std(0), rel=1e-12)
    stored = {row.tobytes() for row in data.astype(np.float32)}
    assert all(row.tobytes() in stored for row in (*dataset.train, *dataset.test))
    assert open_dataset(tmp_path / "out").kind == dataset.kind


def test_moments_over_many_blocks_are_those_of_numpy(tmp_path: Path) -> None:
    data = (rng.normal(size=(30000, 3, 40)) + 1000 * np.arange(3)[:, None]).astype("f4")
    dataset = prepare(Arrays(saved(tmp_path / "x.npy", data), test_fraction=0.0).plan(), tmp_path / "out")
    exact = data.astype(np.float64)
    assert dataset.kind.mean == pytest.approx(exact.mean((0, 2)), rel=1e-11)
    assert dataset.kind.std == pytest.approx(exact.std((0, 2)), rel=1e-9)


def test_a_manifest_of_version_010_keeps_its_single_standardization(tmp_path: Path) -> None:
    folder = prepare(Arrays(saved(tmp_path / "x.npy", rng.normal(size=(50, 2)))).plan(), tmp_path / "out").folder
    path = folder / "manifest.json"
    record = json.loads(path.read_text())
    record["standardisation"] = {"mean": 5.0, "std": 2.0}
    del record["standardize"], record["notes"]
    path.write_text(json.dumps(record))
    assert open_dataset(folder).kind == Standardize(5.0, 2.0)


def test_integers_are_bin_indices_and_floats_are_values(tmp_path: Path) -> None:
    index = rng.integers(0, 17, (40, 5))
    values = -1 + index / 8
    for name, data in (("i", index), ("f", values), ("rounded", values + 0.05), ("big-endian", values.astype(">f4"))):
        data = np.clip(data, -1, 1) if data.dtype.kind == "f" else data
        source = Arrays(saved(tmp_path / f"{name}.npy", data), bins=(-1.0, 1.0, 17), test_fraction=0.0)
        dataset = prepare(source.plan(), tmp_path / name)
        assert (dataset.train.dtype, dataset.bins.count) == (np.uint8, 17)
        assert np.array_equal(dataset.train, index)
    wide = Arrays(saved(tmp_path / "wide.npy", index * 3000), bins=(-1.0, 1.0, 65536), test_fraction=0.0)
    assert np.array_equal(prepare(wide.plan(), tmp_path / "wide").train, index * 3000)


def test_an_archive_with_named_splits_and_labels_is_kept_as_it_is(tmp_path: Path) -> None:
    train, test = rng.normal(size=(30, 4)).astype("f4"), rng.normal(size=(9, 4)).astype("f4")
    np.savez_compressed(tmp_path / "x.npz", train=train, test=test, train_labels=range(30), test_labels=range(9))
    plan = Arrays(tmp_path / "x.npz").plan()
    dataset = prepare(plan, tmp_path / "out")
    assert np.array_equal(dataset.train, train)
    assert np.array_equal(dataset.test, test)
    assert dataset.labels.test.tolist() == list(range(9))
    assert np.array_equal(np.concatenate([block.rows for block in plan.blocks(33)]), test[3:])


@pytest.mark.parametrize(("data", "labels"), [("train", "y"), ("images", "labels"), ("train", "train_labels")])
def test_the_labels_of_a_single_array_have_their_usual_names(tmp_path: Path, data: str, labels: str) -> None:
    np.savez(tmp_path / "x.npz", **{labels: np.arange(500), data: np.arange(500.0)})
    dataset = prepare(Arrays(tmp_path / "x.npz").plan(), tmp_path / "out")
    assert np.array_equal(dataset.train, dataset.labels.train)
    assert np.array_equal(dataset.test, dataset.labels.test)
    assert len(dataset.test) > 50


def test_the_split_does_not_depend_on_how_the_rows_are_read(tmp_path: Path) -> None:
    plan = Arrays(saved(tmp_path / "x.npy", np.arange(2_500_000.0)), test_fraction=0.3).plan()
    assert len(list(plan.blocks(0))) > 1
    test = np.concatenate([block.rows[block.for_testing] for block in plan.blocks(0)])
    rest = np.concatenate([block.rows[block.for_testing] for block in plan.blocks(123)])
    assert np.array_equal(rest, test[test >= 123])


@pytest.mark.parametrize(
    ("value", "bins", "why"),
    [
        (np.nan, None, r"row 42 has values that are NaN.* Remove such rows, or repair them\.$"),
        (1e300, None, r"row 42 .* beyond float32"),
        (1.5, (0.0, 1.0, 5), r"row 42 has values outside \[0.0, 1.0\]"),
        (-1, (0.0, 1.0, 5), r"row 42 has integers outside 0 \.\. 4"),
        (5, (0.0, 1.0, 5), r"row 42 has integers outside 0 \.\. 4"),
        (0.0, None, "element or channel 0 of the data is constant"),
        (5, None, "--bins LOW HIGH COUNT"),
    ],
)
def test_what_is_not_data_is_refused_by_row(
    value: float, bins: tuple[float, float, int] | None, why: str, tmp_path: Path
) -> None:
    rows = np.zeros((100, 3), type(value))
    rows[42, 1] = value
    with pytest.raises((DataError, UsageError), match=why):
        prepare(Arrays(saved(tmp_path / "x.npy", rows), bins=bins).plan(), tmp_path / "out")


def test_what_is_no_array_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="samples are empty"):
        Arrays(saved(tmp_path / "empty.npy", np.zeros((3, 0)))).plan()
    with pytest.raises(UsageError, match="test_fraction"):
        Arrays(tmp_path / "empty.npy", test_fraction=1.0).plan()
    (tmp_path / "x.csv").write_text("1,2")
    with pytest.raises(DataError, match=r"not a \.npy"):
        Arrays(tmp_path / "x.csv").plan()


def test_archives_that_leave_the_split_unclear_are_refused(tmp_path: Path) -> None:
    def refused(why: str, **arrays: np.ndarray) -> None:
        np.savez(tmp_path / "x.npz", **arrays)
        with pytest.raises(DataError, match=why):
            Arrays(tmp_path / "x.npz").plan()

    x = np.zeros((4, 2))
    refused("name one of them `train`", a=x, b=x)
    refused("samples of shape", train=x, test=np.zeros((4, 3)))
    refused("labels for one split only", train=x, test=x, train_labels=np.arange(4))
    refused("one integer per sample", train=x, train_labels=np.arange(3))
    refused("one integer per sample", x=x, y=x)
    refused("name one of them `train`", a=x, b=x, y=np.arange(4))
    refused("name one of them `train`", x=x, y=np.arange(4), labels=np.arange(4))
    refused("unclear what y belongs to", train=x, test=x, y=np.arange(4))
    refused("unclear what labels belongs to", train=x, train_labels=np.arange(4), labels=np.arange(4))
    refused("row 2 is -1, expected labels", x=x, y=np.array([0, 1, -1, 1]))
    refused("row 1 is 2147483648", x=x, y=np.array([0, 2**31, 1, 1]))
    np.savez(tmp_path / "one.npz", whatever=rng.normal(size=(40, 2)))
    assert Arrays(tmp_path / "one.npz").plan().total == 40
    with NpzFile.at(tmp_path / "one.npz") as archive, pytest.raises(DataError, match="it holds whatever"):
        archive.array("train")


# ---- Symbols ---------------------------------------------------------------------------------------------------------

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
