"""Figure "elbo-convergence": L_M^k falls to L_M^inf from above, down to the noise floor; and L_R for several alpha_R.

The gap of Gaussian data with the covariance of the training images has a closed form, and is drawn next to that of the
network: with variances v along its axes the best prediction has the error h = sum_j v_j / (1 + v_j SNR), and both
bounds are integrals of h over the level. It falls as 1 / k.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from bsi.data.store import open_dataset
from bsi.grids import paper_grid
from bsi.methods import Method
from bsi.recipe import Recipe
from bsi.studies import figures
from bsi.studies.job import Bound, Measure, Reconstruction
from bsi.studies.report import (
    PRACTICAL_BITS,
    Claim,
    Difference,
    Estimate,
    Report,
    Results,
    Study,
    Table,
    Verdict,
    less,
    mean_of_images,
)
from bsi.studies.scale import Scale

__all__ = ["STUDY", "converges", "gaussian_gap"]

FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0)  # alpha_R / alpha_M
FINE = 1 << 14  # steps that stand for infinitely many in the closed form
COVARIANCE_IMAGES = 10_000


def _bound(scale: Scale, k: int | None) -> Bound:
    return Bound(scale.comparisons[0].networks("bsi")[0], scale.finite_levels, scale.recon, k)


def _reconstruction(scale: Scale) -> Reconstruction:
    return Reconstruction(scale.comparisons[0].networks("bsi")[0], FACTORS, scale.recon)


def measures(scale: Scale) -> list[Measure]:
    return [_bound(scale, None), *(_bound(scale, k) for k in scale.ks), _reconstruction(scale)]


def gaussian_gap(method: Method, variances: Float64[Tensor, " n"], ks: Sequence[int]) -> list[float]:
    """L_M^k - L_M^inf in bits per dimension for Gaussian data with these variances, at the best prediction."""

    def error(levels: Float64[Tensor, " levels"]) -> Float64[Tensor, " levels"]:
        encoder = method.encoder(levels)
        snr = (encoder.signal / encoder.noise).square()
        return sum((v / (1 + v * snr[:, None])).sum(1) for v in variances.split(256))

    def bound(grid: Float64[Tensor, " levels"]) -> float:
        return 0.5 * float((torch.diff(method.gain(grid)) * error(grid[:-1])).sum())

    fine = paper_grid(method, FINE)
    exact = 0.5 * float(torch.trapezoid(error(fine), method.gain(fine)))
    unit = len(variances) * math.log(2)
    return [(bound(paper_grid(method, k)) - exact) / unit for k in ks]


def _variances(recipe: Recipe) -> Float64[Tensor, " n"]:
    """The variances of the training images along their principal axes."""
    dataset = open_dataset(recipe.data.name)
    assert dataset.bins is not None
    rows = np.asarray(dataset.split("train")[:COVARIANCE_IMAGES])
    values = torch.from_numpy(dataset.bins.values(rows).reshape(len(rows), -1))
    return torch.linalg.eigvalsh(torch.cov(values.T)).clamp(min=0)


def converges(gaps: Sequence[Difference], steps: Sequence[Difference], total: Difference) -> Claim:
    """The claim that L_M^k falls to its limit from above.

    It is held if the first gap is positive and the gap falls in total, and not held if any gap is negative or rises.

    Args:
        gaps: L_M^k - L_M^inf for each k.
        steps: The differences from each k to the next, known more precisely than from the gaps.
        total: The difference from the first k to the last.
    """
    above, below = sum(gap.higher for gap in gaps), sum(gap.lower for gap in gaps)
    rising = sum(step.higher for step in steps)
    falls = gaps[0].higher and total.lower
    verdict: Verdict = "not held" if below or rising else "held" if falls else "undecided"
    because = (
        f"from {gaps[0]} to {gaps[-1]} bits/dim; beyond {PRACTICAL_BITS:g} and two standard errors {above} of "
        f"{len(gaps)} gaps are positive, {below} negative, and {rising} rise with k"
    )
    return Claim("L_M^k converges to L_M^inf from above, down to the noise floor", verdict, because)


def report(results: Results) -> Report:
    scale, ks = results.scale, results.scale.ks
    recipe = _bound(scale, None).network
    theory = gaussian_gap(recipe.method, _variances(recipe), ks)
    gaps = [results.finite_gap(_bound(scale, k), _bound(scale, None)) for k in ks]
    steps = [results.finite_gap(_bound(scale, b), _bound(scale, a)) for a, b in itertools.pairwise(ks)]
    total = results.finite_gap(_bound(scale, ks[-1]), _bound(scale, ks[0]))
    bits = results.read(_reconstruction(scale)).arrays["bits"]  # (factors, images)
    means = dict(zip(FACTORS, bits.mean(1).tolist(), strict=True))
    plain = bits[FACTORS.index(1.0)]
    gains = {factor: mean_of_images((row - plain)[None]) for factor, row in zip(FACTORS, bits, strict=True)}

    figure, (left, right) = figures.panels(2)
    color, floor = figures.COLORS["bsi"], [gap.error for gap in gaps]
    left.fill_between(ks, floor, color=figures.FAINT, linewidth=0, label="noise floor: one standard error")
    left.plot(ks, theory, "--", color=figures.GREY, label="Gaussian data")
    shown = [(k, gap) for k, gap in zip(ks, gaps, strict=True) if gap.value > 0]
    figures.line(left, [k for k, _ in shown], [gap for _, gap in shown], color, label="BSI")
    figures.log_axis(left, ks)
    left.set_yscale("log")
    left.set_ylim(bottom=0.1 * min(*theory, *floor))
    left.set_xlabel("k")
    left.set_ylabel(r"$L_M^k - L_M^\infty$, bits/dim")
    left.set_title("The finite bound")
    left.legend()
    positive = {factor: value for factor, value in means.items() if value > 1e-12 * max(means.values())}
    right.plot(list(positive), list(positive.values()), "-o", color=color)
    right.set_yscale("log")
    right.axvline(2.0, color=figures.GREY, linewidth=0.8, linestyle=":")
    figures.log_axis(right, list(positive))
    right.set_xlabel(r"$\alpha_R / \alpha_M$")
    right.set_ylabel(r"$L_R$, bits/dim")
    right.set_title("The reconstruction term")
    infinite = results.read(_bound(scale, None)).values
    return Report(
        tables=(
            Table(
                "gap",
                ("k", "L_M^k - L_M^inf, bits/dim", "Gaussian data, exact"),
                tuple(zip(ks, gaps, theory, strict=True)),
            ),
            Table(
                "reconstruction",
                ("alpha_R / alpha_M", "L_R, bits/dim", "less that at 1"),
                tuple((factor, means[factor], gains[factor]) for factor in FACTORS),
            ),
        ),
        claims=(
            converges(gaps, steps, total),
            less(
                "alpha_R = 2 alpha_M gives a slight edge in likelihood over alpha_M",
                Estimate(means[2.0], 0.0),
                Estimate(means[1.0], 0.0),
                Difference(gains[2.0].value, gains[2.0].error, PRACTICAL_BITS),
            ),
        ),
        figure=figure,
        notes=(f"L_M^inf is {infinite['measurement']:.4f} and L_R {infinite['reconstruction']:.2g} bits/dim.",),
        seeds=1,
    )


STUDY = Study(
    name="elbo-convergence",
    paper='Figure "elbo-convergence"',
    shows="L_M^k -> L_M^inf from above, down to the noise floor; L_R for several alpha_R",
    measures=measures,
    report=report,
)
