"""Where the bound is evaluated: its integral over the level, and levels stratified within each sample and over the set.

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
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from bsi.control_variate import Interpolation
from bsi.grids import paper_grid
from bsi.levels import Proposal
from bsi.methods.base import Method
from bsi.rng import standard_normal, uniform

BLOCKS = 32  # their variances are averaged: the relative error of the standard error is about 1 / sqrt(2 * 32)
FREEDOM = 24  # target for the degrees of freedom: small sets have fewer blocks, and more replicates instead
KINDS = {"measure": 1, "recon": 2, "pilot": 3, "step": 4}  # streams of noise, which never share a draw
DRAWS = 1 << 28  # number of draws per stream


PerSample = Float64[Tensor, " batch"]
Ids = Int[Tensor, " batch"]


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

    Given t ~ U(0, 1), `at(t)` has E_t [weight f(u)] equal to the integral of f. The steps of L_M^k, on the paper's
    grid, are drawn with probabilities proportional to omega_i p(u_i): for a log-uniform proposal i ~ U(0, k - 1).
    """

    proposal: Proposal
    steps: tuple[Float64[Tensor, " steps"], Float64[Tensor, " steps"]] | None = None  # levels and omega

    @classmethod
    def of(cls, method: Method, proposal: Proposal, k: int | None) -> Integral:
        if k is None:
            return cls(proposal)
        grid = paper_grid(method, k)
        return cls(proposal, (grid[:-1], torch.diff(method.gain(grid)) / grid[:-1]))

    def at(self, t: Float[Tensor, " batch"]) -> Points:
        if self.steps is None:
            level = self.proposal.icdf(t)
            return Points(level, 1 / (level * self.proposal.density(level)))
        levels, omega = self.steps
        probability = omega * levels * self.proposal.density(levels)
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


def noise(
    seed: int, ids: Ids, kind: str, draw: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Float[Tensor, "batch *data"]:
    """Standard normal noise for one evaluation of these samples."""
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
