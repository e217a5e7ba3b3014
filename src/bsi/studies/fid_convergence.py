"""Figure "fid-convergence": sample quality against the number of steps, for the three methods and for our solvers.

The paper's claim: from 16 steps upwards BSI is better than BFN and VDM with the same number of steps. Ours: solvers of
second order need a fraction of the steps, for all three methods.
"""

from __future__ import annotations

from bsi.sampler import FLOW_SOLVER, NOISY_SOLVER, Sampler
from bsi.studies import figures
from bsi.studies.comparison import our_solvers
from bsi.studies.job import OURS, Measure, paper_sampler, quality
from bsi.studies.report import Cell, Estimate, Report, Results, Study, Table, all_of, less
from bsi.studies.scale import METHOD_NAMES, Scale

__all__ = ["STUDY"]

FROM = 16  # steps, in the paper's claim
ENOUGH = 64  # steps, after which solvers of second order have converged


def _samplers(scale: Scale) -> dict[str, list[Sampler]]:
    """The samplers along each curve."""
    few = [k for k in scale.convergence_steps if k <= ENOUGH]
    found = {"paper's sampler": [paper_sampler(k) for k in scale.convergence_steps]}
    return found | {
        f"{solver}, {OURS.grid}": [Sampler(k, solver, OURS.grid) for k in few] for solver in (FLOW_SOLVER, NOISY_SOLVER)
    }


def measures(scale: Scale) -> list[Measure]:
    networks = [scale.convergence.networks(method)[0] for method in METHOD_NAMES]
    curves = _samplers(scale).values()
    return [quality(scale, network, sampler) for network in networks for curve in curves for sampler in curve]


def report(results: Results) -> Report:
    scale, steps = results.scale, results.scale.convergence_steps
    networks = {method: scale.convergence.networks(method)[:1] for method in METHOD_NAMES}
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
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_xlabel("steps")
        axes.set_ylabel(scale.metric)
        axes.legend()
    return Report(
        tables=(
            Table(f"sample quality ({scale.metric}) by steps", ("sampler", *(str(k) for k in steps)), tuple(rows)),
        ),
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


STUDY = Study(
    name="fid-convergence",
    paper='Figure "fid-convergence"',
    shows="FID against steps for the three methods, and for our solvers",
    measures=measures,
    report=report,
)
