"""Table "architecture": the comparison again with another backbone, to exclude an effect of the backbone.

The paper, and all scales but medium, compare DiTs first and VDM's U-Net here.
"""

from __future__ import annotations

from bsi.studies import figures
from bsi.studies.comparison import ARCHITECTURE, claims, comparison_table, draw_bits, our_solvers
from bsi.studies.job import OURS, OURS_NAME, Measure, measures_of, paper_sampler
from bsi.studies.report import Report, Results, Study
from bsi.studies.scale import METHOD_NAMES, Scale

__all__ = ["STUDY"]


def measures(scale: Scale) -> list[Measure]:
    samplers, comparison = (paper_sampler(scale.most_steps), OURS), scale.architecture
    return [job for m in METHOD_NAMES for job in measures_of(scale, comparison.networks(m), *samplers)]


def report(results: Results) -> Report:
    scale, comparison = results.scale, results.scale.architecture
    sampler = paper_sampler(scale.most_steps)
    samplers = {f"{scale.metric} at {sampler.steps}": sampler, f"{scale.metric}, {OURS_NAME}": OURS}
    differences, judged = claims(results, comparison)

    figure, (left, right) = figures.panels(2)
    draw_bits(left, results, comparison)
    left.set_title("Likelihood, the other backbone")
    for i, method in enumerate(METHOD_NAMES):
        found = results.distance(comparison.networks(method), sampler)
        figures.line(right, [i], [found], figures.COLORS[method], figures.MARKS[method])
        figures.label(right, i, found.value, f"{found.value:.1f}", figures.COLORS[method], dx=8)
    right.set_xticks(range(len(METHOD_NAMES)), [figures.NAMES[method] for method in METHOD_NAMES])
    right.set_xlim(-0.5, len(METHOD_NAMES) - 0.2)
    right.margins(y=0.25)
    right.set_ylabel(f"{scale.metric}, {sampler.steps} steps")
    right.set_title("Sample quality, the other backbone")
    paper = "The paper's values are for ImageNet32, a U-Net of width 256 and 100k steps, over three seeds."
    return Report(
        tables=(comparison_table(results, comparison, ARCHITECTURE, samplers), differences),
        claims=judged,
        figure=figure,
        notes=(
            our_solvers({figures.NAMES[m]: comparison.recipe(m) for m in METHOD_NAMES}, scale),
            *((paper,) if scale.name != "paper" else ()),
        ),
        seeds=len(comparison.seeds),
    )


STUDY = Study(
    name="architecture",
    paper='Table "architecture"',
    shows="the same comparison with another backbone, in the paper the U-Net",
    measures=measures,
    report=report,
)
