"""The kinds of data: `Bins`, `Symbols` and, for continuous data, `Standardize` and `Latents`. Imports no torch.

A model sees values x. Integers 0 .. count - 1 that are numbers (8-bit images, 16-bit audio, 17 gray levels) are the
indices of bins whose centers are equally spaced from low to high, both included:

    value = low + index width,    index = floor((value - low) / width + 1/2),    width = (high - low) / (count - 1).

Integers without an order (characters, bytes, black and white) are symbols. Symbol k of K is embedded as the vector

    e_k = 2 (one-hot(k) - 1 / K)

so that any two symbols have the same squared distance 8, and K = 2 gives (1, -1) and (-1, 1). The K numbers of a symbol
are channels: text of shape (length,) becomes (K, length), an image of shape (channels, *space) becomes
(channels K, *space). Continuous data is shifted and scaled, x = (data - mean) / std, per element or per channel.

All kinds have `values(data)`, its inverse `data(x)`, `check(data)`, which reads the data, `channels`, the numbers of x
for each element of the data, `latent_shape(shape)`, the shape of x for data of a shape, `dtype`, the smallest that
stores the data, `element`, the unit of bounds, and `log_determinant`, ln |d data / d x| per dimension.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from jaxtyping import Float, Integer, Num, UInt8

from bsi.errors import DataError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    Tensor = Any

Array = TypeVar("Array", np.ndarray, Tensor)

EMBEDDING = 2.0  # scale of the embedding of symbols
MOST = 1 << 16  # bins or symbols
LARGEST_EMBEDDED = 1 << 24  # numbers in an embedded sample

FLOAT32_EPS = 2.0**-23

# Float32 keeps seven digits: beyond this ratio of mean to std, fewer than two of them are left for the data.
MAX_OFFSET = 1e5


def _check_range(what: str, index: Num[Tensor, "*shape"], count: int, instead: str) -> None:
    low, high = (int(index.min()), int(index.max())) if index.numel() else (0, 0)
    if low < 0 or high >= count:
        raise DataError(f"{what} {low} to {high}, expected 0 to {count - 1}. Describe the data with {instead}.")


@dataclass(frozen=True)
class Bins:
    """`count` bins whose centers are equally spaced from `low` to `high`, both included."""

    low: float
    high: float
    count: int

    channels: ClassVar[int] = 1
    element: ClassVar[str] = "dim"
    log_determinant: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if not (2 <= self.count <= MOST and -math.inf < self.low < self.high < math.inf):
            raise UsageError(f"bins need 2 to {MOST} centers, finite, low < high, got {self}. Images: Bins.uint8().")
        if not FLOAT32_EPS * max(-self.low, self.high) < self.width < math.inf:
            raise UsageError(f"neighboring bins are equal in float32, got {self}. Use Bins(-1, 1, count).")

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
        return np.min_scalar_type(self.count - 1)

    def values(self, index: Array, dtype: torch.dtype | None = None) -> Array:
        """The centers of the bins `index`: arrays in float64, tensors in float32 unless another dtype is given.

        Floating-point tensors are values already.
        """
        if isinstance(index, np.ndarray):
            return self.low + index.astype(np.float64) * self.width
        import torch

        if index.is_floating_point():
            return index if dtype is None else index.to(dtype)
        return (self.low + index.double() * self.width).to(dtype or torch.float32)

    def indices(self, x: Array) -> Array:
        """The bin nearest to each finite value; values outside belong to the first or last bin.

        A value on the edge of two bins belongs to the upper one, as in the paper: floor(x + 1/2), not half to even.
        """
        if isinstance(x, np.ndarray):
            index = np.floor((x.astype(np.float64) - self.low) / self.width + 0.5)
            return np.clip(index, 0, self.count - 1).astype(self.dtype)
        import torch

        rounded = torch.floor((x.double() - self.low) / self.width + 0.5).clamp(0, self.count - 1)
        return rounded.to(torch.uint8 if self.count <= 256 else torch.int32)

    def data(self, x: Float[Tensor, "*shape"]) -> Integer[Tensor, "*shape"]:
        return self.indices(x)

    def latent_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def __call__(
        self, x: Float[Tensor, "*shape"], range: tuple[float, float] = (0.0, 1.0)
    ) -> Integer[Tensor, "*shape"]:
        """The bin indices of values in another range, such as torchvision's `ToTensor` in [0, 1]."""
        low, high = range
        return self.indices(self.low + (x.double() - low) * ((self.high - self.low) / (high - low)))

    def check(self, data: Num[Tensor, "*shape"]) -> None:
        """Raise if an index is outside 0 .. count - 1, a value outside the bins, or images in [0, 1] no bin centers."""
        if not data.is_floating_point() or not data.numel():
            _check_range("data outside its bins: found indices", data, self.count, "bsi.Bins(low, high, count)")
            return
        low, high = float(data.min()), float(data.max())
        if low < self.low or high > self.high:
            found = f"found values {low:g} to {high:g}, expected {self.low:g} to {self.high:g}"
            raise DataError(f"data lies outside its bins: {found}. Integer tensors are bin indices, floats are values.")
        self.check_scale([data])

    def check_scale(self, parts: Iterable[Array], fix: str = "Use bins(data) for ToTensor's output.") -> None:
        """Raise if all values are between 0 and 1 and some on no bin's center, but the bins begin below 0."""
        off = False
        for part in parts:
            if not (self.low < 0 <= part.min() and part.max() <= 1):
                return
            values = part.astype(np.float64) if isinstance(part, np.ndarray) else part.double()
            off = off or bool((((values - self.low) / self.width + 0.25) % 1 >= 0.5).any())
        if off:
            got = f"got values between 0 and 1 for bins from {self.low:g} to {self.high:g}"
            raise DataError(f"data is not on its bins' centers, {got}. {fix}")


@dataclass(frozen=True)
class Symbols:
    """`count` symbols without an order, such as the characters of a text.

    Args:
        names: The text of each symbol, for printing. Without names, 256 symbols are the bytes of UTF-8.
        prior: The frequency of each symbol, which `fit` measures; by default all are equal. It is part of the network's
            first guess, and a good one is learned faster.

    Example:
        >>> letters = bsi.Symbols(3, names=("a", "b", "c"))
        >>> letters.text(letters.index("cab"))
        'cab'
    """

    count: int
    names: tuple[str, ...] = ()
    prior: tuple[float, ...] | None = None

    log_determinant: ClassVar[float] = 0.0

    @property
    def channels(self) -> int:
        return self.count

    @property
    def element(self) -> str:
        return "char" if self.names else "symbol"

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        if not 2 <= self.count <= MOST:
            raise UsageError(f"symbols need a count of 2 to {MOST}, got {self.count}. Write more as Symbols.bytes().")
        different = len(set(self.names))
        if self.names and not (len(self.names) == different == self.count):
            raise UsageError(f"symbols need different names for all, or no names: got {different} for {self.count}.")
        if self.prior is not None:
            prior = tuple(map(float, self.prior))
            if len(prior) != self.count or not all(0 < p <= 1 for p in prior) or abs(math.fsum(prior) - 1) > 1e-6:
                got = f"got {len(prior)} numbers with the sum {math.fsum(prior):g}. Use bsi.Symbols.fit(train, count)."
                raise UsageError(f"the prior of {self.count} symbols needs positive numbers with the sum 1, {got}")
            object.__setattr__(self, "prior", prior)

    @classmethod
    def bytes(cls) -> Symbols:
        """The 256 bytes, as of text in UTF-8."""
        return cls(256)

    @classmethod
    def fit(cls, data: Integer[Any, "..."], count: int, names: Sequence[str] = ()) -> Symbols:
        """Symbols with the frequencies of the training data, a tensor or an array, as their prior."""
        return cls(count, tuple(names)).counted(np.bincount(np.asarray(data).reshape(-1), minlength=count))

    def counted(self, counts: Integer[np.ndarray, " symbols"]) -> Symbols:
        """The same symbols with a prior from their numbers of occurrences, plus one each."""
        if len(counts) > self.count:
            raise DataError(f"data holds the symbol {len(counts) - 1}, expected 0 to {self.count - 1}.")
        counts = counts + 1.0
        return Symbols(self.count, self.names, tuple((counts / counts.sum()).tolist()))

    @property
    def dtype(self) -> np.dtype:
        return np.min_scalar_type(self.count - 1)

    def latent_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """(K, length) for data of shape (length,), and (channels K, *space) for (channels, *space)."""
        if not shape:
            raise UsageError("symbols need at least one axis, got samples of shape (). Use data[:, None].")
        if math.prod(shape) * self.count > LARGEST_EMBEDDED:
            found = f"got {math.prod(shape)} symbols of {self.count} kinds"
            fix = "Use shorter samples, or write each symbol as several bytes, bsi.Symbols.bytes()."
            raise UsageError(f"an embedded sample has at most {LARGEST_EMBEDDED} numbers, {found}. {fix}")
        channels, *space = shape if len(shape) > 1 else (1, *shape)
        return (channels * self.count, *space)

    def values(self, index: Num[Tensor, "batch *data"], dtype: torch.dtype | None = None) -> Float[Tensor, "..."]:
        """The embedding of symbols, in float32 unless another dtype is given."""
        import torch

        self._check_type(index)
        grouped = index[:, None] if index.ndim < 3 else index
        kinds = torch.arange(self.count, device=index.device).view(-1, *[1] * (grouped.ndim - 2))
        one_hot = (grouped[:, :, None] == kinds).flatten(1, 2)
        return (one_hot.to(dtype or torch.float32) - 1 / self.count) * EMBEDDING

    def data(self, x: Float[Tensor, "batch *latent"]) -> Integer[Tensor, "batch channels *space"]:
        """The symbol whose embedding is nearest to x; for predictions the most probable one."""
        import torch

        nearest = x.unflatten(1, (-1, self.count)).argmax(2)
        return nearest.to(torch.uint8 if self.count <= 256 else torch.int32)

    def check(self, data: Num[Tensor, "*shape"]) -> None:
        self._check_type(data)
        _check_range("data holds other symbols: found", data, self.count, "bsi.Symbols(count)")

    def _check_type(self, data: Num[Tensor, "*shape"]) -> None:
        if data.is_floating_point():
            raise UsageError(f"symbols are integers 0 to {self.count - 1}, got {data.dtype}. Pass data.long().")

    def text(self, index: Sequence[int] | Integer[Any, " length"]) -> str:
        """The text of one sample, or its numbers if the symbols have no names."""
        numbers = np.asarray(index).reshape(-1).tolist()
        if self.names:
            return "".join(self.names[i] for i in numbers)
        return builtins.bytes(numbers).decode("utf-8", "replace") if self.count == 256 else " ".join(map(str, numbers))

    def index(self, text: str) -> Integer[np.ndarray, " length"]:
        """The symbols of a text: the inverse of `text`, for names of one character and for bytes."""
        if not self.names and self.count == 256:
            return np.frombuffer(text.encode(), np.uint8)
        number = {name: i for i, name in enumerate(self.names)}
        if unknown := sorted(set(text) - set(number)):
            raise DataError(f"the text has characters that are not among the symbols: {unknown!r:.80}. Remove them.")
        return np.array([number[letter] for letter in text], self.dtype)


def _numbers(given: float | tuple[float, ...]) -> tuple[float, ...]:
    return given if isinstance(given, tuple) else (given,)


@dataclass(frozen=True)
class Standardize:
    """x = (data - mean) / std for continuous data, fitted on the training set and stored with the model.

    Vectors, of shape (d,), have one mean and std per element: the columns of a table may have different units. Data
    with more axes has one per channel, its first axis (images, audio). A single number applies to all elements.
    """

    mean: float | tuple[float, ...]
    std: float | tuple[float, ...]

    channels: ClassVar[int] = 1
    element: ClassVar[str] = "dim"

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            given = getattr(self, name)
            if not isinstance(given, int | float):  # also lists, arrays and tensors
                single = getattr(given, "ndim", 1) == 0
                object.__setattr__(self, name, float(given) if single else tuple(map(float, given)))
        mean, std = _numbers(self.mean), _numbers(self.std)
        if not (len(mean) == len(std) and all(map(math.isfinite, mean)) and all(0 < s < math.inf for s in std)):
            got = f"got mean={self.mean!s:.80}, std={self.std!s:.80}. Fit them with bsi.Standardize.fit(train)."
            raise UsageError(f"standardizing needs a finite mean and a positive std for each element, {got}")

    @classmethod
    def fit(cls, data: Float[Tensor, "..."] | Float[np.ndarray, "..."]) -> Standardize:
        """The standardization of data of shape (n, *sample): one number per element of a vector, or per channel."""
        x = as_tensor(data).double()
        axes = [axis for axis in range(x.ndim) if axis != 1]
        return cls.of(x.mean(axes).reshape(-1).tolist(), x.var(axes, correction=0).sqrt().reshape(-1).tolist())

    @classmethod
    def of(cls, mean: Sequence[float], std: Sequence[float]) -> Standardize:
        """The record for measured moments. Raises a DataError for elements that float32 cannot resolve."""
        for i, (m, s) in enumerate(zip(mean, std, strict=True)):
            if math.isfinite(m) and math.isfinite(s) and not (s > 0 and abs(m) <= MAX_OFFSET * s):
                which = f"element or channel {i} of the data" if len(mean) > 1 else "the data"
                got = f"got mean {m:.6g} and std {s:.6g}"
                raise DataError(f"{which} is constant in float32, {got}. Remove it or subtract its mean.")
        return cls(tuple(mean), tuple(std)) if len(mean) > 1 else cls(mean[0], std[0])

    def latent_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def values(self, data: Num[Tensor, "*shape"], dtype: torch.dtype | None = None) -> Float[Tensor, "*shape"]:
        if not data.is_floating_point():
            fix = "Pass data=bsi.Bins.uint8() (8-bit images) or data=bsi.Symbols(count), or convert the data to floats."
            raise UsageError(f"integer data needs bins or symbols, got {data.dtype}. {fix}")
        data = data if dtype is None else data.to(dtype)
        mean, std = self._like(data)
        return (data - mean) / std

    def data(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        mean, std = self._like(x)
        return x * std + mean

    def check(self, data: Num[Tensor, "*shape"]) -> None:
        """Nothing to check: all floats are values."""

    def _like(self, x: Float[Tensor, "*shape"]) -> tuple[Any, Any]:
        """Mean and std, shaped to broadcast over a batch. Tensors are cached, since copying them would synchronize."""
        if isinstance(self.mean, float | int):
            return self.mean, self.std
        key = (x.dtype, x.device, x.shape[1:])
        cache = self.__dict__.setdefault("_tensors", {})
        if key not in cache:
            if x.ndim < 2 or x.shape[1] != len(self.mean):
                fix = f"does not fit {len(self.mean)} means. Fit them to your data."
                raise UsageError(f"data of shape {tuple(x.shape)} {fix}")
            shape = (-1, *[1] * (x.ndim - 2))
            cache[key] = tuple(x.new_tensor(values).view(shape) for values in (self.mean, self.std))
        return cache[key]

    @property
    def log_determinant(self) -> float:
        std = _numbers(self.std)
        return math.fsum(map(math.log, std)) / len(std)


@dataclass(frozen=True)
class Latents(Standardize):
    """The latents of an autoencoder, stored as their mean and standard deviation given each image: 2 C channels for C.

    A latent is drawn each time it is used in training, since the model is a prior of such draws, and one that never
    changes could be memorized. Draws are standardized per channel.

    Args:
        shape: The shape of an image.
        count: The number of bins of an image's values, from -1 to 1.
        precision: That of the decoder, 1 / the mean squared error of reconstructions of training images.
        images, version: The dataset that was encoded, and its content.
        autoencoder: SHA-256 of the autoencoder.
    """

    shape: tuple[int, ...]
    count: int
    precision: float
    images: str
    version: str
    autoencoder: str

    dtype: ClassVar[np.dtype] = np.dtype("<f4")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "shape", tuple(self.shape))
        if not 0 < self.precision < math.inf:
            raise UsageError(f"a decoder's precision is positive and finite, got {self.precision}.")

    @property
    def bins(self) -> Bins:
        """The values of the images."""
        return Bins(-1.0, 1.0, self.count)

    def fitted(self, mean: Float[np.ndarray, " channels"], var: Float[np.ndarray, " channels"]) -> Latents:
        """The same for channels of means and standard deviations with these moments."""
        half = len(mean) // 2
        total = var[:half] + var[half:] + mean[half:] ** 2  # the variance of means, and the mean of variances
        known = Standardize.of(mean[:half].tolist(), np.sqrt(total).tolist())
        return replace(self, mean=known.mean, std=known.std)

    def latent_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0] // 2, *shape[1:])

    def values(self, data: Num[Tensor, "batch channels *space"], dtype: torch.dtype | None = None) -> Tensor:
        """Latents drawn from stored means and standard deviations, as values. Latents themselves are not changed."""
        import torch

        if data.shape[1] == 2 * len(_numbers(self.mean)):
            mean, std = data.chunk(2, dim=1)
            data = mean + std * torch.randn_like(mean)
        return super().values(data, dtype)


DataKind = Bins | Symbols | Standardize | Latents
KINDS: dict[str, type[DataKind]] = {  # by the name that a file gives them
    "bins": Bins, "symbols": Symbols, "standardize": Standardize, "latents": Latents,
}  # fmt: skip

CONTINUOUS = Standardize(0.0, 1.0)  # continuous data in its own units


def unit_of_bounds(binned: bool) -> tuple[str, float]:
    """The unit in which bounds are printed, and its number in a bit: discrete data in bits, continuous data in nats."""
    return ("bits", 1.0) if binned else ("nats", math.log(2))


def to_uint8(values: Float[np.ndarray, "*shape"], low: float = -1.0, high: float = 1.0) -> UInt8[np.ndarray, "*shape"]:
    """An 8-bit image of values in [low, high], by rounding."""
    return Bins(low, high, 256).indices(values)


def check_classes(given: Iterable[object]) -> tuple[str, ...]:
    """The names of classes. Raises an error for names that are not printable or not unique."""
    names: list[str] = []
    for name in given:
        if not (isinstance(name, str) and name and name.strip() == name and name.isprintable()):
            raise DataError(f"a class has the name {name!r:.80}, expected printable text without outer spaces: rename.")
        if name in names:
            raise DataError(f"two classes have the name {name!r}: rename one.")
        names.append(name)
    return tuple(names)


def as_tensor(data: object) -> Tensor:
    """A tensor of the data: itself, or that of a NumPy array."""
    import torch

    if isinstance(data, torch.Tensor):
        return data
    if not isinstance(data, np.ndarray):
        raise UsageError(f"data must be a torch.Tensor, got a {type(data).__name__}. Pass torch.as_tensor(data).")
    wide = data.dtype.kind == "u" and data.dtype.itemsize > 1  # torch hardly computes with these types
    return torch.from_numpy(np.array(data, np.int64 if wide else data.dtype.newbyteorder("=")))


def check_finite(data: Float[Tensor, "batch *data"]) -> None:
    finite = data.isfinite()
    if not bool(finite.all()):
        bad = int((~finite).reshape(len(data), -1).any(1).sum())
        raise DataError(f"data holds NaN or infinity in {bad} of {len(data)} samples. Remove or repair them.")
