"""Sample quality: features of images, reference features of real data, and the record of a distance.

    samples = collect(batches, extractor, keep=True)                 # batches: uint8 (n, 3, h, w)
    real = reference("cifar10", version, "test", batches_of(test), extractor)
    quality = sample_quality(samples, real, extractor, generation=Generation("sde2", 16, seed=0))

Distances between sets of images are distances between their features, so a value has a meaning only together with its
extractor: the record has everything that is needed to compare the value, and what limits a comparison, which is also a
warning. The moments of the features suffice for the Frechet distance; its error and the other metrics need `keep`.

Reference features are computed once and stored in the data folder. Their key is the data (a hash of its content, and
the split) and the extractor (a hash of its weights, its resize, its precision):

    references/cifar10-test-0f3a....safetensors      mean, scatter, and the vectors if they were requested
    references/cifar10-test-0f3a....json             the key, the count and the SHA-256 of the file above

Both are written atomically, the JSON last; tensors whose hash differs from the one in it are computed again.
"""

from __future__ import annotations

import itertools
import json
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Shaped, UInt8
from safetensors.torch import load, save
from torch import Tensor

from bsi.data.images import open_image
from bsi.errors import DataError, UsageError
from bsi.io import data_folder, digest, open_untrusted, read_json, write_bytes, write_json
from bsi.metrics.frechet import Moments, frechet_distance, frechet_error
from bsi.metrics.two_sample import Kid, PrecisionRecall, kernel_distance, precision_recall

KEPT = 100_000  # the largest number of samples whose features are kept for the error: 0.8 GB of Inception's
FORMAT = 1
PUBLISHED_HASH = "f52412653ee45bed604b0f4fa0d3942ce5f50784fece9766dfa6cbecddbe4555"
"""The hash of the published Inception weights: a distance is called FID only with these weights."""
OTHER_NAME = "inception-other"


class QualityWarning(UserWarning):
    """A warning that a value is of limited comparability."""


@runtime_checkable
class Extractor(Protocol):
    """`dim` features of 8-bit images, on `device`. `Inception` is one; a classifier of your own data can be another.

    The Frechet distance is called "fd-" + `name`. `hash` is the SHA-256 of the weights, `resize` the name of the resize
    between the images and the network, "none" without one, and `precision` that of the products: "float32", ...
    """

    @property
    def name(self) -> str: ...
    @property
    def hash(self) -> str: ...
    @property
    def resize(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    def __call__(self, images: UInt8[Tensor, "n 3 h w"]) -> Float[Tensor, "n dim"]: ...


def require_images(images: Tensor, name: str = "images") -> UInt8[Tensor, "n 3 h w"]:
    """`images`, if they are 8-bit color images. Floats that are truncated are half a step too dark: the FID changes."""
    if images.dtype != torch.uint8:
        fix = "Round, never truncate: ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8) for values in [-1, 1]"
        raise DataError(f"{name} must be 8-bit, 0 to 255, got {images.dtype}. {fix}.")
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape[2:]:
        fix = "Repeat a single gray channel three times; use permute(0, 3, 1, 2) if channels come last"
        raise DataError(f"{name} must have the shape (n, 3, height, width), got {tuple(images.shape)}. {fix}.")
    return images


def file_batches(files: Iterable[Path], size: int) -> Iterator[UInt8[Tensor, "n 3 h w"]]:
    """The files' images in order, gray ones in three equal channels. A batch ends before an image of another size.

    They are not resized, cropped or requantized. Files with other content than 8 bits are rejected by name.
    """
    images = (np.asarray(open_image(path, str(path)).convert("RGB")).transpose(2, 0, 1) for path in files)
    for _, equal in itertools.groupby(images, np.shape):
        while batch := list(itertools.islice(equal, size)):
            yield torch.from_numpy(np.stack(batch))


def array_batches(
    blocks: Iterable[Shaped[np.ndarray, "..."]], size: int, name: str
) -> Iterator[UInt8[Tensor, "n 3 h w"]]:
    """Batches of at most `size` from arrays of shape (n, h, w), (n, c, h, w) or (n, h, w, c) with c of 1 or 3."""
    for block in blocks:
        images = block[:, None] if block.ndim == 3 else block
        if images.ndim != 4 or (block.ndim == 4 and (block.shape[1] in (1, 3)) == (block.shape[3] in (1, 3))):
            shapes = "(n, h, w), (n, c, h, w) or (n, h, w, c) with 1 or 3 channels"
            raise DataError(f"{name} must have the shape {shapes}, got {block.shape}.")
        if images.shape[1] not in (1, 3):
            images = images.transpose(0, 3, 1, 2)
        for start in range(0, len(images), size):
            piece = images[start : start + size]
            colors = np.broadcast_to(piece, (len(piece), 3, *piece.shape[2:]))
            yield require_images(torch.from_numpy(colors.copy()), name)


@dataclass(frozen=True)
class Features:
    """Moments of n samples' features; with `vectors`, also the features, on the device that computed them."""

    moments: Moments
    vectors: Float[Tensor, "n dim"] | None = None

    @property
    def n(self) -> int:
        return self.moments.n

    def kept(self) -> Float[Tensor, "n dim"]:
        """The features themselves."""
        if self.vectors is None:
            raise UsageError("KID, precision and recall need the features themselves. Collect them with keep=True.")
        return self.vectors

    def over_ranks(self) -> Features:
        """All ranks' features together, on every rank; `self` without a process group.

        The samples of the ranks are interleaved, as if rank r of w had the samples r, r + w, r + 2w, ...:
        metrics that depend on the order then do not depend on the number of ranks.
        """
        if not dist.is_initialized():
            return self
        if self.vectors is None:
            return Features(self.moments.over_ranks())
        count = torch.tensor([len(self.vectors)], device=self.vectors.device)
        counts = [torch.zeros_like(count) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, count)
        # Every rank sends the same shape, so that unequal counts cannot leave one of them waiting.
        longest = max(int(count) for count in counts)
        padded = F.pad(self.vectors, (0, 0, 0, longest - len(self.vectors)))
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded)
        present = torch.arange(longest, device=count.device)[:, None] < torch.cat(counts)
        return Features(self.moments.over_ranks(), torch.stack(gathered, 1)[present])


def collect(images: Iterable[Tensor], extractor: Extractor, keep: bool = False) -> Features:
    """The features of all `images`, batch by batch. Batches may differ in the number and size of their images.

    With `keep`, the features stay in memory (4 bytes x dim each: 0.4 GB for 50,000 of Inception's).
    """
    moments = Moments.empty(extractor.dim, extractor.device)
    kept = [torch.empty(0, extractor.dim, device=extractor.device)]
    for batch in images:
        if len(batch):
            features = extractor(require_images(batch))
            moments = moments + Moments.of(features)
            kept += [features.float()] if keep else []
    return Features(moments, torch.cat(kept) if keep else None)


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
        kid=kernel_distance(samples.kept(), real.kept()) if kid else None,
        precision_recall=precision_recall(samples.kept(), real.kept()) if precision_and_recall else None,
        generation=generation,
        cautions=tuple(cautions),
    )


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
    stem = f"{readable}-{digest(json.dumps(key, sort_keys=True).encode())[:16]}"
    path = (folder or data_folder() / "references") / f"{stem}.json"
    features = _stored(path, key, extractor.device)
    if features is None or (keep and features.vectors is None):
        features = collect(images, extractor, keep)
        tensors = {"mean": features.moments.mean, "scatter": features.moments.scatter}
        tensors |= {"vectors": features.kept()} if keep else {}
        data = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path.with_suffix(".safetensors"), data)
            write_json(path, {"format": FORMAT, "key": key, "n": features.n, "sha256": digest(data)})
        except OSError as error:
            warnings.warn(f"the reference of {dataset} {split} is not stored: {error}", QualityWarning, stacklevel=2)
    return Reference(dataset, split, version, features if keep else Features(features.moments))


def _stored(path: Path, key: dict[str, str], device: torch.device) -> Features | None:
    """The stored features; None if there are none or they are damaged."""
    if not path.exists():
        return None
    try:
        record = read_json(path)
        with open_untrusted(path.with_suffix(".safetensors")) as file:
            data = file.read()
        if (record["format"], record["key"], record["sha256"]) != (FORMAT, key, digest(data)):
            raise ValueError(f"{path} describes another file")
        stored = {name: tensor.to(device) for name, tensor in load(data).items()}
        return Features(Moments(record["n"], stored["mean"], stored["scatter"]), stored.get("vectors"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"a damaged reference is computed again: {error}", QualityWarning, stacklevel=3)
        return None
