"""The values of stored data: `Bins` for integers, `Standardize` for continuous data of any scale. Imports no torch.

A model sees values. Integers 0 .. count - 1 (8-bit images, 16-bit audio, 17 gray levels) are the indices of bins whose
centers are equally spaced from low to high, both included:

    value = low + index width,    index = floor((value - low) / width + 1/2),    width = (high - low) / (count - 1).

Continuous data is shifted and scaled, x = (data - mean) / std, per element or per channel. Datasets, recipes, models
and metrics use these records. Their methods take tensors or, for preparing datasets, NumPy arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

# Float32 keeps seven digits: beyond this ratio of mean to std, fewer than two of them are left for the data.
MAX_OFFSET = 1e5


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
        """The smallest unsigned integer type that holds every index."""
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
        """The bin nearest to each finite value; values outside belong to the first or last bin.

        A value on the edge of two bins belongs to the upper one, as in the paper: floor(x + 1/2), not half to even.
        """
        if isinstance(x, np.ndarray):
            index = np.floor((x.astype(np.float64) - self.low) / self.width + 0.5)
            return np.clip(index, 0, self.count - 1).astype(self.dtype)
        import torch

        rounded = torch.floor((x.double() - self.low) / self.width + 0.5).clamp(0, self.count - 1)
        return rounded.to(torch.uint8 if self.count <= 256 else torch.int32)

    def __call__(
        self, x: Float[Tensor, "*shape"], range: tuple[float, float] = (0.0, 1.0)
    ) -> Integer[Tensor, "*shape"]:
        """The bin indices of values in another range, such as torchvision's `ToTensor` in [0, 1]."""
        low, high = range
        return self.indices(self.low + (x.double() - low) * ((self.high - self.low) / (high - low)))

    def check_values(self, x: Float[Tensor, "*shape"]) -> None:
        """Raise if values lie outside the bins, or lie in [0, 1] but not on the centers of bins with low < 0."""
        low, high = float(x.min()), float(x.max())
        if low < self.low or high > self.high:
            raise DataError(
                f"data lies outside its bins: found values {low:g} to {high:g}, expected {self.low:g} to "
                f"{self.high:g}. Integer tensors are bin indices, floats are values."
            )
        if self.low < 0 <= low and high <= 1:
            off = ((x.double() - self.low) / self.width + 0.25) % 1 >= 0.5
            if bool(off.any()):
                raise DataError(
                    f"data lies between 0 and 1 and not on the centers of its bins, which span {self.low:g} to "
                    f"{self.high:g}: got {low:g} to {high:g}. Pass bins(data), the bin indices, for data such as that "
                    f"of torchvision's ToTensor."
                )

    def check(self, index: Integer[Tensor, "*shape"]) -> None:
        """Raise if an index is outside 0 .. count - 1. This reads the data, so avoid it in inner loops on a GPU."""
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
    """x = (data - mean) / std for continuous data, fitted on the training set and stored with the model.

    Vectors, of shape (d,), have one mean and std per element: the columns of a table may have different units. Data
    with more axes has one per channel, its first axis (images, audio). A single number, as in the records of version
    0.1.0, applies to all elements.
    """

    mean: float | tuple[float, ...]
    std: float | tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            given = getattr(self, name)
            if not isinstance(given, int | float):  # also lists, arrays and tensors
                single = getattr(given, "ndim", 1) == 0
                object.__setattr__(self, name, float(given) if single else tuple(map(float, given)))
        mean, std = _numbers(self.mean), _numbers(self.std)
        if not (len(mean) == len(std) and all(map(math.isfinite, mean)) and all(0 < s < math.inf for s in std)):
            raise UsageError(
                f"standardizing needs a finite mean and a positive std for each element, got mean={self.mean!s:.80}, "
                f"std={self.std!s:.80}. Fit them with bsi.Standardize.fit(train)."
            )

    @classmethod
    def fit(cls, data: Float[Tensor, "..."]) -> Standardize:
        """The standardization of data of shape (n, *sample): one number per element of a vector, or per channel."""
        x = data.double()
        axes = [axis for axis in range(x.ndim) if axis != 1]
        return cls.of(x.mean(axes).reshape(-1).tolist(), x.var(axes, correction=0).sqrt().reshape(-1).tolist())

    @classmethod
    def of(cls, mean: Sequence[float], std: Sequence[float]) -> Standardize:
        """The record for measured moments. Raises a DataError for elements that float32 cannot resolve."""
        for i, (m, s) in enumerate(zip(mean, std, strict=True)):
            if math.isfinite(m) and math.isfinite(s) and not (s > 0 and abs(m) <= MAX_OFFSET * s):
                which = f"element or channel {i} of the data" if len(mean) > 1 else "the data"
                raise DataError(
                    f"{which} is constant in float32: its mean is {m:.6g} and its std {s:.6g}. Remove it if it is "
                    f"constant, or subtract its mean."
                )
        return cls(tuple(mean), tuple(std)) if len(mean) > 1 else cls(mean[0], std[0])

    def apply(self, data: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        mean, std = self._like(data)
        return (data - mean) / std

    def undo(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        mean, std = self._like(x)
        return x * std + mean

    def _like(self, x: Float[Tensor, "*shape"]) -> tuple[Any, Any]:
        """Mean and std, shaped to broadcast over a batch. Tensors are cached, since copying them would synchronize."""
        if isinstance(self.mean, float | int):
            return self.mean, self.std
        key = (x.dtype, x.device, x.shape[1:])
        cache = self.__dict__.setdefault("_tensors", {})
        if key not in cache:
            if x.ndim < 2 or x.shape[1] != len(self.mean):
                raise UsageError(
                    f"data of shape {tuple(x.shape)} does not fit a standardization of {len(self.mean)} elements or "
                    f"channels. Fit one with bsi.Standardize.fit(train)."
                )
            shape = (-1, *[1] * (x.ndim - 2))
            cache[key] = tuple(x.new_tensor(values).view(shape) for values in (self.mean, self.std))
        return cache[key]

    @property
    def log_determinant(self) -> float:
        """ln |d data / d x| per dimension: the term that the change of units adds to -ln p per dimension."""
        std = _numbers(self.std)
        return math.fsum(map(math.log, std)) / len(std)


def _numbers(given: float | tuple[float, ...]) -> tuple[float, ...]:
    return given if isinstance(given, tuple) else (given,)
