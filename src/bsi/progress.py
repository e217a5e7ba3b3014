"""Progress with rate and time left: a live bar in a terminal, plain lines elsewhere, on stderr. Imports no torch.

with Progress("train", total=1000, unit="step") as progress:
    for step in range(1000):
        progress.advance(1, note=f"loss {loss:.3f}")
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from io import StringIO
from types import TracebackType
from typing import TextIO

LINE_EVERY_S = 10.0
BAR = 24  # columns

Stream = TextIO | StringIO  # a StringIO is for progress that nobody looks at


def readable_seconds(seconds: float) -> str:
    """`75` -> `1:15`, `3700` -> `1:01:40`."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def readable_bytes(count: int) -> str:
    """`3.1 GiB`, `12.0 MiB`, `2.9 KiB`: in the largest unit of which there is one."""
    unit, size = next(((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20)) if count >= s), ("KiB", 2**10))
    return f"{count / size:.1f} {unit}"


def amount(count: float | int, unit: str) -> str:
    """`3 steps`, `2 batches`; bytes as `12.3 MB`."""
    if unit == "B":
        return f"{count / 1e6:.1f} MB"
    shown = f"{count:d}" if isinstance(count, int) else f"{count:.4g}"
    return f"{shown} {unit}{'es' if unit.endswith('ch') else 's'}"


def speaks_unicode(encoding: str | None) -> bool:
    """Whether a stream of this encoding takes any letter: one in an old locale does not; one without takes strings."""
    return encoding is None or encoding.lower().startswith("utf")


def in_color(terminal: bool) -> bool:
    """Whether to color what goes to a terminal, or not: not where it has no colors or its user wants none."""
    return terminal and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def forget(output: int) -> None:
    """A descriptor that nobody reads any more: what is left in its buffer, and whatever follows, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)


class Progress:
    """Counts towards `total`; shows rate and time left. In a pipe: a plain line every ten seconds, and the last."""

    def __init__(self, what: str, total: int, unit: str = "it", done: int = 0, stream: Stream | None = None) -> None:
        self.what, self.total, self.unit, self.done, self.note = what, total, unit, done, ""
        self.stream = sys.stderr if stream is None else stream
        self.live = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.unicode = speaks_unicode(self.stream.encoding)
        self._resumed_at = self._told = done
        self._started = self._shown = time.monotonic()

    def __enter__(self) -> Progress:
        self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live or self.done != self._told:  # a plain line that says nothing new is left out
            self._show()
        if self.live:
            self._write("\n")

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
        whole = amount(self.total, self.unit)
        counted = f"{amount(self.done, 'B')} of {whole}" if self.unit == "B" else f"{self.done}/{whole}"
        parts = [f"{self.what} {counted}"]
        if fresh and elapsed > 0:
            rate = fresh / elapsed
            parts.append(f"{amount(rate, self.unit)}/s")
            if self.done < self.total:
                parts.append(f"{readable_seconds((self.total - self.done) / rate)} left")
        if self.done >= self.total:
            parts.append(f"done in {readable_seconds(elapsed) if elapsed >= 10 else f'{elapsed:.1f} s'}")
        return (" · " if self.unicode else ", ").join([*parts, self.note] if self.note else parts)

    def _show(self) -> None:
        self._shown, self._told = time.monotonic(), self.done
        self._write(f"\r\x1b[2K{self._bar()}" if self.live else f"{self.line()}\n")

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except BrokenPipeError:  # Ctrl-C ends `| tee` too, and work is not lost because nobody looks
            forget(self.stream.fileno())

    def _bar(self) -> str:
        """The bar and its line in one row of the terminal: a row that wraps could not be drawn over."""
        columns = shutil.get_terminal_size().columns - 1
        line = self.line()[:columns]
        width = min(BAR, columns - len(line) - 1)
        if width < BAR // 3:
            return line
        filled = width * min(self.done, self.total) // max(self.total, 1)
        if not self.unicode:
            return f"{'#' * filled}{'-' * (width - filled)} {line}"
        if not in_color(self.live):
            return f"{'━' * filled}{'─' * (width - filled)} {line}"
        return f"\x1b[36m{'━' * filled}\x1b[2m{'━' * (width - filled)}\x1b[0m {line}"
