"""From words to a dataclass of options, by tyro, with help that shows only what one can type and wants to know.

A switch that is off is one flag (--json, not --json and --no-json). `None` is nothing to type, and not offered. Where
a default means no more than leaving the option out (None, off, nothing), none is shown: the text says what happens.
"""

from __future__ import annotations

import inspect
import shutil
import sys
import textwrap
import typing
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, TypeVar

import tyro

from bsi.progress import speaks_unicode

__all__ = ["lines", "quiet", "quiet_parts", "read", "wrapped"]

T = TypeVar("T")

NOTHING = ("None", "False", "")  # as tyro shows a default that means no more than leaving the option out
LEFT_OUT = tyro.conf.arg(help_behavior_hint=lambda shown: "" if shown in NOTHING else f"(default: {shown})")


def read(options: type[T], words: Sequence[str], prog: str) -> T:
    """The options that the words after `prog` stand for; a mistake is told with exit code 2."""
    about = wrapped(options.__doc__ or "")
    return tyro.cli(quiet(options), args=words, prog=prog, description=about, config=(tyro.conf.DisallowNone,))


def quiet(options: type[T]) -> type[T]:
    """The same class, whose options that may be left out show no default in the help."""
    hints = typing.get_type_hints(options, include_extras=True)
    for field in fields(typing.cast(typing.Any, options)):
        if field.default is None or field.default is False or field.default == ():
            options.__annotations__[field.name] = Annotated[hints[field.name], LEFT_OUT, tyro.conf.FlagCreatePairsOff]
    return options


def quiet_parts(options: type) -> None:
    """In the help of a class and of the classes it is made of, None is no default to show; what it is set to is."""
    for name, hint in typing.get_type_hints(options, include_extras=True).items():
        parts = [part for part in (hint, *typing.get_args(hint)) if isinstance(part, type) and is_dataclass(part)]
        for part in parts:
            quiet_parts(part)
        if not parts and type(None) in typing.get_args(hint):
            options.__annotations__[name] = Annotated[hint, LEFT_OUT]


def lines(text: str, indent: str) -> str:
    """A paragraph in lines as long as the terminal's; names with hyphens (initial-precision) stay whole."""
    columns = min(shutil.get_terminal_size().columns, 120)
    return textwrap.fill(text, columns, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def wrapped(text: str) -> str:
    """Paragraphs in lines as long as the terminal's, broken between words, and in line with the options below them.

    tyro joins lines that begin with a letter, and doubles an empty line before one that does not: lines begin with
    blanks here, and an empty one holds a space of no width, where there is such a letter.
    """
    paragraphs = (" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))
    filled = (lines(part, "  ") for part in paragraphs)
    return ("\n\u200b\n" if speaks_unicode(sys.stdout.encoding) else "\n\n").join(filled)
