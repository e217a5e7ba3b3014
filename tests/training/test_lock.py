"""The lock of a run folder: which process may take it over, and when."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bsi.errors import BsiError, UsageError
from bsi.recipe import Keep
from bsi.runtime import checkpoint
from bsi.training import lock
from bsi.training.lock import EXPIRES_S, FILE, Lock, Owner, acquire, hold

ELSEWHERE = Owner("elsewhere", 12, "1", "", "t")
JOBS = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID")


def locked_by(folder: Path, owner: Owner, age: float = 0.0) -> None:
    (folder / FILE).write_text(json.dumps(asdict(owner)))
    then = time.time() - age
    os.utime(folder / FILE, (then, then))


def taken_over(folder: Path, me: Owner | None = None) -> str:
    """The log message of taking over the lock of a folder, which must succeed."""
    said: list[str] = []
    with hold(folder, said.append, owner=me) as held:
        held.check()
    return said[0]


def rejected(folder: Path, me: Owner | None = None) -> str:
    """The error if the lock of a folder may not be taken over."""
    with pytest.raises(UsageError, match="in use by") as caught, hold(folder, pytest.fail, owner=me):
        pass
    return str(caught.value)


@pytest.fixture
def as_job(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], Owner]:
    """The owner that this process is in a batch job with these variables."""

    def owner(variables: dict[str, str]) -> Owner:
        for name in JOBS:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return Owner.me()

    return owner


def test_a_run_that_lost_its_lock_saves_nothing(tmp_path: Path) -> None:
    with hold(tmp_path, pytest.fail) as held:
        locked_by(tmp_path, ELSEWHERE)
        with pytest.raises(BsiError, match="taken over by host elsewhere, pid 12"):
            checkpoint.save(tmp_path / "checkpoints", checkpoint.Snapshot(1, {}, {}), Keep(), held.check)
    assert checkpoint.find(tmp_path / "checkpoints", pytest.fail) is None
    assert (tmp_path / FILE).exists(), "the lock of the new owner is not removed"


def test_a_lock_has_one_holder_and_is_released(tmp_path: Path) -> None:
    with hold(tmp_path, pytest.fail):
        assert f"pid {os.getpid()}" in rejected(tmp_path)
        assert (tmp_path / FILE).exists(), "a rejected process does not change the lock"
    assert not list(tmp_path.iterdir())


def test_a_lock_released_during_a_request_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is released between reading its owner and its age."""
    locked_by(tmp_path, ELSEWHERE)
    read = lock._read

    def read_and_gone(path: Path) -> Owner | None:
        holder = read(path)
        path.unlink()
        monkeypatch.setattr(lock, "_read", read)
        return holder

    monkeypatch.setattr(lock, "_read", read_and_gone)
    with hold(tmp_path, pytest.fail) as held:
        held.check()


def test_the_lock_of_an_ended_process_is_taken_over_at_once(tmp_path: Path) -> None:
    """Also if a later process has its number."""
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    for dead in (replace(Owner.me(), pid=int(child.stdout)), replace(Owner.me(), started="1")):
        locked_by(tmp_path, dead)
        assert "its process has ended" in taken_over(tmp_path)


@pytest.mark.parametrize(("age", "job", "taken"), [(0, "7", False), (0, "8", True), (2 * EXPIRES_S, "7", True)])
def test_the_lock_of_another_host_expires_or_belongs_to_the_requeued_job(
    tmp_path: Path, as_job: Callable[[dict[str, str]], Owner], age: float, job: str, taken: bool
) -> None:
    me = as_job({"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"})
    locked_by(tmp_path, replace(ELSEWHERE, job=job), age)
    message = taken_over(tmp_path, me) if taken else rejected(tmp_path, me)
    assert f"host elsewhere, pid 12, job {job}" in message


# The holder of the lock and the process that requests it, by their Slurm and torchrun variables.
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
    # torchrun's name for every job without --rdzv-id
    "two torchruns without a name": ({"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "none"}, False),
    "no number": ({"SLURM_JOB_ID": "8"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "x"}, False),
}  # fmt: skip


@pytest.mark.parametrize("case", ASKED)
def test_a_requeued_job_is_distinguished_from_another_step_of_it(
    tmp_path: Path, as_job: Callable[[dict[str, str]], Owner], case: str
) -> None:
    """Steps of one batch job share its number: two nodes would take the run from each other forever."""
    holds, asks, taken = ASKED[case]
    locked_by(tmp_path, replace(as_job(holds), host="elsewhere"))
    message = taken_over(tmp_path, as_job(asks)) if taken else rejected(tmp_path, as_job(asks))
    assert "host elsewhere" in message


@pytest.mark.parametrize(
    ("job", "asks"), [("8", {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}), ("17", {"TORCHELASTIC_RUN_ID": "17"})]
)
def test_a_lock_of_an_earlier_version_is_read(
    tmp_path: Path, as_job: Callable[[dict[str, str]], Owner], job: str, asks: dict[str, str]
) -> None:
    """It holds the number of a job without its restart count and without its launcher."""
    earlier = {"host": "elsewhere", "pid": 12, "started": "1", "job": job, "token": "t"}
    (tmp_path / FILE).write_text(json.dumps(earlier))
    assert f"taking over the lock of host elsewhere, pid 12, job {job}" in taken_over(tmp_path, as_job(asks))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": 1}'])
def test_an_unreadable_lock_is_taken_over(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with hold(tmp_path, print):
        assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()


def test_the_heartbeat_renews_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.01)
    with hold(tmp_path, pytest.fail):
        os.utime(tmp_path / FILE, (0, 0))
        deadline = time.monotonic() + 60
        while (tmp_path / FILE).stat().st_mtime < 1:
            assert time.monotonic() < deadline


def test_a_race_for_a_dead_lock_has_one_winner(tmp_path: Path) -> None:
    for _ in range(20):
        locked_by(tmp_path, ELSEWHERE, time.time())
        winners: list[str] = []

        def contend(winners: list[str] = winners) -> None:
            mine = Lock(tmp_path / FILE, Owner.me())
            with contextlib.suppress(UsageError):
                acquire(mine, lambda line: None)
                winners.append(mine.owner.token)

        threads = [threading.Thread(target=contend) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1
        assert json.loads((tmp_path / FILE).read_text())["token"] == winners[0]
        (tmp_path / FILE).unlink()


@pytest.mark.parametrize("pid", [1, 2**22 + 1, 2**40, -1])
def test_a_fresh_heartbeat_from_another_container_of_this_host_is_respected(tmp_path: Path, pid: int) -> None:
    """Row 52: the same host name, another PID namespace, in which process numbers have another meaning."""
    other = replace(Owner.me(), pid=pid, system="another boot, another namespace", token="theirs")
    locked_by(tmp_path, other)
    rejected(tmp_path)
    locked_by(tmp_path, other, 2 * EXPIRES_S)
    taken_over(tmp_path)


def test_a_time_stamp_in_the_future_expires_too(tmp_path: Path) -> None:
    """Row 52: it is not a valid heartbeat; the lock expires after the usual time."""
    locked_by(tmp_path, ELSEWHERE, -1e6)
    assert "last heartbeat 0 s ago" in rejected(tmp_path)
    assert abs((tmp_path / FILE).stat().st_mtime - time.time()) < 60


def test_a_lock_that_is_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    writer = os.open(tmp_path / FILE, os.O_RDWR)
    with pytest.raises(BsiError), hold(tmp_path, pytest.fail) as held:
        held.check()
    os.close(writer)
