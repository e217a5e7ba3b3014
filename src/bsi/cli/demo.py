"""`bsi demo`: training, a bound, samples and a report, on a CPU in minutes."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from bsi.progress import log


@dataclass(frozen=True)
class Demo:
    """Train a small BSI on handwritten digits (8x8, 17 gray levels), evaluate it, and draw samples.

    Takes less than three minutes on two cores. The same command resumes an interrupted run, and evaluates and draws
    again when training is finished.
    """

    out: Path = Path("runs/demo")
    """The run folder; samples.png is written there."""
    steps: int | None = None
    """Training steps, instead of the recipe's number."""
    seed: int = 0
    """Seed of the data order, the noise and the weights."""
    json: bool = False
    """Print the result as JSON on stdout."""


def run(args: Demo) -> int:
    import bsi
    from bsi import pictures
    from bsi.cli import eval as evaluation
    from bsi.data.store import open_dataset
    from bsi.report import write_report
    from bsi.runtime.baselines import baselines_text
    from bsi.runtime.distributed import join

    recipe = replace(bsi.recipes.digits(), seed=args.seed)
    if args.steps is not None:
        recipe = replace(recipe, steps=args.steps)
    log(f"bsi demo: {recipe.steps} steps on handwritten digits, then a bound, samples and a report")
    folder = bsi.train(recipe, out=args.out, device="cpu").path

    # As `bsi eval` does, with the stored record, so that the report shows the same number.
    options = evaluation.Eval(runs=(folder,), bpd=True, measure=20, recon=4, device="cpu")
    with join("cpu", evaluation.TIMEOUT_S) as world:
        found = evaluation.bound(options, world)
    evaluation.keep(found)
    digits = open_dataset("digits")
    assert digits.bins is not None
    levels = digits.bins.count
    images = bsi.load(folder).sample(64, steps=32, seed=args.seed)
    picture = folder / "samples.png"
    pictures.grid(images.numpy(), high=levels - 1).save(picture)
    report = write_report(folder)

    if args.json:
        bound = {name: found.record[name] for name in ("bits_per_dim", "monte_carlo_error", "data_error")}
        files = {"run": str(folder), "samples": str(picture), "report": str(report)}
        print(json.dumps({**files, **bound, "baselines": found.record["baselines"]}))
    else:
        print(f"test set    {evaluation.bound_line(found.record)}")
        print(f"baselines   {baselines_text(found.record['baselines'])}")
        print(f"samples     {picture}")
        print(f"report      {report}, opens in a browser")
        name = shlex.quote(str(folder))
        log(f"next: bsi view {name} · bsi sample {name} --num 100 --out more.png")
    return 0
