"""Solvers and grids by network evaluations: the distance to the converged sample from the same noise.

    python docs/benchmarks/solvers.py --out solvers-oracle                            the exact denoiser over CIFAR-10
    python docs/benchmarks/solvers.py --run runs/cifar10-dit-s --out solvers-net      a trained network

The distance is the root mean square, over the pixels of all samples, of x_k - x_inf. Stochastic solvers follow the same
Brownian paths, and each kind of process has its own limit. (The exact denoiser's samples are training images, and a
sample that ends at another image is far away: `median` is the distance of the median sample, `elsewhere` the share of
samples more than 0.05 away.) Writes results.json, table.md and figure.svg.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from cifar10_images import cifar10
from torch import Tensor

import bsi
from bsi.brownian import BrownianPath
from bsi.grids import GRIDS, named_grid
from bsi.io import write_json, write_text
from bsi.methods import BFN, BSI, VDM, Method
from bsi.sampling import evaluations, sample
from bsi.solvers import SOLVERS

METHODS = {"bsi": BSI(), "bfn": BFN(), "vdm": VDM()}
# The solver that computes the converged sample of each solver.
LIMITS = {"posterior": "sde2", "sde2": "sde2", "ode2": "ode2", "churn": "churn"}
ELSEWHERE = 0.05  # root mean square over the pixels


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


def pairs(method: Method) -> list[tuple[str, str]]:
    """Solvers with grids. For BSI and VDM the paper's grid is the geometric one, so each pair is listed once."""
    same = not isinstance(method, BFN)
    twice = {(solver, "geometric" if solver == "posterior" else "paper") for solver in SOLVERS} if same else set()
    return [(solver, grid) for solver in SOLVERS for grid in GRIDS if (solver, grid) not in twice]


def table(rows: Sequence[dict[str, object]]) -> str:
    """Markdown: a row for each solver and grid, a column for each number of evaluations."""
    counts = sorted({row["evaluations"] for row in rows})
    lines = [f"| | {' | '.join(map(str, counts))} |", "|---" * (len(counts) + 1) + "|"]
    for pair in dict.fromkeys((row["solver"], row["grid"]) for row in rows):
        found = {row["evaluations"]: f"{row['distance']:.4g}" for row in rows if (row["solver"], row["grid"]) == pair}
        lines.append(f"| `{pair[0]}`, {pair[1]} | {' | '.join(found.get(count, '') for count in counts)} |")
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[dict[str, object]], path: Path) -> None:
    """Colors are solvers, dashes are grids."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.3, 3.8), layout="constrained")
    axes = figure.subplots()
    for solver, grid in dict.fromkeys((row["solver"], row["grid"]) for row in rows):
        line = sorted(
            (row["evaluations"], row["distance"]) for row in rows if (row["solver"], row["grid"]) == (solver, grid)
        )
        style, color = {"paper": "-", "edm": "--", "geometric": "-."}.get(grid, ":"), f"C{list(SOLVERS).index(solver)}"
        axes.plot(*zip(*line, strict=True), style, marker=".", color=color, label=f"{solver}, {grid}")
    axes.set(xscale="log", yscale="log", xlabel="network evaluations", ylabel="distance to the converged sample")
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main(argv: list[str] | None = None) -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a trained model in place of the exact denoiser")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the results")
    parser.add_argument("--method", choices=METHODS, default="bsi", help="method of the exact denoiser")
    parser.add_argument("--images", type=int, default=50_000 if cuda else 2000, help="images of the exact denoiser")
    parser.add_argument("--side", type=int, default=32 if cuda else 16, choices=[4, 8, 16, 32], help="averaged down to")
    parser.add_argument("--num", type=int, default=256 if cuda else 64, help="samples")
    parser.add_argument("--reference", type=int, default=2048 if cuda else 512, help="steps of the converged sample")
    parser.add_argument("--evaluations", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--many", type=int, nargs="*", default=[128, 256, 512, 1024], help="of the paper's sampler")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    args = parser.parse_args(argv)
    if args.run:
        torch.set_float32_matmul_precision("high")  # a network in bfloat16 would be too rough to converge to anything
        model = bsi.load(args.run).to(args.device).eval()
        method, predict, shape, dtype = model.method, model.denoiser, model.shape, torch.float32
    else:
        method, dtype = METHODS[args.method], torch.float64
        images = cifar10("train")[: args.images].float() / 127.5 - 1
        images = torch.nn.functional.avg_pool2d(images, 32 // args.side).to(args.device)
        predict, shape = Points(method, images), tuple(images.shape[1:])

    @torch.no_grad()
    def solve(solver: str, levels: Tensor) -> Tensor:
        noise = BrownianPath(args.seed, torch.arange(args.num, device=args.device), shape, dtype)
        return sample(method, predict, noise, levels, solver)

    args.out.mkdir(parents=True, exist_ok=True)
    limits = {limit: solve(limit, named_grid("geometric")(method, args.reference)) for limit in set(LIMITS.values())}
    cases = [(solver, grid, count) for count in args.evaluations for solver, grid in pairs(method)]
    rows = []
    for solver, grid, count in [*cases, *(("posterior", "paper", count) for count in args.many)]:
        # k + 1 evaluations are k steps with BSI or BFN, and k + 1 steps with VDM
        levels, started = named_grid(grid)(method, max(1, count - evaluations(method, 0))), time.monotonic()
        gap = (solve(solver, levels) - limits[LIMITS[solver]]).double().flatten(1).square().mean(1)
        row = {"solver": solver, "grid": grid, "evaluations": count, "distance": float(gap.mean().sqrt()),
               "median": float(gap.sqrt().median()), "elsewhere": float((gap.sqrt() > ELSEWHERE).double().mean()),
               "seconds": round(time.monotonic() - started, 3)}  # fmt: skip
        rows.append(row)
        print(f"{solver}/{grid}/{count}: {row['distance']:.5g}", flush=True)
        about = {name: str(value) for name, value in vars(args).items()}
        write_json(args.out / "results.json", {"about": about, "rows": rows})
    write_text(args.out / "table.md", table(rows))
    draw(rows, args.out / "figure.svg")


if __name__ == "__main__":
    main()
