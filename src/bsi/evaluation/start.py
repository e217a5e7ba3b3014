"""What a cold start waits for: the time from the process's start to the end of the first step, cut into named parts."""

from __future__ import annotations

import os
import time

__all__ = ["Start", "since_process_start"]


class Start:
    """The parts so far, in seconds. They add up to the time since `since`: 0 is the process's start."""

    def __init__(self, since: float = 0.0) -> None:
        self._last, self.parts_s = since, dict[str, float]()

    def lap(self, part: str) -> None:
        """What was done since the last lap."""
        now = since_process_start()
        self.parts_s[part], self._last = now - self._last, now

    @property
    def seconds(self) -> float:
        return sum(self.parts_s.values())


def since_process_start() -> float:
    """Seconds since this process began, imports included; NaN where the system does not say."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return float("nan")
