"""What commands share: options, parsing with tyro, completion for the shell, and the printing of results."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import shutil
import sys
import textwrap
import typing
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar, runtime_checkable

import tyro

from bsi.errors import UsageError
from bsi.progress import log, printable, supports_unicode

T = TypeVar("T")

INTEGERS = 2**63  # larger ones do not fit in a tensor
SHELLS = ("bash", "zsh")
SHOWN_IF_SET = tyro.conf.arg(
    help_behavior_hint=lambda shown: "" if shown in ("None", "False", "") else f"(default: {shown})"
)


@dataclass(frozen=True)
class Within:
    """The limits of an option, in its annotation: `num: Annotated[int, Within(1, 100)]`. None is valid."""

    low: int | float
    high: int | float = INTEGERS - 1


@runtime_checkable
class HasDefaults(Protocol):
    """Options whose defaults depend on an argument, such as the run."""

    def defaults(self) -> Any:
        """Options with these defaults, to parse the words again."""


# Options of several commands.
RUN_HELP = "A run folder, a file that `bsi export` wrote, or the name of an installed network: digits."
RunPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help=RUN_HELP)]
Count = Annotated[int, Within(1)]
BatchSize = Annotated[int, Within(1), tyro.conf.arg(help="Samples per batch.")]
Precision = Annotated[
    Literal["auto", "bf16", "float16", "float32"],
    tyro.conf.arg(help="Precision inside the network; everything around it is float32."),
]
Device = Annotated[Literal["cuda", "cpu"] | None, tyro.conf.arg(help="By default a GPU if there is one.")]
Json = Annotated[bool, tyro.conf.arg(help="Print the result as JSON on stdout.")]


# ---- Parsing ---------------------------------------------------------------------------------------------------------


def parse(options: type[T], words: Sequence[str], prog: str, text: str = "", *markers: Any, **default: Any) -> T:
    """Parse the words after `prog` into a dataclass. A mistake ends the process with exit code 2 (`SystemExit`)."""
    hide_empty_defaults(options)
    columns = shutil.get_terminal_size().columns
    if not 20 <= columns <= 500:  # tyro would not terminate in one column
        os.environ["COLUMNS"] = str(max(20, min(columns, 500)))
    config = (tyro.conf.DisallowNone, *(markers or (tyro.conf.FlagCreatePairsOff,)))
    text = paragraphs(text or options.__doc__ or "")
    found: T = tyro.cli(options, args=words, prog=prog, description=text, config=config, **default)
    check_numbers(found)
    return found


def hide_empty_defaults(options: type) -> None:
    """Hide the defaults None, False and () in the help of a dataclass and of the dataclasses it consists of."""
    for field, hint in _hints(options):
        parts = [part for part in (hint, *typing.get_args(hint)) if isinstance(part, type) and is_dataclass(part)]
        for part in parts:
            hide_empty_defaults(part)
        optional = type(None) in typing.get_args(hint) or field.default in (None, False, ())
        if not parts and optional and field.default is not MISSING:
            options.__annotations__[field.name] = Annotated[hint, SHOWN_IF_SET]


def check_numbers(options: object, prefix: str = "--") -> None:
    """Reject values outside the limits of their option, integers of more than 64 bits, and NaN."""
    for field, hint in _hints(type(options)):
        value, name = getattr(options, field.name), prefix + field.name.rstrip("_").replace("_", "-")
        if is_dataclass(value):
            check_numbers(value, prefix if field.name in ("recipe", "options", "sampler") else f"{name}.")
        for limit in _limits(hint):
            if value is not None and not limit.low <= value <= limit.high:
                wanted = f"at least {limit.low}" if value < limit.low else f"at most {limit.high}"
                raise UsageError(f"{name} must be {wanted}, got {value}.")
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, int) and abs(each) >= INTEGERS:
                raise UsageError(f"{name} must be smaller than 2^63, got a number of {len(str(each))} digits.")
            if isinstance(each, float) and math.isnan(each):
                raise UsageError(f"{name} must be a number, got nan.")


def _hints(options: type) -> Iterator[tuple[Any, Any]]:
    hints = typing.get_type_hints(options, include_extras=True)
    return ((field, hints[field.name]) for field in fields(typing.cast(Any, options)))


def _limits(hint: Any) -> list[Within]:
    """The limits in a type, also in those that it consists of: `Count | None`."""
    parts = [*getattr(hint, "__metadata__", ()), *typing.get_args(hint)]
    return [part for part in parts if isinstance(part, Within)] + [each for part in parts for each in _limits(part)]


def fill(text: str, indent: str = "  ") -> str:
    """A paragraph wrapped to the width of the terminal. Names with hyphens (initial-precision) are not broken."""
    columns = max(min(shutil.get_terminal_size().columns, 120), len(indent) + 1)
    return textwrap.fill(text, columns, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def paragraphs(text: str) -> str:
    """Paragraphs for tyro, which breaks no lines.

    It joins lines that begin with a letter, and doubles an empty line before other lines. Therefore lines begin with
    blanks here, and an empty line contains a zero-width space if the encoding has that character.
    """
    filled = (fill(" ".join(part.split())) for part in inspect.cleandoc(text).split("\n\n"))
    return ("\n\u200b\n" if supports_unicode(sys.stdout.encoding) else "\n\n").join(filled)


def completion(words: Sequence[str]) -> str:
    """The completion script of tyro for a shell: `eval "$(bsi --completion bash)"`."""
    if len(words) != 1 or words[0] not in SHELLS:
        raise UsageError(f"--completion takes {' or '.join(SHELLS)}, got {' '.join(words) or 'nothing'}.")
    from bsi.cli import COMMANDS
    from bsi.cli.training import Train, default_of, method_options
    from bsi.recipes import RECIPES

    recipes = [Annotated[Train, tyro.conf.subcommand(name, default=default_of(name))] for name in RECIPES]
    commands: list[Any] = []
    for name, (module, options, _) in COMMANDS.items():
        found: Any = typing.Union[tuple(recipes)]  # noqa: UP007 (of a list)
        if options is not None:
            found = getattr(importlib.import_module(f"bsi.cli.{module}"), options)
            hide_empty_defaults(found)
        commands.append(Annotated[found, tyro.conf.subcommand(name)])
    any_command: Any = typing.Union[tuple(commands)]  # noqa: UP007 (of a list)
    config, script = (tyro.conf.AvoidSubcommands, tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff), StringIO()
    with suppress(SystemExit), redirect_stdout(script), method_options(default_of("digits")):  # tyro exits after it
        tyro.cli(any_command, prog="bsi", args=["--tyro-print-completion", words[0]], config=config)
    lines = script.getvalue().strip().splitlines()
    # The shell would offer the two lines of a description as two completions.
    return "\n".join(line.replace("\\n", " ") if line.startswith("COMPLETION_SPEC") else line for line in lines)


# ---- Printing --------------------------------------------------------------------------------------------------------


def answer(as_json: bool, record: object, text: object) -> int:
    """Print the result of a command and return exit code 0."""
    print(json.dumps(record) if as_json else printable(str(text)))
    return 0


def plus_minus(error: float | None, digits: int = 4) -> str:
    """A standard error as text; nothing if it is unknown."""
    return "" if error is None else f" ± {error:.{digits}f}"


@contextmanager
def logged_warnings(command: str, show: bool = True) -> Iterator[None]:
    """Print each warning of the block once, as one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            for message in dict.fromkeys(str(warning.message) for warning in caught) if show else ():
                log(f"{command}: warning: {message}")
