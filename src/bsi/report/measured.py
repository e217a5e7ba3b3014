"""What the model says when asked: a belief that sharpens, its bound on the test set, and where its bits are.

Everything is bounded by a number of operations, so that the report of a digits run takes seconds, and that of a large
network on a CPU leaves out what would take hours, saying so.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bsi.backbones.cost import cost
from bsi.data.store import open_dataset
from bsi.elbo import Elbo, measurement_loss
from bsi.errors import BsiError
from bsi.evaluation.samples import animate_beliefs
from bsi.model import Model
from bsi.pictures import is_image
from bsi.recipe import Recipe
from bsi.report.charts import Point
from bsi.rng import standard_normal
from bsi.runtime.export import load
from bsi.sampler import Sampler
from bsi.sampling import evaluations

__all__ = ["Measured", "measure"]

OPERATIONS = {"cpu": 3e11, "cuda": 5e15}  # a few seconds of each
LEVELS, LEVEL_IMAGES = 21, 96
ANIMATED, STEPS = 9, 32
MEASURE, RECON = (10, 5), 2  # levels for each sample: the paper's 5, or more where they cost little
MOST_IMAGES, FEWEST_IMAGES = 512, 16


@dataclass(frozen=True)
class Measured:
    """What could be found out; None and a reason in `missing` for what could not."""

    parameters: int | None
    animation: bytes | None
    bound: Elbo | None
    by_level: Sequence[Point]
    missing: Sequence[str]


def measure(
    run: Path, recipe: Recipe, device: torch.device, backbone: nn.Module | None, bound_known: bool = False
) -> Measured:
    """Ask the run's model (the EMA of its latest checkpoint) what it knows; not its bound, where that is known."""
    missing: list[str] = []
    try:
        model = load(run, backbone=backbone).to(device)
    except BsiError as error:
        return Measured(None, None, None, (), [f"the model was not asked: {error}"])
    afford = _affordable(recipe, model)
    animation = bound = None
    by_level: list[Point] = []
    if not is_image(model.shape):
        missing.append(f"no animation: data of shape {model.shape} has no picture")
    elif afford < ANIMATED * evaluations(model.method, STEPS):
        missing.append(_too_much("no animation"))
    else:
        animation = sharpening(model)
    test = _test_images(recipe)
    wanted = 0 if test is None else min(MOST_IMAGES, len(test))
    afford -= LEVELS * min(wanted, LEVEL_IMAGES)
    levels = next((m for m in MEASURE if wanted * (m + RECON) <= afford), MEASURE[-1])
    num = min(wanted, int(afford) // (levels + RECON))
    if test is None:
        missing.append(f"no bound: the test set of {recipe.data.name} is not here. `bsi data --list` shows what is.")
    elif num < min(FEWEST_IMAGES, wanted):
        missing.append(_too_much("no bound"))
    else:
        data = torch.from_numpy(np.array(test[:num]))
        bound = None if bound_known else model.bits_per_dim(data, measure=levels, recon=RECON)
        by_level = bits_by_level(model, data[:LEVEL_IMAGES])
    return Measured(sum(p.numel() for p in model.parameters()), animation, bound, by_level, missing)


def _affordable(recipe: Recipe, model: Model) -> float:
    """How many evaluations of one sample there is time for."""
    budget = OPERATIONS[model.device.type]
    if recipe.backbone is None:  # a network of the user's own: about two operations for each parameter and value
        return budget / (2 * sum(p.numel() for p in model.parameters()) * math.prod(model.shape[1:]))
    return budget / cost(recipe.backbone, model.shape, None if model.bins is None else model.bins.count).flops


def _too_much(what: str) -> str:
    return f"{what}: it would take long on this device. Ask for --device cuda, or `bsi eval` and `bsi sample`."


def _test_images(recipe: Recipe) -> np.ndarray | None:
    try:
        test = open_dataset(recipe.data.name).test
    except BsiError:
        return None
    return test if len(test) else None


def sharpening(model: Model) -> bytes:
    """A belief from the prior to the sample, as an animated WebP."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "belief.webp"
        animate_beliefs(model, Sampler(steps=STEPS), 0, None, ANIMATED, path)
        return path.read_bytes()


@torch.no_grad()
def bits_by_level(model: Model, data: Tensor) -> list[Point]:
    """The measurement term's integrand, in bits per dimension for each factor of ten in the level: its area is L_M."""
    x = model.values(data).to(model.device)
    decades = math.log10(model.method.levels.high / model.method.levels.low)
    found = []
    for i in range(LEVELS):
        t = torch.full((len(x),), (i + 0.5) / LEVELS, dtype=torch.float64, device=x.device)
        eps = standard_normal(0, torch.arange(len(x), device=x.device), i, model.shape)
        nats = measurement_loss(model.method, model.denoiser, x, t, eps).double()
        bits = nats / (x[0].numel() * math.log(2) * decades)
        error = float(bits.std()) / math.sqrt(len(bits)) if len(bits) > 1 else 0.0
        found.append(Point(float(model.method.levels.icdf(t[:1])), float(bits.mean()), error))
    return found
