"""The studies by name, the most informative for their time first: the first ones share six networks."""

from __future__ import annotations

import difflib
from importlib import import_module

from bsi.errors import UsageError
from bsi.studies.report import Study
from bsi.studies.scale import Scale

__all__ = ["STUDIES", "named_studies"]

NAMES = (
    "illustration",
    "noise-levels",
    "comparison",
    "fid-convergence",
    "elbo-convergence",
    "importance-sampling",
    "proposal",
    "samples",
    "disentangle",
    "initial-precision",
    "weighting",
    "finite-k",
    "architecture",
)
STUDIES: dict[str, Study] = {name: import_module(f"bsi.studies.{name.replace('-', '_')}").STUDY for name in NAMES}


def named_studies(name: str, scale: Scale) -> list[Study]:
    """The study of that name, or all studies that run at the scale."""
    if name == "all":
        return [study for study in STUDIES.values() if study.runs_at(scale)]
    if name not in STUDIES:
        near = difflib.get_close_matches(name, STUDIES, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"unknown study {name!r}. {hint}Use one of {', '.join(STUDIES)}, or all.")
    if not STUDIES[name].runs_at(scale):
        allowed = ", ".join(scale.studies or ())
        raise UsageError(f"{name} does not run at the scale {scale.name}, which is for {allowed}. Use another --scale.")
    return [STUDIES[name]]
