"""What a step takes from the step's number, on the device: the same operations then serve every step.

A number that the host writes into a step's operations would be one more thing that a recorded step (replay.py) repeats
for ever. So the host turns these, and the operations read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from bsi.recipe import Recipe
from bsi.runtime.averages import Profile

__all__ = ["Dials"]


@dataclass(frozen=True)
class Dials:
    """The step's number, its learning rate, and how much of the new weights each average takes in."""

    step: Int64[Tensor, ""]
    lr: Float[Tensor, ""]
    ema: Float[Tensor, ""]
    powers: tuple[Float[Tensor, ""], ...]
    """One for each power-function average, in the recipe's order."""

    @classmethod
    def new(cls, recipe: Recipe, device: torch.device) -> Dials:
        lr, ema, *powers = torch.zeros(2 + len(recipe.ema.powers), device=device).unbind()
        return cls(torch.zeros((), dtype=torch.int64, device=device), lr, ema, tuple(powers))

    def turn(self, recipe: Recipe, step: int) -> None:
        """To the step after `step` updates. Waits for nothing."""
        self.step.fill_(step)
        self.lr.fill_(recipe.rate(step))
        self.ema.fill_(recipe.ema.weight(step + 1))
        for dial, width in zip(self.powers, recipe.ema.powers, strict=True):
            dial.fill_(1 - Profile(step + 1, width).beta)
