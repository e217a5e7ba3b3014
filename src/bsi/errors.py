"""Errors with the exit code that the command line returns for each. Imports nothing of the package.

| code | meaning | error |
|---|---|---|
| 0 | done | |
| 1 | failed: a full disk, a hang, an unexpected error | `BsiError` |
| 2 | wrong use: an unknown name, an impossible value, a missing file | `UsageError` |
| 3 | missing, damaged or malicious data | `DataError` |
| 4 | no intact checkpoint | `CorruptCheckpoint` |
| 5 | a loss, gradient or sample that is NaN or infinite | `NonFinite` |
| 75 | stopped and saved; the same command resumes | `Preempted` |
| 130 | interrupted by Ctrl-C | `KeyboardInterrupt` |

A message states what is wrong, the value that was given, and how to fix it.
"""

import difflib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import ClassVar


class BsiError(Exception):
    """An error whose message is written for users: the command line prints it without a traceback."""

    code: ClassVar[int] = 1


class UsageError(BsiError, ValueError):
    """An invalid command or call: an unknown name, an impossible value."""

    code = 2


class DataError(BsiError, ValueError):
    """Data that is missing, damaged, malicious, or not of the expected kind."""

    code = 3


class CorruptCheckpoint(BsiError):
    """A checkpoint whose files do not match their hashes."""

    code = 4


class NonFinite(BsiError):
    """A loss, gradient or sample that is NaN or infinite."""

    code = 5


class Preempted(BsiError):
    """The run was asked to stop and has been saved; the same command resumes it."""

    code = 75


def unknown(kind: str, name: str, known: Collection[str]) -> UsageError:
    """The error for an unknown name, which suggests the nearest of the known ones."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return UsageError(f"unknown {kind} {name!r}: did you mean {near[0]!r}? Use one of {', '.join(known)}.")


@contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Turn the failed import of an optional package into a `UsageError` with the command that installs it.

    with extra("figures", "drawing figures"):
        import matplotlib

    Args:
        name: The extra in pyproject.toml that lists the package.
        purpose: What needs the package, as the subject of a sentence.
    """
    try:
        yield
    except ImportError as error:
        raise UsageError(f"{purpose} needs an optional package: {error}. Run: pip install 'bsi[{name}]'") from error
