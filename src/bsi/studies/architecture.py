"""Table "architecture": the comparison again with VDM's U-Net, so that the backbone cannot be the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bsi.studies import figures, paper_values
from bsi.studies.comparison import ORDER, claims_of, draw_bits, gap_table, gaps_of, measures_of, networks, table_of
from bsi.studies.estimates import distance
from bsi.studies.job import Measure
from bsi.studies.report import Report, Study
from bsi.studies.scale import Scale
from bsi.studies.standard import qualities, solvers_said
from bsi.studies.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STUDY"]


def measures(scale: Scale) -> list[Measure]:
    return measures_of(scale, scale.architecture, (max(scale.drawn.steps),), None)


def _draw(scale: Scale, store: Store) -> Figure:
    comparison, steps = scale.architecture, max(scale.drawn.steps)
    figure, (left, right) = figures.panels(2, width=3.2, height=2.7)
    draw_bits(left, scale, store, comparison)
    left.set_title("Likelihood, U-Net")
    for i, method in enumerate(ORDER):
        found = distance(store, qualities(scale, networks(comparison, method), steps))
        color, mark = figures.COLORS[method], figures.MARKS[method]
        right.errorbar([i], [found.value], yerr=[found.error], fmt=mark, color=color, capsize=3)
        figures.label(right, i, found.value, f"{found.value:.1f}", color, dx=8)
    right.set_xticks(range(len(ORDER)), [figures.NAMES[method] for method in ORDER])
    right.set_xlim(-0.5, len(ORDER) - 0.2)
    right.margins(y=0.25)
    right.set_ylabel(f"{scale.metric}, {steps} steps")
    right.set_title("Sample quality, U-Net")
    return figure


def report(scale: Scale, store: Store) -> Report:
    steps = max(scale.drawn.steps)
    gaps = gaps_of(scale, store, scale.architecture, steps)
    table = table_of(scale, store, scale.architecture, (steps,), paper_values.ARCHITECTURE)
    return Report(
        tables=(table, gap_table(scale, scale.architecture, gaps, steps)),
        claims=claims_of(scale, store, scale.architecture, gaps, steps),
        draw=lambda: _draw(scale, store),
        notes=(
            solvers_said(scale.architecture.recipe, ORDER),
            *(
                ("The paper's values are for ImageNet32, a U-Net of width 256 and 100k steps, over three seeds.",)
                if scale.name != "paper"
                else ()
            ),
        ),
    )


STUDY = Study(
    name="architecture",
    paper='Table "architecture"',
    shows="the same comparison with the U-Net",
    measures=measures,
    report=report,
)
