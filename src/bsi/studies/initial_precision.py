"""Figure "lambda0": bits per dimension and sample quality against the initial precision lambda_0.

The paper's claims: likelihood improves as lambda_0 falls; with many steps a larger lambda_0 samples slightly better,
with few steps an intermediate one does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from bsi.studies import figures
from bsi.studies.job import Measure, measures_of, paper_sampler
from bsi.studies.report import Cell, Claim, Difference, Report, Results, Study, Table, Verdict, all_of, less
from bsi.studies.scale import Scale

__all__ = ["STUDY", "intermediate_is_best"]


def measures(scale: Scale) -> list[Measure]:
    samplers = [paper_sampler(k) for k in scale.lambda_0_steps]
    return [
        job for value in scale.lambda_0 for job in measures_of(scale, scale.bsi_networks(lambda_0=value), *samplers)
    ]


def intermediate_is_best(values: Sequence[float], difference: Callable[[float, float], Difference]) -> Verdict:
    """Held if a value in between is better than both ends, not held if one end is better than all in between.

    Args:
        values: From the lowest to the highest.
        difference: The quantity at one value less that at another; lower is better.
    """
    ends, between = (values[0], values[-1]), values[1:-1]
    if any(all(difference(value, end).lower for end in ends) for value in between):
        return "held"
    if any(all(difference(end, value).lower for value in between) for end in ends):
        return "not held"
    return "undecided"


def report(results: Results) -> Report:
    scale, values = results.scale, results.scale.lambda_0
    few, many = min(scale.lambda_0_steps), max(scale.lambda_0_steps)
    trained = {value: scale.bsi_networks(lambda_0=value) for value in values}
    bits = {value: results.bits(trained[value]) for value in values}
    distances = {
        k: {value: results.distance(trained[value], paper_sampler(k)) for value in values} for k in scale.lambda_0_steps
    }

    def gap(a: float, b: float, steps: int = few) -> Difference:
        return results.distance_difference(trained[a], trained[b], paper_sampler(steps))

    falling = [
        less(f"{a:g} against {b:g}", bits[a], bits[b], results.bits_difference(trained[a], trained[b]))
        for a, b in itertools.pairwise(values)
    ]
    low, high = values[0], values[-1]
    best = min(values, key=lambda value: distances[few][value].value)
    intermediate = Claim(
        f"With few steps ({few}) an intermediate lambda_0 samples best",
        intermediate_is_best(values, gap),
        f"best at lambda_0 = {best:g}: {distances[few][best]}; at the ends {distances[few][low]} and "
        f"{distances[few][high]}",
    )

    figure, (left, right) = figures.panels(2)
    figures.line(left, values, list(bits.values()), figures.COLORS["bsi"])
    left.set_ylabel("bits per dimension")
    left.set_title("Likelihood")
    for (steps, found), (color, mark) in zip(distances.items(), figures.SHADES, strict=False):
        figures.line(right, values, list(found.values()), color, mark, label=f"{steps} steps")
    right.set_ylabel(scale.metric)
    right.set_title("Sample quality")
    right.legend()
    for axes in (left, right):
        figures.log_axis(axes, values, base=10)
        axes.set_xlabel(r"$\lambda_0$")
    columns = ("lambda_0", "bits/dim", *(f"{scale.metric} at {k}" for k in scale.lambda_0_steps))
    rows: list[tuple[Cell, ...]] = [(l, bits[l], *(distances[k][l] for k in scale.lambda_0_steps)) for l in values]
    return Report(
        tables=(Table("initial precision", columns, tuple(rows)),),
        claims=(
            all_of("Likelihood improves with falling lambda_0, at each step of it", falling),
            less(
                f"With many steps ({many}) larger lambda_0 sample better: {high:g} against {low:g}",
                distances[many][high],
                distances[many][low],
                gap(high, low, many),
            ),
            intermediate,
        ),
        figure=figure,
        notes=(f"Few steps are {few}, many are {many}, of the paper's sampler.",),
        seeds=len(scale.parameters.seeds),
    )


STUDY = Study(
    name="initial-precision",
    paper='Figure "lambda0"',
    shows="bits/dim and FID against lambda_0 and steps",
    measures=measures,
    report=report,
)
