"""The estimator of the bound of a set of samples.

    EvaluatedModel      a method, its predictor and the samples
    make_plan           the proposal of the levels, and optionally a control variate, fitted to a pilot
    Rounds              rounds of independent replicates of L_M and L_R
    estimate            as many rounds as are needed, as an `Elbo` with its errors

Levels are stratified within each sample and over the set (strata.py). The evaluations of the pilot do not enter the
estimate, which stays unbiased. `target_error` adds rounds until the Monte Carlo error is small enough; stopping early
favors rounds whose error is underestimated, in a simulation by at most 6 % with 32 blocks.

All levels and noise are functions of (seed, sample or block, replicate, round): they depend neither on the batch size
nor on the number of ranks. Each rank writes the results of its batches into a table that is zero elsewhere, and the
sum of the tables equals the table of a run on a single rank.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Int64, Shaped
from torch import Tensor

from bsi.control_variate import Basis, Control, Observations, fit_control, fit_proposal
from bsi.elbo import Elbo, Estimator, Replicates, reconstruction_loss
from bsi.errors import NonFinite
from bsi.gaussian import squared_norm
from bsi.levels import ExpectedError, Fitted, Proposal
from bsi.methods.base import Method, Predictor
from bsi.progress import Progress
from bsi.rng import uniform
from bsi.sampling import evaluations
from bsi.strata import Design, Integral, Points, noise
from bsi.symbols import SymbolPredictor, mixture_kl
from bsi.values import CONTINUOUS, DataKind, Standardize, Symbols
from bsi.variance import Variance, transition_kl

PILOT_PART = 4  # the pilot takes one evaluation for this many of the first round
FEWEST, MOST = 256, 4096  # limits of the number of pilot evaluations
DESCRIBED = 2048  # samples that the reference denoisers of the control variate are fitted to
GOLDEN = (math.sqrt(5) - 1) / 2


@runtime_checkable
class Ranks(Protocol):
    """The processes that share an evaluation: a `bsi.runtime.distributed.World`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def sum(self, tensor: Tensor) -> Tensor: ...
    def fail_together(self, error: Exception | None) -> None: ...


class OneRank:
    """No other processes."""

    rank, size = 0, 1

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def fail_together(self, error: Exception | None) -> None:
        if error is not None:
            raise error


@runtime_checkable
class Samples(Protocol):
    """A data set that is read by index, such as a `bsi.data.batches.BatchSource`."""

    def __len__(self) -> int: ...
    def take(self, ids: Int64[np.ndarray, " batch"]) -> Shaped[Tensor, "batch *data"]: ...


@dataclass(frozen=True)
class EvaluatedModel:
    """A method and its predictor on a set of samples.

    `predict(ids)` is the predictor for those samples, with their condition bound into it; `x(ids)` are their values, of
    this `shape`.
    """

    method: Method
    predict: Callable[[Int[Tensor, " batch"]], Predictor]
    x: Callable[[Int[Tensor, " batch"]], Float[Tensor, "batch *data"]]
    count: int
    shape: tuple[int, ...]
    kind: DataKind
    device: torch.device
    variance: Variance | None = None  # of the transitions of the bound for finitely many measurements

    @classmethod
    def of(
        cls, method: Method, predict: Predictor, x: Float[Tensor, "samples *data"], kind: DataKind = CONTINUOUS
    ) -> EvaluatedModel:
        """An unconditional predictor on values in one tensor."""
        return cls(method, lambda ids: predict, lambda ids: x[ids], len(x), tuple(x.shape[1:]), kind, x.device)

    def batches(self, count: int, size: int, ranks: Ranks) -> Iterator[Int[Tensor, " batch"]]:
        """This rank's batches of the indices 0 .. count - 1; the batches do not depend on the number of ranks."""
        batches = torch.arange(count, device=self.device).split(size)
        yield from batches[ranks.rank * len(batches) // ranks.size : (ranks.rank + 1) * len(batches) // ranks.size]

    def integrand(
        self,
        predict: Predictor,
        x: Float[Tensor, "batch *data"],
        level: Float[Tensor, " batch"],
        eps: Float[Tensor, "batch *data"],
        gained: Float[Tensor, " batch"] | None = None,
        step_noise: Float[Tensor, "batch *data"] | None = None,
    ) -> Float[Tensor, " batch"]:
        """g = 1/2 level |x - x_hat|^2 in float64: one network evaluation for each sample.

        For symbols, or with a variance, and a step that gains the precision `gained`, the step's KL divergence in the
        same units; that of symbols is estimated from `step_noise`.
        """
        latent = self.method.encoder(level).encode(x, eps)
        if step_noise is not None and gained is not None and isinstance(self.kind, Symbols):
            logits = cast(SymbolPredictor, predict).logits(latent, level)
            return level / gained * mixture_kl(self.kind, x, logits, gained, step_noise)
        x_hat = predict(latent, level)
        if self.variance is not None and gained is not None:
            return level / gained * transition_kl(self.variance, x, x_hat, level, gained)
        return 0.5 * level * squared_norm(x - x_hat).double()

    def spread_out(self, count: int) -> Float[Tensor, "batch *data"]:
        """At most `count` samples, evenly spread over the set."""
        count = min(count, self.count)
        return self.x(torch.arange(count, device=self.device) * self.count // count)


# Fitting the proposal and the control variate


@dataclass(frozen=True)
class Plan:
    """A proposal and a control variate, and the number of evaluations that were made to fit them."""

    proposal: Proposal
    control: Control | None = None
    pilot: int = 0


@torch.no_grad()
def make_plan(
    model: EvaluatedModel, estimator: Estimator, ranks: Ranks | None = None, basis: Basis | None = None
) -> Plan:
    """The estimator's proposal and control variate.

    Every rank must call this function, and all get the same result. Plans for the same set can share `basis`. The
    proposals are `loguniform`, the paper's; `exact`, Equation "expected-h", which the paper simplifies to the former;
    and `fitted`, learned from a pilot together with a control variate.
    """
    if estimator.proposal == "loguniform":
        return Plan(model.method.levels)
    if estimator.proposal == "exact":
        return Plan(expected_error(model.method))
    ranks = ranks or OneRank()
    basis = describe(model) if basis is None else basis
    pilot = Pilot(model.count, min(MOST, max(FEWEST, model.count * estimator.measure // PILOT_PART)), estimator.seed)
    table = Observations.table(basis, pilot.samples, pilot.draws)

    def fill() -> None:
        for members in model.batches(pilot.samples, estimator.batch_size, ranks):
            ids = pilot.ids(members)
            x, predict = model.x(ids), model.predict(ids)
            steady = basis.steady(x)
            for draw in range(pilot.draws):
                level = model.method.levels.icdf(pilot.t(members, draw))
                eps = noise(estimator.seed, ids, "pilot", draw, model.shape, x.dtype)
                g = model.integrand(predict, x, level, eps)
                table[members, draw] = Observations.of(basis, steady, x, eps, torch.log(level), g).rows

    seen = Observations(_together(ranks, fill, table).flatten(0, 1))
    bad = int((~torch.isfinite(seen.g)).sum())
    if bad:
        raise NonFinite(
            f"{bad} of the pilot's {len(seen.g)} evaluations are NaN or infinite: the network's predictions are not "
            f"finite"
        )
    control = fit_control(basis, seen) if estimator.control else None
    residual = seen.g if control is None else seen.g - control.predict(seen)
    return Plan(fit_proposal(model.method.levels, basis.knots, seen.u, residual), control, pilot.evaluations)


def describe(model: EvaluatedModel) -> Basis:
    """Fit the basis functions of a control variate to this set."""
    return Basis.fit(model.method, model.spread_out(DESCRIBED), model.kind)


def expected_error(method: Method) -> ExpectedError:
    """p ~ E |x - psi|^2 = offset / level^2 + 1 / level for data of unit variance; offset is lambda_0^2 for BSI."""
    low = method.levels.low
    first = method.encoder(torch.tensor(low, dtype=torch.float64))
    at_low = float((1 - first.signal).square() + first.noise.square())
    return ExpectedError(low, method.levels.high, max(0.0, low**2 * at_low - low))


def _share_proposal(a: Plan, b: Plan) -> tuple[Plan, Plan]:
    """Two fitted plans over the same levels with one proposal, so that both models are evaluated at the same levels."""
    p, q = a.proposal, b.proposal
    if not (isinstance(p, Fitted) and isinstance(q, Fitted) and (p.low, p.high) == (q.low, q.high)):
        return a, b
    p_sum, q_sum = sum(p.weights), sum(q.weights)
    both = Fitted(p.low, p.high, tuple(v / p_sum + w / q_sum for v, w in zip(p.weights, q.weights, strict=True)))
    return replace(a, proposal=both), replace(b, proposal=both)


@dataclass(frozen=True)
class Pilot:
    """At least `wanted` evaluations, evenly spread over `count` samples and over the levels."""

    count: int
    wanted: int
    seed: int = 0

    @property
    def draws(self) -> int:
        """The number of evaluations of each participating sample."""
        return -(-self.wanted // self.count)

    @property
    def samples(self) -> int:
        """The number of participating samples."""
        return min(self.count, self.wanted)

    @property
    def evaluations(self) -> int:
        return self.samples * self.draws

    def ids(self, members: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """The sample indices of the pilot's members, which are numbered 0 .. samples - 1."""
        return members * self.count // self.samples

    def t(self, members: Int[Tensor, " batch"], draw: int) -> Float64[Tensor, " batch"]:
        """Multiples of the golden ratio with one random shift: consecutive multiples cover [0, 1] evenly."""
        shift = uniform(self.seed, torch.zeros_like(members), 1 << 16, 0)
        return ((members * self.draws + draw).double() * GOLDEN + shift) % 1


# The estimate


def _together(ranks: Ranks, fill: Callable[[], None], table: Tensor) -> Tensor:
    """The sum of the ranks' tables. If `fill` raises on one rank, all ranks raise, so that none waits for another."""
    failed = None
    try:
        fill()
    except Exception as error:
        failed = error
    ranks.fail_together(failed)
    return ranks.sum(table)


class Rounds:
    """One estimate in progress: rounds of replicates of each term.

    Args:
        poll: Called before each batch; it may raise to interrupt the estimate, on all ranks.
    """

    def __init__(
        self,
        model: EvaluatedModel,
        estimator: Estimator,
        ranks: Ranks | None = None,
        plan: Plan | None = None,
        progress: bool = False,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.estimator, self.ranks = model, estimator, ranks or OneRank()
        self.plan = make_plan(model, estimator, ranks) if plan is None else plan
        self.show, self.poll = progress and self.ranks.rank == 0, poll
        self.design = Design(model.count, estimator.measure, estimator.seed)
        self.block = self.design.block(torch.arange(model.count))

    def measure(self, round_: int = 0) -> Replicates:
        """A round of L_M: for each replicate, the average over its levels."""
        model, measure, control = self.model, self.estimator.measure, self.plan.control
        integral = Integral.of(model.method, self.plan.proposal, self.estimator.finite_k)
        hats = None if control is None else integral.hats(control.basis.knots)

        def term(ids: Tensor, x: Tensor) -> Float64[Tensor, "replicates batch"]:
            predict, rows, draw = model.predict(ids), [], 0
            steady = None if control is None else control.basis.steady(x)
            for replicate, size in enumerate(self.design.sizes):
                total = torch.zeros(len(ids), dtype=torch.float64, device=model.device)
                for t in self.design.t(ids, replicate, round_):
                    points = integral.at(t)
                    number = round_ * measure + draw
                    eps = noise(self.design.seed, ids, "measure", number, model.shape, x.dtype)
                    step_noise = self._step_noise(ids, x, points, number)
                    g = model.integrand(predict, x, points.level, eps, points.gained, step_noise)
                    if control is not None and steady is not None:
                        here = Observations.of(control.basis, steady, x, eps, torch.log(points.level), g)
                        g = g - control.predict(here)
                    total += points.weight * g
                    draw += 1
                known = 0.0 if control is None or steady is None or hats is None else control.known(steady, hats)
                rows.append(total / size + known)
            return torch.stack(rows)

        values = self._sum(term, len(self.design.sizes), "levels", measure, round_)
        return Replicates(values, torch.tensor(self.design.sizes), self.block)

    def _step_noise(
        self, ids: Int[Tensor, " batch"], x: Float[Tensor, "batch *data"], points: Points, number: int
    ) -> Float[Tensor, "batch *data"] | None:
        """Noise for the divergence of a step of symbols; None for other data and for infinitely many steps."""
        if points.gained is None or not isinstance(self.model.kind, Symbols):
            return None
        return noise(self.design.seed, ids, "step", number, self.model.shape, x.dtype)

    def reconstruct(self, round_: int = 0) -> Replicates:
        """A round of L_R."""
        model, recon = self.model, self.estimator.recon

        def term(ids: Tensor, x: Tensor) -> Float64[Tensor, "replicates batch"]:
            predict, rows = model.predict(ids), []
            for draw in range(recon):
                eps = noise(self.design.seed, ids, "recon", round_ * recon + draw, model.shape, x.dtype)
                rows.append(reconstruction_loss(model.method, predict, x, eps, model.kind).double())
            return torch.stack(rows)

        values = self._sum(term, recon, "reconstructions", recon, round_)
        return Replicates(values, torch.ones(recon, dtype=torch.int64), self.block)

    def prior(self) -> Float64[Tensor, " samples"]:
        """L_prior, which is exact."""
        return self._sum(lambda ids, x: self.model.method.prior_kl(x).double()[None], 1, "prior", 0, 0)[0]

    def _sum(
        self, term: Callable[[Tensor, Tensor], Tensor], rows: int, what: str, evaluations: int, round_: int
    ) -> Float64[Tensor, "rows samples"]:
        """A term of all samples, whose batches are divided among the ranks, with a progress bar."""
        model, size = self.model, self.estimator.batch_size
        table = torch.zeros(rows, model.count, dtype=torch.float64, device=model.device)
        mine = sum(len(ids) for ids in model.batches(model.count, size, self.ranks))

        def fill() -> None:
            for ids in model.batches(model.count, size, self.ranks):
                self.poll()
                table[:, ids] = term(ids, model.x(ids))
                bar.advance(evaluations * len(ids))

        stream = None if self.show and evaluations else io.StringIO()
        name = what if round_ == 0 else f"{what}, round {round_ + 1}"
        with Progress(name, mine * evaluations, "evaluation", stream=stream) as bar:
            table = _together(self.ranks, fill, table).cpu()
        bad = int((~torch.isfinite(table)).any(0).sum())
        if bad:
            raise NonFinite(
                f"the bound of {bad} of {table.shape[1]} samples is NaN or infinite: the network's predictions are not "
                f"finite there"
            )
        return table


@torch.no_grad()
def estimate(
    model: EvaluatedModel,
    estimator: Estimator,
    ranks: Ranks | None = None,
    plan: Plan | None = None,
    progress: bool = False,
    poll: Callable[[], None] = lambda: None,
) -> Elbo:
    """Estimate the bound of all samples.

    Every rank must call this function, and all get the same result. `plan` overrides the estimator's own plan.
    """
    run = Rounds(model, estimator, ranks, plan, progress, poll)
    rounds = {"measurements": run.measure, "reconstructions": run.reconstruct}
    decoding = 1 if isinstance(model.kind, Symbols) else evaluations(model.method, 0)
    costs = {"measurements": estimator.measure, "reconstructions": estimator.recon * decoding}
    found = {name: one_round() for name, one_round in rounds.items()}
    made = dict.fromkeys(rounds, 1)
    n = math.prod(model.shape) // model.kind.channels
    while estimator.target_error is not None:
        variance = {name: found[name].sum_variance for name in rounds}
        if math.sqrt(sum(variance.values())) / (model.count * n * math.log(2)) <= estimator.target_error:
            break
        # One more round of the term whose variance falls most for each evaluation.
        gain = {name: variance[name] / (made[name] + 1) / max(1, costs[name]) for name in rounds}
        name = max(rounds, key=lambda name: gain[name])
        found[name] = found[name].extended(rounds[name](made[name]))
        made[name] += 1
    return Elbo(
        **found,
        prior=run.prior(),
        n=n,
        log_determinant=model.kind.log_determinant,
        binned=not isinstance(model.kind, Standardize),
        element=model.kind.element,
        estimator=estimator,
        rounds=made["measurements"],
        evaluations=run.plan.pilot + model.count * sum(made[name] * costs[name] for name in rounds),
        pilot_evaluations=run.plan.pilot,
    )


@torch.no_grad()
def estimate_pair(
    a: EvaluatedModel, b: EvaluatedModel, estimator: Estimator, ranks: Ranks | None = None, progress: bool = False
) -> tuple[Elbo, Elbo]:
    """The bounds of two models of the same samples from common random numbers: `first - second` has a small error."""
    plans = _share_proposal(make_plan(a, estimator, ranks), make_plan(b, estimator, ranks))
    first, second = (
        estimate(model, estimator, ranks, plan, progress) for model, plan in zip((a, b), plans, strict=True)
    )
    return first, second
