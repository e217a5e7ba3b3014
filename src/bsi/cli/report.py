"""`bsi report RUN`: everything about a run in one HTML file that opens offline."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

__all__ = ["Report", "run"]


@dataclass(frozen=True)
class Report:
    """Write what a run is and what came of it as one HTML file: recipe, curves, samples, likelihood, hashes.

    The model is asked for a belief that sharpens, its bound on the test set and where its bits are, as far as that
    takes seconds. Nothing is loaded when the file is opened.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=("-o",))] = None
    """The file, by default report.html in the run folder."""
    model: bool = True
    """Ask the model; otherwise only files are read."""
    device: Literal["cuda", "cpu"] | None = None
    """By default a GPU if there is one."""
    json: bool = False
    """Write the result as JSON on stdout."""


def run(args: Report) -> int:
    from bsi.report import write_report

    path = write_report(args.run, args.out, device=args.device, ask_model=args.model)
    print(json.dumps({"report": str(path), "bytes": path.stat().st_size}) if args.json else path)
    return 0
