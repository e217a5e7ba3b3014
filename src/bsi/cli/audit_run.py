"""`bsi audit RUN`: all likelihoods of a model side by side, and whether their order is right."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bsi.cli.options import Within
from bsi.sampler import VarianceKind


@dataclass(frozen=True)
class Audit:
    """Evaluate the likelihood of the same samples in every way, with standard errors, and check the order.

    The coded size cannot be smaller than the bound for the same number of steps, and this cannot be smaller than the
    bound for infinitely many. The likelihood of the probability flow belongs to another model. The exit code is 1 if
    the order is wrong by more than three standard errors.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, a file that `bsi export` wrote, or a bundled network: digits."""
    split: Literal["test", "train"] = "test"
    """The samples to evaluate."""
    limit: Annotated[int, Within(1)] = 100
    """The number of random samples."""
    steps: Annotated[int, Within(1, 100_000)] = 64
    """Steps of the finite bound and of the code."""
    variance: VarianceKind = "level"
    """The predictive variance of each step, fitted to training samples."""
    draws: Annotated[int, Within(1, 10_000)] = 1
    """Importance-weighted draws for the flow. More than one needs exact traces, which are slow."""
    data: str | None = None
    """Evaluate on this prepared dataset, by name or folder, instead of the one of the run."""
    seed: int = 0
    """Seed of the noise and the levels."""
    device: Literal["cuda", "cpu"] | None = None
    """By default a GPU if there is one."""
    json: bool = False
    """Print the result as JSON on stdout."""


def run(args: Audit) -> int:
    from bsi.evaluation.likelihoods import audit
    from bsi.evaluation.runs import open_run, open_split, speed_up
    from bsi.runtime.distributed import Place, World, pick_device

    world = World(Place(), pick_device(args.device, 0))
    opened = open_run(args.run, world)
    split = open_split(opened, args.split, args.data)
    speed_up(opened, args.limit * args.steps)
    record = audit(opened, split, args.limit, args.steps, args.variance, args.draws, args.seed)
    print(json.dumps(record) if args.json else text(record))
    return 0 if record["ordered"] else 1


def text(record: dict[str, Any]) -> str:
    """The record as a table and a sentence."""
    rows = record["likelihoods"]
    width = max(len(row["name"]) for row in rows)
    lines = [
        f"{record['samples']} {record['split']} samples of {record['dataset']}, in bits/dim; ± is the standard error "
        f"for these samples"
    ]
    for row in rows:
        error = "" if row["error"] is None else f" ± {row['error']:.4f}"
        some = "" if row["samples"] == record["samples"] else f"  ({row['samples']} samples)"
        lines.append(f"  {row['name']:<{width}}  {row['bits_per_dim']:8.4f}{error}{some}")
    for each in record["order"]:
        error = "" if each["error"] is None else f" ± {each['error']:.4f}"
        verdict = "as it must be" if each["holds"] else "WRONG: it cannot be negative"
        lines.append(f"{each['larger']}, less {each['smaller']}: {each['difference']:+.4f}{error}, {verdict}")
    lines.append(
        "The order must be coded size >= bound for as many steps >= bound for infinitely many steps. The flow is "
        "another model, and may lie on either side."
    )
    return "\n".join(lines)
