"""What the page asks of a model: images from nothing, from a noisy measurement of one, or from a part of one.

Denoising is exact. A measurement y ~ N(x, 1 / a) says as much about x as the latent at the level whose

    gain alpha = (a + sqrt(a^2 + 4 c a)) / 2,        psi = signal y,

so the trajectory simply starts there. Inpainting replaces the prediction by what is known wherever it is known: the
latent of a known pixel then follows the encoder of its value, and the unknown pixels are predicted beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bsi.errors import UsageError
from bsi.gaussian import over
from bsi.grids import named_grid
from bsi.methods.base import Method, Predictor
from bsi.noise import Noise
from bsi.sampling import Step, trajectory

__all__ = ["denoise", "draw", "grid_from", "inpaint"]

FINE = 2048  # levels that a grid is read off at, to start it anywhere


def draw(method: Method, predict: Predictor, noise: Noise, k: int, solver: str, grid: str) -> Iterator[Step]:
    """From the prior to a sample in k steps."""
    return trajectory(method, predict, noise, named_grid(grid)(method, k), solver)


def denoise(
    method: Method,
    predict: Predictor,
    noise: Noise,
    k: int,
    solver: str,
    grid: str,
    y: Float[Tensor, "batch *data"],
    precision: float,
) -> Iterator[Step]:
    """From a measurement y of precision a to samples of p(x | y) in k steps."""
    level = method.level(torch.tensor(matching_gain(method, precision), dtype=torch.float64))
    levels = grid_from(method, float(level), k, grid)
    start = over(method.encoder(level).signal, y) * y
    return trajectory(method, predict, noise, levels, solver, start)


def matching_gain(method: Method, precision: float) -> float:
    """The gain at which a latent says as much about x as a measurement of this precision."""
    gain = 0.5 * (precision + math.sqrt(precision * (precision + 4 * method.c)))
    low, high = (float(method.gain(torch.tensor(end))) for end in (method.levels.low, method.levels.high))
    if not low < gain < high:
        raise UsageError(
            f"a measurement must say more than the prior and less than the last level: got precision {precision:g}, "
            f"which is a gain of {gain:g}, outside {low:g} to {high:g}"
        )
    return gain


def grid_from(method: Method, level: float, k: int, name: str) -> Float[Tensor, " levels"]:
    """k steps from `level` to the last, spaced as the named grid spaces its own: its later part, stretched."""
    if k < 1:
        raise UsageError(f"sampling needs at least one step: got k={k}")
    fine = named_grid(name)(method, FINE)[1:]  # without the prior's level, where BFN's information is 0
    place = torch.log(method.gain(fine) + method.c)
    start = torch.log(method.gain(torch.tensor([level], dtype=torch.float64)) + method.c)
    position = torch.linspace(_place(start, place), len(fine) - 1, k + 1, dtype=torch.float64)
    below = position.floor().long().clamp(max=len(fine) - 2)
    part = position - below
    levels = method.level(torch.exp((1 - part) * place[below] + part * place[below + 1]) - method.c)
    levels[0], levels[-1] = level, method.levels.high  # free of rounding
    return levels


def _place(value: Float[Tensor, "1"], rising: Float[Tensor, " fine"]) -> float:
    """Where a value would stand among rising ones, as a fractional index; the first interval reaches further down."""
    above = int(torch.searchsorted(rising, value)[0].clamp(1, len(rising) - 1))
    low, high = rising[above - 1], rising[above]
    return max(0.0, above - 1 + float((value[0] - low) / (high - low)))


def inpaint(
    method: Method,
    predict: Predictor,
    noise: Noise,
    k: int,
    solver: str,
    grid: str,
    x: Float[Tensor, "batch *data"],
    hidden: Bool[Tensor, "batch *data"],
) -> Iterator[Step]:
    """From the part of x that is not hidden to whole samples in k steps."""

    def informed(latent: Tensor, level: Tensor) -> Tensor:
        return torch.where(hidden, predict(latent, level), x)

    return trajectory(method, informed, noise, named_grid(grid)(method, k), solver)
