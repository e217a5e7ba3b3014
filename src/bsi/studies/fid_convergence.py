"""Figure "fid-convergence": sample quality against the number of steps, for the three methods and for our solvers.

The paper's claim: from 16 steps upwards BSI is better than BFN and VDM at the same number of steps. Ours: solvers of
second order need a fraction of the steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bsi.defaults import GRID, SOLVER
from bsi.studies import figures
from bsi.studies.comparison import ORDER, networks
from bsi.studies.estimates import distance
from bsi.studies.job import Measure, Quality
from bsi.studies.report import Cell, Report, Study, Table, all_of, less
from bsi.studies.scale import Scale
from bsi.studies.standard import quality
from bsi.studies.store import Store
from bsi.training.method_specs import MethodName

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STUDY"]

# Our default, and its stochastic relative.
SOLVERS = ((SOLVER, GRID), ("sde2", GRID))
FROM = 16  # steps, in the paper's claim


def _paper_line(scale: Scale, method: MethodName) -> list[Quality]:
    network = networks(scale.comparisons[0], method)[0]
    return [quality(scale, network, k) for k in scale.drawn.convergence]


def _our_steps(scale: Scale) -> list[int]:
    """The solvers of second order have converged long before the paper's has."""
    return [k for k in scale.drawn.convergence if k <= 64]


def _our_line(scale: Scale, solver: str, grid: str) -> list[Quality]:
    network = networks(scale.comparisons[0], "bsi")[0]
    return [quality(scale, network, k, solver, grid) for k in _our_steps(scale)]


def measures(scale: Scale) -> list[Measure]:
    found: list[Measure] = [job for method in ORDER for job in _paper_line(scale, method)]
    return found + [job for solver, grid in SOLVERS for job in _our_line(scale, solver, grid)]


def _draw(scale: Scale, store: Store) -> Figure:
    figure, (left, right) = figures.panels(2, width=3.5, height=2.9)
    steps, ends = scale.drawn.convergence, []
    for method in ORDER:
        found, colour = [distance(store, [job]) for job in _paper_line(scale, method)], figures.COLOURS[method]
        figures.error_line(left, steps, [e.value for e in found], [e.error for e in found], colour)
        ends.append(figures.End(steps[-1], found[-1].value, figures.NAMES[method], colour))
    left.set_title("The paper's sampler")
    ours = _our_steps(scale)
    base = [distance(store, [job]) for job in _paper_line(scale, "bsi")]
    figures.error_line(right, steps, [e.value for e in base], [e.error for e in base], figures.COLOURS["bsi"])
    figures.label(right, steps[-1], base[-1].value, "paper's", figures.COLOURS["bsi"])
    for (solver, grid), colour in zip(SOLVERS, figures.PALETTE[3:], strict=False):
        found = [distance(store, [job]) for job in _our_line(scale, solver, grid)]
        figures.error_line(right, ours, [e.value for e in found], [e.error for e in found], colour, "--")
        right.plot([], [], "--o", color=colour, label=f"{solver}, {grid}")
    right.legend(loc="upper right")
    right.set_title("BSI, with our solvers")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(steps, [str(k) for k in steps])
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
    ours = {pair: [distance(store, [job]) for job in _our_line(scale, *pair)] for pair in SOLVERS}
    missing = len(steps) - len(_our_steps(scale))
    rows += [(f"BSI, {solver}, {grid}", *ours[solver, grid], *[None] * missing) for solver, grid in SOLVERS]
    compared = [
        less(f"{k} steps, against {figures.NAMES[other]}", lines["bsi"][i], lines[other][i])
        for i, k in enumerate(steps)
        for other in ("vdm", "bfn")
        if k >= FROM
    ]
    at = steps.index(FROM)
    return Report(
        tables=(Table(f"{scale.metric} by steps", ("sampler", *(str(k) for k in steps)), tuple(rows)),),
        claims=(
            all_of(f"From {FROM} steps upwards, BSI is better than BFN and VDM at the same number", compared),
            less(
                f"At {FROM} steps, {SOLVER} on {GRID} is better than the paper's sampler",
                ours[SOLVERS[0]][at],
                lines["bsi"][at],
            ),
        ),
        draw=lambda: _draw(scale, store),
    )


STUDY = Study(
    name="fid-convergence",
    paper='Figure "fid-convergence"',
    shows="FID against steps for the three methods, and for our solvers",
    measures=measures,
    report=report,
)
