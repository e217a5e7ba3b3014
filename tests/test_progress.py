"""Progress in a terminal of any width, in a pipe, and in the log of a job."""

import os
from io import StringIO

import pytest

from bsi import progress
from bsi.progress import CLEAR, Progress, amount, log, readable_bytes, readable_seconds


class Terminal(StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that progress sees; tests set it."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return now


def test_a_pipe_gets_a_line_every_ten_seconds_and_the_end(clock: list[float]) -> None:
    stream = StringIO()
    with Progress("train", 40, "step", stream=stream) as shown:
        for _ in range(40):
            clock[0] += 0.5
            shown.advance(note="3.2 bits/dim")
    assert stream.getvalue().splitlines() == [
        "train 0/40 steps",
        "train 20/40 steps · 2 steps/s · 0:10 left · 3.2 bits/dim",
        "train 40/40 steps · 2 steps/s · done in 0:20 · 3.2 bits/dim",
    ]


def test_an_unchanged_plain_line_is_not_repeated(clock: list[float]) -> None:
    stream = StringIO()
    with pytest.raises(RuntimeError), Progress("prepare", 9, "image", stream=stream):
        raise RuntimeError
    assert stream.getvalue() == "prepare 0/9 images\n"


def test_a_resumed_count_does_not_inflate_the_rate(clock: list[float]) -> None:
    stream = StringIO()
    with Progress("train", 100, "step", done=90, stream=stream) as shown:
        clock[0] += 2
        shown.advance(10)
    assert stream.getvalue().splitlines()[-1] == "train 100/100 steps · 5 steps/s · done in 2.0 s"


@pytest.mark.parametrize("columns", [1, 2, 20, 40, 60, 80, 200])
def test_a_live_line_never_wraps(columns: int, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")  # so that characters are columns
    stream = Terminal()
    with Progress("train", 246, "step", stream=stream) as shown:
        clock[0] += 20
        shown.advance(123, note="1008 images/s · 9.303 bits/dim · lr 5.0e-05 · saved 0:08 ago")
    rows = stream.getvalue().removesuffix("\n").split("\r\x1b[2K")
    assert "\n" not in stream.getvalue().removesuffix("\n")
    assert max(map(len, rows)) < max(columns, 2)
    assert rows[-1].startswith("━" * 12 + " ") == (columns == 200)


def test_units_are_words(clock: list[float]) -> None:
    assert (amount(3, "step"), amount(2, "batch"), amount(12_345_678, "B")) == ("3 steps", "2 batches", "12.3 MB")
    assert (readable_seconds(75.0), readable_seconds(3700.0)) == ("1:15", "1:01:40")
    assert [readable_bytes(n) for n in (3 << 30, 12 << 20, 3000)] == ["3.0 GiB", "12.0 MiB", "2.9 KiB"]
    stream = StringIO()
    with Progress("download", 170_000_000, "B", stream=stream) as shown:
        clock[0] += 11
        shown.advance(11_000_000)
    assert stream.getvalue().splitlines()[-1] == "download 11.0 MB of 170.0 MB · 1.0 MB/s · 2:39 left"


def test_a_terminal_without_unicode_gets_an_ascii_bar(clock: list[float]) -> None:
    stream = Terminal()
    stream.encoding = "ANSI_X3.4-1968"  # what Python calls ASCII in an old locale
    with Progress("train", 4, "step", stream=stream) as shown:
        clock[0] += 1
        shown.advance(2)
    assert stream.getvalue().isascii()
    assert "train 2/4 steps, 2 steps/s, 0:01 left" in stream.getvalue()


@pytest.mark.parametrize("end", ["pipe", "/dev/full"])
def test_a_log_that_cannot_be_written_does_not_stop_the_work(end: str) -> None:
    if end == "pipe":
        reader, writer = os.pipe()
        os.close(reader)  # as `| head` does
    else:
        writer = os.open(end, os.O_WRONLY)
    with os.fdopen(writer, "w") as stream:
        with Progress("train", 2, "step", stream=stream) as progress:
            progress.advance(2)
        log("neither is this an error", stream)


def test_text_from_files_does_not_control_the_terminal() -> None:
    stream = Terminal()
    log("bsi eval: no dataset \x1b]0;title\x07 or \u202ebackwards\n\tnext", stream, color="31")
    printed = stream.getvalue().removeprefix("\x1b[31mbsi eval\x1b[0m")
    assert printed.startswith(": no dataset")
    assert printed.endswith("\n\tnext\n")
    assert not set(printed) & set("\x1b\x07\u202e")


def test_a_line_is_logged_above_the_bar(clock: list[float]) -> None:
    stream = Terminal()
    with Progress("train", 4, "step", stream=stream):
        log("step 1: 3.2 bits/dim", stream)
    log("next", stream)
    assert f"{CLEAR}step 1: 3.2 bits/dim\n" in stream.getvalue()
    assert stream.getvalue().endswith("\nnext\n")
