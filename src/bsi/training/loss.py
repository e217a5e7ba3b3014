"""What a step minimizes, as a recipe's objective has it, and at which levels it looks.

2 L_M^inf / n at levels log-uniform or expected, each level weighed as the ELBO does or otherwise; or 2 L_M^k / n at one
of the k measurements of the paper's grid. The mathematics is in bsi.objective.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from bsi.grids import paper_grid
from bsi.levels import Proposal
from bsi.methods.base import Method, Predictor
from bsi.objective import Weight, edm_weight, expected_levels, finite_training_loss, sigmoid_weight, training_loss
from bsi.recipe import Objective

__all__ = ["Loss"]

PerSample = Float[Tensor, " batch"]


@dataclass(frozen=True)
class Loss:
    """`grid` is that of L_M^k, None for infinitely many measurements."""

    method: Method
    weight: Weight | None
    levels: Proposal
    grid: Float[Tensor, " levels"] | None

    @classmethod
    def of(cls, objective: Objective, method: Method, device: torch.device) -> Loss:
        """Its tables on the device: a step brings nothing there."""
        weight = _weight(objective, method)
        levels: Proposal = expected_levels(method, weight).to(device) if objective.expected_levels else method.levels
        grid = None if objective.finite_k is None else paper_grid(method, objective.finite_k).to(device)
        return cls(method, weight, levels, grid)

    def __call__(
        self, predict: Predictor, x: Float[Tensor, "batch *data"], t: PerSample, eps: Float[Tensor, "batch *data"]
    ) -> PerSample:
        if self.grid is None:
            return training_loss(self.method, predict, x, t, eps, self.weight, self.levels)
        return finite_training_loss(self.method, predict, x, self.grid, _measurement(self.grid, t), eps)

    def level(self, t: PerSample) -> PerSample:
        """Where a step looks for each t of its batch."""
        return self.levels.icdf(t) if self.grid is None else self.grid[_measurement(self.grid, t)]

    @property
    def terms(self) -> int:
        """How many numbers are told of a batch."""
        return 1 if self.weight is None else 2

    def told(self, losses: PerSample, t: PerSample) -> Float[Tensor, " terms"]:
        """The sum of a batch's losses; and of the losses before they are weighed, if they are."""
        losses = losses.detach()
        if self.weight is None:
            return losses.sum().reshape(1)
        weight = self.weight(self.level(t)).clamp(min=1e-300)  # EDM's vanishes at level 0
        return torch.stack([losses.sum(), (losses / weight).sum().to(losses.dtype)])


def _measurement(grid: Float[Tensor, " levels"], t: PerSample) -> Int64[Tensor, " batch"]:
    """Which of the measurements on a grid: t in [0, 1) is stratified over the batch, and so is the answer."""
    k = len(grid) - 1
    return (t * k).long().clamp(max=k - 1)


def _weight(objective: Objective, method: Method) -> Weight | None:
    match objective.weight:
        case "sigmoid":
            return sigmoid_weight(method, objective.bias)
        case "edm":
            return edm_weight(method)
        case _:
            return None
