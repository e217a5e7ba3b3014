"""Solvers and grids by network evaluations: the distance to the converged sample, and the distance to the data.

    python docs/benchmarks/solvers.py distance --out solvers-oracle --minutes 2      the exact denoiser over CIFAR-10
    python docs/benchmarks/solvers.py distance --runs runs/cifar10-dit-s --out solvers-net
    python docs/benchmarks/solvers.py fid --runs runs/bsi runs/bfn runs/vdm --out solvers-fid --minutes 9

`distance` is the root mean square, over the pixels of all samples, of x_k - x_inf from the same noise; stochastic
solvers follow the same Brownian paths, and each kind of process has its own limit. (The exact denoiser's samples are
training images, and a sample that ends at another image is far away: `median` is the distance of the median sample,
`elsewhere` the share of samples more than 0.05 away.) `fid` is in solver_fid.py.

Results are written after each case (solver_results.py), and finished cases are not computed again: run the same command
until nothing is left. It stops before `--minutes`.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
from solver_fid import STAGES, fid
from solver_results import Case, Results, pairs
from torch import Tensor

import bsi
from bsi.brownian import BrownianPath
from bsi.grids import GRIDS, named_grid
from bsi.methods import BFN, BSI, VDM, Method, Predictor
from bsi.sampling import sample
from bsi.solvers import SOLVERS

METHODS = {"bsi": BSI(), "bfn": BFN(), "vdm": VDM()}
# The solver that computes the converged sample of each solver.
LIMITS = {"posterior": "sde2", "sde2": "sde2", "ode2": "ode2", "churn": "churn"}
ELSEWHERE = 0.05  # root mean square over the pixels


def cifar10(part: str) -> Tensor:
    """uint8 (n, 3, 32, 32), from the binary version. A record is one label and 3072 pixels."""
    folder = Path(os.environ.get("BSI_DATA", "~/.cache/bsi-data")).expanduser() / "cifar-10-batches-bin"
    names = ["test_batch.bin"] if part == "test" else [f"data_batch_{i}.bin" for i in range(1, 6)]
    records = np.concatenate([np.fromfile(folder / name, np.uint8) for name in names]).reshape(-1, 3073)
    return torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32))


class Points:
    """E[x | psi] for data that is a finite set of points, computed in pieces to limit the memory.

    In float64, because at the last level a logit is a difference of numbers a million times its size.
    """

    def __init__(self, method: Method, points: Tensor, piece: int = 10_000) -> None:
        self.method, self.pieces = method, points.double().flatten(1).split(piece)
        self.halves = [0.5 * x.square().sum(1) for x in self.pieces]

    def __call__(self, latent: Tensor, level: Tensor) -> Tensor:
        encoder = self.method.encoder(level)
        signal, noise = encoder.signal[:, None], encoder.noise.clamp(min=1e-30)[:, None]
        psi, shape = latent.double().flatten(1), latent.shape
        top = torch.full_like(signal, -torch.inf)
        mass, total = torch.zeros_like(signal), torch.zeros_like(psi)
        for x, half in zip(self.pieces, self.halves, strict=True):
            fit = signal / noise.square() * (psi @ x.T - signal * half)
            higher = torch.maximum(top, fit.max(1, keepdim=True).values)
            weights, kept = torch.exp(fit - higher), torch.exp(top - higher)
            mass, total, top = kept * mass + weights.sum(1, keepdim=True), kept * total + weights @ x, higher
        return (total / mass).to(latent.dtype).reshape(shape)


def distance(args: argparse.Namespace) -> None:
    """One network or oracle: the converged samples first, then case by case."""
    if args.runs:
        torch.set_float32_matmul_precision("high")  # a network in bfloat16 would be too rough to converge to anything
        model = bsi.load(args.runs[0]).to(args.device).eval()
        method, predict, shape, dtype = model.method, model.denoiser, model.shape, torch.float32
        name, of = args.runs[0].stem, f"samples of {args.num} seeds"
    else:
        method, dtype = METHODS[args.method], torch.float64
        images = cifar10("train")[: args.images].float() / 127.5 - 1
        images = torch.nn.functional.avg_pool2d(images, 32 // args.side).to(args.device)
        predict, shape, name = Points(method, images), tuple(images.shape[1:]), args.method
        of = f"exact denoiser over {len(images)} CIFAR-10 images of {args.side} x {args.side}"
    about = {"of": of, "num": args.num, "reference": args.reference, "seed": args.seed}
    results = Results(args.out, "distance", about)
    wanted = [
        Case(name, solver, grid, count, args.seed)
        for count in args.evaluations
        for solver, grid in pairs(method, args.solvers, args.grids)
    ] + [Case(name, "posterior", "paper", count, args.seed) for count in args.many]
    measure_distances(args, method, predict, shape, dtype, results, wanted)
    results.publish()


def measure_distances(
    args: argparse.Namespace,
    method: Method,
    predict: Predictor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    results: Results,
    wanted: list[Case],
) -> None:
    """Measure until all cases are done, or the next one would not finish in time."""
    deadline, rate, limits = time.monotonic() + 60 * args.minutes, 0.0, {}

    def solve(solver: str, levels: Tensor) -> Tensor:
        noise = BrownianPath(args.seed, torch.arange(args.num, device=args.device), shape, dtype)
        return sample(method, predict, noise, levels, solver)

    for case in wanted:
        if results.find(case):
            continue
        limit = LIMITS[case.solver]
        count = case.evaluations + (0 if limit in limits else args.reference)
        if time.monotonic() + 1.2 * rate * count > deadline:
            print(
                f"stopping before {case.name}: it would not finish in time. Run the same command to resume.", flush=True
            )
            return
        started = time.monotonic()
        if limit not in limits:
            limits[limit] = solve(limit, named_grid("geometric")(method, args.reference))
        gap = (solve(case.solver, case.levels(method)) - limits[limit]).double().flatten(1).square().mean(1)
        rms, median = float(gap.mean().sqrt()), float(gap.sqrt().median())  # waits for the device
        elsewhere = float((gap.sqrt() > ELSEWHERE).double().mean())
        seconds = time.monotonic() - started
        rate = max(0.5 * rate, seconds / count)
        results.add(case, "", distance=rms, median=median, elsewhere=elsewhere, seconds=round(seconds, 3))


def main(argv: list[str] | None = None) -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["distance", "fid"])
    parser.add_argument("--runs", type=Path, nargs="+", help="trained models; `distance` takes one or none")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the results")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--method", choices=METHODS, default="bsi", help="method of the exact denoiser")
    parser.add_argument("--images", type=int, default=50_000 if cuda else 2000, help="images of the exact denoiser")
    parser.add_argument("--side", type=int, default=32 if cuda else 16, choices=[4, 8, 16, 32], help="averaged down to")
    parser.add_argument("--num", type=int, help="samples: 64 (256 on a GPU), or 10,000 for fid")
    parser.add_argument("--batch", type=int, default=1000 if cuda else 50, help="samples at a time, for fid")
    parser.add_argument("--real", type=int, help="test images to compare with, if not all, for fid")
    parser.add_argument("--reference", type=int, default=2048 if cuda else 512, help="steps of the converged sample")
    parser.add_argument("--solvers", nargs="+", default=list(SOLVERS), choices=SOLVERS)
    parser.add_argument("--grids", nargs="+", default=list(GRIDS), choices=GRIDS)
    parser.add_argument("--evaluations", type=int, nargs="*", default=[16, 8, 32, 64, 12, 24, 48], help="for distance")
    parser.add_argument("--many", type=int, nargs="*", default=[128, 256, 512, 1024], help="the paper's, for distance")
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES, help="of fid, in this order")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    args = parser.parse_args(argv)
    args.num = args.num or (10_000 if args.what == "fid" else 256 if cuda else 64)
    if args.what == "fid" and args.runs is None:
        parser.error("fid needs trained models: --runs FOLDER ...")
    if args.what == "distance" and args.runs and len(args.runs) > 1:
        parser.error("distance takes one model at a time")
    with torch.no_grad():
        if args.what == "distance":
            distance(args)
        else:
            fid(args, cifar10("test")[: args.real])


if __name__ == "__main__":
    main()
