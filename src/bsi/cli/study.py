"""`bsi study NAME`: reproduce a table or figure of the paper; without a name, list the studies."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bsi.cli.options import Device, Json, Within, answer
from bsi.errors import UsageError
from bsi.io import make_folder
from bsi.progress import log
from bsi.studies.scale import SCALES


@dataclass(frozen=True)
class StudyOptions:
    """Reproduce a table or figure of the paper: train, measure, draw, and state whether the paper's claim holds.

    The studies are comparison, architecture, fid-convergence, elbo-convergence, importance-sampling, proposal,
    variance-aware, initial-precision, finite-k, noise-levels, illustration, samples, disentangle, parametrization and
    weighting; `all` is all of them. Studies share networks and measurements. The same command resumes an interrupted
    study.
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None
    """The study, or all; without a name the studies are listed."""
    scale: Literal["smoke", "mini", "medium", "paper"] = "smoke"
    """smoke: digits on a CPU in minutes; mini: CIFAR-10 on one GPU; medium: the two comparisons with ten GPU minutes
    for each network; paper: the paper's settings."""
    seeds: Annotated[int | None, Within(1, 1000)] = None
    """Number of seeds for the networks of comparison, architecture, disentangle, initial-precision, parametrization,
    weighting and finite-k, instead of the scale's own one to three. Finished networks are kept."""
    out: Path = Path("runs/studies")  # The folder of networks, measurements and results.
    plan: bool = False  # Print the jobs with their estimated minutes, or with the results of finished ones, and stop.
    minutes: float | None = None  # Stop after this time: save and exit with code 75. The same command resumes.
    device: Device = None
    publish: Path | None = None
    """A folder of documents: copy figures and numbers to results/ there, and write results.md."""
    json: Json = False  # Print the plan, or the paths of the results, as JSON on stdout.

    def execute(self) -> int:
        from bsi.studies import runner
        from bsi.studies.outcome import STUDIES, Results

        if self.name is None:
            for name, study in STUDIES.items():
                print(f"{name:<19}  {study.shows} ({study.paper})")
            log("next: bsi study NAME --plan")
            return 0
        if self.minutes is not None and not self.minutes > 0:
            raise UsageError(f"--minutes must be positive, got {self.minutes}.")
        scale = SCALES[self.scale]
        studies = runner.named_studies(self.name, scale)
        if self.seeds is not None:
            if not any(study.takes_seeds(scale) for study in studies):
                taking = ", ".join(study.name for study in STUDIES.values() if study.takes_seeds(scale))
                raise UsageError(f"{self.name} has no --seeds: leave it out. {taking} and all have it.")
            scale = scale.with_seeds(self.seeds)
        results = Results(self.out, scale)
        if self.plan:
            planned = runner.plan(studies, results)
            return answer(self.json, [p.record(results) for p in planned], runner.plan_text(planned, results))
        make_folder(self.out, "--out")
        if self.publish is not None:
            make_folder(self.publish, "--publish")
        with redirect_stdout(sys.stderr) if self.json else nullcontext():  # stdout holds the JSON only
            folders = runner.run(studies, results, self.minutes, self.device)
        published = None if self.publish is None else str(runner.publish(folders, self.publish))
        if self.json or published is not None:
            answer(self.json, {"studies": [str(folder) for folder in folders], "published": published}, published)
        return 0
