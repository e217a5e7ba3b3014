"""Figure "illustration": generation as inference in five pictures, for data whose best prediction is known.

1 a belief so broad that it covers all data, 2 a guess which sample it is about, 3 a noisy measurement of the guess,
4 the posterior, 5 the same again until one sample is left. The data is a mixture of Gaussians on a spiral and f is its
exact posterior mean (oracle.py), so nothing is trained. The table lists the beliefs, and Lemma "Posterior Update" holds
at each step.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from bsi.gaussian import Belief
from bsi.methods import BSI
from bsi.oracle import Mixture
from bsi.rng import SeededNoise
from bsi.sampling import Step, measurement, trajectory
from bsi.studies import figures
from bsi.studies.job import Measure
from bsi.studies.report import Claim, Report, Results, Study, Table
from bsi.studies.scale import Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["STUDY", "spiral", "steps"]

METHOD = BSI(lambda_0=0.3, alpha_M=1e3)
GRID = (0.3, 1.2, 4.0, 16.0, 80.0, METHOD.levels.high)
SEED = 32
BELIEF, GUESS, MEASURED = figures.PALETTE[0], figures.PALETTE[4], figures.PALETTE[1]


def measures(scale: Scale) -> list[Measure]:
    return []


def spiral(arms: int = 60) -> Mixture:
    """Gaussians along a spiral."""
    turn = math.pi * torch.linspace(0.3, 3.4, arms, dtype=torch.float64)
    radius = 0.3 + 0.2 * turn
    means = torch.stack([radius * torch.cos(turn), radius * torch.sin(turn)], 1)
    return Mixture(torch.full((arms,), 1 / arms, dtype=torch.float64), means, torch.full_like(means, 0.004))


def steps() -> list[Step]:
    """The trajectory of one sample."""
    noise = SeededNoise(SEED, torch.zeros(1, dtype=torch.long), (2,), torch.float64)
    grid = torch.tensor(GRID, dtype=torch.float64)
    return list(trajectory(METHOD, spiral().predictor(METHOD), noise, grid))


def _circle(axes: Axes, center: Float[Tensor, " 2"], precision: float) -> None:
    """A belief, as discs of one and two standard deviations."""
    from matplotlib.patches import Circle

    for deviations in (2, 1):
        radius = deviations / math.sqrt(precision)
        axes.add_patch(Circle(tuple(center.tolist()), radius, color=BELIEF, alpha=0.13, linewidth=0))
    axes.plot(*center.tolist(), "+", color=BELIEF, markersize=8, markeredgewidth=1.6)


def _draw(found: list[Step]) -> Figure:
    figure, axes = figures.panels(5, width=1.75, height=2.15)
    generator = torch.Generator().manual_seed(0)
    chosen, eps = torch.rand(900, generator=generator), torch.randn(900, 2, generator=generator)
    points = spiral().sample(chosen.double(), eps.double())
    first, second, last = found[0], found[1], found[-1]
    guess, y = first.x_hat[0].tolist(), measurement(METHOD, first, second)[0].tolist()
    titles = ("1 Believe", "2 Predict", "3 Measure", "4 Update", "5 Repeat")
    for panel, title in zip(axes, titles, strict=True):
        panel.plot(points[:, 0], points[:, 1], ".", color="#A9A9B4", markersize=1.1, zorder=0)
        panel.set(xlim=(-3.1, 3.1), ylim=(-3.1, 3.1), aspect="equal", xticks=[], yticks=[], title=title)
        panel.grid(False)
    for panel in axes[:3]:
        _circle(panel, first.latent[0], GRID[0])
    for panel in axes[1:3]:
        panel.plot(*guess, "o", color=GUESS, markersize=6, zorder=3)
    figures.label(axes[1], guess[0], guess[1], r"$\hat{x}$", GUESS, dx=8)
    axes[2].plot(*zip(guess, y, strict=True), ":", color=MEASURED, linewidth=1.2)
    figures.label(axes[2], y[0], y[1], r"$y$", MEASURED, dx=8)
    for panel in axes[2:4]:
        panel.plot(*y, "X", color=MEASURED, markersize=7, zorder=3)
    _circle(axes[3], second.latent[0], GRID[1])
    for step in found[1:-1]:
        _circle(axes[4], step.latent[0], float(step.level))
    axes[4].plot(*torch.cat([step.latent for step in found[1:]]).T, "-", color=BELIEF, linewidth=1)
    axes[4].plot(*last.x_hat[0].tolist(), "*", color=GUESS, markersize=12, markeredgecolor="white", zorder=4)
    axes[0].set_xlabel(rf"$\lambda_0 = {GRID[0]:g}$")
    axes[3].set_xlabel(rf"$\lambda_1 = {GRID[1]:g}$")
    axes[4].set_xlabel(rf"$\lambda_k = {METHOD.levels.high:.4g}$")
    return figure


def _update_error(found: list[Step]) -> float:
    """The largest deviation of a belief from Lemma "Posterior Update" with the measurement before it."""
    worst = 0.0
    for a, b in itertools.pairwise(found):
        belief = Belief(a.latent, a.level[None]).update(measurement(METHOD, a, b), (b.level - a.level)[None])
        worst = max(worst, float((belief.mean - b.latent).abs().max()))
    return worst


def report(results: Results) -> Report:
    found = steps()
    rows = tuple(
        (i, float(step.level), *step.latent[0].tolist(), *step.x_hat[0].tolist()) for i, step in enumerate(found)
    )
    error = _update_error(found)
    claim = Claim(
        "Each belief is the posterior of the one before",
        "held" if error < 1e-9 else "not held",
        f"largest difference {error:.1e}",
    )
    return Report(
        tables=(Table("belief", ("i", "lambda", "mu_1", "mu_2", "x_hat_1", "x_hat_2"), rows),),
        claims=(claim,),
        figure=_draw(found),
        notes=("Exact predictions for a mixture of 60 Gaussians on a spiral; the same at every scale.",),
    )


STUDY = Study(
    name="illustration",
    paper='Figure "illustration"',
    shows="the five-step picture",
    measures=measures,
    report=report,
)
