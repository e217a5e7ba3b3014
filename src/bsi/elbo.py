"""The evidence lower bound, Theorems "ELBO" and "infinite ELBO":

    -ln p(x) <= L_R + L_M + L_prior

    L_R     = E_{q(psi | x, last level)} [ -ln p(x | x_hat) ]                                     reconstruction
    L_M^k   = k / 2 E_{i ~ U(0, k-1), q} [ alpha_{i+1} |x - x_hat_i|^2 ]                          k measurements
    L_M^inf = 1/2 E_{level ~ p, q} [ |x - x_hat|^2 / p(level) ]                                   infinitely many

for BSI, BFN and VDM alike; the prior term is 0 for the first two. Each function returns one unbiased estimate per
sample, in nats, from the noise it is given. An `Elbo` collects them with their errors: that of the Monte Carlo
estimate, which more evaluations shrink, and that of the data set, which only more data shrinks.

Estimates y_ri of a sample i's bound b_i in independent replicates r tell the two apart: whatever dependence there is
between the samples of one replicate, two replicates share the samples alone, and

    sum_i (y_ri - y_r) (y_si - y_s) / (N - 1),        r != s,        y_r the average over the samples,

has the variance of the b_i between the samples as its expectation, free of Monte Carlo noise. Unbiased, it may come out
negative where that noise is much larger than what it hides; then only an upper limit is known, and is named as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Integer, Shaped
from torch import Tensor

from bsi.errors import UsageError
from bsi.gaussian import squared_norm
from bsi.grids import check_grid
from bsi.levels import Proposal
from bsi.likelihood import categorical_normal, discretized_normal, normal
from bsi.methods.base import Method, Predictor
from bsi.values import Bins

__all__ = ["Elbo", "between_samples", "elbo", "finite_measurement_loss", "measurement_loss", "reconstruction_loss"]

RESOLVED = 2.0  # standard errors that a variance must be above 0 to be told as known

Data = Float[Tensor, "batch *data"]
PerSample = Float[Tensor, " batch"]


def _encode(method: Method, x: Data, level: PerSample, eps: Data) -> Data:
    """psi ~ q(psi | x, level), made of the noise eps."""
    if x.shape != eps.shape or level.shape != x.shape[:1]:
        raise UsageError(
            f"data and noise need one shape, and one level per sample: got data {tuple(x.shape)}, noise "
            f"{tuple(eps.shape)}, levels {tuple(level.shape)}"
        )
    return method.encoder(level).encode(x, eps)


def _check_prediction(x_hat: Tensor, x: Tensor) -> Tensor:
    if x_hat.shape != x.shape:
        raise UsageError(
            f"a prediction has the data's shape: got {tuple(x_hat.shape)} for data of {tuple(x.shape)}. A predictor "
            f"maps (latent, level) to an estimate of x."
        )
    return x_hat


def _squared_error(method: Method, predict: Predictor, x: Data, level: PerSample, eps: Data) -> PerSample:
    """|x - x_hat|^2 at each sample's level: one draw of the integrand h(level) of Equation "h"."""
    x_hat = predict(_encode(method, x, level, eps), level)
    return squared_norm(x - _check_prediction(x_hat, x))


def measurement_loss(
    method: Method,
    predict: Predictor,
    x: Data,
    t: PerSample,
    eps: Data,
    proposal: Proposal | None = None,
) -> PerSample:
    """Corollary "Importance Sampling": an estimate of L_M^inf at level = F^-1(t), F the proposal's CDF."""
    proposal = method.levels if proposal is None else proposal
    if not torch.compiler.is_compiling():
        _check_support(method, proposal)
    level = proposal.icdf(t)
    error = _squared_error(method, predict, x, level, eps)
    return 0.5 * error / proposal.density(level).to(error.dtype)


def _check_support(method: Method, proposal: Proposal) -> None:
    for ours, theirs in ((proposal.low, method.levels.low), (proposal.high, method.levels.high)):
        if not math.isclose(ours, theirs, rel_tol=1e-9):
            raise UsageError(
                f"a proposal covers exactly the method's levels, or the estimate is biased: got {proposal.low} to "
                f"{proposal.high}, expected {method.levels.low} to {method.levels.high}"
            )


def finite_measurement_loss(
    method: Method,
    predict: Predictor,
    x: Data,
    grid: Float[Tensor, " levels"],
    i: Integer[Tensor, " batch"],
    eps: Data,
) -> PerSample:
    """Theorem "ELBO": an estimate of L_M^k for the k steps of any grid, at the step i ~ U(0, k-1) of each sample."""
    # Reads the grid, which a compiled graph cannot, and for which the host would wait for a GPU.
    if not torch.compiler.is_compiling() and grid.device.type == "cpu":
        _check_schedule(method, grid)
    alpha = torch.diff(method.gain(grid))
    error = _squared_error(method, predict, x, grid.double()[i], eps)
    return 0.5 * len(alpha) * alpha[i].to(error.dtype) * error


def _check_schedule(method: Method, grid: Float[Tensor, " levels"]) -> None:
    last = float(check_grid(method, grid)[-1])
    if not math.isclose(last, method.levels.high, rel_tol=1e-9):
        raise UsageError(
            f"the schedule of a bound ends where the reconstruction starts: got a last level of {last}, expected "
            f"{method.levels.high}. A method with another last level has another bound."
        )


def reconstruction_loss(method: Method, predict: Predictor, x: Data, eps: Data, bins: Bins | None) -> PerSample:
    """L_R: -ln p(x | x_hat) at the last level. With bins the probability of x's bin, else a density."""
    level = torch.full((len(x),), method.levels.high, dtype=torch.float64, device=x.device)
    x_hat = _check_prediction(method.decode(_encode(method, x, level, eps), level, predict), x)
    if bins is None:
        return -normal(x, x_hat, method.density_precision)
    decoder = discretized_normal if method.decoder == "cdf" else categorical_normal
    return -decoder(bins, bins.indices(x), x_hat, method.recon_precision)


@dataclass(frozen=True)
class Elbo:
    """The bound's terms for each sample in nats, with what is known of their Monte Carlo error.

    `sample_variance` is the Monte Carlo variance of each sample's bound, `sum_variance` that of the sum over the
    samples: they differ when levels are stratified over a batch, where the errors of its samples are not independent.
    `between` is the variance of the bound between samples, the Monte Carlo part removed: see `between_samples`. All
    three come from independent replicates, and are NaN when there was only one.
    """

    reconstruction: PerSample
    measurement: PerSample
    prior: PerSample
    sample_variance: PerSample
    sum_variance: float
    between: float
    n: int
    log_determinant: float = 0.0

    @property
    def nats(self) -> PerSample:
        """The bound on -ln p(x) of each sample, in the units of the data."""
        return self.reconstruction + self.measurement + self.prior + self.n * self.log_determinant

    @property
    def nats_per_dim(self) -> float:
        return float(self.nats.mean()) / self.n

    @property
    def bits_per_dim(self) -> float:
        return self.nats_per_dim / math.log(2)

    @property
    def monte_carlo_error(self) -> float:
        """Standard error of `bits_per_dim` for this data set: what more network evaluations would shrink."""
        return math.sqrt(self.sum_variance) / (len(self.nats) * self.n * math.log(2))

    @property
    def data_error(self) -> float:
        """Standard error of `bits_per_dim` from having these samples and not others, the Monte Carlo part removed;
        an upper limit unless `data_resolved`.
        """
        if len(self.nats) < 2:
            return math.nan
        variance = self.between if self.data_resolved else self._most_between
        return math.sqrt(variance / len(self.nats)) / (self.n * math.log(2))

    @property
    def data_resolved(self) -> bool:
        """Whether the samples differ by so much more than their Monte Carlo noise that `data_error` is known."""
        return len(self.nats) > 1 and self.between >= RESOLVED * self._between_error

    @property
    def _between_error(self) -> float:
        """Standard error of `between`, which is an average over the samples, NaN if it is not known."""
        each = (self.nats - self.nats.mean()).square() - self.sample_variance
        return float(each.std()) / math.sqrt(len(each))

    @property
    def _most_between(self) -> float:
        """Never more than the estimates themselves differ by; and that alone, where there were no replicates."""
        limit = max(0.0, self.between) + RESOLVED * self._between_error
        raw = float(self.nats.var())
        return min(limit, raw) if math.isfinite(limit) else raw

    @classmethod
    def join(cls, parts: Sequence[Elbo]) -> Elbo:
        """Batches evaluated with independent noise, as one."""
        if not parts or len({(part.n, part.log_determinant) for part in parts}) != 1:
            raise UsageError("only bounds of data of one shape and unit can be joined, and at least one")
        counts, sums = [len(part.nats) for part in parts], [part.nats.sum() for part in parts]
        count, total = sum(counts), sum(sums)
        # Within the parts, and between their averages, less what those averages differ by from noise alone.
        squares = [part.between * (b - 1) if b > 1 else 0.0 for part, b in zip(parts, counts, strict=True)]
        squares += [float((s / b - total / count).square()) * b for s, b in zip(sums, counts, strict=True)]
        squares += [part.sum_variance * (1 / count - 1 / b) for part, b in zip(parts, counts, strict=True)]
        return cls(
            reconstruction=torch.cat([part.reconstruction for part in parts]),
            measurement=torch.cat([part.measurement for part in parts]),
            prior=torch.cat([part.prior for part in parts]),
            sample_variance=torch.cat([part.sample_variance for part in parts]),
            sum_variance=math.fsum(part.sum_variance for part in parts),
            between=math.fsum(squares) / (count - 1) if count > 1 else math.nan,
            n=parts[0].n,
            log_determinant=parts[0].log_determinant,
        )

    def __str__(self) -> str:
        at_most = "" if self.data_resolved or len(self.nats) < 2 else "at most "
        return (
            f"{self.bits_per_dim:.4f} bits/dim ± {self.monte_carlo_error:.4f} (Monte Carlo) ± {at_most}"
            f"{self.data_error:.4f} (data set of {len(self.nats)})"
        )


def between_samples(
    nats: PerSample,
    *terms: tuple[Float[Tensor, "_ batch"], Shaped[Tensor, " _"]],  # each has replicates of its own
) -> float:
    """The variance between samples of what `nats` estimates. Each term is a table of replicates, averaged into nats
    with the weights beside it; what else is in nats has no noise.
    """
    if len(nats) < 2:
        return math.nan
    return float(nats.var()) - sum(_noise_between(values, weights) for values, weights in terms)


def _noise_between(values: Float[Tensor, "replicates batch"], weights: Shaped[Tensor, " replicates"]) -> float:
    """How much of the variance between the samples' averages is Monte Carlo noise; NaN for one replicate."""
    weight = (weights / weights.sum()).double()[:, None]
    offset = weight * (values - values.mean(1, keepdim=True))
    averages, own = offset.sum(0).square().sum(), offset.square().sum()
    shared = (averages - own) / (1 - weight.square().sum())
    return float(averages - shared) / (values.shape[1] - 1)


def elbo(
    method: Method,
    predict: Predictor,
    x: Data,
    bins: Bins | None,
    t: Float[Tensor, "measure batch"],
    noise: Callable[[], Data],
    recon: int = 2,
    proposal: Proposal | None = None,
    log_determinant: float = 0.0,
) -> Elbo:
    """The infinite-step bound of a batch from `len(t)` levels and `recon` reconstructions for each sample.

    The rows of t are independent replicates; within a row the levels may be stratified over the batch. `noise()`
    draws standard noise of x's shape, first for the measurements, then for the reconstructions.
    """
    if len(t) < 1 or recon < 1:
        raise UsageError(
            f"the bound needs at least one level and one reconstruction: got measure={len(t)}, recon={recon}"
        )
    measured = torch.stack([measurement_loss(method, predict, x, row, noise(), proposal) for row in t]).double()
    decoded = torch.stack([reconstruction_loss(method, predict, x, noise(), bins) for _ in range(recon)]).double()
    variance = [
        rows.var(0) / len(rows) if len(rows) > 1 else torch.full_like(rows[0], math.nan) for rows in (measured, decoded)
    ]
    sums = [rows.sum(1) for rows in (measured, decoded)]
    sum_variance = [float(total.var()) / len(total) if len(total) > 1 else math.nan for total in sums]
    prior = method.prior_kl(x).double()
    terms = [(rows, torch.ones(len(rows), device=rows.device)) for rows in (measured, decoded)]
    return Elbo(
        reconstruction=decoded.mean(0),
        measurement=measured.mean(0),
        prior=prior,
        sample_variance=variance[0] + variance[1],
        sum_variance=sum(sum_variance),
        between=between_samples(measured.mean(0) + decoded.mean(0) + prior, *terms),
        n=x[0].numel(),
        log_determinant=log_determinant,
    )
