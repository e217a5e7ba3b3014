"""A dataset is whole or refused; the embedded digits need nothing but the package."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import bsi.data.digits
from bsi.data.arrays import Arrays
from bsi.data.prepare import prepare
from bsi.data.store import open_dataset
from bsi.errors import DataError
from bsi.io import digest, fingerprint


def test_the_digits_are_the_published_ones() -> None:
    dataset = open_dataset("digits")
    assert (dataset.train.shape, dataset.test.shape, dataset.shape) == ((1498, 1, 8, 8), (299, 1, 8, 8), (1, 8, 8))
    assert (dataset.bins.low, dataset.bins.high, dataset.bins.count) == (-1, 1, 17)
    assert (int(dataset.train.min()), int(dataset.train.max())) == (0, 16)
    assert dataset.labels is not None
    assert dataset.labels.train[:10].tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 0]
    # Row 0 of the published file: the top of a zero.
    assert dataset.train[0, 0, :2].tolist() == [[0, 0, 5, 13, 9, 1, 0, 0], [0, 0, 13, 15, 10, 15, 5, 0]]
    # All values, in the published order: sum of the file's 1797 x 64 pixels.
    assert int(dataset.train.sum(dtype=np.int64) + dataset.test.sum(dtype=np.int64)) == 561718
    assert dataset.version == "5455a655c9a5007260fd929f8f10e56609880969a5a300011e23573c843331ef"


def test_the_digits_carry_their_attribution() -> None:
    text = (Path(bsi.data.digits.__file__).parent / "digits.txt").read_text()
    assert all(part in text for part in ("Alpaydin", "Kaynak", "CC BY 4.0", "scikit-learn"))


def test_the_digits_need_neither_torch_nor_a_data_folder(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom bsi.data.store import open_dataset\n"
        "assert len(open_dataset('digits').train) == 1498\nassert 'torch' not in sys.modules, 'torch was imported'"
    )
    environment = {"BSI_DATA": str(tmp_path / "absent"), "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


def test_both_parts_of_the_digits_hold_all_classes_in_equal_shares() -> None:
    labels = open_dataset("digits").labels
    train, test = (np.bincount(part, minlength=10) / len(part) for part in (labels.train, labels.test))
    assert np.abs(train - test).max() < 4 * np.sqrt(0.1 * 0.9 / 299)


def test_a_manifest_names_its_classes_or_none_and_nonsense_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.arange(50.0), y=np.arange(50) % 2)
    folder = prepare(Arrays(tmp_path / "x.npz").plan(), tmp_path / "x").folder
    assert folder is not None
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest.pop("classes") == []
    for classes in (None, ["a", "b"]):  # manifests written before there were names have none
        path.write_text(json.dumps(manifest if classes is None else {**manifest, "classes": classes}))
        assert open_dataset(folder).labels.names == tuple(classes or ())
    for classes in (3, None, ["a", 3], ["a", ""], ["a", " b"], ["a", "b\x1b[31m"], ["a", "a"]):
        path.write_text(json.dumps({**manifest, "classes": classes}))
        with pytest.raises(DataError):
            open_dataset(folder)


def test_an_unknown_name_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Did you mean 'digits'"):
        open_dataset("digit", root=tmp_path)
    with pytest.raises(DataError, match="bsi data NAME"):
        open_dataset(tmp_path / "nothing")


def test_a_bare_name_means_the_data_folder_whatever_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, count in (("root", 3), ("here", 4)):
        np.save(tmp_path / "x.npy", np.arange(float(count)))
        prepare(Arrays(tmp_path / "x.npy", test_fraction=0.0).plan(), tmp_path / folder / "x")
    monkeypatch.chdir(tmp_path / "here")
    assert len(open_dataset("x", root=tmp_path / "root").train) == 3
    assert len(open_dataset("./x", root=tmp_path / "root").train) == 4
    assert len(open_dataset(Path("x"), root=tmp_path / "root").train) == 4
    assert len(open_dataset("x", root=tmp_path).train) == 4


def test_digests_are_sha256() -> None:
    assert digest([b"ab", b"c"]) == hashlib.sha256(b"abc").hexdigest()
    assert fingerprint({"b": 1, "a": [2]}) == fingerprint(json.loads('{"a": [2], "b": 1}'))
