"""One run folder, one job: a lock that is a lease.

`lock.json` names the host, the process and the batch system's job that train here. Its owner touches it every few
seconds; a lock whose heartbeat has stopped for LEASE_S has expired, and the next job takes it over. So it does at once
when the lock is ours: the same host and a process that no longer runs, or the same job, which came back on another
host. Steps of one batch job share its number, and may run beside each other on several nodes: only a requeue, which
Slurm counts, or torchrun's own name for its ranks says that the one before is over. Anyone else is refused, and told
who is there.

Ages are differences of modification times on the file system that holds the lock: clocks of two hosts may disagree.
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

from bsi.errors import BsiError, UsageError
from bsi.io import write_text

__all__ = ["BEAT_S", "LEASE_S", "InUse", "Lease", "Owner", "hold"]

LEASE_S = 120.0
BEAT_S = 15.0
LOCK = "lock.json"
NO_ID = "none"  # torchrun's --rdzv-id of all jobs that were given none: it tells no two of them apart


@dataclass(frozen=True)
class Owner:
    """Who holds a run folder. `started` tells a process from a later one of the same number.

    `requeues` counts how often Slurm put the job back into its queue; `group` is torchrun's name for its ranks.
    """

    host: str
    pid: int
    started: str
    job: str
    token: str
    requeues: int = 0
    group: str = ""

    @classmethod
    def me(cls) -> Owner:
        group = os.environ.get("TORCHELASTIC_RUN_ID", "")
        group = "" if group == NO_ID else group
        job = os.environ.get("SLURM_JOB_ID") or group
        count = os.environ.get("SLURM_RESTART_COUNT", "")  # not set before the first requeue
        requeues = int(count) if re.fullmatch(r"[0-9]+", count) else 0
        started = _process_start(os.getpid())
        return cls(socket.gethostname(), os.getpid(), started, job, uuid.uuid4().hex, requeues, group)

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}" + (f", job {self.job}" if self.job else "")


class InUse(UsageError):
    """Somebody else holds the lock, and lives."""

    def __init__(self, words: str, holder: Owner) -> None:
        super().__init__(words)
        self.holder = holder


def _process_start(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty where that is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _alive(owner: Owner) -> bool:
    """Does the owner's process still run on this host?"""
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not owner.started or _process_start(owner.pid) == owner.started


class Lease:
    """A lock that is held. `check` raises once it is no longer ours."""

    def __init__(self, path: Path, owner: Owner) -> None:
        self.path, self.owner = path, owner
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="bsi-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        holder = _read(self.path)
        if holder is None:
            raise BsiError(
                f"{self.path} is gone: was the run folder moved, or deleted, while it was trained in? This process "
                f"stops here and writes nothing more; the same command with --out where the folder is now goes on."
            )
        if holder.token != self.owner.token:
            raise BsiError(
                f"{self.path.parent} was taken over by {holder}, since this process gave no sign of life for "
                f"{LEASE_S:.0f} s. It stops here and writes nothing more."
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
def hold(folder: Path, warn: Callable[[str], None], lock: str = LOCK, owner: Owner | None = None) -> Iterator[Lease]:
    """Hold a run folder's lock, or another one in it, or refuse with the name of who does."""
    lease = Lease(folder / lock, _acquire(folder / lock, owner or Owner.me(), warn))
    try:
        yield lease
    finally:
        lease.release()


def _acquire(path: Path, me: Owner, warn: Callable[[str], None]) -> Owner:
    """Put our name on the lock, unless its owner lives."""
    try:
        with _one_at_a_time(path.parent):
            holder = _read(path)
            if holder is not None:
                with contextlib.suppress(FileNotFoundError):  # given back just now, which needs no turn: it is free
                    warn(_reason_to_take_over(path, holder, me))
            write_text(path, json.dumps(asdict(me)))
    except OSError as error:
        raise UsageError(
            f"cannot write in the run folder {path.parent}: {error.strerror}. Use another --out."
        ) from error
    return me


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Two jobs that find the same dead lock take turns. Where a file system has no such locks, the lease's own check
    before each save still keeps the loser from writing.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _reason_to_take_over(path: Path, holder: Owner, me: Owner) -> str:
    """Why a lock that exists may be replaced; refuses if its owner lives."""
    age = _age(path)
    if holder.host == me.host and not _alive(holder):
        return f"taking over the lock of {holder}: its process ended"
    if holder.host != me.host and me.job and holder.job == me.job:
        if me.requeues > holder.requeues:
            return f"taking over the lock of {holder}: this is the same job, requeued"
        if me.group and holder.group == me.group:
            return f"taking over the lock of {holder}: these are the same ranks, started again"
    if age < LEASE_S:
        raise InUse(
            f"{path.parent} is in use by {holder} (last sign of life {age:.0f} s ago). Wait for it, stop it, or use "
            f"another --out. A job that died is taken over after {LEASE_S:.0f} s.",
            holder,
        )
    return f"taking over the lock of {holder}: no sign of life for {age:.0f} s"


def _read(path: Path) -> Owner | None:
    """The owner that a lock names; None if there is no lock, or one that says nothing."""
    try:
        given = json.loads(path.read_text("utf-8"))
        return Owner(
            str(given["host"]), int(given["pid"]), str(given["started"]), str(given["job"]), str(given["token"]),
            int(given.get("requeues", 0)), str(given.get("group", given["job"])),  # earlier versions wrote neither
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _age(path: Path) -> float:
    """Seconds since the lock was touched, by the clock of its file system."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".clock-") as now:
        return max(0.0, os.stat(now.name).st_mtime - path.stat().st_mtime)
