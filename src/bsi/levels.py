"""Distributions over the noise levels at which a loss or a bound is evaluated.

The measurement loss is an integral over the level, estimated by importance sampling from a proposal p (Corollary
"Importance Sampling"):

    L_M = 1/2 E_{level ~ p} [ |x - x_hat|^2 / p(level) ]

whose variance is least when p follows h(level) = E |x - x_hat|^2. With f(mu, lambda) = mu and unit-variance data,
h ~ lambda_0^2 / lambda^2 + 1 / lambda (Equation "expected-h"), which is log-uniform except at the smallest levels.

A proposal maps t in [0, 1] to a level by its inverse CDF; levels are float64 for any dtype of t.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bsi.errors import UsageError
from bsi.gaussian import over

Shaped = Float[Tensor, "*shape"]
Points = Float[Tensor, " points"]


@runtime_checkable
class Proposal(Protocol):
    """A distribution over levels between `low` and `high`, with a density that is positive there."""

    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    def icdf(self, t: Shaped) -> Shaped: ...
    def density(self, level: Shaped) -> Shaped: ...


@dataclass(frozen=True)
class Interpolation:
    """Linear interpolation between knots: the knot to the left of each point, and how far it lies towards the next."""

    left: Int[Tensor, " points"]
    fraction: Points

    @classmethod
    def of(cls, knots: Float[Tensor, " knots"], place: Points) -> Interpolation:
        left = (torch.searchsorted(knots, place.contiguous(), right=True) - 1).clamp(0, len(knots) - 2)
        return cls(left, ((place - knots[left]) / (knots[left + 1] - knots[left])).clamp(0, 1))

    def at(self, value: Float[Tensor, "knots *data"]) -> Float[Tensor, "points *data"]:
        """Values at the knots, interpolated."""
        fraction = over(self.fraction, value)
        return value[self.left] * (1 - fraction) + value[self.left + 1] * fraction

    def scatter(self, value: Float[Tensor, "points *data"], count: int) -> Float[Tensor, "{count} *data"]:
        """The adjoint of `at`: each value is distributed to its two knots and summed there."""
        fraction, sums = over(self.fraction, value), value.new_zeros(count, *value.shape[1:])
        return sums.index_add(0, self.left, value * (1 - fraction)).index_add(0, self.left + 1, value * fraction)


def low_discrepancy(count: int, delta: Float[Tensor, ""] | float) -> Float[Tensor, " {count}"]:
    """t_i = (i / b + delta) mod 1 for the b samples of a global batch and one shared delta ~ U(0, 1).

    Each t_i is uniform; together they cover [0, 1] evenly, so that the loss varies less from batch to batch.
    """
    if count < 1:
        raise UsageError(f"a batch has at least one sample: got {count}")
    delta = torch.as_tensor(delta, dtype=torch.float64)
    return (torch.arange(count, dtype=torch.float64, device=delta.device) / count + delta) % 1


@dataclass(frozen=True)
class _Range:
    """The levels from `low` to `high`."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < math.inf:
            raise UsageError(f"a proposal needs levels 0 < low < high < inf: got low={self.low}, high={self.high}")

    @property
    def log_range(self) -> float:
        return math.log(self.high) - math.log(self.low)


@dataclass(frozen=True)
class LogUniform(_Range):
    """p(level) = 1 / (level (ln high - ln low)): the paper's proposal, precision encoding and sampling schedule."""

    def icdf(self, t: Shaped) -> Shaped:
        level = self.low * torch.exp(t.double() * self.log_range)
        return level.clamp(self.low, self.high)  # t = 1 must give exactly `high`, without rounding error

    def cdf(self, level: Shaped) -> Shaped:
        """The precision encoding t = F(level): 0 at the noisy end, 1 at the data."""
        return torch.log(level.double() / self.low) / self.log_range

    def density(self, level: Shaped) -> Shaped:
        return 1 / (level.double() * self.log_range)


@dataclass(frozen=True)
class Uniform(_Range):
    """p(level) = 1 / (high - low): the proposal of Theorem "infinite ELBO", without variance reduction."""

    def icdf(self, t: Shaped) -> Shaped:
        return self.low + t.double() * (self.high - self.low)

    def density(self, level: Shaped) -> Shaped:
        return torch.full_like(level.double(), 1 / (self.high - self.low))


@dataclass(frozen=True)
class ExpectedError(_Range):
    """p(level) ~ offset / level^2 + 1 / level: Equation "expected-h", with offset = lambda_0^2 for BSI.

    The CDF in u = ln(level / low) is, up to its normalizer, G(u) = u + (offset / low) (1 - e^-u): increasing and
    concave, so that Newton's method converges from the left, and quadratically.
    """

    offset: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.offset < 0:
            raise UsageError(f"the expected-error proposal needs offset >= 0 (lambda_0^2 for BSI): got {self.offset}")

    @property
    def _mass(self) -> float:
        return self.log_range - self.offset / self.low * math.expm1(-self.log_range)

    def cdf(self, level: Shaped) -> Shaped:
        u = torch.log(level.double() / self.low)
        return (u - self.offset / self.low * torch.expm1(-u)) / self._mass

    def icdf(self, t: Shaped) -> Shaped:
        bend = self.offset / self.low
        target = t.double() * self._mass
        u = torch.clamp(target - bend, min=0.0)  # G(u) <= u + bend: at or left of the root
        for _ in range(12 + math.ceil(2 * math.log1p(bend))):
            u = u + (target - u + bend * torch.expm1(-u)) / (1 + bend * torch.exp(-u))
        return (self.low * torch.exp(u)).clamp(self.low, self.high)

    def density(self, level: Shaped) -> Shaped:
        level = level.double()
        return (self.offset / level + 1) / (level * self._mass)


@dataclass(frozen=True)
class Fitted(_Range):
    """A density in ln(level) that is linear between `weights` at equally spaced points from low to high.

    The proposal of least variance is p* ~ sqrt(E |x - x_hat|^4). Fitted on earlier batches only, it leaves the estimate
    unbiased. A single weight is the log-uniform proposal.
    """

    weights: tuple[float, ...]
    # The weights, scaled to a total mass of 1 for cells of unit length, and the mass below each point. Summed once, on
    # the host: a GPU's cumulative sum is not deterministic, as the audit mode requires.
    _heights: Points = field(init=False, repr=False, compare=False)
    _below: Points = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.weights or not all(0 < w < math.inf for w in self.weights):  # density 0: the estimate is biased
            raise UsageError(f"a fitted proposal needs positive finite weights: got {self.weights}")
        heights = torch.tensor(self.weights * 2 if len(self.weights) == 1 else self.weights, dtype=torch.float64)
        below = torch.nn.functional.pad(torch.cumsum(0.5 * (heights[1:] + heights[:-1]), 0), (1, 0))
        self._hold(heights / below[-1], below / below[-1])

    def _hold(self, heights: Points, below: Points) -> None:
        object.__setattr__(self, "_heights", heights)
        object.__setattr__(self, "_below", below)

    def to(self, device: torch.device) -> Fitted:
        """A copy with its table on a device: a CUDA graph cannot copy it from the host."""
        moved = copy.copy(self)
        moved._hold(self._heights.to(device), self._below.to(device))
        return moved

    def icdf(self, t: Shaped) -> Shaped:
        heights, below = self._heights.to(t.device), self._below.to(t.device)
        count = len(heights) - 1
        j = torch.searchsorted(below, t.double().contiguous(), right=True).clamp(1, count) - 1
        left, slope, mass = heights[j], heights[j + 1] - heights[j], t.double() - below[j]
        # The root of left x + slope x^2 / 2 = mass in the form that does not cancel for a small slope.
        inside = 2 * mass / (left + torch.sqrt((left.square() + 2 * slope * mass).clamp(min=0)))
        return (self.low * torch.exp((j + inside) / count * self.log_range)).clamp(self.low, self.high)

    def density(self, level: Shaped) -> Shaped:
        heights = self._heights.to(level.device)
        count = len(heights) - 1
        place = torch.log(level.double() / self.low) / self.log_range * count
        j = place.floor().long().clamp(0, count - 1)
        height = heights[j] + (place - j) * (heights[j + 1] - heights[j])
        return height * count / (self.log_range * level.double())
