"""Progress with rate and remaining time on stderr: a live bar in a terminal, plain lines elsewhere.

    with Progress("train", total=1000, unit="step") as progress:
        for step in range(1000):
            progress.advance(1, note=f"loss {loss:.3f}")

A log that cannot be written (a full disk, a closed terminal, a closed pipe) never stops the program. Imports no torch,
and imports rich only to draw a bar.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from io import StringIO
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from typing import TextIO as Stream
else:
    from io import TextIOBase as Stream  # a StringIO is no TextIO

LINE_EVERY_S = 10.0
BAR_EVERY_S = 0.1
BAR_COLUMNS = 24
CLEAR = "\r\x1b[2K"  # the current row of the terminal
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # all but tabs and ends of lines


# ---- Lines on stderr -------------------------------------------------------------------------------------------------


def log(text: str, stream: Stream | None = None, color: str = "") -> None:
    """Print a line on stderr, above a progress bar if one is shown. Never raises.

    `color` is that of what precedes the first colon, as parameters of the terminal's escape sequence.
    """
    command, colon, rest = printable(text).partition(":")
    command = f"\x1b[{color}m{command}\x1b[0m" if color else command
    _write(stream or _stderr(), f"{CLEAR if Progress.bars else ''}{command}{colon}{rest}\n")


def printable(text: str) -> str:
    """The text without characters that control a terminal or reorder a line: it may come from a file."""
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def _stderr() -> Stream:
    """sys.stderr, or a stream that discards everything in a process without one."""
    return sys.stderr or StringIO()


def _write(stream: Stream, text: str) -> None:
    """Write and flush `text`; a stream that cannot be written is silenced from then on."""
    try:
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError):  # ValueError: the stream is closed
        with contextlib.suppress(OSError, ValueError):
            silence(stream.fileno())


def silence(descriptor: int) -> None:
    """Redirect a file descriptor that cannot be written to os.devnull, with what is left in its buffer."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def supports_unicode(encoding: str | None) -> bool:
    """Whether a stream of this encoding can print every character. A stream without an encoding holds strings."""
    return encoding is None or encoding.lower().startswith("utf")


def supports_bars(stream: Stream) -> bool:
    """Whether a stream is a terminal that can clear a row."""
    return not stream.closed and stream.isatty() and os.environ.get("TERM") != "dumb"


def supports_color(stream: Stream) -> bool:
    """Whether to print colors: in a terminal, unless NO_COLOR or TERM=dumb is set."""
    return supports_bars(stream) and not os.environ.get("NO_COLOR")


# ---- Readable numbers ------------------------------------------------------------------------------------------------


def readable_seconds(seconds: float) -> str:
    """`75` -> `1:15`, `3700` -> `1:01:40`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def readable_bytes(count: int) -> str:
    """`3.1 GiB`, `12.0 MiB`, `2.9 KiB`."""
    unit, size = next(((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20)) if count >= s), ("KiB", 2**10))
    return f"{count / size:.1f} {unit}"


def amount(count: float | int, unit: str) -> str:
    """`3 steps`, `2 batches`; bytes as `12.3 MB`."""
    if unit == "B":
        return f"{count / 1e6:.1f} MB"
    number = f"{count:d}" if isinstance(count, int) else f"{count:.4g}"
    return f"{number} {unit}{'es' if unit.endswith('ch') else 's'}"


# ---- Progress --------------------------------------------------------------------------------------------------------


class Progress:
    """A counter that shows its rate and the remaining time.

    A terminal shows a live bar. Other streams get a plain line at the start, every ten seconds, and at the end.

    Args:
        what: The work, as the first word of the line.
        total: The count at which the work is done.
        unit: What is counted, in the singular; `B` for bytes.
        done: The count to start from, e.g. of a resumed run. It does not enter the rate. Counts may be fractions.
        stream: By default sys.stderr; a StringIO shows nothing.
    """

    bars: ClassVar[int] = 0  # number of bars that are currently shown in a terminal

    def __init__(
        self, what: str, total: int, unit: str = "it", done: float | int = 0, stream: Stream | None = None
    ) -> None:
        self.what, self.total, self.unit, self.done, self.note = what, total, unit, done, ""
        self.stream = stream or _stderr()
        self.live = supports_bars(self.stream)
        self._first, self._shown = done, (done, "")
        self._started = self._shown_at = time.monotonic()

    def __enter__(self) -> Progress:
        Progress.bars += self.live
        self._show()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live or self._shown != (self.done, self.note):  # a plain line is not repeated
            self._show()
        if self.live:
            Progress.bars -= 1
            _write(self.stream, "\n")

    def advance(self, count: float | int = 1, note: str | None = None) -> None:
        """Add to the count, and show it if it was last shown long enough ago."""
        done = self.done + count
        self.done = round(done) if abs(done - round(done)) < 1e-6 else done  # parts of a sample add up to one
        self.note = self.note if note is None else note
        if time.monotonic() - self._shown_at >= (BAR_EVERY_S if self.live else LINE_EVERY_S):
            self._show()

    def line(self) -> str:
        """The progress as plain text."""
        elapsed, fresh = time.monotonic() - self._started, self.done - self._first
        done = self.done if isinstance(self.done, int) else f"{int(10 * self.done) / 10:g}"
        counted = f"{amount(self.done, 'B')} of " if self.unit == "B" else f"{done}/"
        parts = [f"{self.what} {counted}{amount(self.total, self.unit)}"]
        if fresh and elapsed > 0:
            rate = fresh / elapsed
            parts.append(f"{amount(rate, self.unit)}/s")
            if self.done < self.total:
                parts.append(f"{readable_seconds((self.total - self.done) / rate)} left")
        if self.done >= self.total:
            parts.append(f"done in {readable_seconds(elapsed) if elapsed >= 10 else f'{elapsed:.1f} s'}")
        separator = " · " if supports_unicode(self.stream.encoding) else ", "
        return separator.join([*parts, self.note] if self.note else parts)

    def _show(self) -> None:
        self._shown_at, self._shown = time.monotonic(), (self.done, self.note)
        _write(self.stream, CLEAR + self._row() if self.live else f"{self.line()}\n")

    def _row(self) -> str:
        """The bar and the line in one row. It must not wrap: a row that wraps could not be cleared."""
        from rich.console import Console
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        console = Console(file=self.stream, highlight=False)
        line, columns = Text(self.line(), no_wrap=True, overflow="crop"), max(console.width - 1, 1)
        bar = [ProgressBar(max(self.total, 1), self.done, BAR_COLUMNS)] if len(line) + BAR_COLUMNS < columns else []
        row = Table.grid(padding=(0, 1))
        row.add_row(*bar, line)
        with console.capture() as captured:
            console.print(row, end="", width=columns)
        return captured.get().strip("\n")


# Whether to show progress, or a function that is called with each count.
Shown = bool | Callable[[float | int], object]


@contextlib.contextmanager
def shown(progress: Shown, what: str, total: int, unit: str) -> Iterator[Callable[[float | int], object]]:
    """A function to call with each count: the given one, that of a `Progress`, or one that does nothing."""
    if callable(progress):
        yield progress
    else:
        with Progress(what, total, unit, stream=None if progress else StringIO()) as bar:
            yield bar.advance
