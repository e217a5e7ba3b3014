"""What needs no training: Figures "illustration" and "noise-levels".

"illustration" is generation as inference in five pictures: 1 a belief so broad that it covers all data, 2 a guess which
sample it is about, 3 a noisy measurement of the guess, 4 the posterior, 5 the same again until one sample is left. The
data is a mixture of Gaussians on a spiral and f is its exact posterior mean (oracle.py).

"noise-levels" shows an image under the encoders of the three methods, from t = 0 to t = 1: the top half of each picture
is the encoder's mean, the bottom half a sample. Its claims are the numbers of Section "Discussion".
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bsi.data.store import open_dataset
from bsi.gaussian import Belief, Encoder
from bsi.methods import BSI, METHODS
from bsi.oracle import Mixture
from bsi.pictures import grid
from bsi.rng import SeededNoise, standard_normal
from bsi.sampling import Step, measurement, trajectory
from bsi.studies.outcome import PALETTE, Claim, Outcome, StudySteps, panels, study
from bsi.studies.scale import METHOD_NAMES, Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METHOD = BSI(lambda_0=0.3, alpha_M=1e3)
GRID = (0.3, 1.2, 4.0, 16.0, 80.0, METHOD.levels.high)
SEED = 32
BELIEF, MEASURED, GUESS = (PALETTE[i] for i in (0, 1, 4))


def spiral(arms: int = 60) -> Mixture:
    """Gaussians along a spiral."""
    turn = math.pi * torch.linspace(0.3, 3.4, arms, dtype=torch.float64)
    radius = 0.3 + 0.2 * turn
    means = torch.stack([radius * torch.cos(turn), radius * torch.sin(turn)], 1)
    return Mixture(torch.full((arms,), 1 / arms, dtype=torch.float64), means, torch.full_like(means, 0.004))


def _circle(axes: Axes, center: Float[Tensor, " 2"], precision: float) -> None:
    """A belief, as discs of one and two standard deviations."""
    from matplotlib.patches import Circle

    for deviations in (2, 1):
        radius = deviations / math.sqrt(precision)
        axes.add_patch(Circle(tuple(center.tolist()), radius, color=BELIEF, alpha=0.13, linewidth=0))
    axes.plot(*center.tolist(), "+", color=BELIEF, markersize=8, markeredgewidth=1.6)


def _draw(found: list[Step]) -> Figure:
    figure, axes = panels(5, width=1.75, height=2.15)
    generator = torch.Generator().manual_seed(0)
    chosen, eps = torch.rand(900, generator=generator), torch.randn(900, 2, generator=generator)
    points = spiral().sample(chosen.double(), eps.double())
    first, second, last = found[0], found[1], found[-1]
    guess, y = (tuple(x[0].tolist()) for x in (first.x_hat, measurement(METHOD, first, second)))
    titles = ("1 Believe", "2 Predict", "3 Measure", "4 Update", "5 Repeat")
    for panel, title in zip(axes, titles, strict=True):
        panel.plot(points[:, 0], points[:, 1], ".", color="#A9A9B4", markersize=1.1, zorder=0)
        panel.set(xlim=(-3.1, 3.1), ylim=(-3.1, 3.1), aspect="equal", xticks=[], yticks=[], title=title)
    for panel in axes[:3]:
        _circle(panel, first.latent[0], GRID[0])
    for panel in axes[1:3]:
        panel.plot(*guess, "o", color=GUESS, markersize=6, zorder=3)
    for panel in axes[2:4]:
        panel.plot(*y, "X", color=MEASURED, markersize=7, zorder=3)
    for panel, point, name, color in ((axes[1], guess, r"$\hat{x}$", GUESS), (axes[2], y, r"$y$", MEASURED)):
        panel.annotate(name, point, xytext=(8, 0), textcoords="offset points", color=color, va="center")
    axes[2].plot(*zip(guess, y, strict=True), ":", color=MEASURED, linewidth=1.2)
    _circle(axes[3], second.latent[0], GRID[1])
    for step in found[1:-1]:
        _circle(axes[4], step.latent[0], float(step.level))
    axes[4].plot(*torch.cat([step.latent for step in found[1:]]).T, "-", color=BELIEF, linewidth=1)
    axes[4].plot(*last.x_hat[0].tolist(), "*", color=GUESS, markersize=12, markeredgecolor="white", zorder=4)
    for panel, number, level in ((axes[0], "0", GRID[0]), (axes[3], "1", GRID[1]), (axes[4], "k", GRID[-1])):
        panel.set_xlabel(rf"$\lambda_{number} = {level:.4g}$")
    return figure


@study('Figure "illustration"', "the five-step picture")
def illustration(scale: Scale) -> StudySteps:
    """Lemma "Posterior Update" holds at each step."""
    yield []
    noise = SeededNoise(SEED, torch.zeros(1, dtype=torch.long), (2,), torch.float64)
    found = list(trajectory(METHOD, spiral().predictor(METHOD), noise, torch.tensor(GRID, dtype=torch.float64)))
    error = 0.0
    for a, b in itertools.pairwise(found):
        belief = Belief(a.latent, a.level[None]).update(measurement(METHOD, a, b), (b.level - a.level)[None])
        error = max(error, float((belief.mean - b.latent).abs().max()))
    columns, rows = ("i", "lambda", "mu_1", "mu_2", "x_hat_1", "x_hat_2"), []
    for i, step in enumerate(found):
        cells = (i, float(step.level), *step.latent[0].tolist(), *step.x_hat[0].tolist())
        rows.append(dict(zip(columns, cells, strict=True)))
    statement, because = "Each belief is the posterior of the one before", f"largest difference {error:.1e}"
    claim = Claim(statement, "held" if error < 1e-9 else "not held", because)
    note = "Exact predictions for a mixture of 60 Gaussians on a spiral; the same at every scale."
    return Outcome({"belief": rows}, [claim], _draw(found), [note])


TIMES = tuple(i / 10 for i in range(11))
IMAGES = {"digits": 3, "cifar10": 7, "imagenet32": 0}  # a test image with a clear motif


def encoder(method: str, t: float) -> Encoder:
    """q(psi | x, F^-1(t)) at the paper's parameters."""
    built = METHODS[method]()
    return built.encoder(built.levels.icdf(torch.tensor(t, dtype=torch.float64)))


@study('Figure "noise-levels"', "encoders of the three methods, mean and sample, over t")
def noise_levels(scale: Scale) -> StudySteps:
    yield []
    encoders = {(method, t): encoder(method, t) for method in METHOD_NAMES for t in TIMES}
    rows = []
    for t in TIMES:
        row = {"t": t}
        for method in METHOD_NAMES:
            e = encoders[method, t]
            row |= {f"{method.upper()} signal": float(e.signal), f"{method.upper()} variance": float(e.noise**2)}
        rows.append(row)
    noisy = {method: float(encoders[method, 0.1].noise) ** 2 for method in METHOD_NAMES}
    signal = {method: float(encoders[method, 0.0].signal) for method in METHOD_NAMES}
    claims = [
        Claim(statement, "held" if round(value, places) == printed else "not held", f"{value:.4f}, printed {printed:g}")
        for statement, value, printed, places in (
            ("BSI's variance at t = 0.1", noisy["bsi"], 15.85, 2),
            ("VDM's variance at t = 0.1", noisy["vdm"], 0.96, 2),
            ("VDM's share of the image at t = 0", signal["vdm"], 0.08, 2),
            ("BFN is deterministic at t = 0: its variance", float(encoders["bfn", 0.0].noise) ** 2, 0.0, 12),
            ("BSI's share of the image at t = 0", signal["bsi"], 0.0, 12),
        )
    ]

    dataset = open_dataset(scale.comparisons[0].recipe("bsi").data.name)
    assert dataset.bins is not None
    x = torch.from_numpy(dataset.bins.values(np.asarray(dataset.split("test")[IMAGES[dataset.name]]))).float()
    eps = standard_normal(0, torch.zeros(1, dtype=torch.long), 0, tuple(x.shape))[0]
    half, pictures = x.shape[1] // 2, []
    for e in encoders.values():
        mean = float(e.signal) * x
        pictures.append(torch.cat([mean[:, :half], (mean + float(e.noise) * eps)[:, half:]], dim=1).numpy())
    figure, (axes,) = panels(1, width=7.4, height=2.4)
    sheet = np.asarray(grid(np.stack(pictures), len(TIMES)))
    height, width = sheet.shape[0] / len(METHOD_NAMES), sheet.shape[1] / len(TIMES)
    axes.imshow(sheet, interpolation="nearest")
    axes.set_xticks([(i + 0.5) * width for i in range(len(TIMES))], [f"{t:g}" for t in TIMES])
    axes.set_yticks([(i + 0.5) * height for i in range(len(noisy))], [method.upper() for method in METHOD_NAMES])
    axes.set_xlabel("t: noise at 0, data at 1 (top the mean, bottom a sample)")
    axes.grid(False)
    largest = max(float(encoder("bfn", t / 1000).noise) ** 2 for t in range(1001))
    return Outcome({"encoders": rows}, claims, figure, [f"BFN's variance is at most {largest:.4g}, at any t."])
