"""`bsi export RUN`: the EMA of a run as one safetensors file, with its recipe; `bsi.load` reads it back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import tyro

__all__ = ["Export", "run"]


@dataclass(frozen=True)
class Export:
    """Write a trained model as one file that needs neither the run folder nor the trainer.

    import bsi; model = bsi.load("digits-3000.safetensors"); images = model.sample(16)
    """

    run: tyro.conf.Positional[Path]
    """The run folder."""
    out: Path | None = None
    """The file, by default RECIPE-STEP.safetensors in the run folder."""
    step: int | None = None
    """An earlier checkpoint, by its step."""
    weights: bool = False
    """The weights themselves rather than their moving average."""
    json: bool = False
    """Write the result as JSON on stdout."""


def run(args: Export) -> int:
    from bsi.training.export import export

    path = export(args.run, args.out, ema=not args.weights, step=args.step)
    print(json.dumps({"file": str(path), "bytes": path.stat().st_size}) if args.json else path)
    return 0
