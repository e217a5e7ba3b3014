"""All likelihoods of one model on the same samples, and whether they are in the order that they must have.

    infinite steps <= k steps of the paper
    k steps with a predictive variance <= coded size
    flow                                                          another model, on either side

The bound of a chain of k steps is the expected length of the code that uses this chain, and the bound for infinitely
many measurements is the limit of the paper's chain. A fitted variance is a part of the model: if a network is poor at
the last levels, the bound with a variance can be below that for infinitely many steps. `audit` compares neighbors by
their standard errors.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bsi import codec
from bsi.bound import EvaluatedModel, OneRank, estimate, noise
from bsi.data.batches import as_source
from bsi.elbo import Elbo, Estimator
from bsi.errors import BsiError, UsageError
from bsi.evaluation.runs import EvaluatedRun, Split, evaluated, fitted_variance
from bsi.gaussian import squared_norm
from bsi.model import Model
from bsi.progress import log
from bsi.rng import subset
from bsi.variance import Variance, transition_kl

MEASURE, RECON = 20, 2
CODED_TOGETHER = 8  # samples in a batch of the codec: the error of the coded size comes from differences of batches
TOLERANCE = 1e-2  # of the flow, in nats
UNORDERED = 3.0  # a wrong order by more standard errors than this is reported


@dataclass(frozen=True)
class Likelihood:
    """One number in bits per dimension, and its standard error for these samples, without that of the data set."""

    name: str
    bits_per_dim: float
    error: float | None
    samples: int


@dataclass(frozen=True)
class OrderedPair:
    """`larger` less `smaller`, in bits per dimension, on the same samples."""

    larger: str
    smaller: str
    difference: float
    error: float | None

    @property
    def holds(self) -> bool:
        return self.difference >= -UNORDERED * (self.error or 0.0)


@torch.no_grad()
def audit(run: EvaluatedRun, split: Split, limit: int, steps: int, kind: str, draws: int, seed: int) -> dict[str, Any]:
    """All likelihoods of `limit` random samples of a split, as a record.

    Args:
        kind: The predictive variance of the finite bound and the code: see `bsi.variance.named_variance`.
        draws: Positions in the bins for the flow: see `Model.log_likelihood`.
    """
    run.model.check_direct("an audit")
    on_data, model = evaluated(run, split, limit), run.model
    data = as_source(split.rows, model.device).take(subset(len(split.rows), on_data.count))
    rows: list[Likelihood] = []

    def bound(name: str, k: int | None, variance: Variance | None = None) -> Elbo:
        estimator = Estimator(MEASURE, RECON, finite_k=k, seed=seed)
        found = estimate(replace(on_data, variance=variance), estimator, progress=True)
        rows.append(Likelihood(f"bound, {name}", float(found), found.monte_carlo_error, len(found.nats)))
        return found

    infinite, variance = bound("infinitely many steps", None), None
    finite = bound(f"{steps} steps, the paper's transition", steps)
    error = math.hypot(finite.monte_carlo_error, infinite.monte_carlo_error)
    order = [OrderedPair(rows[1].name, rows[0].name, float(finite) - float(infinite), error)]
    if kind != "none" and model.symbols is None:
        variance = fitted_variance(model, split.dataset, kind)
        finite = bound(f"{steps} steps, variance {kind}", steps, variance)
    name = rows[-1].name
    if model.bins is not None and (coded := _coded(model, data, steps, variance, finite, name)) is not None:
        rows.append(coded[0])
        order.append(coded[1])
    if model.symbols is None:
        rows.append(_flow(model, data, draws, seed, infinite.n))
    return {
        "likelihoods": [asdict(row) for row in rows],
        "order": [{**asdict(each), "holds": each.holds} for each in order],
        "ordered": all(each.holds for each in order),
        "data_error": infinite.data_error if math.isfinite(infinite.data_error) else None,
        "samples": on_data.count, "steps": steps, "variance": kind, "draws": draws, "seed": seed,
        **split.record(), **run.record(),
    }  # fmt: skip


def _coded(
    model: Model, data: Tensor, steps: int, variance: Variance | None, bound: Elbo, name: str
) -> tuple[Likelihood, OrderedPair] | None:
    """The coded size, compared with the bound, called `name`, of the samples that are coded by the model."""
    try:
        packed = codec.compress(model, data, steps, variance, CODED_TOGETHER)
        if not packed.batches:
            raise UsageError(f"{len(data)} samples are too few to be coded with {steps} steps.")
    except BsiError as failure:
        log(f"bsi audit: without a coded size: {failure}")
        return None
    bits = torch.tensor([each.bits for each in packed.batches], dtype=torch.float64)
    sizes = [each.samples for each in packed.batches]
    expected = torch.stack([part.sum() for part in bound.nats[packed.plain :].split(sizes)]) / math.log(2)
    excess, dimensions = bits - expected, sum(sizes) * packed.n
    error = None if len(excess) < 2 else math.sqrt(len(excess)) * float(excess.std()) / dimensions
    row = Likelihood(f"coded with {steps} steps, net", packed.net_bits_per_dim, error, sum(sizes))
    return row, OrderedPair(row.name, name, float(excess.sum()) / dimensions, error)


def _flow(model: Model, data: Tensor, draws: int, seed: int, n: int) -> Likelihood:
    """The flow's likelihood, from two independent replicates."""
    probes = 1 if draws == 1 else None
    nats = [
        model.log_likelihood(data, probes=probes, draws=draws, tolerance=TOLERANCE, seed=each, progress=True)
        for each in (2 * seed, 2 * seed + 1)
    ]
    bits = -torch.stack(nats) / (n * math.log(2))
    error = float((bits[0] - bits[1]).square().sum().sqrt()) / (2 * len(data))
    name = "flow" if draws == 1 else f"flow, {draws} importance-weighted draws"
    return Likelihood(name, float(bits.mean()), error, len(data))


@dataclass(frozen=True)
class RateDistortion:
    """The cost of the first j = 0 .. k steps of a chain and the error of their prediction, on average over the samples.

    Args:
        bits_per_dim: The cost of the first j steps. Of all k steps it is the bound without the reconstruction term.
        squared_error: (x - x_hat)^2 per dimension, with the prediction from the first j steps.
    """

    bits_per_dim: tuple[float, ...]
    squared_error: tuple[float, ...]


@torch.no_grad()
def rate_distortion(model: EvaluatedModel, steps: int, batch_size: int = 256, seed: int = 0) -> RateDistortion:
    """The rate and the distortion after each of `steps` steps: one evaluation at each level of every sample."""
    grid, variance = model.grid(steps), model.variance
    gained = torch.diff(model.method.gain(grid))
    rates, errors = torch.zeros(2, steps + 1, dtype=torch.float64)
    n = math.prod(model.shape)
    for ids in model.batches(model.count, batch_size, OneRank()):
        x, predict = model.x(ids), model.predict(ids)
        rates[0] += model.method.prior_kl(x).double().sum().cpu()
        for i in range(steps + 1):
            level = grid[i].expand(len(ids)).to(model.device)
            eps = noise(seed, ids, "measure", i, model.shape, x.dtype)
            latent = model.method.encoder(level).encode(x, eps)
            x_hat = predict(latent, level)
            squared = squared_norm(x - x_hat).double()
            errors[i] += squared.sum().cpu()
            if i < steps:
                step = gained[i].expand(len(ids)).to(model.device)
                nats = 0.5 * step * squared
                if variance is not None:
                    nats = transition_kl(variance, x, latent, x_hat, level, step)
                rates[i + 1] += nats.sum().cpu()
    bits = torch.cumsum(rates, 0) / (model.count * n * math.log(2))
    return RateDistortion(tuple(bits.tolist()), tuple((errors / (model.count * n)).tolist()))
