"""The command line, `bsi COMMAND ...`.

A command is a frozen dataclass: its fields are the options, its docstring is the help, and its method `execute` does
the work and returns the exit code. Neither this file nor the top of a command's file imports torch: help is immediate.
An error becomes one line on stderr and an exit code of `bsi.errors`; results go to stdout, other output to stderr.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import io
import os
import sys
import warnings
from typing import NamedTuple

from bsi import __version__
from bsi.errors import BsiError, UsageError
from bsi.io import FULL, cannot_write, system_error
from bsi.progress import log, silence, supports_color, supports_unicode

__all__ = ["COMMANDS", "Command", "main"]


STDERR = 2


class Command(NamedTuple):
    """The module of a command, the dataclass of its options (None: the module parses the words), and a summary."""

    module: str
    options: str | None
    summary: str


COMMANDS: dict[str, Command] = {
    "demo": Command("demo", "Demo", "train a small model on handwritten digits, on a CPU, and draw some"),
    "train": Command("training", None, "train a recipe, or resume a run"),
    "distill": Command("training", "Distill", "tune a trained network to draw samples in 1 to 4 evaluations"),
    "sample": Command("sample", "Sample", "draw samples from a trained model"),
    "eval": Command("eval", "Eval", "bits per dimension and sample quality, with standard errors"),
    "audit": Command("eval", "Audit", "all likelihoods of a model on the same samples, and their order"),
    "fid": Command("eval", "Fid", "Fréchet distance between two sets of images"),
    "data": Command("data", "DataOptions", "prepare a dataset, or list the prepared ones"),
    "bench": Command("bench", "Bench", "measure how fast a network trains and samples on this machine"),
    "study": Command("study", "StudyOptions", "reproduce a table or figure of the paper"),
    "report": Command("pages", "ReportOptions", "write a run as one HTML file that opens offline"),
    "view": Command("pages", "View", "watch a belief sharpen in the browser; denoise, inpaint"),
    "export": Command("pages", "Export", "write a run's weights as one file"),
    "compress": Command("compress", "Compress", "compress images without loss, to the size of the bound"),
    "decompress": Command("compress", "Decompress", "restore compressed data exactly"),
    "doctor": Command("doctor", "Doctor", "check the installation, and show how to fix it"),
}


OVERVIEW = """usage: bsi COMMAND [options]

Bayesian Sample Inference: generative models with likelihoods.

{commands}

`bsi COMMAND --help` explains a command. --debug shows the traceback of an error.
`bsi --version` prints the version, `bsi --completion bash|zsh` a script for the shell."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code, see `bsi.errors`."""
    argv = sys.argv[1:] if argv is None else argv
    _prepare_streams()
    words = [word for word in argv if word != "--debug"]
    command = " ".join(["bsi", *words[:1]])
    warnings.formatwarning = lambda text, *_: f"{command}: warning: {text}\n"  # without a line of the source
    try:
        try:
            return _run(words)
        finally:
            sys.stdout.flush()  # so that an unwritable stdout is reported here and not at the interpreter's exit
    except BrokenPipeError:  # the reader of our output has left, e.g. `| head`
        silence(sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as stop:  # its text, if any, describes what was saved
        log(f"\n{command}: interrupted{f': {stop}' if str(stop) else ''}")
        return 130
    except SystemExit as end:  # tyro, after help or a mistake
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        if "--debug" in argv:
            raise
        reason = _explained(error)
        log(f"{command}: {reason}", color="1;31" if supports_color(sys.stderr) else "")
        return reason.code


def _run(words: list[str]) -> int:
    name, *rest = words or ["--help"]
    if name in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        lines = (f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
        print(OVERVIEW.format(commands="\n".join(lines)))
        return 0 if words else 2
    if name == "--version":
        print(f"bsi {__version__}")
        return 0
    from bsi.cli.options import HasDefaults, completion, parse

    if name == "--completion":
        print(completion(rest))
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean `bsi {near[0]}`?" if near else "`bsi --help` lists the commands."
        raise UsageError(f"there is no such command. {hint}")
    module, options, _ = COMMANDS[name]
    found = importlib.import_module(f"bsi.cli.{module}")
    if options is None:
        return int(found.run(rest))
    args = parse(getattr(found, options), rest, f"bsi {name}")
    if isinstance(args, HasDefaults):  # for what the words leave out
        args = parse(type(args), rest, f"bsi {name}", default=args.defaults())
    return int(args.execute())


def _explained(error: Exception) -> BsiError:
    """The error as a `BsiError`: itself, a message for what the system reported, or one for an unexpected error."""
    if isinstance(error, BsiError):
        return error
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # pathlib, for ~
        return UsageError("a path begins with ~, and there is no such home folder. Set HOME, or write the path out.")
    reported = system_error(error)
    if reported is not None and reported.errno in (*FULL, errno.EROFS):
        try:
            sys.stdout.flush()
        except OSError:
            silence(sys.stdout.fileno())
        return cannot_write(reported.filename or "the output", reported, "place")
    if reported is not None and reported.filename is not None:
        return UsageError(f"cannot access {reported.filename}: {reported.strerror}. Give another file or folder.")
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # of torch
        return BsiError("not enough memory. Use smaller numbers, or a machine with more memory.")
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return BsiError(f"unexpected error: {message:.500}. Run the same command with --debug for the traceback.")


class _Log(io.TextIOWrapper):
    """A standard error that never raises: the work continues when its log cannot be written."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            silence(self.fileno())
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            silence(self.fileno())


def _prepare_streams() -> None:
    """Make stdout and stderr accept any text.

    A service may have neither; print() would then write text for stderr to stdout. The encoding of an old locale
    may lack characters, and a file name may contain bytes that are not text: these bytes are printed unchanged.
    """
    with contextlib.suppress(OSError):  # a file that is opened later must not get the number of a closed stream
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
            pass
        os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (open as long as the process)
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr is sys.__stderr__:
        sys.stderr = _Log(sys.stderr.buffer, sys.stderr.encoding, sys.stderr.errors, line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not supports_unicode(stream.encoding):
            stream.reconfigure(errors="replace")
        elif isinstance(stream, io.TextIOWrapper) and stream is sys.stdout:
            stream.reconfigure(errors="surrogateescape")
    if os.environ.get("NO_COLOR"):  # tyro, which is imported later, has its own variable
        os.environ.setdefault("PYTHON_TYRO_ANSI_CODES", "False")
