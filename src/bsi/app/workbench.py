"""A trained model with its test images, and the frames that a request computes.

A frame is one `Step` as a belief: its mean, its precision, the prediction, and the measurement that led to it. The
latent of a VDM is not a mean, so `sampling.belief` converts it. Noise is one Brownian path per (seed, image), as in
`bsi sample`: more evaluations converge to the same image.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from bsi.app.requests import Denoise, Inpaint, Limits, Request, decode_image, decode_mask, encode
from bsi.brownian import BrownianPath
from bsi.conditioning import denoising, inpainted, measuring_solvers
from bsi.data.store import find_dataset
from bsi.errors import NonFinite, UsageError
from bsi.grids import GRIDS
from bsi.methods import VDM, Method
from bsi.methods.base import Predictor
from bsi.model import Model
from bsi.pictures import is_image
from bsi.rng import standard_normal, subset
from bsi.runtime.export import load, read_trained
from bsi.sampler import NOISY_SOLVER, Sampler, default_solver
from bsi.sampling import Step, belief, drawing, evaluations, measurement
from bsi.solvers import SOLVERS

__all__ = ["About", "Frame", "Workbench", "open_workbench"]

TEST_IMAGES = 96  # shown to choose from
MEASUREMENT_DRAW = 1 << 20  # the index of the given measurement's noise: larger than that of any step
INPAINT_ITERATIONS = 2  # backward passes per prediction: as good as five on digits, and more than twice as fast


@dataclass(frozen=True)
class About:
    """The model's description, the choices that the page offers, and their defaults."""

    name: str
    data: str
    method: str
    symbol: str
    parameters: int
    trained_steps: int
    shape: tuple[int, ...]
    low: float
    high: float
    bins: int | None
    lowest: float
    highest: float
    solvers: tuple[str, ...]
    measuring_solvers: tuple[str, ...]
    measuring_solver: str
    grids: tuple[str, ...]
    solver: str
    grid: str
    evaluations: int
    limits: Limits
    classes: tuple[str, ...] = ()
    """Names, or else numbers, of the labels 0, 1, ...; empty for a network without labels."""


@dataclass(frozen=True)
class Frame:
    """One step of a request. `y` is the measurement that led to it; the first step from the prior has none."""

    step: int
    last: int
    precision: float
    mean: Float32[np.ndarray, "num channels height width"]
    x_hat: Float32[np.ndarray, "num channels height width"]
    y: Float32[np.ndarray, "num channels height width"] | None

    def line(self) -> bytes:
        """The frame as one line of JSON."""
        record = {
            "step": self.step,
            "last": self.last,
            "precision": self.precision,
            "mean": encode(self.mean),
            "x_hat": encode(self.x_hat),
            "y": None if self.y is None else encode(self.y),
        }
        return json.dumps(record).encode() + b"\n"


@dataclass(frozen=True)
class Workbench:
    """A model and its test images as values."""

    model: Model
    about: About
    images: Float32[np.ndarray, "count channels height width"]

    def frames(self, request: Request) -> Iterator[Frame]:
        """The steps of a request. Invalid requests raise here, before the first evaluation of the network."""
        self.about.limits.check(request)
        model, method = self.model, self.model.method
        k = request.evaluations - evaluations(method, 0)
        ids = torch.arange(request.num, device=model.device)
        predict = self._predictor(request)
        match request:
            case Denoise():
                eps = standard_normal(request.seed, ids[:1], MEASUREMENT_DRAW, model.shape)
                y = self._image(request) + eps * request.precision**-0.5
                noise = BrownianPath(request.seed, ids, model.shape)
                return _frames(method, denoising(method, predict, noise, y, request.precision, k, request.solver), k, y)
            case Inpaint():
                x = self._image(request)
                mask = torch.from_numpy(decode_mask(request.hidden, *model.shape[1:]) == 0)
                known = mask.to(model.device, x.dtype).expand_as(x)
                predict = inpainted(method, predict, x, known, iterations=INPAINT_ITERATIONS)
        sampler = Sampler(k, request.solver, request.grid)
        return _frames(method, drawing(method, predict, sampler, ids, model.shape, request.seed), k)

    def _predictor(self, request: Request) -> Predictor:
        """The network given the requested label and guidance."""
        denoiser, classes = self.model.denoiser, self.about.classes
        if request.label is None:
            return denoiser.given(None, request.guidance)
        if not 0 <= request.label < len(classes):
            known = f"its labels are 0 to {len(classes) - 1}" if classes else "it was trained without labels"
            raise UsageError(f"this network has no label {request.label}: {known}.")
        return denoiser.given(torch.full((request.num,), request.label, device=self.model.device), request.guidance)

    def _image(self, request: Denoise | Inpaint) -> Float[Tensor, "num channels height width"]:
        x = torch.from_numpy(decode_image(request.image, self.model.shape).copy()).to(self.model.device)
        return x.expand(request.num, *x.shape)


def _frames(
    method: Method, steps: Iterator[Step], last: int, given: Float[Tensor, "batch *data"] | None = None
) -> Iterator[Frame]:
    """Steps as frames; `given` is the measurement that led to the first one."""
    before = None
    for i, step in enumerate(steps):
        current = belief(method, step)
        y = given if before is None else measurement(method, before, step)
        if not bool(torch.isfinite(current.mean).all() and torch.isfinite(step.x_hat).all()):
            raise NonFinite(f"step {i} holds NaN or infinity: the predictions of the network are not finite.")
        y_array = None if y is None else _array(y)
        yield Frame(i, last, float(current.precision), _array(current.mean), _array(step.x_hat), y_array)
        before = step


def _array(x: Float[Tensor, "num channels height width"]) -> Float32[np.ndarray, "num channels height width"]:
    return np.asarray(x.float().cpu().numpy(), np.float32)


def open_workbench(path: Path, name: str, device: torch.device) -> Workbench:
    """Load a run folder, an exported file or a bundled network, and its test images if the dataset is available."""
    trained = read_trained(path)
    model = load(path).to(device)
    if not is_image(model.shape):
        raise UsageError(
            f"the page needs images of shape (1 or 3, height, width), but {name} models data of shape {model.shape}. "
            f"`bsi sample` draws from it."
        )
    bins, levels = model.bins, model.method.levels
    about = About(
        name=name,
        data=trained.data.name,
        method=type(model.method).__name__,
        symbol="ν" if isinstance(model.method, VDM) else "λ",
        parameters=sum(p.numel() for p in model.parameters()),
        trained_steps=trained.step,
        shape=model.shape,
        low=-2.0 if bins is None else bins.low,  # standardized data has unit variance
        high=2.0 if bins is None else bins.high,
        bins=None if bins is None else bins.count,
        lowest=levels.low,
        highest=levels.high,
        solvers=tuple(SOLVERS),
        measuring_solvers=measuring_solvers(model.method),
        measuring_solver=NOISY_SOLVER,
        grids=tuple(GRIDS),
        solver=default_solver(model.method),
        grid=Sampler.grid,
        evaluations=evaluations(model.method, Sampler.steps),
        limits=Limits.of(model.shape),
        classes=model.class_names or tuple(map(str, range(model.classes or 0))),
    )
    _warm_up(model)
    return Workbench(model, about, _test_images(model, trained.dataset, trained.data.version))


def _test_images(model: Model, dataset: str, version: str) -> Float32[np.ndarray, "count channels height width"]:
    """A random subset of the test set as values; empty if the dataset is not prepared on this machine."""
    found = find_dataset(dataset, version)
    if found is None or found.shape != model.shape:
        return np.empty((0, *model.shape), np.float32)
    test = found.test
    return _array(model.values(torch.from_numpy(test[subset(len(test), TEST_IMAGES)])))


@torch.no_grad()
def _warm_up(model: Model) -> None:
    """Evaluate once: the first evaluation reserves memory and selects kernels, which takes long."""
    latent = torch.zeros(1, *model.shape, device=model.device)
    level = torch.full((1,), model.method.levels.high, dtype=torch.float64, device=model.device)
    model.denoiser(latent, level)
