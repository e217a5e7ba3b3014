"""`bsi audit RUN`: all likelihoods of a model side by side, and whether their order is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from bsi.cli.options import Count, Device, Json, Run, Within, answer
from bsi.sampler import VarianceKind


@dataclass(frozen=True)
class Audit:
    """Evaluate the likelihood of the same samples in every way, with standard errors, and check the order.

    The coded size cannot be smaller than the bound for the same number of steps, and this cannot be smaller than the
    bound for infinitely many. The likelihood of the probability flow belongs to another model. The exit code is 1 if
    the order is wrong by more than three standard errors.
    """

    run: Run
    split: Literal["test", "train"] = "test"  # The samples to evaluate.
    limit: Count = 100  # The number of random samples.
    steps: Annotated[int, Within(1, 100_000)] = 64  # Steps of the finite bound and of the code.
    variance: VarianceKind = "level"  # The predictive variance of each step, fitted to training samples.
    draws: Annotated[int, Within(1, 10_000)] = 1
    """Importance-weighted draws for the flow. More than one needs exact traces, which are slow."""
    data: str | None = None  # Evaluate on this prepared dataset, by name or folder, instead of the one of the run.
    seed: int = 0  # Seed of the noise and the levels.
    device: Device = None
    json: Json = False

    def execute(self) -> int:
        from bsi.evaluation.likelihoods import audit
        from bsi.evaluation.runs import open_run, open_split, speed_up
        from bsi.runtime.distributed import Place, World, pick_device

        opened = open_run(self.run, World(Place(), pick_device(self.device, 0)))
        split = open_split(opened, self.split, self.data)
        speed_up(opened, self.limit * self.steps)
        record = audit(opened, split, self.limit, self.steps, self.variance, self.draws, self.seed)
        answer(self.json, record, text(record))
        return 0 if record["ordered"] else 1


def text(record: dict[str, Any]) -> str:
    """The record as a table and a sentence."""
    rows, samples = record["likelihoods"], record["samples"]
    width = max(len(row["name"]) for row in rows)
    lines = [
        f"{samples} {record['split']} samples of {record['dataset']}, in bits/dim; ± is the standard error for these "
        f"samples"
    ]
    for row in rows:
        some = "" if row["samples"] == samples else f"  ({row['samples']} samples)"
        lines.append(f"  {row['name']:<{width}}  {row['bits_per_dim']:8.4f}{_plus_minus(row)}{some}")
    for each in record["order"]:
        verdict = "as it must be" if each["holds"] else "WRONG: it cannot be negative"
        lines.append(
            f"{each['larger']}, less {each['smaller']}: {each['difference']:+.4f}{_plus_minus(each)}, {verdict}"
        )
    lines.append(
        "The order must be coded size >= bound for as many steps >= bound for infinitely many steps. The flow is "
        "another model, and may lie on either side."
    )
    return "\n".join(lines)


def _plus_minus(row: dict[str, Any]) -> str:
    return "" if row["error"] is None else f" ± {row['error']:.4f}"
