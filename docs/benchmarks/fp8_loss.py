"""Does training in 8 bits lose anything? Three short runs of one recipe: bf16, bf16 with another seed, and fp8.

    python docs/benchmarks/fp8_loss.py --out runs/fp8-loss                                       # DiT-L/2 on CIFAR-10
    python docs/benchmarks/fp8_loss.py --backbone dit-mini/8 --batch 8 --steps 20 --first float32 --third float32

Losses are means over the last fifth of the steps. The runs of the first and the third precision share data, noise and
initial weights; the two seeds share nothing. fp8 passes if its loss is within twice the difference of the two seeds. A
run that exists is read, not repeated.

A training loss in 8 bits includes rounding noise. To separate it from what the weights learned, the bound on test
images is evaluated too, from the same noise and in the device's usual precision for all runs.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

import bsi
from bsi.backbones import Backbone, accelerate, compute_dtype, resolve
from bsi.data import open_dataset
from bsi.recipe import Every, Optimizer, Precision
from bsi.recipes import named_recipe


def last_fifth(run: Path, steps: int) -> float:
    lines = (json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["event"] == "train" and line["step"] > 0.8 * steps]
    return sum(losses) / len(losses)


def bound(run: Path, images: int) -> float:
    """Bits per dimension of the weights themselves, not of their average."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = bsi.load(run, ema=False).to(device)
    network = model.denoiser.backbone
    assert isinstance(network, Backbone)
    network.compute_dtype = compute_dtype("auto", device)
    accelerate(network, device)
    return model.elbo(torch.tensor(open_dataset("cifar10").test[:images]).to(device), measure=4).bits_per_dim


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/fp8-loss"))
    parser.add_argument("--backbone", default="dit-l/2")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--first", choices=get_args(Precision), default="bf16")
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--third", choices=get_args(Precision), default="fp8")
    args = parser.parse_args()
    every = Every(journal=max(1, args.steps // 100), evaluate=0, sample=0, checkpoint=args.steps)
    optimizer = Optimizer(lr=args.lr, beta_2=0.99, warmup=args.steps // 10, schedule="constant")
    base = replace(
        named_recipe("cifar10-dit-s"), backbone=resolve(args.backbone), batch=args.batch, steps=args.steps, every=every,
        optimizer=optimizer, virtual_shards=1,
    )  # fmt: skip
    found, learned = [], []
    for precision, seed in ((args.first, 0), (args.first, 1), (args.third, 0)):
        run = args.out / f"{precision}-{seed}"
        bsi.train(replace(base, precision=precision, seed=seed), out=run)
        found.append(last_fifth(run, args.steps))
        learned.append(bound(run, args.images))
        print(f"{precision}, seed {seed}: loss {found[-1]:.5f}; weights {learned[-1]:.5f} bits/dim", flush=True)
    for name, (one, other, third) in (("loss", found), ("weights", learned)):
        gap, distance = abs(one - other), abs(one - third)
        verdict = "within" if distance <= 2 * gap else "NOT within"
        print(f"{name}: seeds differ by {gap:.5f}, {args.third} by {distance:.5f}: {verdict} twice the gap")


if __name__ == "__main__":
    main()
