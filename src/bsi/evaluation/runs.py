"""Trained models and their records: from a run folder or an exported file to a stored evaluation.

A record names everything its numbers depend on: the weights by their hash, the data by its version and split, the
estimator and its seed. It is stored as `evaluations/TIME-WHAT-....json` in the run folder; an exported file has no
folder, and its records are only printed.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bsi import __version__
from bsi.backbones import Backbone, Precision, accelerate, compute_dtype, freeze
from bsi.bound import EvaluatedModel
from bsi.data.baselines import baselines
from bsi.data.batches import as_source
from bsi.data.store import Dataset, open_dataset
from bsi.devices import type_name
from bsi.elbo import Elbo
from bsi.errors import DataError, UsageError
from bsi.io import atomic, canonical_json, fingerprint, make_folder
from bsi.model import Model
from bsi.progress import log
from bsi.rng import subset
from bsi.runtime.distributed import FailedTogether, World
from bsi.runtime.export import Trained, model_of, read_trained
from bsi.runtime.run_folder import check_inside
from bsi.variance import Variance

FITTED = 4096  # training samples that a variance is fitted to
COMPILED = 20_000  # evaluations of one sample above which compiling the network saves time


@dataclass(frozen=True)
class EvaluatedRun:
    """A trained model on its device, its description, and the hash and the data type of its network."""

    path: Path
    model: Model
    trained: Trained
    weights: str
    precision: str

    def record(self) -> dict[str, Any]:
        return {
            "run": self.path.name, "recipe": self.trained.recipe.name, "step": self.trained.step,
            "ema": self.trained.ema, "weights_sha256": self.weights, "precision": self.precision, "bsi": __version__,
        }  # fmt: skip


def open_run(
    path: Path, world: World, ema: bool = True, step: int | None = None, precision: Precision = "auto"
) -> EvaluatedRun:
    """The model of a run folder, an exported file or a bundled name, on this rank's device and in evaluation mode."""
    trained = read_trained(path, ema, step)
    if trained.recipe.backbone is None:
        raise UsageError(
            f"{path} was trained with a network of your own, {trained.network}. Evaluate it in Python: "
            f"bsi.load(run, backbone=...).bits_per_dim(data)."
        )
    model = model_of(trained, str(path)).to(world.device)
    network = model.denoiser.backbone
    if isinstance(network, Backbone):
        network.compute_dtype = compute_dtype(precision, world.device)
    return EvaluatedRun(path, model, replace(trained, weights={}), weights_hash(network), inner_precision(model))


def inner_precision(model: Model) -> str:
    """The data type inside the model's network, which `auto` selects for its device."""
    network = model.denoiser.backbone
    return type_name(network.compute_dtype if isinstance(network, Backbone) else None)


def speed_up(run: EvaluatedRun, work: int) -> None:
    """Compile the network if `work`, the number of evaluations on this rank, is large enough to save time."""
    network = run.model.denoiser.backbone
    if isinstance(network, Backbone) and work >= COMPILED:
        accelerate(network, run.model.device)
        freeze(network)


def weights_hash(module: nn.Module) -> str:
    """SHA-256 of the names, types, shapes and bytes of a module's weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Split:
    """A part of a prepared dataset."""

    dataset: Dataset
    name: str

    @property
    def rows(self) -> np.ndarray:
        return self.dataset.split(self.name)

    def record(self) -> dict[str, Any]:
        return {"dataset": self.dataset.name, "dataset_version": self.dataset.version, "split": self.name}


def open_split(run: EvaluatedRun, split: str, other: str | None = None) -> Split:
    """A split of the dataset of a run, for latents of their images, or of another one by name or folder."""
    expected, name = run.trained.version, run.path.name
    dataset = open_dataset(run.trained.dataset, version=expected) if other is None else open_dataset(other)
    if other is None and dataset.version != expected:
        raise DataError(
            f"the dataset {dataset.name!r} is not the one that {name} was trained on: expected version "
            f"{expected[:16]}, got {dataset.version[:16]}. Name it with --data to evaluate on it anyway."
        )
    if dataset.shape != run.model.shape:
        raise DataError(f"{name} models data of shape {run.model.shape}, got {dataset.name!r} of shape {dataset.shape}")
    kinds = (run.model.bins or run.model.kind, dataset.kind)
    if len({(type(kind), getattr(kind, "count", None), getattr(kind, "names", None)) for kind in kinds}) > 1:
        raise DataError(
            f"{name} models {run.model.kind!s:.200}, got {dataset.name!r} with {dataset.kind!s:.200}. Evaluate it on "
            f"data of the same kind."
        )
    return Split(dataset, split)


def evaluated(run: EvaluatedRun, split: Split, limit: int | None = None) -> EvaluatedModel:
    """What `bsi.bound.estimate` takes: the run's model on `limit` random samples of the split, or on all."""
    source = as_source(split.rows, run.model.device)
    return run.model.on(source, ids=subset(len(source), len(source) if limit is None else limit))


def fitted_variance(model: Model, dataset: Dataset | str, kind: str, batch_size: int = 256) -> Variance | None:
    """The predictive variance of a model, fitted to random samples of a dataset's training part unless the model has
    one; None for `none`."""
    if kind == "none" or kind in model.variances:
        return model.variance(kind)
    try:
        rows = (open_dataset(dataset) if isinstance(dataset, str) else dataset).split("train")
    except DataError as error:
        raise DataError(f"the variance {kind} is fitted to training samples: {error} Use --variance none.") from error
    train, count = as_source(rows, model.device), min(len(rows), FITTED)
    log(f"fitting the variance {kind} to {count} training samples")
    return model.fit_variance(train.take(subset(len(train), count)), kind, batch_size=batch_size)


@contextmanager
def own_error() -> Iterator[None]:
    """If several ranks fail together, raise the error of this rank."""
    try:
        yield
    except FailedTogether as failed:
        raise failed.error from None


def bound_record(run: EvaluatedRun, split: Split, elbo: Elbo) -> dict[str, Any]:
    """Bound, terms and errors in bits per dimension, how they were estimated, of what, and the same by baselines."""
    test = split.rows[subset(len(split.rows), len(elbo.nats))]
    compared = baselines(split.dataset.train, test, split.dataset.kind)
    return {**elbo.record(), **_effort(elbo, split), **run.record(), "baselines": compared}


def difference_record(a: EvaluatedRun, b: EvaluatedRun, split: Split, first: Elbo, second: Elbo) -> dict[str, Any]:
    """The bound of a less that of b. `unpaired_error` would be the Monte Carlo error with independent noise."""
    found = first - second
    record = found.record()
    errors = ("monte_carlo_error", "degrees_of_freedom", "data_error", "data_resolved", "binned")
    unpaired = math.hypot(first.monte_carlo_error, second.monte_carlo_error)
    return {
        "difference": record["bits_per_dim"], **{name: record[name] for name in errors}, "unpaired_error": unpaired,
        **_effort(found, split), "a": a.record(), "b": b.record(),
    }  # fmt: skip


def _effort(elbo: Elbo, split: Split) -> dict[str, Any]:
    """What was evaluated and how."""
    assert elbo.estimator is not None
    settings = asdict(elbo.estimator)
    del settings["batch_size"]
    control = elbo.estimator.proposal == "fitted" and elbo.estimator.control
    counts = {name: getattr(elbo, name) for name in ("evaluations", "pilot_evaluations", "rounds")}
    return {"images": len(elbo.nats), **counts, **settings, "control": control, **split.record()}


def store(run: EvaluatedRun, what: str, record: Mapping[str, Any]) -> None:
    """Write a record into the run folder; an exported file has no folder."""
    if not run.path.is_dir():
        return
    folder = run.path / "evaluations"
    check_inside(run.path, folder)
    make_folder(folder)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{what}-{fingerprint(record)[:8]}.json"
    with atomic(folder / name) as temporary:
        temporary.write_text(canonical_json(record), "utf-8")


def save_samples(path: Path, elbo: Elbo) -> None:
    """The bound of every sample in nats, with its terms and its Monte Carlo variance, as one .npz."""
    arrays = {name: getattr(elbo, name).numpy() for name in ("nats", "measurement", "reconstruction", "prior")}
    with atomic(path, "--per-sample") as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays, variance=elbo.sample_variance.numpy())
