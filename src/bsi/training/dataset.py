"""The data of a run: a prepared dataset, or a tensor, array or Dataset that the caller passes.

Both are described by a `DataSpec` with a hash of the content. What is computed from all samples of a tensor is computed
from a random subset of a Dataset, which can only be indexed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from bsi.data.batches import BatchSource, as_source, windows
from bsi.data.store import open_for_run
from bsi.errors import DataError, UsageError
from bsi.io import digest, fingerprint
from bsi.recipe import Recipe
from bsi.rng import subset
from bsi.runtime.autoencoders import StoredAutoencoder, attached
from bsi.runtime.export import DataSpec
from bsi.values import Bins, DataKind, Standardize, Symbols, check_finite

Labels = Int64[np.ndarray, " count"]

SPOT_CHECK = 64  # samples of a Dataset whose content is hashed
FIT_SAMPLES = 4096  # samples of a Dataset for its mean and standard deviation, or its largest value
FIRST = np.zeros(1, np.int64)  # the index of the first sample
DARKEST = 64  # data whose largest value is smaller than this is assumed not to be 8-bit images


@dataclass(frozen=True)
class TrainingData:
    """Sources of training and, if there are any, test samples, with a description and the labels for training."""

    train: BatchSource
    test: BatchSource | None
    spec: DataSpec
    labels: Labels | None
    note: str  # an assumption about the data, to be printed
    autoencoder: StoredAutoencoder | None = None  # of latents


@dataclass(frozen=True)
class InFloat32:
    """The samples of another source as float32: NumPy's default is float64."""

    source: BatchSource

    def __len__(self) -> int:
        return len(self.source)

    def take(self, ids: Int64[np.ndarray, " batch"]) -> Float32[Tensor, "batch *data"]:
        return self.source.take(ids).float()


def open_training_data(
    recipe: Recipe,
    device: torch.device,
    data: object = None,
    test: object = None,
    kind: DataKind | None = None,
    labels: object = None,
    run: Path | None = None,
) -> TrainingData:
    """Open the recipe's prepared dataset, or the data passed by the caller with its `labels`.

    `run` is the folder of an interrupted run, by which a dataset that was renamed is found.
    """
    name, version, names, autoencoder, prepared = recipe.data.name, "", tuple[str, ...](), None, data is None
    if prepared:
        for what, given in (("test", test), ("kind", kind), ("labels", labels)):
            if given is not None:
                raise UsageError(f"{what} was given without data. Pass data of your own with it, or leave {what} out.")
        dataset = open_for_run(name, run)
        name, version, kind = dataset.name, dataset.version, dataset.kind
        autoencoder = attached(kind, dataset.folder)
        data, test = dataset.split("train"), dataset.test if len(dataset.test) else None
        if recipe.data.labels and dataset.labels is not None:
            labels, names = dataset.labels.train, dataset.labels.names
    if labels is not None and not recipe.data.labels:
        raise UsageError("labels were given, and the recipe learns none. Set data.labels=True in it.")
    train = as_source(data, device, recipe.data.workers)
    first = train.take(FIRST)
    shape, floats = tuple(first.shape[1:]), first.is_floating_point()
    kind, note = (kind, "") if prepared and kind is not None else _fitted(kind, first, data, train)
    known = _labels(labels, len(train), name) if recipe.data.labels else None
    count = 0 if known is None else int(known.max(initial=-1)) + 1
    if names and count > len(names):
        raise DataError(f"{name} has {count} classes, and names for {len(names)}. Prepare it again.")
    version = version or _version(data, train, known)
    train = windows(train) if recipe.data.windows else train
    spec = DataSpec(name, version, len(train), shape, kind, len(names) or count, names)
    tested = None
    if test is not None:
        tested = as_source(test, workers=recipe.data.workers)
        example = tested.take(FIRST)
        if example.shape != first.shape or floats > example.is_floating_point():
            raise UsageError(
                f"test samples must be like training samples, of shape {shape} and {first.dtype}, got "
                f"{tuple(example.shape[1:])} and {example.dtype}. Pass test=None to train without."
            )
        if not prepared:
            _checked(kind, test, tested)
        tested = InFloat32(tested) if example.is_floating_point() else tested
    return TrainingData(InFloat32(train) if floats else train, tested, spec, known, note, autoencoder)


def _labels(given: object, count: int, name: str) -> Labels:
    """The labels as int64, one for each sample."""
    if given is None:
        fix = "Leave data.labels out, or prepare the data with labels (`bsi data folder --labels`)."
        raise DataError(f"{name} has no labels. {fix}")
    labels = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    least = labels.min(initial=0)
    if labels.shape != (count,) or not np.issubdtype(labels.dtype, np.integer) or least < 0:
        raise DataError(
            f"labels must be whole numbers >= 0, one for each of the {count} samples of {name}, got {labels.dtype} of "
            f"shape {labels.shape} with minimum {least}."
        )
    return labels.astype(np.int64)


def _fitted(kind: DataKind | None, first: Tensor, data: object, train: BatchSource) -> tuple[DataKind, str]:
    """The kind of the caller's data, fitted if that is left to do, with a note on what was assumed."""
    rows = _checked(kind, data, train)
    if isinstance(kind, Symbols) and kind.prior is None:
        return Symbols.fit(rows.cpu(), kind.count, kind.names), ""
    if kind is not None:
        return kind, ""
    if first.is_floating_point():
        return Standardize.fit(rows), ""
    if first.dtype != torch.uint8:
        raise UsageError(
            f"integer data other than uint8 needs a kind, got {first.dtype}. Pass kind=bsi.Bins(low, high, count) "
            f"or kind=bsi.Symbols(count), or convert continuous data to floats."
        )
    largest = int(data.max()) if isinstance(data, np.ndarray) else int(rows.max())
    if largest < DARKEST:
        levels = max(largest, 1) + 1
        raise UsageError(
            f"uint8 data without a kind must be 8-bit images, 0 to 255, got a maximum of {largest}. Pass "
            f"kind=bsi.Bins(-1.0, 1.0, {levels}) for values 0 to {levels - 1}, kind=bsi.Symbols({levels}) for symbols, "
            f"or kind=bsi.Bins.uint8() for 8-bit images."
        )
    if largest == 255:
        return Bins.uint8(), ""
    return Bins.uint8(), (
        f"assuming 8-bit images with 256 levels; the largest value of the data is {largest}. Pass "
        f"kind=bsi.Bins(low, high, count) if it has fewer levels, kind=bsi.Bins.uint8() if not."
    )


def _checked(kind: DataKind | None, data: object, source: BatchSource) -> Tensor:
    """A tensor, or a random subset of other data. Raises if it is not finite or not of its kind."""
    rows = data if isinstance(data, Tensor) else _some(source, FIT_SAMPLES)
    if rows.is_floating_point():
        check_finite(rows)
    if kind is not None:
        kind.check(rows)
    return rows


def _version(data: object, source: BatchSource, labels: Labels | None) -> str:
    """A hash of the labels and the content of a tensor or array, or of a subset of the samples of other data."""
    if isinstance(data, Tensor | np.ndarray):
        length, content = [], data.detach().cpu().numpy() if isinstance(data, Tensor) else data
    else:
        length, content = [len(source)], _some(source, SPOT_CHECK).cpu().numpy()
    content = np.ascontiguousarray(content)
    version = fingerprint([*length, str(content.dtype), list(content.shape), digest(content.tobytes())])
    return version if labels is None else fingerprint([version, digest(labels.tobytes())])


def _some(source: BatchSource, count: int) -> Tensor:
    """A random subset of the samples, the same for any seed of the run."""
    return source.take(subset(len(source), count))
