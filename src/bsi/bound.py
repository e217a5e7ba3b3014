"""The estimator of the bound of a set of samples, and the levels that it is evaluated at.

    EvaluatedModel      a method, its predictor and the samples
    make_plan           the proposal of the levels, and optionally a control variate, fitted to a pilot
    estimate            as many rounds of L_M and L_R as are needed, as an `Elbo` with its errors

L_M of a sample is an integral over t in [0, 1], the position of the level under the proposal. The integrand is smooth
and small at both ends, nearly periodic, so that m equally spaced points with one random shift,

    t_j = (j + v) / m,        j = 0 .. m - 1,        v ~ U(0, 1),

are far better than m independent points. Each t_j is uniform: the estimate is unbiased. Samples are divided into
blocks, and the shifts within a block of B samples are equally spaced too, v_i = (i / B + delta) mod 1 with one delta
~ U(0, 1): the part of the integrand that the samples of a block share is integrated almost exactly.

Errors within a sample and within a block are then correlated. So the m levels of a sample belong to R >= 2 replicates
with independent shifts and noise. The spread of the replicates of a block's sum estimates the variance of their average
without bias, and blocks are independent: their variances add, and so do their degrees of freedom. Replicates of unequal
size (5 levels are 3 + 2) are averaged by size; their variance estimate is unbiased if a replicate's variance falls as
1 / m, and too large if it falls faster.

The evaluations of the pilot do not enter the estimate, which stays unbiased. `target_error` adds rounds until the Monte
Carlo error is small enough; stopping early favors rounds whose error is underestimated, in a simulation by at most 6 %
with 32 blocks.

All levels and noise are functions of (seed, sample or block, replicate, round): they depend neither on the batch size
nor on the number of ranks. Each rank writes the results of its batches into a table that is zero elsewhere, and the
sum of the tables equals the table of a run on a single rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Int64, Shaped
from torch import Tensor

from bsi.control_variate import Basis, Control, fit_control, fit_proposal
from bsi.elbo import Elbo, Estimator, Replicates, reconstruction_loss
from bsi.errors import NonFinite
from bsi.gaussian import Data, PerSample, squared_norm
from bsi.grids import Levels, paper_grid
from bsi.latents import Encoded
from bsi.levels import ExpectedError, Fitted, Interpolation, Proposal
from bsi.methods.base import Method, Predictor
from bsi.progress import shown
from bsi.rng import derive, standard_normal, uniform
from bsi.sampling import evaluations
from bsi.symbols import SymbolPredictor, mixture_kl
from bsi.values import CONTINUOUS, Bins, DataKind, Standardize, Symbols
from bsi.variance import Variance, decoding_loss, transition_kl

BLOCKS = 32  # their variances are averaged: the relative error of the standard error is about 1 / sqrt(2 * 32)
FREEDOM = 24  # target for the degrees of freedom: small sets have fewer blocks, and more replicates instead
KINDS = {"measure": 1, "recon": 2, "pilot": 3, "step": 4, "latent": 5}  # streams of noise, which never share a draw
DRAWS = 1 << 28  # number of draws per stream
PILOT_PART = 4  # the pilot takes one evaluation for this many of the first round
FEWEST, MOST = 256, 4096  # limits of the number of pilot evaluations
DESCRIBED = 2048  # samples that the reference denoisers of the control variate are fitted to
LATENT_DRAWS = 2  # of each image, for each term of the bound of images: independent replicates
GOLDEN = (math.sqrt(5) - 1) / 2

Ids = Int[Tensor, " batch"]


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
class SampleSource(Protocol):
    """A data set that is read by index, such as a `bsi.data.batches.BatchSource`."""

    def __len__(self) -> int: ...
    def take(self, ids: Int64[np.ndarray, " batch"]) -> Shaped[Tensor, "batch *data"]: ...


def noise(seed: int, ids: Ids, kind: str, draw: int, shape: tuple[int, ...], dtype: torch.dtype) -> Data:
    """Standard normal noise for one evaluation of these samples."""
    return standard_normal(seed, ids, KINDS[kind] * DRAWS + draw, shape, dtype)


@dataclass(frozen=True)
class EvaluatedModel:
    """A method and its predictor on a set of samples.

    `predict(ids)` is the predictor for those samples, with their condition bound into it; `x(ids)` are their values, of
    this `shape`.
    """

    method: Method
    predict: Callable[[Ids], Predictor]
    x: Callable[[Ids], Data]
    count: int
    shape: tuple[int, ...]
    kind: DataKind
    device: torch.device
    variance: Variance | None = None  # of the transitions of the bound for finitely many measurements
    encoded: Encoded | None = None  # the images whose latents are x, for the bound of images

    @classmethod
    def of(
        cls, method: Method, predict: Predictor, x: Float[Tensor, "samples *data"], kind: DataKind = CONTINUOUS
    ) -> EvaluatedModel:
        """An unconditional predictor on values in one tensor."""
        return cls(method, lambda ids: predict, lambda ids: x[ids], len(x), tuple(x.shape[1:]), kind, x.device)

    def batches(self, count: int, size: int, ranks: Ranks) -> Iterator[Ids]:
        """This rank's batches of the indices 0 .. count - 1; the batches do not depend on the number of ranks."""
        batches = torch.arange(count, device=self.device).split(size)
        yield from batches[ranks.rank * len(batches) // ranks.size : (ranks.rank + 1) * len(batches) // ranks.size]

    def integrand(
        self, predict: Predictor, x: Data, points: Points, eps: Data, step_noise: Callable[[], Data] | None = None
    ) -> PerSample:
        """g = 1/2 level |x - x_hat|^2 in float64: one network evaluation for each sample.

        For symbols, or with a variance, the KL divergence of a step of finite length in the same units; that of symbols
        is estimated from `step_noise`.
        """
        level, gained = points.level, points.gained
        latent = self.method.encoder(level).encode(x, eps)
        if gained is not None and step_noise is not None and isinstance(self.kind, Symbols):
            logits = cast(SymbolPredictor, predict).logits(latent, level)
            return level / gained * mixture_kl(self.kind, x, logits, gained, step_noise())
        x_hat = predict(latent, level)
        if gained is not None and self.variance is not None:
            return level / gained * transition_kl(self.variance, x, latent, x_hat, level, gained)
        return 0.5 * level * squared_norm(x - x_hat).double()

    def grid(self, k: int) -> Levels:
        """The levels of k steps: the paper's, or those for which the variance predicts the least bound."""
        return paper_grid(self.method, k) if self.variance is None else self.variance.grid(k)

    def reconstruction(self, predict: Predictor, x: Data, eps: Data, end: Float64[Tensor, ""] | None) -> PerSample:
        """-ln p(x | x_hat) at the last level, or of binned data at the `end` of the steps with its variance."""
        if end is None or self.variance is None or not isinstance(self.kind, Bins):
            return reconstruction_loss(self.method, predict, x, eps, self.kind)
        level = end.expand(len(x))
        latent = self.method.encoder(level).encode(x, eps)
        return decoding_loss(self.variance, self.kind, x, latent, predict(latent, level), level)


@dataclass(frozen=True)
class Points:
    """Levels to evaluate at, the weight of each evaluation and, for a finite number of steps, the precision gained."""

    level: PerSample
    weight: PerSample
    gained: PerSample | None = None


@dataclass(frozen=True)
class Integral:
    """L_M^inf or L_M^k as one integral over u = ln(level), with g(u) = 1/2 level |x - x_hat|^2:

        L_M^inf = int E g(u) du,        L_M^k = sum_i omega_i E g(u_i),    omega_i = alpha_{i+1} / level_i.

    Given t ~ U(0, 1), `at(t)` has E_t [weight f(u)] equal to the integral of f. The steps of L_M^k on a grid are drawn
    with probabilities proportional to omega_i p(u_i): for a log-uniform proposal i ~ U(0, k - 1).
    """

    proposal: Proposal
    steps: tuple[Float64[Tensor, " steps"], Float64[Tensor, " steps"]] | None = None  # levels and omega

    @classmethod
    def of(cls, method: Method, proposal: Proposal, grid: Levels | None) -> Integral:
        if grid is None:
            return cls(proposal)
        return cls(proposal, (grid[:-1], torch.diff(method.gain(grid)) / grid[:-1]))

    def at(self, t: Float[Tensor, " batch"]) -> Points:
        if self.steps is None:
            level = self.proposal.icdf(t)
            return Points(level, 1 / (level * self.proposal.density(level)))
        levels, omega = self.steps
        # A step that is much longer than the others, such as the last one of a fitted grid, costs little.
        longest = max(1.0, 2 * float(omega.median()))
        probability = omega.clamp(max=longest) * levels * self.proposal.density(levels)
        levels, omega, probability = (v.to(t.device) for v in (levels, omega, probability / probability.sum()))
        i = torch.searchsorted(torch.cumsum(probability, 0), t.double().contiguous(), right=True)
        i = i.clamp(max=len(levels) - 1)  # t may be above the rounded sum of all probabilities
        return Points(levels[i], omega[i] / probability[i], omega[i] * levels[i])

    def hats(self, at: Float64[Tensor, " knots"]) -> Float64[Tensor, " knots"]:
        """The integrals of the functions that are 1 at one knot, 0 at the others, and linear in between."""
        if self.steps is None:
            half = 0.5 * torch.diff(at)
            return torch.cat([half, half.new_zeros(1)]) + torch.cat([half.new_zeros(1), half])
        levels, omega = (v.to(at.device) for v in self.steps)
        return Interpolation.of(at, torch.log(levels)).scatter(omega, len(at))


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
        """The number of levels in each replicate: two replicates, or more if there are few blocks.

        Each has at least two levels if `measure` allows it, so that it is itself stratified.
        """
        wanted = max(2, 1 + math.ceil(FREEDOM / self.blocks))
        replicates = min(wanted, max(2, self.measure // 2), self.measure)
        return tuple(self.measure // replicates + (r < self.measure % replicates) for r in range(replicates))

    def block(self, ids: Ids) -> Ids:
        """The block of each sample. Blocks are interleaved, so that each represents the set regardless of its order."""
        return ids % self.blocks

    def t(self, ids: Ids, replicate: int, round_: int = 0) -> Float64[Tensor, "levels batch"]:
        """The positions of these samples' levels in one replicate of a round."""
        block = self.block(ids)
        size = (self.count - 1 - block) // self.blocks + 1
        shift = ((ids // self.blocks).double() / size + uniform(self.seed, block, replicate, round_)) % 1
        m = self.sizes[replicate]
        return (torch.arange(m, device=ids.device)[:, None] + shift) / m


@dataclass(frozen=True)
class Plan:
    """A proposal and a control variate, and the number of evaluations that were made to fit them."""

    proposal: Proposal
    control: Control | None = None
    pilot: int = 0


@torch.no_grad()
def make_plan(model: EvaluatedModel, estimator: Estimator, ranks: Ranks | None = None) -> Plan:
    """The estimator's proposal and control variate. Every rank must call this function, and all get the same result.

    The proposals are `loguniform`, the paper's; `exact`, Equation "expected-h", which the paper simplifies to the
    former; and `fitted`, learned from a pilot together with a control variate.
    """
    if estimator.proposal == "loguniform":
        return Plan(model.method.levels)
    if estimator.proposal == "exact":
        return Plan(expected_error(model.method))
    return _Evaluation(model, estimator, ranks or OneRank()).fitted()


def expected_error(method: Method) -> ExpectedError:
    """p ~ E |x - psi|^2 = offset / level^2 + 1 / level for data of unit variance; offset is lambda_0^2 for BSI."""
    low = method.levels.low
    first = method.encoder(torch.tensor(low, dtype=torch.float64))
    at_low = float((1 - first.signal).square() + first.noise.square())
    return ExpectedError(low, method.levels.high, max(0.0, low**2 * at_low - low))


@dataclass(frozen=True)
class _Evaluation:
    """The pilot, and the terms of the bound of all samples in rounds of independent replicates."""

    model: EvaluatedModel
    estimator: Estimator
    ranks: Ranks
    progress: bool = False
    poll: Callable[[], None] = lambda: None

    @functools.cached_property
    def grid(self) -> Levels | None:
        """The levels of finitely many steps."""
        k = self.estimator.finite_k
        return None if k is None else self.model.grid(k)

    def _table(
        self, count: int, columns: tuple[int, ...], row: Callable[[Ids], Tensor], name: str = "", evaluations: int = 0
    ) -> Float64[Tensor, "..."]:
        """A row for each of the numbers 0 .. count - 1, in batches that are divided among the ranks.

        If one rank fails all ranks raise, so that none waits for another.
        """
        table = torch.zeros(count, *columns, dtype=torch.float64, device=self.model.device)
        mine = list(self.model.batches(count, self.estimator.batch_size, self.ranks))
        total, failed = evaluations * sum(map(len, mine)), None
        with shown(self.progress and self.ranks.rank == 0 and total > 0, name, total, "evaluation") as advance:
            try:
                for numbers in mine:
                    self.poll()
                    table[numbers] = row(numbers)
                    advance(evaluations * len(numbers))
            except Exception as error:
                failed = error
            self.ranks.fail_together(failed)
            return self.ranks.sum(table)

    def _noise(self, ids: Ids, kind: str, draw: int, x: Data) -> Data:
        return noise(self.estimator.seed, ids, kind, draw, self.model.shape, x.dtype)

    def fitted(self) -> Plan:
        """A proposal and a control variate, fitted to a pilot."""
        model, estimator, levels = self.model, self.estimator, self.model.method.levels
        described = min(DESCRIBED, model.count)  # samples, evenly spread over the set
        evenly = torch.arange(described, device=model.device) * model.count // described
        basis = Basis.fit(model.method, model.x(evenly), model.kind)
        wanted = min(MOST, max(FEWEST, model.count * estimator.measure // PILOT_PART))
        samples, draws = min(model.count, wanted), -(-wanted // model.count)

        def row(members: Ids) -> Float64[Tensor, "batch draws columns"]:
            """u, g, and the functions of the basis at the knots on both sides."""
            ids = members * model.count // samples
            x, predict = model.x(ids), model.predict(ids)
            steady, found = basis.steady(x), []
            shift = uniform(estimator.seed, torch.zeros_like(members), 1 << 16, 0)
            for draw in range(draws):
                # consecutive multiples of the golden ratio cover [0, 1] evenly
                level = levels.icdf(((members * draws + draw).double() * GOLDEN + shift) % 1)
                eps, u = self._noise(ids, "pilot", draw, x), torch.log(level)
                g = model.integrand(predict, x, Points(level, torch.ones_like(level)), eps)
                found.append(torch.cat([u[:, None], g[:, None], basis.values(steady, x, eps, u).flatten(1)], 1))
            return torch.stack(found, 1)

        rows = self._table(samples, (draws, 2 + 2 * basis.count), row).flatten(0, 1)
        u, g, values = rows[:, 0].contiguous(), rows[:, 1].contiguous(), rows[:, 2:].unflatten(1, (2, -1))
        if bad := int((~torch.isfinite(g)).sum()):
            raise NonFinite(f"{bad} of the pilot's {len(g)} evaluations are NaN or infinite, as predictions are")
        # The control variate is of the paper's cost, which grows with the length of a step without limit.
        uses_control = estimator.control and model.variance is None
        control = fit_control(basis, u, g, values) if uses_control else None
        residual = g if control is None else g - control.predict(u, values)
        return Plan(fit_proposal(levels, basis.knots, u, residual), control, samples * draws)

    def measurements(self, plan: Plan, round_: int) -> Replicates:
        """L_M: for each replicate, the average over its levels."""
        model, control, estimator = self.model, plan.control, self.estimator
        design = Design(model.count, estimator.measure, estimator.seed)
        integral = Integral.of(model.method, plan.proposal, self.grid)

        def row(ids: Ids) -> Float64[Tensor, "batch replicates"]:
            x, predict, averages, draw = model.x(ids), model.predict(ids), [], round_ * design.measure
            steady = None if control is None else control.basis.steady(x)
            for replicate, size in enumerate(design.sizes):
                total = torch.zeros(len(ids), dtype=torch.float64, device=model.device)
                for t in design.t(ids, replicate, round_):
                    points, eps = integral.at(t), self._noise(ids, "measure", draw, x)
                    step_noise = functools.partial(self._noise, ids, "step", draw, x)
                    g = model.integrand(predict, x, points, eps, step_noise)
                    if control is not None and steady is not None:
                        u = torch.log(points.level)
                        g = g - control.predict(u, control.basis.values(steady, x, eps, u))
                    total += points.weight * g
                    draw += 1
                averages.append(total / size)
            found = torch.stack(averages, 1)
            if control is not None and steady is not None:
                found = found + control.known(steady, integral.hats(control.basis.knots))[:, None]
            return found

        return self._replicates(row, design.sizes, design.measure, "levels", round_)

    def reconstructions(self, plan: Plan, round_: int) -> Replicates:
        """L_R."""
        model, recon = self.model, self.estimator.recon
        end = None if self.grid is None else self.grid[-1].to(model.device)

        def row(ids: Ids) -> Float64[Tensor, "batch replicates"]:
            x, predict, draws = model.x(ids), model.predict(ids), range(round_ * recon, (round_ + 1) * recon)
            noises = (self._noise(ids, "recon", draw, x) for draw in draws)
            return torch.stack([model.reconstruction(predict, x, eps, end) for eps in noises], 1).double()

        return self._replicates(row, [1] * recon, recon, "reconstructions", round_)

    def prior(self) -> Float64[Tensor, " samples"]:
        """L_prior, which is exact."""
        model = self.model
        return self._replicates(lambda ids: model.method.prior_kl(model.x(ids)).double()[:, None], [1], 0, "prior").mean

    def _replicates(
        self, row: Callable[[Ids], Tensor], sizes: Sequence[int], evaluations: int, name: str, round_: int = 0
    ) -> Replicates:
        name, count = name if round_ == 0 else f"{name}, round {round_ + 1}", self.model.count
        table = self._table(count, (len(sizes),), row, name, evaluations).cpu().T.contiguous()
        if bad := int((~torch.isfinite(table)).any(0).sum()):
            raise NonFinite(f"the bound of {bad} of {count} samples is NaN or infinite, as predictions are there")
        block = Design(count, self.estimator.measure).block(torch.arange(count))
        return Replicates(table, torch.tensor(sizes), block)


@torch.no_grad()
def estimate(
    model: EvaluatedModel,
    estimator: Estimator,
    ranks: Ranks | None = None,
    plan: Plan | None = None,
    progress: bool = False,
    poll: Callable[[], None] = lambda: None,
) -> Elbo:
    """Estimate the bound of all samples. Every rank must call this function, and all get the same result.

    Args:
        plan: In place of the estimator's own plan.
        poll: Called before each batch; it may raise to interrupt the estimate, on all ranks.
    """
    evaluation = _Evaluation(model, estimator, ranks or OneRank(), progress, poll)
    if model.encoded is not None:
        return _of_images(evaluation, model.encoded, plan)
    plan = make_plan(model, estimator, ranks) if plan is None else plan
    terms = {"measurements": evaluation.measurements, "reconstructions": evaluation.reconstructions}
    decoding = 1 if isinstance(model.kind, Symbols) else evaluations(model.method, 0)
    costs = {"measurements": estimator.measure, "reconstructions": estimator.recon * decoding}
    found, made = {name: term(plan, 0) for name, term in terms.items()}, dict.fromkeys(terms, 1)
    n = math.prod(model.shape) // model.kind.channels
    while estimator.target_error is not None:
        variance = {name: found[name].sum_variance for name in terms}
        if math.sqrt(sum(variance.values())) / (model.count * n * math.log(2)) <= estimator.target_error:
            break
        # One more round of the term whose variance falls most for each evaluation.
        name = max(terms, key=lambda name: variance[name] / (made[name] + 1) / max(1, costs[name]))
        found[name] = found[name].extended(terms[name](plan, made[name]))
        made[name] += 1
    return Elbo(
        **found,
        prior=evaluation.prior(),
        n=n,
        log_determinant=model.kind.log_determinant,
        binned=not isinstance(model.kind, Standardize),
        element=model.kind.element,
        estimator=estimator,
        rounds=made["measurements"],
        evaluations=plan.pilot + model.count * sum(made[name] * costs[name] for name in terms),
        pilot_evaluations=plan.pilot,
    )


def _of_images(evaluation: _Evaluation, encoded: Encoded, plan: Plan | None) -> Elbo:
    """The bound of images, see `bsi.latents`. Each replicate has its own latents, levels and noise.

    `measurement` is the cost of the latents, -ln p(z) + ln q(z | x), and `reconstruction` is -ln p(x | z).
    """
    model, estimator, draws = evaluation.model, evaluation.estimator, range(LATENT_DRAWS)

    def eps(ids: Ids, draw: int) -> Data:
        return noise(estimator.seed, ids, "latent", draw, model.shape, torch.float32)

    def terms(ids: Ids) -> Float64[Tensor, "batch terms"]:
        distortions = [encoded.distortion(ids, eps(ids, LATENT_DRAWS + draw)) for draw in draws]
        return torch.stack([encoded.entropy(ids), *distortions], 1).double()

    def prior(draw: int) -> Elbo:
        def x(ids: Ids) -> Data:
            return model.kind.values(encoded.latents(ids, eps(ids, draw)), torch.float32)

        target = estimator.target_error
        per_latent = None if target is None else target * encoded.n / math.prod(model.shape)
        own = replace(estimator, seed=derive(estimator.seed, "latents", draw), target_error=per_latent)
        of_latents = replace(model, x=x, encoded=None)
        return estimate(of_latents, own, evaluation.ranks, plan, evaluation.progress, evaluation.poll)

    entropy, *distortions = evaluation._table(model.count, (1 + LATENT_DRAWS,), terms, "decoder", 1).cpu().T
    found, once = [prior(draw) for draw in draws], torch.ones(LATENT_DRAWS, dtype=torch.int64)
    block = found[0].measurements.block
    return Elbo(
        Replicates(torch.stack([each.nats for each in found]) - entropy, once, block),
        Replicates(torch.stack(distortions), once, block),
        prior=torch.zeros_like(entropy),
        n=encoded.n,
        estimator=estimator,
        rounds=max(each.rounds for each in found),
        evaluations=sum(each.evaluations for each in found),
        pilot_evaluations=sum(each.pilot_evaluations for each in found),
    )


def estimate_pair(
    a: EvaluatedModel, b: EvaluatedModel, estimator: Estimator, ranks: Ranks | None = None, progress: bool = False
) -> tuple[Elbo, Elbo]:
    """The bounds of two models of the same samples from common random numbers: `first - second` has a small error.

    Both are evaluated at the same levels: two fitted proposals over the same range are averaged.
    """
    plans = [make_plan(model, estimator, ranks) for model in (a, b)]
    p, q = (plan.proposal for plan in plans)
    if isinstance(p, Fitted) and isinstance(q, Fitted) and (p.low, p.high) == (q.low, q.high):
        pairs, p_sum, q_sum = zip(p.weights, q.weights, strict=True), sum(p.weights), sum(q.weights)
        both = Fitted(p.low, p.high, tuple(v / p_sum + w / q_sum for v, w in pairs))
        plans = [replace(plan, proposal=both) for plan in plans]
    return estimate(a, estimator, ranks, plans[0], progress), estimate(b, estimator, ranks, plans[1], progress)
