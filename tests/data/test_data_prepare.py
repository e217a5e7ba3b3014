"""There is never half a dataset; an interrupted preparation goes on to the same result. Real processes are killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bsi.data.digits import EmbeddedDigits
from bsi.data.prepare import Block, Plan, prepare
from bsi.data.store import MANIFEST, Dataset, open_dataset, prepared
from bsi.errors import BsiError, DataError, UsageError
from bsi.values import Bins

BLOCKS, ROWS = 12, 10


def plan(name: str = "noise", skip: int = 0, **changes: object) -> Plan:
    """Twelve blocks of ten random images, one in three for testing."""

    def blocks(start: int) -> Iterator[Block]:
        for number in range(start // ROWS, BLOCKS):
            rng = np.random.default_rng(number)
            images = rng.integers(0, 256, (ROWS, 1, 4, 4), dtype=np.uint8)
            split = "test" if number % 3 == 2 else "train"
            yield Block(ROWS, {split: images}, {split: images[:, 0, 0, 0]})

    total = BLOCKS * ROWS
    made = Plan(
        name=name,
        source="noise",
        shape=(1, 4, 4),
        dtype=np.dtype("uint8"),
        bins=Bins.uint8(),
        options={"size": 4},
        input="seeds",
        total=total,
        rows=total,
        unit="image",
        blocks=blocks,
        label_dtype=np.dtype("uint8"),
        skip=skip,
    )
    return replace(made, **changes)


# A process that prepares the dataset above and is struck when it asks for the block `strike` or calls `point`.
STRUCK = """
import os, signal, sys
sys.path[:0] = {path!r}
from dataclasses import replace
from pathlib import Path
from bsi.data import prepare as preparing
from test_data_prepare import plan, ROWS

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
preparing.prepare(replace(whole, blocks=blocks), Path({target!r}))
"""


def struck(target: Path, strike: int, name: str, point: str = "") -> subprocess.CompletedProcess[str]:
    path = [str(Path(__file__).parent), *sys.path]
    program = STRUCK.format(path=path, target=str(target), strike=strike, signal=name, point=point)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return prepare(plan(), tmp_path_factory.mktemp("whole") / "noise")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_row_21_a_struck_preparation_leaves_no_half_dataset_and_goes_on(
    name: str, whole: Dataset, tmp_path: Path
) -> None:
    target = tmp_path / "noise"
    first = struck(target, 3, name)
    assert first.returncode in (-getattr(signal, name), 130), first.stderr
    assert not target.exists()
    assert prepared(tmp_path) == []
    with pytest.raises(DataError, match="no prepared dataset"):
        open_dataset(target)

    second = struck(target, 7, name)
    assert second.stdout == "from 30\n", "what was read before must not be read again"
    third = struck(target, -1, name)
    assert (third.returncode, third.stdout) == (0, "from 70\n"), third.stderr
    found = open_dataset(target, check_hashes=True)
    assert found.version == whole.version
    assert np.array_equal(found.train, whole.train)
    assert sorted(path.name for path in target.iterdir()) == sorted([MANIFEST, *whole.manifest.files])
    assert not (tmp_path / ".noise.partial").exists()


@pytest.mark.parametrize("point", ["header_bytes", "digest_file", "rename"])
def test_row_21_a_preparation_killed_while_it_finishes_leaves_no_half_dataset(
    point: str, whole: Dataset, tmp_path: Path
) -> None:
    target = tmp_path / "noise"
    assert struck(target, -1, "SIGKILL", point).returncode == -signal.SIGKILL
    assert not target.exists()
    assert prepare(plan(), target).version == whole.version


def test_leftovers_of_another_preparation_are_not_mixed_in(whole: Dataset, tmp_path: Path) -> None:
    target = tmp_path / "noise"
    struck(target, 5, "SIGKILL")
    assert (tmp_path / ".noise.partial" / "state.json").exists()
    other = plan(input="other seeds")
    started = []

    def blocks(start: int) -> Iterator[Block]:
        started.append(start)
        return other.blocks(start)

    prepare(replace(other, blocks=blocks), target)
    assert started == [0]


def test_a_damaged_note_or_a_short_file_starts_afresh(whole: Dataset, tmp_path: Path) -> None:
    target, partial = tmp_path / "noise", tmp_path / ".noise.partial"
    struck(target, 5, "SIGKILL")
    (partial / "state.json").write_text("{")
    assert prepare(plan(), target).version == whole.version
    shutil.rmtree(target)
    struck(target, 5, "SIGKILL")
    os.truncate(partial / "train.npy", 300)
    assert prepare(plan(), target).version == whole.version


def test_a_second_preparation_at_the_same_time_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "noise"

    def blocks(start: int) -> Iterator[Block]:
        with pytest.raises(DataError, match="another process is preparing"):
            prepare(plan(), target)
        return plan().blocks(start)

    assert len(prepare(plan(blocks=blocks), target).train) == 80


def test_the_same_command_again_opens_what_is_there_and_other_options_are_refused(whole: Dataset) -> None:
    folder = whole.folder
    assert prepare(plan(), folder).version == whole.version
    with pytest.raises(UsageError, match="size: 4 there, 8 asked for"):
        prepare(plan(options={"size": 8}), folder)
    with pytest.raises(UsageError, match="'noise', whose files have changed since, made with other options"):
        prepare(plan(options={"size": 8}, input="other seeds"), folder)


def test_files_that_have_changed_are_said_to_have_without_a_hash(whole: Dataset) -> None:
    with pytest.raises(UsageError) as caught:
        prepare(plan(input=64 * "a"), whole.folder)
    told = "already holds dataset 'noise', whose files have changed since. Give another folder with --to, or delete"
    assert str(caught.value) == f"{whole.folder} {told} that one."


def test_a_folder_that_is_not_a_dataset_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="is not a prepared dataset"):
        prepare(plan(), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "precious"


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(BsiError, match=r"needs 14901161\.2 GiB, but .* free") as caught:
        prepare(plan(rows=10**15), tmp_path / "noise")
    assert caught.value.code == 1
    assert not (tmp_path / ".noise.partial").exists()


def test_a_full_disk_is_reported_and_the_preparation_goes_on_later(whole: Dataset, tmp_path: Path) -> None:
    def blocks(start: int) -> Iterator[Block]:
        for number, block in enumerate(plan().blocks(start)):
            if number == 4:
                raise OSError(28, "No space left on device")
            yield block

    with pytest.raises(BsiError, match=r"noise: No space.*\. Make room and run the same command again") as caught:
        prepare(plan(blocks=blocks), tmp_path / "noise")
    assert caught.value.code == 1
    note = json.loads((tmp_path / ".noise.partial" / "state.json").read_text())
    assert note["items"] == 40
    assert prepare(plan(), tmp_path / "noise").version == whole.version


def test_the_embedded_digits_and_a_prepared_copy_are_one_dataset(tmp_path: Path) -> None:
    copy, embedded = prepare(EmbeddedDigits().plan(), tmp_path / "digits"), open_dataset("digits")
    assert copy.version == embedded.version
    assert np.array_equal(copy.train, embedded.train)
    assert np.array_equal(copy.labels.test, embedded.labels.test)
    assert isinstance(copy.train, np.memmap)


def test_row_22_the_version_names_the_content_and_its_meaning(whole: Dataset, tmp_path: Path) -> None:
    """The trainer compares versions: equal for equal data wherever it lies, different after any change of it."""
    assert prepare(plan("renamed"), tmp_path / "renamed").version == whole.version

    def changed(start: int) -> Iterator[Block]:
        for block in plan().blocks(start):
            rows = {split: images.copy() for split, images in block.rows.items()}
            next(iter(rows.values()))[0, 0, 0, 0] ^= 1
            yield replace(block, rows=rows)

    versions = {
        whole.version,
        prepare(plan(blocks=changed), tmp_path / "changed").version,
        prepare(plan(bins=replace(Bins.uint8(), low=0.0)), tmp_path / "bins").version,
        prepare(plan(label_dtype=None), tmp_path / "unlabeled").version,
    }
    assert len(versions) == 4


@pytest.mark.parametrize("name", ["train.npy", "test.npy", "test_labels.npy"])
def test_a_damaged_file_is_refused_with_both_hashes(name: str, whole: Dataset, tmp_path: Path) -> None:
    folder = tmp_path / "noise"
    shutil.copytree(whole.folder, folder)
    raw = bytearray((folder / name).read_bytes())
    raw[-1] ^= 1
    (folder / name).write_bytes(raw)
    open_dataset(folder)
    with pytest.raises(
        DataError, match=f"{name} is damaged: expected sha256 {whole.manifest.files[name].sha256}, found"
    ):
        open_dataset(folder, check_hashes=True)
    (folder / name).write_bytes(raw[:-1])
    with pytest.raises(DataError, match=rf"{name} has {len(raw) - 1} bytes, expected {len(raw)} bytes"):
        open_dataset(folder)
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        open_dataset(folder)


def test_a_manifest_that_was_changed_is_refused(whole: Dataset, tmp_path: Path) -> None:
    folder = tmp_path / "noise"
    shutil.copytree(whole.folder, folder)
    good = json.loads((folder / MANIFEST).read_text())
    changes = {
        "format": 99,
        "files": {**good["files"], "../../etc/passwd": {"bytes": 1, "sha256": ""}},
        "bins": {"low": 0.0, "high": 1.0, "count": 256},
        "shape": [1, 16],
        "counts": {"train": "many", "test": 1},
        "version": "0" * 64,
    }
    for key, value in changes.items():
        (folder / MANIFEST).write_text(json.dumps({**good, key: value}))
        with pytest.raises(DataError, match="again"):
            open_dataset(folder)
    for text in (b"", b"[]", b"{}", b"null", b"\xff\xfe", b"[" * 100_000):
        (folder / MANIFEST).write_bytes(text)
        with pytest.raises(DataError, match=r"not a dataset's manifest: .* Delete its folder"):
            open_dataset(folder)


def test_arrays_are_read_only(whole: Dataset) -> None:
    with pytest.raises(ValueError, match="read-only"):
        whole.train[0] = 0


def test_a_split_without_samples_is_refused_when_asked_for(tmp_path: Path) -> None:
    def blocks(start: int) -> Iterator[Block]:
        return (replace(block, labels={}) for block in plan().blocks(start) if "train" in block.rows)

    dataset = prepare(plan(blocks=blocks, label_dtype=None), tmp_path / "noise")
    assert dataset.test.shape == (0, 1, 4, 4)
    assert dataset.split("train") is dataset.train
    with pytest.raises(DataError, match="no test samples"):
        dataset.split("test")
    with pytest.raises(UsageError, match="splits train and test"):
        dataset.split("validation")
    with pytest.raises(DataError, match="no training samples"):
        prepare(plan(blocks=lambda _: iter([])), tmp_path / "empty")
