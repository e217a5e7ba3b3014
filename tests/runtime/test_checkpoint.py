"""Checkpoints on disk, as found after the process that wrote them was killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bsi.errors import BsiError, CorruptCheckpoint, UsageError
from bsi.recipe import Keep
from bsi.runtime import checkpoint
from bsi.runtime.checkpoint import Saver, Snapshot


def snapshot(step: int) -> Snapshot:
    tensors = {name: {"a": torch.full((3,), float(step)), "b/c": torch.ones(())} for name in ("model", "ema")}
    return Snapshot(step, tensors, {"recipe": {}, "note": "ü"})


def rewrite_manifest(folder: Path, **files: dict[str, object]) -> None:
    """Change the manifest's table of files, with hashes that fit."""
    table = {"format": 1, "files": json.loads((folder / "manifest.json").read_text())["files"] | files}
    text = checkpoint.canonical_json({**table, "sha256": checkpoint.fingerprint(table)})
    (folder / "manifest.json").write_text(text)


def found(root: Path, warn: Callable[[str], object] = pytest.fail) -> checkpoint.Checkpoint:
    """The checkpoint to resume from, by default without a warning."""
    there = checkpoint.find(root, warn)
    assert there is not None
    return there


def test_a_saved_checkpoint_is_found_and_read(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, snapshot(7), Keep())
    there = found(tmp_path)
    assert (there.step, there.state["note"]) == (7, "ü")
    assert torch.equal(checkpoint.read_tensors(there, "ema")["a"], torch.full((3,), 7.0))


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert checkpoint.find(tmp_path / "nothing", pytest.fail) is None


def test_a_run_without_its_checkpoints_does_not_restart_silently(tmp_path: Path) -> None:
    shutil.rmtree(checkpoint.save(tmp_path, snapshot(3), Keep()))
    with pytest.raises(CorruptCheckpoint, match="names a checkpoint, but there is none"):
        checkpoint.find(tmp_path, print)


def test_the_latest_checkpoints_and_milestones_are_kept(tmp_path: Path) -> None:
    for step in range(1, 11):
        checkpoint.save(tmp_path, snapshot(step), Keep(last=2, every=4))
    assert sorted(int(path.name[5:]) for path in tmp_path.glob("step-*")) == [4, 8, 9, 10]
    assert not list(tmp_path.glob(".*"))


def test_pruning_after_a_fallback_keeps_newer_damaged_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, snapshot(step), Keep(last=3))
    (tmp_path / "step-00000003" / "model.safetensors").write_bytes(b"")
    warnings: list[str] = []
    assert found(tmp_path, warnings.append).step == 2
    assert "DAMAGED" in warnings[0]
    checkpoint.save(tmp_path, snapshot(3), Keep(last=3))
    assert found(tmp_path).step == 3


def test_a_run_without_a_valid_checkpoint_reports_what_to_do(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, snapshot(step), Keep())
        (tmp_path / f"step-0000000{step}" / "model.safetensors").write_bytes(b"")
    warnings: list[str] = []
    with pytest.raises(CorruptCheckpoint, match=r"all 2 checkpoints .*another --out"):
        checkpoint.find(tmp_path, warnings.append)
    assert [warning.splitlines()[-1] for warning in warnings] == [
        "falling back to the previous one",
        "there is no earlier one",
    ]


def test_a_saver_knows_whether_anything_was_saved(tmp_path: Path) -> None:
    saver = Saver(tmp_path, Keep(), lambda: None)
    assert not saver.has_saved
    saver.save(snapshot(1))
    saver.close()
    assert saver.has_saved
    assert Saver(tmp_path, Keep(), lambda: None).has_saved, "a resumed run"


@pytest.mark.parametrize("content", ["", "step-00000099\n", "../../etc\n", "\x00"])
def test_an_invalid_latest_gives_a_warning_and_the_newest_valid_checkpoint(tmp_path: Path, content: str) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, snapshot(step), Keep())
    (tmp_path / "latest").write_text(content)
    warnings: list[str] = []
    assert found(tmp_path, warnings.append).step == 2
    assert "does not name one" in warnings[0]


def test_a_manifest_that_names_files_outside_its_folder_is_rejected(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, snapshot(1), Keep())
    sha256 = checkpoint.digest_file(tmp_path / "latest")
    rewrite_manifest(folder, **{"../latest": {"bytes": 14, "sha256": sha256}})
    with pytest.raises(CorruptCheckpoint, match="another folder"):
        checkpoint.verify(folder)


def test_another_checkpoint_format_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT", 0)
    folder = checkpoint.save(tmp_path, snapshot(1), Keep())
    monkeypatch.undo()
    with pytest.raises(UsageError, match="has checkpoint format 0"):
        checkpoint.verify(folder)


def test_a_failed_save_is_reported_at_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(tmp_path, Keep(), lambda: None)
    monkeypatch.setattr(checkpoint, "SPARE_BYTES", 1 << 60)
    saver.save(snapshot(1))
    with pytest.raises(BsiError, match="no space"):
        saver.save(snapshot(2))
    saver.close()


FULL = """
import resource, sys
from pathlib import Path
import torch
from bsi.errors import BsiError
from bsi.runtime import ema
from bsi.runtime import checkpoint
from bsi.recipe import Keep
root, weights = Path(sys.argv[1]), {"w": torch.zeros(1000)}
save = lambda step: checkpoint.save(root / "checkpoints", checkpoint.Snapshot(step, {"model": weights}, {}), Keep())
save(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
for write in (lambda: save(2), lambda: ema.store_averages(root, 2, weights)):
    try:
        write()
    except BsiError as error:
        print(type(error).__name__, error.code, "ulimit" in str(error))
"""


def test_a_disk_that_fills_while_tensors_are_written_is_reported_as_full(tmp_path: Path) -> None:
    """The operating system reports the error through safetensors, which has its own error type."""
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["BsiError 1 True", "BsiError 1 False"]
    assert found(tmp_path / "checkpoints").step == 1
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-00000001"]
    assert list((tmp_path / "averages").iterdir()) == []


def test_a_background_save_keeps_the_state_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saver writes while training continues; until `latest` is updated, the previous checkpoint is used."""
    checkpoint.save(tmp_path, snapshot(1), Keep())
    go, write = threading.Event(), checkpoint.write_files
    monkeypatch.setattr(checkpoint, "write_files", lambda *args: (go.wait(60), write(*args))[1])
    saver = Saver(tmp_path, Keep(), lambda: None)
    saver.save(snapshot(2))
    assert found(tmp_path).step == 1
    go.set()
    saver.wait()
    assert found(tmp_path).step == 2
    saver.close()


def test_reading_a_checkpoint_that_is_being_replaced_works(tmp_path: Path) -> None:
    """Row 54: the checkpoint that it reads is deleted by the run, which has a newer one."""
    checkpoint.save(tmp_path, snapshot(0), Keep(last=1))
    done = threading.Event()

    def train() -> None:
        for step in range(1, 40):
            checkpoint.save(tmp_path, snapshot(step), Keep(last=1))
        done.set()

    thread = threading.Thread(target=train)
    thread.start()
    times = 0
    while not done.is_set() or times < 10:
        assert found(tmp_path)
        times += 1
    thread.join()


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "text"])
def test_tensors_that_are_no_regular_file_do_not_block(tmp_path: Path, kind: str) -> None:
    """The manifest of a run from elsewhere need not list them."""
    path = checkpoint.save(tmp_path, snapshot(1), Keep()) / "ema.safetensors"
    path.unlink(missing_ok=True)
    make = {"pipe": lambda: os.mkfifo(path), "device": lambda: path.symlink_to("/dev/zero"), "folder": path.mkdir}
    make.get(kind, lambda: path.write_text("no tensors"))()
    with pytest.raises(CorruptCheckpoint, match="damaged"):
        checkpoint.read_tensors(checkpoint.Checkpoint(path.parent, 1, {}), "ema")


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "latest"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "deep", "number"])
def test_every_kind_of_damage_is_reported_as_a_damaged_checkpoint(tmp_path: Path, name: str, kind: str) -> None:
    """Row 54: also with hashes that match the damage."""
    folder = checkpoint.save(tmp_path, snapshot(1), Keep())
    path = tmp_path / name if name == "latest" else folder / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text("[" * 100_000 if kind == "deep" else "1e999")
    if name == "state.json" and path.is_file():
        record = {"bytes": path.stat().st_size, "sha256": checkpoint.digest_file(path)}
        rewrite_manifest(folder, **{"state.json": record})
    if name == "latest":
        warnings: list[str] = []
        assert found(tmp_path, warnings.append)
        assert "latest" in warnings[0]
    else:
        with pytest.raises(CorruptCheckpoint):
            checkpoint.find(tmp_path, lambda line: None)
