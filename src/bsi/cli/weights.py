"""`bsi export RUN`: the EMA of a run and its recipe as one safetensors file, which `bsi.load` reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bsi.errors import UsageError
from bsi.io import check_writable, make_folder


@dataclass(frozen=True)
class Export:
    """Write a trained model as one file that needs neither the run folder nor the trainer.

    import bsi; model = bsi.load("digits-4000.safetensors"); images = model.sample(16)
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder, or the name of a bundled network: digits."""
    out: Path | None = None
    """The file, by default RECIPE-STEP.safetensors in the run folder, or in the current one for a bundled network."""
    step: int | None = None
    """An earlier checkpoint, by its step."""
    weights: bool = False
    """Export the weights instead of their moving average."""
    sigma_rel: float | None = None
    """Export an average of this relative width, for a run with power-function averages (--ema.powers)."""
    hub_folder: Path | None = None
    """Write the folder of a Hugging Face repository instead of one file."""
    upload: str | None = None
    """Upload that folder to the hub as this repository, USER/NAME, which is private at first."""
    json: bool = False
    """Print the result as JSON on stdout."""


def run(args: Export) -> int:
    if args.hub_folder is not None:
        return _hub(args, args.hub_folder)
    if args.upload is not None:
        raise UsageError("--upload needs a folder to upload: give it with --hub-folder")
    if args.out is not None:
        check_writable(args.out, "--out")
    from bsi.runtime.export import export

    path = export(args.run, args.out, not args.weights, args.step, args.sigma_rel)
    print(json.dumps({"file": str(path), "bytes": path.stat().st_size}) if args.json else path)
    return 0


def _hub(args: Export, folder: Path) -> int:
    if args.out is not None or args.sigma_rel is not None:
        raise UsageError("--hub-folder cannot be combined with --out and --sigma-rel: leave them out")
    from bsi.runtime.hub import upload, write_hub_folder

    make_folder(folder, "--hub-folder")
    write_hub_folder(args.run, folder, not args.weights, args.step)
    address = None if args.upload is None else upload(folder, args.upload)
    print(json.dumps({"folder": str(folder), "address": address}) if args.json else address or folder)
    return 0
