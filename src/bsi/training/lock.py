"""The lock of a run folder: one process, or one group of ranks, trains in it at a time.

`lock.json` names the owner: its host, process and batch job. The owner touches the file every few seconds (a
heartbeat). If the heartbeat has stopped for EXPIRES_S, the next job takes the lock over. It does so at once if

- the owner ran in the same boot and PID namespace, and its process has ended;
- the owner is the same batch job, which Slurm has requeued (SLURM_RESTART_COUNT is larger) or whose ranks torchrun has
  restarted. Steps of one batch job share its number and may run in parallel on several nodes, so an equal number is
  not sufficient.

Ages are differences of modification times on the file system of the lock, since the clocks of two hosts may differ.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from bsi.errors import BsiError, DataError, UsageError
from bsi.io import read_json, write_text

EXPIRES_S = 120.0
BEAT_S = 15.0
FILE = "lock.json"
NO_ID = "none"  # the --rdzv-id of all torchrun jobs without one


@dataclass(frozen=True)
class Owner:
    """The holder of a lock."""

    host: str
    pid: int
    started: str  # distinguishes the process from a later one with the same PID
    job: str
    token: str
    requeues: int = 0  # the number of times that Slurm requeued the job
    group: str = ""  # torchrun's name for its ranks
    system: str = ""  # the boot and the PID namespace: those of another container, or after a reboot, differ

    @classmethod
    def me(cls) -> Owner:
        group = os.environ.get("TORCHELASTIC_RUN_ID", NO_ID)
        group = "" if group == NO_ID else group
        job = os.environ.get("SLURM_JOB_ID") or group
        count = os.environ.get("SLURM_RESTART_COUNT", "")  # not set before the first requeue
        requeues = int(count) if re.fullmatch(r"[0-9]{1,9}", count) else 0
        host, pid = socket.gethostname(), os.getpid()
        return cls(host, pid, _process_start(pid), job, uuid.uuid4().hex, requeues, group, _system())

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}" + (f", job {self.job}" if self.job else "")

    def ended(self, me: Owner) -> bool:
        """Whether the owner's process has certainly ended. False if `me` cannot see its processes."""
        if self.host != me.host or self.system != me.system:
            return False  # another machine or container
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):  # another user's process, or an invalid PID
            return False
        return bool(self.started) and _process_start(self.pid) != self.started


def _process_start(pid: int) -> str:
    """The start time of a process in the kernel's clock ticks; empty if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _system() -> str:
    """The boot and the PID namespace of this process; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@dataclass(frozen=True)
class Lock:
    """A lock held by this process."""

    path: Path
    owner: Owner

    def check(self) -> None:
        """Raise if another process has taken the lock over."""
        holder = _read(self.path)
        if holder is None:
            raise BsiError(
                f"{self.path} is gone: the run folder was moved or deleted during training. This process stops and "
                f"writes nothing more. Run the same command with --out set to where the folder is now."
            )
        if holder.token != self.owner.token:
            raise BsiError(
                f"{self.path.parent} was taken over by {holder}, because this process had no heartbeat for "
                f"{EXPIRES_S:.0f} s. This process stops and writes nothing more."
            )


@contextmanager
def hold(folder: Path, warn: Callable[[str], None], owner: Owner | None = None) -> Iterator[Lock]:
    """Hold the lock of a folder while the block runs; raises a UsageError if another process holds it."""
    lock, stopped = Lock(folder / FILE, owner or Owner.me()), threading.Event()
    acquire(lock, warn)

    def beat() -> None:
        while not stopped.wait(BEAT_S):
            with suppress(BsiError, OSError):
                lock.check()
                os.utime(lock.path)

    thread = threading.Thread(target=beat, name="bsi-lock", daemon=True)
    thread.start()
    try:
        yield lock
    finally:
        stopped.set()
        thread.join()
        with suppress(BsiError, OSError):
            lock.check()
            lock.path.unlink()


def acquire(lock: Lock, warn: Callable[[str], None]) -> None:
    """Write the lock, if there is none or it may be replaced."""
    folder = lock.path.parent
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # without flock, two jobs may take an expired lock: `check` then stops one of them
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if (holder := _read(lock.path)) is not None:
                with suppress(FileNotFoundError):  # it was just released
                    warn(f"taking over the lock of {holder}: {_reason(lock.path, holder, lock.owner)}")
            write_text(lock.path, json.dumps(asdict(lock.owner)))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UsageError(f"cannot write in the run folder {folder}: {error.strerror}. Use another --out.") from error


def _reason(path: Path, holder: Owner, me: Owner) -> str:
    """Why an existing lock may be replaced; raises if it may not."""
    age, same_job = _age(path), holder.host != me.host and me.job and holder.job == me.job
    if holder.ended(me):
        return "its process has ended"
    if same_job and me.requeues > holder.requeues:
        return "this is the same job, requeued"
    if same_job and me.group and holder.group == me.group:
        return "these are the same ranks, restarted"
    if age >= EXPIRES_S:
        return f"no heartbeat for {age:.0f} s"
    raise UsageError(
        f"{path.parent} is in use by {holder} (last heartbeat {age:.0f} s ago). Wait for it, stop it, or use another "
        f"--out. The lock of a job that died expires after {EXPIRES_S:.0f} s."
    )


def _age(path: Path) -> float:
    """Seconds since the last heartbeat, by the clock of the file system.

    A time stamp in the future cannot be a heartbeat and would never expire: it is replaced by the present time.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".clock-") as now:
        age = os.stat(now.name).st_mtime - path.stat().st_mtime
    if age < -BEAT_S:
        os.utime(path)
    return max(0.0, age)


def _read(path: Path) -> Owner | None:
    """The owner that a lock names; None if there is no lock, or no valid one."""
    try:
        given = read_json(path)
        host, started, job, token = (str(given[name]) for name in ("host", "started", "job", "token"))
        requeues, group = int(given.get("requeues", 0)), str(given.get("group", job))  # missing in early versions
        return Owner(host, int(given["pid"]), started, job, token, requeues, group, str(given.get("system", "")))
    except (DataError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
