"""The evidence lower bound, Theorems "ELBO" and "infinite ELBO":

    -ln p(x) <= L_R + L_M + L_prior

    L_R     = E_{q(psi | x, last level)} [ -ln p(x | x_hat) ]                                     reconstruction
    L_M^k   = k / 2 E_{i ~ U(0, k-1), q} [ alpha_{i+1} |x - x_hat_i|^2 ]                          k measurements
    L_M^inf = 1/2 E_{level ~ p, q} [ |x - x_hat|^2 / p(level) ]                                   infinitely many

for BSI, BFN and VDM alike; the prior term is 0 for the first two. Each function returns one unbiased estimate per
sample, in nats, from the noise it is given. `bsi.bound` chooses the levels and the noise and makes an `Elbo` of them.

An `Elbo` has two errors: that of the Monte Carlo estimate, which more evaluations reduce, and that of the data set,
which only more samples reduce. Both come from independent replicates y_ri of each sample's bound b_i: two replicates
have nothing in common but the samples, whatever the dependence between the samples of one replicate, so that

    sum_i (y_ri - y_r) (y_si - y_s) / (N - 1),        r != s,        y_r the average over the samples,

has the variance of the b_i between samples as its expectation, without Monte Carlo noise. It is unbiased, and may be
negative if that noise is much larger than the variance; then only an upper limit is known, and is marked as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, cast, get_args

import torch
from jaxtyping import Float, Float64, Int, Integer
from torch import Tensor

from bsi.errors import UsageError
from bsi.gaussian import Data, PerSample, squared_norm
from bsi.grids import check_grid
from bsi.levels import Proposal
from bsi.likelihood import categorical_normal, discretized_normal, normal
from bsi.methods.base import Method, Predictor
from bsi.symbols import SymbolPredictor, log_prob
from bsi.values import DataKind, Standardize, Symbols, unit_of_bounds

Proposals = Literal["loguniform", "exact", "fitted"]

RESOLVED = 2.0  # standard errors above 0 from which a variance counts as known


def _predicted(
    method: Method, predict: Callable[[Data, PerSample], Tensor], x: Data, level: PerSample, eps: Data
) -> Tensor:
    """The prediction from psi ~ q(psi | x, level) for the given noise eps."""
    if x.shape != eps.shape or level.shape != x.shape[:1]:
        got = f"data {tuple(x.shape)}, noise {tuple(eps.shape)}, levels {tuple(level.shape)}"
        raise UsageError(f"data and noise need one shape, and one level per sample: got {got}")
    x_hat = predict(method.encoder(level).encode(x, eps), level)
    if x_hat.shape != x.shape:
        got = f"{tuple(x_hat.shape)} for data of {tuple(x.shape)}"
        raise UsageError(f"a prediction, the predictor's estimate of x, has the data's shape: got {got}")
    return x_hat


def measurement_loss(
    method: Method, predict: Predictor, x: Data, t: PerSample, eps: Data, proposal: Proposal | None = None
) -> PerSample:
    """Corollary "Importance Sampling": an estimate of L_M^inf at level = F^-1(t), F the proposal's CDF."""
    proposal = method.levels if proposal is None else proposal
    if not torch.compiler.is_compiling():
        _check_range(method, proposal.low, proposal.high)
    level = proposal.icdf(t)
    error = squared_norm(x - _predicted(method, predict, x, level, eps))
    return 0.5 * error / proposal.density(level).to(error.dtype)


def _check_range(method: Method, low: float, high: float) -> None:
    levels = method.levels
    if not (math.isclose(low, levels.low, rel_tol=1e-9) and math.isclose(high, levels.high, rel_tol=1e-9)):
        raise UsageError(
            f"a proposal or schedule covers exactly the method's levels, or the bound is biased: got {low} to {high}, "
            f"expected {levels.low} to {levels.high}"
        )


def finite_measurement_loss(
    method: Method, predict: Predictor, x: Data, grid: Float[Tensor, " levels"], i: Integer[Tensor, " batch"], eps: Data
) -> PerSample:
    """Theorem "ELBO": an estimate of L_M^k for the k steps of any grid, at the step i ~ U(0, k-1) of each sample."""
    # A compiled graph cannot read the values of the grid, and reading them from a GPU would synchronize.
    if not torch.compiler.is_compiling() and grid.device.type == "cpu":
        _check_range(method, method.levels.low, float(check_grid(method, grid)[-1]))
    alpha = torch.diff(method.gain(grid))
    error = squared_norm(x - _predicted(method, predict, x, grid.double()[i], eps))
    return 0.5 * len(alpha) * alpha[i].to(error.dtype) * error


def reconstruction_loss(method: Method, predict: Predictor, x: Data, eps: Data, kind: DataKind) -> PerSample:
    """L_R: -ln p(x | x_hat) at the last level: the probability of a bin or a symbol, or a density."""
    level = torch.full((len(x),), method.levels.high, dtype=torch.float64, device=x.device)
    if isinstance(kind, Symbols):
        logits = _predicted(method, cast(SymbolPredictor, predict).logits, x, level, eps)
        return -log_prob(kind, kind.data(x), logits)
    x_hat = _predicted(method, lambda latent, level: method.decode(latent, level, predict), x, level, eps)
    if isinstance(kind, Standardize):
        return -normal(x, x_hat, method.density_precision)
    decoder = discretized_normal if method.decoder == "cdf" else categorical_normal
    return -decoder(kind, kind.indices(x), x_hat, method.recon_precision)


@dataclass(frozen=True)
class Estimator:
    """How the bound is estimated; the defaults are the paper's.

    Args:
        measure: Levels for each sample in a round.
        recon: Reconstructions of each sample in a round.
        finite_k: The bound for this many measurements, on the paper's grid or the variance's; infinitely many by
            default.
        proposal: How levels are drawn: see `bsi.bound.make_plan`.
        control: Use the control variate of the fitted proposal.
        target_error: Add rounds until the Monte Carlo error in bits per dimension is at most this.
        seed: Seed of the levels and the noise.
        batch_size: Samples evaluated at a time. It affects nothing but rounding.
    """

    measure: int = 5
    recon: int = 2
    finite_k: int | None = None
    proposal: Proposals = "loguniform"
    control: bool = True
    target_error: float | None = None
    seed: int = 0
    batch_size: int = 256

    def __post_init__(self) -> None:
        # an error is known from at least two independent replicates
        for name, least in (("measure", 2), ("recon", 2), ("finite_k", 1), ("batch_size", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise UsageError(f"{name} must be at least {least}, got {name}={value}.")
        if self.proposal not in get_args(Proposals):
            raise UsageError(f"proposal must be one of {', '.join(get_args(Proposals))}, got {self.proposal!r}")
        if self.target_error is not None and not self.target_error > 0:
            raise UsageError(f"target_error must be a positive number of bits per dimension, got {self.target_error}")


@dataclass(frozen=True)
class Replicates:
    """Independent unbiased estimates of one term for every sample, in nats; their average is weighted by `sizes`.

    Args:
        values: One row for each replicate.
        sizes: The network evaluations of each sample behind each replicate.
        block: Samples of one block are stratified together, and their errors depend on each other.
    """

    values: Float64[Tensor, "replicates samples"]
    sizes: Int[Tensor, " replicates"]
    block: Int[Tensor, " samples"]

    @property
    def _weight(self) -> Float64[Tensor, "replicates 1"]:
        return (self.sizes / self.sizes.sum()).double()[:, None]

    @property
    def mean(self) -> Float64[Tensor, " samples"]:
        return (self._weight * self.values).sum(0)

    @property
    def sample_variance(self) -> Float64[Tensor, " samples"]:
        """Monte Carlo variance of each sample's average."""
        return self._variance(self.values)

    @property
    def block_variance(self) -> Float64[Tensor, " blocks"]:
        """Monte Carlo variance of each block's sum: not the sum of its samples' variances, whose errors may cancel."""
        sums = self.values.new_zeros(len(self.values), int(self.block.max()) + 1)
        return self._variance(sums.index_add(1, self.block, self.values))

    @property
    def sum_variance(self) -> float:
        """Monte Carlo variance of the sum over the samples."""
        return float(self.block_variance.sum())

    @property
    def noise_between(self) -> float:
        """The part of the variance between the samples' averages that is Monte Carlo noise."""
        offset = self._weight * (self.values - self.values.mean(1, keepdim=True))
        averages, own = offset.sum(0).square().sum(), offset.square().sum()
        shared = (averages - own) / (1 - self._weight.square().sum())
        return float(averages - shared) / (self.values.shape[1] - 1)

    def _variance(self, values: Float64[Tensor, "replicates n"]) -> Float64[Tensor, " n"]:
        weight = self._weight
        return (weight * (values - (weight * values).sum(0)).square()).sum(0) / (len(values) - 1)

    def extended(self, more: Replicates) -> Replicates:
        """These replicates together with those of another round."""
        return replace(self, values=torch.cat([self.values, more.values]), sizes=torch.cat([self.sizes, more.sizes]))

    def __sub__(self, other: Replicates) -> Replicates:
        """Replicates of the difference, from common random numbers."""
        return replace(self, values=self.values - other.values)


@dataclass(frozen=True)
class Elbo:
    """The bound of a set of samples: replicates of its terms in nats, and the errors that follow from them.

    Prints as `1.7938 bits/dim ± 0.0207 (Monte Carlo) ± 0.0163 (data set of 299)`, and continuous data in nats. A format
    applies to `bits_per_dim`, which is also `float(elbo)`. The difference of two from common random numbers,
    `a - b`, is an `Elbo` too.

    Args:
        n: Dimensions, or symbols, of a sample.
        log_determinant: That of the standardization of continuous data, in nats per dimension.
        element: What the bound is printed per: dim, symbol or char.
        evaluations: Network evaluations over all samples; `pilot_evaluations` of them fitted the proposal and the
            control variate.
    """

    measurements: Replicates
    reconstructions: Replicates
    prior: Float64[Tensor, " samples"]
    n: int
    log_determinant: float = 0.0
    binned: bool = True
    element: str = "dim"
    estimator: Estimator | None = None
    rounds: int = 1
    evaluations: int = 0
    pilot_evaluations: int = 0

    @property
    def reconstruction(self) -> PerSample:
        return self.reconstructions.mean

    @property
    def measurement(self) -> PerSample:
        return self.measurements.mean

    @cached_property
    def nats(self) -> PerSample:
        """The bound on -ln p(x) of each sample, in the units of the data."""
        return self.measurement + self.reconstruction + self.prior + self.n * self.log_determinant

    @property
    def nats_per_dim(self) -> float:
        return float(self.nats.mean()) / self.n

    @property
    def bits_per_dim(self) -> float:
        return self.nats_per_dim / math.log(2)

    @cached_property
    def sample_variance(self) -> PerSample:
        """Monte Carlo variance of each sample's bound."""
        return self.measurements.sample_variance + self.reconstructions.sample_variance

    @cached_property
    def sum_variance(self) -> float:
        """Monte Carlo variance of the sum over the samples."""
        return self.measurements.sum_variance + self.reconstructions.sum_variance

    @property
    def monte_carlo_error(self) -> float:
        """Standard error of `bits_per_dim` for this data set: more evaluations reduce it."""
        return math.sqrt(self.sum_variance) / (len(self.nats) * self.n * math.log(2))

    @property
    def degrees_of_freedom(self) -> float:
        """Degrees of freedom of `monte_carlo_error`, for confidence intervals from Student's t-distribution.

        Welch and Satterthwaite's formula, corrected for the bias if each variance has few degrees of freedom.
        """
        parts = (self.measurements, self.reconstructions)
        squares = sum(float(part.block_variance.square().sum()) / (len(part.values) + 1) for part in parts)
        return max(1.0, self.sum_variance**2 / squares - 2) if squares > 0 else math.inf

    @cached_property
    def between(self) -> float:
        """The variance of the bound between samples, without the Monte Carlo part; NaN for a single sample."""
        if len(self.nats) < 2:
            return math.nan
        return float(self.nats.var()) - (self.measurements.noise_between + self.reconstructions.noise_between)

    @property
    def _between_error(self) -> float:
        """`RESOLVED` standard errors of `between`, which is an average over the samples."""
        each = (self.nats - self.nats.mean()).square() - self.sample_variance
        return RESOLVED * float(each.std()) / math.sqrt(len(each))

    @property
    def data_resolved(self) -> bool:
        """Whether the samples differ by so much more than their Monte Carlo noise that `data_error` is known."""
        return len(self.nats) > 1 and self.between >= self._between_error

    @property
    def data_error(self) -> float:
        """Standard error of `bits_per_dim` from the choice of samples alone; an upper limit unless `data_resolved`."""
        if len(self.nats) < 2:
            return math.nan
        most = min(max(0.0, self.between) + self._between_error, float(self.nats.var()))
        variance = self.between if self.data_resolved else most
        return math.sqrt(variance / len(self.nats)) / (self.n * math.log(2))

    def __sub__(self, other: Elbo) -> Elbo:
        """The bound of one model less that of another, whose common noise cancels: see `bsi.bound.estimate_pair`."""
        mine, theirs = ((each.estimator, each.n, len(each.prior), each.rounds) for each in (self, other))
        if mine != theirs:
            got = f"{self.estimator} on {len(self.prior)} samples and {other.estimator} on {len(other.prior)}"
            raise UsageError(f"a paired difference needs the same estimator, without target_error, and samples: {got}")
        return replace(
            self,
            measurements=self.measurements - other.measurements,
            reconstructions=self.reconstructions - other.reconstructions,
            prior=self.prior - other.prior,
            log_determinant=self.log_determinant - other.log_determinant,
            evaluations=self.evaluations + other.evaluations,
            pilot_evaluations=self.pilot_evaluations + other.pilot_evaluations,
        )

    def record(self) -> dict[str, float | bool | str | None]:
        """Bound, errors and terms in bits per element, JSON-serializable: a number that is not finite is None."""
        unit = self.n * math.log(2)
        values = {
            "bits_per_dim": self.bits_per_dim,
            "nats_per_dim": self.nats_per_dim,
            "binned": self.binned,
            "monte_carlo_error": self.monte_carlo_error,
            "degrees_of_freedom": self.degrees_of_freedom,
            "data_error": self.data_error,
            "data_resolved": self.data_resolved,
            "measurement": float(self.measurement.mean()) / unit,
            "reconstruction": float(self.reconstruction.mean()) / unit,
            "prior": float(self.prior.mean()) / unit,
            "change_of_units": self.log_determinant / math.log(2),
        }
        known = {name: value if math.isfinite(value) else None for name, value in values.items()}
        return {**known, "element": self.element}

    def __float__(self) -> float:
        return self.bits_per_dim

    def __format__(self, spec: str) -> str:
        return format(self.bits_per_dim, spec) if spec else str(self)

    def __str__(self) -> str:
        unit, scale = unit_of_bounds(self.binned)
        at_most = "" if self.data_resolved or len(self.nats) < 2 else "at most "
        bits = "" if self.binned else f"; {self.bits_per_dim:.4f} bits/dim"
        return (
            f"{scale * self.bits_per_dim:.4f} {unit}/{self.element} ± {scale * self.monte_carlo_error:.4f} "
            f"(Monte Carlo) ± {at_most}{scale * self.data_error:.4f} (data set of {len(self.nats)}){bits}"
        )
