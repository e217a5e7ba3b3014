"""`bsi report RUN`: a run as one HTML file that opens offline."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

__all__ = ["Report", "run"]


@dataclass(frozen=True)
class Report:
    """Write a run and its results as one HTML file: recipe, curves, samples, likelihood, hashes.

    The model is evaluated for a few seconds: a belief that sharpens, its bound on the test set, and how the bits are
    distributed. The file loads nothing when it is opened.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=("-o",))] = None
    """The file, by default report.html in the run folder."""
    model: bool = True
    """With --no-model only files are read, and the model is not evaluated."""
    device: Literal["cuda", "cpu"] | None = None
    """By default a GPU if there is one."""
    json: bool = False
    """Print the result as JSON on stdout."""


def run(args: Report) -> int:
    from bsi.report import write_report

    path = write_report(args.run, args.out, device=args.device, ask_model=args.model)
    print(json.dumps({"report": str(path), "bytes": path.stat().st_size}) if args.json else path)
    return 0
