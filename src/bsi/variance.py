"""Transitions with a predictive variance: a tighter bound with few, large steps.

In information coordinates the generative transition of the paper is N(s + D x_hat, D), with D = Lambda' - Lambda. It
treats the prediction x_hat as if it were the sample. With a predictive variance v of x given s the transition is

    p(s' | s) = N(s + D x_hat, D + D^2 v),

and its KL divergence from the posterior q(s' | s, x) = N(s + D x, D) is, for each dimension,

    KL = 1/2 [ ln(1 + D v) + (1 + D (x - x_hat)^2) / (1 + D v) - 1 ].

It is minimal for v = E (x - x_hat)^2, where it is 1/2 ln(1 + D v) on average instead of 1/2 D v. Any v that depends on
s and the level alone gives a valid bound; v = 0 is the paper's; for k -> infinity all of them agree. Because the noise
of s is white, v may be diagonal in any orthonormal basis of the data.

The variance determines two more things. Binned data can be decoded before the bins are resolved, so that the steps may
end at a lower level: x is x_hat plus N(0, tau^2) and uniform noise of a bin's width w, rounded to a bin. Its mean is
x_hat, and rounding alone has the variance w^2 f (1 - f) if x_hat is a fraction f of the width from a bin to the next.
A network is less precise than that where bins are resolved, so the probability c that x lies beyond a bin becomes
c^a / (c^a + (1 - c)^a). Of tau^2 / v and a, those are taken that decode training samples best. And the cost of every
step is known in advance: of all grids with k steps, `Variance.grid` is the one with the least expected bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from bsi.errors import UsageError
from bsi.gaussian import Data, PerSample, over, sum_over_data
from bsi.grids import Levels, cheapest_grid, paper_grid
from bsi.levels import Interpolation, low_discrepancy
from bsi.methods.base import Method, Predictor
from bsi.rng import standard_normal
from bsi.sampler import VarianceKind
from bsi.values import CONTINUOUS, Bins, DataKind

KNOTS = 33  # levels at which a variance is fitted
PRIOR = 4.0  # weight of the average over all coordinates, in observations per knot
MAX_PCA = 4096
SMALLEST = 1e-12  # lower limit of a variance, since its logarithm is interpolated
DRAWS = 4  # levels for each training sample
BLOCK, SMALLEST_SPACE = 8, 16  # side of a block of the cosine transform, and of the smallest image that has blocks
WIDTH, EPOCHS, RATE = 16, 30, 3e-3  # of a `Correction` and its training
STEPS = 64  # a correction is fitted to the cost of the steps of a chain of about this length
LARGEST_CORRECTION = 6.0  # of ln v
LADDER = 512  # levels that the steps of a grid are chosen from
SHARES = tuple(2.0**-i for i in range(8))  # tau^2 / v
SHARPNESS = (1.0, 1.2, 1.4, 1.7, 2.0, 2.5)  # a
SHARPEST = 0.02  # lower limit of tau, in bins
UNIFORM = 2.0**-20  # part of a decoder that is uniform over the bins

Values = Float[Tensor, "*values"]
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
        return self._apply(x.reshape(-1, *self.shape), [m if m is None else m.T for m in self.matrices]).flatten(1)

    def values(self, coordinates: Coordinates, like: Data) -> Tensor:
        """The inverse of `coordinates`, in the shape of `like`."""
        return self._apply(coordinates.reshape(-1, *self.shape), self.matrices).reshape(like.shape)

    def variances(self, v: Coordinates, like: Data) -> Tensor:
        """The variance of each value of the data if its coordinates are independent, of variance v."""
        squares = [m if m is None else m.square() for m in self.matrices]
        return self._apply(v.reshape(-1, *self.shape), squares).reshape(like.shape)

    def _apply(self, x: Tensor, matrices: Sequence[Tensor | None]) -> Tensor:
        shape = x.shape
        for axis, matrix in enumerate(matrices, start=1):
            if matrix is None:
                continue
            size, matrix = shape[axis], matrix.to(x.device, x.dtype)
            if axis == x.ndim - 1:
                x = x @ matrix
            else:  # a product for each index before the axis: nothing is transposed
                rows = x.reshape(-1, size, math.prod(shape[axis + 1 :]))
                x = torch.bmm(matrix.T.expand(len(rows), size, size), rows)
            x = x.reshape(shape)
        return x


def basis_of(kind: str, shape: tuple[int, ...], axes: Float[Tensor, "_ _"] | None = None) -> OrthonormalBasis:
    """The basis of a kind of variance; `axes` are the `_principal_axes`."""
    each = torch.arange(math.prod(shape))
    match kind:
        case "level":
            return OrthonormalBasis(shape, (None,) * len(shape), torch.zeros_like(each))
        case "pixels":
            return OrthonormalBasis(shape, (None,) * len(shape), each)
        case "dct":
            return OrthonormalBasis(shape, (axes, *map(_cosines, shape[1:])), _frequency_bands(shape))
        case "learned":
            blocks = Blocks(shape)
            return OrthonormalBasis(shape, (axes, *map(_block_cosines, blocks.sides, shape[1:])), blocks.groups())
        case "pca":
            return OrthonormalBasis((len(each),), (axes,), each)
        case _:
            raise UsageError(f"a variance is one of {', '.join(get_args(VarianceKind)[1:])}, got {kind!r}.")


def _principal_axes(kind: str, x: Samples) -> Float[Tensor, "n n"] | None:
    """Eigenvectors, as rows, of the covariance of colors, or of samples (`pca`); the largest variance first."""
    shape, n = tuple(x.shape[1:]), x[0].numel()
    if kind == "dct" and len(shape) < 2:
        raise UsageError(f"a cosine transform needs channels and space, got data of shape {shape}. Use 'pca'.")
    if kind == "pca" and n > MAX_PCA:
        raise UsageError(f"a basis of principal axes is for at most {MAX_PCA} dimensions, got {n}. Use 'dct'.")
    if kind not in ("dct", "pca", "learned") or len(shape) + (kind == "pca") < 2:
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


def _block_cosines(side: int, size: int) -> Float[Tensor, "size size"]:
    return torch.block_diag(*[_cosines(side)] * (size // side))


def _frequency_bands(shape: tuple[int, ...]) -> Int[Tensor, " coordinates"]:
    """For a cosine transform: coordinates of one channel whose frequencies have the same length, rounded."""
    channels, space = shape[0], shape[1:]
    frequencies = torch.meshgrid(*(torch.arange(size, dtype=torch.float64) for size in space), indexing="ij")
    radius = torch.stack(frequencies).square().sum(0).sqrt().round().long().flatten()
    return (torch.arange(channels)[:, None] * (int(radius.max()) + 1) + radius).flatten()


class Blocks:
    """Data in blocks of BLOCK positions along each axis of space; the values of a block are channels.

    Small images and axes that BLOCK does not divide have blocks of one position. A vector is one block.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.sides = [BLOCK if size % BLOCK == 0 and size >= SMALLEST_SPACE else 1 for size in shape[1:]]
        self.channels = math.prod((shape[0], *self.sides))
        pairs = [(size // side, side) for size, side in zip(shape[1:], self.sides, strict=True)]
        self.split = (shape[0], *itertools.chain(*pairs))
        inner, outer = range(3, len(self.split) + 1, 2), range(2, len(self.split), 2)
        self.order = (0, *outer, 1, *inner)
        self.blocks = [count for count, _ in pairs] or [1]

    def to_channels(self, coordinates: Tensor) -> Tensor:
        split = coordinates.reshape(-1, *self.split).permute(self.order)
        return split.reshape(len(coordinates), *self.blocks, self.channels).movedim(-1, 1)

    def from_channels(self, x: Tensor) -> Tensor:
        split = x.movedim(1, -1).reshape(len(x), *(self.split[axis - 1] for axis in self.order[1:]))
        back = [self.order.index(axis) for axis in range(len(self.order))]
        return split.permute(back).reshape(len(x), -1)

    def groups(self) -> Int[Tensor, " coordinates"]:
        """The channel of each coordinate; without blocks the coordinate itself, since small images are aligned."""
        if self.channels == self.shape[0]:
            return torch.arange(math.prod(self.shape))
        channels = torch.arange(self.channels).reshape(1, -1, *[1] * len(self.blocks))
        return self.from_channels(channels.expand(1, -1, *self.blocks))[0]


@dataclass(frozen=True)
class Ending:
    """How binned data is decoded at each knot: tau^2 / v, the exponent a, and the average cost in nats."""

    share: Float64[Tensor, " knots"]
    sharpness: Float64[Tensor, " knots"]
    cost: Float64[Tensor, " knots"]


@dataclass(frozen=True)
class Variance:
    """v(level), diagonal in a basis: ln v is linear between equally spaced points of ln(level).

    `values` has a column for each group of coordinates. Without an `ending` the steps must lead to the last level. With
    a `correction` v is a function of the latent and the prediction too.
    """

    basis: OrthonormalBasis
    method: Method
    values: Float[Tensor, "knots groups"]
    ending: Ending | None = None
    correction: Correction | None = None

    def at(self, level: PerSample, latent: Data, x_hat: Data) -> Coordinates:
        """The predictive variance of each coordinate at these levels, given the latents and the predictions."""
        if self.correction is None:
            return self.of_level(level)
        return self.of_coordinates(level, self.basis.coordinates(latent), self.basis.coordinates(x_hat))

    def of_coordinates(self, level: Levels, latent: Coordinates, x_hat: Coordinates) -> Float[Tensor, "_ coordinates"]:
        """`at` for coordinates of the latents and the predictions. One level stands for that of all samples."""
        v = self.of_level(level)
        if self.correction is None:
            return v
        encoder = self.method.encoder(level)
        noise = encoder.noise.clamp(min=1e-6)  # BFN's first latent is 0, without noise
        eps = (latent - over(encoder.signal, latent) * x_hat) / over(noise, latent)
        rho = over(encoder.signal / noise, latent)
        relative = (rho.square() * v.to(rho)).expand_as(x_hat)
        return v * self.correction(x_hat, (rho * x_hat).square(), eps.square(), relative).exp().to(v)

    def of_level(self, level: PerSample) -> Coordinates:
        """The variance without the correction."""
        return self._of_groups(level)[:, self.basis.groups.to(level.device)]

    def _of_groups(self, level: PerSample) -> Float64[Tensor, "batch groups"]:
        return _between(self.method, level, self.values)

    def decoder_at(self, level: PerSample) -> tuple[PerSample, PerSample]:
        """tau^2 / v and the exponent a."""
        if self.ending is None:
            return torch.ones_like(level), torch.ones_like(level)
        return _between(self.method, level, self.ending.share), _between(self.method, level, self.ending.sharpness)

    def decoder(self, bins: Bins, level: PerSample, latent: Data, x_hat: Data) -> tuple[Data, Data, PerSample]:
        """x_hat and tau in units of the bins' width, counted from the first bin, and the exponent a."""
        place = ((x_hat.double() - bins.low) / bins.width).clamp(0, bins.count - 1)
        v = self.basis.variances(self.at(level, latent, x_hat), x_hat) / bins.width**2
        share, a = self.decoder_at(level)
        return place, torch.sqrt(v * over(share, v)).clamp(min=SHARPEST), a

    def grid(self, k: int) -> Levels:
        """The levels of k steps whose bound is expected to be the least."""
        method, sizes = self.method, torch.bincount(self.basis.groups).double()
        levels = paper_grid(method, LADDER)
        v, gain = self._of_groups(levels).cpu(), method.gain(levels)
        cost = torch.full((len(levels), len(levels)), math.inf, dtype=torch.float64)
        for i in range(LADDER):
            cost[i, i + 1 :] = 0.5 * torch.log1p((gain[i + 1 :] - gain[i])[:, None] * v[i]) @ sizes
        ending = torch.cat([torch.full((LADDER,), math.inf, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
        if self.ending is not None:
            ending = _between(method, levels, self.ending.cost.cpu())
        return cheapest_grid(levels, cost, ending, k)


def _interpolation(method: Method, level: PerSample, knots: int) -> Interpolation:
    return Interpolation.of(torch.linspace(0, 1, knots, dtype=torch.float64).to(level.device), method.levels.cdf(level))


def _between(method: Method, level: PerSample, values: Float[Tensor, "knots ..."]) -> Float64[Tensor, "batch ..."]:
    """The value at each level, whose logarithm is linear between the knots."""
    logs = values.double().clamp(min=SMALLEST).log().to(level.device)
    return _interpolation(method, level, len(values)).at(logs).exp()


class Correction(nn.Module):
    """A small convolutional network over blocks that returns what is added to each ln v, 0 at first.

    It reads the prediction and three squares relative to the noise: of the prediction, of the predicted noise, whose
    square is less than 1 by rho^2 v on average, and v itself.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = Blocks(shape)
        axes, channels = len(self.blocks.blocks), self.blocks.channels
        if axes > 3:
            raise UsageError(f"a learned variance is for data with at most four axes, got {shape}. Use 'level'.")
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        self.layers = nn.Sequential(
            conv(4 * channels, WIDTH, 1),
            nn.SiLU(),
            conv(WIDTH, WIDTH, 3, padding=1),
            nn.SiLU(),
            conv(WIDTH, WIDTH, 3, padding=1),
            nn.SiLU(),
            conv(WIDTH, channels, 1),
        )
        for parameter in self.layers[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Coordinates, signal: Coordinates, noise: Coordinates, v: Coordinates) -> Coordinates:
        logs = (0.3 * torch.log(square + least) for square, least in ((signal, 0.1), (noise, 0.1), (v, 0.01)))
        dtype = next(self.parameters()).dtype
        found = self.layers(torch.cat([self.blocks.to_channels(each.to(dtype)) for each in (x, *logs)], 1))
        return LARGEST_CORRECTION * torch.tanh(self.blocks.from_channels(found) / LARGEST_CORRECTION)


def transition_kl(
    variance: Variance, x: Data, latent: Data, x_hat: Data, level: PerSample, gained: PerSample
) -> PerSample:
    """KL( q(s' | s, x) || p(s' | s) ) in nats for steps that start at `level` and gain the precision `gained`."""
    squared, d = variance.basis.coordinates((x - x_hat).double()).square(), gained.double()[:, None]
    extra = d * variance.at(level, latent, x_hat)
    return 0.5 * sum_over_data(torch.log1p(extra) + (d * squared - extra) / (1 + extra))


def decoding_loss(variance: Variance, bins: Bins, x: Data, latent: Data, x_hat: Data, level: PerSample) -> PerSample:
    """-ln p(x | latent) in nats; a small part of p is uniform over the bins."""
    place, tau, a = variance.decoder(bins, level, latent, x_hat)
    index, a = bins.indices(x).double(), over(a, place)
    beyond = torch.where(index < bins.count - 1, mass_beyond(index, place, tau, a), 0.0)
    mass = torch.where(index > 0, mass_beyond(index - 1, place, tau, a), 1.0) - beyond
    return -sum_over_data(torch.log((1 - UNIFORM) * mass.clamp(min=0) + UNIFORM / bins.count))


def mass_beyond(bin_: Values, place: Values, tau: Values, a: Tensor) -> Values:
    """The probability of the bins after `bin_`: c^a / (c^a + (1 - c)^a).

    c is the probability that place plus N(0, tau^2) and uniform noise in [-1/2, 1/2] is rounded to a bin after `bin_`.
    It is the average of Phi((place - bin - u) / tau) over u in [0, 1], and z Phi(z) + phi(z) is the integral of Phi.
    """

    def integral(z: Values) -> Values:
        return z * torch.special.ndtr(z) + torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)

    c = (tau * (integral((place - bin_) / tau) - integral((place - bin_ - 1) / tau))).clamp(0, 1)
    return c**a / (c**a + (1 - c) ** a)


def widened(variance: Variance, eps: Data, latent: Data, x_hat: Data, level: Float[Tensor, ""], gained: float) -> Data:
    """Noise of the solver `posterior` with the missing variance: a step draws from N(s + D x_hat, D + D^2 v)."""
    factor = torch.sqrt(1 + gained * variance.at(level.expand(len(eps)), latent, x_hat)).to(eps.dtype)
    return variance.basis.values(variance.basis.coordinates(eps) * factor, eps)


@dataclass(frozen=True)
class Predictions:
    """Training samples, and their predictions at one level each."""

    x: Samples
    level: Float64[Tensor, " samples"]
    latent: Samples
    x_hat: Samples

    def __getitem__(self, rows: Int[Tensor, " batch"]) -> Predictions:
        return Predictions(self.x[rows], self.level[rows], self.latent[rows], self.x_hat[rows])

    def batches(self, size: int, order: Int[Tensor, " samples"] | None = None) -> Iterator[Predictions]:
        order = torch.arange(len(self.x)) if order is None else order
        return (self[rows] for rows in order.to(self.x.device).split(size))


@torch.no_grad()
def predictions(method: Method, predict: Predictor, x: Samples, seed: int = 0, batch_size: int = 256) -> Predictions:
    """Predictions of every sample at `DRAWS` levels."""
    generator, found = torch.Generator().manual_seed(seed), []
    for draw in range(DRAWS):
        order = torch.randperm(len(x), generator=generator).to(x.device)
        t = low_discrepancy(len(x), float(torch.rand((), generator=generator))).to(x.device)
        for part in torch.arange(len(x), device=x.device).split(batch_size):
            ids, level = order[part], method.levels.icdf(t[part])
            eps = standard_normal(seed, ids, draw, tuple(x.shape[1:]), x.dtype)
            latent = method.encoder(level).encode(x[ids], eps)
            found.append((x[ids], level, latent, predict(latent, level)))
    return Predictions(*(torch.cat(parts) for parts in zip(*found, strict=True)))


@torch.no_grad()
def fit_variance(method: Method, found: Predictions, basis: OrthonormalBasis, batch_size: int = 256) -> Variance:
    """Fit the v of each group of coordinates to errors on training samples: a weighted average around each knot.

    Test samples would make the bound too good.
    """
    device = found.x.device
    groups = basis.groups.to(device)
    sizes = torch.bincount(groups).double()
    sums, counts = sizes.new_zeros(KNOTS, len(sizes)), sizes.new_zeros(KNOTS, 1)
    for part in found.batches(batch_size):
        squared = basis.coordinates((part.x - part.x_hat).double()).square()
        of_group = squared.new_zeros(len(squared), len(sizes)).index_add(1, groups, squared)
        between = _interpolation(method, part.level, KNOTS)
        sums += between.scatter(of_group / sizes, KNOTS)
        counts += between.scatter(torch.ones_like(part.level)[:, None], KNOTS)
    average = (sums * sizes).sum(1, keepdim=True) / (sizes.sum() * counts.clamp(min=1e-9))
    prior = PRIOR / sizes  # a large group needs less of the prior
    return Variance(basis, method, (sums + prior * average) / (counts + prior))


@torch.no_grad()
def _with_ending(variance: Variance, found: Predictions, bins: Bins, batch_size: int) -> Variance:
    """The variance with the decoder that is best for training samples around each knot, and what that costs."""
    best = Ending(*torch.ones(3, KNOTS, dtype=torch.float64))
    for name, choices in (("share", SHARES), ("sharpness", SHARPNESS)):
        sums, counts = torch.zeros(2, len(choices), KNOTS, dtype=torch.float64, device=found.x.device)
        for i, choice in enumerate(choices):
            tried = replace(variance, ending=replace(best, **{name: torch.full((KNOTS,), choice).double()}))
            for part in found.batches(batch_size):
                nats = decoding_loss(tried, bins, part.x, part.latent, part.x_hat, part.level)
                between = _interpolation(variance.method, part.level, KNOTS)
                sums[i] += between.scatter(nats, KNOTS)
                counts[i] += between.scatter(torch.ones_like(nats), KNOTS)
        cost, chosen = (sums / counts.clamp(min=1e-9)).min(0)
        best = replace(best, cost=cost.cpu(), **{name: torch.tensor(choices, dtype=torch.float64)[chosen.cpu()]})
    return replace(variance, ending=best)


def _corrected(variance: Variance, found: Predictions, seed: int, batch_size: int) -> Variance:
    """The variance with a `Correction`, which is trained on the KL divergence of steps of a chain."""
    method, levels = variance.method, variance.method.levels
    ratio = (levels.high / levels.low) ** (1 / STEPS)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(seed)
        correction = Correction(tuple(found.x.shape[1:])).to(found.x.device)
        aware = replace(variance, correction=correction)
        optimizer = torch.optim.Adam(correction.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * -(-len(found.x) // batch_size))
        for _ in range(EPOCHS):
            for part in found.batches(batch_size, torch.randperm(len(found.x), generator=generator)):
                gained = method.gain(torch.clamp(part.level * ratio, max=levels.high)) - method.gain(part.level)
                optimizer.zero_grad()
                transition_kl(aware, part.x, part.latent, part.x_hat, part.level, gained).mean().backward()
                optimizer.step()
                schedule.step()
    return replace(variance, correction=correction.requires_grad_(False).eval())


def named_variance(
    name: str,
    method: Method,
    predict: Predictor,
    x: Samples,
    seed: int = 0,
    batch_size: int = 256,
    kind: DataKind = CONTINUOUS,
) -> Variance:
    """Fit the variance called `name` to training samples.

    Args:
        name: `level` (a function of the level alone), `pixels` (each dimension its own), `dct` (a cosine transform over
            space, frequency bands for each principal color), `pca` (the principal axes of the training samples) or
            `learned` (a cosine transform of blocks, with a small network that knows the latent and the prediction).
        kind: The kind of data. The steps of binned data may end before the last level.
    """
    basis = basis_of(name, tuple(x.shape[1:]), _principal_axes(name, x))
    found = predictions(method, predict, x, seed, batch_size)
    variance = fit_variance(method, found, basis, batch_size)
    if name == "learned":
        variance = _corrected(variance, found, seed, batch_size)
    return _with_ending(variance, found, kind, batch_size) if isinstance(kind, Bins) else variance
