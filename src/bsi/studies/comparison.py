"""BFN, VDM and BSI with the same backbone, budget, data order and noise: Tables "imagenet32", "cifar10-bpd" and
"architecture", and Figure "samples".

The paper's claim: equal bits per dimension, and a FID of BSI below VDM's, below BFN's, with a DiT and with VDM's U-Net.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from bsi.data.store import open_dataset
from bsi.pictures import grid
from bsi.recipe import Recipe
from bsi.sampler import Sampler
from bsi.studies import figures
from bsi.studies.job import OURS, OURS_NAME, Measure, Quality, measures_of, paper_sampler, quality
from bsi.studies.outcome import Cell, Claim, Outcome, Results, ResultTable, equal, less
from bsi.studies.scale import DATASETS, METHOD_NAMES, Comparison, Scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EQUAL_BITS = 0.01  # bits per dimension: about the largest difference in the paper's table
PAIRS = (("bsi", "vdm"), ("bsi", "bfn"), ("vdm", "bfn"))

# The paper's bits per dimension and FID, with standard deviations over three seeds.
Printed = Mapping[str, tuple[str, str | None]]
IMAGENET32: Printed = {
    "bfn": ("3.448 ± 0.005", "11.0 ± 0.1"),
    "vdm": ("3.452 ± 0.006", "9.9 ± 0.5"),
    "bsi": ("3.448 ± 0.006", "8.9 ± 0.1"),
}
IMAGENET64: Printed = {
    "bfn": ("3.222 ± 0.006", "38.2 ± 0.8"),
    "vdm": ("3.228 ± 0.006", "35.2 ± 0.7"),
    "bsi": ("3.218 ± 0.004", "30.1 ± 0.4"),
}
UNET: Printed = {
    "bfn": ("3.505 ± 0.001", "14.2 ± 0.4"),
    "vdm": ("3.527 ± 0.009", "15.4 ± 1.5"),
    "bsi": ("3.510 ± 0.009", "12.8 ± 0.6"),
}
# CIFAR-10 by training steps. The values of VDM and BFN are those of their authors.
CIFAR10: Mapping[int, Printed] = {
    10_000_000: {"vdm": ("2.65", None), "bsi": ("2.64", None)},
    5_000_000: {"bfn": ("2.66", None), "bsi": ("2.65", None)},
}
PAPER_NOTE = (
    "The paper's values are for ImageNet32, DiT-L/2 and 2M steps; its FID is for 50,000 samples in 1024 steps against "
    "the test set; its errors are standard deviations over three seeds. On CIFAR-10 the paper trained U-Nets: BSI has "
    "2.65 bits/dim after 5M steps (BFN 2.66) and 2.64 after 10M (VDM 2.65)."
)
UNET_NOTE = "The paper's values are for ImageNet32, a U-Net of width 256 and 100k steps, over three seeds."


def comparison_measures(scale: Scale) -> list[Measure]:
    found: list[Measure] = []
    for comparison in scale.comparisons:
        samplers = [*map(paper_sampler, scale.steps), OURS] if comparison.samples else []
        for method in comparison.methods:
            found += measures_of(scale, comparison.networks(method), *samplers)
    return found


def architecture_measures(scale: Scale) -> list[Measure]:
    samplers, comparison = (paper_sampler(scale.most_steps), OURS), scale.architecture
    return [job for m in METHOD_NAMES for job in measures_of(scale, comparison.networks(m), *samplers)]


def _printed(recipe: Recipe) -> Printed:
    """The paper's values for the most similar network."""
    if recipe.data.name == "imagenet64":
        return IMAGENET64
    return CIFAR10[recipe.steps] if recipe.data.name == "cifar10" and recipe.steps in CIFAR10 else IMAGENET32


def comparison_table(
    results: Results, comparison: Comparison, printed: Printed, samplers: Mapping[str, Sampler]
) -> ResultTable:
    """Bits per dimension and Fréchet distances, next to the paper's values."""
    recipe, samplers = comparison.recipe("bsi"), samplers if comparison.samples else {}
    networks = {method: comparison.networks(method) for method in comparison.methods}
    named = {figures.NAMES[method]: found for method, found in networks.items()}
    table = results.table(f"{DATASETS[recipe.data.name].title}, {recipe.steps} steps", "method", named, samplers)
    if "train" in results.scale.references:
        against = {
            f"{name}, training set": [results.distance(found, sampler, "train") for found in networks.values()]
            for name, sampler in samplers.items()
        }
        table = table.with_columns(len(table.columns), against) if against else table
    theirs = [printed.get(method, ("–", None)) for method in networks]
    table = table.with_columns(2, {"paper's bits/dim": [bits for bits, _ in theirs]})
    if samplers:
        table = table.with_columns(len(table.columns), {"paper's FID": [fid for _, fid in theirs]})
    others: list[tuple[Cell, ...]] = [  # reported by their authors for this budget
        (figures.NAMES[method], None, bits, *[None] * (len(table.columns) - 3))
        for method, (bits, _) in printed.items()
        if method not in networks
    ]
    return ResultTable(table.name, table.columns, (*others, *table.rows))


def differences(results: Results, comparison: Comparison, on: str = "") -> tuple[ResultTable, tuple[Claim, ...]]:
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
    table = ResultTable(f"paired differences{on}", columns, tuple(rows))
    return table, (equal(f"Equal bits/dim{on}", bits_gaps, EQUAL_BITS), *ordered)


def our_solvers(networks: Mapping[str, Recipe], scale: Scale) -> str:
    """A note with the solvers of the default sampler."""
    found = ", ".join(f"{quality(scale, network).sampler.solver} for {name}" for name, network in networks.items())
    return f"Our solver is {found}."


def _draw(results: Results, comparison: Comparison, steps: tuple[int, ...], note: str) -> Figure:
    """Bits per dimension of every seed with their mean, and the distances by steps of the paper's sampler."""
    figure, (left, right) = figures.panels(2)
    for i, method in enumerate(METHOD_NAMES):
        networks, color, mark = comparison.networks(method), figures.COLORS[method], figures.MARKS[method]
        mean = results.bits(networks)
        left.plot([i + 0.15] * len(networks), [results.bits([n]).value for n in networks], ".", color=color, alpha=0.5)
        figures.line(left, [i], [mean], color, mark)
        figures.label(left, i, mean.value, f"{mean.value:.3f}", color, dx=-10, dy=11)
        means = [results.distance(networks, paper_sampler(k)) for k in steps]
        figures.line(right, steps, means, color, mark, label=figures.NAMES[method])
    left.set(xlim=(-0.8, len(METHOD_NAMES) - 0.5), ylabel="bits per dimension", title=f"Likelihood{note}")
    left.set_xticks(range(len(METHOD_NAMES)), [figures.NAMES[method] for method in METHOD_NAMES])
    left.margins(y=0.25)
    figures.log_axis(right, steps)
    right.set(xlabel="steps", ylabel=results.scale.metric, title=f"Sample quality, the paper's sampler{note}")
    right.legend()
    return figure


def report_comparison(results: Results) -> Outcome:
    scale, first = results.scale, results.scale.comparisons[0]
    samplers = {f"{scale.metric} at {k}": paper_sampler(k) for k in scale.steps}
    samplers |= {f"{scale.metric}, {OURS_NAME}": OURS}
    tables = [comparison_table(results, c, _printed(c.recipe("bsi")), samplers) for c in scale.comparisons]
    compared = [comparison for comparison in scale.comparisons if comparison.samples]
    judged: list[Claim] = []
    for comparison in compared:
        on = f" on {DATASETS[comparison.recipe('bsi').data.name].title}" if len(compared) > 1 else ""
        table, found = differences(results, comparison, on)
        tables.append(table)
        judged += found
    notes = (our_solvers({figures.NAMES[m]: first.recipe(m) for m in METHOD_NAMES}, scale),)
    return Outcome(
        tables=tuple(tables),
        claims=tuple(judged),
        figure=_draw(results, first, scale.steps, ""),
        notes=notes if scale.name == "paper" else (*notes, PAPER_NOTE),
        seeds=min(len(comparison.seeds) for comparison in compared),
    )


def report_architecture(results: Results) -> Outcome:
    scale, comparison = results.scale, results.scale.architecture
    sampler = paper_sampler(scale.most_steps)
    samplers = {f"{scale.metric} at {sampler.steps}": sampler, f"{scale.metric}, {OURS_NAME}": OURS}
    table, judged = differences(results, comparison)
    notes = (our_solvers({figures.NAMES[m]: comparison.recipe(m) for m in METHOD_NAMES}, scale),)
    return Outcome(
        tables=(comparison_table(results, comparison, UNET, samplers), table),
        claims=judged,
        figure=_draw(results, comparison, (scale.most_steps,), ", the other backbone"),
        notes=notes if scale.name == "paper" else (*notes, UNET_NOTE),
        seeds=len(comparison.seeds),
    )


ROWS, COLUMNS = 8, 4


def _shown(scale: Scale, method: str) -> Quality:
    """The first samples are kept with their distance."""
    return quality(scale, scale.comparisons[0].networks(method)[0], paper_sampler(scale.most_steps))


def samples_measures(scale: Scale) -> list[Measure]:
    return [_shown(scale, method) for method in METHOD_NAMES]


def report_samples(results: Results) -> Outcome:
    scale, num = results.scale, ROWS * COLUMNS
    comparison, steps = scale.comparisons[0], scale.most_steps
    dataset = open_dataset(comparison.recipe("bsi").data.name)
    assert dataset.bins is not None
    test = dataset.split("test")
    shown = {"data": np.asarray(test)[np.arange(num) * len(test) // num]}
    shown |= {figures.NAMES[m]: results.read(_shown(scale, m)).arrays["images"][:num] for m in METHOD_NAMES}
    figure, panels = figures.panels(len(shown), width=1.75, height=3.4)
    for panel, (name, indices) in zip(panels, shown.items(), strict=True):
        panel.imshow(grid(dataset.bins.values(indices), COLUMNS, towards=1), interpolation="nearest")
        panel.set_title(name, loc="center")
        panel.set_axis_off()
    rows = [
        (figures.NAMES[m], results.distance(comparison.networks(m)[:1], paper_sampler(steps))) for m in METHOD_NAMES
    ]
    return Outcome(
        tables=(ResultTable("samples", ("method", f"{scale.metric} at {steps}"), tuple(rows)),),
        claims=(),
        figure=figure,
        notes=(f"{steps} steps of the paper's sampler; samples 0 to {num - 1} of seed 0, not selected.",),
    )
