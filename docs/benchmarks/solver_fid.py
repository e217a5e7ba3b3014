"""FID by network evaluations, with errors: `solvers.py fid`.

The stages for each network, the most decisive ones first (`--stages`):

    default     our default at 16 evaluations, seeds 0, 1 and 2
    sixteen     all solvers and grids at 16
    paper       the paper's sampler with 64, 256 and 1024 steps
    few, more   all solvers and grids at 8 and 32, at 64 and 12
    between     the paper's sampler with 128 and 512

Samples of one seed use the same noise with every solver. So the error of a difference in FID is that of the mean
difference of the samples' influences (bsi.metrics.frechet), which is smaller than the error of either FID. `ratio` is
the FID divided by that of the paper's sampler with 1024 steps, with that error; other seeds are independent.

Sampling is in bfloat16 with the network in its fastest form; features are float16 on a GPU (10.324 on the set whose FID
is 10.323). If the next batch would not finish before `--minutes`, the features so far are saved in parts/, and the same
command resumes there.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from solver_results import Case, Results, Row, pairs
from torch import Tensor

import bsi
from bsi.backbones import Backbone, accelerate, compute_dtype, freeze
from bsi.brownian import BrownianPath
from bsi.evaluation.runs import weights_hash
from bsi.metrics import Extractor, Inception, collect
from bsi.metrics.frechet import Yardstick
from bsi.sampler import Sampler, default_solver
from bsi.sampling import evaluations, sample

STAGES = ("default", "sixteen", "paper", "few", "more", "between")
SEEDS = (0, 1, 2)
PAPER = (64, 256, 1024)  # steps of the paper's sampler; all are compared with the last
RESERVE_S = 12.0  # for starting Python, the last distance, the table and the figure
WITHIN = 1.02  # times the FID of the paper's sampler with most steps
LONGEST = f"times the FID of the paper's sampler with {PAPER[-1]} steps"
FEW = 16  # evaluations


@dataclass(frozen=True)
class Network:
    """A model in its fastest form, with its name and a hash of its weights."""

    name: str
    model: bsi.Model
    weights: str

    @classmethod
    def load(cls, run: Path, device: torch.device) -> "Network":
        model = bsi.load(run).to(device).eval()
        if model.shape != (3, 32, 32) or model.bins is None:
            raise SystemExit(f"{run} models data of shape {model.shape}: this compares with CIFAR-10's test images")
        weights, network = weights_hash(model.denoiser.backbone), model.denoiser.backbone
        if isinstance(network, Backbone):
            network.compute_dtype = compute_dtype("auto", device)
            accelerate(network, device)
            freeze(network)
        return cls(run.stem, model, weights)


def stage_cases(stage: str, network: Network, solvers: list[str], grids: list[str]) -> list[Case]:
    name, all_pairs = network.name, pairs(network.model.method, solvers, grids)
    counts = {"sixteen": (FEW,), "few": (8, 32), "more": (64, 12)}.get(stage, ())
    many = [evaluations(network.model.method, k) for k in {"paper": PAPER, "between": (128, 512)}.get(stage, ())]
    seeds = SEEDS if stage == "default" else ()
    return [
        *(Case(name, default_solver(network.model.method), Sampler.grid, FEW, seed) for seed in seeds),
        *(Case(name, solver, grid, count) for count in counts for solver, grid in all_pairs),
        *(Case(name, "posterior", "paper", count) for count in many),
    ]


class OutOfTime(Exception):
    """The next batch would not finish in time."""


@dataclass
class Clock:
    """The deadline, and the measured seconds for one evaluation of a sample and for its features."""

    deadline: float
    evaluation: float = 0.0
    features: float = 0.0

    def check(self, case: Case, count: int) -> None:
        expected = count * (self.evaluation * case.evaluations + self.features)
        if time.monotonic() + 1.1 * expected > self.deadline:
            raise OutOfTime(f"the next {count} samples of {case.name} would take {expected:.0f} s")


def wait(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


def draw(network: Network, case: Case, ids: Tensor) -> Tensor:
    """8-bit images, on the device."""
    model = network.model
    noise = BrownianPath(case.seed, ids, model.shape)
    return model.data(sample(model.method, model.denoiser, noise, case.levels(model.method), case.solver))


@dataclass
class Measuring:
    """Everything that all cases share."""

    results: Results
    extractor: Extractor
    yardstick: Yardstick
    clock: Clock
    num: int
    batch: int

    @property
    def device(self) -> torch.device:
        return self.extractor.device

    def file(self, folder: str, case: Case, weights: str) -> Path:
        path = self.results.folder / folder / f"{case.name.replace('/', '-')}-{weights}.npy"
        path.parent.mkdir(exist_ok=True)
        return path

    def measure(self, network: Network, case: Case) -> None:
        saved = self.file("parts", case, network.weights)
        done = [torch.from_numpy(np.load(saved)).to(self.device)] if saved.exists() else []
        started, sampling = time.monotonic(), 0.0
        first = sum(map(len, done))
        try:
            for ids in torch.arange(first, self.num, device=self.device).split(self.batch):
                self.clock.check(case, len(ids))
                before = wait(self.device)
                images = draw(network, case, ids)
                drawn = wait(self.device)
                done.append(self.extractor(images))
                after = wait(self.device)
                self.clock.evaluation = (drawn - before) / (len(ids) * case.evaluations)
                self.clock.features = (after - drawn) / len(ids)
                sampling += drawn - before
        except OutOfTime:
            if len(done) > 0:
                np.save(saved, torch.cat(done).cpu().numpy())
            raise
        found = self.yardstick(torch.cat(done))
        np.save(self.file("influence", case, network.weights), found.influence.float().cpu().numpy())
        saved.unlink(missing_ok=True)
        rate = (self.num - first) * case.evaluations / max(sampling, 1e-9)
        self.results.add(
            case, network.weights, fid=found.distance, error=found.error, num=self.num,
            steps=len(case.levels(network.model.method)) - 1,
            seconds=round(time.monotonic() - started, 2), evaluations_per_s=round(rate),
        )  # fmt: skip

    def influence(self, row: Row) -> np.ndarray | None:
        """The influence of each sample on the FID; None if its file is missing."""
        case = Case(*(row[key] for key in ("network", "solver", "grid", "evaluations", "seed")))
        path = self.file("influence", case, row["weights"])
        return np.load(path) if path.exists() else None

    def compare(self) -> None:
        """Divide every FID by that of the paper's sampler with most steps; the error is that of the pair."""
        for row in self.results.rows:
            line = self.results.line(row["network"], "posterior", "paper", SEEDS[0]).values()
            base = next((long for long in line if long["steps"] == PAPER[-1]), None)
            if base is None or base["weights"] != row["weights"]:
                continue
            own, its, ratio = self.influence(row), self.influence(base), row["fid"] / base["fid"]
            if own is None or its is None:
                continue
            paired = row["seed"] == base["seed"]
            # d (a / b) = (da - (a / b) db) / b
            spread = (own - ratio * its).std() if paired else math.hypot(own.std(), ratio * its.std())
            row["ratio"], row["ratio_error"] = ratio, float(spread / math.sqrt(len(own)) / base["fid"])
        self.results.write()

    def verdicts(self, networks: list[Network]) -> Iterator[str]:
        """For each network our default, and the fewest evaluations whose FID is within 2 % of the paper's best.

        Seeds are averaged. Their ratios share the paper's samples, so the error of the mean is at most the mean of the
        errors.
        """
        for name, solver in ((n.name, default_solver(n.model.method)) for n in networks):
            rows = [row for row in self.results.rows if row["network"] == name and "ratio" in row]
            ours = [
                row for row in rows if (row["solver"], row["grid"], row["evaluations"]) == (solver, Sampler.grid, FEW)
            ]
            if ours:
                ratio, error = (sum(row[key] for row in ours) / len(ours) for key in ("ratio", "ratio_error"))
                yield f"{name}: our default, {FEW} evaluations, {len(ours)} seeds: {ratio:.4f} ± {error:.4f} {LONGEST}"
            near = [row for row in rows if row["seed"] == SEEDS[0] and row["ratio"] <= WITHIN]
            least = min(near, key=lambda row: (row["evaluations"], row["ratio"]), default=None)
            if least is not None:
                sampler = f"{least['solver']}, {least['grid']}, {least['evaluations']} evaluations"
                yield f"{name}: the fewest, {sampler}: {least['ratio']:.4f} ± {least['ratio_error']:.4f} {LONGEST}"


def fid(args: argparse.Namespace, real: Tensor) -> None:
    device, started = torch.device(args.device), time.monotonic()
    cuda = device.type == "cuda"
    extractor = Inception(device=device, precision="float16" if cuda else "float32", batch=250 if cuda else 50)
    results = Results(args.out, "fid", {
        "of": f"FID of {args.num} samples to {len(real)} test images", "num": args.num, "batch": args.batch,
        "extractor": extractor.name, "precision": extractor.precision, "device": device.type,
    })  # fmt: skip
    yardstick = Yardstick(collect(real.split(1000 if cuda else 50), extractor).moments)
    print(f"reference: {len(real)} images after {time.monotonic() - started:.1f} s", flush=True)
    clock = Clock(started + 60 * args.minutes - RESERVE_S)
    measuring = Measuring(results, extractor, yardstick, clock, args.num, args.batch)
    networks = [Network.load(run, device) for run in args.runs]
    if len({network.name for network in networks}) < len(networks):
        raise SystemExit(f"the networks need folders of different names, got {[n.name for n in networks]}")
    run_fid(measuring, networks, args)


def run_fid(measuring: Measuring, networks: list[Network], args: argparse.Namespace) -> None:
    """Measure stage by stage, all networks in each, until nothing or no time is left."""
    try:
        for network in networks:
            # compile for this batch size before anything is timed
            warm = torch.arange(min(args.batch, args.num), device=measuring.device)
            measuring.extractor(draw(network, Case(network.name, "sde2", "edm", 3), warm))
        for stage in args.stages:
            for network in networks:
                for case in stage_cases(stage, network, args.solvers, args.grids):
                    if not measuring.results.find(case, network.weights):
                        measuring.measure(network, case)
    except OutOfTime as reason:
        print(f"stopping: {reason}. Run the same command to resume.", flush=True)
    measuring.compare()
    measuring.results.publish()
    for line in measuring.verdicts(networks):
        print(line, flush=True)
