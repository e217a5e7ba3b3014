"""Stored integers and the values they stand for, in NumPy: the bins of a dataset before any tensor is made.

Data is stored as indices 0 .. count - 1 of bins whose centers are equally spaced from low to high, both included:

    value = low + index (high - low) / (count - 1),        index = round((value - low) (count - 1) / (high - low)).

An index is always found by rounding. Truncating makes every value half a bin too dark, and the FID moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Integer, UInt8

from bsi.errors import UsageError

__all__ = ["UINT8", "BinRange", "to_uint8"]


@dataclass(frozen=True)
class BinRange:
    """`count` bins whose centers are equally spaced from `low` to `high`, both included."""

    low: float
    high: float
    count: int

    def __post_init__(self) -> None:
        if not (2 <= self.count <= 2**16 and -math.inf < self.low < self.high < math.inf):
            raise UsageError(
                f"bins need 2 to 65536 centers between finite low < high: got low={self.low}, high={self.high}, "
                f"count={self.count}. For 8-bit images use low=-1, high=1, count=256."
            )

    @property
    def width(self) -> float:
        return (self.high - self.low) / (self.count - 1)

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned integers that hold every index."""
        return np.dtype("uint8" if self.count <= 256 else "<u2")

    def values(self, index: Integer[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """The centers of the bins `index`, in float64."""
        return self.low + index.astype(np.float64) * self.width

    def indices(self, values: Float[np.ndarray, "*shape"]) -> Integer[np.ndarray, "*shape"]:
        """The bin nearest to each value; what lies outside belongs to an end bin. Values must be finite."""
        index = np.rint((values.astype(np.float64) - self.low) / self.width)
        return np.clip(index, 0, self.count - 1).astype(self.dtype)


UINT8 = BinRange(-1.0, 1.0, 256)


def to_uint8(values: Float[np.ndarray, "*shape"], low: float = -1.0, high: float = 1.0) -> UInt8[np.ndarray, "*shape"]:
    """An 8-bit image of values in [low, high], by rounding."""
    return BinRange(low, high, 256).indices(values)
