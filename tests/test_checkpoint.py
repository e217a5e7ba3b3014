"""Checkpoints on disk, the lease on a run folder, and the journal: what a process finds after another one died."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from bsi.errors import BsiError, CorruptCheckpoint, UsageError
from bsi.recipe import Keep
from bsi.runtime import checkpoint
from bsi.runtime.checkpoint import DiskFull, Saver, Snapshot
from bsi.runtime.run_folder import JsonLines, RunFolder, read_journal
from bsi.training import lock
from bsi.training.lock import EXPIRES_S, FILE, Owner, hold


def snapshot(step: int) -> Snapshot:
    tensors = {name: {"a": torch.full((3,), float(step)), "b/c": torch.ones(())} for name in ("model", "ema")}
    return Snapshot(step, tensors, {"recipe": {}, "note": "ü"})


def steps(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("step-*"))


def test_what_was_saved_is_found_and_read(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, snapshot(7), Keep())
    found = checkpoint.find(tmp_path, pytest.fail)
    assert found is not None
    assert (found.step, found.state["note"]) == (7, "ü")
    assert torch.equal(checkpoint.read_tensors(found, "ema")["a"], torch.full((3,), 7.0))


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert checkpoint.find(tmp_path / "nothing", pytest.fail) is None


def test_a_run_whose_checkpoints_are_gone_does_not_silently_begin_anew(tmp_path: Path) -> None:
    shutil.rmtree(checkpoint.save(tmp_path, snapshot(3), Keep()))
    with pytest.raises(CorruptCheckpoint, match="names a checkpoint, but there is none"):
        checkpoint.find(tmp_path, print)


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": 1, "network": ""}', "{"])
def test_a_record_that_is_none_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(UsageError, match=r"run\.json is not .*Restore it"):
        RunFolder(tmp_path).read_record()


def test_the_last_few_stay_and_milestones_for_good(tmp_path: Path) -> None:
    for step in range(1, 11):
        checkpoint.save(tmp_path, snapshot(step), Keep(last=2, every=4))
    assert steps(tmp_path) == [4, 8, 9, 10]
    assert not list(tmp_path.glob(".*"))


def test_pruning_after_a_fallback_leaves_the_newer_damaged_ones_to_be_replaced(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, snapshot(step), Keep(last=3))
    (tmp_path / "step-00000003" / "model.safetensors").write_bytes(b"")
    warnings: list[str] = []
    found = checkpoint.find(tmp_path, warnings.append)
    assert found is not None
    assert found.step == 2
    assert "DAMAGED" in warnings[0]
    checkpoint.save(tmp_path, snapshot(3), Keep(last=3))
    again = checkpoint.find(tmp_path, pytest.fail)
    assert again is not None
    assert again.step == 3


def test_where_no_checkpoint_is_whole_nothing_is_fallen_back_to_and_the_way_on_is_told(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, snapshot(step), Keep())
        (tmp_path / f"step-0000000{step}" / "model.safetensors").write_bytes(b"")
    warnings: list[str] = []
    with pytest.raises(CorruptCheckpoint, match=r"all of 2 are damaged.*another --out"):
        checkpoint.find(tmp_path, warnings.append)
    assert [warning.splitlines()[-1] for warning in warnings] == [
        "falling back to the one before",
        "there is none before it",
    ]


def test_a_saver_knows_whether_anything_was_saved(tmp_path: Path) -> None:
    saver = Saver(tmp_path, Keep(), lambda: None)
    assert not saver.has_saved
    saver.save(snapshot(1))
    saver.close()
    assert saver.has_saved
    assert Saver(tmp_path, Keep(), lambda: None).has_saved, "a run that goes on"


@pytest.mark.parametrize("content", ["", "step-00000099\n", "../../etc\n", "\x00"])
def test_a_latest_that_names_nothing_is_reported_and_the_newest_whole_one_taken(tmp_path: Path, content: str) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, snapshot(step), Keep())
    (tmp_path / "latest").write_text(content)
    warnings: list[str] = []
    found = checkpoint.find(tmp_path, warnings.append)
    assert found is not None
    assert found.step == 2
    assert "does not name one" in warnings[0]


def test_a_file_that_the_manifest_names_outside_its_folder_is_refused(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, snapshot(1), Keep())
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../latest"] = manifest["files"]["state.json"]
    table = {"format": manifest["format"], "files": manifest["files"]}
    manifest["sha256"] = checkpoint.fingerprint(table)
    (folder / "manifest.json").write_text(checkpoint.canonical_json(manifest))
    with pytest.raises(CorruptCheckpoint):
        checkpoint.verify(folder)


def test_another_format_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT", 0)
    folder = checkpoint.save(tmp_path, snapshot(1), Keep())
    monkeypatch.undo()
    with pytest.raises(UsageError, match="format 0; this version of bsi reads format 1"):
        checkpoint.verify(folder)


def test_a_saver_reports_a_failed_save_at_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(tmp_path, Keep(), lambda: None)
    monkeypatch.setattr(checkpoint, "check_space", lambda root, needed: (_ for _ in ()).throw(DiskFull("no room")))
    saver.save(snapshot(1))
    with pytest.raises(DiskFull):
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


def test_a_disk_that_fills_while_tensors_are_written_is_told_as_one(tmp_path: Path) -> None:
    """By the system itself, through the library that writes them: it has errors of its own."""
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["DiskFull 1 True", "BsiError 1 False"]
    found = checkpoint.find(tmp_path / "checkpoints", pytest.fail)
    assert found is not None
    assert found.step == 1
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-00000001"]
    assert list((tmp_path / "averages").iterdir()) == []


def test_a_save_in_the_background_keeps_the_state_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saver writes while training goes on; until it has moved `latest`, the old checkpoint is the one."""
    checkpoint.save(tmp_path, snapshot(1), Keep())
    go, write = threading.Event(), checkpoint.write_files
    monkeypatch.setattr(checkpoint, "write_files", lambda *args: (go.wait(60), write(*args)))
    saver = Saver(tmp_path, Keep(), lambda: None)
    saver.save(snapshot(2))
    found = checkpoint.find(tmp_path, pytest.fail)
    assert found is not None
    assert found.step == 1
    go.set()
    saver.wait()
    found = checkpoint.find(tmp_path, pytest.fail)
    assert found is not None
    assert found.step == 2
    saver.close()


def test_a_run_that_lost_its_folder_saves_nothing_more(tmp_path: Path) -> None:
    with hold(tmp_path, pytest.fail) as held:
        thief = replace(Owner.me(), host="elsewhere", pid=1)
        (tmp_path / FILE).write_text(json.dumps(asdict(thief)))
        with pytest.raises(BsiError, match="taken over by host elsewhere, pid 1"):
            checkpoint.save(tmp_path / "checkpoints", snapshot(1), Keep(), held.check)
    assert checkpoint.find(tmp_path / "checkpoints", pytest.fail) is None
    assert (tmp_path / FILE).exists(), "the thief's lock is not ours to remove"


def test_a_lock_is_held_by_one_and_released(tmp_path: Path) -> None:
    with hold(tmp_path, pytest.fail):
        with pytest.raises(UsageError, match=rf"in use by host .*, pid {os.getpid()}"), hold(tmp_path, pytest.fail):
            pass
        assert (tmp_path / FILE).exists(), "who was refused leaves the lock alone"
    assert not list(tmp_path.iterdir())


def test_a_lock_that_is_given_back_while_one_asks_for_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between reading its name and its age. Who waits asks every second, and would have met it."""
    (tmp_path / FILE).write_text(json.dumps(asdict(Owner("elsewhere", 12, "1", "", "t"))))
    read = lock._read

    def read_and_gone(path: Path) -> Owner | None:
        holder = read(path)
        path.unlink()
        monkeypatch.setattr(lock, "_read", read)
        return holder

    monkeypatch.setattr(lock, "_read", read_and_gone)
    with hold(tmp_path, pytest.fail) as held:
        held.check()


def test_the_lock_of_a_process_that_ended_is_taken_over_at_once(tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    dead = replace(Owner.me(), pid=int(child.stdout))
    (tmp_path / FILE).write_text(json.dumps(asdict(dead)))
    said: list[str] = []
    with hold(tmp_path, said.append):
        assert "its process ended" in said[0]


def test_a_later_process_of_the_same_number_is_not_the_owner(tmp_path: Path) -> None:
    other = replace(Owner.me(), started="1", token="t")
    (tmp_path / FILE).write_text(json.dumps(asdict(other)))
    said: list[str] = []
    with hold(tmp_path, said.append):
        assert said


@pytest.mark.parametrize(("age", "job", "taken"), [(0, "7", False), (0, "8", True), (2 * EXPIRES_S, "7", True)])
def test_another_hosts_lock_expires_or_is_our_requeued_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: float, job: str, taken: bool
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    owner = Owner("elsewhere", 12, "1", job, "t")
    (tmp_path / FILE).write_text(json.dumps(asdict(owner)))
    then = time.time() - age
    os.utime(tmp_path / FILE, (then, then))
    if taken:
        said: list[str] = []
        with hold(tmp_path, said.append):
            assert "taking over the lock of host elsewhere, pid 12" in said[0]
    else:
        with pytest.raises(UsageError, match="in use by host elsewhere, pid 12, job 7"), hold(tmp_path, pytest.fail):
            pass


# Who holds the lock and who asks for it, by what Slurm and torchrun call them.
ASKED = {
    "two steps of a batch job, on two nodes": ({"SLURM_JOB_ID": "8"}, {"SLURM_JOB_ID": "8"}, False),
    "two steps of a requeued job": (
        {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False,
    ),
    "requeued": ({"SLURM_JOB_ID": "8"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, True),
    "requeued twice": (
        {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "9"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "10"}, True,
    ),
    "the ranks before the requeue, which linger": (
        {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "8"}, False,
    ),
    "another job, requeued": ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
    "torchrun, which moved its first rank": ({"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RUN_ID": "a"}, True),
    "the same within a batch job": (
        {"SLURM_JOB_ID": "8", "TORCHELASTIC_RUN_ID": "a"}, {"SLURM_JOB_ID": "8", "TORCHELASTIC_RUN_ID": "a"}, True,
    ),
    "two torchruns of a batch job": (
        {"SLURM_JOB_ID": "8", "TORCHELASTIC_RUN_ID": "a"}, {"SLURM_JOB_ID": "8", "TORCHELASTIC_RUN_ID": "b"}, False,
    ),
    "no number": ({"SLURM_JOB_ID": "8"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "x"}, False),
}  # fmt: skip


@pytest.mark.parametrize("case", ASKED)
def test_a_job_that_came_back_is_told_from_another_step_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Steps of one batch job share its number: on two nodes, each took the run from the other, for ever."""
    holds, asks, taken = ASKED[case]

    def owner(variables: dict[str, str]) -> Owner:
        for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return Owner.me()

    (tmp_path / FILE).write_text(json.dumps(asdict(replace(owner(holds), host="elsewhere"))))
    me, said = owner(asks), list[str]()
    if taken:
        with hold(tmp_path, said.append, owner=me) as held:
            held.check()
        assert "taking over the lock of host elsewhere" in said[0]
    else:
        with pytest.raises(UsageError, match="in use by host elsewhere"), hold(tmp_path, pytest.fail, owner=me):
            pass


@pytest.mark.parametrize(
    ("job", "asks"),
    [("8", {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}), ("17", {"TORCHELASTIC_RUN_ID": "17"})],
)
def test_a_lock_of_an_earlier_version_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, asks: dict[str, str]
) -> None:
    """It knows a job, and neither how often that was requeued nor whose name for it this is."""
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in asks.items():
        monkeypatch.setenv(name, value)
    earlier = {"host": "elsewhere", "pid": 12, "started": "1", "job": job, "token": "t"}
    (tmp_path / FILE).write_text(json.dumps(earlier))
    said: list[str] = []
    with hold(tmp_path, said.append):
        assert f"taking over the lock of host elsewhere, pid 12, job {job}" in said[0]


def test_torchruns_name_for_every_job_without_an_id_makes_no_two_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--rdzv-endpoint without --rdzv-id: every such job is called none."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    (tmp_path / FILE).write_text(json.dumps(asdict(Owner("elsewhere", 12, "1", "none", "t"))))
    with pytest.raises(UsageError, match="in use by host elsewhere, pid 12"), hold(tmp_path, pytest.fail):
        pass
    assert Owner.me().job == ""


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": 1}'])
def test_a_lock_that_says_nothing_stops_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with hold(tmp_path, print):
        assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()


def test_the_heartbeat_keeps_the_lock_young(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.01)
    with hold(tmp_path, pytest.fail):
        os.utime(tmp_path / FILE, (0, 0))
        deadline = time.monotonic() + 60
        while (tmp_path / FILE).stat().st_mtime < 1 and time.monotonic() < deadline:
            pass
        assert (tmp_path / FILE).stat().st_mtime > 1


def test_a_race_for_a_dead_lock_has_one_winner(tmp_path: Path) -> None:
    dead = Owner("elsewhere", 12, "1", "", "t")
    for _ in range(20):
        (tmp_path / FILE).write_text(json.dumps(asdict(dead)))
        os.utime(tmp_path / FILE, (0, 0))
        winners: list[str] = []

        def contend(winners: list[str] = winners) -> None:
            with contextlib.suppress(UsageError):
                winners.append(lock._acquire(tmp_path / FILE, Owner.me(), lambda line: None).token)

        threads = [threading.Thread(target=contend) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1
        assert json.loads((tmp_path / FILE).read_text())["token"] == winners[0]
        (tmp_path / FILE).unlink()


def test_lines_after_the_checkpoint_are_dropped_and_half_a_line_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = JsonLines(path, 0)
    for step in (5, 10, 15):
        journal({"event": "train", "step": step, "loss": float("nan") if step == 5 else 1.0})
    with path.open("a") as file:
        file.write('{"event": "train", "st')
    assert [line["step"] for line in read_journal(tmp_path)] == [5, 10, 15]
    JsonLines(path, 10)({"event": "train", "step": 11})
    assert [line["step"] for line in read_journal(tmp_path)] == [5, 10, 11]
    assert read_journal(tmp_path)[0]["loss"] is None


def test_an_evaluation_that_is_still_to_be_made_is_not_in_the_journal_twice(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = JsonLines(path, 0)
    for event, step in (("train", 5), ("evaluate", 5), ("train", 10), ("evaluate", 10), ("sample", 10)):
        journal({"event": event, "step": step})
    JsonLines(path, 10, ("evaluate", "sample"))
    assert [(line["event"], line["step"]) for line in read_journal(tmp_path)] == [
        ("train", 5), ("evaluate", 5), ("train", 10),
    ]  # fmt: skip
