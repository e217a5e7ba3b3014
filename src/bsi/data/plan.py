"""What a source of data promises before a row is read, and the blocks of rows it then gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Integer, Shaped

from bsi.data.manifest import FORMAT
from bsi.io import fingerprint
from bsi.values import Bins

__all__ = ["BLOCK_BYTES", "MOST_CLASSES", "Block", "Plan", "Source"]

BLOCK_BYTES = 8 << 20
MOST_CLASSES = 2**31  # labels from a source of any kind are stored as int32


@dataclass(frozen=True)
class Block:
    """Rows made from the next `items` items of the input, already split; `skipped` says what was unreadable and why."""

    items: int
    rows: Mapping[str, Shaped[np.ndarray, "rows *shape"]]
    labels: Mapping[str, Integer[np.ndarray, " rows"]] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What a source is going to write. `blocks(i)` yields the rows of the input items from i on, always the same ones.

    `input` is a hash that changes when the input does; `total` counts the input's items and `rows` bounds the number of
    rows; `skip` says how many unreadable items are passed over before the preparation is given up. `classes` are the
    names of the labels 0, 1, ..., where they have names.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: np.dtype
    bins: Bins | None
    options: Mapping[str, Any]
    input: str
    total: int
    rows: int
    unit: str
    blocks: Callable[[int], Iterator[Block]]
    label_dtype: np.dtype | None = None
    classes: tuple[str, ...] = ()
    skip: int = 0

    @property
    def identity(self) -> str:
        """A hash of everything that determines the rows."""
        return fingerprint([FORMAT, self.name, list(self.shape), self.dtype.str, dict(self.options), self.input])


@runtime_checkable
class Source(Protocol):
    """Where a dataset comes from: a frozen dataclass of options, `path` among them where it needs one."""

    summary: ClassVar[str]

    def plan(self) -> Plan: ...
