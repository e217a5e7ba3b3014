"""Figure "elbo-convergence": L_M^k falls to L_M^inf from above, down to the noise floor; and L_R beside it.

Beside the network's gap is that of Gaussian data with the covariance of the training images, which has a closed form:
with variances v along its axes the best prediction has h(lambda) = sum_j v_j / (1 + v_j SNR(lambda)), and both bounds
are sums over lambda. It falls as 1 / k.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from bsi.data.store import open_dataset
from bsi.grids import paper_grid
from bsi.methods import Method
from bsi.recipe import Recipe
from bsi.studies import figures
from bsi.studies.comparison import networks
from bsi.studies.estimates import Estimate, finite_gap
from bsi.studies.job import Bound, Measure, Reconstruction
from bsi.studies.report import Claim, Report, Study, Table, Verdict, less
from bsi.studies.scale import Scale
from bsi.studies.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STUDY", "converges", "gaussian_gap"]

FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0)  # alpha_R / alpha_M
FINE = 1 << 14  # steps that stand for infinitely many in the closed form
DESCRIBED = 10_000  # images that the covariance is taken from


def network(scale: Scale) -> Recipe:
    return networks(scale.comparisons[0], "bsi")[0]


def _bound(scale: Scale, k: int | None) -> Bound:
    return Bound(network(scale), scale.measured.finite_levels, scale.measured.recon, k)


def _reconstruction(scale: Scale) -> Reconstruction:
    return Reconstruction(network(scale), FACTORS, scale.measured.recon)


def measures(scale: Scale) -> list[Measure]:
    return [_bound(scale, None), *(_bound(scale, k) for k in scale.measured.ks), _reconstruction(scale)]


def gaussian_gap(method: Method, variances: Float64[Tensor, " n"], ks: Sequence[int]) -> list[float]:
    """L_M^k - L_M^inf in bits per dimension for Gaussian data with these variances, at the best prediction."""

    def error(levels: Float64[Tensor, " levels"]) -> Float64[Tensor, " levels"]:
        encoder = method.encoder(levels)
        snr = (encoder.signal / encoder.noise).square()
        return sum((v / (1 + v * snr[:, None])).sum(1) for v in variances.split(256))

    def bound(grid: Float64[Tensor, " levels"]) -> float:
        return 0.5 * float((torch.diff(method.gain(grid)) * error(grid[:-1])).sum())

    fine = paper_grid(method, FINE)
    gain, at = torch.diff(method.gain(fine)), error(fine)
    exact = 0.5 * float((gain * 0.5 * (at[1:] + at[:-1])).sum())  # trapezia: the error of the sum is of second order
    unit = len(variances) * math.log(2)
    return [(bound(paper_grid(method, k)) - exact) / unit for k in ks]


def _variances(recipe: Recipe) -> Float64[Tensor, " n"]:
    """Of the training images along their principal axes."""
    dataset = open_dataset(recipe.data.name)
    bins = dataset.bins
    assert bins is not None
    rows = dataset.split("train")[:DESCRIBED]
    values = torch.from_numpy(bins.values(np.asarray(rows)).reshape(len(rows), -1))
    return torch.linalg.eigvalsh(torch.cov(values.T)).clamp(min=0)


def _theory(scale: Scale) -> list[float]:
    recipe = network(scale)
    return gaussian_gap(recipe.method, _variances(recipe), scale.measured.ks)


def _gaps(scale: Scale, store: Store) -> list[Estimate]:
    return [finite_gap(store, _bound(scale, k), _bound(scale, None)) for k in scale.measured.ks]


def _reconstructions(scale: Scale, store: Store) -> list[Estimate]:
    """L_R for each factor less L_R at alpha_R = alpha_M, paired by image."""
    bits = store.read(_reconstruction(scale)).arrays["bits"]
    gain = bits - bits[FACTORS.index(1.0)]
    return [Estimate(float(row.mean()), float(row.std(ddof=1)) / math.sqrt(len(row))) for row in gain]


def _draw(scale: Scale, store: Store) -> Figure:
    ks, gaps = scale.measured.ks, _gaps(scale, store)
    figure, (left, right) = figures.panels(2, width=3.5, height=2.8)
    floor, theory = [gap.error for gap in gaps], _theory(scale)
    bottom = 0.1 * min(*theory, *floor)
    left.fill_between(ks, floor, bottom, color=figures.FAINT, linewidth=0)
    figures.label(left, ks[0], math.sqrt(bottom * min(floor)), "noise floor: one standard error", figures.GREY)
    left.plot(ks, theory, "--", color=figures.GREY)
    figures.label(left, ks[1], theory[1], "Gaussian data", figures.GREY, dx=6, dy=8)
    shown = [(k, gap) for k, gap in zip(ks, gaps, strict=True) if gap.value > 0]
    color = figures.COLORS["bsi"]
    figures.error_line(left, [k for k, _ in shown], [gap for _, gap in shown], color)
    figures.label(left, shown[0][0], shown[0][1].value, "BSI", color, dx=-2, dy=-10, side="center")
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_xticks(ks, [str(k) for k in ks])
    left.set_xlim(ks[0] * 0.7, ks[-1] * 1.4)
    left.set_ylim(bottom=bottom)
    left.set_xlabel("k")
    left.set_ylabel(r"$L_M^k - L_M^\infty$, bits/dim")
    left.set_title("The finite bound")
    values = store.read(_reconstruction(scale)).values["reconstruction"]
    seen = {factor: bits for factor, bits in zip(FACTORS, values, strict=True) if bits > 1e-12 * max(values)}
    right.plot(list(seen), list(seen.values()), "-o", color=color)  # less is nothing
    if max(seen.values()) > 100 * min(seen.values()):
        right.set_yscale("log")
    right.axvline(2.0, color=figures.GREY, linewidth=0.8, linestyle=":")
    right.set_xscale("log", base=2)
    right.set_xticks(list(seen), [f"{factor:g}" for factor in seen])
    right.set_xlabel(r"$\alpha_R / \alpha_M$")
    right.set_ylabel(r"$L_R$, bits/dim")
    right.set_title("The reconstruction term")
    return figure


def converges(gaps: Sequence[Estimate], steps: Sequence[Estimate], whole: Estimate) -> Claim:
    """`gaps` to the limit for each k, `steps` from each k to the next and from the first to the last in the `whole`.
    Held if the first gap is above 0 and the whole falls; not if any gap is below 0, or any step rises. At the noise
    floor neither can be told, and need not."""
    above, below = (sum(sign * gap.value > 2 * gap.error for gap in gaps) for sign in (1, -1))
    rising = sum(step.value > 2 * step.error for step in steps)
    falls = gaps[0].value > 2 * gaps[0].error and whole.value < -2 * whole.error
    verdict: Verdict = "not held" if below or rising else "held" if falls else "undecided"
    because = (
        f"from {gaps[0]} to {gaps[-1]} bits/dim; beyond two standard errors {above} of {len(gaps)} gaps are positive, "
        f"{below} negative, and {rising} rise with k"
    )
    return Claim("L_M^k converges to L_M^inf from above, down to the noise floor", verdict, because)


def _convergence(scale: Scale, store: Store) -> Claim:
    """Differences between two k are known better than from their gaps: the levels and the noise are the same."""
    ks = scale.measured.ks
    steps = [finite_gap(store, _bound(scale, b), _bound(scale, a)) for a, b in itertools.pairwise(ks)]
    whole = finite_gap(store, _bound(scale, ks[-1]), _bound(scale, ks[0]))
    return converges(_gaps(scale, store), steps, whole)


def report(scale: Scale, store: Store) -> Report:
    ks, gaps, theory = scale.measured.ks, _gaps(scale, store), _theory(scale)
    values, gains = store.read(_reconstruction(scale)).values, _reconstructions(scale, store)
    infinite = store.read(_bound(scale, None)).values
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
                tuple(zip(values["factors"], values["reconstruction"], gains, strict=True)),
            ),
        ),
        claims=(
            _convergence(scale, store),
            less(
                "alpha_R = 2 alpha_M gives a slight edge in likelihood over alpha_M",
                Estimate(values["reconstruction"][FACTORS.index(2.0)], 0.0),
                Estimate(values["reconstruction"][FACTORS.index(1.0)], 0.0),
                gains[FACTORS.index(2.0)],
            ),
        ),
        draw=lambda: _draw(scale, store),
        notes=(f"L_M^inf is {infinite['measurement']:.4f} and L_R {infinite['reconstruction']:.2g} bits/dim.",),
    )


STUDY = Study(
    name="elbo-convergence",
    paper='Figure "elbo-convergence"',
    shows="L_M^k -> L_M^inf from above, down to the noise floor; L_R beside it, and what alpha_R = 2 alpha_M brings",
    measures=measures,
    report=report,
)
