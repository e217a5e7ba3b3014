"""One job, one process: studies share a folder, and whoever wants a job that another process does waits for it.

A job's lock lies in the studies' folder for as long as the job takes, from its first step to the file that it leaves.
The lock is that of training/lock.py, so that the job of a process that died is taken over. It names no batch job: of
one, several nodes may be at studies, and what was requeued waits until the lease is over. A network's run folder has a
lock of its own: `bsi train ... --out` may be at work there, and is waited for in the same way.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace

from bsi.studies.deadline import Deadline
from bsi.studies.job import Job, name_of, title
from bsi.studies.store import Store
from bsi.training.lock import InUse, Owner, hold

__all__ = ["in_turn"]

POLL_S = 1.0


def in_turn(job: Job, store: Store, deadline: Deadline, do: Callable[[Job], str]) -> str:
    """Do a job that is not done, as the only process; what to print of it."""
    store.folder.mkdir(parents=True, exist_ok=True)
    waited = False
    while True:
        try:
            with hold(store.folder, _say, f".{name_of(job)}.lock", replace(Owner.me(), job="")):
                return "done by another process" if store.done(job) else do(job)
        except InUse as busy:
            if not waited:
                _say(f"waiting for {busy.holder}, which is at it. Ctrl-C leaves, and the same command goes on")
            waited = True
            deadline.check(f"{busy.holder} is still at {title(job)}")
            time.sleep(POLL_S)


def _say(words: str) -> None:
    print(f"bsi study: {words}", file=sys.stderr, flush=True)
