"""What does a training lose that is carried in bfloat16 (carry.py)? The digits, a DiT of 22k parameters, on a CPU.

    python docs/benchmarks/carried_training.py --seeds 0 1 --out FOLDER

400 steps, interrupted after 200, and resumed from the checkpoint itself, from all of it in bfloat16, and from parts of
it. Prints the training loss after the interruption, the bound of the test digits, and its difference from that of the
exactly resumed training, with the error over images.
"""

import argparse
import json
import math
import shutil
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from carry import pack_run, unpack

import bsi
from bsi.data.store import open_dataset
from bsi.recipe import Ema, Every

STEPS, HALF = 400, 200
KINDS = {"exact": None, "all": (), "weights and average": ("model", "ema"), "weights": ("model",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    test = torch.from_numpy(open_dataset("digits").test[:].copy())
    base = bsi.recipes.digits()

    def stop(record: dict[str, object]) -> None:
        if record["step"] == HALF:
            signal.raise_signal(signal.SIGTERM)

    for seed in args.seeds:
        recipe = replace(
            base, backbone=replace(base.backbone, width=32, depth=1, heads=2), steps=STEPS, seed=seed,
            optimizer=replace(base.optimizer, warmup=15), ema=Ema(0.95, 100),
            every=Every(journal=20, evaluate=0, sample=0, checkpoint=0),
        )  # fmt: skip
        first, exact = args.out / f"{seed}" / "run", np.zeros(0)
        with suppress(SystemExit):
            bsi.train(recipe, out=first, sinks=[stop])
        for name, only in KINDS.items():
            folder = first.parent / name.replace(" ", "-")
            if only is None:
                shutil.copytree(first, folder / "run")
            else:
                pack_run(first, folder / "parts", only)
                unpack(folder / "parts", folder)
            run = bsi.train(recipe, out=folder / "run")
            losses = [line["bits_per_dim"] for line in run.journal() if line["step"] > HALF]
            bound = run.model().elbo(test, measure=8, recon=2)
            exact = bound.nats.numpy() if only is None else exact
            gap = (bound.nats.numpy() - exact) / (bound.n * math.log(2))
            error = gap.std(ddof=1) / len(gap) ** 0.5
            found = {"first_20": losses[0], "last_100": float(np.mean(losses[-5:])), "test": bound.bits_per_dim}
            found |= {"less_exact": float(gap.mean()), "error": float(error)}
            print(json.dumps({"seed": seed, "carried": name, **{k: round(v, 5) for k, v in found.items()}}), flush=True)


if __name__ == "__main__":
    main()
