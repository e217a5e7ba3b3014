"""What the page asks of a model, as trajectories: from nothing, from a noisy measurement, or from a part of an image.

Denoising goes on from the measurement and is exact (`conditioning.py` says why, and why only with the noise of real
measurements). Inpainting predicts hidden pixels by what known ones say about them, as far as the network's Jacobian can
be trusted with it, and known pixels as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from bsi.conditioning import denoising, inpainted
from bsi.grids import named_grid
from bsi.methods.base import Method, Predictor
from bsi.rng import Noise
from bsi.sampling import Step, trajectory

__all__ = ["Finisher"]

PASSES = 2  # backward passes for each prediction of hidden pixels: on digits as good as five, and someone is waiting


@dataclass(frozen=True)
class Finisher:
    """How to sample, whatever it starts from."""

    method: Method
    predict: Predictor
    noise: Noise
    k: int
    solver: str
    grid: str

    def draw(self) -> Iterator[Step]:
        """From the prior."""
        return trajectory(self.method, self.predict, self.noise, self._levels(), self.solver)

    def denoise(self, y: Float[Tensor, "batch *data"], precision: float) -> Iterator[Step]:
        """From y ~ N(x, 1 / precision), to draws from p(x | y)."""
        return denoising(self.method, self.predict, self.noise, y, precision, self.k, self.solver)

    def inpaint(self, x: Float[Tensor, "batch *data"], hidden: Bool[Tensor, "batch *data"]) -> Iterator[Step]:
        """From the part of x that is not hidden."""
        informed = inpainted(self.method, self.predict, x, (~hidden).to(x.dtype), iterations=PASSES)
        return trajectory(self.method, informed, self.noise, self._levels(), self.solver)

    def _levels(self) -> Float[Tensor, " levels"]:
        return named_grid(self.grid)(self.method, self.k)
