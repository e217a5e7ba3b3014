"""The levels of the sampling steps: k + 1 levels from the prior's to the last.

    paper       uniform in t = F(level), the paper's schedule: alpha_i = F^-1(i / k) - F^-1((i - 1) / k)
    edm         sigma^(1/7) uniform, sigma = noise / signal (Karras et al., 2022)
    geometric   uniform in ln Lambda, the information: the coordinate in which the second-order solvers extrapolate
    fitted      where a predictive variance expects the least bound (`bsi.variance.Variance.grid`); may end early

For BSI and VDM `paper` is `geometric`; for BFN, whose information starts at 0, it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from bsi.errors import UsageError, unknown
from bsi.levels import Interpolation
from bsi.methods.base import Method, level_at, rho_at

Levels = Float[Tensor, " levels"]
Grid = Callable[[Method, int], Levels]

EDM_SIGMA = 80.0  # EDM's largest noise level: its grid starts here, and BFN's first step on `geometric` ends here
# Where `edm` starts if a method's information starts at 0 (BFN): predictions from less information are noise. With 16
# evaluations of `ode2`, FID is 116, 97, 82, 84 for grids that start at sigma = 80, 40, 20, 10.
FIRST_SIGMA = 20.0
ROUNDING = 1e-6  # relative distance of a grid's ends from the method's: the rounding of float32


def check_grid(method: Method, grid: Levels | Sequence[float], from_prior: bool = True) -> Levels:
    """A grid given by the user, in float64, if it rises within the method's range and starts at the prior's level.

    Sampling that does not start from the prior may start at any level.
    """
    levels, low, high = torch.as_tensor(grid, dtype=torch.float64), method.levels.low, method.levels.high
    if levels.ndim != 1 or len(levels) < 2:
        raise UsageError(f"a grid is a row of at least two levels, the prior's and the last: got {levels.tolist()}")
    least, most = levels.aminmax()
    if least < low * (1 - ROUNDING) or most > high * (1 + ROUNDING):
        raise UsageError(f"a grid stays in range, {low:g} to {high:g}: got {float(least):g} to {float(most):g}")
    if from_prior and abs(float(levels[0]) - low) <= ROUNDING * low:
        levels = torch.cat([levels.new_tensor([low]), levels[1:]])
    levels = levels.clamp(low, high)
    if not bool((rises := torch.diff(levels) > 0).all()):
        before, after = levels[(i := int((~rises).nonzero()[0])) : i + 2].tolist()
        raise UsageError(f"a grid's levels must rise strictly: level {i + 1} is {after:g}, after {before:g}")
    if from_prior and float(levels[0]) != low:
        raise UsageError(f"a grid starts at the prior's level, {low:g}: got {float(levels[0]):g}")
    return levels


def paper_grid(method: Method, k: int) -> Levels:
    """Section "Hyperparameters": uniform steps through the inverse CDF of the log-uniform proposal."""
    ends = _ends(method, k)
    return _joined(ends, method.levels.icdf(torch.linspace(0, 1, k + 1, dtype=torch.float64)[1:]))


def _ends(method: Method, k: int) -> Float[Tensor, "2"]:
    if k < 1:
        raise UsageError(f"sampling needs at least one step: got k={k}")
    return torch.tensor([method.levels.low, method.levels.high], dtype=torch.float64)


def _joined(ends: Float[Tensor, "2"], levels: Float[Tensor, " steps"]) -> Levels:
    """A grid from the levels that its steps reach; the ends are the method's own, free of rounding."""
    return torch.cat([ends[:1], levels[:-1], ends[1:]])


def edm_grid(method: Method, k: int, power: float = 7.0) -> Levels:
    """sigma^(1 / power) uniform from the noisiest sigma (80 at most; 20 if the information starts at 0) to the last."""
    ends = _ends(method, k)
    first, last = rho_at(method, ends).tolist()
    noisiest = min(EDM_SIGMA, 1 / first) if first > 0 else (FIRST_SIGMA if method.c == 0 else EDM_SIGMA)
    roots = torch.linspace(noisiest ** (1 / power), (1 / last) ** (1 / power), k + 1, dtype=torch.float64)
    return _joined(ends, level_at(method, roots[1:] ** -power))


def geometric_grid(method: Method, k: int, start: float | None = None) -> Levels:
    """ln Lambda uniform, from the prior's level or from `start`.

    Where Lambda starts at 0 (BFN), the first step is to sigma = 80 if there is more than one.
    """
    ends = _ends(method, k)
    if start is not None:
        if not ends[0] < start < ends[1]:
            raise UsageError(f"sampling can start from levels between {ends[0]:g} and {ends[1]:g}, got {start:g}")
        ends[0] = start
    low, high = (method.gain(ends) + method.c).tolist()
    first, count = (math.log(low), k + 1) if low > 0 else (-2 * math.log(EDM_SIGMA), k)
    informations = torch.logspace(first, math.log(high), count, base=math.e, dtype=torch.float64)[-k:]
    return _joined(ends, method.level(informations - method.c))


def cheapest_grid(
    levels: Levels, cost: Float[Tensor, "levels levels"], ending: Levels, k: int
) -> Float[Tensor, " {k}+1"]:
    """The k steps over some of these levels with the least sum of costs, by dynamic programming.

    Args:
        cost: `cost[i, j]` is that of a step from level i to level j; infinite for j <= i.
        ending: The cost of ending at each level.
    """
    coarse, best, before = min(k, (len(levels) - 1) // 4), torch.full_like(levels, math.inf), []
    best[0] = 0.0
    for _ in range(coarse):
        best, start = (best[:, None] + cost).min(0)
        before.append(start)
    path = [int((best + ending).argmin())]
    for start in reversed(before):
        path.append(int(start[path[-1]]))
    chosen = levels[path[::-1]]
    if coarse == k:
        return chosen
    # Many steps would be limited by the distance of the levels: divide the largest possible number of steps instead.
    place = torch.linspace(0, coarse, k + 1, dtype=torch.float64)
    logs = Interpolation.of(torch.arange(coarse + 1, dtype=torch.float64), place).at(torch.log(chosen))
    return torch.cat([chosen[:1], torch.exp(logs)[1:-1], chosen[-1:]])


GRIDS: dict[str, Grid] = {"paper": paper_grid, "edm": edm_grid, "geometric": geometric_grid}


def named_grid(name: str) -> Grid:
    """The grid called `name`; an unknown one is an error that suggests the nearest."""
    if name not in GRIDS:
        raise unknown("grid", name, GRIDS)
    return GRIDS[name]
