"""Looking at the model along the way: a bound on the test set's likelihood, and a grid of samples, both by the EMA.

The test samples are cut into fixed chunks, each with noise of its own seed; ranks share the chunks, and the result does
not depend on how many they are. The Monte Carlo error comes from the replicates within each chunk: two replicates of a
single chunk are one degree of freedom, and the error of one run in four would be less than a third of the true one.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from bsi.data.batches import BatchSource
from bsi.elbo import Elbo
from bsi.model import Model
from bsi.pictures import class_columns, grid, is_image
from bsi.recipe import Recipe
from bsi.rng import derive
from bsi.runtime.distributed import World

if TYPE_CHECKING:
    from bsi.training.loop import StopFlag

__all__ = ["bound", "draw_samples"]


class Interrupted(Exception):
    """An evaluation was asked to stop."""


def bound(model: Model, test: BatchSource, recipe: Recipe, world: World, stop: StopFlag) -> Elbo:
    """The bound of the first test samples. Every rank calls it and gets the same, or FailedTogether; so it ends when
    one is asked to `stop`: who asks may not wait for a long one."""
    wanted = recipe.evaluation
    count = min(wanted.images, len(test))
    size = wanted.at_a_time(count)
    chunks = [np.arange(start, min(start + size, count)) for start in range(0, count, size)]
    each = torch.zeros(4, count, dtype=torch.float64, device=world.device)  # one column for each sample, 0 elsewhere
    both = torch.zeros(2, len(chunks), dtype=torch.float64, device=world.device)
    failed: Exception | None = None
    try:
        for i, ids in list(enumerate(chunks))[world.rank :: world.size]:
            if stop:
                raise Interrupted
            seed = derive(recipe.seed, "evaluate", i)
            found = model.elbo(test.take(ids), None, wanted.measure, wanted.recon, seed, wanted.batch)
            each[:, ids] = torch.stack([found.reconstruction, found.measurement, found.prior, found.sample_variance])
            both[:, i] = torch.tensor([found.sum_variance, found.between])
    except Exception as error:
        failed = error
    world.fail_together(failed)
    each, both = world.sum(each).cpu(), world.sum(both).cpu()
    n, unit = math.prod(model.shape), 0.0 if model.standardize is None else model.standardize.log_determinant
    parts = []
    for i, ids in enumerate(chunks):
        reconstruction, measurement, prior, variance = each[:, ids]
        parts.append(Elbo(reconstruction, measurement, prior, variance, float(both[0, i]), float(both[1, i]), n, unit))
    return Elbo.join(parts)


def draw_samples(model: Model, recipe: Recipe, path: Path) -> Path:
    """Samples as a picture, or as an array (.npy) where they are no images. Sample i is the same seed at every step.

    A model with labels is asked for one class after the other; of few, each has a column.
    """
    wanted = recipe.samples
    seed = derive(recipe.seed, "samples") >> 32
    label = range(model.classes) if model.classes else None
    x = model.sample(wanted.count, wanted.sampler, seed=seed, label=label).cpu().numpy()
    path.parent.mkdir(exist_ok=True)
    if is_image(model.shape):
        low, high = (0.0, float(model.bins.count - 1)) if model.bins is not None else (float(x.min()), float(x.max()))
        path = path.with_suffix(".png")
        grid(x, class_columns(model.classes), low, max(high, low + 1e-6)).save(path)
        return path
    path = path.with_suffix(".npy")
    np.save(path, x, allow_pickle=False)
    return path
