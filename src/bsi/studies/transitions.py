"""What a predictive variance in each step brings: the bound for few steps, samples in few steps, and rate-distortion.

The paper's transition treats a prediction as if it were the sample (`bsi.variance`). For few steps a variance makes the
bound tighter, and the samples of the solver posterior better. It is compared with the solvers of second order.
"""

from __future__ import annotations

from bsi.recipe import Recipe
from bsi.sampler import FLOW_SOLVER, NOISY_SOLVER, Sampler, VarianceKind
from bsi.studies import figures
from bsi.studies.job import OURS, Bound, Measure, Rate, quality
from bsi.studies.outcome import Cell, Claim, Difference, Estimate, Outcome, Results, ResultTable, all_of, less
from bsi.studies.scale import Scale

KINDS: tuple[VarianceKind, ...] = ("none", "level", "dct", "learned")
SAMPLED: tuple[VarianceKind, ...] = ("none", "dct")
CHAIN = 64  # steps of the chain for rate-distortion
MOST = 64  # steps of the samplers


def _network(scale: Scale) -> Recipe:
    return scale.parameters.networks("bsi")[0]


def _bound(scale: Scale, k: int | None, kind: VarianceKind = "none") -> Bound:
    return Bound(_network(scale), scale.finite_levels, scale.recon, k, kind)


def _samplers(scale: Scale) -> dict[str, list[Sampler]]:
    """Samplers by name, for every number of steps."""
    steps = [k for k in scale.convergence_steps if k <= MOST]
    found = {
        "posterior" if kind == "none" else f"posterior, variance {kind}": [
            Sampler(k, "posterior", OURS.grid, variance=kind) for k in steps
        ]
        for kind in SAMPLED
    }
    return found | {solver: [Sampler(k, solver, OURS.grid) for k in steps] for solver in (NOISY_SOLVER, FLOW_SOLVER)}


def measures(scale: Scale) -> list[Measure]:
    found: list[Measure] = [_bound(scale, None)]
    found += [_bound(scale, k, kind) for k in scale.ks for kind in KINDS]
    found += [quality(scale, _network(scale), how) for curve in _samplers(scale).values() for how in curve]
    return [*found, *(Rate(_network(scale), CHAIN, kind) for kind in SAMPLED)]


def report(results: Results) -> Outcome:
    scale, network = results.scale, _network(results.scale)
    infinite = _bound(scale, None)
    excess: dict[str, list[Difference]] = {
        kind: [results.finite_gap(_bound(scale, k, kind), infinite) for k in scale.ks] for kind in KINDS
    }
    gains: list[Claim] = []
    for kind in KINDS[1:]:
        for i, k in enumerate(scale.ks):
            gap = results.finite_gap(_bound(scale, k, kind), _bound(scale, k))
            gains.append(less(f"{kind} at {k} steps", excess[kind][i], excess["none"][i], gap))
    curves: dict[str, list[Estimate]] = {
        name: [results.distance([network], how) for how in samplers] for name, samplers in _samplers(scale).items()
    }
    steps = [how.steps for how in _samplers(scale)["posterior"]]
    aware = curves[f"posterior, variance {SAMPLED[-1]}"]
    better = [less(f"{k} steps", aware[i], curves["posterior"][i]) for i, k in enumerate(steps)]

    figure, (left, middle, right) = figures.panels(3)
    for (name, gaps), color in zip(excess.items(), figures.PALETTE, strict=False):
        figures.line(left, scale.ks, gaps, color, label=name)
    for (name, found), color in zip(curves.items(), figures.PALETTE, strict=False):
        figures.line(middle, steps, found, color, label=name)
    for kind, color in zip(SAMPLED, figures.PALETTE, strict=False):
        curve = results.read(Rate(network, CHAIN, kind)).values
        right.plot(curve["bits_per_dim"], curve["squared_error"], color=color, label=f"variance {kind}")
    left.set(xlabel="k", ylabel=r"$L_M^k - L_M^\infty$, bits/dim", yscale="log", title="The bound for k steps")
    middle.set(xlabel="steps", ylabel=scale.metric, yscale="log", title="Samples")
    right.set(xlabel="bits/dim", ylabel="mean squared error", yscale="log", title=f"The first steps of {CHAIN}")
    for axes, ticks in ((left, scale.ks), (middle, steps)):
        figures.log_axis(axes, ticks)
    for axes in (left, middle, right):
        axes.legend()
    rows: list[tuple[Cell, ...]] = [(f"bound, variance {name}", *gaps) for name, gaps in excess.items()]
    drawn: list[tuple[Cell, ...]] = [(name, *found) for name, found in curves.items()]
    return Outcome(
        tables=(
            ResultTable("L_M^k less L_M^inf, bits/dim", ("transition", *(f"k = {k}" for k in scale.ks)), tuple(rows)),
            ResultTable(f"samples ({scale.metric})", ("sampler", *(f"{k} steps" for k in steps)), tuple(drawn)),
        ),
        claims=(
            all_of("A predictive variance lowers the bound for k steps", gains),
            all_of("A predictive variance improves the samples of the solver posterior", better),
        ),
        figure=figure,
        seeds=1,
    )
