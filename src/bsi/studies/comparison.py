"""Tables "imagenet32" and "cifar10-bpd": BFN, VDM and BSI with the same backbone, budget, data order and noise.

The paper's claim: equal bits per dimension, and a FID of BSI below VDM's, below BFN's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bsi.recipe import Recipe
from bsi.studies import figures, paper_values
from bsi.studies.estimates import Estimate, bits, bits_difference, distance, distance_difference
from bsi.studies.job import Measure
from bsi.studies.report import Cell, Claim, Report, Study, Table, equal, less
from bsi.studies.scale import DATASETS, Comparison, Scale
from bsi.studies.standard import OURS, bounds, default_quality, qualities, quality, seeded, solvers_said
from bsi.studies.store import Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ORDER", "STUDY", "claims_of", "draw_bits", "gap_table", "gaps_of", "measures_of", "networks", "table_of"]

EQUAL_BITS = 0.01  # bits per dimension: about the largest difference in the paper's table
PAPERS = (
    "The paper's values beside ours are for ImageNet32, DiT-L/2 and 2M steps, its FID for 50,000 samples in 1024 steps "
    "against the test set; its errors are standard deviations over three seeds. On CIFAR-10 it trained U-Nets, and "
    "quotes VDM's and BFN's values from their authors."
)
ORDER: tuple[str, ...] = ("bfn", "vdm", "bsi")  # of the paper's tables
PAIRS: tuple[tuple[str, str], ...] = (("bsi", "vdm"), ("bsi", "bfn"), ("vdm", "bfn"))


def networks(comparison: Comparison, method: str) -> list[Recipe]:
    return seeded(comparison.recipe, method, comparison.seeds)


def measures_of(scale: Scale, comparison: Comparison, steps: tuple[int, ...], long: int | None) -> list[Measure]:
    """For each network its bound and, at each number of steps and with our default, the quality of its samples."""
    found: list[Measure] = []
    for i in range(len(comparison.seeds)):
        for method in comparison.methods:
            network = networks(comparison, method)[i]
            found += bounds(scale, [network])
            if comparison.samples:
                found += [quality(scale, network, k) for k in steps]
                found.append(default_quality(scale, network))
                found += [quality(scale, network, long)] if long is not None and i == 0 else []
    return found


def measures(scale: Scale) -> list[Measure]:
    return [
        job
        for comparison in scale.comparisons
        for job in measures_of(scale, comparison, scale.drawn.steps, scale.drawn.long)
    ]


def printed(recipe: Recipe) -> Mapping[str, paper_values.Printed]:
    """The paper's values for what is most like this."""
    if recipe.data.name == "imagenet64":
        return paper_values.IMAGENET64
    if recipe.data.name == "cifar10" and recipe.steps in paper_values.CIFAR10:
        return paper_values.CIFAR10[recipe.steps]
    return paper_values.IMAGENET32


def table_of(
    scale: Scale,
    store: Store,
    comparison: Comparison,
    steps: tuple[int, ...],
    paper: Mapping[str, paper_values.Printed],
    long: int | None = None,
) -> Table:
    """Bits per dimension and Fréchet distances with their errors, the paper's values beside them."""
    recipe = comparison.recipe("bsi")
    columns = ["method", "seeds", "bits/dim", "paper's bits/dim"]
    if comparison.samples:
        columns += [f"{scale.metric} at {k}" for k in steps]
        columns += [f"{scale.metric} at {long}, one seed"] if long is not None and long not in steps else []
        columns += [f"{scale.metric}, {OURS}", "paper's FID"]
    rows = []
    for method in ORDER:
        if method not in comparison.methods and method not in paper:
            continue
        row: list[Cell] = [figures.NAMES[method]]
        if method not in comparison.methods:  # reported by others, for this budget
            rows.append((*row, None, None, paper[method].bits))
            continue
        trained = networks(comparison, method)
        row += [len(trained), bits(store, bounds(scale, trained)), paper[method].bits if method in paper else None]
        if comparison.samples:
            row += [distance(store, qualities(scale, trained, k)) for k in steps]
            if long is not None and long not in steps:
                row.append(distance(store, qualities(scale, trained[:1], long)))
            row.append(distance(store, [default_quality(scale, network) for network in trained]))
            row.append(paper[method].fid)
        rows.append(tuple(row))
    return Table(f"{DATASETS[recipe.data.name].title}, {recipe.steps} steps", tuple(columns), tuple(rows))


@dataclass(frozen=True)
class Gap:
    """What one method has more than another, paired by seed, and for bits per dimension by image."""

    a: str
    b: str
    bits: Estimate
    distance: Estimate

    @property
    def name(self) -> str:
        return f"{figures.NAMES[self.a]} - {figures.NAMES[self.b]}"


def gaps_of(scale: Scale, store: Store, comparison: Comparison, steps: int) -> list[Gap]:
    found = []
    for a, b in PAIRS:
        p, q = networks(comparison, a), networks(comparison, b)
        bits_gap = bits_difference(store, bounds(scale, p), bounds(scale, q))
        distance_gap = distance_difference(store, qualities(scale, p, steps), qualities(scale, q, steps))
        found.append(Gap(a, b, bits_gap, distance_gap))
    return found


def _on(scale: Scale, comparison: Comparison) -> str:
    """Says which dataset where a scale has several."""
    return f" on {DATASETS[comparison.recipe('bsi').data.name].title}" if len(scale.comparisons) > 1 else ""


def gap_table(scale: Scale, comparison: Comparison, gaps: Sequence[Gap], steps: int) -> Table:
    rows = tuple((gap.name, gap.bits, gap.distance) for gap in gaps)
    return Table(f"paired differences{_on(scale, comparison)}", ("", "bits/dim", f"{scale.metric} at {steps}"), rows)


def claims_of(scale: Scale, store: Store, comparison: Comparison, gaps: Sequence[Gap], steps: int) -> tuple[Claim, ...]:
    """Equal bits per dimension; FID of BSI < VDM < BFN."""
    on = _on(scale, comparison)

    def quality_of(method: str) -> Estimate:
        return distance(store, qualities(scale, networks(comparison, method), steps))

    return (
        equal(f"Equal bits/dim{on}", [(gap.name, gap.bits) for gap in gaps], EQUAL_BITS),
        *(
            less(
                f"{scale.metric} of {figures.NAMES[gap.a]} below {figures.NAMES[gap.b]}'s at {steps} steps{on}",
                quality_of(gap.a),
                quality_of(gap.b),
                gap.distance,
            )
            for gap in gaps
        ),
    )


def draw_bits(axes: Axes, scale: Scale, store: Store, comparison: Comparison) -> None:
    """Every seed's bits per dimension, and the mean with its error."""
    for i, method in enumerate(ORDER):
        jobs, color = bounds(scale, networks(comparison, method)), figures.COLORS[method]
        each, mean = [bits(store, [job]).value for job in jobs], bits(store, jobs)
        if len(each) > 1:
            axes.plot([i + 0.18] * len(each), each, ".", color=color, alpha=0.55, markersize=7)
        axes.errorbar([i], [mean.value], yerr=[mean.error], fmt=figures.MARKS[method], color=color, capsize=3)
        figures.label(axes, i, mean.value, f"{mean.value:.3f}", color, dx=-6, side="right")
    axes.set_xticks(range(len(ORDER)), [figures.NAMES[method] for method in ORDER])
    axes.set_xlim(-0.8, len(ORDER) - 0.5)
    axes.margins(y=0.25)
    axes.set_ylabel("bits per dimension")


def _draw(scale: Scale, store: Store) -> Figure:
    comparison = scale.comparisons[0]
    figure, (left, right) = figures.panels(2, width=3.4, height=2.8)
    draw_bits(left, scale, store, comparison)
    left.set_title("Likelihood")
    steps, long, ends = scale.drawn.steps, scale.drawn.long, []
    for method in ORDER:
        trained, color, mark = networks(comparison, method), figures.COLORS[method], figures.MARKS[method]
        found = [distance(store, qualities(scale, trained, k)) for k in steps]
        figures.error_line(right, steps, found, color, mark)
        if long not in steps:
            found.append(distance(store, qualities(scale, trained[:1], long)))
            figures.error_line(right, [long], found[-1:], color, mark, hollow=True)
        ends.append(figures.Named(long, found[-1].value, figures.NAMES[method], color))
    if long not in steps:
        right.plot([], [], "o", color=figures.GREY, markerfacecolor="white", label=f"{long} steps: one seed")
        right.legend(loc="upper right")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.yaxis.set_major_formatter("{x:g}")
    right.yaxis.set_minor_formatter("{x:g}")
    ticks = sorted({*steps, long})
    right.set_xticks(ticks, [str(k) for k in ticks])
    right.set_xlabel("steps of the paper's sampler")
    right.set_ylabel(scale.metric)
    right.set_title("Sample quality")
    right.margins(x=0.15)
    figures.label_ends(right, ends)
    return figure


def elsewhere() -> Table:
    """What the paper has on other data than ImageNet32, for a scale that has none of it."""
    budgets = sorted(paper_values.CIFAR10)
    columns = ["method", "ImageNet64, 1M steps: bits/dim", "FID"]
    columns += [f"CIFAR-10, {steps // 1_000_000}M steps: bits/dim" for steps in budgets]
    rows = []
    for method in ORDER:
        large, cifar10 = paper_values.IMAGENET64[method], [paper_values.CIFAR10[steps] for steps in budgets]
        row: list[Cell] = [figures.NAMES[method], large.bits, large.fid]
        rows.append((*row, *(found[method].bits if method in found else None for found in cifar10)))
    return Table("the paper on other data", tuple(columns), tuple(rows))


def report(scale: Scale, store: Store) -> Report:
    steps, long, most = scale.drawn.steps, scale.drawn.long, max(scale.drawn.steps)
    tables = [table_of(scale, store, c, steps, printed(c.recipe("bsi")), long) for c in scale.comparisons]
    whole = {c: gaps_of(scale, store, c, most) for c in scale.comparisons if c.samples}  # all methods, all measures
    if scale.name != "paper":
        tables.append(elsewhere())
    return Report(
        tables=(*tables, *(gap_table(scale, c, gaps, most) for c, gaps in whole.items())),
        claims=tuple(claim for c, gaps in whole.items() for claim in claims_of(scale, store, c, gaps, most)),
        draw=lambda: _draw(scale, store),
        notes=(
            solvers_said(scale.comparisons[0].recipe, ORDER),
            *((PAPERS,) if scale.name != "paper" else ()),
        ),
        seeds=min(len(c.seeds) for c in whole),
    )


STUDY = Study(
    name="comparison",
    paper='Tables "imagenet32" and "cifar10-bpd"',
    shows="BFN, VDM and BSI, same backbone and budget: equal bits/dim, FID ordered BSI < VDM < BFN",
    measures=measures,
    report=report,
)
