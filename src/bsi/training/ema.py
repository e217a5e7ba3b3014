"""The exponential moving average of the weights, as a second model that is only ever read from.

    ema <- ema + w (weights - ema),        w = 1 up to the first update, then 1 - beta

The weight w lives on the device: where a step is not to count (a loss that is not finite) it is 0, and the host need
not know yet.
"""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bsi.backbones.acceleration import compile_like
from bsi.model import Model
from bsi.runtime.lerp import lerp_

__all__ = ["EmaModel"]


class EmaModel:
    """A copy of a model whose parameters follow the original's. Sampling and evaluation use `model`."""

    def __init__(self, original: Model) -> None:
        self.model = copy.deepcopy(original).requires_grad_(False).eval()
        compile_like(self.model, original)
        self._averages, self._weights = _parameters(self.model), _parameters(original)
        self._copies, self._originals = _buffers(self.model), _buffers(original)

    @torch.no_grad()
    def update(self, weight: Float[Tensor, ""]) -> None:
        lerp_(self._averages, self._weights, weight)
        for mine, theirs in zip(self._copies, self._originals, strict=True):
            mine.copy_(theirs)


def _parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


def _buffers(model: nn.Module) -> list[Tensor]:
    """Buffers are copied: counts and running statistics are not averaged twice."""
    return list(model.buffers())
