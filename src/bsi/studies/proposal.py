"""Figure "log-uniform-proposal": how far a prediction f(mu, lambda) lies from the belief mu, against lambda.

The log-uniform proposal rests on f(mu, lambda) = mu, which is crude for broad beliefs and right for sharp ones: the
relative distance |mu - f(mu, lambda)| / |mu| falls for lambda > 1. What preconditioning alone does, f = c_skip mu, is
shown beside it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float64

from bsi.denoiser import edm
from bsi.studies import figures
from bsi.studies.estimates import Estimate
from bsi.studies.job import Measure, Profile
from bsi.studies.report import Report, Study, Table, less
from bsi.studies.scale import Scale
from bsi.studies.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STUDY"]

LEVELS = (1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6)


def profile(scale: Scale) -> Profile:
    """Of the network of the parameter studies."""
    return Profile(scale.parameter_recipe("bsi"), scale.measured.profile_levels, scale.measured.profile_images)


def measures(scale: Scale) -> list[Measure]:
    return [profile(scale)]


def _skip(scale: Scale, level: np.ndarray) -> np.ndarray:
    """|1 - c_skip|: the distance of a network that answers 0."""
    recipe = profile(scale).network
    found = edm(recipe.method.encoder(torch.from_numpy(level)), recipe.sigma_data)
    return (1 - found.c_skip).abs().numpy()


def _draw(scale: Scale, store: Store) -> Figure:
    arrays = store.read(profile(scale)).arrays
    level, distance = arrays["level"], arrays["distance"]
    low, middle, high = np.quantile(distance, (0.05, 0.5, 0.95), axis=1)
    figure, (axes,) = figures.panels(1, width=4.4, height=3.0)
    color = figures.COLORS["bsi"]
    axes.fill_between(level, low, high, color=color, alpha=0.2, linewidth=0)
    axes.plot(level, middle, color=color)
    axes.plot(level, _skip(scale, level), "--", color=figures.GREY)
    i = round(0.55 * (len(level) - 1))
    figures.label(axes, level[i], middle[i], "network: median,\n5 to 95 % of images", color, dx=8, dy=12)
    j = round(0.3 * (len(level) - 1))
    figures.label(
        axes,
        level[j],
        _skip(scale, level)[j],
        r"$c_\mathrm{skip}\,\mu$ alone",
        figures.GREY,
        dx=-8,
        dy=-14,
        side="right",
    )
    axes.axvline(1.0, color=figures.GREY, linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(r"$\lambda$")
    axes.set_ylabel(r"$|\mu - f(\mu, \lambda)|\, /\, |\mu|$")
    axes.set_title("Predictions approach the belief")
    return figure


def _mean(values: Float64[np.ndarray, " images"]) -> Estimate:
    return Estimate(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values)))


def report(scale: Scale, store: Store) -> Report:
    arrays = store.read(profile(scale)).arrays
    level, distance = np.log(arrays["level"]), arrays["distance"]
    inside = [wanted for wanted in LEVELS if level[0] - 1e-6 <= math.log(wanted) <= level[-1] + 1e-6]
    each = {wanted: distance[int(np.abs(level - math.log(wanted)).argmin())] for wanted in inside}  # the nearest level
    found = {wanted: _mean(values) for wanted, values in each.items()}
    return Report(
        tables=(
            Table(
                "distance", ("lambda", "|mu - f| / |mu|"), tuple((float(k), estimate) for k, estimate in found.items())
            ),
        ),
        claims=(
            less(
                "For lambda > 1 the distance falls quickly: at 100 it is below that at 1",
                found[1e2],
                found[1.0],
                _mean(each[1e2] - each[1.0]),
            ),
        ),
        draw=lambda: _draw(scale, store),
    )


STUDY = Study(
    name="proposal",
    paper='Figure "log-uniform-proposal"',
    shows="relative distance between mu and f(mu, lambda) against lambda",
    measures=measures,
    report=report,
)
