"""Figure "fid-convergence": sample quality against the number of steps, for the three methods and for our solvers.

The paper's claim: from 16 steps upwards BSI is better than BFN and VDM at the same number of steps. Ours: solvers of
second order need a fraction of the steps, for all three methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bsi.sampler import FLOW_SOLVER, NOISY_SOLVER, Sampler
from bsi.studies import figures
from bsi.studies.comparison import ORDER, networks
from bsi.studies.estimates import distance
from bsi.studies.job import Measure, Quality
from bsi.studies.report import Cell, Report, Study, Table, all_of, less
from bsi.studies.scale import Scale
from bsi.studies.standard import our_solver, quality, solvers_said
from bsi.studies.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STUDY"]

OURS = tuple((method, solver) for method in ORDER for solver in (FLOW_SOLVER, NOISY_SOLVER))
FROM = 16  # steps, in the paper's claim


def _paper_line(scale: Scale, method: str) -> list[Quality]:
    network = networks(scale.convergence, method)[0]
    return [quality(scale, network, k) for k in scale.drawn.convergence]


def _our_steps(scale: Scale) -> list[int]:
    """The solvers of second order have converged long before the paper's has."""
    return [k for k in scale.drawn.convergence if k <= 64]


def _our_line(scale: Scale, method: str, solver: str) -> list[Quality]:
    network = networks(scale.convergence, method)[0]
    return [quality(scale, network, k, solver, Sampler.grid) for k in _our_steps(scale)]


def measures(scale: Scale) -> list[Measure]:
    found: list[Measure] = [job for method in ORDER for job in _paper_line(scale, method)]
    return found + [job for method, solver in OURS for job in _our_line(scale, method, solver)]


def _draw(scale: Scale, store: Store) -> Figure:
    figure, (left, right) = figures.panels(2, width=3.5, height=2.9)
    steps, ours = scale.drawn.convergence, _our_steps(scale)
    ends = []
    for method in ORDER:
        found, color = [distance(store, [job]) for job in _paper_line(scale, method)], figures.COLORS[method]
        figures.error_line(left, steps, found, color, figures.MARKS[method])
        right.axhline(found[-1].value, color=color, linewidth=1, linestyle=":")
        ends.append(figures.Named(steps[-1], found[-1].value, figures.NAMES[method], color))
    lines = {FLOW_SOLVER: "-", NOISY_SOLVER: "--"}
    for i, (method, solver) in enumerate(OURS):
        found, color = [distance(store, [job]) for job in _our_line(scale, method, solver)], figures.COLORS[method]
        beside = [k * 1.025 ** (i - len(OURS) / 2) for k in ours]  # bars do not hide each other
        figures.error_line(right, beside, found, color, figures.MARKS[method], lines[solver])
    for line, words in (*((lines[solver], solver) for solver in lines), (":", f"paper's, {steps[-1]}")):
        right.plot([], [], line, color=figures.GREY, label=words)
    right.legend(loc="upper right", ncols=3, columnspacing=1.2, handlelength=1.8)
    right.margins(y=0.2)  # room for the legend
    left.set_title("The paper's sampler")
    right.set_title(f"Our solvers on the grid {Sampler.grid}")
    for axes, ticks in ((left, steps), (right, ours)):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [str(k) for k in ticks])
        axes.set_xlabel("steps")
        axes.set_ylabel(scale.metric)
        axes.margins(x=0.17)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    figures.label_ends(left, ends)
    return figure


def report(scale: Scale, store: Store) -> Report:
    steps = scale.drawn.convergence
    lines = {method: [distance(store, [job]) for job in _paper_line(scale, method)] for method in ORDER}
    rows: list[tuple[Cell, ...]] = [(f"{figures.NAMES[method]}, paper's sampler", *lines[method]) for method in ORDER]
    ours = {pair: [distance(store, [job]) for job in _our_line(scale, *pair)] for pair in OURS}
    missing = len(steps) - len(_our_steps(scale))
    rows += [
        (f"{figures.NAMES[method]}, {solver}, {Sampler.grid}", *found, *[None] * missing)
        for (method, solver), found in ours.items()
    ]
    compared = [
        less(f"{k} steps, against {figures.NAMES[other]}", lines["bsi"][i], lines[other][i])
        for i, k in enumerate(steps)
        for other in ("vdm", "bfn")
        if k >= FROM
    ]
    at, chosen = steps.index(FROM), {method: our_solver(scale.convergence.recipe(method)) for method in ORDER}
    return Report(
        tables=(
            Table(f"sample quality ({scale.metric}) by steps", ("sampler", *(str(k) for k in steps)), tuple(rows)),
        ),
        claims=(
            all_of(f"From {FROM} steps upwards, BSI is better than BFN and VDM at the same number", compared),
            all_of(
                f"At {FROM} steps, our solver on {Sampler.grid} is better than the paper's sampler, for each method",
                [less(figures.NAMES[method], ours[method, chosen[method]][at], lines[method][at]) for method in ORDER],
            ),
        ),
        draw=lambda: _draw(scale, store),
        notes=(solvers_said(scale.convergence.recipe, ORDER),),
    )


STUDY = Study(
    name="fid-convergence",
    paper='Figure "fid-convergence"',
    shows="FID against steps for the three methods, and for our solvers",
    measures=measures,
    report=report,
)
