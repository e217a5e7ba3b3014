"""How many evaluations of the network the bound needs, by how levels are chosen: measured, on a trained model.

    python docs/benchmarks/elbo_variance.py digits --seeds 12 --measure 5 20 --json figures.json
    python docs/benchmarks/elbo_variance.py runs/cifar10 --data cifar10 --images 2000 --seeds 12

Every estimator of L_M gets the same number of evaluations of each sample, and is repeated with many seeds. From the
spread over the seeds come the variance of the mean over the set (block by block: blocks are independent) and the
variance of a single sample's estimate. Variance times evaluations, the pilot's included, is the cost of an error, and
the ratio of two costs is how many times fewer evaluations reach the same error; its standard error is the jackknife's
over seeds. `claimed` is the average variance that the estimator itself reports, over the true one.

    independent   log-uniform levels, each drawn alone: the paper's estimator as written
    lattice       `--proposal loguniform`: equally spaced levels with shifts spread over the set, in two replicates
    proposal      `--proposal fitted` without its control variate (`control=False` in Python)
    fitted        `--proposal fitted`
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bsi
from bsi.bound import EvaluatedModel, estimate
from bsi.data import open_dataset
from bsi.elbo import Estimator, Proposals, measurement_loss
from bsi.io import write_json
from bsi.rng import standard_normal


@dataclass(frozen=True)
class Run:
    """L_M of every sample in nats, how many evaluations it took, and the variance that it claims for the sum."""

    values: Tensor
    evaluations: int
    claimed: float | None = None


def independent(model: EvaluatedModel, levels: int, seed: int, batch: int) -> Run:
    generator, values = torch.Generator().manual_seed(seed), torch.zeros(model.count, dtype=torch.float64)
    for ids in torch.arange(model.count).split(batch):
        x, predict = model.x(ids), model.predict(ids)
        for j in range(levels):
            t = torch.rand(len(ids), generator=generator, dtype=torch.float64)
            eps = standard_normal(seed, ids, j, model.shape)
            values[ids] += measurement_loss(model.method, predict, x, t, eps).double() / levels
    return Run(values, model.count * levels)


def library(proposal: Proposals, control: bool) -> Callable[[EvaluatedModel, int, int, int], Run]:
    def run(model: EvaluatedModel, levels: int, seed: int, batch: int) -> Run:
        found = estimate(model, Estimator(levels, 2, proposal=proposal, control=control, seed=seed, batch_size=batch))
        evaluations = found.pilot_evaluations + model.count * levels
        return Run(found.measurement, evaluations, found.measurements.sum_variance)

    return run


ESTIMATORS: dict[str, Callable[[EvaluatedModel, int, int, int], Run]] = {
    "independent": independent,
    "lattice": library("loguniform", False),
    "proposal": library("fitted", False),
    "fitted": library("fitted", True),
}


@dataclass(frozen=True)
class Cost:
    """Variance times evaluations per sample, relative to the squared bound: of the set's mean, and of one sample."""

    mean: float
    single: float
    claimed: float | None

    @classmethod
    def of(cls, runs: Sequence[Run], block: Tensor) -> Cost:
        values = torch.stack([run.values for run in runs])
        count, bound = values.shape[1], float(values.mean())
        sums = values.new_zeros(len(values), int(block.max()) + 1).index_add(1, block, values)
        variance, each = float(sums.var(0).sum()), runs[0].evaluations / count
        claims = [run.claimed for run in runs if run.claimed is not None]
        return cls(
            mean=variance / count * each / bound**2,
            single=float(values.var(0).mean()) * each / bound**2,
            claimed=sum(claims) / len(claims) / variance if claims else None,
        )


def saving(other: Sequence[Run], fitted: Sequence[Run], block: Tensor, of: str) -> tuple[float, float]:
    """How many times fewer evaluations `fitted` needs, for the mean or a single sample, and the standard error."""

    def ratio(left_out: int | None) -> float:
        kept = [[run for i, run in enumerate(runs) if i != left_out] for runs in (other, fitted)]
        top, bottom = (asdict(Cost.of(runs, block))[of] for runs in kept)
        return math.log(top / bottom)

    count, times = len(fitted), math.exp(ratio(None))
    logs = torch.tensor([ratio(i) for i in range(count)])
    return times, times * math.sqrt((count - 1) * float(logs.var(correction=0)))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run folder, an exported file, or digits")
    parser.add_argument("--data", default="digits", help="a prepared dataset")
    parser.add_argument("--images", type=int, help="the first so many test samples")
    parser.add_argument("--measure", type=int, nargs="+", default=[5])
    parser.add_argument("--seeds", type=int, default=12, help="how many, at least 3")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(words)
    test = torch.tensor(np.asarray(open_dataset(args.data).split("test")[: args.images]))
    model = bsi.load(args.run).eval().on(test)
    record: dict[str, Any] = {"run": args.run, "images": model.count, "seeds": args.seeds}
    for levels in args.measure:
        block = estimate(model, Estimator(levels, 2, batch_size=args.batch)).measurements.block
        with torch.no_grad():
            runs = {
                name: [run(model, levels, seed, args.batch) for seed in range(args.seeds)]
                for name, run in ESTIMATORS.items()
            }
        print(f"\n{levels} evaluations of each sample, {args.seeds} seeds; cost = variance x evaluations / bound^2")
        found: dict[str, Any] = {}
        for name, each in runs.items():
            cost = Cost.of(each, block)
            savings = {of: saving(each, runs["fitted"], block, of) for of in ("mean", "single")}
            found[name] = {**asdict(cost), "times": savings}
            times = ", ".join(f"{of} {value:.1f} ± {error:.1f}" for of, (value, error) in savings.items())
            print(f"{name:12} mean {cost.mean:.3g}, single {cost.single:.3g}; fitted needs times fewer: {times}")
        record[f"measure {levels}"] = found
        if args.json is not None:
            write_json(args.json, record)


if __name__ == "__main__":
    main()
