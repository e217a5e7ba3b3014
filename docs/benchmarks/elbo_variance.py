"""How many evaluations of the network the bound needs, by how levels are chosen: measured, on a trained model.

    python docs/benchmarks/elbo_variance.py runs/digits
    python docs/benchmarks/elbo_variance.py runs/cifar10 --images 2000 --seeds 12

Every estimator of L_M gets the same number of evaluations of each sample, and is repeated with many seeds. From the
spread over the seeds come the variance of the mean over the set (block by block: blocks are independent) and the
variance of a single sample's estimate. Variance times evaluations, the pilot's included, is the cost of an error, and
the ratio of two costs is how many times fewer evaluations reach the same error.

    independent   log-uniform levels, each by itself: the paper's estimator as written
    stratified    log-uniform, one level at random in each of M strata of a sample, spread over the set in each stratum
    lattice       `--proposal loguniform`: equally spaced levels with shifts spread over the set, in two replicates
    proposal      `--proposal fitted --no-control`
    fitted        `--proposal fitted`

`floor` is the least that any choice of levels could cost: levels integrated exactly, evaluations where they are worth
most, only noise left, (int sd du)^2 per evaluation; without a control and with the fitted one. `claimed` is the average
variance that the estimator itself reports, over the true one: 1 is honest, more is careful.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bsi.evaluation.bound import Procedure, evaluate
from bsi.evaluation.control import Observations
from bsi.evaluation.integral import Infinite
from bsi.evaluation.plan import Plan, make_plan
from bsi.evaluation.points import Design, noise
from bsi.evaluation.runs import open_run, open_split, subject_of
from bsi.evaluation.subject import Subject
from bsi.training.distributed import Place, World, pick_device

FLOOR_LEVELS, FLOOR_IMAGES, FLOOR_PAIRS = 49, 64, 2


@dataclass(frozen=True)
class Estimate:
    """L_M of every sample in nats, how many evaluations it took, and the variance that it claims for the sum."""

    values: Tensor
    evaluations: int
    claimed: float = math.nan


@dataclass(frozen=True)
class Cost:
    """Variance times evaluations per sample, relative to the squared bound: of the set's mean, and of one sample."""

    mean: float
    single: float
    bits: float
    claimed: float


def drawn(subject: Subject, measure: int, batch: int, t: Callable[[Tensor, int], Tensor], seed: int) -> Estimate:
    """Log-uniform levels at t(ids, j)."""
    rule = Infinite(subject.method.levels)
    values = torch.zeros(subject.count, dtype=torch.float64, device=subject.device)
    for ids in torch.arange(subject.count, device=subject.device).split(batch):
        x, predict = subject.x(ids), subject.predict(ids)
        for j in range(measure):
            points = rule.at(t(ids, j))
            eps = noise(seed, ids, "measure", j, subject.shape, x.dtype)
            values[ids] += points.weight * subject.integrand(predict, x, points.level, eps) / measure
    return Estimate(values.cpu(), subject.count * measure)


def independent(subject: Subject, measure: int, seed: int, batch: int, world: World) -> Estimate:
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(subject.count, measure, generator=generator, dtype=torch.float64).to(subject.device)
    return drawn(subject, measure, batch, lambda ids, j: table[ids, j], seed)


def stratified(subject: Subject, measure: int, seed: int, batch: int, world: World) -> Estimate:
    """Within each block, the places in a stratum are a random permutation of equal cells, jittered."""
    generator = torch.Generator().manual_seed(seed)
    block = Design(subject.count, measure).block(torch.arange(subject.count))
    table = torch.rand(subject.count, measure, generator=generator, dtype=torch.float64)
    for b in range(int(block.max()) + 1):
        members = torch.nonzero(block == b)[:, 0]
        for j in range(measure):
            order = torch.randperm(len(members), generator=generator)
            table[members, j] = (j + (order + table[members, j]) / len(members)) / measure
    table = table.to(subject.device)
    return drawn(subject, measure, batch, lambda ids, j: table[ids, j], seed)


def library(proposal: str, control: bool) -> Callable[[Subject, int, int, int, World], Estimate]:
    def run(subject: Subject, measure: int, seed: int, batch: int, world: World) -> Estimate:
        found = evaluate(
            subject, Procedure(measure=measure, proposal=proposal, control=control, seed=seed, batch=batch), world
        )
        spread = found.measurement.spread
        return Estimate(spread.mean, found.plan.pilot + subject.count * measure, spread.sum_variance)

    return run


ESTIMATORS = {
    "independent": independent,
    "stratified": stratified,
    "lattice": library("loguniform", False),
    "proposal": library("fitted", False),
    "fitted": library("fitted", True),
}


def cost(estimates: list[Estimate], block: Tensor, n: int) -> Cost:
    values = torch.stack([estimate.values for estimate in estimates])
    count, bound = values.shape[1], values.mean()
    sums = values.new_zeros(len(values), int(block.max()) + 1).index_add(1, block, values)
    variance = float(sums.var(0).sum())
    each = estimates[0].evaluations / count
    return Cost(
        mean=variance / count * each / float(bound) ** 2,
        single=float(values.var(0).mean()) * each / float(bound) ** 2,
        bits=float(bound) / (n * math.log(2)),
        claimed=sum(estimate.claimed for estimate in estimates) / len(estimates) / variance,
    )


@torch.no_grad()
def floor(subject: Subject, plan: Plan, batch: int) -> tuple[float, float]:
    """(int sd du)^2 relative to the squared bound, of the noise alone: without a control, and with the plan's."""
    control = plan.control
    assert control is not None
    levels = subject.method.levels
    u = torch.linspace(math.log(levels.low), math.log(levels.high), FLOOR_LEVELS, dtype=torch.float64)
    count = min(FLOOR_IMAGES, subject.count)
    ids = torch.arange(count, device=subject.device) * subject.count // count
    mean, plain, controlled = (torch.zeros(FLOOR_LEVELS, dtype=torch.float64) for _ in range(3))
    for part in ids.split(batch):
        x, predict = subject.x(part), subject.predict(part)
        steady = control.basis.steady(x)
        for i, at in enumerate(u.tolist()):
            level = torch.full((len(part),), math.exp(at), dtype=torch.float64, device=subject.device)
            level = level.clamp(levels.low, levels.high)
            for pair in range(FLOOR_PAIRS):
                g, rest = [], []
                for half in (0, 1):
                    draw = (i * FLOOR_PAIRS + pair) * 2 + half
                    eps = noise(1, part, "pilot", draw + (1 << 20), subject.shape, x.dtype)
                    g.append(subject.integrand(predict, x, level, eps))
                    seen = Observations.of(control.basis, steady, x, eps, torch.log(level), g[-1])
                    rest.append(g[-1] - control.predict(seen))
                mean[i] += float((g[0] + g[1]).sum() / 2)
                plain[i] += float((g[0] - g[1]).square().sum() / 2)
                controlled[i] += float((rest[0] - rest[1]).square().sum() / 2)
    total = count * FLOOR_PAIRS
    bound = torch.trapezoid(mean / total, u)
    least = [float((torch.trapezoid(torch.sqrt(v / total), u) / bound) ** 2) for v in (plain, controlled)]
    return least[0], least[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", help="another prepared dataset than the run's own")
    parser.add_argument("--images", type=int, help="the first so many test samples")
    parser.add_argument("--measure", type=int, nargs="+", default=[5])
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    world = World(Place(), pick_device(args.device, 0))
    run = open_run(args.run, world)
    subject = subject_of(run, open_split(run, "test", args.data), args.images)
    n = math.prod(subject.shape)
    plan = make_plan("fitted", subject, max(args.measure), 10**6, args.batch, world)
    without, with_control = floor(subject, plan, args.batch)
    print(f"{args.run}: {subject.count} samples, {args.seeds} seeds, {world.device.type}, weights {run.weights[:12]}")
    print(f"floor, levels integrated exactly: {without:.3g} without a control, {with_control:.3g} with the fitted one")
    record = {"run": run.record(), "images": subject.count, "seeds": args.seeds, "floor": [without, with_control]}
    for measure in args.measure:
        block = Design(subject.count, measure).block(torch.arange(subject.count))
        found = {}
        for name, estimator in ESTIMATORS.items():
            with torch.no_grad():
                estimates = [estimator(subject, measure, seed, args.batch, world) for seed in range(args.seeds)]
            found[name] = cost(estimates, block, n)
        best = found["fitted"]
        print(f"\n{measure} evaluations of each sample; cost = variance x evaluations / bound^2")
        print(f"{'':12} {'bits/dim':>9} {'mean':>9} {'x fitted':>9} {'single':>9} {'x fitted':>9} {'claimed':>8}")
        for name, each in found.items():
            print(
                f"{name:12} {each.bits:9.4f} {each.mean:9.3g} {each.mean / best.mean:9.1f} {each.single:9.3g} "
                f"{each.single / best.single:9.1f} {each.claimed:8.2f}",
                flush=True,
            )
        record[f"measure {measure}"] = {name: vars(each) for name, each in found.items()}
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
