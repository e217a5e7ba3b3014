"""Stopping in time: a study that may run for N minutes saves what it has, and goes on when it is run again."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from bsi.errors import Preempted

__all__ = ["Deadline"]


@dataclass(frozen=True)
class Deadline:
    """A time to stop at, on the clock of time.monotonic()."""

    at: float = math.inf

    @classmethod
    def after(cls, minutes: float | None) -> Deadline:
        return cls() if minutes is None else cls(time.monotonic() + 60 * minutes)

    @property
    def left_s(self) -> float:
        return self.at - time.monotonic()

    def check(self, what: str) -> None:
        """Raise when the time is over; `what` has been saved."""
        if self.left_s <= 0:
            raise Preempted(f"out of time: {what}. Run the same command to go on")
