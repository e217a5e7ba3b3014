"""Looking at the model along the way: a bound on the test set's likelihood, and a grid of samples, both by the EMA.

The test samples are cut into fixed chunks, each with noise of its own seed; ranks share the chunks, and the result does
not depend on how many they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bsi.data.batches import BatchSource
from bsi.model import Model
from bsi.pictures import grid
from bsi.training.distributed import World
from bsi.training.recipe import Recipe
from bsi.training.stream import derive

__all__ = ["Bound", "bound", "draw_samples"]


@dataclass(frozen=True)
class Bound:
    """Bits per dimension with the Monte Carlo error, and their two large parts (nats per dimension without bins)."""

    bits_per_dim: float
    error: float
    reconstruction: float
    measurement: float


def bound(model: Model, test: BatchSource, recipe: Recipe, world: World) -> Bound:
    """The bound of the first test samples. Every rank calls it and gets the same."""
    wanted = recipe.evaluation
    count = min(wanted.images, len(test))
    starts = range(0, count, wanted.batch)
    sums = torch.zeros(len(starts), 4, dtype=torch.float64, device=world.device)
    for chunk, start in enumerate(starts):
        if chunk % world.size == world.rank:
            ids = np.arange(start, min(start + wanted.batch, count))
            seed = derive(recipe.seed, "evaluate", chunk)
            elbo = model.elbo(test.take(ids), None, wanted.measure, wanted.recon, seed, wanted.batch)
            sums[chunk] = torch.tensor(
                [
                    float(elbo.nats.sum()),
                    elbo.sum_variance,
                    float(elbo.reconstruction.sum()),
                    float(elbo.measurement.sum()),
                ]
            )
    nats, variance, reconstruction, measurement = world.sum(sums).sum(0).tolist()
    per_bit = count * math.prod(model.shape) * math.log(2)
    return Bound(nats / per_bit, math.sqrt(variance) / per_bit, reconstruction / per_bit, measurement / per_bit)


def draw_samples(model: Model, recipe: Recipe, path: Path) -> Path:
    """Samples as a picture, or as an array (.npy) where they are no images. Sample i is the same seed at every step."""
    wanted = recipe.samples
    seed = derive(recipe.seed, "samples") >> 32
    x = model.sample(wanted.count, wanted.steps, seed, wanted.solver, wanted.grid).cpu().numpy()
    path.parent.mkdir(exist_ok=True)
    if len(model.shape) == 3 and model.shape[0] in (1, 3):
        low, high = (0.0, float(model.bins.count - 1)) if model.bins is not None else (float(x.min()), float(x.max()))
        path = path.with_suffix(".png")
        grid(x, low=low, high=max(high, low + 1e-6)).save(path)
        return path
    path = path.with_suffix(".npy")
    np.save(path, x, allow_pickle=False)
    return path
