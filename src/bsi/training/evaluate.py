"""Evaluation during training, with the EMA: the bound on a subset of the test set, and a grid of samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bsi.bound import estimate
from bsi.data.batches import BatchSource
from bsi.elbo import Elbo, Estimator
from bsi.model import Model
from bsi.pictures import class_columns, grid, is_image
from bsi.recipe import Recipe
from bsi.rng import derive, subset
from bsi.runtime.distributed import World

if TYPE_CHECKING:
    from bsi.training.loop import StopFlag

__all__ = ["bound", "draw_samples"]


class Interrupted(Exception):
    """An evaluation was asked to stop."""


def bound(model: Model, test: BatchSource, recipe: Recipe, world: World, stop: StopFlag) -> Elbo:
    """The bound of a random subset of the test set, the same one at every step and for any number of ranks.

    Every rank calls it and gets the same, or FailedTogether: also when one rank is asked to `stop` while it runs.
    """

    def poll() -> None:
        if stop:
            raise Interrupted

    wanted = recipe.evaluation
    ids = subset(len(test), wanted.images)
    estimator = Estimator(wanted.measure, wanted.recon, seed=derive(recipe.seed, "evaluate"), batch_size=wanted.batch)
    with model.evaluating():
        return estimate(model.on(test, ids=ids), estimator, world, poll=poll)


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
