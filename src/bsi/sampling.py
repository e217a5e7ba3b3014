"""Drawing samples, Algorithms "Sampling with posterior inference" and "Sampling with BSI", for any method and solver.

There is one loop, `trajectory`, which yields every step; `sample` returns the result of the last one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bsi.brownian import BrownianPath, check_resolved
from bsi.consistency import consistency, consistency_grid
from bsi.errors import UsageError
from bsi.gaussian import Belief, Data, over
from bsi.grids import check_grid, named_grid, paper_grid
from bsi.methods.base import Method, Predictor
from bsi.rng import Noise, SeededNoise, derive
from bsi.sampler import CONSISTENCY, FITTED, MIXTURE, Sampler
from bsi.solvers import Path, Solver, Table, named_solver, posterior
from bsi.symbols import SymbolPredictor, drawn
from bsi.variance import Variance, widened

Levels = Float[Tensor, " levels"]


@dataclass(frozen=True)
class Step:
    """A latent, its level, and the prediction from it. The last step's x_hat is the sample."""

    latent: Data
    level: Float[Tensor, ""]
    x_hat: Data


def advance(latent: Data, x_hat: Data, previous: Data, eps: Data, row: Float[Tensor, "4"]) -> Data:
    """One step of any solver: its row of the table applied to the latent, predictions and noise."""
    return row[0] * latent + row[1] * x_hat + row[2] * previous + row[3] * eps


def trajectory(
    method: Method,
    predict: Predictor,
    noise: Noise,
    grid: Levels | Sequence[float],
    solver: Solver | str = "posterior",
    start: Data | None = None,
    differentiable: bool = False,
    variance: Variance | None = None,
) -> Iterator[Step]:
    """Every step from the prior to the decoded sample: k + 1 of them for the k steps of the grid.

    Args:
        noise: `noise(start, end)` draws standard noise for the information gained from `start` to `end`: first the
            prior's, then that of each step whose solver adds noise.
        grid: levels, as a tensor or a list of numbers.
        start: a latent to start from; the grid then begins at its level instead of the prior's.
        differentiable: keep the graph of all evaluations, for gradients through the samples.
        variance: the predictive variance that is added to each step, for the solver `posterior`.

    Raises:
        UsageError: before the first evaluation, if the grid or the solver does not suit the method.
    """
    solve = named_solver(solver) if isinstance(solver, str) else solver
    if variance is not None and solve is not posterior:
        raise UsageError("a variance belongs to the steps of the solver posterior. Use it, or leave variance out.")
    levels = check_grid(method, grid, from_prior=start is None).cpu()
    rows = _rows(method, levels, solve(method, levels))
    return _steps(method, predict, noise, levels, rows, start, differentiable, variance)


def _steps(
    method: Method,
    predict: Predictor,
    noise: Noise,
    grid: Levels,
    rows: Float[Tensor, "steps 4"],
    start: Data | None,
    differentiable: bool,
    variance: Variance | None,
) -> Iterator[Step]:
    # The context is left before each yield, so that it does not change the gradient mode of the caller.
    gradients = nullcontext if differentiable else torch.no_grad
    informations = Path.of(method, grid).information.tolist()
    latent = method.prior(noise(0.0, informations[0])) if start is None else start
    noisy_rows, levels = (rows[:, 3] != 0).tolist(), grid.to(latent.device)
    rows = rows.to(latent.device, latent.dtype)
    previous = nothing = torch.zeros_like(latent)
    for i, noisy in enumerate(noisy_rows):
        with gradients():
            x_hat = predict(latent, levels[i].expand(len(latent)))
        yield Step(latent, levels[i], x_hat)
        with gradients():
            eps = noise(informations[i], informations[i + 1]) if noisy else nothing
            if variance is not None:
                eps = widened(variance, eps, latent, x_hat, levels[i], informations[i + 1] - informations[i])
            latent, previous = advance(latent, x_hat, previous, eps, rows[i]), x_hat
    with gradients():
        x = method.decode(latent, levels[-1].expand(len(latent)), predict)
    yield Step(latent, levels[-1], x)


def _rows(method: Method, grid: Levels, table: Table) -> Float[Tensor, "steps 4"]:
    """The rows of a table. Raises if one is missing or not finite: some solvers do not support some methods."""
    columns = (table.latent, table.x_hat, table.previous, table.eps)
    lengths = sorted({len(column) for column in columns})
    if lengths != [len(grid) - 1]:
        raise UsageError(f"a solver's table has a row for each of the {len(grid) - 1} steps: got {lengths} rows")
    rows = torch.stack(columns, dim=1)
    if wrong := (~torch.isfinite(rows)).any(1).nonzero()[:, 0].tolist():
        start, end = grid[wrong[0] : wrong[0] + 2].tolist()
        step = f"a step of {type(method).__name__} from level {start:g} to {end:g}"
        raise UsageError(f"this solver cannot take {step}: its coefficients are {rows[wrong[0]].tolist()}")
    return rows


def sample(
    method: Method,
    predict: Predictor,
    noise: Noise,
    grid: Levels | Sequence[float],
    solver: Solver | str = "posterior",
    start: Data | None = None,
    differentiable: bool = False,
    variance: Variance | None = None,
) -> Data:
    """Draw one sample for each row of noise, as values (not bins). The arguments are those of `trajectory`."""
    return end_of(trajectory(method, predict, noise, grid, solver, start, differentiable, variance))


def end_of(steps: Iterator[Step]) -> Data:
    """The x_hat of the last step of a trajectory, without keeping the other steps in memory."""
    (last,) = deque(steps, maxlen=1)
    return last.x_hat


def levels_of(method: Method, sampler: Sampler, variance: Variance | None = None) -> Levels:
    """The levels that a sampler visits; until its variance is fitted, the paper's in place of the grid `fitted`.

    Raises:
        UsageError: whatever drawing with this sampler would raise, before any evaluation of the network.
    """
    if sampler.solver == CONSISTENCY:
        levels = consistency_grid(method, sampler.steps, evaluations(method, 0) > 0)
    elif sampler.grid == FITTED:
        levels = paper_grid(method, sampler.steps) if variance is None else variance.grid(sampler.steps)
    else:
        levels = named_grid(sampler.grid)(method, sampler.steps)
    noisy = _solver(method, sampler)(method, levels).eps != 0
    if sampler.noise == "path":
        informations = Path.of(method, levels).information
        check_resolved(torch.stack([informations[:-1], informations[1:]], 1)[noisy].tolist())
    return levels


def drawing(
    method: Method,
    predict: Predictor,
    sampler: Sampler,
    ids: Int[Tensor, " batch"],
    shape: tuple[int, ...],
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    variance: Variance | None = None,
) -> Iterator[Step]:
    """The trajectories of the samples `ids` of a seed, on the device of `ids`. `predict` includes any guidance."""
    levels = levels_of(method, sampler, variance)
    noise = noise_of(sampler, seed, ids, shape, dtype)
    if sampler.solver == MIXTURE:
        if not isinstance(predict, SymbolPredictor):
            raise UsageError("the solver mixture draws symbols, and this data has none. Use posterior.")
        predict = drawn(predict, SeededNoise(derive(seed, "symbols"), ids, shape, dtype))
    return trajectory(method, predict, noise, levels, _solver(method, sampler), variance=variance)


def _solver(method: Method, sampler: Sampler) -> Solver:
    """The solver whose table the steps follow."""
    name = sampler.solver_for(method)
    return consistency if name == CONSISTENCY else posterior if name == MIXTURE else named_solver(name)


def noise_of(
    sampler: Sampler, seed: int, ids: Int[Tensor, " batch"], shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Noise:
    """The noise of the samples `ids` of a seed."""
    return (BrownianPath if sampler.noise == "path" else SeededNoise)(seed, ids, shape, dtype)


def evaluations(method: Method, k: int, guided: bool = False) -> int:
    """The number of network evaluations in k steps: k, plus one if the sample is a final prediction (BSI and BFN).

    Guidance doubles the number: each prediction is made with and without the condition.
    """
    calls = []

    def counting(latent: Tensor, level: Tensor) -> Tensor:
        calls.append(level)
        return latent

    method.decode(torch.zeros(1, 1), torch.tensor([method.levels.high], dtype=torch.float64), counting)
    return (k + len(calls)) * (2 if guided else 1)


def belief(method: Method, step: Step) -> Belief:
    """The belief about the sample at a step, N(s / level, 1 / level). Its mean is the latent for BSI and BFN."""
    scale = Path.of(method, step.level[None].cpu()).scale[0].to(step.latent.device)
    return Belief(over(scale / step.level, step.latent) * step.latent, step.level)


def measurement(method: Method, before: Step, after: Step) -> Data:
    """The measurement y of x_hat that leads from one belief to the next: the mean gain (s' - s) / dLambda."""
    path = Path.of(method, torch.stack([before.level, after.level]).cpu())
    gained = torch.diff(path.information)[0]
    scale = path.scale.to(before.latent.device)
    return over(scale[1] / gained, after.latent) * after.latent - over(scale[0] / gained, before.latent) * before.latent
