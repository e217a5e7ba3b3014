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

import contextlib
import fcntl
import json
import os
import re
import socket
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """The holder of a lock.

    `started` distinguishes a process from a later one with the same PID, and `system` (the boot and the PID namespace)
    from one in another container or after a reboot of the host. `requeues` is the number of times that Slurm requeued
    the job; `group` is torchrun's name for its ranks.
    """

    host: str
    pid: int
    started: str
    job: str
    token: str
    requeues: int = 0
    group: str = ""
    system: str = ""

    @classmethod
    def me(cls) -> Owner:
        group = os.environ.get("TORCHELASTIC_RUN_ID", "")
        group = "" if group == NO_ID else group
        count = os.environ.get("SLURM_RESTART_COUNT", "")  # not set before the first requeue
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            started=_process_start(os.getpid()),
            job=os.environ.get("SLURM_JOB_ID") or group,
            token=uuid.uuid4().hex,
            requeues=int(count) if re.fullmatch(r"[0-9]{1,9}", count) else 0,
            group=group,
            system=_system(),
        )

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


class Lock:
    """A lock held by this process. `check` raises if another process has taken it over."""

    def __init__(self, path: Path, owner: Owner) -> None:
        self.path, self.owner = path, owner
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="bsi-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
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

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_S):
            with contextlib.suppress(BsiError, OSError):
                self.check()
                os.utime(self.path)

    def release(self) -> None:
        self._stopped.set()
        self._thread.join()
        with contextlib.suppress(BsiError, OSError):
            self.check()
            self.path.unlink()


@contextmanager
def hold(folder: Path, warn: Callable[[str], None], owner: Owner | None = None) -> Iterator[Lock]:
    """Hold the lock of a folder while the block runs; raises a UsageError if another process holds it."""
    lock = Lock(folder / FILE, _acquire(folder / FILE, owner or Owner.me(), warn))
    try:
        yield lock
    finally:
        lock.release()


def _acquire(path: Path, me: Owner, warn: Callable[[str], None]) -> Owner:
    """Write the lock, if there is none or it may be replaced.

    flock serializes jobs that find the same expired lock. On a file system without it, two jobs may both take the lock;
    the check before each write then stops one of them.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
            holder = _read(path)
            if holder is not None:
                with contextlib.suppress(FileNotFoundError):  # it was just released
                    warn(_reason_to_take_over(path, holder, me))
            write_text(path, json.dumps(asdict(me)))
        finally:
            os.close(folder)
    except OSError as error:
        raise UsageError(
            f"cannot write in the run folder {path.parent}: {error.strerror}. Use another --out."
        ) from error
    return me


def _reason_to_take_over(path: Path, holder: Owner, me: Owner) -> str:
    """The reason why an existing lock may be replaced, for the log; raises if it may not."""
    age = _age(path)
    same_job = holder.host != me.host and me.job and holder.job == me.job
    if holder.ended(me):
        reason = "its process has ended"
    elif same_job and me.requeues > holder.requeues:
        reason = "this is the same job, requeued"
    elif same_job and me.group and holder.group == me.group:
        reason = "these are the same ranks, restarted"
    elif age >= EXPIRES_S:
        reason = f"no heartbeat for {age:.0f} s"
    else:
        raise UsageError(
            f"{path.parent} is in use by {holder} (last heartbeat {age:.0f} s ago). Wait for it, stop it, or use "
            f"another --out. The lock of a job that died expires after {EXPIRES_S:.0f} s."
        )
    return f"taking over the lock of {holder}: {reason}"


def _read(path: Path) -> Owner | None:
    """The owner that a lock names; None if there is no lock, or no valid one."""
    try:
        given = read_json(path)
        host, started, job, token = (str(given[name]) for name in ("host", "started", "job", "token"))
        requeues, group = int(given.get("requeues", 0)), str(given.get("group", job))  # missing in early versions
        return Owner(host, int(given["pid"]), started, job, token, requeues, group, str(given.get("system", "")))
    except (DataError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _age(path: Path) -> float:
    """Seconds since the last heartbeat, by the clock of the file system.

    A time stamp in the future cannot be a heartbeat and would never expire: it is replaced by the present time.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".clock-") as now:
        age = os.stat(now.name).st_mtime - path.stat().st_mtime
    if age < -BEAT_S:
        os.utime(path)
    return max(0.0, age)
