"""Print the table of docs/many-gpus.md: memory, communication and time of a step on 8, 64 and 512 GPUs, calculated.

    python docs/benchmarks/many_gpus.py

Every row is the output of a dry run, the first one of

    bsi train imagenet32-dit-l2 --backbone dit-l/2 --parallel ddp --batch 512 --virtual-shards 512 --shape 3 32 32
        --dry-run --ranks 8
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout

from bsi.cli import main

FAST, SLOW = 340, 40  # GB/s between hosts: an adapter for each GPU, one for each host
ROWS = [
    *(("dit-l/2", parallel, ranks, 64, FAST) for ranks in (8, 64, 512) for parallel in ("ddp", "fsdp")),
    *(("dit-h/2", parallel, ranks, 64, FAST) for ranks in (8, 64, 512) for parallel in ("ddp", "fsdp")),
    *(("dit-g/2", parallel, ranks, 32, FAST) for ranks in (8, 64, 512) for parallel in ("ddp", "fsdp", "hsdp")),
    *(("dit-g/2", parallel, 64, 32, SLOW) for parallel in ("ddp", "fsdp", "hsdp")),
    ("dit-g/2", "fsdp", 512, 4, FAST),
]
HEADER = (
    "| network | `--parallel` | GPUs | images per GPU | GB/s between hosts | GiB per GPU | GB sent | communication | "
    "computation | step | images/s | efficiency |"
)


def row(backbone: str, parallel: str, ranks: int, each: int, gb_per_s: int) -> str:
    """A row of the table."""
    words = ["--backbone", backbone, "--parallel", parallel, "--batch", str(each * ranks), "--ranks", str(ranks)]
    words += [
        "--network-gb-per-s",
        str(gb_per_s),
        "--virtual-shards",
        "512",
        "--shape",
        "3",
        "32",
        "32",
        "--dry-run",
        "--json",
    ]
    with redirect_stdout(io.StringIO()) as printed:
        if main(["train", "imagenet32-dit-l2", *words]):
            raise SystemExit(1)
    found = json.loads(printed.getvalue())
    alone = (found["computation_ms"] + found["update_ms"]) / found["step_ms"]
    between = str(gb_per_s) if ranks > 8 else "-"
    cells = [backbone, parallel, str(ranks), str(each), between, f"{found['gib_per_rank']:.0f}"]
    cells += [f"{found['gb_sent_per_step']:.1f}"]
    cells += [f"{found[f'{part}_ms']:.0f} ms" for part in ("communication", "computation", "step")]
    rate = f"{found['predicted_images_per_s']:,.0f}"
    return f"| {' | '.join([*cells, rate, f'{100 * alone:.0f} %'])} |"


if __name__ == "__main__":
    print(HEADER)
    print("|" + "---|" * (HEADER.count("|") - 1))
    for case in ROWS:
        print(row(*case))
