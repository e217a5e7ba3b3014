"""`bsi study NAME`: redo a table or figure of the paper, or go on with it."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bsi.errors import UsageError
from bsi.io import make_folder

__all__ = ["StudyOptions", "run"]


@dataclass(frozen=True)
class StudyOptions:
    """Redo a table or figure of the paper: train what it needs, measure, draw, and say whether the claim held.

    The studies are comparison, architecture, fid-convergence, elbo-convergence, importance-sampling, proposal,
    initial-precision, finite-k, noise-levels, illustration, samples, disentangle and weighting; `all` is all of them.
    Studies share networks and measurements; the same command goes on where it was interrupted, and waits for what
    another process is just doing in the same folder.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """which study, or all"""
    scale: Literal["smoke", "mini", "paper"] = "smoke"
    """digits on a CPU in minutes; CIFAR-10 on one GPU; the paper's own"""
    seeds: int | None = None
    """train the networks of comparison, architecture, disentangle, initial-precision, weighting and finite-k from so
    many seeds, instead of the scale's own one to three; what there is of the first stays"""
    out: Path = Path("runs/studies")
    """folder of networks, measurements and results"""
    plan: bool = False
    """show the jobs with their estimated minutes, or what they measured where they are done, and stop"""
    so_far: bool = False
    """run nothing: write, and with --publish publish, what there is; a study that is not finished is marked so"""
    minutes: float | None = None
    """stop in time: save and write what there is and leave with exit code 75, to go on later"""
    device: Literal["cuda", "cpu"] | None = None
    """by default a GPU if there is one"""
    publish: Path | None = None
    """a folder of documents: copy figure and numbers to results/ there, and write results.md"""
    json: bool = False
    """the plan, or where the results are, as JSON on stdout"""


def run(args: StudyOptions) -> int:
    if args.minutes is not None and not args.minutes > 0:
        raise UsageError(f"--minutes is a time to run for, positive: got {args.minutes}")
    if args.seeds is not None and args.seeds < 1:
        raise UsageError(f"--seeds is a number of seeds, 1 or more: got {args.seeds}")
    from bsi.studies.job import Train, title
    from bsi.studies.plan_text import plan_text
    from bsi.studies.publish import publish
    from bsi.studies.registry import STUDIES, named_studies
    from bsi.studies.runner import plan, report_so_far
    from bsi.studies.runner import run as run_studies
    from bsi.studies.scales import SCALES
    from bsi.studies.store import Store

    studies, scale = named_studies(args.name), SCALES[args.scale]
    if args.seeds is not None:
        if not any(study.takes_seeds(scale) for study in studies):
            taking = ", ".join(study.name for study in STUDIES.values() if study.takes_seeds(scale))
            raise UsageError(f"{args.name} trains nothing from more seeds: leave --seeds out. {taking} and all take it")
        scale = scale.with_seeds(args.seeds)
    if args.plan:
        store = Store(args.out)
        planned = plan(studies, scale, store)
        jobs = [
            {
                "study": p.study,
                "job": title(p.job),
                "minutes": p.seconds / 60,
                "done": p.done,
                "values": dict(store.read(p.job).values) if p.done and not isinstance(p.job, Train) else None,
            }
            for p in planned
        ]
        print(json.dumps(jobs) if args.json else plan_text(planned, scale, store))
        return 0
    make_folder(args.out, "--out")
    if args.publish is not None:
        make_folder(args.publish, "--publish")
    with redirect_stdout(sys.stderr) if args.json else nullcontext():  # JSON is alone on stdout
        if args.so_far:
            folders = report_so_far(studies, scale, args.out, args.device)
        else:
            folders = run_studies(studies, scale, args.out, args.minutes, args.device)
    published = None if args.publish is None else publish(folders, args.publish)
    if args.json:
        found = {
            "studies": [str(folder) for folder in folders],
            "published": None if published is None else str(published),
        }
        print(json.dumps(found))
    elif published is not None:
        print(published)
    done = "with results so far" if args.so_far else "done"
    print(f"{len(folders)} {'study' if len(folders) == 1 else 'studies'} {done}: {args.out}", file=sys.stderr)
    return 0
