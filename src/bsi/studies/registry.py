"""The studies by name, ordered by what they show for the time they take: the first ones share six networks."""

from __future__ import annotations

import difflib

from bsi.errors import UsageError
from bsi.studies import (
    architecture,
    comparison,
    disentangle,
    elbo_convergence,
    fid_convergence,
    finite_k,
    illustration,
    importance_sampling,
    initial_precision,
    noise_levels,
    proposal,
    samples,
    weighting,
)
from bsi.studies.report import Study

__all__ = ["STUDIES", "named_studies"]

STUDIES: dict[str, Study] = {
    module.STUDY.name: module.STUDY
    for module in (
        illustration,
        noise_levels,
        comparison,
        fid_convergence,
        elbo_convergence,
        importance_sampling,
        proposal,
        samples,
        disentangle,
        initial_precision,
        weighting,
        finite_k,
        architecture,
    )
}


def named_studies(name: str) -> list[Study]:
    """The study of that name, or all of them."""
    if name == "all":
        return list(STUDIES.values())
    if name not in STUDIES:
        near = difflib.get_close_matches(name, STUDIES, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"unknown study {name!r}. {hint}Use one of {', '.join(STUDIES)}, or all.")
    return [STUDIES[name]]
