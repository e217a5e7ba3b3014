"""The largest batch that fits into GPUs of common sizes, for every backbone, by the estimate of `bsi.backbones.costs`.

    python docs/benchmarks/batches.py                     # 32 x 32 images in three channels, bfloat16
    python docs/benchmarks/batches.py --size 64 --ranks 8
    python docs/benchmarks/batches.py --optimizer muon

Images per step on one GPU; `--accumulation` computes a larger batch in pieces. Needs no GPU and no torch.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import get_args

from bsi.backbones.config import BackboneConfig, resolve
from bsi.backbones.costs import Form, OptimizerKind, training_memory

GIB = 2**30
MEMORY = (8, 16, 24, 40, 80, 141)
CASES: tuple[tuple[str, Form], ...] = (
    ("dit-mini/2", "fused"), ("dit-s/2", "fused"), ("dit-b/2", "fused"), ("dit-l/4", "fused"), ("dit-l/2", "fused"),
    ("dit-l/2", "lean"), ("dit-l/2", "compiled"), ("dit-xl/2", "fused"), ("unet-128x32", "fused"),
    ("unet-128x32", "lean"), ("unet-256x32", "fused"), ("unet-128-256-256x2", "fused"), ("mlp-256x4", "compiled"),
)  # fmt: skip


def row(
    name: str, form: str, config: BackboneConfig, shape: tuple[int, ...], ranks: int, kept: Form, kind: OptimizerKind
) -> str:
    memory = training_memory(config, shape, 256, form=kept, optimizer=kind)
    fits = (memory.largest(gib * GIB, ranks) for gib in MEMORY)
    return f"| {name} | {form} | {' | '.join(str(images) if images else '-' for images in fits)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=32, help="height and width of the images")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--optimizer", choices=get_args(OptimizerKind), default="adamw")
    args = parser.parse_args()
    shape = (3, args.size, args.size)
    print(f"| network | form | {' | '.join(f'{gib} GiB' for gib in MEMORY)} |")
    print(f"|---|---|{'---|' * len(MEMORY)}")
    for name, form in CASES:
        config = resolve(name)
        print(row(name, form, config, shape, args.ranks, form, args.optimizer))
        if form == "fused":
            print(
                row(name, "checkpoint", replace(config, checkpoint=True), shape, args.ranks, "compiled", args.optimizer)
            )


if __name__ == "__main__":
    main()
