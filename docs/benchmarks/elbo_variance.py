"""How many evaluations of the network the bound needs, by how levels are chosen: measured, on a trained model.

    python docs/benchmarks/elbo_variance.py digits --seeds 12 --measure 5 20 --json figures.json
    python docs/benchmarks/elbo_variance.py runs/cifar10 --images 2000 --seeds 12 --measure 5 20 --minutes 2

Every estimator of L_M gets the same number of evaluations of each sample, and is repeated with many seeds. From the
spread over the seeds come the variance of the mean over the set (block by block: blocks are independent) and the
variance of a single sample's estimate. Variance times evaluations, the pilot's included, is the cost of an error, and
the ratio of two costs is how many times fewer evaluations reach the same error; its standard error is the jackknife's
over seeds.

    independent   log-uniform levels, each by itself: the paper's estimator as written. Its cost does not depend on how
                  many they are, and is measured once
    stratified    log-uniform, one level at random in each of M strata of a sample, spread over the set in each stratum
    lattice       `--proposal loguniform`: equally spaced levels with shifts spread over the set, in two replicates
    proposal      `--proposal fitted --no-control`
    fitted        `--proposal fitted`

`floor` is the least that any choice of levels could cost: levels integrated exactly, evaluations where they are worth
most, only noise left, (int sd du)^2 per evaluation; without a control, and with the fitted ones on average. `parts` is
what the fitted estimator's cost is made of: noise under its own proposal, int var / p du, with the control that the
pilot left; its pilot; and what is left, the levels. Noise is known from pairs of evaluations that share sample and
level. `claimed` is the average variance that the estimator itself reports, over the true one: 1 is honest, more is
careful.

Seeds are the outer loop: figures are printed and written after each, and get sharper until the last or until --minutes
are over.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bsi.bound import EvaluatedModel, Plan, Rounds, describe, make_plan
from bsi.control_variate import Basis, Control, Observations
from bsi.elbo import Estimator, Proposals
from bsi.evaluation.runs import evaluated, open_run, open_split, speed_up
from bsi.runtime.distributed import Place, World, pick_device
from bsi.strata import Design, Integral, noise

PAIR_LEVELS, PAIR_IMAGES, PAIRS = 49, 64, 2
TARGETS = {"stratified": 4, "independent": 10}  # times fewer evaluations that are asked for
BATCH = {"cpu": 512, "cuda": 2048}


@dataclass(frozen=True)
class Estimate:
    """L_M of every sample in nats, how many evaluations it took, and what is known of its variance: what it claims for
    the sum, what noise alone makes of it under the plan's proposal, and under the best one.
    """

    values: Tensor
    evaluations: int
    claimed: float | None = None
    noise: float | None = None
    floor: float | None = None


@dataclass(frozen=True)
class Pairs:
    """Evaluations at equally spaced u = ln(level), 2i and 2i + 1 of one sample at one level: they differ by noise."""

    u: Tensor
    seen: Observations

    @classmethod
    def of(cls, subject: EvaluatedModel, basis: Basis, batch: int) -> Pairs:
        levels = subject.method.levels
        u = torch.linspace(math.log(levels.low), math.log(levels.high), PAIR_LEVELS, dtype=torch.float64)
        count = min(PAIR_IMAGES, subject.count)
        ids = torch.arange(count, device=subject.device) * subject.count // count
        found = []
        for i, at in enumerate(u.tolist()):
            for part in ids.split(batch):
                x, predict, steady = subject.x(part), subject.predict(part), basis.steady(subject.x(part))
                level = torch.full((len(part),), math.exp(at), dtype=torch.float64, device=subject.device)
                level = level.clamp(levels.low, levels.high)
                for draw in range(2 * PAIRS):
                    eps = noise(1, part, "pilot", i * 2 * PAIRS + draw + (1 << 20), subject.shape, x.dtype)
                    g = subject.integrand(predict, x, level, eps)
                    found.append(Observations.of(basis, steady, x, eps, torch.log(level), g))
        return cls(u, Observations(_paired([each.rows for each in found])))

    @property
    def bound(self) -> float:
        return float(torch.trapezoid(self.seen.g.view(len(self.u), -1).mean(1).cpu(), self.u))

    def variance(self, control: Control | None) -> Tensor:
        """Of the noise, at each level, on average over the samples."""
        left_over = self.seen.g if control is None else self.seen.g - control.predict(self.seen)
        two = left_over.view(len(self.u), -1, 2).cpu()
        return 0.5 * (two[..., 0] - two[..., 1]).square().mean(1)

    def under(self, plan: Plan) -> float:
        """What noise costs with levels from the plan's proposal."""
        density = torch.exp(self.u) * plan.proposal.density(torch.exp(self.u))
        return float(torch.trapezoid(self.variance(plan.control) / density, self.u)) / self.bound**2

    def floor(self, control: Control | None) -> float:
        """What it costs with levels from the best proposal."""
        return (float(torch.trapezoid(torch.sqrt(self.variance(control)), self.u)) / self.bound) ** 2


def _paired(rows: list[Tensor]) -> Tensor:
    """Draws 2i and 2i + 1 of the same samples, next to each other."""
    return torch.cat([torch.stack(two, 1).flatten(0, 1) for two in zip(rows[::2], rows[1::2], strict=True)])


@dataclass(frozen=True)
class Bench:
    """What all estimators are given."""

    subject: EvaluatedModel
    basis: Basis
    pairs: Pairs
    batch: int
    world: World

    def estimator(self, name: Proposals, levels: int, seed: int, control: bool = True) -> Estimator:
        return Estimator(measure=levels, proposal=name, control=control, seed=seed, batch_size=self.batch)


def drawn(bench: Bench, levels: int, t: Callable[[Tensor, int], Tensor], seed: int) -> Estimate:
    """Log-uniform levels at t(ids, j)."""
    subject, rule = bench.subject, Integral(bench.subject.method.levels)
    values = torch.zeros(subject.count, dtype=torch.float64, device=subject.device)
    for ids in torch.arange(subject.count, device=subject.device).split(bench.batch):
        x, predict = subject.x(ids), subject.predict(ids)
        for j in range(levels):
            points = rule.at(t(ids, j))
            eps = noise(seed, ids, "measure", j, subject.shape, x.dtype)
            values[ids] += points.weight * subject.integrand(predict, x, points.level, eps) / levels
    return Estimate(values.cpu(), subject.count * levels)


def independent(bench: Bench, levels: int, seed: int) -> Estimate:
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(bench.subject.count, levels, generator=generator, dtype=torch.float64)
    table = table.to(bench.subject.device)
    return drawn(bench, levels, lambda ids, j: table[ids, j], seed)


def stratified(bench: Bench, levels: int, seed: int) -> Estimate:
    """Within each block, the places in a stratum are a random permutation of equal cells, jittered."""
    generator = torch.Generator().manual_seed(seed)
    count = bench.subject.count
    block = Design(count, levels).block(torch.arange(count))
    table = torch.rand(count, levels, generator=generator, dtype=torch.float64)
    for b in range(int(block.max()) + 1):
        members = torch.nonzero(block == b)[:, 0]
        for j in range(levels):
            order = torch.randperm(len(members), generator=generator)
            table[members, j] = (j + (order + table[members, j]) / len(members)) / levels
    table = table.to(bench.subject.device)
    return drawn(bench, levels, lambda ids, j: table[ids, j], seed)


def library(proposal: Proposals, control: bool) -> Callable[[Bench, int, int], Estimate]:
    def run(bench: Bench, levels: int, seed: int) -> Estimate:
        estimator = bench.estimator(proposal, levels, seed, control)
        plan = make_plan(bench.subject, estimator, bench.world, bench.basis)
        spread = Rounds(bench.subject, estimator, bench.world, plan).measure()
        return Estimate(
            spread.mean,
            plan.pilot + bench.subject.count * levels,
            claimed=spread.sum_variance,
            noise=bench.pairs.under(plan),
            floor=bench.pairs.floor(plan.control),
        )

    return run


ESTIMATORS: dict[str, Callable[[Bench, int, int], Estimate]] = {
    "independent": independent,
    "stratified": stratified,
    "lattice": library("loguniform", False),
    "proposal": library("fitted", False),
    "fitted": library("fitted", True),
}


@dataclass(frozen=True)
class Cost:
    """Variance times evaluations per sample, relative to the squared bound: of the set's mean, and of one sample."""

    mean: float
    single: float
    bits: float
    claimed: float | None

    @classmethod
    def of(cls, estimates: Sequence[Estimate], block: Tensor, n: int) -> Cost:
        values = torch.stack([estimate.values for estimate in estimates])
        count, bound = values.shape[1], values.mean()
        sums = values.new_zeros(len(values), int(block.max()) + 1).index_add(1, block, values)
        variance = float(sums.var(0).sum())
        each = estimates[0].evaluations / count
        claims = [estimate.claimed for estimate in estimates if estimate.claimed is not None]
        return cls(
            mean=variance / count * each / float(bound) ** 2,
            single=float(values.var(0).mean()) * each / float(bound) ** 2,
            bits=float(bound) / (n * math.log(2)),
            claimed=sum(claims) / len(claims) / variance if claims else None,
        )


@dataclass(frozen=True)
class Saving:
    """How many times fewer evaluations the fitted estimator needs than another, and the standard error of that."""

    times: float
    error: float | None


def saving(other: Sequence[Estimate], fitted: Sequence[Estimate], block: Tensor, n: int, of: str) -> Saving:
    """`of` the mean, or of a single sample; the jackknife leaves out one seed at a time."""

    def ratio(left_out: int | None) -> float:
        kept = [[e for i, e in enumerate(those) if i != left_out] for those in (other, fitted)]
        top, bottom = (asdict(Cost.of(those, block, n))[of] for those in kept)
        return math.log(top / bottom)

    count, whole = len(fitted), math.exp(ratio(None))
    if count < 3:
        return Saving(whole, None)
    logs = torch.tensor([ratio(i) for i in range(count)])
    return Saving(whole, whole * math.sqrt((count - 1) * float(logs.var(correction=0))))


def average(values: Sequence[float | None]) -> float:
    return math.fsum(value for value in values if value is not None) / len(values)


def figures(found: dict[str, list[Estimate]], levels: int, block: Tensor, n: int) -> dict[str, Any]:
    """Costs, savings, how near the optimum the fitted estimator is, and what is between."""
    costs = {name: Cost.of(estimates, block, n) for name, estimates in found.items()}
    fitted = found["fitted"]
    floor, noise = average([each.floor for each in fitted]), average([each.noise for each in fitted])
    record: dict[str, Any] = {
        "seeds": len(fitted),
        "cost": {name: asdict(c) for name, c in costs.items()},
        "floor": floor,
        "parts": {},
    }
    for of in ("mean", "single"):
        cost = asdict(costs["fitted"])[of]
        pilot = cost * (1 - len(block) * levels / fitted[0].evaluations)
        record["parts"][of] = {"noise": noise, "levels": cost - pilot - noise, "pilot": pilot}
        for name in TARGETS:
            got = saving(found[name], fitted, block, n, of)
            optimum = asdict(costs[name])[of] / floor
            record[f"{of}, than {name}"] = {**asdict(got), "target": TARGETS[name], "optimum": optimum}
    return record


def shown(levels: int, record: dict[str, Any]) -> str:
    best = record["cost"]["fitted"]
    lines = [
        f"\n{levels} evaluations of each sample, {record['seeds']} seeds; cost = variance x evaluations / bound^2",
        f"{'':12} {'bits/dim':>9} {'mean':>9} {'x fitted':>9} {'single':>9} {'x fitted':>9} {'claimed':>8}",
    ]
    for name, c in record["cost"].items():
        lines.append(
            f"{name:12} {c['bits']:9.4f} {c['mean']:9.3g} {c['mean'] / best['mean']:9.1f} {c['single']:9.3g} "
            f"{c['single'] / best['single']:9.1f} {'' if c['claimed'] is None else format(c['claimed'], '8.2f')}"
        )
    for what, got in record.items():
        if isinstance(got, dict) and "times" in got:
            error = "" if got["error"] is None else f" ± {got['error']:.1f}"
            near = f"; the optimum with this control is {got['optimum']:.1f}" if got["times"] < got["target"] else ""
            lines.append(f"{what}: {got['times']:.1f}{error} times fewer evaluations (wanted: {got['target']}{near})")
    for of, parts in record["parts"].items():
        made_of = ", ".join(f"{name} {value:.3g}" for name, value in parts.items())
        lines.append(f"{of}, fitted: {made_of}; the floor is {record['floor'] / best[of]:.2f} of it")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="a run folder, an exported file, or digits")
    parser.add_argument("--data", help="another prepared dataset than the run's own")
    parser.add_argument("--images", type=int, help="the first so many test samples")
    parser.add_argument("--measure", type=int, nargs="+", default=[5])
    parser.add_argument("--seeds", type=int, default=16, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no seed that would end later")
    parser.add_argument("--batch", type=int, help="samples at a time")
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.add_argument("--json", type=Path, help="write the figures here, after every seed")
    args = parser.parse_args(words)
    started = time.monotonic()
    world = World(Place(), pick_device(args.device, 0))
    run = open_run(args.run, world)
    subject = evaluated(run, open_split(run, "test", args.data), args.images)
    speed_up(run, subject.count * args.seeds * sum(args.measure) * len(ESTIMATORS))
    basis, batch = describe(subject), args.batch or min(BATCH[world.device.type], subject.count)
    with torch.no_grad():
        bench = Bench(subject, basis, Pairs.of(subject, basis, batch), batch, world)
    n, plain = math.prod(subject.shape), bench.pairs.floor(None)
    print(f"{args.run}: {subject.count} samples, {world.device.type}, {run.precision}, weights {run.weights[:12]}")
    print(f"floor without a control, levels integrated exactly: {plain:.3g}")
    print(f"prepared after {time.monotonic() - started:.0f} s", flush=True)
    found: dict[int, dict[str, list[Estimate]]] = {levels: {name: [] for name in ESTIMATORS} for levels in args.measure}
    first, longest = args.measure[0], 0.0
    about = {"run": run.record(), "images": subject.count, "first seed": args.first, "plain floor": plain}
    for count, seed in enumerate(range(args.first, args.first + args.seeds)):
        began = time.monotonic()
        if began - started + longest > 60 * args.minutes:
            print(f"stopped after {count} of {args.seeds} seeds: {args.minutes:g} minutes", flush=True)
            break
        for levels, each in found.items():
            with torch.no_grad():
                for name, estimator in ESTIMATORS.items():
                    once = name == "independent" and levels != first
                    each[name].append(found[first][name][-1] if once else estimator(bench, levels, seed))
        longest = max(longest, time.monotonic() - began)
        print(f"seed {seed}: {time.monotonic() - began:.1f} s", flush=True)
        if count == 0:
            continue
        records = {}
        for levels, each in found.items():
            block = Design(subject.count, levels).block(torch.arange(subject.count))
            records[f"measure {levels}"] = figures(each, levels, block, n)
            print(shown(levels, records[f"measure {levels}"]), flush=True)
        if args.json is not None:
            seconds = round(time.monotonic() - started, 1)
            beside = args.json.with_name(f".{args.json.name}.part")
            beside.write_text(json.dumps({**about, "seconds": seconds, **records}, indent=2) + "\n")
            beside.replace(args.json)


if __name__ == "__main__":
    main()
