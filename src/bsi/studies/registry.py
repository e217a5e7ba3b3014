"""The studies by name, the most informative for their time first: the first ones share six networks."""

from __future__ import annotations

import difflib

from bsi.errors import UsageError
from bsi.studies import ablations, comparison, convergence, illustration, proposals, transitions
from bsi.studies.outcome import Study
from bsi.studies.scale import Scale

ALL = (
    Study(
        "illustration", 'Figure "illustration"', "the five-step picture",
        lambda scale: [], illustration.report_illustration,
    ),
    Study(
        "noise-levels", 'Figure "noise-levels"', "encoders of the three methods, mean and sample, over t",
        lambda scale: [], illustration.report_noise_levels,
    ),
    Study(
        "comparison", 'Tables "imagenet32" and "cifar10-bpd"',
        "BFN, VDM and BSI, same backbone and budget: equal bits/dim, FID ordered BSI < VDM < BFN",
        comparison.comparison_measures, comparison.report_comparison,
    ),
    Study(
        "fid-convergence", 'Figure "fid-convergence"', "FID against steps for the three methods, and for our solvers",
        convergence.quality_measures, convergence.report_quality,
    ),
    Study(
        "elbo-convergence", 'Figure "elbo-convergence"',
        "L_M^k -> L_M^inf from above, down to the noise floor; L_R for several alpha_R",
        convergence.bound_measures, convergence.report_bound,
    ),
    Study(
        "importance-sampling", 'Figure "importance-sampling"',
        "the range of h / p under uniform, log-uniform, exact and fitted proposals",
        lambda scale: [proposals.level_errors(scale)], proposals.report_spread,
    ),
    Study(
        "proposal", 'Figure "log-uniform-proposal"', "relative distance between mu and f(mu, lambda) against lambda",
        lambda scale: [proposals.distance_errors(scale)], proposals.report_distance,
    ),
    Study(
        "samples", 'Figure "samples"', "samples of the three methods next to data",
        comparison.samples_measures, comparison.report_samples,
    ),
    Study(
        "disentangle", "new",
        "which of the three changes between BFN and BSI matters: hyper-prior, offset of the levels, preconditioning",
        ablations.disentangle_measures, ablations.report_disentangle,
    ),
    Study(
        "initial-precision", 'Figure "lambda0"', "bits/dim and FID against lambda_0 and steps",
        ablations.precision_measures, ablations.report_precision,
    ),
    Study(
        "weighting", "new",
        "bits/dim against FID when the loss is weighted over the level: what sample quality costs in likelihood",
        ablations.weighting_measures, ablations.report_weighting,
    ),
    Study(
        "finite-k", 'Figure "train-finite-k"', "networks trained on L_M^k against L_M^inf, evaluated at k'",
        ablations.finite_measures, ablations.report_finite,
    ),
    Study(
        "variance-aware", "new", "the bound and the samples for few steps, with a predictive variance in each step",
        transitions.measures, transitions.report,
    ),
    Study(
        "architecture", 'Table "architecture"',
        "the same comparison with another backbone, in the paper the U-Net",
        comparison.architecture_measures, comparison.report_architecture,
    ),
)  # fmt: skip
STUDIES: dict[str, Study] = {study.name: study for study in ALL}


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
