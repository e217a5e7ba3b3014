"""BFN, VDM and BSI with the same backbone, budget, data order and noise.

comparison        Tables "imagenet32" and "cifar10-bpd". The paper's claim: equal bits per dimension, and a FID of BSI
                  below VDM's, below BFN's.
architecture      Table "architecture": the same with another backbone, in the paper VDM's U-Net.
samples           Figure "samples".
fid-convergence   Figure "fid-convergence". The paper's claim: from 16 steps upwards BSI's samples are better than those
                  of BFN and VDM with the same number of steps. Ours: solvers of second order need a fraction of the
                  steps, for all three methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from bsi.data.store import open_dataset
from bsi.pictures import grid
from bsi.recipe import Recipe
from bsi.sampler import FLOW_SOLVER, NOISY_SOLVER, Sampler
from bsi.studies import outcome
from bsi.studies.measure import OURS, bound_and_quality, paper_sampler, quality, samplers_of
from bsi.studies.outcome import COLORS, Claim, Estimate, Outcome, Results, Row, StudySteps, study
from bsi.studies.scale import DATASETS, METHOD_NAMES, Comparison, Scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EQUAL_BITS = 0.01  # bits per dimension: about the largest difference in the paper's table
PAIRS = (("bsi", "vdm"), ("bsi", "bfn"), ("vdm", "bfn"))

# The paper's bits per dimension and FID, with standard deviations over three seeds.
Printed = Mapping[str, tuple[str, str]]
IMAGENET32 = {
    "bfn": ("3.448 ± 0.005", "11.0 ± 0.1"),
    "vdm": ("3.452 ± 0.006", "9.9 ± 0.5"),
    "bsi": ("3.448 ± 0.006", "8.9 ± 0.1"),
}
IMAGENET64 = {
    "bfn": ("3.222 ± 0.006", "38.2 ± 0.8"),
    "vdm": ("3.228 ± 0.006", "35.2 ± 0.7"),
    "bsi": ("3.218 ± 0.004", "30.1 ± 0.4"),
}
UNET = {
    "bfn": ("3.505 ± 0.001", "14.2 ± 0.4"),
    "vdm": ("3.527 ± 0.009", "15.4 ± 1.5"),
    "bsi": ("3.510 ± 0.009", "12.8 ± 0.6"),
}
# CIFAR-10 by training steps, without FID. The values of VDM and BFN are those of their authors.
CIFAR10 = {
    10_000_000: {"vdm": ("2.65", ""), "bsi": ("2.64", "")},
    5_000_000: {"bfn": ("2.66", ""), "bsi": ("2.65", "")},
}
PAPER_NOTE = (
    "The paper's values are for ImageNet32, DiT-L/2 and 2M steps; its FID is for 50,000 samples in 1024 steps against "
    "the test set; its errors are standard deviations over three seeds. On CIFAR-10 the paper trained U-Nets: BSI has "
    "2.65 bits/dim after 5M steps (BFN 2.66) and 2.64 after 10M (VDM 2.65)."
)
UNET_NOTE = "The paper's values are for ImageNet32, a U-Net of width 256 and 100k steps, over three seeds."


def our_solvers(*recipes: Recipe) -> str:
    """A note with the solver of the default sampler for each method."""
    found = (f"{OURS.solver_for(recipe.method)} for {type(recipe.method).__name__}" for recipe in recipes)
    return f"Our solver is {', '.join(found)}."


def comparison_table(
    results: Results, compared: Comparison, printed: Printed, samplers: Mapping[str, Sampler]
) -> list[Row]:
    """Bits per dimension and Fréchet distances, next to the paper's values."""
    rows, samplers = list[Row](), samplers if compared.samples else {}
    for method, (bits, _) in printed.items():
        if method not in compared.methods:  # reported by its authors for this budget
            rows.append({"method": method.upper(), "paper's bits/dim": bits})
    for method in compared.methods:
        networks, (bits, fid) = compared.networks(method), printed.get(method, ("–", "–"))
        row: Row = {"method": method.upper(), "bits/dim": None, "paper's bits/dim": bits}
        row |= results.row(networks, samplers)
        if "train" in results.scale.references:
            row |= {f"{n}, training set": results.distance(networks, how, "train") for n, how in samplers.items()}
        rows.append(row | ({"paper's FID": fid} if samplers else {}))
    return rows


def claims_of(results: Results, compared: Comparison, on: str = "") -> list[Claim]:
    """The claims: equal bits per dimension; FID of BSI < VDM < BFN."""
    sampler, bits, ordered = paper_sampler(results.scale.most_steps), dict[str, Estimate](), []
    for a, b in PAIRS:
        p, q = compared.networks(a), compared.networks(b)
        bits[f"{a.upper()} - {b.upper()}"] = results.bits_difference(p, q)
        statement = f"{results.scale.metric} of {a.upper()} below {b.upper()}'s at {sampler.steps} steps{on}"
        ordered.append(results.less_distance(statement, p, q, sampler))
    return [outcome.equal(f"Equal bits/dim{on}", bits, EQUAL_BITS), *ordered]


def _draw(results: Results, compared: Comparison, steps: tuple[int, ...], note: str) -> Figure:
    """Bits per dimension of every seed with their mean, and the distances by steps of the paper's sampler."""
    figure, (left, right) = outcome.panels(2)
    found = {}
    for i, method in enumerate(METHOD_NAMES):
        networks, color = compared.networks(method), COLORS[method]
        mean = results.bits(networks)
        left.plot([i + 0.15] * len(networks), [results.bits([n]).value for n in networks], ".", color=color, alpha=0.5)
        left.errorbar(i, mean.value, mean.error, fmt="o", color=color, capsize=2)
        found[method.upper()] = [results.distance(networks, paper_sampler(k)) for k in steps]
    left.set(ylabel="bits per dimension", title=f"Likelihood{note}")
    left.set_xticks(range(len(found)), list(found))
    title = f"Sample quality, the paper's sampler{note}"
    outcome.curves(right, steps, found, xlabel="steps", ylabel=results.scale.metric, title=title)
    return figure


def _compare(
    scale: Scale, compared: list[Comparison], steps: tuple[int, ...], note: str, drawn: str = ""
) -> StudySteps:
    """The study of these comparisons. All are in the tables, those with samples in the claims, the first is drawn."""
    samplers, first, sampled = samplers_of(scale, *steps), compared[0], [each for each in compared if each.samples]
    results = yield [
        job
        for each in compared
        for job in bound_and_quality(scale, samplers if each.samples else {}, *map(each.networks, each.methods))
    ]
    tables, claims = dict[str, list[Row]](), list[Claim]()
    for each in compared:
        recipe = each.recipe("bsi")
        title = DATASETS[recipe.data.name].title
        printed = IMAGENET64 if recipe.data.name == "imagenet64" else IMAGENET32  # of the most similar network
        if recipe.data.name == "cifar10":
            printed = CIFAR10.get(recipe.steps, printed)
        printed = UNET if first is scale.architecture else printed
        tables[f"{title}, {recipe.steps} steps"] = comparison_table(results, each, printed, samplers)
        if each.samples:
            claims += claims_of(results, each, f" on {title}" if len(sampled) > 1 else "")
    notes = [our_solvers(*map(first.recipe, METHOD_NAMES)), *([] if scale.name == "paper" else [note])]
    return Outcome(tables, claims, _draw(results, first, steps, drawn), notes)


@study(
    'Tables "imagenet32" and "cifar10-bpd"',
    "BFN, VDM and BSI, same backbone and budget: equal bits/dim, FID ordered BSI < VDM < BFN",
)
def comparison(scale: Scale) -> StudySteps:
    return (yield from _compare(scale, [*scale.comparisons], scale.steps, PAPER_NOTE))


@study('Table "architecture"', "the same comparison with another backbone, in the paper the U-Net")
def architecture(scale: Scale) -> StudySteps:
    return (yield from _compare(scale, [scale.architecture], (scale.most_steps,), UNET_NOTE, ", the other backbone"))


ROWS, COLUMNS = 8, 4


@study('Figure "samples"', "samples of the three methods next to data")
def samples(scale: Scale) -> StudySteps:
    """The first samples are kept with their distance."""
    first, sampler, num = scale.comparisons[0], paper_sampler(scale.most_steps), ROWS * COLUMNS
    jobs = {method: quality(scale, first.networks(method)[0], sampler) for method in METHOD_NAMES}
    results = yield list(jobs.values())

    dataset = open_dataset(first.recipe("bsi").data.name)
    assert dataset.bins is not None
    test = dataset.split("test")
    shown, rows = {"data": np.asarray(test)[np.arange(num) * len(test) // num]}, []
    for method, job in jobs.items():
        shown[method.upper()] = results.read(job).arrays["images"][:num]
        distance = results.distance([job.network], sampler)
        rows.append({"method": method.upper(), f"{scale.metric} at {sampler.steps}": distance})
    figure, axes = outcome.panels(len(shown), width=1.75, height=3.4)
    for panel, (name, indices) in zip(axes, shown.items(), strict=True):
        panel.imshow(grid(dataset.bins.values(indices), COLUMNS, towards=1), interpolation="nearest")
        panel.set_title(name, loc="center")
        panel.set_axis_off()
    note = f"{sampler.steps} steps of the paper's sampler; samples 0 to {num - 1} of seed 0, not selected."
    return Outcome({"samples": rows}, [], figure, [note])


FROM = 16  # steps, in the paper's claim
ENOUGH = 64  # steps, after which solvers of second order have converged
PAPERS = "paper's sampler"


@study('Figure "fid-convergence"', "FID against steps for the three methods, and for our solvers")
def fid_convergence(scale: Scale) -> StudySteps:
    steps = [k for k in scale.ks if k <= scale.most_steps]
    networks = {method.upper(): scale.convergence(method) for method in METHOD_NAMES}
    samplers = {PAPERS: [paper_sampler(k) for k in steps]}
    for solver in (FLOW_SOLVER, NOISY_SOLVER):
        samplers[f"{solver}, {OURS.grid}"] = [Sampler(k, solver, OURS.grid) for k in steps if k <= ENOUGH]
    every = [sampler for curve in samplers.values() for sampler in curve]
    results = yield [quality(scale, network, sampler) for network in networks.values() for sampler in every]

    found = {
        curve: {name: [results.distance([network], how) for how in along] for name, network in networks.items()}
        for curve, along in samplers.items()
    }
    figure, axes = outcome.panels(len(found), width=2.8)
    for panel, (curve, each) in zip(axes, found.items(), strict=True):
        shown = steps[: len(each["BSI"])]
        outcome.curves(panel, shown, each, xlabel="steps", ylabel=scale.metric, yscale="log", title=curve)
    named = {f"{name}, {curve}": estimates for curve, each in found.items() for name, estimates in each.items()}
    paper, at = found[PAPERS], steps.index(FROM)
    order = [paper["BSI"][i] - paper[other][i] for i, k in enumerate(steps) for other in ("VDM", "BFN") if k >= FROM]
    ours = {name: f"{OURS.solver_for(network.method)}, {OURS.grid}" for name, network in networks.items()}
    better = f"At {FROM} steps, our solver on {OURS.grid} is better than the paper's sampler, for each method"
    claims = [
        outcome.all_less(f"From {FROM} steps upwards, BSI is better than BFN and VDM at the same number", order),
        outcome.all_less(better, (found[curve][name][at] - paper[name][at] for name, curve in ours.items())),
    ]
    tables = {f"sample quality ({scale.metric}) by steps": outcome.table("sampler", steps, named)}
    return Outcome(tables, claims, figure, [our_solvers(*networks.values())])
