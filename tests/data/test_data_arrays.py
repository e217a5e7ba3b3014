"""Arrays of any shape are read from their header first: nothing is believed, nothing is loaded whole, no code runs."""

import io
import os
import pickle
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bsi.data import npy
from bsi.data.arrays import Arrays
from bsi.data.imagenet import BATCHES, ImageNet32, ImageNet64
from bsi.data.npy import ArrayFile, NpzFile, header_bytes
from bsi.data.prepare import prepare
from bsi.errors import DataError, UsageError

rng = np.random.default_rng(0)


def saved(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


@settings(max_examples=50, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    dtype=st.sampled_from(["u1", "<u2", ">i4", "<f4", ">f8", "?", "<f2"]),
    start=st.integers(0, 5),
    block=st.integers(1, 300),
)
def test_streamed_rows_are_those_of_numpy(shape: list[int], dtype: str, start: int, block: int) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    stream = io.BytesIO()
    np.save(stream, array)
    stream.seek(0)
    start = min(start, len(array))
    with ArrayFile(stream, len(stream.getvalue()), "x") as file:
        blocks = list(file.blocks(start, block))
    assert np.array_equal(np.concatenate([array[:0], *blocks]), array[start:])


@settings(max_examples=50, deadline=None)
@given(shape=st.lists(st.integers(0, 10**6), min_size=1, max_size=6), dtype=st.sampled_from(["u1", "<u2", "<f4"]))
def test_our_headers_are_numpys(shape: list[int], dtype: str) -> None:
    raw = io.BytesIO(header_bytes(np.dtype(dtype), tuple(shape)))
    assert len(raw.getvalue()) == npy.HEADER_BYTES
    assert np.lib.format.read_magic(raw) == (1, 0)
    assert np.lib.format.read_array_header_1_0(raw) == (tuple(shape), False, np.dtype(dtype))


def test_continuous_data_keeps_its_units_and_its_standardization_is_that_of_the_training_part(tmp_path: Path) -> None:
    data = rng.normal(170.0, 8.0, (3000, 2, 3))
    dataset = prepare(Arrays(saved(tmp_path / "heights.npy", data)).plan(), tmp_path / "out")
    assert (dataset.name, dataset.shape, dataset.bins, dataset.train.dtype) == ("heights", (2, 3), None, np.float32)
    assert len(dataset.train) + len(dataset.test) == 3000
    assert abs(len(dataset.test) - 300) < 4 * np.sqrt(3000 * 0.1 * 0.9)
    train = np.array(dataset.train, np.float64)
    assert dataset.standardize.mean == pytest.approx(train.mean(), rel=1e-12)
    assert dataset.standardize.std == pytest.approx(train.std(), rel=1e-12)
    rows = {row.tobytes() for row in data.astype(np.float32)}
    assert all(row.tobytes() in rows for row in (*dataset.train, *dataset.test))


def test_standardization_over_many_blocks_is_that_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bsi.data.npy.BLOCK_BYTES", 100)
    data = rng.normal(1000.0, 0.5, 997).astype(np.float32)
    dataset = prepare(Arrays(saved(tmp_path / "x.npy", data), test_fraction=0.0).plan(), tmp_path / "out")
    assert dataset.shape == ()
    assert dataset.standardize.mean == pytest.approx(data.astype(np.float64).mean(), rel=1e-13)
    assert dataset.standardize.std == pytest.approx(data.astype(np.float64).std(), rel=1e-9)


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
    labels = {"train_labels": np.arange(30), "test_labels": np.arange(9) + 100}
    for save in (np.savez, np.savez_compressed):
        path = tmp_path / f"{save.__name__}.npz"
        save(path, train=train, test=test, **labels)
        plan = Arrays(path).plan()
        dataset = prepare(plan, tmp_path / save.__name__)
        assert np.array_equal(dataset.train, train)
        assert np.array_equal(dataset.test, test)
        assert dataset.labels.test.tolist() == labels["test_labels"].tolist()
        rest = list(plan.blocks(33))
        assert sum(block.items for block in rest) == 6
        assert np.array_equal(np.concatenate([block.rows["test"] for block in rest]), test[3:])


def test_labels_follow_their_samples_through_a_split_by_hash(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", train=np.arange(500.0), train_labels=np.arange(500))
    dataset = prepare(Arrays(tmp_path / "x.npz", test_fraction=0.3).plan(), tmp_path / "out")
    assert np.array_equal(dataset.train, dataset.labels.train)
    assert np.array_equal(dataset.test, dataset.labels.test)


@pytest.mark.parametrize(("data", "labels"), [("train", "y"), ("images", "labels"), ("x", "y"), ("arr_0", "labels")])
def test_the_labels_of_a_single_array_have_their_usual_names(tmp_path: Path, data: str, labels: str) -> None:
    np.savez(tmp_path / "x.npz", **{labels: np.arange(500), data: np.arange(500.0)})
    dataset = prepare(Arrays(tmp_path / "x.npz").plan(), tmp_path / "out")
    assert np.array_equal(dataset.train, dataset.labels.train)
    assert np.array_equal(dataset.test, dataset.labels.test)
    np.savez(tmp_path / "alone.npz", **{labels: np.arange(500.0)})
    assert prepare(Arrays(tmp_path / "alone.npz").plan(), tmp_path / "alone").labels is None
    assert len(dataset.test) > 50


def test_the_split_does_not_depend_on_how_the_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Arrays(saved(tmp_path / "x.npy", np.arange(500.0)), test_fraction=0.3).plan()
    whole = prepare(plan, tmp_path / "whole")
    monkeypatch.setattr("bsi.data.npy.BLOCK_BYTES", 8 * 7)
    assert prepare(plan, tmp_path / "pieces").version == whole.version
    rest = np.concatenate([block.rows["test"] for block in plan.blocks(123)])
    assert np.array_equal(rest, whole.test[whole.test >= 123])


def bad_npz(path: Path) -> Path:
    """An archive whose array claims a terabyte that its member does not have."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("train.npy", header_bytes(np.dtype("<f4"), (1 << 28, 1 << 10)))
    return path


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_row_26_object_arrays_and_headers_that_claim_a_terabyte_are_refused_before_memory_is_taken(
    tmp_path: Path,
) -> None:
    canary = tmp_path / "canary"
    objects = np.empty(1, object)
    objects[0] = Canary(canary)
    np.save(tmp_path / "objects.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "objects.npz", train=objects)
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps(Canary(canary)))
    (tmp_path / "terabyte.npy").write_bytes(header_bytes(np.dtype("<f4"), (1 << 28, 1 << 10)))
    (tmp_path / "negative.npy").write_bytes(header_bytes(np.dtype("<f4"), (-1, 4)))
    (tmp_path / "header.npy").write_bytes(b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 100)
    (tmp_path / "deep.npy").write_bytes(b"\x93NUMPY\x01\x00" + (4000).to_bytes(2, "little") + b"(" * 4000)
    np.save(tmp_path / "named.npy", np.zeros(3, [("a", "f4"), ("b", "O")]), allow_pickle=True)
    bad_npz(tmp_path / "terabyte.npz")
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train.npy", header_bytes(np.dtype("u1"), (80 << 20,)) + bytes(80 << 20))
    cases = {
        "objects.npy": "Python objects",
        "objects.npz": "Python objects",
        "pickle.npy": "not a .npy file",
        "terabyte.npy": "claims .* but holds 256 bytes",
        "terabyte.npz": "claims .* but holds 256 bytes",
        "negative.npy": "claims",
        "header.npy": "claims a header of 4294967295 bytes",
        "deep.npy": "header that does not parse",
        "named.npy": "Python objects",
        "bomb.npz": "decompression bomb",
    }
    for name, why in cases.items():
        tracemalloc.start()
        with pytest.raises(DataError, match=f"{name}.*{why}"):
            Arrays(tmp_path / name).plan()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 8 << 20, f"{name} took {peak} bytes"
    assert not canary.exists()


def test_what_is_not_data_is_refused_by_name_and_row(tmp_path: Path) -> None:
    bad = np.zeros((100, 3))
    bad[42, 1] = np.nan
    with pytest.raises(DataError, match=r"row 42 has values that are NaN.* Remove such rows, or repair them\.$"):
        prepare(Arrays(saved(tmp_path / "nan.npy", bad)).plan(), tmp_path / "nan")
    bad[42, 1] = 1e300
    with pytest.raises(DataError, match=r"row 42 .* beyond float32"):
        prepare(Arrays(saved(tmp_path / "large.npy", bad)).plan(), tmp_path / "large")
    bad[42, 1] = 1.5
    with pytest.raises(DataError, match=r"row 42 has values outside \[0.0, 1.0\]"):
        prepare(Arrays(saved(tmp_path / "out.npy", bad), bins=(0.0, 1.0, 5)).plan(), tmp_path / "out")
    for number, wrong in enumerate((-1, 5)):
        index = np.zeros((100, 3), int)
        index[7, 2] = wrong
        source = Arrays(saved(tmp_path / f"{number}.npy", index), bins=(0.0, 1.0, 5))
        with pytest.raises(DataError, match=r"row 7 has integers outside 0 \.\. 4"):
            prepare(source.plan(), tmp_path / str(number))
    with pytest.raises(UsageError, match="--bins LOW HIGH COUNT"):
        Arrays(saved(tmp_path / "int.npy", index)).plan()
    with pytest.raises(DataError, match="Subtract a constant"):
        prepare(Arrays(saved(tmp_path / "const.npy", np.ones((50, 2)))).plan(), tmp_path / "const")
    with pytest.raises(DataError, match="ascontiguousarray"):
        Arrays(saved(tmp_path / "fortran.npy", np.asfortranarray(np.zeros((3, 4))))).plan()
    with pytest.raises(DataError, match="single number"):
        Arrays(saved(tmp_path / "scalar.npy", np.array(3.0))).plan()
    with pytest.raises(DataError, match="samples are empty"):
        Arrays(saved(tmp_path / "empty.npy", np.zeros((3, 0)))).plan()
    with pytest.raises(DataError, match="expected integers or real floats"):
        Arrays(saved(tmp_path / "complex.npy", np.zeros(3, complex))).plan()
    with pytest.raises(UsageError, match=r"lies in \[0, 1\)"):
        Arrays(tmp_path / "const.npy", test_fraction=1.0).plan()
    (tmp_path / "x.csv").write_text("1,2")
    for path in (tmp_path / "x.csv", tmp_path / "nothing.npy"):
        with pytest.raises(DataError, match=r"\.npy"):
            Arrays(path).plan()


def test_archives_that_leave_the_split_unclear_are_refused(tmp_path: Path) -> None:
    def refused(why: str, **arrays: np.ndarray) -> None:
        np.savez(tmp_path / "x.npz", **arrays)
        with pytest.raises(DataError, match=why):
            Arrays(tmp_path / "x.npz").plan()

    x = np.zeros((4, 2))
    refused("name one of them `train`", a=x, b=x)
    refused("samples of shape", train=x, test=np.zeros((4, 3)))
    refused("labels for one split only", train=x, test=x, train_labels=np.arange(4))
    refused("one integer per train sample", train=x, train_labels=np.arange(3))
    refused("one integer per train sample", x=x, y=x)
    refused("name one of them `train`", a=x, b=x, y=np.arange(4))
    refused("name one of them `train`", x=x, y=np.arange(4), labels=np.arange(4))
    refused("not clear what y labels", train=x, test=x, y=np.arange(4))
    refused("not clear what labels labels", train=x, train_labels=np.arange(4), labels=np.arange(4))
    refused("row 2 is -1. Labels count from 0", x=x, y=np.array([0, 1, -1, 1]))
    refused("row 1 is 2147483648. Labels count from 0", x=x, y=np.array([0, 2**31, 1, 1]))
    np.savez(tmp_path / "one.npz", whatever=rng.normal(size=(40, 2)))
    assert Arrays(tmp_path / "one.npz").plan().total == 40
    with NpzFile.at(tmp_path / "one.npz") as archive, pytest.raises(DataError, match="it holds whatever"):
        archive.array("train")


def test_a_truncated_member_is_found_while_it_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", np.zeros((100, 1000)))
    with ArrayFile.at(path) as array:
        os.truncate(path, 100_000)
        with pytest.raises(DataError, match="truncated"):
            list(array.blocks(0, 8000))


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Batches of a few images in the official format."""
    folder = tmp_path_factory.mktemp("imagenet32")
    for number, name in enumerate(BATCHES):
        generator = np.random.default_rng(number)
        count = 3 + number
        images = generator.integers(0, 256, (count, 3072), dtype=np.uint8)
        labels = generator.integers(1, 1001, count)
        mean = images.mean(0) if name.startswith("train") else {}
        np.savez(folder / name, data=images, labels=labels, **({"mean": mean} if len(mean) else {}))
    return folder


def test_imagenet_is_the_same_from_batches_and_from_their_zips(imagenet: Path, tmp_path: Path) -> None:
    with np.load(imagenet / "train_data_batch_2.npz") as batch:
        images, labels = batch["data"], batch["labels"]
    dataset = prepare(ImageNet32(imagenet).plan(), tmp_path / "a")
    assert (dataset.name, dataset.shape) == ("imagenet32", (3, 32, 32))
    assert (len(dataset.train), len(dataset.test)) == (sum(range(3, 13)), 13)
    assert np.array_equal(dataset.train[3:7].reshape(4, -1), images)
    assert np.array_equal(dataset.labels.train[3:7], labels - 1)
    zips = tmp_path / "zips"
    zips.mkdir()
    for name, wanted in (("Imagenet32_train_npz.zip", BATCHES[:-1]), ("Imagenet32_val_npz.zip", BATCHES[-1:])):
        with zipfile.ZipFile(zips / name, "w", zipfile.ZIP_DEFLATED) as archive:
            for batch_name in wanted:
                archive.write(imagenet / batch_name, f"Imagenet32/{batch_name}")
    assert prepare(ImageNet32(zips).plan(), tmp_path / "b").version == dataset.version


def test_imagenet_blocks_can_begin_anywhere(imagenet: Path) -> None:
    plan = ImageNet32(imagenet).plan()
    whole = np.concatenate([rows for block in plan.blocks(0) for rows in block.rows.values()])
    for start in (1, 3, 20, plan.total - 1, plan.total):
        rest = [rows for block in plan.blocks(start) for rows in block.rows.values()]
        assert np.array_equal(np.concatenate([whole[:0], *rest]), whole[start:])


def test_imagenet_of_another_size_or_format_is_refused(imagenet: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected \(N, 12288\) of uint8"):
        ImageNet64(imagenet).plan()
    (tmp_path / "train_data_batch_1").write_bytes(b"pickle")
    with pytest.raises(DataError, match=r"pickled version, which is never loaded"):
        ImageNet32(tmp_path).plan()
    for name in BATCHES:
        np.savez(tmp_path / name, data=np.zeros((2, 3072), np.uint8), labels=np.zeros(2, int))
    with pytest.raises(DataError, match="labels from 0 to 0; expected 1 to 1000"):
        prepare(ImageNet32(tmp_path).plan(), tmp_path / "out")
