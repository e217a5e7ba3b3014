"""A dataset is complete or rejected; an interrupted preparation resumes to the same result. Processes are killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bsi.data.arrays import Arrays
from bsi.data.prepare import Block, Part, Preparation, prepare
from bsi.data.store import DIGITS, MANIFEST, Dataset, open_dataset, prepared
from bsi.errors import BsiError, DataError, UsageError
from bsi.io import fingerprint
from bsi.values import Bins

BLOCKS, ROWS = 12, 10


def parts_of(blocks: Callable[[int], Iterator[Block]]) -> list[Part]:
    return [Part(BLOCKS * ROWS, blocks)]


def plan(name: str = "noise", skip: int = 0, **changes: object) -> Preparation:
    """Twelve blocks of ten random images, one in three for testing."""

    def blocks(start: int) -> Iterator[Block]:
        for number in range(start // ROWS, BLOCKS):
            rng = np.random.default_rng(number)
            images = rng.integers(0, 256, (ROWS, 1, 4, 4), dtype=np.uint8)
            yield Block(images, number % 3 == 2, images[:, 0, 0, 0])

    made = Preparation(
        name=name,
        source="noise",
        shape=(1, 4, 4),
        kind=Bins.uint8(),
        options={"size": 4},
        input="seeds",
        parts=parts_of(blocks),
        label_dtype=np.dtype("uint8"),
        skip=skip,
    )
    return replace(made, **changes)


# A process that prepares the dataset above and is killed at the block `strike` or at the function `point`.
STRUCK = """
import os, signal, sys
sys.path[:0] = {path!r}
from dataclasses import replace
from pathlib import Path
from bsi.data import prepare as preparing
from test_data_prepare import parts_of, plan, ROWS

preparing.SYNC_EVERY_S = 0.0
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
whole = plan()

def strike(*_):
    os.kill(os.getpid(), signal.{signal})

def blocks(start):
    print("from", start, flush=True)
    for number, block in enumerate(whole.blocks(start), start // ROWS):
        if number == {strike}:
            strike()
        yield block

if {point!r}:
    setattr(os if {point!r} == "rename" else preparing, {point!r}, strike)
preparing.prepare(replace(whole, parts=parts_of(blocks)), Path({target!r}))
"""


def struck(target: Path, strike: int, name: str, point: str = "") -> subprocess.CompletedProcess[str]:
    path = [str(Path(__file__).parent), *sys.path]
    program = STRUCK.format(path=path, target=str(target), strike=strike, signal=name, point=point)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return prepare(plan(), tmp_path_factory.mktemp("whole") / "noise")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_an_interrupted_preparation_leaves_no_incomplete_dataset_and_resumes(name, whole, tmp_path):
    target = tmp_path / "noise"
    first = struck(target, 3, name)
    assert first.returncode in (-getattr(signal, name), 130), first.stderr
    assert not target.exists()
    assert prepared(tmp_path) == []
    with pytest.raises(DataError, match="no prepared dataset"):
        open_dataset(target)

    second = struck(target, 7, name)
    assert second.stdout == "from 30\n", "finished blocks must not be read again"
    third = struck(target, -1, name)
    assert (third.returncode, third.stdout) == (0, "from 70\n"), third.stderr
    found = open_dataset(target)
    found.verify()
    assert found.version == whole.version
    assert np.array_equal(found.train, whole.train)
    assert sorted(path.name for path in target.iterdir()) == sorted([MANIFEST, *whole.manifest.files])
    assert not (tmp_path / ".noise.partial").exists()


@pytest.mark.parametrize("point", ["header_bytes", "digest_file", "rename"])
def test_a_preparation_killed_in_its_last_step_leaves_no_incomplete_dataset(point, whole, tmp_path):
    target = tmp_path / "noise"
    assert struck(target, -1, "SIGKILL", point).returncode == -signal.SIGKILL
    assert not target.exists()
    assert prepare(plan(), target).version == whole.version


def interrupted(target: Path, at: int, error: BaseException) -> None:
    """Prepare until an error in block `at`."""

    def blocks(start: int) -> Iterator[Block]:
        for number, block in enumerate(plan().blocks(start)):
            if number == at:
                raise error
            yield block

    with pytest.raises((KeyboardInterrupt, BsiError)) as caught:
        prepare(plan(parts=parts_of(blocks)), target)
    if isinstance(error, OSError):
        assert (caught.value.code, "Make room and run the same command again" in str(caught.value)) == (1, True)


def test_a_preparation_that_cannot_be_resumed_starts_again(whole: Dataset, tmp_path: Path) -> None:
    target, partial = tmp_path / "noise", tmp_path / ".noise.partial"
    starts = []

    def blocks(start: int) -> Iterator[Block]:
        starts.append(start)
        return plan().blocks(start)

    def leave_another_preparation() -> None:
        note = json.loads((partial / "state.json").read_text())
        note["note"]["identity"] = "another"
        (partial / "state.json").write_text(json.dumps({**note, "sha256": fingerprint(note["note"])}))

    def flip_a_bit() -> None:
        """One more item would be taken for read."""
        text = (partial / "state.json").read_text()
        assert '"items": 50' in text
        (partial / "state.json").write_text(text.replace('"items": 50', '"items": 51'))

    for damage in (
        leave_another_preparation,
        flip_a_bit,
        lambda: (partial / "state.json").write_text("{"),
        lambda: (partial / "state.json").write_text("[" * 100_000),
        lambda: os.truncate(partial / "train.npy", 300),
    ):
        interrupted(target, 5, KeyboardInterrupt())
        damage()
        assert prepare(plan(parts=parts_of(blocks)), target).version == whole.version
        shutil.rmtree(target)
    assert starts == [0, 0, 0, 0, 0]


def test_a_preparation_resumes_after_a_full_disk(whole: Dataset, tmp_path: Path) -> None:
    interrupted(tmp_path / "noise", 4, OSError(28, "No space left on device"))
    assert json.loads((tmp_path / ".noise.partial" / "state.json").read_text())["note"]["items"] == 40
    assert prepare(plan(), tmp_path / "noise").version == whole.version
    with pytest.raises(BsiError, match=r"needs .* free") as caught:
        prepare(plan(parts=[Part(10**15, plan().blocks)]), tmp_path / "larger")
    assert caught.value.code == 1
    assert not (tmp_path / ".larger.partial").exists()


def test_a_concurrent_preparation_is_rejected(tmp_path: Path) -> None:
    target = tmp_path / "noise"

    def blocks(start: int) -> Iterator[Block]:
        with pytest.raises(DataError, match="another process is preparing"):
            prepare(plan(), target)
        return plan().blocks(start)

    assert len(prepare(plan(parts=parts_of(blocks)), target).train) == 80


def test_the_same_command_reuses_a_dataset_and_other_options_are_rejected(whole, tmp_path):
    assert prepare(plan(), whole.folder).version == whole.version
    with pytest.raises(UsageError, match=r"from other files, or before they changed and .*size: 4 there, 8 requested"):
        prepare(plan(options={"size": 8}, input="other seeds"), whole.folder)
    with pytest.raises(ValueError, match="read-only"):
        whole.train[0] = 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="is not a prepared dataset"):
        prepare(plan(), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "precious"


def test_the_version_of_a_dataset_depends_on_content_and_meaning(whole: Dataset, tmp_path: Path) -> None:
    """The trainer compares versions: equal for equal data in any folder, different after any change."""
    assert prepare(plan("renamed"), tmp_path / "renamed").version == whole.version

    def changed(start: int) -> Iterator[Block]:
        for block in plan().blocks(start):
            rows = block.rows.copy()
            rows[0, 0, 0, 0] ^= 1
            yield replace(block, rows=rows)

    versions = {
        whole.version,
        prepare(plan(parts=parts_of(changed)), tmp_path / "changed").version,
        prepare(plan(kind=replace(Bins.uint8(), low=0.0)), tmp_path / "bins").version,
        prepare(plan(label_dtype=None), tmp_path / "unlabeled").version,
    }
    assert len(versions) == 4


@pytest.mark.parametrize("name", ["train.npy", "test_labels.npy"])
def test_a_damaged_file_is_rejected_with_both_hashes(name: str, whole: Dataset, tmp_path: Path) -> None:
    folder = tmp_path / "noise"
    shutil.copytree(whole.folder, folder)
    raw = (folder / name).read_bytes()
    (folder / name).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    open_dataset(folder)
    sha256 = whole.manifest.files[name].sha256
    with pytest.raises(DataError, match=f"{name} is damaged: expected sha256 {sha256}, found"):
        open_dataset(folder).verify()
    (folder / name).write_bytes(raw[:-1])
    with pytest.raises(
        DataError, match=rf"{name} is .* damaged: it has {len(raw) - 1} bytes, expected {len(raw)} bytes"
    ):
        open_dataset(folder)
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        open_dataset(folder)


def test_a_changed_manifest_is_rejected(whole: Dataset, tmp_path: Path) -> None:
    folder = tmp_path / "noise"
    shutil.copytree(whole.folder, folder)
    good = json.loads((folder / MANIFEST).read_text())
    changes = [
        {"format": 99},
        {"files": {**good["files"], "../../etc/passwd": {"bytes": 1, "sha256": ""}}},
        {"bins": {"low": 0.0, "high": 1.0, "count": 256}},
        {"shape": [1, 16]},
        {"counts": {"train": "many", "test": 1}},
        {"dtype": "nonsense"},
        {"standardize": [1, 2]},
        {"version": "0" * 64},
        *({"classes": names} for names in (3, None, ["a", 3], ["a", ""], ["a", " b"], ["a", "b\x1b[31m"], ["a", "a"])),
    ]
    texts = [json.dumps({**good, **change}).encode() for change in changes]
    for text in (*texts, b"", b"[]", b"{}", b"null", b"\xff\xfe", b"[" * 100_000):
        (folder / MANIFEST).write_bytes(text)
        with pytest.raises(DataError, match="not a valid manifest"):
            open_dataset(folder)
    del good["classes"]  # as in manifests written before classes had names
    for classes in ({}, {"classes": ["a", "b"]}):
        (folder / MANIFEST).write_text(json.dumps({**good, **classes}))
        assert open_dataset(folder).labels.names == tuple(classes.get("classes", ()))


def test_datasets_are_found_by_folder_name_or_content(whole, tmp_path, monkeypatch):
    monkeypatch.setenv("BSI_DATA", str(tmp_path))
    prepare(plan("photos"), tmp_path / "photos28")
    assert [open_dataset(folder).name for folder in prepared()] == ["photos28"]
    assert open_dataset("photos28").version == whole.version
    with pytest.raises(DataError, match="no prepared dataset 'photos'"):
        open_dataset("photos")
    (tmp_path / "photos28").rename(tmp_path / "renamed")
    found = open_dataset("photos28", version=whole.version)
    assert (found.name, len(found.train)) == ("renamed", 80)
    other = prepare(plan(kind=replace(Bins.uint8(), low=0.0)), tmp_path / "photos28")
    assert open_dataset("photos28", version=whole.version).name == "renamed", "it has other content"
    assert open_dataset("photos28", version=other.version).name == "photos28"
    assert open_dataset("photos28", version="0" * 64).name == "photos28"


def test_opening_an_empty_split_raises(tmp_path: Path) -> None:
    def blocks(start: int) -> Iterator[Block]:
        return (replace(block, labels=None) for block in plan().blocks(start) if not block.for_testing)

    dataset = prepare(plan(parts=parts_of(blocks), label_dtype=None), tmp_path / "noise")
    assert dataset.test.shape == (0, 1, 4, 4)
    assert dataset.split("train") is dataset.train
    with pytest.raises(DataError, match="no test samples"):
        dataset.split("test")
    with pytest.raises(UsageError, match="splits train and test"):
        dataset.split("validation")
    with pytest.raises(DataError, match="no training samples"):
        prepare(plan(parts=[]), tmp_path / "empty")


def test_the_digits_are_the_published_ones() -> None:
    dataset = open_dataset("digits")
    assert (dataset.train.shape, dataset.test.shape, dataset.shape) == ((1498, 1, 8, 8), (299, 1, 8, 8), (1, 8, 8))
    assert (dataset.bins.low, dataset.bins.high, dataset.bins.count) == (-1, 1, 17)
    assert (int(dataset.train.min()), int(dataset.train.max())) == (0, 16)
    train, test = (np.bincount(part, minlength=10) / len(part) for part in (dataset.labels.train, dataset.labels.test))
    assert np.abs(train - test).max() < 4 * np.sqrt(0.1 * 0.9 / 299)
    text = (DIGITS / "ORIGIN.txt").read_text()
    assert all(part in text for part in ("Alpaydin", "Kaynak", "CC BY 4.0", "scikit-learn"))
    # Row 0 of the published file: the top of a zero.
    assert dataset.train[0, 0, :2].tolist() == [[0, 0, 5, 13, 9, 1, 0, 0], [0, 0, 13, 15, 10, 15, 5, 0]]
    # All values, in the published order: sum of the file's 1797 x 64 pixels.
    assert int(dataset.train.sum(dtype=np.int64) + dataset.test.sum(dtype=np.int64)) == 561718
    assert dataset.version == "5455a655c9a5007260fd929f8f10e56609880969a5a300011e23573c843331ef"


def test_a_name_without_a_folder_refers_to_the_data_folder(tmp_path, monkeypatch):
    for folder, count in (("root", 3), ("here", 4)):
        np.save(tmp_path / "x.npy", np.arange(float(count)))
        prepare(Arrays(tmp_path / "x.npy", test_fraction=0.0).plan(), tmp_path / folder / "x")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("BSI_DATA", str(tmp_path / "root"))
    assert [len(open_dataset(name).train) for name in ("x", "./x", Path("x"))] == [3, 4, 4]
    monkeypatch.setenv("BSI_DATA", str(tmp_path))
    assert len(open_dataset("x").train) == 4
    for name, why in (("digit", "Did you mean 'digits'"), (tmp_path / "nothing", "bsi data NAME")):
        with pytest.raises(DataError, match=why):
            open_dataset(name)
