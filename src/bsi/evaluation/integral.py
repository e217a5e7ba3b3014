"""The two integrals over the level that the bound asks for, as one: a mass over u = ln(level), and draws from it.

With g(u) = 1/2 level |x - x_hat|^2, one draw at a level,

    L_M^inf = int E g(u) du                         between the method's first and last level,
    L_M^k   = sum_i omega_i E g(u_i),               omega_i = alpha_{i+1} / level_i,   i = 0 .. k - 1,

(Theorems "infinite ELBO" and "ELBO"). Given t ~ U(0, 1), each gives a level and a weight with E_t [weight f(u)] equal
to the integral of f, from any proposal p: for the first weight = 1 / p(u), for the second a step i with probability
proportional to omega_i p(u_i). For a log-uniform proposal that is the paper's i ~ U(0, k - 1), on the paper's grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from bsi.grids import paper_grid
from bsi.levels import Proposal
from bsi.methods.base import Method

__all__ = ["Between", "Finite", "Infinite", "Integral", "Points", "integral"]


@dataclass(frozen=True)
class Points:
    """Levels to evaluate at, and what each evaluation counts."""

    level: Float64[Tensor, " batch"]
    weight: Float64[Tensor, " batch"]


@runtime_checkable
class Integral(Protocol):
    def at(self, t: Float[Tensor, " batch"]) -> Points:
        """A level for each t ~ U(0, 1), and its weight."""
        ...

    def hats(self, knots: Float64[Tensor, " knots"]) -> Float64[Tensor, " knots"]:
        """The integrals of the functions that are 1 at one knot, 0 at the others, and linear in ln(level) between."""
        ...


def integral(method: Method, proposal: Proposal, k: int | None) -> Integral:
    """L_M^inf, or L_M^k on the paper's grid of k steps."""
    return Infinite(proposal) if k is None else Finite.of(method, proposal, k)


@dataclass(frozen=True)
class Between:
    """The knot to the left of each u, and how far u lies along to the next: hat functions are linear in between."""

    left: Int[Tensor, " batch"]
    along: Float64[Tensor, " batch"]

    @classmethod
    def of(cls, knots: Float64[Tensor, " knots"], u: Float64[Tensor, " batch"]) -> Between:
        left = (torch.searchsorted(knots, u.contiguous(), right=True) - 1).clamp(0, len(knots) - 2)
        return cls(left, ((u - knots[left]) / (knots[left + 1] - knots[left])).clamp(0, 1))

    def at(self, value: Float64[Tensor, " knots"]) -> Float64[Tensor, " batch"]:
        """Values at the knots, interpolated."""
        return value[self.left] * (1 - self.along) + value[self.left + 1] * self.along

    def total(self, value: Float64[Tensor, " batch"], knots: int) -> Float64[Tensor, " knots"]:
        """The sum of the values at each knot, dealt to the two neighbors by their hat functions."""
        sums = value.new_zeros(knots).index_add(0, self.left, value * (1 - self.along))
        return sums.index_add(0, self.left + 1, value * self.along)


@dataclass(frozen=True)
class Infinite:
    """int g du."""

    proposal: Proposal

    def at(self, t: Float[Tensor, " batch"]) -> Points:
        level = self.proposal.icdf(t)
        return Points(level, 1 / (level * self.proposal.density(level)))

    def hats(self, knots: Float64[Tensor, " knots"]) -> Float64[Tensor, " knots"]:
        half = 0.5 * torch.diff(knots)
        return torch.cat([half, half.new_zeros(1)]) + torch.cat([half.new_zeros(1), half])


@dataclass(frozen=True)
class Finite:
    """sum_i omega_i g(u_i), the steps drawn with `probability`."""

    levels: Float64[Tensor, " steps"]
    omega: Float64[Tensor, " steps"]
    probability: Float64[Tensor, " steps"]

    @classmethod
    def of(cls, method: Method, proposal: Proposal, k: int) -> Finite:
        grid = paper_grid(method, k)
        levels, alpha = grid[:-1], torch.diff(method.gain(grid))
        omega = alpha / levels
        probability = omega * levels * proposal.density(levels)
        return cls(levels, omega, probability / probability.sum())

    def at(self, t: Float[Tensor, " batch"]) -> Points:
        levels, omega, probability = (v.to(t.device) for v in (self.levels, self.omega, self.probability))
        i = torch.searchsorted(torch.cumsum(probability, 0), t.double().contiguous(), right=True)
        i = i.clamp(max=len(levels) - 1)
        return Points(levels[i], omega[i] / probability[i])

    def hats(self, knots: Float64[Tensor, " knots"]) -> Float64[Tensor, " knots"]:
        between = Between.of(knots, torch.log(self.levels.to(knots.device)))
        return between.total(self.omega.to(knots.device), len(knots))
