"""`bsi demo`: training, a bound, samples and a report, on a CPU in minutes."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from bsi.cli.options import Json, answer
from bsi.progress import log


@dataclass(frozen=True)
class Demo:
    """Train a small BSI on handwritten digits (8x8, 17 gray levels), evaluate it, and draw samples.

    Takes less than three minutes on two cores. The same command resumes an interrupted run, and evaluates and draws
    again when training is finished.
    """

    out: Path = Path("runs/demo")  # The run folder; samples.png is written there.
    steps: int | None = None  # Training steps, instead of the recipe's number.
    seed: int = 0  # Seed of the data order, the noise and the weights.
    json: Json = False

    def execute(self) -> int:
        import bsi
        from bsi import pictures
        from bsi.cli import eval as evaluation
        from bsi.data.baselines import baselines_text
        from bsi.evaluation.runs import store
        from bsi.report import write_report
        from bsi.runtime.distributed import join

        recipe = bsi.recipes.digits()
        recipe = replace(recipe, seed=self.seed, steps=recipe.steps if self.steps is None else self.steps)
        log(f"bsi demo: {recipe.steps} steps on handwritten digits, then a bound, samples and a report")
        folder = bsi.train(recipe, out=self.out, device="cpu").path

        # As `bsi eval` does, with the stored record, so that the report shows the same number.
        with join("cpu", timeout_s=3600.0) as world:
            options = evaluation.Eval(runs=(folder,), bpd=True, measure=20, recon=4, device="cpu")
            found = evaluation.bound(options, world)
        store(found.run, found.what, found.record)
        picture = folder / "samples.png"
        pictures.grid(bsi.load(folder).sample(64, steps=32, seed=self.seed).numpy(), high=16).save(picture)
        files = {"run": str(folder), "samples": str(picture), "report": str(write_report(folder))}
        name = shlex.quote(str(folder))
        log(f"next: bsi view {name} · bsi sample {name} --num 100 --out more.png")
        numbers = {
            name: found.record[name] for name in ("bits_per_dim", "monte_carlo_error", "data_error", "baselines")
        }
        text = (
            f"test set    {found.bound}\nbaselines   {baselines_text(found.record['baselines'])}\n"
            f"samples     {picture}\nreport      {files['report']}, opens in a browser"
        )
        return answer(self.json, {**files, **numbers}, text)
