"""From results to an outcome: estimates with standard errors, a verdict on each claim, tables and figures.

An error is one standard error:

bits per dimension   one network: the Monte Carlo error. Several seeds: the spread over seeds, or the Monte Carlo error
                     if that is larger.
a difference         paired by image, since both networks see the same images, levels and noise: the error of the mean
                     over images, which includes the Monte Carlo error, and the spread over seeds.
Fréchet distance     one network: the error from drawing these samples. Several seeds: as for bits per dimension.

With two seeds the spread has one degree of freedom: two standard errors are no 95 % interval then.

A claim is held if the difference is larger than its practical size and than two standard errors. It is not held if
two standard errors rule out a difference of the practical size, and undecided otherwise. The practical size is 0.001
bits per dimension, or 1 % of a distance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float64

from bsi.elbo import Elbo, Replicates
from bsi.recipe import Recipe
from bsi.sampler import Sampler
from bsi.studies.measure import OURS, Bound, Job, Store, bound, quality
from bsi.studies.scale import Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STANDARD_ERRORS = 2.0
PRACTICAL_BITS = 0.001
PRACTICAL_SHARE = 0.01  # of the value that is compared with

PerImage = Float64[np.ndarray, "seeds images"]
Networks = Sequence[Recipe]  # one network trained from several seeds
Row = dict[str, Any]  # the cells of a table by column: text, numbers, estimates, or None
Verdict = Literal["held", "not held", "undecided"]


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error, 0 for an exact value. For a difference, `size` is the smallest practical one."""

    value: float
    error: float
    size: float = 0.0

    def __str__(self) -> str:
        """The value with as many digits as the error allows: two digits of the error."""
        if not self.error > 0 or not math.isfinite(self.error) or not math.isfinite(self.value):
            return f"{self.value:.4g}"
        places = max(0, 1 - math.floor(math.log10(self.error)))
        if places > 7:
            return f"{self.value:.4g} ± {self.error:.2g}"
        return f"{self.value:.{places}f} ± {self.error:.{places}f}"

    def __sub__(self, other: Estimate) -> Estimate:
        """The difference of two independent estimates."""
        error = math.hypot(self.error, other.error)
        return Estimate(self.value - other.value, error, PRACTICAL_SHARE * abs(other.value))

    @property
    def lower(self) -> bool:
        """Whether a difference is below 0, beyond two standard errors and its practical size."""
        return self.value < -max(self.size, STANDARD_ERRORS * self.error)

    @property
    def higher(self) -> bool:
        return self.value > max(self.size, STANDARD_ERRORS * self.error)


def mean_of_seeds(each: Sequence[Estimate], size: float = 0.0) -> Estimate:
    """The mean of independent estimates, with the spread between them or their own errors, whichever is larger."""
    own = math.sqrt(sum(e.error**2 for e in each)) / len(each)
    between = _error_of_mean(np.array([e.value for e in each]))
    return Estimate(statistics.fmean(e.value for e in each), max(own, between), size)


def mean_of_images(each: PerImage, size: float = 0.0) -> Estimate:
    """The mean over images and seeds. All seeds see the same images: both spreads are in the error."""
    return Estimate(float(each.mean()), math.hypot(_error_of_mean(each.mean(0)), _error_of_mean(each.mean(1))), size)


def median_of_images(each: PerImage) -> Estimate:
    """The median over images, averaged over seeds, where a few images decide the mean.

    The number of n values below the true median is Binomial(n, 1/2) with standard deviation sqrt(n) / 2, so the error
    of a median is half the distance between the order statistics that far below and above the middle. All seeds see
    the same images, so their errors are not independent.
    """
    count = each.shape[1]
    middle, step = (count - 1) / 2, math.sqrt(count) / 2
    places = np.clip([middle - step, middle + step], 0, count - 1)
    errors = [np.diff(np.interp(places, np.arange(count), np.sort(row))) / 2 for row in each]
    medians = np.median(each, axis=1)
    return Estimate(float(medians.mean()), math.hypot(float(np.mean(errors)), _error_of_mean(medians)))


def _error_of_mean(values: Float64[np.ndarray, " n"]) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class Claim:
    """A statement of the paper (or a question of ours), the verdict, and the numbers behind it."""

    statement: str
    verdict: Verdict
    because: str


def verdict(difference: Estimate) -> Verdict:
    """Whether a difference is below 0."""
    excluded = difference.value - STANDARD_ERRORS * difference.error > -difference.size
    return "held" if difference.lower else "not held" if excluded else "undecided"


def less(statement: str, a: Estimate, b: Estimate, difference: Estimate | None = None) -> Claim:
    """The claim that a < b; `difference` is a - b where it is known more precisely than from the two."""
    gap = a - b if difference is None else difference
    return Claim(statement, verdict(gap), f"{a} against {b}, difference {gap}; it matters from {gap.size:.2g}")


def all_less(statement: str, differences: Iterable[Estimate]) -> Claim:
    """The claim that all of these differences are below 0."""
    verdicts = [verdict(gap) for gap in differences]
    counts = ", ".join(f"{verdicts.count(v)} {v}" for v in ("held", "undecided", "not held") if v in verdicts)
    return Claim(statement, _all(verdicts), f"of {len(verdicts)} comparisons: {counts}")


def equal(statement: str, differences: Mapping[str, Estimate], tolerance: float) -> Claim:
    """The claim that all differences are smaller than `tolerance`."""
    verdicts = [verdict(Estimate(abs(gap.value) - tolerance, gap.error)) for gap in differences.values()]
    shown = ", ".join(f"{name} {gap}" for name, gap in differences.items())
    return Claim(statement, _all(verdicts), f"{shown}; equal means less than {tolerance:g} apart")


def _all(verdicts: Sequence[Verdict]) -> Verdict:
    return "not held" if "not held" in verdicts else "undecided" if "undecided" in verdicts else "held"


@dataclass(frozen=True)
class Results(Store):
    """The store, with what the studies compute from its results at its scale."""

    def bits(self, networks: Networks) -> Estimate:
        """Bits per dimension."""
        found = [self.read(bound(self.scale, network)).values for network in networks]
        return mean_of_seeds([Estimate(v["bits_per_dim"], v["monte_carlo_error"]) for v in found])

    def elbo(self, job: Bound) -> Elbo:
        """The bound with its replicates: the difference of two has the error of their common noise."""
        found = self.read(job)
        arrays = {name: torch.from_numpy(array) for name, array in found.arrays.items()}
        measurement, reconstruction = (
            Replicates(arrays[term], arrays[f"{term}_sizes"], arrays["block"])
            for term in ("measurement", "reconstruction")
        )
        return Elbo(measurement, reconstruction, arrays["prior"], found.values["dimensions"])

    def image_bits(self, networks: Networks, finite_k: int | None = None, clips: bool = False) -> PerImage:
        """The bound of every image in bits per dimension, for each seed."""
        found = [self.elbo(bound(self.scale, network, finite_k, clips)) for network in networks]
        return np.stack([elbo.nats.numpy() / (elbo.n * math.log(2)) for elbo in found])

    def bits_difference(self, a: Networks, b: Networks, finite_k: int | None = None) -> Estimate:
        """a - b in bits per dimension, paired by image and by seed."""
        return mean_of_images(self.image_bits(a, finite_k) - self.image_bits(b, finite_k), PRACTICAL_BITS)

    def finite_gap(self, a: Bound, b: Bound) -> Estimate:
        """The bound `a` less `b`, at two values of k, with the Monte Carlo error of the difference."""
        gap = self.elbo(a) - self.elbo(b)
        return Estimate(gap.bits_per_dim, gap.monte_carlo_error, PRACTICAL_BITS)

    def distance(self, networks: Networks, sampler: Sampler = OURS, part: str = "test") -> Estimate:
        """The Fréchet distance of samples to a part of the dataset."""
        found = [self.read(quality(self.scale, network, sampler)).values for network in networks]
        return mean_of_seeds([Estimate(v[f"distance_{part}"], v[f"error_{part}"]) for v in found])

    def distance_difference(self, a: Networks, b: Networks, sampler: Sampler = OURS) -> Estimate:
        """a - b of Fréchet distances, paired by seed."""
        pairs = [self.distance([p], sampler) - self.distance([q], sampler) for p, q in zip(a, b, strict=True)]
        return mean_of_seeds(pairs, PRACTICAL_SHARE * self.distance(b, sampler).value)

    def row(self, networks: Networks, samplers: Mapping[str, Sampler]) -> Row:
        """Bits per dimension, and the distance by each sampler."""
        distances = {name: self.distance(networks, sampler) for name, sampler in samplers.items()}
        return {"bits/dim": self.bits(networks), **distances}

    def less_bits(self, statement: str, a: Networks, b: Networks) -> Claim:
        """The claim that the bound of a is below that of b."""
        return less(statement, self.bits(a), self.bits(b), self.bits_difference(a, b))

    def less_distance(self, statement: str, a: Networks, b: Networks, sampler: Sampler) -> Claim:
        """The claim that the Fréchet distance of a is below that of b."""
        gap = self.distance_difference(a, b, sampler)
        return less(statement, self.distance(a, sampler), self.distance(b, sampler), gap)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a study at one scale. The first table is published on the page, all of them as JSON."""

    tables: Mapping[str, Sequence[Row]]
    claims: Sequence[Claim]
    figure: Figure
    notes: Sequence[str] = ()


StudySteps = Generator[Sequence[Job], Results, Outcome]


@dataclass(frozen=True)
class Study:
    """One table or figure of the paper, or a new one.

    `steps` is a generator: it yields the measurements that the study needs, receives their results, and returns the
    outcome.
    """

    name: str
    paper: str  # the paper's tables and figures by name, or "new"
    shows: str
    steps: Callable[[Scale], StudySteps]

    def measurements(self, scale: Scale) -> Sequence[Job]:
        return next(self.steps(scale))

    def report(self, results: Results) -> Outcome:
        steps = self.steps(results.scale)
        next(steps)
        try:
            steps.send(results)
        except StopIteration as finished:
            return finished.value
        raise AssertionError(f"{self.name} yields more than once")

    def runs_at(self, scale: Scale) -> bool:
        return scale.studies is None or self.name in scale.studies

    def takes_seeds(self, scale: Scale) -> bool:
        """Whether --seeds changes which networks it trains."""
        return any(job.network.seed > 0 for job in self.measurements(scale.with_seeds(2)))

    def command(self, scale: Scale) -> str:
        """The command that repeats it at a scale."""
        requested = scale.requested_seeds is not None and self.takes_seeds(scale)
        seeds = f" --seeds {scale.requested_seeds}" if requested else ""
        return f"bsi study {self.name} --scale {scale.name}{seeds} --out FOLDER"


STUDIES: dict[str, Study] = {}


def study(paper: str, shows: str) -> Callable[[Callable[[Scale], StudySteps]], Study]:
    """Register a study by its steps; `fid_convergence` is the study "fid-convergence"."""

    def register(steps: Callable[[Scale], StudySteps]) -> Study:
        name = steps.__name__.replace("_", "-")
        return STUDIES.setdefault(name, Study(name, paper, shows, steps))

    return register


def table(head: str, columns: Iterable[Any], found: Mapping[str, Sequence[Estimate]], column: str = "{}") -> list[Row]:
    """A row for each name, its estimates in order; `column` makes the name of a column."""
    names = [column.format(each) for each in columns]
    return [{head: name, **dict(zip(names, estimates, strict=False))} for name, estimates in found.items()]


def records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of a table for JSON, with the columns of the longest; an estimate becomes its value and its error."""

    def plain(column: str, cell: Any) -> dict[str, Any]:
        return {column: cell.value, f"{column} error": cell.error} if isinstance(cell, Estimate) else {column: cell}

    columns = max(rows, key=len)
    return [{k: v for column in columns for k, v in plain(column, row.get(column)).items()} for row in rows]


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table, with the columns of the longest."""

    def text(cell: str | int | float | Estimate | None) -> str:
        return "–" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)

    columns = [*max(rows, key=len)]
    lines = [columns, ["---"] * len(columns), *([text(row.get(column)) for column in columns] for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |" for cells in lines)


PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito (2008)
COLORS = {"bsi": PALETTE[0], "vdm": PALETTE[1], "bfn": PALETTE[2]}
GREY, PALE = "#6F6F78", "#E4E4EA"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def panels(columns: int, width: float = 3.4, height: float = 2.8) -> tuple[Figure, list[Axes]]:
    """An empty figure of panels in a row; sizes of one panel in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False).flat)


def curves(
    axes: Axes, x: Sequence[float | int], found: Mapping[str, Sequence[Estimate]], base: int = 2, **labels: Any
) -> None:
    """Estimates by name, with bars of one standard error, over a logarithmic axis. Methods have colors of their own."""
    for i, (name, estimates) in enumerate(found.items()):
        color, values = COLORS.get(name.lower(), PALETTE[i % len(PALETTE)]), [e.value for e in estimates]
        marker, errors = "os^Dvp*"[PALETTE.index(color)], [e.error for e in estimates]
        axes.errorbar(x[: len(values)], values, errors, None, f"-{marker}", color=color, capsize=2, label=name)
    axes.set_xscale("log", base=base)
    axes.set_xticks(x, [f"{tick:g}" for tick in x])
    axes.minorticks_off()
    axes.set(**labels)
    axes.legend()


def differences(axes: Axes, found: Mapping[str, Estimate], **labels: str) -> None:
    """Differences by name, one below the other, with bars of one standard error, around 0."""
    values, errors = [each.value for each in found.values()], [each.error for each in found.values()]
    axes.errorbar(values, range(len(found)), xerr=errors, fmt="o", color=COLORS["bsi"], capsize=2)
    axes.axvline(0, color=GREY, linewidth=0.9)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set(**labels)
