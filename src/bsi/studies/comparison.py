"""Tables "imagenet32" and "cifar10-bpd": BFN, VDM and BSI with the same backbone, budget, data order and noise.

The paper's claim: equal bits per dimension, and a FID of BSI below VDM's, below BFN's. `architecture` makes the same
comparison with another backbone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bsi.recipe import Recipe
from bsi.sampler import Sampler
from bsi.studies import figures
from bsi.studies.job import OURS, OURS_NAME, Measure, measures_of, paper_sampler, quality
from bsi.studies.report import Cell, Claim, Report, Results, Study, Table, equal, less
from bsi.studies.scale import DATASETS, METHOD_NAMES, Comparison, Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["ARCHITECTURE", "STUDY", "Printed", "claims", "comparison_table", "draw_bits", "our_solvers"]

EQUAL_BITS = 0.01  # bits per dimension: about the largest difference in the paper's table
PAIRS = (("bsi", "vdm"), ("bsi", "bfn"), ("vdm", "bfn"))


@dataclass(frozen=True)
class Printed:
    """A row of the paper's tables, as printed: with standard deviations over three seeds."""

    bits: str
    fid: str | None = None


IMAGENET32 = {
    "bfn": Printed("3.448 ± 0.005", "11.0 ± 0.1"),
    "vdm": Printed("3.452 ± 0.006", "9.9 ± 0.5"),
    "bsi": Printed("3.448 ± 0.006", "8.9 ± 0.1"),
}
IMAGENET64 = {
    "bfn": Printed("3.222 ± 0.006", "38.2 ± 0.8"),
    "vdm": Printed("3.228 ± 0.006", "35.2 ± 0.7"),
    "bsi": Printed("3.218 ± 0.004", "30.1 ± 0.4"),
}
ARCHITECTURE = {
    "bfn": Printed("3.505 ± 0.001", "14.2 ± 0.4"),
    "vdm": Printed("3.527 ± 0.009", "15.4 ± 1.5"),
    "bsi": Printed("3.510 ± 0.009", "12.8 ± 0.6"),
}
# By training steps. The values of VDM and BFN are those of their authors.
CIFAR10 = {
    10_000_000: {"vdm": Printed("2.65"), "bsi": Printed("2.64")},
    5_000_000: {"bfn": Printed("2.66"), "bsi": Printed("2.65")},
}
PAPER_NOTE = (
    "The paper's values are for ImageNet32, DiT-L/2 and 2M steps; its FID is for 50,000 samples in 1024 steps against "
    "the test set; its errors are standard deviations over three seeds. On CIFAR-10 the paper trained U-Nets: BSI has "
    "2.65 bits/dim after 5M steps (BFN 2.66) and 2.64 after 10M (VDM 2.65). On ImageNet64 BFN, VDM and BSI have 3.222, "
    "3.228 and 3.218 bits/dim, and a FID of 38.2, 35.2 and 30.1."
)


def measures(scale: Scale) -> list[Measure]:
    found: list[Measure] = []
    for comparison in scale.comparisons:
        samplers = [*map(paper_sampler, scale.steps), OURS] if comparison.samples else []
        for method in comparison.methods:
            networks = comparison.networks(method)
            found += measures_of(scale, networks, *samplers)
            found += [quality(scale, networks[0], paper_sampler(scale.long))] if comparison.samples else []
    return found


def _printed(recipe: Recipe) -> Mapping[str, Printed]:
    """The paper's values for the most similar network."""
    if recipe.data.name == "imagenet64":
        return IMAGENET64
    if recipe.data.name == "cifar10" and recipe.steps in CIFAR10:
        return CIFAR10[recipe.steps]
    return IMAGENET32


def comparison_table(
    results: Results, comparison: Comparison, printed: Mapping[str, Printed], samplers: Mapping[str, Sampler]
) -> Table:
    """Bits per dimension and Fréchet distances, next to the paper's values."""
    recipe = comparison.recipe("bsi")
    columns = ["method", "seeds", "bits/dim", "paper's bits/dim"]
    against_train = "train" in results.scale.references
    if comparison.samples:
        columns += [*samplers, *(f"{name}, training set" for name in samplers if against_train), "paper's FID"]
    rows: list[tuple[Cell, ...]] = []
    for method in METHOD_NAMES:
        theirs = printed.get(method, Printed("–", "–"))
        if method in comparison.methods:
            networks = comparison.networks(method)
            row: list[Cell] = [figures.NAMES[method], len(networks), results.bits(networks), theirs.bits]
            if comparison.samples:
                # The sampler with most steps is used for one seed only.
                seeds = {name: networks[:1] if name.endswith("one seed") else networks for name in samplers}
                row += [results.distance(seeds[name], sampler) for name, sampler in samplers.items()]
                if against_train:
                    row += [results.distance(seeds[name], sampler, "train") for name, sampler in samplers.items()]
                row.append(theirs.fid)
            rows.append(tuple(row))
        elif method in printed:  # reported by its authors for this budget
            rows.append((figures.NAMES[method], None, None, theirs.bits))
    return Table(f"{DATASETS[recipe.data.name].title}, {recipe.steps} steps", tuple(columns), tuple(rows))


def claims(results: Results, comparison: Comparison, on: str = "") -> tuple[Table, tuple[Claim, ...]]:
    """The paired differences of the methods, and the claims: equal bits per dimension; FID of BSI < VDM < BFN."""
    scale, sampler = results.scale, paper_sampler(results.scale.most_steps)
    rows, bits_gaps, ordered = [], [], []
    for a, b in PAIRS:
        p, q = comparison.networks(a), comparison.networks(b)
        bits_gap, gap = results.bits_difference(p, q), results.distance_difference(p, q, sampler)
        name = f"{figures.NAMES[a]} - {figures.NAMES[b]}"
        rows.append((name, bits_gap, gap))
        bits_gaps.append((name, bits_gap))
        statement = f"{scale.metric} of {figures.NAMES[a]} below {figures.NAMES[b]}'s at {sampler.steps} steps{on}"
        ordered.append(less(statement, results.distance(p, sampler), results.distance(q, sampler), gap))
    columns = ("", "bits/dim", f"{scale.metric} at {sampler.steps}")
    table = Table(f"paired differences{on}", columns, tuple(rows))
    return table, (equal(f"Equal bits/dim{on}", bits_gaps, EQUAL_BITS), *ordered)


def draw_bits(axes: Axes, results: Results, comparison: Comparison) -> None:
    """Bits per dimension of every seed, and the mean with its error."""
    for i, method in enumerate(METHOD_NAMES):
        networks, color = comparison.networks(method), figures.COLORS[method]
        mean = results.bits(networks)
        axes.plot([i + 0.15] * len(networks), [results.bits([n]).value for n in networks], ".", color=color, alpha=0.5)
        figures.line(axes, [i], [mean], color, figures.MARKS[method])
        figures.label(axes, i, mean.value, f"{mean.value:.3f}", color, dx=-10, dy=11)
    axes.set_xticks(range(len(METHOD_NAMES)), [figures.NAMES[method] for method in METHOD_NAMES])
    axes.set_xlim(-0.8, len(METHOD_NAMES) - 0.5)
    axes.margins(y=0.25)
    axes.set_ylabel("bits per dimension")


def our_solvers(networks: Mapping[str, Recipe], scale: Scale) -> str:
    """A note with the solvers of the default sampler."""
    found = ", ".join(f"{quality(scale, network).sampler.solver} for {name}" for name, network in networks.items())
    return f"Our solver is {found}."


def report(results: Results) -> Report:
    scale, first = results.scale, results.scale.comparisons[0]
    long = f"{scale.metric} at {scale.long}, one seed"
    samplers = {f"{scale.metric} at {k}": paper_sampler(k) for k in scale.steps}
    samplers |= {} if scale.long in scale.steps else {long: paper_sampler(scale.long)}
    samplers |= {f"{scale.metric}, {OURS_NAME}": OURS}
    tables = [comparison_table(results, c, _printed(c.recipe("bsi")), samplers) for c in scale.comparisons]
    compared = [comparison for comparison in scale.comparisons if comparison.samples]
    judged: list[Claim] = []
    for comparison in compared:
        on = f" on {DATASETS[comparison.recipe('bsi').data.name].title}" if len(compared) > 1 else ""
        table, found = claims(results, comparison, on)
        tables.append(table)
        judged += found

    figure, (left, right) = figures.panels(2)
    draw_bits(left, results, first)
    left.set_title("Likelihood")
    for method in METHOD_NAMES:
        networks, color, mark = first.networks(method), figures.COLORS[method], figures.MARKS[method]
        means = [results.distance(networks, paper_sampler(k)) for k in scale.steps]
        figures.line(right, scale.steps, means, color, mark, label=figures.NAMES[method])
        if scale.long not in scale.steps:
            single = results.distance(networks[:1], paper_sampler(scale.long))
            figures.line(right, [scale.long], [single], color, mark, markerfacecolor="white")
    figures.log_axis(right, sorted({*scale.steps, scale.long}))
    right.set_xlabel("steps (hollow: one seed)")
    right.set_ylabel(scale.metric)
    right.set_title("Sample quality, the paper's sampler")
    right.legend()
    return Report(
        tables=tuple(tables),
        claims=tuple(judged),
        figure=figure,
        notes=(
            our_solvers({figures.NAMES[m]: first.recipe(m) for m in METHOD_NAMES}, scale),
            *((PAPER_NOTE,) if scale.name != "paper" else ()),
        ),
        seeds=min(len(comparison.seeds) for comparison in compared),
    )


STUDY = Study(
    name="comparison",
    paper='Tables "imagenet32" and "cifar10-bpd"',
    shows="BFN, VDM and BSI, same backbone and budget: equal bits/dim, FID ordered BSI < VDM < BFN",
    measures=measures,
    report=report,
)
