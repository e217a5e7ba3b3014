"""Where the bound is evaluated: levels stratified within each sample and over the set, in independent replicates.

L_M of a sample is an integral over t in [0, 1], the level's place under the proposal. The integrand is smooth and small
at both ends, hence all but periodic, and for such a one m equally spaced points with one common random shift,

    t_j = (j + v) / m,        j = 0 .. m - 1,        v ~ U(0, 1),

are far better than m independent points, and better than one point at random in each of m strata: there errors fall as
m^-3/2, here as fast as the integrand's Fourier coefficients. Each t_j is uniform: the estimate is unbiased.

Over the set, samples are cut into blocks, and the shifts within a block of B samples are spread evenly too,

    v_i = (i / B + delta) mod 1,        one delta ~ U(0, 1) for the block.

Each v_i is still uniform, so every sample keeps its unbiased estimate; together the block sees B m equally spaced
levels, and what is common to its samples' integrands is integrated almost exactly.

What this costs is the usual error formula: errors within a sample, and between the samples of a block, are dependent
(they are meant to cancel), and a formula for independent draws would be wrong, mostly far too large, and for a single
shift not defined at all. So the m levels of a sample are dealt to R >= 2 replicates with independent shifts and
independent noise. The replicates of a block's sum are independent, have one mean, and their spread is an honest
estimate of the variance of their average, whatever the dependence inside. Blocks are independent of each other: their
variances add, and with them the degrees of freedom, one for each block and replicate but the first. With 32 blocks, two
replicates are enough for a Student interval that is hardly wider than a Normal one.

Blocks are evaluated in stages, so that a control variate can learn from the blocks before (control.py). Given those, a
block's replicates are independent and unbiased as ever: its error has mean 0 and its variance is estimated without
bias, whatever came before. So errors of different blocks, or rounds, are uncorrelated, and variances still add.

Replicates may differ in size (5 levels are 3 + 2). They are averaged by size, A = sum_r m_r A_r / M, and

    Var A  ~  sum_r m_r (A_r - A)^2 / ((R - 1) M)

is unbiased if the variance of a replicate falls as 1 / m_r, as it does where noise dominates, and too large, never too
small, if it falls faster. All shifts and noise are functions of (seed, sample or block, replicate, round): not of the
batch size, nor of the number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from bsi.errors import UsageError
from bsi.rng import standard_normal, uniform

__all__ = ["BLOCKS", "Design", "Pilot", "Spread", "noise", "spread"]

BLOCKS = 32  # as many variances are averaged: the error is known to about 1 / sqrt(2 * 32) of itself
FREEDOM = 24  # degrees of freedom that a set too small for so many blocks gets by more replicates
GROWTH = 0.25  # a stage adds this much to what was learned from
ENOUGH = 8192  # evaluations: more would hardly be learned from

# What the noise is for: the kinds never share a draw.
KINDS = {"measure": 1, "recon": 2, "pilot": 3}
DRAWS = 1 << 28

GOLDEN = (math.sqrt(5) - 1) / 2


def noise(
    seed: int, ids: Int[Tensor, " batch"], kind: str, draw: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Float[Tensor, "batch *data"]:
    """Standard noise of these samples for one evaluation: a function of its arguments alone."""
    assert 0 <= draw < DRAWS
    return standard_normal(seed, ids, KINDS[kind] * DRAWS + draw, shape, dtype)


@dataclass(frozen=True)
class Design:
    """The levels of `count` samples: `measure` each in a round, dealt to independent replicates."""

    count: int
    measure: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1 or self.measure < 1:
            raise UsageError(
                f"the bound needs samples and levels: got {self.count} samples, measure={self.measure}. "
                f"The paper takes 5 levels for each sample."
            )

    @property
    def blocks(self) -> int:
        return min(BLOCKS, max(1, self.count // 4))

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many levels each replicate has: two replicates, more where blocks are few; at least two levels each
        where there are enough, so that each is itself stratified.
        """
        wanted = max(2, 1 + math.ceil(FREEDOM / self.blocks))
        replicates = min(wanted, max(2, self.measure // 2), self.measure)
        return tuple(self.measure // replicates + (r < self.measure % replicates) for r in range(replicates))

    def block(self, ids: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """The block of each sample: every so many-th, so that each block is like the set, in whatever order it lies."""
        return ids % self.blocks

    def stages(self, learned: int) -> list[Int[Tensor, " _"]]:
        """All samples, in parts of whole blocks for who has learned from so many evaluations and learns from each part
        for the next: each adds a quarter, or a block, until that is enough, and the last is what remains.
        """
        block = self.block(torch.arange(self.count))
        first, parts = 0, []
        while first < self.blocks:
            more = max(1, int(GROWTH * learned * self.blocks / (self.count * self.measure)))
            end = first + more if learned < ENOUGH else self.blocks
            parts.append(torch.nonzero((first <= block) & (block < end))[:, 0])
            learned += len(parts[-1]) * self.measure
            first = end
        return parts

    def t(self, ids: Int[Tensor, " batch"], replicate: int, turn: int = 0) -> Float64[Tensor, "levels batch"]:
        """The places of these samples' levels in one replicate of a round."""
        block = self.block(ids)
        size = (self.count - 1 - block) // self.blocks + 1
        shift = ((ids // self.blocks).double() / size + uniform(self.seed, block, replicate, turn)) % 1
        m = self.sizes[replicate]
        return (torch.arange(m, device=ids.device)[:, None] + shift) / m


@dataclass(frozen=True)
class Pilot:
    """Pairs of evaluations spread evenly over samples and levels, to learn from: they never enter the estimate.

    The two of a pair share sample and level, and differ in noise.
    """

    count: int
    pairs: int
    seed: int = 0

    @property
    def draws(self) -> int:
        """Levels of each sample that takes part."""
        return -(-self.pairs // self.count)

    @property
    def samples(self) -> int:
        """How many samples take part."""
        return min(self.count, self.pairs)

    @property
    def evaluations(self) -> int:
        return 2 * self.samples * self.draws

    def ids(self, members: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """The samples behind members 0 .. samples - 1 of the pilot."""
        return members * self.count // self.samples

    def t(self, members: Int[Tensor, " batch"], draw: int) -> Float64[Tensor, " batch"]:
        """Multiples of the golden ratio with one shift: any stretch of them covers [0, 1] evenly, and all members and
        draws together are one.
        """
        shift = uniform(self.seed, torch.zeros_like(members), 1 << 16, 0)
        return ((members * self.draws + draw).double() * GOLDEN + shift) % 1


@dataclass(frozen=True)
class Spread:
    """The average of replicates, and the variance of that average: of each sample, and of the sum over each block."""

    mean: Float64[Tensor, " samples"]
    sample_variance: Float64[Tensor, " samples"]
    block_variance: Float64[Tensor, " blocks"]
    freedom: int  # degrees of freedom of each block's variance

    @property
    def sum_variance(self) -> float:
        return float(self.block_variance.sum())

    @staticmethod
    def degrees_of_freedom(*parts: Spread) -> float:
        """Of the sum of independent variances (Welch and Satterthwaite; unbiased for few degrees each)."""
        total = sum(part.sum_variance for part in parts)
        squares = sum(float(part.block_variance.square().sum()) / (part.freedom + 2) for part in parts)
        if math.isnan(total):
            return math.nan
        return max(1.0, total**2 / squares - 2) if squares > 0 else math.inf


def spread(
    values: Float64[Tensor, "replicates samples"],
    sizes: Int[Tensor, " replicates"],
    block: Int[Tensor, " samples"],
) -> Spread:
    """What independent replicates of each sample's estimate say about their average; NaN when there is only one."""
    weight = (sizes / sizes.sum()).double()[:, None]
    mean = (weight * values).sum(0)
    freedom = len(values) - 1
    sums = values.new_zeros(len(values), int(block.max()) + 1).index_add(1, block, values)
    return Spread(
        mean=mean,
        sample_variance=_variance(values, weight, freedom),
        block_variance=_variance(sums, weight, freedom),
        freedom=freedom,
    )


def _variance(
    values: Float64[Tensor, "replicates n"], weight: Float64[Tensor, "replicates 1"], freedom: int
) -> Float64[Tensor, " n"]:
    if freedom < 1:
        return torch.full_like(values[0], math.nan)
    return (weight * (values - (weight * values).sum(0)).square()).sum(0) / freedom
