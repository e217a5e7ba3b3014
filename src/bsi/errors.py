"""The errors a command ends with, each with its exit code. Everything may import this; it imports nothing.

A message says what, what it got, and the fix or the next command to try.
"""

from typing import ClassVar


class BsiError(Exception):
    """An error whose message is meant for the user: the command line prints it without a traceback."""

    code: ClassVar[int] = 1


class UsageError(BsiError, ValueError):
    """A command or a call that cannot mean anything: unknown name, impossible value."""

    code = 2


class DataError(BsiError, ValueError):
    """Data that is missing, damaged, malicious or not what it was said to be."""

    code = 3


class CorruptCheckpoint(BsiError):
    """A checkpoint whose bytes are not the ones that were written."""

    code = 4


class NonFinite(BsiError):
    """A loss or gradient that is NaN or infinite."""

    code = 5


class Preempted(BsiError):
    """The run was asked to stop, has saved, and goes on when the same command is run again."""

    code = 75
