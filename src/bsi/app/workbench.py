"""A trained model on the page's table: what it is, the images it is tested on, and the frames that a request asks for.

A frame is one `Step` as a belief: its mean, its precision, the prediction, and the measurement of the prediction before
that led here. BSI and BFN hold beliefs; a VDM's latent z is what measurements of precision nu said, z / signal. Noise
is a path for each (seed, image), as in `bsi sample`: more evaluations converge to the same image.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Shaped
from torch import Tensor

from bsi.app.asks import Ask, Denoise, Inpaint, Limits, mask, values
from bsi.app.finishing import Finisher
from bsi.brownian import BrownianPath
from bsi.conditioning import measuring_solvers
from bsi.data.store import open_dataset
from bsi.errors import BsiError, UsageError
from bsi.grids import GRIDS, named_grid
from bsi.methods import VDM, Method
from bsi.methods.base import Predictor
from bsi.model import Model
from bsi.pictures import is_image
from bsi.rng import standard_normal
from bsi.runtime.export import load, read_trained
from bsi.sampler import NOISY_SOLVER, Sampler, default_solver
from bsi.sampling import Step, belief, evaluations, measurement
from bsi.solvers import SOLVERS, named_solver

__all__ = ["About", "Frame", "Workbench", "open_workbench"]

FIRST_IMAGES = 96  # of the test set, to choose from
MEASURING = 1 << 20  # the draw of a sample's noise that its given measurement takes: no step gets so far


@dataclass(frozen=True)
class About:
    """What the page says and offers."""

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
    """Names, or numbers, of the labels 0, 1, ... that may be asked for; empty for a network without labels."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Frame:
    """One step of a request: the belief, what the network predicts from it, and the measurement that led to it."""

    step: int
    last: int
    precision: float
    mean: Float32[np.ndarray, "num channels height width"]
    x_hat: Float32[np.ndarray, "num channels height width"]
    y: Float32[np.ndarray, "num channels height width"] | None

    def line(self) -> bytes:
        """One line of JSON, the images as base64 of little-endian float32."""
        images = {"mean": self.mean, "x_hat": self.x_hat, "y": self.y}
        return json.dumps(
            {"step": self.step, "last": self.last, "precision": self.precision}
            | {name: None if image is None else encoded(image) for name, image in images.items()}
        ).encode() + b"\n"  # fmt: skip


def encoded(image: Float32[np.ndarray, "..."]) -> str:
    return base64.b64encode(image.astype("<f4").tobytes()).decode("ascii")


@dataclass(frozen=True)
class Workbench:
    """A model and the images to try it on, as values."""

    model: Model
    about: About
    images: Float32[np.ndarray, "count channels height width"]

    def frames(self, ask: Ask) -> Iterator[Frame]:
        """The steps of a request. What cannot be done is refused here, before the first evaluation."""
        self.about.limits.check(ask)
        model, method = self.model, self.model.method
        named_solver(ask.solver), named_grid(ask.grid)  # refuse unknown names
        k = ask.evaluations - evaluations(method, 0)
        ids = torch.arange(ask.num, device=model.device)
        noise = BrownianPath(ask.seed, ids, model.shape)
        finisher = Finisher(method, self._predictor(ask), noise, k, ask.solver, ask.grid)
        match ask:
            case Denoise():
                eps = standard_normal(ask.seed, ids[:1], MEASURING, model.shape)
                y = self._given(ask.image, ask.num) + eps * ask.precision**-0.5
                return _frames(method, finisher.denoise(y, ask.precision), k, y)
            case Inpaint():
                x = self._given(ask.image, ask.num)
                _, height, width = model.shape
                hidden = torch.from_numpy(mask(ask.hidden, height, width) != 0).to(model.device).expand_as(x)
                return _frames(method, finisher.inpaint(x, hidden), k)
            case _:
                return _frames(method, finisher.draw(), k)

    def _predictor(self, ask: Ask) -> Predictor:
        """The network, told the label that is asked for and made to follow it as much as is asked for."""
        denoiser, classes = self.model.denoiser, self.about.classes
        if ask.label is None:
            return denoiser.given(None, ask.guidance)
        if not 0 <= ask.label < len(classes):
            known = f"its labels are 0 to {len(classes) - 1}" if classes else "it was trained without labels"
            raise UsageError(f"this network has no label {ask.label}: {known}")
        return denoiser.given(torch.full((ask.num,), ask.label, device=self.model.device), ask.guidance)

    def _given(self, image: str, num: int) -> Float[Tensor, "num channels height width"]:
        x = torch.from_numpy(values(image, self.model.shape).copy()).to(self.model.device)
        return x.expand(num, *x.shape)


def _frames(
    method: Method, steps: Iterator[Step], last: int, given: Float[Tensor, "batch *data"] | None = None
) -> Iterator[Frame]:
    """Steps as frames; `given` is the measurement that led to the first."""
    before = None
    for i in range(last + 1):
        with torch.no_grad():  # around each step: what is suspended in between must not switch gradients off for others
            step = next(steps)
            known = belief(method, step)
            y = given if before is None else measurement(method, before, step)
        measured = None if y is None else _array(y)
        yield Frame(i, last, float(known.precision), _array(known.mean), _array(step.x_hat), measured)
        before = step


def _array(x: Float[Tensor, "num channels height width"]) -> Float32[np.ndarray, "num channels height width"]:
    return np.asarray(x.float().cpu().numpy(), np.float32)


def open_workbench(path: Path, name: str, device: torch.device) -> Workbench:
    """The model of a run folder or an exported file, with images of its test set where that is at hand."""
    trained = read_trained(path)
    model = load(path).to(device)
    if not is_image(model.shape):
        raise UsageError(
            f"the page shows images, of shape (1 or 3, height, width): {name} models data of shape {model.shape}. "
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
    bench = Workbench(model, about, _test_images(model, trained.data.name))
    _warm_up(bench)
    return bench


def _test_images(model: Model, dataset: str) -> Float32[np.ndarray, "count channels height width"]:
    """The first images of the test set as values, or none where the dataset is not prepared here."""
    try:
        rows: Shaped[np.ndarray, "..."] = open_dataset(dataset).test[:FIRST_IMAGES]
    except BsiError:
        rows = np.empty((0, *model.shape), np.float32)
    if rows.shape[1:] != model.shape or not len(rows):
        return np.empty((0, *model.shape), np.float32)
    return _array(model.values(torch.from_numpy(np.array(rows))))


@torch.no_grad()
def _warm_up(bench: Workbench) -> None:
    """The first evaluation is slow wherever memory is reserved or kernels are chosen; nobody should wait for that."""
    latent = torch.zeros(1, *bench.model.shape, device=bench.model.device)
    bench.model.denoiser(latent, torch.full((1,), bench.about.highest, dtype=torch.float64, device=latent.device))
