"""What FSDP costs on a single GPU, and the largest DiT that it trains there with recomputed blocks.

    python docs/benchmarks/sharding.py                                        # on a GPU
    python docs/benchmarks/sharding.py --device cpu --batch 4 --size 8 --tiny

First the same step of DiT-L/2 with and without FSDP: without recomputation, where a single GPU has the fused form and
FSDP compiled blocks, and with it, where both have compiled blocks. Then DiTs of growing depth, each in a process of
its own, until one does not fit. One line of JSON for each, with the estimate of `training_memory`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict

import torch

from bsi.backbones.config import DiTConfig, resolve
from bsi.backbones.costs import training_memory
from bsi.evaluation.speed import Case, measure

WIDTH, HEADS, DEPTHS = 2048, 16, (40, 72, 80, 88, 96)
CASES = [("ddp", False), ("fsdp", False), ("ddp", True), ("fsdp", True)]


def one(words: argparse.Namespace) -> None:
    """Measure one case, in this process."""
    if words.depth:
        config = DiTConfig(words.width, words.depth, HEADS, dropout=0.0, checkpoint=words.checkpoint)
    else:
        config = DiTConfig(**{**asdict(resolve(words.backbone)), "checkpoint": words.checkpoint})
    device = torch.device(words.device, 0) if words.device == "cuda" else torch.device("cpu")
    shape = (3, words.size, words.size)
    if device.type == "cuda":
        torch.cuda.init()  # before its memory is measured
    case = Case("train", config, shape, words.batch, "bsi", "auto", False, device, words.parallel)
    found = measure(case, repeats=5)
    shards = 1 if words.parallel == "fsdp" else None
    form = "fused" if not words.checkpoint and words.parallel == "ddp" and device.type == "cuda" else "compiled"
    estimate = training_memory(config, shape, 256, form=form, half=device.type == "cuda", shards=shards)
    print(json.dumps({
        "config": asdict(config), "parallel": words.parallel, "batch": words.batch, "parameters": found.parameters,
        "images_per_s": found.images_per_s, "milliseconds": found.milliseconds, "spread": found.spread,
        "peak_gib": found.peak_gib if device.type == "cuda" else None,
        "estimate_gib": estimate.bytes(words.batch) / 2**30, "recorded": found.recorded,
    }), flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--tiny", action="store_true", help="DiT-mini, and two depths, to try the script")
    parser.add_argument("--backbone", default="dit-l/2")
    for name in ("one", "checkpoint"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--parallel", default="ddp")
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--width", type=int, default=WIDTH)
    words = parser.parse_args()
    if words.one:
        return one(words)
    shared = [
        "--one",
        "--width",
        str(256 if words.tiny else WIDTH),
        "--device",
        words.device,
        "--size",
        str(words.size),
    ]
    name = "dit-mini/2" if words.tiny else words.backbone
    for parallel, checkpoint in CASES:
        flags = ["--checkpoint"] * checkpoint
        run([*shared, "--backbone", name, "--batch", str(words.batch), "--parallel", parallel, *flags])
    for depth in (1, 2) if words.tiny else DEPTHS:
        batch = min(32, words.batch)
        if run([*shared, "--depth", str(depth), "--batch", str(batch), "--parallel", "fsdp", "--checkpoint"]):
            break
    return None


def run(words: list[str]) -> int:
    """One case in a process of its own; prints the last line of its error."""
    ended = subprocess.run([sys.executable, __file__, *words], stderr=subprocess.PIPE, text=True)
    if ended.returncode:
        print(json.dumps({"words": words, "error": ended.stderr.strip().splitlines()[-1][:300]}), flush=True)
    return ended.returncode


if __name__ == "__main__":
    main()
