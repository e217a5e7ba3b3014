"""`bsi study NAME`: reproduce a table or figure of the paper; without a name, list the studies."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bsi.cli.options import Within
from bsi.errors import UsageError
from bsi.io import make_folder
from bsi.progress import log


@dataclass(frozen=True)
class StudyOptions:
    """Reproduce a table or figure of the paper: train, measure, draw, and state whether the paper's claim holds.

    The studies are comparison, architecture, fid-convergence, elbo-convergence, importance-sampling, proposal,
    initial-precision, finite-k, noise-levels, illustration, samples, disentangle and weighting; `all` is all of them.
    Studies share networks and measurements. The same command resumes an interrupted study.
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None
    """The study, or all; without a name the studies are listed."""
    scale: Literal["smoke", "mini", "medium", "paper"] = "smoke"
    """smoke: digits on a CPU in minutes; mini: CIFAR-10 on one GPU; medium: the two comparisons with ten GPU minutes
    for each network; paper: the paper's settings."""
    seeds: Annotated[int | None, Within(1, 1000)] = None
    """Number of seeds for the networks of comparison, architecture, disentangle, initial-precision, weighting and
    finite-k, instead of the scale's own one to three. Finished networks are kept."""
    out: Path = Path("runs/studies")
    """The folder of networks, measurements and results."""
    plan: bool = False
    """Print the jobs with their estimated minutes, or with the results of finished ones, and stop."""
    minutes: float | None = None
    """Stop after this time: save and exit with code 75. The same command resumes."""
    device: Literal["cuda", "cpu"] | None = None
    """By default a GPU if there is one."""
    publish: Path | None = None
    """A folder of documents: copy figures and numbers to results/ there, and write results.md."""
    json: bool = False
    """Print the plan, or the paths of the results, as JSON on stdout."""


def run(args: StudyOptions) -> int:
    from bsi.studies.job import Store
    from bsi.studies.publish import publish
    from bsi.studies.registry import STUDIES, named_studies
    from bsi.studies.runner import plan, plan_text
    from bsi.studies.runner import run as run_studies
    from bsi.studies.scale import SCALES

    if args.name is None:
        for name, study in STUDIES.items():
            print(f"{name:<19}  {study.shows} ({study.paper})")
        log("next: bsi study NAME --plan")
        return 0
    if args.minutes is not None and not args.minutes > 0:
        raise UsageError(f"--minutes must be positive, got {args.minutes}.")
    scale = SCALES[args.scale]
    studies = named_studies(args.name, scale)
    if args.seeds is not None:
        if not any(study.takes_seeds(scale) for study in studies):
            taking = ", ".join(study.name for study in STUDIES.values() if study.takes_seeds(scale))
            raise UsageError(f"{args.name} has no --seeds: leave it out. {taking} and all have it.")
        scale = scale.with_seeds(args.seeds)
    if args.plan:
        store = Store(args.out)
        planned = plan(studies, scale, store)
        print(json.dumps([p.record(store) for p in planned]) if args.json else plan_text(planned, scale, store))
        return 0
    make_folder(args.out, "--out")
    if args.publish is not None:
        make_folder(args.publish, "--publish")
    with redirect_stdout(sys.stderr) if args.json else nullcontext():  # stdout holds the JSON only
        folders = run_studies(studies, scale, args.out, args.minutes, args.device)
    published = None if args.publish is None else str(publish(folders, args.publish))
    if args.json:
        print(json.dumps({"studies": [str(folder) for folder in folders], "published": published}))
    elif published is not None:
        print(published)
    return 0
