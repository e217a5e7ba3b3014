"""Progress with rate and time left: a live bar in a terminal, plain lines elsewhere, on stderr. Imports no torch.

with Progress("train", total=1000, unit="step") as progress:
    for step in range(1000):
        progress.advance(1, note=f"loss {loss:.3f}")
"""

from __future__ import annotations

import sys
import time
from io import StringIO
from types import TracebackType
from typing import TextIO

LINE_EVERY_S = 10.0

Stream = TextIO | StringIO  # a StringIO is for progress that nobody looks at


def readable_seconds(seconds: float) -> str:
    """`75` -> `1:15`, `3700` -> `1:01:40`."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Counts towards `total`; shows rate and time left. In a pipe: a plain line every ten seconds."""

    def __init__(self, what: str, total: int, unit: str = "it", done: int = 0, stream: Stream | None = None) -> None:
        self.what, self.total, self.unit, self.done, self.note = what, total, unit, done, ""
        self.stream = sys.stderr if stream is None else stream
        self.live = self.stream.isatty()
        self._resumed_at = done
        self._started = self._shown = time.monotonic()

    def __enter__(self) -> Progress:
        self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show()
        if self.live:
            self.stream.write("\n")
            self.stream.flush()

    def advance(self, count: int = 1, note: str | None = None) -> None:
        self.done += count
        if note is not None:
            self.note = note
        if time.monotonic() - self._shown >= (0.1 if self.live else LINE_EVERY_S):
            self._show()

    def line(self) -> str:
        """What is shown, as plain text."""
        elapsed = time.monotonic() - self._started
        fresh = self.done - self._resumed_at
        rate = fresh / elapsed if elapsed > 0 and fresh else 0.0
        if self.done >= self.total:
            ending = f"done in {readable_seconds(elapsed)}"
        else:
            ending = f"{readable_seconds((self.total - self.done) / rate)} left" if rate else "time left unknown"
        parts = [f"{self.what} {self.done}/{self.total} {self.unit}", f"{rate:.4g} {self.unit}/s", ending]
        return " · ".join([*parts, self.note] if self.note else parts)

    def _show(self) -> None:
        self._shown = time.monotonic()
        if self.live:
            width = 24
            filled = width * min(self.done, self.total) // max(self.total, 1)
            self.stream.write(f"\r\x1b[2K\x1b[36m{'━' * filled}\x1b[2m{'━' * (width - filled)}\x1b[0m {self.line()}")
        else:
            self.stream.write(self.line() + "\n")
        self.stream.flush()
