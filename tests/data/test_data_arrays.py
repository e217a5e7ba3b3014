"""Arrays, text and binary images: every row arrives in order, and errors name what is wrong."""

import gzip
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bsi.data.arrays import Arrays, Text, Wav
from bsi.data.images import Folder
from bsi.data.prepare import Preparation, prepare
from bsi.data.published import Binary, ImageNet32, Mnist
from bsi.data.store import open_dataset
from bsi.errors import DataError, UsageError
from bsi.recipes import text_mini
from bsi.values import Standardize, Symbols
from inputs import CORPUS, noise, rows, save_imagenet, save_mnist, save_wav, saved

# ---- Arrays ----------------------------------------------------------------------------------------------------------

rng = np.random.default_rng(0)


def test_continuous_data_keeps_its_units_and_is_standardized_per_column(tmp_path: Path) -> None:
    """Columns in different units, as in a table: the moments are those of the training split, column by column."""
    data = rng.normal(3.0, 1.0, (3000, 3)) * np.array([1e-6, 1.0, 1e5])
    dataset = prepare(Arrays(saved(tmp_path / "table.npy", data)).plan(), tmp_path / "out")
    assert (dataset.name, dataset.shape, dataset.bins, dataset.train.dtype) == ("out", (3,), None, np.float32)
    assert len(dataset.train) + len(dataset.test) == 3000
    assert abs(len(dataset.test) - 300) < 4 * np.sqrt(3000 * 0.1 * 0.9)
    stored = {row.tobytes() for row in data.astype(np.float32)}
    assert all(row.tobytes() in stored for row in (*dataset.train, *dataset.test))
    assert open_dataset(tmp_path / "out").kind == dataset.kind
    blocks = (rng.normal(size=(30000, 3, 40)) + 1000 * np.arange(3)[:, None]).astype("f4")  # channels, 14 MiB
    many = prepare(Arrays(saved(tmp_path / "x.npy", blocks), test_fraction=0.0).plan(), tmp_path / "blocks")
    for found, axes in ((dataset, 0), (many, (0, 2))):
        train = np.array(found.train, np.float64)
        np.testing.assert_allclose(found.kind.mean, train.mean(axes), rtol=1e-11)
        np.testing.assert_allclose(found.kind.std, train.std(axes), rtol=1e-9)


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


def test_floats_in_0_to_1_only_are_rejected_for_bins_from_minus_1(tmp_path: Path) -> None:
    """As torchvision's ToTensor gives them: rounded, they would be the upper half of the bins."""
    images = rng.random((3000, 1000), np.float32)  # several blocks
    source = Arrays(saved(tmp_path / "images.npy", images), bins=(-1.0, 1.0, 256))
    with pytest.raises(DataError, match=r"--bins 0 1 256, or rescale the data to \[-1, 1\]"):
        source.plan()
    assert Arrays(source.path, bins=(0.0, 1.0, 256)).plan().total == 3000
    images[-1, -1] = -0.5  # data in [-1, 1] after all
    saved(source.path, images)
    assert source.plan().total == 3000


def test_named_splits_and_labels_of_an_archive_are_kept(tmp_path: Path) -> None:
    train, test = rng.normal(size=(30, 4)).astype("f4"), rng.normal(size=(9, 4)).astype("f4")
    np.savez_compressed(tmp_path / "x.npz", train=train, test=test, train_labels=range(30), test_labels=range(9))
    dataset = prepare(Arrays(tmp_path / "x.npz").plan(), tmp_path / "out")
    assert np.array_equal(dataset.train, train)
    assert np.array_equal(dataset.test, test)
    assert dataset.labels.test.tolist() == list(range(9))


@pytest.mark.parametrize(("data", "labels"), [("train", "y"), ("images", "labels"), ("train", "train_labels")])
def test_the_labels_of_a_single_array_have_their_usual_names(tmp_path: Path, data: str, labels: str) -> None:
    np.savez(tmp_path / "x.npz", **{labels: np.arange(500), data: np.arange(500.0)})
    dataset = prepare(Arrays(tmp_path / "x.npz").plan(), tmp_path / "out")
    assert np.array_equal(dataset.train, dataset.labels.train)
    assert np.array_equal(dataset.test, dataset.labels.test)
    assert len(dataset.test) > 50


@pytest.mark.parametrize(
    ("value", "kind", "why"),
    [
        (np.nan, {}, r"row 42 has values that are NaN.* Remove such rows, or repair them\.$"),
        (1e300, {}, r"row 42 .* beyond float32"),
        (1.5, {"bins": (0.0, 1.0, 5)}, r"row 42 has values outside \[0.0, 1.0\]"),
        (-1, {"bins": (0.0, 1.0, 5)}, r"row 42 has integers outside 0 \.\. 4"),
        (5, {"bins": (0.0, 1.0, 5)}, r"row 42 has integers outside 0 \.\. 4"),
        (5, {"symbols": 5}, r"row 42 has integers outside 0 \.\. 4"),
        (0.0, {}, "element or channel 0 of the data is constant"),
        (5, {}, "--bins LOW HIGH COUNT"),
        (5.0, {"symbols": 6}, "astype"),
        (5, {"symbols": 1}, "2 to"),
        (5, {"symbols": 10**6}, "2 to"),
        (5, {"symbols": 6, "bins": (0.0, 1.0, 6)}, "leave one out"),
        (5, {"test_fraction": 1.0}, "test_fraction"),
    ],
)
def test_invalid_rows_are_rejected_by_number(value: float, kind: dict[str, object], why: str, tmp_path: Path) -> None:
    rows = np.zeros((100, 3), type(value))
    rows[42, 1] = value
    with pytest.raises((DataError, UsageError), match=why):
        prepare(Arrays(saved(tmp_path / "x.npy", rows), **kind).plan(), tmp_path / "out")


def test_ambiguous_archives_are_rejected(tmp_path: Path) -> None:
    x, y = np.zeros((4, 2)), np.arange(4)
    for why, arrays in (
        ("name one of them `train`", {"a": x, "b": x}),
        ("name one of them `train`", {"a": x, "b": x, "y": y}),
        ("name one of them `train`", {"x": x, "y": y, "labels": y}),
        ("samples of shape", {"train": x, "test": np.zeros((4, 3))}),
        ("samples are empty", {"x": np.zeros((3, 0))}),
        ("labels for one split only", {"train": x, "test": x, "train_labels": y}),
        ("one integer per sample", {"train": x, "train_labels": y[:3]}),
        ("one integer per sample", {"x": x, "y": x}),
        ("unclear what y belongs to", {"train": x, "test": x, "y": y}),
        ("unclear what labels belongs to", {"train": x, "train_labels": y, "labels": y}),
        ("row 2 is -1, expected labels", {"x": x, "y": np.array([0, 1, -1, 1])}),
        ("row 1 is 2147483648", {"x": x, "y": np.array([0, 2**31, 1, 1])}),
    ):
        np.savez(tmp_path / "x.npz", **arrays)
        with pytest.raises(DataError, match=why):
            Arrays(tmp_path / "x.npz").plan()
    np.savez(tmp_path / "one.npz", whatever=rng.normal(size=(40, 2)))
    assert Arrays(tmp_path / "one.npz").plan().total == 40
    (tmp_path / "x.csv").write_text("1,2")
    with pytest.raises(DataError, match=r"not a \.npy"):
        Arrays(tmp_path / "x.csv").plan()


# ---- Symbols ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1 << 20, 7])
def test_a_text_dataset_holds_the_text_of_its_file(chunk, tmp_path, monkeypatch):
    monkeypatch.setattr("bsi.data.arrays.CHUNK", chunk)  # 7 bytes: characters are cut in two
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


def test_text_without_a_path_is_the_manual_of_python(tmp_path, monkeypatch):
    monkeypatch.setenv("BSI_DATA", str(tmp_path))
    dataset = prepare(Text(length=64).plan(), tmp_path / "text")
    assert len(dataset.train) > 5000
    assert 'The "assert" statement' in dataset.kind.text(dataset.train[:100].reshape(-1))
    assert Text(length=64).plan().name == text_mini().data.name


def test_folders_of_text_are_read_in_order_with_test_data_from_each_file(tmp_path: Path) -> None:
    for name, letter in (("b.txt", "b"), ("a.txt", "a"), ("c.md", "c")):
        (tmp_path / name).write_text(letter * 90 + letter.upper() * 10)
    dataset = prepare(Text(tmp_path, length=5).plan(), tmp_path / "out")
    assert dataset.kind.text(dataset.train.reshape(-1)) == "a" * 90 + "b" * 90
    assert dataset.kind.text(dataset.test.reshape(-1)) == "A" * 10 + "B" * 10
    assert "'A', 'B'" in dataset.manifest.notes[0]  # unknown in training


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
def test_invalid_text_is_rejected_before_anything_is_written(content, options, why, tmp_path):
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
    darker = rows(Binary("digits", threshold=0.25).plan())
    assert np.array_equal(darker, np.concatenate([digits.train, digits.test]) > 4)


def test_a_random_pixel_is_1_with_the_probability_of_its_value() -> None:
    digits = open_dataset("digits")
    drawn = rows(Binary("digits", stochastic=True).plan())
    gray = np.concatenate([digits.train, digits.test])
    for level in (0, 3, 8, 13, 16):
        pixels = drawn[gray == level]
        error = np.sqrt(max(level * (16 - level), 1e-9)) / 16 / np.sqrt(len(pixels))
        assert abs(pixels.mean() - level / 16) <= 5 * error


def test_mnist_is_read_from_compressed_and_plain_files(tmp_path: Path) -> None:
    versions = set()
    for form, names in (("plain", ("-",)), ("packed", (".", ".gz", gzip.compress))):
        arrays = save_mnist(tmp_path / form, *names)
        dataset = prepare(Mnist(tmp_path / form).plan(), tmp_path / f"{form}-out")
        versions.add(dataset.version)
        assert np.array_equal(dataset.train[:, 0], arrays["train-images"])
        assert np.array_equal(dataset.labels.test, arrays["t10k-labels"])
        assert np.array_equal(rows(Binary(str(tmp_path / form)).plan(), 30)[:, 0], arrays["t10k-images"] > 127)
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
    stored = rng.integers(0, 300, (50, 4))
    path = saved(tmp_path / "x.npy", stored)
    dataset = prepare(Arrays(path, symbols=300, test_fraction=0.0).plan(), tmp_path / "out")
    assert (dataset.kind.count, dataset.train.dtype) == (300, np.dtype("<u2"))
    assert np.array_equal(dataset.train, stored)


# ---- Every source ----------------------------------------------------------------------------------------------------


def plan_of(source: str, folder: Path) -> Preparation:
    """A plan with several blocks, or several parts if the source has them."""
    if source == "arrays":
        return Arrays(saved(folder / "x.npy", np.arange(2_500_000.0)), test_fraction=0.3).plan()
    if source == "named splits":
        np.savez_compressed(
            folder / "x.npz", train=np.arange(30.0), test=np.arange(9.0), train_labels=range(30), test_labels=range(9)
        )
        return Arrays(folder / "x.npz").plan()
    if source in ("chars", "bytes"):
        (folder / "a.txt").write_text(CORPUS, "utf-8")
        (folder / "b.txt").write_text(CORPUS[::-1], "utf-8")
        return Text(folder, 16, source).plan()
    if source == "wav":
        for i in range(12):
            save_wav(folder / f"{i}.wav", np.random.default_rng(i).integers(-99, 99, (130 * i + 3, 2)).astype(np.int16))
        return Wav(folder, length=50).plan()
    if source == "folder":
        for i in range(30):
            Image.fromarray(noise(i, 8, 8)).save(folder / f"{i}.png")
        return Folder(folder).plan()
    if source == "imagenet32":
        return ImageNet32(save_imagenet(folder / "batches")).plan()
    if source == "mnist":
        save_mnist(folder / "mnist")
        return Mnist(folder / "mnist").plan()
    return Binary("digits", stochastic=True).plan()


@pytest.mark.parametrize(
    "source", ["arrays", "named splits", "chars", "bytes", "wav", "folder", "imagenet32", "mnist", "binary"]
)
def test_a_source_can_be_read_from_any_item(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted preparation reads only the remaining rows: the same rows, labels and split."""
    monkeypatch.setattr("bsi.data.arrays.BLOCK_BYTES", 1000)
    plan = plan_of(source, tmp_path)

    def read(start: int) -> list[np.ndarray]:
        blocks = list(plan.blocks(start))
        is_test = [np.broadcast_to(block.for_testing, len(block.rows)) for block in blocks]
        labels = [block.labels for block in blocks if block.labels is not None]
        return [np.concatenate([*each, []]) for each in ([rows(plan, start).reshape(-1)], is_test, labels)]

    everything = read(0)
    per_item = len(everything[0]) // plan.total
    assert len(everything[1]) == plan.total
    for start in (1, 7, 31, plan.total - 1, plan.total):
        for found, whole, count in zip(read(start), everything, (per_item, 1, 1), strict=True):
            assert np.array_equal(found, whole[start * count :])
