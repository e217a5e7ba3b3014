"""The estimator of the bound: levels stratified within each sample and over the set, in independent replicates.

L_M of a sample is an integral over t in [0, 1], the position of the level under the proposal. The integrand is smooth
and small at both ends, nearly periodic, so that m equally spaced points with one random shift,

    t_j = (j + v) / m,        j = 0 .. m - 1,        v ~ U(0, 1),

are far better than m independent points. Each t_j is uniform: the estimate is unbiased. Samples are divided into
blocks, and the shifts within a block of B samples are equally spaced too, v_i = (i / B + delta) mod 1 with one delta
~ U(0, 1): the block has B m equally spaced levels, so that the part of the integrand that its samples share is
integrated almost exactly.

Errors within a sample and within a block are then correlated, and the usual formula for independent draws does not
apply. So the m levels of a sample belong to R >= 2 replicates with independent shifts and noise. The spread of the
replicates of a block's sum estimates the variance of their average without bias, and blocks are independent: their
variances add, and so do their degrees of freedom. Replicates of unequal size (5 levels are 3 + 2) are averaged by size;
their variance estimate is unbiased if a replicate's variance falls as 1 / m, and too large if it falls faster.

With a control variate (control_variate.py) blocks are evaluated in stages, and each stage uses a control fitted to the
pilot and to the stages before it. Conditional on those, its estimate is unbiased, so that the errors of different
blocks are uncorrelated and their variances add. `target_error` adds rounds until the Monte Carlo error is small enough;
stopping early favors rounds whose error is underestimated, in a simulation by at most 6 % with 32 blocks.

All levels and noise are functions of (seed, sample or block, replicate, round): they depend neither on the batch size
nor on the number of ranks. Each rank writes the results of its batches into a table that is zero elsewhere, and the
sum of the tables equals the table of a run on a single rank.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Int64, Shaped
from torch import Tensor

from bsi.control_variate import Basis, Control, Interpolation, Observations, fit_control, fit_proposal
from bsi.elbo import Elbo, Estimator, Replicates, reconstruction_loss
from bsi.errors import NonFinite
from bsi.gaussian import squared_norm
from bsi.grids import paper_grid
from bsi.levels import ExpectedError, Fitted, Proposal
from bsi.methods.base import Method, Predictor
from bsi.progress import Progress
from bsi.rng import standard_normal, uniform
from bsi.sampling import evaluations
from bsi.values import CONTINUOUS, DataKind, Standardize
from bsi.variance import Variance, transition_kl

__all__ = [
    "Design",
    "EvaluatedModel",
    "Integral",
    "Plan",
    "Ranks",
    "Rounds",
    "Samples",
    "estimate",
    "estimate_pair",
    "make_plan",
]

BLOCKS = 32  # their variances are averaged: the relative error of the standard error is about 1 / sqrt(2 * 32)
FREEDOM = 24  # target for the degrees of freedom: small sets have fewer blocks, and more replicates instead
GROWTH = 0.25  # each stage increases the number of evaluations that the control is fitted to by this fraction
ENOUGH = 8192  # evaluations after which the control is no longer refitted, since more would hardly improve it
PILOT_PART = 8  # the pilot takes one evaluation for this many of the first round
FEWEST, MOST = 256, 2048  # limits of the number of pilot evaluations
DESCRIBED = 2048  # samples that the reference denoisers of the control variate are fitted to
KINDS = {"measure": 1, "recon": 2, "pilot": 3}  # streams of noise, which never share a draw
DRAWS = 1 << 28  # number of draws per stream
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
    ) -> Float[Tensor, " batch"]:
        """g = 1/2 level |x - x_hat|^2 in float64: one network evaluation for each sample.

        With a variance and a step that gains the precision `gained`, the step's KL divergence in the same units.
        """
        x_hat = predict(self.method.encoder(level).encode(x, eps), level)
        if self.variance is not None and gained is not None:
            return level / gained * transition_kl(self.variance, x, x_hat, level, gained)
        return 0.5 * level * squared_norm(x - x_hat).double()

    def spread_out(self, count: int) -> Float[Tensor, "batch *data"]:
        """At most `count` samples, evenly spread over the set."""
        count = min(count, self.count)
        return self.x(torch.arange(count, device=self.device) * self.count // count)


# Levels and noise


@dataclass(frozen=True)
class Points:
    """Levels to evaluate at, the weight of each evaluation and, for a finite number of steps, the precision gained."""

    level: Float64[Tensor, " batch"]
    weight: Float64[Tensor, " batch"]
    gained: Float64[Tensor, " batch"] | None = None


@dataclass(frozen=True)
class Integral:
    """L_M^inf or L_M^k as one integral over u = ln(level), with g(u) = 1/2 level |x - x_hat|^2:

        L_M^inf = int E g(u) du,        L_M^k = sum_i omega_i E g(u_i),    omega_i = alpha_{i+1} / level_i.

    Given t ~ U(0, 1), `at(t)` has E_t [weight f(u)] equal to the integral of f. The steps of L_M^k, on the paper's
    grid, are drawn with probabilities proportional to omega_i p(u_i): for a log-uniform proposal i ~ U(0, k - 1).
    """

    proposal: Proposal
    levels: Float64[Tensor, " steps"] | None = None
    omega: Float64[Tensor, " steps"] | None = None

    @classmethod
    def of(cls, method: Method, proposal: Proposal, k: int | None) -> Integral:
        if k is None:
            return cls(proposal)
        grid = paper_grid(method, k)
        return cls(proposal, grid[:-1], torch.diff(method.gain(grid)) / grid[:-1])

    def at(self, t: Float[Tensor, " batch"]) -> Points:
        if self.levels is None or self.omega is None:
            level = self.proposal.icdf(t)
            return Points(level, 1 / (level * self.proposal.density(level)))
        probability = self.omega * self.levels * self.proposal.density(self.levels)
        levels, omega, probability = (
            v.to(t.device) for v in (self.levels, self.omega, probability / probability.sum())
        )
        i = torch.searchsorted(torch.cumsum(probability, 0), t.double().contiguous(), right=True)
        i = i.clamp(max=len(levels) - 1)  # t may be above the rounded sum of all probabilities
        return Points(levels[i], omega[i] / probability[i], omega[i] * levels[i])

    def hats(self, at: Float64[Tensor, " knots"]) -> Float64[Tensor, " knots"]:
        """The integrals of the functions that are 1 at one knot, 0 at the others, and linear in between."""
        if self.levels is None or self.omega is None:
            half = 0.5 * torch.diff(at)
            return torch.cat([half, half.new_zeros(1)]) + torch.cat([half.new_zeros(1), half])
        between = Interpolation.of(at, torch.log(self.levels.to(at.device)))
        return between.scatter(self.omega.to(at.device), len(at))


def noise(
    seed: int, ids: Int[Tensor, " batch"], kind: str, draw: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Float[Tensor, "batch *data"]:
    """Standard normal noise for one evaluation of these samples."""
    assert 0 <= draw < DRAWS
    return standard_normal(seed, ids, KINDS[kind] * DRAWS + draw, shape, dtype)


@dataclass(frozen=True)
class Design:
    """The positions t of the levels of `count` samples: `measure` per sample and round, in independent replicates."""

    count: int
    measure: int
    seed: int = 0

    @property
    def blocks(self) -> int:
        return min(BLOCKS, max(1, self.count // 4))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of levels in each replicate.

        There are two replicates, or more if there are few blocks. Each has at least two levels if `measure` allows it,
        so that it is itself stratified.
        """
        wanted = max(2, 1 + math.ceil(FREEDOM / self.blocks))
        replicates = min(wanted, max(2, self.measure // 2), self.measure)
        return tuple(self.measure // replicates + (r < self.measure % replicates) for r in range(replicates))

    def block(self, ids: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """The block of each sample. Blocks are interleaved, so that each represents the set regardless of its order."""
        return ids % self.blocks

    def stages(self, learned: int) -> list[Int[Tensor, " _"]]:
        """All samples in stages of whole blocks, for a control that was fitted to `learned` evaluations so far."""
        block = self.block(torch.arange(self.count))
        first, stages = 0, []
        while first < self.blocks:
            more = max(1, int(GROWTH * learned * self.blocks / (self.count * self.measure)))
            end = first + more if learned < ENOUGH else self.blocks
            stages.append(torch.nonzero((first <= block) & (block < end))[:, 0])
            learned += len(stages[-1]) * self.measure
            first = end
        return stages

    def t(self, ids: Int[Tensor, " batch"], replicate: int, round_: int = 0) -> Float64[Tensor, "levels batch"]:
        """The positions of these samples' levels in one replicate of a round."""
        block = self.block(ids)
        size = (self.count - 1 - block) // self.blocks + 1
        shift = ((ids // self.blocks).double() / size + uniform(self.seed, block, replicate, round_)) % 1
        m = self.sizes[replicate]
        return (torch.arange(m, device=ids.device)[:, None] + shift) / m


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
    pairs = min(MOST, max(FEWEST, model.count * estimator.measure // PILOT_PART)) // 2
    pilot = Pilot(model.count, pairs, estimator.seed)
    table = Observations.table(basis, pilot.samples, 2 * pilot.draws)

    def fill() -> None:
        for members in model.batches(pilot.samples, estimator.batch_size, ranks):
            ids = pilot.ids(members)
            x, predict = model.x(ids), model.predict(ids)
            steady = basis.steady(x)
            for draw in range(2 * pilot.draws):
                level = model.method.levels.icdf(pilot.t(members, draw // 2))
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
    """Pairs of evaluations with one sample, one level and two noises, evenly spread over samples and levels."""

    count: int
    pairs: int
    seed: int = 0

    @property
    def draws(self) -> int:
        """The number of pairs for each participating sample."""
        return -(-self.pairs // self.count)

    @property
    def samples(self) -> int:
        """The number of participating samples."""
        return min(self.count, self.pairs)

    @property
    def evaluations(self) -> int:
        return 2 * self.samples * self.draws

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
        self.control = self.plan.control
        self.block = self.design.block(torch.arange(model.count))

    def measure(self, round_: int = 0) -> Replicates:
        """A round of L_M: for each replicate, the average over its levels."""
        table = self._table(len(self.design.sizes))
        stages = self.design.stages(ENOUGH if self.control is None else self.control.learned)
        with self._progress("levels", [len(ids) for ids in stages], self.estimator.measure, round_) as progress:
            for samples in stages:
                self._stage(table, samples.to(self.model.device), round_, progress)
        return Replicates(self._finite(table), torch.tensor(self.design.sizes), self.block)

    def _stage(
        self, table: Float64[Tensor, "replicates all"], samples: Int[Tensor, " samples"], round_: int, bar: Progress
    ) -> None:
        """Fill in these samples' columns of the table, and refit the control with their evaluations."""
        model, measure, control = self.model, self.estimator.measure, self.control
        integral = Integral.of(model.method, self.plan.proposal, self.estimator.finite_k)
        hats = torch.zeros(0) if control is None else integral.hats(control.basis.knots)
        learning = control is not None and control.learned < ENOUGH
        seen = Observations.table(control.basis, len(samples), measure) if control and learning else torch.zeros(0)
        part = torch.zeros_like(table)

        def fill() -> None:
            for members in model.batches(len(samples), self.estimator.batch_size, self.ranks):
                self.poll()
                ids = samples[members]
                x, predict = model.x(ids), model.predict(ids)
                steady = torch.zeros(0) if control is None else control.basis.steady(x)
                draw = 0
                for replicate, size in enumerate(self.design.sizes):
                    total = torch.zeros(len(ids), dtype=torch.float64, device=model.device)
                    for t in self.design.t(ids, replicate, round_):
                        points = integral.at(t)
                        eps = noise(self.design.seed, ids, "measure", round_ * measure + draw, model.shape, x.dtype)
                        g = model.integrand(predict, x, points.level, eps, points.gained)
                        if control is not None:
                            here = Observations.of(control.basis, steady, x, eps, torch.log(points.level), g)
                            g = g - control.predict(here)
                            if learning:
                                seen[members, draw] = here.rows
                        total += points.weight * g
                        draw += 1
                        bar.advance(len(ids))
                    known = 0.0 if control is None else control.known(steady, hats)
                    part[replicate, ids] = total / size + known

        table += _together(self.ranks, fill, part)
        if control is not None and learning:
            # At most ENOUGH observations, since a block may be large, and only finite ones: `_finite` reports others.
            rows = self.ranks.sum(seen)[:: -(-len(samples) * measure // ENOUGH)].flatten(0, 1)
            self.control = control.after(Observations(rows[torch.isfinite(rows).all(1)]))

    def reconstruct(self, round_: int = 0) -> Replicates:
        """A round of L_R."""
        model, recon = self.model, self.estimator.recon
        table = self._table(recon)

        def fill() -> None:
            for ids in model.batches(model.count, self.estimator.batch_size, self.ranks):
                self.poll()
                x, predict = model.x(ids), model.predict(ids)
                for row in range(recon):
                    eps = noise(self.design.seed, ids, "recon", round_ * recon + row, model.shape, x.dtype)
                    table[row, ids] = reconstruction_loss(model.method, predict, x, eps, model.kind).double()
                    bar.advance(len(ids))

        with self._progress("reconstructions", [model.count], recon, round_) as bar:
            table = _together(self.ranks, fill, table)
        return Replicates(self._finite(table), torch.ones(recon, dtype=torch.int64), self.block)

    def prior(self) -> Float64[Tensor, " samples"]:
        """L_prior, which is exact."""
        model, table = self.model, self._table(1)

        def fill() -> None:
            for ids in model.batches(model.count, self.estimator.batch_size, self.ranks):
                table[0, ids] = model.method.prior_kl(model.x(ids)).double()

        return self._finite(_together(self.ranks, fill, table))[0]

    def _table(self, rows: int) -> Float64[Tensor, "replicates samples"]:
        return torch.zeros(rows, self.model.count, dtype=torch.float64, device=self.model.device)

    def _progress(self, what: str, counts: list[int], rows: int, round_: int) -> Progress:
        """A progress bar for this rank's evaluations; the other ranks have as many, up to one batch."""
        mine = sum(
            len(ids) for each in counts for ids in self.model.batches(each, self.estimator.batch_size, self.ranks)
        )
        stream = None if self.show else io.StringIO()
        what = what if round_ == 0 else f"{what}, round {round_ + 1}"
        return Progress(what, mine * rows, "evaluation", stream=stream)

    def _finite(self, table: Float64[Tensor, "replicates samples"]) -> Float64[Tensor, "replicates samples"]:
        table = table.cpu()
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
    costs = {"measurements": estimator.measure, "reconstructions": estimator.recon * evaluations(model.method, 0)}
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
