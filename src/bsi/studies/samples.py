"""Figure "samples": images drawn by the three methods from the same noise, next to images of the dataset."""

from __future__ import annotations

import numpy as np

from bsi.data.store import open_dataset
from bsi.pictures import grid
from bsi.studies import figures
from bsi.studies.job import Measure, Quality, paper_sampler, quality
from bsi.studies.report import Report, Results, Study, Table
from bsi.studies.scale import METHOD_NAMES, Scale

__all__ = ["STUDY"]

ROWS, COLUMNS = 8, 4


def _job(scale: Scale, method: str) -> Quality:
    """The first samples are kept with their distance."""
    return quality(scale, scale.comparisons[0].networks(method)[0], paper_sampler(scale.most_steps))


def measures(scale: Scale) -> list[Measure]:
    return [_job(scale, method) for method in METHOD_NAMES]


def report(results: Results) -> Report:
    scale, num = results.scale, ROWS * COLUMNS
    comparison, steps = scale.comparisons[0], scale.most_steps
    dataset = open_dataset(comparison.recipe("bsi").data.name)
    assert dataset.bins is not None
    test = dataset.split("test")
    shown = {"data": np.asarray(test)[np.arange(num) * len(test) // num]}
    shown |= {figures.NAMES[m]: results.read(_job(scale, m)).arrays["images"][:num] for m in METHOD_NAMES}
    figure, axes = figures.panels(len(shown), width=1.75, height=3.4)
    for panel, (name, indices) in zip(axes, shown.items(), strict=True):
        panel.imshow(grid(dataset.bins.values(indices), COLUMNS, towards=1), interpolation="nearest")
        panel.set_title(name, loc="center")
        panel.set_axis_off()
    rows = [
        (figures.NAMES[m], results.distance(comparison.networks(m)[:1], paper_sampler(steps))) for m in METHOD_NAMES
    ]
    return Report(
        tables=(Table("samples", ("method", f"{scale.metric} at {steps}"), tuple(rows)),),
        claims=(),
        figure=figure,
        notes=(f"{steps} steps of the paper's sampler; samples 0 to {num - 1} of seed 0, not selected.",),
    )


STUDY = Study(
    name="samples",
    paper='Figure "samples"',
    shows="samples of the three methods next to data",
    measures=measures,
    report=report,
)
