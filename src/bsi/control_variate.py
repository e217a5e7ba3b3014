"""A control variate for the measurement term, and a proposal that suits it: the same error with fewer evaluations.

One network evaluation gives the integrand g = 1/2 level |x - x_hat|^2 at (x, u = ln level, eps). Most of it is
predicted by a function C(x, u, eps) that needs no network, and whose integral over u and eps is known for every x:

    L_M(x) = int E C du + E_t [ weight (g - C) ],

so that only the difference is estimated by sampling. C is linear in u between knots; at knot k it is a combination

    C_k = sum_s a_ks steady_ks(x) + sum_r b_kr noisy_kr(x, eps)

of functions of the sample alone and of functions whose mean over eps is 0 (`Basis`). They come from reference
denoisers, whose expected error is known in closed form and whose error is correlated with the network's:

- `Wiener`: the best linear denoiser. With rho = signal / noise a latent is equivalent to y = x + eps / rho. Along each
  principal axis of the data, with variance v and coordinates z, e of x - mean and eps, the error is
  z / (1 + rho^2 v) - rho v / (1 + rho^2 v) e, and its square has the expectation (z^2 + rho^2 v^2) / (1 + rho^2 v)^2.
  It captures how values depend on their neighbors, which matters at all but the last levels.
- `Valuewise`: the posterior mean of each value by itself under a histogram of the bins, for binned data. There is one
  histogram for each context, an interval of the value that the sample's other values predict. The context is computed
  from x, which no denoiser could do; a control variate may, because given x only eps is random.

For the bundled digits network the variance of L_M is 6 times smaller than with the log-uniform proposal alone; without
`Valuewise` 3 times, without any reference 1.4 times.

The coefficients are a weighted regression on a pilot: evaluations that never enter the estimate, so that the estimate
stays unbiased. The prior of the coefficients is a random walk over the knots. The proposal of least variance is
p*(u) ~ sqrt(E (g - C)^2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from bsi.levels import Fitted, Interpolation, LogUniform
from bsi.methods.base import Method
from bsi.values import Bins, DataKind

KNOTS = 33
CONTEXTS = 17  # odd: a value in the middle of the range lies inside a context, not on an edge
MAX_BINS = 256  # finer bins are narrower than the noise of the last level, so that knowing them hardly helps
CELL, REACH = 0.125, 6.0  # width and range of the cells over eps in the tables of `Valuewise`
MIN_VARIANCE = 1e-6  # lower limit of the variance along each axis, as a fraction of the mean variance
KNOT_STEP = 0.1  # prior standard deviation of a coefficient's change from one knot to the next
SWEEPS = 2  # passes of the regression, each weighted by the residual variances of the previous one
SMOOTHING = 2  # knots on either side over which residual variances are averaged
FLOOR = 0.1  # the proposal's density is at least this fraction of its mean, even without pilot evaluations nearby

Data = Float[Tensor, "batch *data"]
Knots = Float64[Tensor, " knots"]
PerSample = Float64[Tensor, " batch"]
AtKnots = Float64[Tensor, "batch knots"]
Places = Int[Tensor, " batch"]
Steady = Float64[Tensor, "batch knots steady"]
Functions = Float64[Tensor, "batch 2 functions"]


def knots(levels: LogUniform, count: int = KNOTS) -> Float64[Tensor, " {count}"]:
    """Knots that are equally spaced in u = ln(level)."""
    return torch.linspace(math.log(levels.low), math.log(levels.high), count, dtype=torch.float64)


# Reference denoisers. `expected(x)` is E_eps g at each knot for the error that the reference makes, and
# `deviations(x, eps, left)` is g - E_eps g at the knots left and left + 1.


@dataclass(frozen=True)
class Wiener:
    """The best linear denoiser for the data's mean and variances along `axes`, one orthogonal matrix per dimension."""

    mean: Float64[Tensor, "*data"]
    axes: tuple[Float64[Tensor, "_ _"], ...]
    variance: Float64[Tensor, " n"]
    rho: Knots
    half_level: Knots

    @classmethod
    def fit(cls, method: Method, levels: Knots, x: Data) -> Wiener:
        mean = x.double().mean(0)
        offset = x.double() - mean
        along = (offset.movedim(axis, -1).flatten(0, -2) for axis in range(1, x.ndim))
        axes = tuple(torch.linalg.eigh(rows.T @ rows / len(rows))[1] for rows in along)
        variance = _rotate(offset, axes).square().mean(0)
        variance = torch.clamp(variance, min=MIN_VARIANCE * float(variance.mean()) + 1e-30)
        encoder = method.encoder(levels)
        nothing = encoder.signal == 0
        rho = torch.where(nothing, 0.0, encoder.signal / torch.where(nothing, 1.0, encoder.noise))
        return cls(mean, axes, variance, rho, 0.5 * levels)

    def coordinates(self, x: Data) -> Float64[Tensor, "batch n"]:
        """z: x less its mean, along the axes."""
        return _rotate(x.double() - self.mean, self.axes)

    def expected(self, x: Data) -> AtKnots:
        z = self.coordinates(x)
        rho, v = self.rho, self.variance[:, None]
        known = 1 / (1 + rho.square() * v)
        return self.half_level * (z.square() @ known.square() + (rho * v * known).square().sum(0))

    def deviations(self, x: Data, eps: Data, left: Places) -> Float64[Tensor, "batch 2"]:
        z, e = self.coordinates(x), _rotate(eps.double(), self.axes)
        found = []
        for knot in (left, left + 1):
            rho = self.rho[knot][:, None]
            known = 1 / (1 + rho.square() * self.variance)
            gain = rho * self.variance * known
            error = gain.square() * (e.square() - 1) - 2 * gain * known * z * e
            found.append(self.half_level[knot] * error.sum(1))
        return torch.stack(found, 1)

    def from_others(self, x: Data, rounding: float) -> Float64[Tensor, "batch *data"]:
        """E [x_i | the other values] for each value, under this Gaussian plus a variance of `rounding`.

        With the precision P = A diag(1 / v) A^T it is x_i - (P (x - mean))_i / P_ii, which does not depend on x_i.
        """
        precision = 1 / (self.variance + rounding)
        gained = _rotate((self.coordinates(x) * precision).view_as(x), self.axes, side=1)
        squares = tuple(axis.square() for axis in self.axes)
        diagonal = _rotate(precision.view(1, *x.shape[1:]), squares, side=1)
        return x.double() - (gained / diagonal).view_as(x)


def _rotate(x: Float64[Tensor, "batch *data"], axes: tuple[Tensor, ...], side: int = 0) -> Float64[Tensor, "batch n"]:
    """From the data to coordinates along the axes, or back with side = 1."""
    for matrix in axes:
        x = torch.tensordot(x, matrix, dims=([1], [side]))  # the new axis comes last: the loop restores the order
    return x.flatten(1)


@dataclass(frozen=True)
class Valuewise:
    """The posterior mean of each value in its context, as tables of its squared error over (knot, kind, cell of eps).

    The kind of a value is its context and its bin. `deviation` is the error less its expectation `mean`.
    """

    wiener: Wiener
    bins: Bins
    deviation: Float64[Tensor, "knots kinds cells"]
    mean: Float64[Tensor, "knots kinds"]

    @classmethod
    def fit(cls, wiener: Wiener, x: Data, bins: Bins) -> Valuewise:
        """For data like x, at the knots of `wiener`."""
        centers = bins.values(torch.arange(bins.count, device=x.device), torch.float64)
        counts = torch.bincount(_kinds(wiener, bins, x).flatten(), minlength=CONTEXTS * bins.count)
        counts = counts.view(CONTEXTS, bins.count).double()
        overall = counts.sum(0) / counts.sum()
        prior = counts + overall  # one more value in each context, distributed as all values are
        occurs = torch.log((overall > 0).double())  # -inf: values that never occur are never predicted
        edges = torch.arange(-REACH, REACH + CELL / 2, CELL, dtype=torch.float64, device=x.device)
        below = torch.cat([edges.new_zeros(1), torch.special.ndtr(edges), edges.new_ones(1)])
        middles = torch.cat([edges[:1] - CELL / 2, edges + CELL / 2])
        table = centers.new_empty(len(wiener.rho), CONTEXTS, bins.count, len(middles))
        for knot, (rho, half_level) in enumerate(zip(wiener.rho, wiener.half_level, strict=True)):
            distance = rho * (centers[:, None] - centers)[:, None] + middles[:, None]  # bins, cells, bins
            exponent = occurs - 0.5 * distance.square()
            likelihood = torch.exp(exponent - exponent.amax(-1, keepdim=True))
            x_hat = (likelihood @ (prior * centers).T) / (likelihood @ prior.T)  # bins, cells, contexts
            table[knot] = half_level * (centers[:, None, None] - x_hat).square().movedim(2, 0)
        table = table.flatten(1, 2)
        mean = table @ torch.diff(below)
        return cls(wiener, bins, table.sub_(mean[..., None]), mean)

    def expected(self, x: Data) -> AtKnots:
        kinds = _kinds(self.wiener, self.bins, x)
        counts = self.mean.new_zeros(len(x), self.mean.shape[1])
        counts.scatter_add_(1, kinds, torch.ones_like(kinds, dtype=torch.float64))
        return counts @ self.mean.T

    def deviations(self, x: Data, eps: Data, left: Places) -> Float64[Tensor, "batch 2"]:
        kinds = _kinds(self.wiener, self.bins, x)
        cells = self.deviation.shape[-1]
        cell = (torch.floor((eps.double().flatten(1) + REACH) / CELL) + 1).clamp(0, cells - 1).long()
        return torch.stack([self.deviation[knot[:, None], kinds, cell].sum(1) for knot in (left, left + 1)], 1)


def _kinds(wiener: Wiener, bins: Bins, x: Data) -> Int[Tensor, "batch n"]:
    """Context and bin of each value, as one number."""
    others = wiener.from_others(x, bins.width**2 / 12)  # the variance of a uniform value within a bin
    context = Bins(bins.low, bins.high, CONTEXTS).indices(others).long()
    return (bins.indices(x).long() + bins.count * context).flatten(1)


@dataclass(frozen=True)
class Basis:
    """The functions that a control variate is made of, at the knots.

    Steady functions depend on x alone: the constant 1, and what each reference expects for x, less its average over the
    data. Noisy functions are the references' deviations.
    """

    knots: Knots
    references: tuple[Wiener | Valuewise, ...]
    center: Float64[Tensor, "knots references"]

    @classmethod
    def fit(cls, method: Method, x: Data, kind: DataKind) -> Basis:
        """For data like x."""
        at = knots(method.levels).to(x.device)
        wiener = Wiener.fit(method, torch.exp(at), x)
        references: tuple[Wiener | Valuewise, ...] = (wiener,)
        if isinstance(kind, Bins) and kind.count <= MAX_BINS:
            references += (Valuewise.fit(wiener, x, kind),)
        return cls(at, references, torch.stack([reference.expected(x).mean(0) for reference in references], 1))

    @property
    def count(self) -> int:
        """The number of functions."""
        return 1 + 2 * len(self.references)

    def steady(self, x: Data) -> Steady:
        expected = torch.stack([reference.expected(x) for reference in self.references], 2)
        return torch.cat([torch.ones_like(expected[..., :1]), expected - self.center], 2)

    def values(self, steady: Steady, x: Data, eps: Data, u: PerSample) -> Functions:
        """All functions at the knots to the left and to the right of u, the steady ones first.

        `steady` is `steady(x)`, which all evaluations of x share.
        """
        left = Interpolation.of(self.knots, u).left
        rows = torch.arange(len(u), device=u.device)[:, None]
        noisy = torch.stack([reference.deviations(x, eps, left) for reference in self.references], 2)
        return torch.cat([steady[rows, torch.stack([left, left + 1], 1)], noisy], 2)


@dataclass(frozen=True)
class Control:
    """C(x, u, eps), by its coefficients at each knot."""

    basis: Basis
    coefficients: Float64[Tensor, "knots functions"]

    def known(self, steady: Steady, hats: Knots) -> PerSample:
        """The integral of E C for each sample, from the integrals of the hat functions at the knots."""
        return (steady * self.coefficients[:, : steady.shape[2]]).sum(2) @ hats

    def predict(self, u: PerSample, values: Functions) -> PerSample:
        """C at each u, from the functions at the knots on both sides."""
        between = Interpolation.of(self.basis.knots, u)
        left, right = ((values[:, side] * self.coefficients[between.left + side]).sum(1) for side in (0, 1))
        return left * (1 - between.fraction) + right * between.fraction


def fit_control(basis: Basis, u: PerSample, g: PerSample, values: Functions) -> Control:
    """Weighted least squares with the prior N(0, KNOT_STEP^2) on differences between coefficients of neighboring knots.

    The weights are the inverse residual variances of the previous pass.
    """
    at, count, functions = basis.knots, len(basis.knots), basis.count
    between = Interpolation.of(at, u)
    curve = _smoothed(at, u, g)
    # Units in which coefficients are of order 1: the average integrand for the constant, 1 for references.
    units = torch.ones(count, functions, dtype=torch.float64, device=at.device)
    units[:, 0] = curve
    design = g.new_zeros(len(g), count, functions)
    rows = torch.arange(len(design), device=at.device)
    for side, share in ((0, 1 - between.fraction), (1, between.fraction)):
        knot = between.left + side
        design[rows, knot] = share[:, None] * units[knot] * values[:, side]
    flat = design.flatten(1)
    eye = torch.eye(count * functions, dtype=torch.float64, device=at.device)
    steps = torch.diff(torch.eye(count, dtype=torch.float64, device=at.device), dim=0)
    prior = torch.kron(steps.T @ steps / KNOT_STEP**2, eye[:functions, :functions]) + 1e-3 * eye
    smallest = 1e-12 * float(g.square().mean()) + 1e-30  # a reference may be exact up to rounding
    residual = g - between.at(curve)
    for _ in range(SWEEPS):
        weight = 1 / (between.at(_smoothed(at, u, residual.square(), SMOOTHING)) + smallest)
        found = torch.linalg.solve(flat.T @ (weight[:, None] * flat) + prior, flat.T @ (weight * g))
        residual = g - flat @ found
    return Control(basis, found.view(count, functions) * units)


def fit_proposal(levels: LogUniform, at: Knots, u: PerSample, residual: PerSample) -> Fitted:
    """p* ~ sqrt(E residual^2), with a floor."""
    density = torch.sqrt(_smoothed(at, u, residual.square(), SMOOTHING))
    density = density + FLOOR * density.mean() + 1e-30
    return Fitted(levels.low, levels.high, tuple(density.tolist()))


def _smoothed(at: Knots, u: PerSample, value: PerSample, reach: int = 0) -> Knots:
    """The average of the values around each knot, over `reach` knots on either side."""
    between = Interpolation.of(at, u)
    sums = torch.stack([between.scatter(value, len(at)), between.scatter(torch.ones_like(value), len(at))])
    for _ in range(reach):
        sums = 2 * sums + torch.nn.functional.pad(sums[:, 1:], (0, 1)) + torch.nn.functional.pad(sums[:, :-1], (1, 0))
    return sums[0] / sums[1]
