"""What more steps bring: Figures "fid-convergence" and "elbo-convergence".

The paper's claims: from 16 steps upwards BSI's samples are better than those of BFN and VDM with the same number of
steps; L_M^k falls to L_M^inf from above, down to the noise floor; and alpha_R = 2 alpha_M has a slight edge over
alpha_M. Ours: solvers of second order need a fraction of the steps, for all three methods.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from bsi.sampler import FLOW_SOLVER, NOISY_SOLVER, Sampler
from bsi.studies import figures
from bsi.studies.comparison import our_solvers
from bsi.studies.job import OURS, Bound, Measure, Reconstruction, paper_sampler, quality
from bsi.studies.outcome import (
    PRACTICAL_BITS,
    Cell,
    Claim,
    Difference,
    Estimate,
    Outcome,
    Results,
    ResultTable,
    Verdict,
    all_of,
    less,
    mean_of_images,
)
from bsi.studies.scale import METHOD_NAMES, Scale

FROM = 16  # steps, in the paper's claim
ENOUGH = 64  # steps, after which solvers of second order have converged
FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0)  # alpha_R / alpha_M


def _samplers(scale: Scale) -> dict[str, list[Sampler]]:
    """The samplers along each curve."""
    few = [k for k in scale.convergence_steps if k <= ENOUGH]
    found = {"paper's sampler": [paper_sampler(k) for k in scale.convergence_steps]}
    return found | {
        f"{solver}, {OURS.grid}": [Sampler(k, solver, OURS.grid) for k in few] for solver in (FLOW_SOLVER, NOISY_SOLVER)
    }


def quality_measures(scale: Scale) -> list[Measure]:
    curves = _samplers(scale).values()
    networks = [scale.convergence(method) for method in METHOD_NAMES]
    return [quality(scale, network, sampler) for network in networks for curve in curves for sampler in curve]


def report_quality(results: Results) -> Outcome:
    scale, steps = results.scale, results.scale.convergence_steps
    networks = {method: [scale.convergence(method)] for method in METHOD_NAMES}
    curves: dict[tuple[str, str], list[Estimate]] = {
        (method, name): [results.distance(networks[method], sampler) for sampler in samplers]
        for name, samplers in _samplers(scale).items()
        for method in METHOD_NAMES
    }
    rows: list[tuple[Cell, ...]] = [
        (f"{figures.NAMES[method]}, {name}", *found, *[None] * (len(steps) - len(found)))
        for (method, name), found in curves.items()
    ]
    paper = {method: curves[method, "paper's sampler"] for method in METHOD_NAMES}
    order = [
        less(f"{k} steps, against {figures.NAMES[other]}", paper["bsi"][i], paper[other][i])
        for i, k in enumerate(steps)
        for other in ("vdm", "bfn")
        if k >= FROM
    ]
    at, ours = steps.index(FROM), []
    for method in METHOD_NAMES:
        solver = OURS.solver_for(networks[method][0].method)
        ours.append(less(figures.NAMES[method], curves[method, f"{solver}, {OURS.grid}"][at], paper[method][at]))

    figure, (left, right) = figures.panels(2)
    for (method, name), found in curves.items():
        color, mark = figures.COLORS[method], figures.MARKS[method]
        if name == "paper's sampler":
            figures.line(left, steps, found, color, mark, label=figures.NAMES[method])
            right.axhline(found[-1].value, color=color, linewidth=1, linestyle=":")
        else:
            dashes = "-" if name.startswith(FLOW_SOLVER) else "--"
            figures.line(right, steps[: len(found)], found, color, mark, linestyle=dashes)
    for dashes, text in (("-", FLOW_SOLVER), ("--", NOISY_SOLVER), (":", f"paper's, {steps[-1]}")):
        right.plot([], [], dashes, color=figures.GREY, label=text)
    left.set_title("The paper's sampler")
    right.set_title(f"Our solvers on the grid {OURS.grid}")
    for axes, ticks in ((left, steps), (right, [k for k in steps if k <= ENOUGH])):
        figures.log_axis(axes, ticks)
        axes.set(xlabel="steps", ylabel=scale.metric, yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.legend()
    columns = ("sampler", *(str(k) for k in steps))
    return Outcome(
        tables=(ResultTable(f"sample quality ({scale.metric}) by steps", columns, tuple(rows)),),
        claims=(
            all_of(f"From {FROM} steps upwards, BSI is better than BFN and VDM at the same number", order),
            all_of(
                f"At {FROM} steps, our solver on {OURS.grid} is better than the paper's sampler, for each method", ours
            ),
        ),
        figure=figure,
        notes=(our_solvers({figures.NAMES[m]: networks[m][0] for m in METHOD_NAMES}, scale),),
        seeds=1,
    )


def _bound(scale: Scale, k: int | None) -> Bound:
    return Bound(scale.comparisons[0].networks("bsi")[0], scale.finite_levels, scale.recon, k)


def _reconstruction(scale: Scale) -> Reconstruction:
    return Reconstruction(scale.comparisons[0].networks("bsi")[0], FACTORS, scale.recon)


def bound_measures(scale: Scale) -> list[Measure]:
    return [_bound(scale, None), *(_bound(scale, k) for k in scale.ks), _reconstruction(scale)]


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


def report_bound(results: Results) -> Outcome:
    scale, ks = results.scale, results.scale.ks
    gaps = [results.finite_gap(_bound(scale, k), _bound(scale, None)) for k in ks]
    steps = [results.finite_gap(_bound(scale, b), _bound(scale, a)) for a, b in itertools.pairwise(ks)]
    total = results.finite_gap(_bound(scale, ks[-1]), _bound(scale, ks[0]))
    bits = results.read(_reconstruction(scale)).arrays["bits"]  # (factors, images)
    means = dict(zip(FACTORS, bits.mean(1).tolist(), strict=True))
    one = bits[FACTORS.index(1.0)]
    gains = {factor: mean_of_images((row - one)[None]) for factor, row in zip(FACTORS, bits, strict=True)}

    figure, (left, right) = figures.panels(2)
    color, floor = figures.COLORS["bsi"], [gap.error for gap in gaps]
    left.fill_between(ks, floor, color=figures.FAINT, linewidth=0, label="noise floor: one standard error")
    shown = [(k, gap) for k, gap in zip(ks, gaps, strict=True) if gap.value > 0]
    figures.line(left, [k for k, _ in shown], [gap for _, gap in shown], color, label="BSI")
    figures.log_axis(left, ks)
    left.set(yscale="log", xlabel="k", ylabel=r"$L_M^k - L_M^\infty$, bits/dim", title="The finite bound")
    left.legend()
    figures.log_axis(right, FACTORS)
    right.plot(FACTORS, list(means.values()), "-o", color=color)
    right.set(yscale="log", xlabel=r"$\alpha_R / \alpha_M$", ylabel=r"$L_R$, bits/dim", title="The reconstruction term")
    infinite = results.read(_bound(scale, None)).values
    return Outcome(
        tables=(
            ResultTable("gap", ("k", "L_M^k - L_M^inf, bits/dim"), tuple(zip(ks, gaps, strict=True))),
            ResultTable(
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
