"""Being asked to stop: SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 (Slurm's warning) set a flag; a second Ctrl-C leaves.

The loop looks at the flag between steps, and within an evaluation between its parts; all ranks agree on it, save the
same step and leave with exit code 75. Leaving at once is safe too, since a checkpoint is never half there; it only
costs the steps since the last one.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from bsi.progress import forget

__all__ = ["StopFlag", "listening", "tell"]

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STDERR = 2
LEFT_AT_ONCE = 130  # what a shell reports for a process that Ctrl-C ended


class StopFlag:
    """Set once a signal has come; `reason` is its name."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def __bool__(self) -> bool:
        return self.reason is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.reason == "SIGINT" and number == signal.SIGINT:
            tell("second Ctrl-C: leaving without saving")
            os._exit(LEFT_AT_ONCE)
        if not self:
            self.reason = signal.Signals(number).name
            again = "; Ctrl-C again leaves at once" if number == signal.SIGINT else ""
            tell(f"{self.reason}: saving, then leaving{again}")
        elif number == signal.SIGINT:
            self.reason = "SIGINT"


def tell(words: str) -> None:
    """Past Python's stderr, which may be in the middle of a write, or no file at all, as in a notebook."""
    try:
        os.write(STDERR, f"\nbsi train: {words}\n".encode())
    except OSError:  # who read it has left: Ctrl-C ends `| tee` too, and what comes next is to save
        forget(STDERR)


@contextmanager
def listening() -> Iterator[StopFlag]:
    """Listen for the signals while the block runs. Only a main thread can: elsewhere the flag stays unset."""
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = {number: signal.signal(number, flag) for number in SIGNALS}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
