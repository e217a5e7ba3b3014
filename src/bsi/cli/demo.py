"""`bsi demo`: the whole way, from data to samples, on a CPU and in minutes."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import UInt8


@dataclass(frozen=True)
class Demo:
    """Train a small BSI on handwritten digits (8x8, 17 gray levels, part of the package), measure it, and draw samples.

    Takes under three minutes on two cores. Interrupted, the same command goes on; finished, it measures and draws
    again.
    """

    out: Path = Path("runs/demo")
    """the run folder; samples.png is written there"""
    steps: int | None = None
    """training steps, if not the recipe's"""
    seed: int = 0
    """of the data's order, the noise and the weights"""
    json: bool = False
    """the result as JSON on stdout"""


def run(args: Demo) -> int:
    import bsi
    from bsi import pictures
    from bsi.cli import eval as evaluation
    from bsi.cli.eval_text import bound_line
    from bsi.data.store import open_dataset
    from bsi.report import write_report
    from bsi.runtime.distributed import join

    recipe = replace(bsi.recipes.digits(), seed=args.seed)
    if args.steps is not None:
        recipe = replace(recipe, steps=args.steps)
    print(
        f"bsi demo: {recipe.steps} steps on handwritten digits, then a bound, samples and a report",
        file=sys.stderr,
        flush=True,
    )
    folder = bsi.train(recipe, out=args.out, device="cpu")

    # What `bsi eval` does, record included, so that the report tells the same number.
    asked = evaluation.Eval(runs=(folder,), bpd=True, measure=20, recon=4, device="cpu")
    with join("cpu", evaluation.TIMEOUT_S) as world:
        found = evaluation.bound(asked, world)
    evaluation.keep(found)
    digits = open_dataset("digits")
    assert digits.bins is not None
    levels = digits.bins.count
    histogram = histogram_bits_per_dim(digits.train, digits.test, levels)
    images = bsi.load(folder).sample(64, steps=32, seed=args.seed)
    picture = folder / "samples.png"
    pictures.grid(images.numpy(), high=levels - 1).save(picture)
    report = write_report(folder)

    if args.json:
        told = {name: found.record[name] for name in ("bits_per_dim", "monte_carlo_error", "data_error")}
        files = {"run": str(folder), "samples": str(picture), "report": str(report)}
        print(json.dumps({**files, **told, "histogram": histogram}))
    else:
        print(f"test set    {bound_line(found.record)}")
        print(f"histogram   {histogram:.4f} bits/dim, each pixel by itself")
        print(f"samples     {picture}")
        print(f"report      {report}, opens in a browser")
        name = shlex.quote(str(folder))
        print(f"go on with  bsi view {name} · bsi sample {name} --num 100 --out more.png", file=sys.stderr)
    return 0


def histogram_bits_per_dim(
    train: UInt8[np.ndarray, "train *shape"], test: UInt8[np.ndarray, "test *shape"], levels: int
) -> float:
    """What a model needs that knows each pixel's own distribution alone: counts of the training set, plus one."""
    import numpy as np

    counts = np.stack([(train == level).sum(0) for level in range(levels)]) + 1.0
    probability = counts / counts.sum(0)
    chosen = np.take_along_axis(probability[None], test[:, None].astype(np.int64), axis=1)
    return float(-np.log2(chosen).mean())
