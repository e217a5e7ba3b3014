"""Repeated calls, with other seeds or more steps. Shapes in annotations are checked only in the first call: for small
tensors the checks take longer than the arithmetic, and later calls have the same shapes.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import jaxtyping

Item = TypeVar("Item")
Found = TypeVar("Found")


@contextmanager
def unchecked() -> Iterator[None]:
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def repeat(call: Callable[[Item], Found], items: Iterable[Item]) -> list[Found]:
    """`call` of every item, with shape checks for the first."""
    first, *others = items
    found = [call(first)]
    with unchecked():
        return found + [call(item) for item in others]
