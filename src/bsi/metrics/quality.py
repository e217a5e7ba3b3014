"""Sample quality: the record of a distance, and reference features of real data.

    samples = collect(batches, extractor)
    real = reference("cifar10", version, "test", batches_of(test), extractor)
    quality = sample_quality(samples, real, extractor, generation=Generation("sde2", 16, seed=0))

The record has everything that is needed to compare the value, and what limits a comparison, which is also a warning.
Reference features are computed once and stored in the data folder. Their key is the data (a hash of its content, and
the split) and the extractor (a hash of its weights, its resize, its precision):

    references/cifar10-test-0f3a....safetensors      mean, scatter, and the vectors if they were requested
    references/cifar10-test-0f3a....json             the key, the count and the SHA-256 of the file above

Both are written atomically, the JSON last; tensors whose hash differs from the one in it are computed again.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from bsi.errors import DataError, UsageError
from bsi.io import data_folder, digest, open_untrusted, read_json, write_bytes, write_json
from bsi.metrics.features import Extractor, Features, QualityWarning, collect
from bsi.metrics.frechet import Moments, frechet_distance, frechet_error
from bsi.metrics.inception import OTHER_NAME, PUBLISHED_HASH
from bsi.metrics.two_sample import Kid, PrecisionRecall, kernel_distance, precision_recall

FORMAT = 1


@dataclass(frozen=True)
class Generation:
    """How the samples were made: the solver, its network evaluations per sample, the seed."""

    solver: str
    evaluations: int
    seed: int


@dataclass(frozen=True)
class SampleQuality:
    """`value` of `metric` for `n` samples against `reference_n` real images.

    `error` is its standard error, if the samples' features were kept; the other fields describe the data, the extractor
    and the drawing of the samples.
    """

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
        """A JSON-serializable form."""
        return asdict(self)


@dataclass(frozen=True)
class Reference:
    """The real data that samples are compared with. A folder or a file has neither split nor version."""

    dataset: str
    split: str | None
    version: str | None
    features: Features


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
    """The distance and the requested metrics. KID, precision and recall need features that were kept."""
    real, metric = reference.features, metric_name(extractor)
    cautions = []
    for what, n in (("samples", samples.n), (reference.dataset, real.n)):
        if n < 2:
            raise DataError(f"{metric} needs at least 2 images of each set: {what} has {n}.")
        if n <= extractor.dim:
            cautions.append(
                f"{n} images of {what} leave the covariance of {extractor.dim} features singular: {metric} is biased "
                f"upwards and can be compared only with values of the same n"
            )
    if extractor.name == OTHER_NAME:
        cautions.append(f"not the published Inception weights ({extractor.hash[:16]}): the distance is not an FID")
    for caution in cautions:
        warnings.warn(caution, QualityWarning, stacklevel=2)
    return SampleQuality(
        metric=metric,
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
        cautions=tuple(cautions),
    )


def _vectors(features: Features) -> Tensor:
    if features.vectors is None:
        raise UsageError("KID, precision and recall need the features themselves. Collect them with keep=True.")
    return features.vectors


def reference(
    dataset: str,
    version: str,
    split: str,
    images: Iterable[Tensor],
    extractor: Extractor,
    keep: bool = False,
    folder: Path | None = None,
) -> Reference:
    """The features of a dataset's split, from `folder`, or computed and stored there.

    In a distributed run call this on one rank: the others need no reference.

    Args:
        images: The images of the split; read only if the features are not stored.
        keep: Also the vectors, as in `collect`.
        folder: By default `references` in the data folder.
    """
    key = {"dataset": dataset, "version": version, "split": split, "extractor": extractor.name}
    key |= {"extractor_hash": extractor.hash, "resize": extractor.resize, "precision": extractor.precision}
    readable = re.sub(r"[^A-Za-z0-9]+", "-", f"{dataset}-{split}").strip("-")[:80]
    stem = f"{readable}-{digest([json.dumps(key, sort_keys=True).encode()])[:16]}"
    path = (folder or data_folder() / "references") / f"{stem}.json"
    features = _stored(path, key, extractor)
    if features is None or (keep and features.vectors is None):
        features = collect(images, extractor, keep)
        if features.n < 2:
            raise DataError(f"a reference needs at least 2 images: {dataset} {split} gave {features.n}.")
        try:
            _store(path, key, features)
        except OSError as error:
            warnings.warn(f"the reference of {dataset} {split} is not stored: {error}", QualityWarning, stacklevel=2)
    return Reference(dataset, split, version, features if keep else Features(features.moments))


def _stored(path: Path, key: dict[str, str], extractor: Extractor) -> Features | None:
    """The stored features, on the extractor's device; None if there are none or they are damaged."""
    if not path.exists():
        return None
    try:
        record = read_json(path)
        with open_untrusted(path.with_suffix(".safetensors")) as file:
            data = file.read()
        if (record["format"], record["key"], record["sha256"]) != (FORMAT, key, digest([data])):
            raise ValueError(f"{path} describes another file")
        stored = {name: tensor.to(extractor.device) for name, tensor in load(data).items()}
        return Features(Moments(record["n"], stored["mean"], stored["scatter"]), stored.get("vectors"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"a damaged reference is computed again: {error}", QualityWarning, stacklevel=3)
        return None


def _store(path: Path, key: dict[str, str], features: Features) -> None:
    """Write the tensors, then the JSON with their hash."""
    moments, vectors = features.moments, features.vectors
    tensors = {"mean": moments.mean, "scatter": moments.scatter} | ({} if vectors is None else {"vectors": vectors})
    data = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path.with_suffix(".safetensors"), data)
    write_json(path, {"format": FORMAT, "key": key, "n": features.n, "sha256": digest([data])})
