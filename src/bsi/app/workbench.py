"""A trained model with its test images, and the frames that a request computes.

A frame is one `Step` as a belief: its mean, its precision, the prediction, and the measurement that led to it. The
latent of a VDM is not a mean, so `sampling.belief` converts it. Noise is one Brownian path per (seed, image), as in
`bsi sample`: more evaluations converge to the same image.
"""

from __future__ import annotations

import json
import math
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
from bsi.symbols import beliefs, shades
from bsi.values import Symbols

TEST_IMAGES = 96  # shown to choose from
MEASUREMENT_DRAW = 1 << 20  # the index of the given measurement's noise: larger than that of any step
COLUMNS = 32  # of text
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
    modes: tuple[str, ...] = ("draw", "denoise", "inpaint")
    alphabet: tuple[str, ...] = ()
    """How the symbols of a text are shown; empty for images."""
    length: int = 0
    """The number of symbols of a text."""
    classes: tuple[str, ...] = ()
    """Names, or else numbers, of the labels 0, 1, ...; empty for a network without labels."""


@dataclass(frozen=True)
class Frame:
    """One step of a request. `y` is the measurement that led to it; the first step from the prior has none.

    Images of symbols have probabilities in place of mean and prediction, and text the most probable symbol of each
    position and its probability. Symbols have no measurement.
    """

    step: int
    last: int
    precision: float
    mean: Float32[np.ndarray, "num *shape"]
    x_hat: Float32[np.ndarray, "num *shape"]
    y: Float32[np.ndarray, "num *shape"] | None

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
        if request.kind not in self.about.modes:
            raise UsageError(f"{self.about.name} has symbols, and the page only draws them. Use the task draw.")
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
        steps = drawing(method, predict, sampler, ids, model.latent_shape, request.seed)
        return _frames(method, steps, k) if model.symbols is None else _symbol_frames(model, model.symbols, steps, k)

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


def _symbol_frames(model: Model, symbols: Symbols, steps: Iterator[Step], last: int) -> Iterator[Frame]:
    """Steps as probabilities: see `Frame`."""
    for i, step in enumerate(steps):
        known = beliefs(symbols, model.method.encoder(step.level[None]), step.latent, step.x_hat)
        if not all(bool(torch.isfinite(p).all()) for p in known):
            raise NonFinite(f"step {i} holds NaN or infinity: the predictions of the network are not finite.")
        mean, x_hat = (_array(shades(p) if is_image(model.shape) else _most_probable(p)) for p in known)
        yield Frame(i, last, float(step.level), mean, x_hat, None)


def _most_probable(probabilities: Float[Tensor, "num 1 symbols length"]) -> Float[Tensor, "num 2 length"]:
    best = probabilities[:, 0].max(1)
    return torch.stack([best.indices.to(best.values), best.values], 1)


def _array(x: Float[Tensor, "num *shape"]) -> Float32[np.ndarray, "num *shape"]:
    return np.asarray(x.float().cpu().numpy(), np.float32)


def open_workbench(path: Path, name: str, device: torch.device) -> Workbench:
    """Load a run folder, an exported file or a bundled network, and its test images if the dataset is available."""
    trained = read_trained(path)
    model = load(path).to(device)
    bins, levels, symbols = model.bins, model.method.levels, model.symbols
    text = symbols is not None and len(model.shape) == 1
    if not (is_image(model.shape) or text):
        raise UsageError(
            f"the page shows text and images of shape (1 or 3, height, width), but {name} models data of shape "
            f"{model.shape}. `bsi sample` draws from it."
        )
    columns = min(COLUMNS, math.prod(model.shape))
    low, high = (-2.0, 2.0) if bins is None else (bins.low, bins.high)  # standardized data has unit variance
    about = About(
        name=name,
        data=trained.data.name,
        method=type(model.method).__name__,
        symbol="ν" if isinstance(model.method, VDM) else "λ",
        parameters=sum(p.numel() for p in model.parameters()),
        trained_steps=trained.step,
        shape=(1, -(-model.shape[0] // columns), columns) if text else model.shape,
        low=low if symbols is None else 0.0,
        high=high if symbols is None else 1.0,
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
        modes=About.modes if symbols is None else ("draw",),
        alphabet=alphabet(symbols) if text and symbols is not None else (),
        length=model.shape[0] if text else 0,
        classes=model.class_names or tuple(map(str, range(model.classes or 0))),
    )
    _warm_up(model)
    none = np.empty((0, *about.shape), np.float32)
    images = none if symbols else _test_images(model, trained.dataset, trained.data.version)
    return Workbench(model, about, images)


def alphabet(symbols: Symbols) -> tuple[str, ...]:
    """One visible character, or a space, for each symbol."""
    names = symbols.names or tuple(chr(i) if symbols.count == 256 else str(i) for i in range(symbols.count))
    return tuple("↵" if name == "\n" else name if name.isprintable() else "·" for name in names)


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
    latent = torch.zeros(1, *model.latent_shape, device=model.device)
    level = torch.full((1,), model.method.levels.high, dtype=torch.float64, device=model.device)
    model.denoiser(latent, level)
