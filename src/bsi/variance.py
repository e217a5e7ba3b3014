"""Transitions with a predictive variance: a tighter bound and better samples with few, large steps.

In information coordinates the generative transition of the paper is N(s + D x_hat, D), with D = Lambda' - Lambda. It
treats the prediction x_hat as if it were the sample. With a predictive variance v of x given s the transition is

    p(s' | s) = N(s + D x_hat, D + D^2 v),

and its KL divergence from the posterior q(s' | s, x) = N(s + D x, D) is, for each dimension,

    KL = 1/2 [ ln(1 + D v) + (1 + D (x - x_hat)^2) / (1 + D v) - 1 ].

It is minimal for v = E (x - x_hat)^2, where it is 1/2 ln(1 + D v) on average instead of 1/2 D v. Any v that depends on
s and the level alone gives a valid bound; v = 0 is the paper's; for k -> infinity all of them agree. Because the noise
of s is white, v may be diagonal in any orthonormal basis of the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from bsi.errors import UsageError
from bsi.gaussian import Data, PerSample, sum_over_data
from bsi.levels import Interpolation, low_discrepancy
from bsi.methods.base import Method, Predictor
from bsi.rng import standard_normal
from bsi.sampler import VarianceKind

KNOTS = 33  # levels at which a variance is fitted
PRIOR = 4.0  # weight of the average over all coordinates, in observations per knot
MAX_PCA = 4096
SMALLEST = 1e-12  # lower limit of a variance, since its logarithm is interpolated
DRAWS = 4  # levels for each training sample
WIDTH, EPOCHS, RATE = 32, 20, 3e-3  # of a `Correction` and its training
STEPS = 64  # a correction is fitted to the cost of the steps of a chain of about this length
LARGEST_CORRECTION = 6.0  # of ln v

Samples = Float[Tensor, "samples *data"]
Coordinates = Float[Tensor, "batch coordinates"]


@dataclass(frozen=True)
class OrthonormalBasis:
    """An orthonormal basis: data viewed in `shape`, with an orthonormal matrix (rows are basis vectors) for each axis.

    An axis whose matrix is None stays as it is. Coordinates of one of the `groups` share their variance.
    """

    shape: tuple[int, ...]
    matrices: tuple[Float[Tensor, "_ _"] | None, ...]
    groups: Int[Tensor, " coordinates"]

    def coordinates(self, x: Data) -> Coordinates:
        return self._apply(x.reshape(-1, *self.shape), transpose=False).flatten(1)

    def values(self, coordinates: Coordinates, like: Data) -> Tensor:
        """The inverse of `coordinates`, in the shape of `like`."""
        return self._apply(coordinates.reshape(-1, *self.shape), transpose=True).reshape(like.shape)

    def _apply(self, x: Tensor, transpose: bool) -> Tensor:
        for axis, matrix in enumerate(self.matrices, start=1):
            if matrix is not None:
                m = matrix.to(x.device, x.dtype)
                x = torch.movedim(torch.movedim(x, axis, -1) @ (m if transpose else m.T), -1, axis)
        return x


def basis_of(kind: str, shape: tuple[int, ...], axes: Float[Tensor, "_ _"] | None = None) -> OrthonormalBasis:
    """The basis of a kind of variance; `axes` are the `_principal_axes`."""
    each = torch.arange(math.prod(shape))
    match kind:
        case "level":
            return OrthonormalBasis(shape, (None,) * len(shape), torch.zeros_like(each))
        case "pixels" | "learned":
            return OrthonormalBasis(shape, (None,) * len(shape), each)
        case "dct":
            return OrthonormalBasis(shape, (axes, *map(_cosines, shape[1:])), _frequency_bands(shape))
        case "pca":
            return OrthonormalBasis((len(each),), (axes,), each)
        case _:
            raise UsageError(f"a variance is one of {', '.join(get_args(VarianceKind)[1:])}, got {kind!r}.")


def _principal_axes(kind: str, x: Samples) -> Float[Tensor, "n n"] | None:
    """Eigenvectors, as rows, of the covariance of colors (`dct`) or samples (`pca`); the largest variance first."""
    shape, n = tuple(x.shape[1:]), x[0].numel()
    if kind == "dct" and len(shape) < 2:
        raise UsageError(f"a cosine transform needs channels and space, got data of shape {shape}. Use 'pca'.")
    if kind == "pca" and n > MAX_PCA:
        raise UsageError(f"a basis of principal axes is for at most {MAX_PCA} dimensions, got {n}. Use 'dct'.")
    if kind not in ("dct", "pca"):
        return None
    rows = x.flatten(1) if kind == "pca" else x.movedim(1, -1).reshape(-1, shape[0])
    covariance = torch.cov(rows.double().T).reshape(rows.shape[1], rows.shape[1])
    return torch.linalg.eigh(covariance).eigenvectors.T.flip(0)


def _cosines(size: int) -> Float[Tensor, "size size"]:
    """The orthonormal cosine transform, DCT-II."""
    k = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * k[:, None] * (k + 0.5)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix


def _frequency_bands(shape: tuple[int, ...]) -> Int[Tensor, " coordinates"]:
    """For a cosine transform: coordinates of one channel whose frequencies have the same length, rounded."""
    channels, space = shape[0], shape[1:]
    frequencies = torch.meshgrid(*(torch.arange(size, dtype=torch.float64) for size in space), indexing="ij")
    radius = torch.stack(frequencies).square().sum(0).sqrt().round().long().flatten()
    return (torch.arange(channels)[:, None] * (int(radius.max()) + 1) + radius).flatten()


@dataclass(frozen=True)
class Variance:
    """v(level), diagonal in a basis: ln v is linear between equally spaced points of ln(level).

    `values` has a column for each group of coordinates. With a `correction` v is a function of the prediction too.
    """

    basis: OrthonormalBasis
    low: float
    high: float
    values: Float[Tensor, "knots groups"]
    correction: Correction | None = None

    def at(self, level: PerSample, x_hat: Data) -> Coordinates:
        """The predictive variance of each coordinate at these levels, given the predictions."""
        v = self.of_level(level)
        return v if self.correction is None else v * self.correction(x_hat, torch.log(v)).exp()

    def of_level(self, level: PerSample) -> Coordinates:
        """The variance without the correction."""
        logs = self.values.clamp(min=SMALLEST).log().to(level.device)
        place = torch.log(level.double() / self.low) / math.log(self.high / self.low)
        of_groups = Interpolation.of(_knots(len(logs), level.device), place).at(logs).exp()
        return of_groups[:, self.basis.groups.to(level.device)]


def _knots(count: int, device: torch.device) -> Float64[Tensor, " {count}"]:
    return torch.linspace(0, 1, count, dtype=torch.float64, device=device)


class Correction(nn.Module):
    """A small convolutional network: from a prediction and its ln v to what is added to each ln v, 0 at first.

    The values of a vector are channels of one position.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        axes = max(1, len(shape) - 1)
        if axes > 3:
            raise UsageError(f"a learned variance is for data with at most four axes, got {shape}. Use 'level'.")
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        self.shape = shape if len(shape) > 1 else (*shape, 1)
        first, second = conv(2 * shape[0], WIDTH, 3, padding=1), conv(WIDTH, WIDTH, 3, padding=1)
        self.layers = nn.Sequential(first, nn.SiLU(), second, nn.SiLU(), conv(WIDTH, shape[0], 3, padding=1))
        for parameter in self.layers[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, x_hat: Data, logs: Coordinates) -> Coordinates:
        """`logs` are the ln v without the correction, of each value of the data."""
        given = [each.reshape(-1, *self.shape).to(next(self.parameters())) for each in (x_hat, 0.1 * logs)]
        found = self.layers(torch.cat(given, 1)).flatten(1).to(logs)
        return LARGEST_CORRECTION * torch.tanh(found / LARGEST_CORRECTION)


def transition_kl(variance: Variance, x: Data, x_hat: Data, level: PerSample, gained: PerSample) -> PerSample:
    """KL( q(s' | s, x) || p(s' | s) ) in nats for steps that start at `level` and gain the precision `gained`."""
    squared, d = variance.basis.coordinates((x - x_hat).double()).square(), gained.double()[:, None]
    extra = d * variance.at(level, x_hat)
    return 0.5 * sum_over_data(torch.log1p(extra) + (d * squared - extra) / (1 + extra))


def widened(variance: Variance, eps: Data, x_hat: Data, level: Float[Tensor, ""], gained: float) -> Data:
    """Noise of the solver `posterior` with the missing variance: a step draws from N(s + D x_hat, D + D^2 v)."""
    factor = torch.sqrt(1 + gained * variance.at(level.expand(len(eps)), x_hat)).to(eps.dtype)
    return variance.basis.values(variance.basis.coordinates(eps) * factor, eps)


@torch.no_grad()
def fit_variance(
    method: Method, predict: Predictor, x: Samples, basis: OrthonormalBasis, seed: int = 0, batch_size: int = 256
) -> Variance:
    """Fit the v of each group of coordinates to errors on training samples: a weighted average around each knot.

    Test samples would make the bound too good.
    """
    groups = basis.groups.to(x.device)
    sizes = torch.bincount(groups).double()
    sums, counts = sizes.new_zeros(KNOTS, len(sizes)), sizes.new_zeros(KNOTS, 1)
    for ids, t, x_hat in _predictions(method, predict, x, seed, batch_size):
        squared = basis.coordinates((x[ids] - x_hat).double()).square()
        of_group = squared.new_zeros(len(ids), len(sizes)).index_add(1, groups, squared)
        between = Interpolation.of(_knots(KNOTS, x.device), t)
        sums += between.scatter(of_group / sizes, KNOTS)
        counts += between.scatter(torch.ones_like(t)[:, None], KNOTS)
    average = (sums * sizes).sum(1, keepdim=True) / (sizes.sum() * counts.clamp(min=1e-9))
    prior = PRIOR / sizes  # a large group needs less of the prior
    fitted = (sums + prior * average) / (counts + prior)
    return Variance(basis, method.levels.low, method.levels.high, fitted)


def _predictions(
    method: Method, predict: Predictor, x: Samples, seed: int, batch_size: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Indices of samples, positions t of their levels, and predictions, at `DRAWS` levels of every sample."""
    generator = torch.Generator().manual_seed(seed)
    for draw in range(DRAWS):
        order = torch.randperm(len(x), generator=generator).to(x.device)
        t = low_discrepancy(len(x), float(torch.rand((), generator=generator))).to(x.device)
        for part in torch.arange(len(x), device=x.device).split(batch_size):
            ids = order[part]
            level = method.levels.icdf(t[part])
            eps = standard_normal(seed, ids, draw, tuple(x.shape[1:]), x.dtype)
            yield ids, t[part], predict(method.encoder(level).encode(x[ids], eps), level)


def _corrected(
    variance: Variance, method: Method, predict: Predictor, x: Samples, seed: int, batch_size: int
) -> Variance:
    """A variance of each value with a `Correction`, which is trained on the KL divergence of steps of a chain."""
    with torch.no_grad():
        found = list(_predictions(method, predict, x, seed + 1, batch_size))
    ids, t, x_hat = (torch.cat(parts) for parts in zip(*found, strict=True))
    ratio = (variance.high / variance.low) ** (1 / STEPS)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(seed)
        correction = Correction(tuple(x.shape[1:])).to(x.device)
        aware = replace(variance, correction=correction)
        optimizer = torch.optim.Adam(correction.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * -(-len(ids) // batch_size))
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(ids), generator=generator).to(x.device).split(batch_size):
                level, predicted = method.levels.icdf(t[rows]), x_hat[rows]
                gained = method.gain(torch.clamp(level * ratio, max=variance.high)) - method.gain(level)
                optimizer.zero_grad()
                transition_kl(aware, x[ids[rows]], predicted, level, gained).mean().backward()
                optimizer.step()
                schedule.step()
    return replace(variance, correction=correction.requires_grad_(False).eval())


def named_variance(
    name: str, method: Method, predict: Predictor, x: Samples, seed: int = 0, batch_size: int = 256
) -> Variance:
    """Fit the variance called `name` to training samples.

    Args:
        name: `level` (a function of the level alone), `pixels` (each dimension its own), `dct` (a cosine transform over
            space, frequency bands for each principal color), `pca` (the principal axes of the training samples) or
            `learned` (as `pixels`, with a small network that knows the prediction).
    """
    basis = basis_of(name, tuple(x.shape[1:]), _principal_axes(name, x))
    fitted = fit_variance(method, predict, x, basis, seed, batch_size)
    return fitted if name != "learned" else _corrected(fitted, method, predict, x, seed, batch_size)
