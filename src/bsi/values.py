"""The values of stored data: `Bins` for integers, `Standardize` for continuous data of any scale. Imports no torch.

A model sees values. Integers 0 .. count - 1 (8-bit images, 16-bit audio, 17 gray levels) are the indices of bins whose
centers are equally spaced from low to high, both included:

    value = low + index width,    index = floor((value - low) / width + 1/2),    width = (high - low) / (count - 1).

Continuous data is shifted and scaled, x = (data - mean) / std. Datasets, recipes, models and metrics hold these
records. Their methods take tensors, and NumPy arrays where a dataset is prepared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from jaxtyping import Float, Integer, UInt8

from bsi.errors import DataError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    Tensor = Any

__all__ = ["Bins", "Standardize", "to_uint8"]


@dataclass(frozen=True)
class Bins:
    """`count` bins whose centers are equally spaced from `low` to `high`, both included."""

    low: float
    high: float
    count: int

    def __post_init__(self) -> None:
        if not (2 <= self.count <= 2**16 and -math.inf < self.low < self.high < math.inf):
            raise UsageError(
                f"bins need 2 to 65536 centers between finite low < high, got low={self.low}, high={self.high}, "
                f"count={self.count}. Use Bins.uint8() for 8-bit images."
            )

    @classmethod
    def uint8(cls) -> Bins:
        """8-bit images, rescaled to [-1, 1]."""
        return cls(-1.0, 1.0, 256)

    @classmethod
    def int16(cls) -> Bins:
        """16-bit audio, stored as 0 .. 65535 and rescaled to [-1, 1]."""
        return cls(-1.0, 1.0, 65536)

    @property
    def width(self) -> float:
        return (self.high - self.low) / (self.count - 1)

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned integers that hold every index."""
        return np.dtype("uint8" if self.count <= 256 else "<u2")

    @overload
    def values(self, index: Integer[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]: ...
    @overload
    def values(self, index: Integer[Tensor, "*shape"], dtype: torch.dtype | None = None) -> Float[Tensor, "*shape"]: ...
    def values(self, index: Any, dtype: torch.dtype | None = None) -> Any:
        """The centers of the bins `index`: arrays in float64, tensors in float32 unless another dtype is given."""
        if isinstance(index, np.ndarray):
            return self.low + index.astype(np.float64) * self.width
        import torch

        return (self.low + index.double() * self.width).to(torch.float32 if dtype is None else dtype)

    @overload
    def indices(self, x: Float[np.ndarray, "*shape"]) -> Integer[np.ndarray, "*shape"]: ...
    @overload
    def indices(self, x: Float[Tensor, "*shape"]) -> Integer[Tensor, "*shape"]: ...
    def indices(self, x: Any) -> Any:
        """The bin nearest to each finite value; values outside belong to an end bin.

        A value on the edge of two bins belongs to the upper one, as in the paper: floor(x + 1/2), not half to even.
        """
        if isinstance(x, np.ndarray):
            index = np.floor((x.astype(np.float64) - self.low) / self.width + 0.5)
            return np.clip(index, 0, self.count - 1).astype(self.dtype)
        import torch

        rounded = torch.floor((x.double() - self.low) / self.width + 0.5).clamp(0, self.count - 1)
        return rounded.to(torch.uint8 if self.count <= 256 else torch.int32)

    def check(self, index: Integer[Tensor, "*shape"]) -> None:
        """Raise if an index lies outside 0 .. count - 1. Reads the data: not for the inner loop."""
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= self.count):
            raise DataError(
                f"data outside its bins: found indices {int(index.min())} to {int(index.max())}, "
                f"expected 0 to {self.count - 1}. Describe the data with bsi.Bins(low, high, count)."
            )


def to_uint8(values: Float[np.ndarray, "*shape"], low: float = -1.0, high: float = 1.0) -> UInt8[np.ndarray, "*shape"]:
    """An 8-bit image of values in [low, high], by rounding."""
    return Bins(low, high, 256).indices(values)


@dataclass(frozen=True)
class Standardize:
    """x = (data - mean) / std, fitted on the training set and kept with the model: continuous data of any scale."""

    mean: float
    std: float

    def __post_init__(self) -> None:
        if not (0 < self.std < math.inf and math.isfinite(self.mean)):
            raise UsageError(
                f"standardizing needs a finite mean and a positive std, got mean={self.mean}, std={self.std}"
            )

    @classmethod
    def fit(cls, data: Float[Tensor, "..."]) -> Standardize:
        return cls(float(data.double().mean()), float(data.double().std(correction=0)))

    def apply(self, data: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return (data - self.mean) / self.std

    def undo(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return x * self.std + self.mean

    @property
    def log_determinant(self) -> float:
        """ln |d data / d x| per dimension: what the change of units adds to -ln p per dimension."""
        return math.log(self.std)
