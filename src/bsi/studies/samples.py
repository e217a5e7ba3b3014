"""Figure "samples": images drawn from the three methods beside images of the dataset, from the same noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bsi.data.store import open_dataset
from bsi.studies import figures
from bsi.studies.comparison import networks
from bsi.studies.estimates import distance
from bsi.studies.job import Measure, Quality
from bsi.studies.report import Report, Study, Table
from bsi.studies.scale import METHOD_NAMES, Scale
from bsi.studies.standard import quality
from bsi.studies.store import Store
from bsi.values import to_uint8

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STUDY"]

ROWS, COLUMNS = 8, 4


def _job(scale: Scale, method: str) -> Quality:
    """The most steps that every study draws; the first samples are kept with the distance."""
    return quality(scale, networks(scale.comparisons[0], method)[0], max(scale.drawn.steps))


def measures(scale: Scale) -> list[Measure]:
    return [_job(scale, method) for method in METHOD_NAMES]


def _draw(scale: Scale, store: Store) -> Figure:
    dataset = open_dataset(scale.comparisons[0].recipe("bsi").data.name)
    bins, num = dataset.bins, ROWS * COLUMNS
    assert bins is not None
    test = dataset.split("test")
    chosen = np.asarray(test)[np.arange(num) * len(test) // num]
    shown = {"data": chosen} | {
        figures.NAMES[m]: store.read(_job(scale, m)).arrays["images"][:num] for m in METHOD_NAMES
    }
    figure, axes = figures.panels(len(shown), width=1.75, height=3.4)
    for panel, (name, indices) in zip(axes, shown.items(), strict=True):
        pixels = to_uint8(bins.values(indices), bins.low, bins.high)
        panel.imshow(figures.tile(pixels, COLUMNS), interpolation="nearest")
        panel.set_title(name, loc="center", color=figures.COLORS.get(name.lower(), figures.INK))
        panel.set_axis_off()
    return figure


def report(scale: Scale, store: Store) -> Report:
    found = {method: distance(store, [_job(scale, method)]) for method in METHOD_NAMES}
    steps = max(scale.drawn.steps)
    return Report(
        tables=(
            Table(
                "samples",
                ("method", f"{scale.metric} at {steps}"),
                tuple((figures.NAMES[method], estimate) for method, estimate in found.items()),
            ),
        ),
        claims=(),
        draw=lambda: _draw(scale, store),
        notes=(f"{steps} steps of the paper's sampler; not chosen: samples 0 to {ROWS * COLUMNS - 1} of seed 0.",),
    )


STUDY = Study(
    name="samples",
    paper='Figure "samples"',
    shows="grids of the three methods beside data",
    measures=measures,
    report=report,
)
