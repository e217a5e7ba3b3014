"""The command line: `bsi COMMAND ...`. One file per command; this one finds it, and turns errors into exit codes.

Nothing here or at the top of a command's file imports torch: help answers at once. A command's file holds a frozen
dataclass, whose fields are the options and whose docstring is the help, and `run(args) -> int`.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import io
import os
import sys
from dataclasses import dataclass

from bsi.errors import BsiError, UsageError
from bsi.io import FULL, cannot_write, system_error
from bsi.progress import forget, in_color, speaks_unicode

__all__ = ["COMMANDS", "Command", "main"]

REFUSALS = (*FULL, errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class Command:
    """A command's module in this package, the dataclass of its options (None: it reads its own words), and a line."""

    module: str
    options: str | None
    summary: str


COMMANDS: dict[str, Command] = {
    "demo": Command("demo", "Demo", "train a small model on handwritten digits, on a CPU, and draw some"),
    "train": Command("train", None, "train a recipe, or go on with a run"),
    "sample": Command("sample", "Sample", "draw samples from a trained model"),
    "eval": Command("eval", "Eval", "bits per dimension and sample quality, with their errors"),
    "fid": Command("fid", "Fid", "Fréchet distance between two sets of images"),
    "data": Command("data", "Data", "prepare a dataset once, or list what is there"),
    "bench": Command("bench", "Bench", "how fast a network trains, samples and measures here"),
    "study": Command("study", "StudyOptions", "redo a table or figure of the paper"),
    "report": Command("report", "Report", "everything about a run in one file that opens offline"),
    "view": Command("view", "View", "watch a belief sharpen in the browser; denoise, inpaint"),
    "export": Command("export", "Export", "write a run's weights as one file"),
    "doctor": Command("doctor", "Doctor", "what is installed, what is missing, and what fixes it"),
}


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return (
        "usage: bsi COMMAND [options]\n\nBayesian Sample Inference: generative models with honest likelihoods.\n\n"
        f"{lines}\n\n`bsi COMMAND --help` explains a command; --debug shows the traceback of an error."
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 2 usage, and those of `bsi.errors`."""
    argv = sys.argv[1:] if argv is None else argv
    _open_outputs()
    debug = "--debug" in argv
    argv = [word for word in argv if word != "--debug"]
    who = " ".join(["bsi", *argv[:1]])
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # so that a reader who has left is noticed here, not at the interpreter's end
    except BrokenPipeError:  # whoever read our output has left, as `| head` does
        forget(sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as left:  # with what is kept, where something is
        print(f"\n{who}: interrupted{f': {left}' if str(left) else ''}", file=sys.stderr)
        return 130
    except Exception as error:
        told = error if isinstance(error, BsiError) else _homeless(error) or _refused(error)
        if debug or told is None:
            raise
        print(f"{_red(who)}: {told}", file=sys.stderr)
        return told.code


class _Commentary(io.TextIOWrapper):
    """Standard error whose reader may leave, as `| head` does: work goes on, and what is told of it goes nowhere."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            forget(self.fileno())
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            forget(self.fileno())


def _open_outputs() -> None:
    """Outputs that take whatever is told, whatever we were started with.

    A service may have none: print() would then write for stderr on stdout. An old locale lacks some of our letters. A
    file's name may hold bytes that are no text: they leave as they came, so that a script finds the file.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (open as long as the process is)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr is sys.__stderr__:
        sys.stderr = _Commentary(sys.stderr.buffer, sys.stderr.encoding, sys.stderr.errors, line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not speaks_unicode(stream.encoding):
            stream.reconfigure(errors="replace")
        elif isinstance(stream, io.TextIOWrapper) and stream is sys.stdout:
            stream.reconfigure(errors="surrogateescape")
    if os.environ.get("NO_COLOR"):  # tyro, which is not imported yet, has its own name for it
        os.environ.setdefault("PYTHON_TYRO_ANSI_CODES", "False")


def _homeless(error: Exception) -> BsiError | None:
    """The message of pathlib where ~ means nothing: neither HOME is set nor the user known, as in some containers."""
    if not isinstance(error, RuntimeError) or "home directory" not in str(error):
        return None
    return UsageError("there is no home folder here: set HOME to a folder of yours")


def _refused(error: Exception) -> BsiError | None:
    """The message of a full or read-only disk, wherever it was met. Other errors of the system have a cause in here."""
    refused = system_error(error)
    if refused is None or refused.errno not in REFUSALS:
        return None
    try:
        sys.stdout.flush()
    except OSError:
        forget(sys.stdout.fileno())
    return cannot_write(refused.filename or "the output", refused, "place")


def _red(text: str) -> str:
    """In a terminal; elsewhere as it is."""
    return f"\x1b[1;31m{text}\x1b[0m" if in_color(sys.stderr.isatty()) else text


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return 0 if argv else 2
    name, *words = argv
    if name == "--version":
        from bsi import __version__

        print(f"bsi {__version__}")
        return 0
    if name == "--completion":
        from bsi.cli import completion

        return completion.main(words)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `bsi {near[0]}`?" if near else "`bsi --help` lists the commands."
        raise UsageError(f"no such command: {hint}")
    command = COMMANDS[name]
    module = importlib.import_module(f"bsi.cli.{command.module}")
    if command.options is None:
        return int(module.run(words))
    from bsi.cli.options import read

    return int(module.run(read(getattr(module, command.options), words, f"bsi {name}")))
