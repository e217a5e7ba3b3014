"""How much a training run is, before it begins: of data, of parameters, of arithmetic. Imports no torch."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from bsi.backbones.cost import cost
from bsi.data.store import Dataset
from bsi.recipe import Recipe

__all__ = ["Size", "cpu_hours"]

CORE_TFLOPS = 0.03  # that one core of a CPU does in a second, about


@dataclass(frozen=True)
class Size:
    """How much there is to train, on how much, and what it takes."""

    dataset: str
    samples: int
    shape: tuple[int, ...]
    epochs: float
    parameters: int
    tflops_per_step: float

    @classmethod
    def of(cls, recipe: Recipe, dataset: Dataset) -> Size:
        bins, count = None if dataset.bins is None else dataset.bins.count, len(dataset.split("train"))
        assert recipe.backbone is not None  # a recipe on the command line names one
        classes = dataset.labels.classes if recipe.data.labels and dataset.labels is not None else 0
        found = cost(recipe.backbone, dataset.shape, bins, classes)
        epochs, flops = recipe.steps * recipe.batch / count, 3 * found.flops * recipe.batch
        return cls(dataset.name, count, dataset.shape, epochs, found.parameters, 1e-12 * flops)

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape)) or "1"
        return (
            f"{self.parameters:,} parameters on {self.dataset}: {self.samples:,} samples of {shape}, "
            f"{self.epochs:,.3g} times each"
        )


def cpu_hours(size: Size, steps: int) -> float:
    """About how long so many steps take on the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return steps * size.tflops_per_step / (CORE_TFLOPS * cores) / 3600
