"""Sample quality as a record: the distance with everything one must know to compare it.

    samples = collect(batches, extractor)
    quality = sample_quality(samples, reference(...), extractor, generation=Generation("sde2", 16, seed=0))

Where the samples' features were kept, it has a standard error: of having drawn these samples and not others.

The Frechet distance is called FID only where the features come from Inception's published weights; with any other
extractor it is called "fd-" + its name. What makes a value hard to compare is warned of, and stays in the record.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from bsi.errors import DataError, UsageError
from bsi.metrics.extractor import Extractor, QualityWarning
from bsi.metrics.features import Features
from bsi.metrics.frechet import frechet_distance
from bsi.metrics.frechet_error import frechet_error
from bsi.metrics.inception import OTHER_NAME, PUBLISHED_HASH
from bsi.metrics.kid import Kid, kernel_distance
from bsi.metrics.neighbors import PrecisionRecall, precision_recall
from bsi.metrics.references import Reference


@dataclass(frozen=True)
class Generation:
    """How the samples were made: the solver, its network evaluations per sample, the seed."""

    solver: str
    evaluations: int
    seed: int


@dataclass(frozen=True)
class SampleQuality:
    """`value` of `metric` for `n` samples against `reference_n` real images, with its standard error where the samples'
    features were kept; the rest says which and how."""

    metric: str
    value: float
    error: float | None
    n: int
    reference: str
    reference_split: str | None
    reference_version: str | None
    reference_n: int
    extractor: str
    extractor_hash: str
    resize: str
    precision: str
    kid: Kid | None
    precision_recall: PrecisionRecall | None
    generation: Generation | None
    cautions: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


def metric_name(extractor: Extractor) -> str:
    """FID for Inception's published weights, "fd-" + name for every other extractor."""
    return "FID" if extractor.hash == PUBLISHED_HASH else f"fd-{extractor.name}"


def sample_quality(
    samples: Features,
    reference: Reference,
    extractor: Extractor,
    kid: bool = False,
    precision_and_recall: bool = False,
    generation: Generation | None = None,
) -> SampleQuality:
    """All that is asked for, from the features of one pass. KID, precision and recall need features that were kept."""
    real = reference.features
    for what, n in (("samples", samples.n), (reference.dataset, real.n)):
        if n < 2:
            raise DataError(f"{metric_name(extractor)} needs at least 2 images of each set: {what} has {n}.")
    cautions = tuple(_cautions(samples, reference, extractor))
    for caution in cautions:
        warnings.warn(caution, QualityWarning, stacklevel=2)
    return SampleQuality(
        metric=metric_name(extractor),
        value=frechet_distance(samples.moments, real.moments),
        error=None if samples.vectors is None else frechet_error(samples.vectors, real.moments),
        n=samples.n,
        reference=reference.dataset,
        reference_split=reference.split,
        reference_version=reference.version,
        reference_n=real.n,
        extractor=extractor.name,
        extractor_hash=extractor.hash,
        resize=extractor.resize,
        precision=extractor.precision,
        kid=kernel_distance(_vectors(samples), _vectors(real)) if kid else None,
        precision_recall=precision_recall(_vectors(samples), _vectors(real)) if precision_and_recall else None,
        generation=generation,
        cautions=cautions,
    )


def _cautions(samples: Features, reference: Reference, extractor: Extractor) -> list[str]:
    found = []
    for what, n in (("samples", samples.n), (reference.dataset, reference.features.n)):
        if n <= extractor.dim:
            found.append(
                f"{n} images of {what} leave the covariance of {extractor.dim} features singular: "
                f"{metric_name(extractor)} is biased upwards and compares only with values of the same n"
            )
    if extractor.name == OTHER_NAME:
        found.append(f"not the published Inception weights ({extractor.hash[:16]}): this is no FID")
    return found


def _vectors(features: Features) -> Tensor:
    if features.vectors is None:
        raise UsageError("KID, precision and recall need the features themselves: collect them with keep=True.")
    return features.vectors
