"""A trained model with its test images, the requests of the page, and the frames that a request computes.

A frame is one `Step` as a belief: its mean, its precision, the prediction, and the measurement that led to it. The
latent of a VDM is not a mean, so `sampling.belief` converts it. Noise is one Brownian path per (seed, image), as in
`bsi sample`: more evaluations converge to the same image.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Float32, Shaped
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from bsi.brownian import BrownianPath
from bsi.conditioning import denoising, inpainted, measuring_solvers
from bsi.data.store import find_dataset
from bsi.errors import NonFinite, UsageError
from bsi.grids import GRIDS
from bsi.methods import VDM
from bsi.methods.base import Predictor
from bsi.model import Model
from bsi.pictures import is_image
from bsi.rng import standard_normal, subset
from bsi.runtime.export import model_of, read_trained
from bsi.sampler import CONSISTENCY, NOISY_SOLVER, Sampler
from bsi.sampling import Step, belief, drawing, evaluations, measurement
from bsi.solvers import SOLVERS
from bsi.symbols import alphabet, beliefs, most_probable, shades

Values = Float32[np.ndarray, "num *shape"]

MAX_SAMPLES = 64
MAX_VALUES = 1 << 16  # samples times dimensions: 256 KiB for each of the three images of a step
MAX_EVALUATIONS = 128  # the browser keeps all steps, at most about 100 MB
TEST_IMAGES = 96  # shown to choose from
MEASUREMENT_DRAW = 1 << 20  # the index of the given measurement's noise: larger than that of any step
COLUMNS = 32  # of text
INPAINT_ITERATIONS = 2  # backward passes per prediction: as good as five on digits, and more than twice as fast


class Request(BaseModel):
    """A request of the page.

    draw      samples from the prior
    denoise   samples from p(x | y), where y is a measurement of `image` with this precision
    inpaint   samples that equal `image` where `hidden`, one byte per pixel, is 0
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    kind: Literal["draw", "denoise", "inpaint"]
    seed: int = Field(ge=0, lt=2**53)  # the integers that JavaScript represents exactly
    num: int
    evaluations: int
    solver: str = Field(max_length=32)
    grid: str = Field(max_length=32)
    label: int | None = None
    guidance: float = Field(default=1.0, ge=0, le=10.0)
    image: str = ""
    precision: float = Field(default=1.0, gt=0)
    hidden: str = ""


@dataclass(frozen=True)
class Limits:
    """The largest request for data of one shape: samples, network evaluations, bytes of the request's body."""

    num: int
    evaluations: int
    body: int

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> Limits:
        n = math.prod(shape)
        # A body holds an image (base64 of float32), a mask (base64 of bytes) and a few names and numbers.
        return cls(max(1, min(MAX_SAMPLES, MAX_VALUES // n)), MAX_EVALUATIONS, 2048 + 8 * n)


@dataclass(frozen=True)
class Frame:
    """One step of a request. `y` is the measurement that led to it; the first step from the prior has none.

    Images of symbols have probabilities in place of mean and prediction, and text the most probable symbol of each
    position and its probability. Symbols have no measurement.
    """

    step: int
    last: int
    precision: float
    mean: Values
    x_hat: Values
    y: Values | None

    def line(self) -> bytes:
        """The frame as one line of JSON."""
        arrays = {"mean": self.mean, "x_hat": self.x_hat, "y": self.y}
        encoded = {name: None if array is None else encode(array) for name, array in arrays.items()}
        record = {"step": self.step, "last": self.last, "precision": self.precision, **encoded}
        return json.dumps(record).encode() + b"\n"


@dataclass(frozen=True)
class Workbench:
    """A model, its description for the page, its test images as values, and the limits of requests."""

    model: Model
    about: dict[str, Any]
    images: Float32[np.ndarray, "count channels height width"]
    limits: Limits

    def frames(self, request: Request) -> Iterator[Frame]:
        """The steps of a request. Invalid requests raise here, before the first evaluation of the network."""
        model, method, most = self.model, self.model.method, self.limits
        if not 1 <= request.num <= most.num:
            raise UsageError(f"num must be 1 to {most.num}, got {request.num}. `bsi sample` draws more.")
        if not 2 <= request.evaluations <= most.evaluations:
            raise UsageError(f"evaluations must be 2 to {most.evaluations}, got {request.evaluations}.")
        if request.kind not in self.about["modes"]:
            raise UsageError(f"the page only draws with {self.about['name']}. Use the task draw.")
        classes, cond = len(self.about["classes"]), None
        if request.label is not None:
            if not 0 <= request.label < classes:
                known = f"its labels are 0 to {classes - 1}" if classes else "it was trained without labels"
                raise UsageError(f"this network has no label {request.label}: {known}.")
            cond = torch.full((request.num,), request.label, device=model.device)
        predict: Predictor = model.denoiser.given(cond, request.guidance)
        k, ids = request.evaluations - evaluations(method, 0), torch.arange(request.num, device=model.device)
        x = torch.empty(0)
        if request.kind != "draw":
            image = decode(request.image, np.dtype("<f4"), model.shape, "image")
            if not np.isfinite(image).all():
                raise UsageError("image must be finite, got NaN or infinity.")
            x = torch.from_numpy(image.copy()).to(model.device).expand(request.num, *image.shape)
        if request.kind == "denoise":
            eps = standard_normal(request.seed, ids[:1], MEASUREMENT_DRAW, model.shape)
            y, noise = x + eps * request.precision**-0.5, BrownianPath(request.seed, ids, model.shape)
            return _frames(model, denoising(method, predict, noise, y, request.precision, k, request.solver), k, y)
        if request.kind == "inpaint":
            mask = torch.from_numpy(decode(request.hidden, np.dtype("u1"), model.shape[1:], "hidden") == 0)
            shown = mask.to(model.device, x.dtype).expand_as(x)
            predict = inpainted(method, predict, x, shown, iterations=INPAINT_ITERATIONS)
        sampler = Sampler(k, request.solver, request.grid)
        return _frames(model, drawing(method, predict, sampler, ids, model.latent_shape, request.seed), k)


def _frames(
    model: Model, steps: Iterator[Step], last: int, y: Float[Tensor, "batch *data"] | None = None
) -> Iterator[Frame]:
    """Steps as frames; `y` is the measurement that led to the first one."""
    before = None
    for i, step in enumerate(steps):
        if model.symbols is not None:
            pair = beliefs(model.symbols, model.method.encoder(step.level[None]), step.latent, step.x_hat)
            mean, x_hat = (shades(p) if is_image(model.shape) else most_probable(p) for p in pair)
            precision = step.level
        else:
            y = y if before is None else measurement(model.method, before, step)
            current = belief(model.method, step)
            mean, x_hat, precision = model.decoded(current.mean), model.decoded(step.x_hat), current.precision
        shown = y if y is None else model.decoded(y)
        arrays = [np.asarray(x.float().cpu().numpy(), np.float32) for x in (mean, x_hat, shown) if x is not None]
        if not all(np.isfinite(array).all() for array in arrays):
            raise NonFinite(f"step {i} holds NaN or infinity: the predictions of the network are not finite.")
        yield Frame(i, last, float(precision), arrays[0], arrays[1], arrays[2] if y is not None else None)
        before = step


def open_workbench(path: Path, name: str, device: torch.device) -> Workbench:
    """Load a run folder, an exported file or a bundled network, and its test images if the dataset is available."""
    trained = read_trained(path)
    model = model_of(trained, str(path)).to(device)
    bins, levels, symbols, tuned = model.bins, model.method.levels, model.symbols, model.denoiser.consistent
    sampler = model.named(model.sampler)
    text = symbols is not None and len(model.shape) == 1
    if not (is_image(model.shape) or text):
        kinds = f"text and images of shape (1 or 3, height, width), but {name} models data of shape {model.shape}"
        raise UsageError(f"the page shows {kinds}. `bsi sample` draws from it.")
    columns, limits = min(COLUMNS, math.prod(model.shape)), Limits.of(model.shape)
    shape = (1, -(-model.shape[0] // columns), columns) if text else model.shape
    # Standardized data has unit variance, and symbols are shown as probabilities.
    low, high = (bins.low, bins.high) if bins else (-2.0, 2.0) if symbols is None else (0.0, 1.0)
    about = {
        "name": name,
        "data": trained.data.name,
        "method": type(model.method).__name__,
        "symbol": "ν" if isinstance(model.method, VDM) else "λ",
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained_steps": trained.step,
        "shape": shape,
        "low": low,
        "high": high,
        "bins": None if bins is None else bins.count,
        "lowest": levels.low,
        "highest": levels.high,
        "solvers": (CONSISTENCY,) if tuned else tuple(dict.fromkeys([*SOLVERS, sampler.solver])),
        "measuring_solvers": measuring_solvers(model.method),
        "measuring_solver": NOISY_SOLVER,
        "grids": tuple(GRIDS),
        "solver": sampler.solver,
        "grid": sampler.grid,
        "evaluations": min(limits.evaluations, evaluations(model.method, 1 if tuned else sampler.steps)),
        "limits": asdict(limits),
        "modes": ("draw",)
        if tuned or symbols is not None or model.autoencoder is not None
        else ("draw", "denoise", "inpaint"),
        "alphabet": alphabet(symbols) if text and symbols is not None else (),  # empty for images
        "length": model.shape[0] if text else 0,  # of a text
        "classes": model.class_names or tuple(map(str, range(model.classes or 0))),
    }
    images = np.empty((0, *shape), np.float32)
    found = find_dataset(trained.dataset, trained.version)
    direct = symbols is None and model.autoencoder is None
    if direct and found is not None and found.shape == model.shape:
        images = model.values(torch.from_numpy(found.test[subset(len(found.test), TEST_IMAGES)])).cpu().numpy()
    with torch.no_grad():  # the first evaluation reserves memory and selects kernels, which takes long
        level = torch.full((1,), levels.high, dtype=torch.float64, device=device)
        model.denoiser.given(None)(torch.zeros(1, *model.latent_shape, device=device), level)
    return Workbench(model, about, images, limits)


def encode(array: Float32[np.ndarray, "..."]) -> str:
    """Base64 of little-endian float32."""
    return base64.b64encode(array.astype("<f4").tobytes()).decode("ascii")


def decode(text: str, dtype: np.dtype, shape: tuple[int, ...], name: str) -> Shaped[np.ndarray, "*shape"]:
    """An array of known type and shape from base64."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise UsageError(f"{name} must be base64: {error}") from error
    size = dtype.itemsize * math.prod(shape)
    if len(data) != size:
        raise UsageError(f"{name} must have {size} bytes, got {len(data)}.")
    return np.frombuffer(data, dtype).reshape(shape)
