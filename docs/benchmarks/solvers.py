"""Solvers and grids against network evaluations: how far from the converged sample, and how far from the data.

    python docs/benchmarks/solvers.py distance --out solvers                       exact denoiser over CIFAR-10's images
    python docs/benchmarks/solvers.py distance --run runs/cifar10-dit-s --out solvers-net
    python docs/benchmarks/solvers.py fid --run runs/cifar10-dit-s --out solvers-fid --minutes 9

`distance`: root mean square of x_k - x_inf over the pixels of all samples, from the same noise; stochastic solvers
follow the same Brownian paths, and each kind of process has its own limit. (The exact denoiser's samples are training
images: what counts there is how many samples end at another image.) `fid`: FID of `--num` samples to CIFAR-10's test
images.

Results are written after each case (results.json, results.csv, figure.png in --out), and a case that is there already
is not computed again: run the same command until nothing is left. It stops before `--minutes`.
"""

import argparse
import csv
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import bsi
from bsi.brownian import BrownianPath
from bsi.grids import GRIDS, named_grid
from bsi.methods import BFN, BSI, VDM, Method
from bsi.sampling import evaluations, sample
from bsi.solvers import SOLVERS

METHODS = {"bsi": BSI(), "bfn": BFN(), "vdm": VDM()}
# Which converged sample a solver has: the posterior's path, the flow's point, or churn's own.
LIMITS = {"posterior": "sde-root", "sde2": "sde-root", "sde-root": "sde-root", "ode2": "ode-root",
          "ode-root": "ode-root", "churn": "churn"}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One point of the figure."""

    solver: str
    grid: str
    evaluations: int

    @property
    def name(self) -> str:
        return f"{self.solver}/{self.grid}/{self.evaluations}"


def cifar10(part: str) -> Tensor:
    """uint8 (n, 3, 32, 32), from the binary version. A record is one label and 3072 pixels."""
    folder = Path(os.environ.get("BSI_DATA", "~/.cache/bsi-data")).expanduser() / "cifar-10-batches-bin"
    names = ["test_batch.bin"] if part == "test" else [f"data_batch_{i}.bin" for i in range(1, 6)]
    records = np.concatenate([np.fromfile(folder / name, np.uint8) for name in names]).reshape(-1, 3073)
    return torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32))


class Points:
    """E[x | psi] for data that is a finite set of points, in pieces, so that any number of them fits.

    In float64: at the last level a logit is a difference of numbers a million times its size.
    """

    def __init__(self, method: Method, points: Tensor, piece: int = 5000) -> None:
        self.method, self.pieces = method, points.flatten(1).split(piece)

    def __call__(self, latent: Tensor, level: Tensor) -> Tensor:
        encoder = self.method.encoder(level)
        signal, noise = encoder.signal[:, None], encoder.noise.clamp(min=1e-30)[:, None]
        psi, shape = latent.double().flatten(1), latent.shape
        top = torch.full_like(signal, -torch.inf)
        mass, total = torch.zeros_like(signal), torch.zeros_like(psi)
        for piece in self.pieces:
            x = piece.double()
            fit = signal / noise.square() * (psi @ x.T - 0.5 * signal * x.square().sum(1))
            higher = torch.maximum(top, fit.max(1, keepdim=True).values)
            weights, kept = torch.exp(fit - higher), torch.exp(top - higher)
            mass, total, top = kept * mass + weights.sum(1, keepdim=True), kept * total + weights @ x, higher
        return (total / mass).to(latent.dtype).reshape(shape)


def cases(args: argparse.Namespace, method: Method) -> Iterator[Case]:
    """All solvers and grids at few evaluations, the paper's sampler alone at many, in the order asked for."""
    for count in args.evaluations:
        for solver in args.solvers:
            for grid in args.grids:
                if grid != "paper" or isinstance(method, BFN) or "geometric" not in args.grids:
                    yield Case(solver, grid, count)  # elsewhere the paper's grid is the geometric one
    for count in args.many:
        yield Case("posterior", "paper", count)


class Results:
    """What is known so far, on disk after each case."""

    def __init__(self, folder: Path, about: dict[str, object]) -> None:
        self.folder, self.about = folder, about
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "results.json"
        self.rows: list[dict[str, object]] = []
        if self.file.exists():
            found = json.loads(self.file.read_text())
            if found["about"] != about:
                raise SystemExit(f"{folder} holds results of {found['about']}, not of {about}: choose another --out")
            self.rows = found["rows"]

    def has(self, case: Case) -> bool:
        return any(row["case"] == case.name for row in self.rows)

    def add(self, case: Case, value: float, seconds: float) -> None:
        self.rows.append({"case": case.name, **asdict(case), self.about["what"]: value, "seconds": round(seconds, 2)})
        print(f"{case.name:<28} {self.about['what']} {value:.5g}   {seconds:.1f} s", flush=True)
        beside = self.file.with_suffix(".part")
        beside.write_text(json.dumps({"about": self.about, "rows": self.rows}, indent=1))
        beside.replace(self.file)
        with (self.folder / "results.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]))
            writer.writeheader()
            writer.writerows(self.rows)

    def draw(self) -> None:
        """Evaluations across, the value up, a line for each solver and grid."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(8, 5.5))
        styles = dict(zip(GRIDS, ("-.", "--", "-", ":"), strict=True))
        colours = dict(zip(SOLVERS, pyplot.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
        for solver in SOLVERS:
            for grid in GRIDS:
                rows = [row for row in self.rows if row["solver"] == solver and row["grid"] == grid]
                points = sorted((row["evaluations"], row[self.about["what"]]) for row in rows)
                if points:
                    axes.plot(*zip(*points, strict=True), styles[grid], marker=".", color=colours[solver],
                              label=f"{solver}, {grid}")  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="network evaluations", ylabel=str(self.about["what"]))
        axes.legend(fontsize=7, ncols=2)
        axes.grid(True, which="both", alpha=0.2)
        axes.set_title(str(self.about["of"]), fontsize=9)
        figure.tight_layout()
        figure.savefig(self.folder / "figure.png", dpi=150)


def run_all(args: argparse.Namespace, method: Method, results: Results, measure: Callable[[Case], float]) -> None:
    """Case by case, until all are there or the next one would not end in time."""
    deadline, rate = time.monotonic() + 60 * args.minutes, 0.0
    for case in cases(args, method):
        if results.has(case):
            continue
        if time.monotonic() + 1.2 * rate * case.evaluations > deadline:
            print(f"stopping before {case.name}: it would not end in time. Run the same command to go on.", flush=True)
            break
        started = time.monotonic()
        value = measure(case)
        seconds = time.monotonic() - started
        rate = max(0.5 * rate, seconds / case.evaluations)  # the first cases also compile
        results.add(case, value, seconds)
    if results.rows:
        results.draw()


def steps_of(method: Method, case: Case) -> int:
    return max(1, case.evaluations - evaluations(method, 0))


def distance(args: argparse.Namespace) -> None:
    if args.run:
        model = fast(bsi.load(args.run), args.device)
        method, predict, shape, of = model.method, model.denoiser, model.shape, f"run {args.run.name}"
        dtype = torch.float32
    else:
        method = METHODS[args.method]
        images = cifar10("train")[: args.images].float() / 127.5 - 1
        images = torch.nn.functional.avg_pool2d(images, 32 // args.side).to(args.device)
        predict, shape, dtype = Points(method, images), tuple(images.shape[1:]), torch.float64
        of = f"{args.method}, exact denoiser over {len(images)} CIFAR-10 images of {args.side} x {args.side}"
    about = {"what": "distance", "of": of, "num": args.num, "reference": args.reference, "seed": args.seed}
    results, limits = Results(args.out, about), {}

    def solve(solver: str, levels: Tensor) -> Tensor:
        noise = BrownianPath(args.seed, torch.arange(args.num, device=args.device), shape, dtype)
        return sample(method, predict, noise, levels, solver)

    def measure(case: Case) -> float:
        limit = LIMITS[case.solver]
        if limit not in limits:
            limits[limit] = solve(limit, named_grid("geometric")(method, args.reference))
        found = solve(case.solver, named_grid(case.grid)(method, steps_of(method, case)))
        return float((found - limits[limit]).double().square().mean().sqrt())

    run_all(args, method, results, measure)


def fid(args: argparse.Namespace) -> None:
    from bsi.metrics import Inception, Reference, collect, frechet_distance

    model = fast(bsi.load(args.run), args.device)
    method, extractor = model.method, Inception(device=args.device)
    about = {
        "what": "fid",
        "of": f"run {args.run.name}",
        "num": args.num,
        "seed": args.seed,
        "reference": "cifar10 test",
    }
    results = Results(args.out, about)
    real = Reference("cifar10", "test", None, collect(cifar10("test").split(args.batch), extractor))

    def measure(case: Case) -> float:
        levels = named_grid(case.grid)(method, steps_of(method, case))

        def batches() -> Iterator[Tensor]:
            for ids in torch.arange(args.num, device=args.device).split(args.batch):
                noise = BrownianPath(args.seed, ids, model.shape)
                yield model.data(sample(method, model.denoiser, noise, levels, case.solver))

        return frechet_distance(collect(batches(), extractor).moments, real.features.moments)

    run_all(args, method, results, measure)


def fast(model: bsi.Model, device: str) -> bsi.Model:
    """On its device and in its fastest form."""
    from bsi.backbones import Backbone, accelerate, compute_dtype, freeze

    network = model.to(device).denoiser.backbone
    if isinstance(network, Backbone):
        network.compute_dtype = compute_dtype("auto", torch.device(device))
        accelerate(network, torch.device(device))
        freeze(network)
    return model


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["distance", "fid"])
    parser.add_argument("--run", type=Path, help="a trained model; without it, the exact denoiser over the images")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the results")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--method", choices=METHODS, default="bsi", help="of the exact denoiser")
    parser.add_argument("--images", type=int, default=50_000 if cuda else 2000, help="that the exact denoiser knows")
    parser.add_argument("--side", type=int, default=32 if cuda else 16, choices=[4, 8, 16, 32], help="averaged down to")
    parser.add_argument("--num", type=int, help="samples: 64, or 10,000 for fid")
    parser.add_argument("--batch", type=int, default=500 if cuda else 50)
    parser.add_argument("--reference", type=int, default=2048 if cuda else 512, help="steps of the converged sample")
    parser.add_argument("--solvers", nargs="+", default=list(SOLVERS), choices=SOLVERS)
    parser.add_argument("--grids", nargs="+", default=list(GRIDS), choices=GRIDS)
    parser.add_argument("--evaluations", type=int, nargs="*", default=[16, 8, 32, 64, 12, 24, 48])
    parser.add_argument("--many", type=int, nargs="*", default=[128, 256, 512, 1024], help="for the paper's sampler")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    args = parser.parse_args()
    args.num = args.num or (64 if args.what == "distance" else 10_000)
    if args.what == "fid" and args.run is None:
        parser.error("fid needs a trained model: --run FOLDER")
    with torch.no_grad():
        {"distance": distance, "fid": fid}[args.what](args)


if __name__ == "__main__":
    main()
