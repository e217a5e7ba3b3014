"""What sampling costs beside the network: the share of a step that is noise and arithmetic.

    python docs/benchmarks/sampler_overhead.py --device cuda                   DiT-S/2 on 32 x 32 images, batch 256
    python docs/benchmarks/sampler_overhead.py --backbone dit-mini/4 --batch 4     a quick look on a CPU

Times whole trajectories and, beside them, as many evaluations of the denoiser alone; the difference is the sampler's.
The preconditioning around the network (Denoiser) counts with the network: training pays for it as well.
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
from bsi.grids import geometric_grid
from bsi.methods import BSI
from bsi.noise import SeededNoise
from bsi.sampling import sample

SHAPE = (3, 32, 32)


def timed(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds, the median of `repeats` after two that warm up and compile."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = []
    for i in range(repeats + 2):
        wait()
        started = time.perf_counter()
        work()
        wait()
        if i >= 2:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="dit-s/2")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=10 if cuda else 3)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    args = parser.parse_args()
    device, method = torch.device(args.device), BSI()
    network = build(resolve(args.backbone), SHAPE, 256).to(device).eval()
    network.compute_dtype = compute_dtype("auto", device)
    accelerate(network, device)
    freeze(network)
    denoiser, grid = Denoiser(network, method), geometric_grid(method, args.steps)
    ids = torch.arange(args.batch, device=device)
    latent, levels = torch.randn(args.batch, *SHAPE, device=device), grid.to(device)

    def evaluate() -> None:
        for level in levels:
            denoiser(latent, level.expand(args.batch))

    with torch.no_grad():
        alone = timed(evaluate, device, args.repeats)
        for solver in ("ode-root", "sde-root"):
            for kind in (BrownianPath, SeededNoise):
                whole = timed(lambda k=kind, s=solver: sample(method, denoiser, k(0, ids, SHAPE), grid, s), device,
                              args.repeats)  # fmt: skip
                record = {
                    "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                    "backbone": args.backbone, "batch": args.batch, "solver": solver, "noise": kind.__name__,
                    "evaluation_ms": round(1000 * alone / len(grid), 3),
                    "step_ms": round(1000 * whole / len(grid), 3),
                    "overhead_percent": round(100 * (whole / alone - 1), 2),
                }  # fmt: skip
                print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
