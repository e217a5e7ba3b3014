"""The cost of sampling besides the network: the share of a step that is noise and arithmetic.

    python docs/benchmarks/sampler_overhead.py --device cuda        DiT-S/2 on 32 x 32 images, batch 1024; half a minute
    python docs/benchmarks/sampler_overhead.py --backbone dit-mini/4 --batch 4                    a quick check on a CPU

Complete trajectories alternate with as many evaluations of the denoiser alone, so that a GPU that slows down as it
warms up slows down both. The median of the ratios is the sampler's share. The preconditioning around the network
(Denoiser) counts as part of the network.

Predicted for an H200 at batch 1024 (33 ms an evaluation; a pass over the latents is 12.6 MB, 3 us): the step itself
reads four arrays and writes one, 15 us, 0.05 %. A Brownian increment is 16 Normals for each value: 12.6 million Philox
counters of some 400 operations, 0.4 ms: 1 % (2 % with torch's compiler, whose two kernels passed a gigabyte of words).
Independent noise is a sixteenth of that.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from bsi.backbones import accelerate, build, compute_dtype, freeze, resolve
from bsi.brownian import BrownianPath
from bsi.denoiser import Denoiser
from bsi.grids import named_grid
from bsi.methods import BSI
from bsi.rng import SeededNoise
from bsi.sampler import FLOW_SOLVER, Sampler
from bsi.sampling import sample

SHAPE = (3, 32, 32)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds, from an idle device to an idle device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="dit-s/2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1024] if cuda else [4])
    parser.add_argument("--steps", type=int, default=Sampler.steps)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    args = parser.parse_args()
    device, method = torch.device(args.device), BSI()
    network = build(resolve(args.backbone), SHAPE, 256).to(device).eval()
    network.compute_dtype = compute_dtype("auto", device)
    accelerate(network, device)
    freeze(network)
    denoiser, grid = Denoiser(network, method), named_grid(Sampler.grid)(method, args.steps)
    for batch in args.batch:
        ids, latent = torch.arange(batch, device=device), torch.randn(batch, *SHAPE, device=device)
        levels = grid.to(device)

        def evaluate(latent=latent, levels=levels, batch=batch) -> None:
            for level in levels:
                denoiser(latent, level.expand(batch))

        for solver, kind in ((FLOW_SOLVER, BrownianPath), ("sde2", BrownianPath), ("sde2", SeededNoise)):

            def draw(solver=solver, kind=kind, ids=ids) -> None:
                sample(method, denoiser, kind(0, ids, SHAPE), grid, solver)

            with torch.no_grad():
                evaluate(), draw()  # compiles, chooses kernels and allocates
                pairs = [(timed(evaluate, device), timed(draw, device)) for _ in range(args.repeats)]
            ratios = [total / alone for alone, total in pairs]
            record = {
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                "backbone": args.backbone, "batch": batch, "solver": solver, "noise": kind.__name__,
                "evaluation_ms": round(1000 * statistics.median(alone for alone, _ in pairs) / len(grid), 3),
                "overhead_percent": round(100 * (statistics.median(ratios) - 1), 2),
                "overhead_range": [round(100 * (ratio - 1), 2) for ratio in (min(ratios), max(ratios))],
            }  # fmt: skip
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
