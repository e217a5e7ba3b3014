"""Figure "log-uniform-proposal": how far a prediction f(mu, lambda) lies from the belief mu, against lambda.

The log-uniform proposal rests on f(mu, lambda) = mu, which is crude for broad beliefs and right for sharp ones: the
relative distance |mu - f(mu, lambda)| / |mu| falls for lambda > 1. The effect of preconditioning alone, f = c_skip mu,
is drawn for comparison.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from bsi.denoiser import edm
from bsi.studies import figures
from bsi.studies.job import Measure, Profile
from bsi.studies.report import PRACTICAL_SHARE, Difference, Report, Results, Study, Table, less, mean_of_images
from bsi.studies.scale import Scale

__all__ = ["STUDY", "profile"]

LEVELS = (1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6)


def profile(scale: Scale) -> Profile:
    return Profile(scale.parameters.networks("bsi")[0], scale.profile_levels, scale.profile_images)


def measures(scale: Scale) -> list[Measure]:
    return [profile(scale)]


def report(results: Results) -> Report:
    job = profile(results.scale)
    arrays, recipe = results.read(job).arrays, job.network
    level, distance = arrays["level"], arrays["distance"]
    u = np.log(level)
    inside = [wanted for wanted in LEVELS if u[0] - 1e-6 <= math.log(wanted) <= u[-1] + 1e-6]
    nearest = {wanted: distance[np.abs(u - math.log(wanted)).argmin()] for wanted in inside}
    found = {wanted: mean_of_images(values[None]) for wanted, values in nearest.items()}
    paired = mean_of_images((nearest[1e2] - nearest[1.0])[None])
    claim = less(
        "For lambda > 1 the distance falls quickly: at 100 it is below that at 1",
        found[1e2],
        found[1.0],
        Difference(paired.value, paired.error, PRACTICAL_SHARE * found[1.0].value),
    )

    c_skip = edm(recipe.method.encoder(torch.from_numpy(level)), recipe.sigma_data).c_skip.numpy()
    low, middle, high = np.quantile(distance, (0.05, 0.5, 0.95), axis=1)
    figure, (axes,) = figures.panels(1, width=4.4, height=3.0)
    color = figures.COLORS["bsi"]
    axes.fill_between(level, low, high, color=color, alpha=0.2, linewidth=0)
    axes.plot(level, middle, color=color, label="network: median, 5 to 95 % of images")
    axes.plot(level, np.abs(1 - c_skip), "--", color=figures.GREY, label=r"$c_\mathrm{skip}\,\mu$ alone")
    axes.axvline(1.0, color=figures.GREY, linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(r"$\lambda$")
    axes.set_ylabel(r"$|\mu - f(\mu, \lambda)|\, /\, |\mu|$")
    axes.set_title("Predictions approach the belief")
    axes.legend()
    rows = tuple((float(wanted), estimate) for wanted, estimate in found.items())
    return Report(
        tables=(Table("distance", ("lambda", "|mu - f| / |mu|"), rows),), claims=(claim,), figure=figure, seeds=1
    )


STUDY = Study(
    name="proposal",
    paper='Figure "log-uniform-proposal"',
    shows="relative distance between mu and f(mu, lambda) against lambda",
    measures=measures,
    report=report,
)
