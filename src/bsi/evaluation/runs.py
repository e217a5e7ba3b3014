"""From a run folder or an exported file to something that can be evaluated, and the record of what was found.

A record names everything its number depends on: the weights by their hash, the data by its version and split, the
procedure, the seed. Records are kept in the run folder, `evaluations/TIME-WHAT-....json`, each written beside and
renamed; an exported file has no folder, and its records are printed alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bsi import __version__
from bsi.backbones import Backbone, Precision, accelerate, compute_dtype, freeze
from bsi.data.batches import as_source
from bsi.data.store import Dataset, open_dataset
from bsi.devices import type_name
from bsi.errors import DataError, UsageError
from bsi.evaluation.bound import Evaluation
from bsi.evaluation.paired import Difference
from bsi.evaluation.subject import Subject
from bsi.io import atomic, canonical_json, make_folder
from bsi.model import Model
from bsi.runtime.data_spec import build_model
from bsi.runtime.distributed import World
from bsi.runtime.export import read_trained, set_weights

__all__ = [
    "Run",
    "Split",
    "bound_record",
    "difference_record",
    "inner_precision",
    "open_run",
    "open_split",
    "save_samples",
    "speed_up",
    "store",
    "subject_of",
    "weights_hash",
]

COMPILED = 20_000  # evaluations of one sample from which on it pays to wait for a compiler


@dataclass(frozen=True)
class Run:
    """A trained model on its device, and which one it is."""

    path: Path
    model: Model
    recipe: str
    step: int
    dataset: str
    dataset_version: str
    weights: str
    ema: bool
    precision: str

    def record(self) -> dict[str, Any]:
        return {
            "run": self.path.name,
            "recipe": self.recipe,
            "step": self.step,
            "ema": self.ema,
            "weights_sha256": self.weights,
            "precision": self.precision,
            "bsi": __version__,
        }


def open_run(path: Path, world: World, ema: bool = True, step: int | None = None, precision: Precision = "auto") -> Run:
    """The model of a run folder, an exported file or a bundled name, on this rank's device and in evaluation mode."""
    trained = read_trained(path, ema, step)
    if trained.recipe.backbone is None:
        raise UsageError(
            f"{path} was trained with a network of yours, {trained.network}: load it with bsi.load(run, backbone=...) "
            f"and call bsi.evaluation.bound.evaluate"
        )
    model = build_model(trained.recipe, trained.data)
    set_weights(model, trained, str(path))
    model = model.to(world.device).eval()
    found = weights_hash(model.denoiser.backbone)
    network = model.denoiser.backbone
    if isinstance(network, Backbone):
        network.compute_dtype = compute_dtype(precision, world.device)
    return Run(
        path=path,
        model=model,
        recipe=trained.recipe.name,
        step=trained.step,
        dataset=trained.recipe.data.name,
        dataset_version=trained.data.version,
        weights=found,
        ema=ema,
        precision=inner_precision(model),
    )


def inner_precision(model: Model) -> str:
    """The type inside the model's network, by its name: what `auto` came to on its device."""
    network = model.denoiser.backbone
    return type_name(network.compute_dtype if isinstance(network, Backbone) else None)


def speed_up(run: Run, work: int) -> None:
    """The network's fastest form, for good, if `work`, the evaluations ahead on this rank, pays for it."""
    network = run.model.denoiser.backbone
    if isinstance(network, Backbone) and work >= COMPILED:
        accelerate(network, run.model.device)
        freeze(network)


def weights_hash(module: nn.Module) -> str:
    """SHA-256 over the names, types, shapes and bytes of a module's weights: the same wherever they are stored."""
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


def open_split(run: Run, split: str, other: str | None = None) -> Split:
    """The run's own dataset, which must be the one it was trained on; or another one, by name or folder."""
    dataset = open_dataset(run.dataset if other is None else other)
    if other is None and dataset.version != run.dataset_version:
        raise DataError(
            f"the dataset {dataset.name!r} is not the one that {run.path.name} was trained on: expected version "
            f"{run.dataset_version[:16]}, found {dataset.version[:16]}. Name it with --data to evaluate on it anyway."
        )
    if dataset.shape != run.model.shape:
        raise DataError(
            f"{run.path.name} models data of shape {run.model.shape}; {dataset.name!r} has the shape {dataset.shape}"
        )
    if (dataset.bins and dataset.bins.count) != (run.model.bins and run.model.bins.count):
        raise DataError(f"{run.path.name} and {dataset.name!r} have other bins: {run.model.bins} and {dataset.bins}")
    return Split(dataset, split)


def subject_of(run: Run, split: Split, limit: int | None) -> Subject:
    """What `evaluate` takes."""
    return Subject.of(run.model, as_source(split.rows, run.model.device), limit)


def bound_record(run: Run, split: Split, found: Evaluation) -> dict[str, Any]:
    """Bound, terms and errors in bits per dimension (nats for continuous data are bits times ln 2)."""
    elbo, unit = found.elbo, found.n * math.log(2)
    record = {
        "bits_per_dim": elbo.bits_per_dim,
        "monte_carlo_error": elbo.monte_carlo_error,
        "degrees_of_freedom": found.degrees_of_freedom,
        "data_error": elbo.data_error,
        "data_resolved": elbo.data_resolved,
        "measurement": float(elbo.measurement.mean()) / unit,
        "reconstruction": float(elbo.reconstruction.mean()) / unit,
        "prior": float(elbo.prior.mean()) / unit,
        "change_of_units": elbo.log_determinant / math.log(2),  # of continuous data, which was standardized
        **_effort(found),
        **split.record(),
        **run.record(),
    }
    return {name: _finite(value) for name, value in record.items()}


def difference_record(
    a: Run, b: Run, split: Split, found: Difference, of: tuple[Evaluation, Evaluation]
) -> dict[str, Any]:
    """`difference` is a's bound less b's, `of` both; it is stored with a."""
    record = {
        "difference": found.bits_per_dim,
        "monte_carlo_error": found.monte_carlo_error,
        "degrees_of_freedom": found.degrees_of_freedom,
        "data_error": found.data_error,
        "data_resolved": found.data_resolved,
        "unpaired_error": found.unpaired_error,
        **_effort(*of),
        **split.record(),
        "a": a.record(),
        "b": b.record(),
    }
    return {name: _finite(value) for name, value in record.items()}


def _effort(first: Evaluation, *others: Evaluation) -> dict[str, Any]:
    """What was evaluated and how: once, or several times by one procedure on the same samples."""
    found = (first, *others)
    return {
        "images": len(first.prior),
        "evaluations": sum(each.evaluations for each in found),
        "pilot_evaluations": sum(each.plan.pilot for each in found),
        "rounds": first.rounds,
        "control": first.plan.control is not None,
        **{name: value for name, value in asdict(first.procedure).items() if name not in ("control", "batch")},
    }


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: what is unknown is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def store(run: Run, what: str, record: Mapping[str, Any]) -> Path | None:
    """Write a record into the run folder, and say where; None for an exported file, which has no folder."""
    if not run.path.is_dir():
        return None
    folder = run.path / "evaluations"
    make_folder(folder)
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:8]
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{what}-{digest}.json"
    with atomic(path) as temporary:
        temporary.write_text(canonical_json(record), "utf-8")
    return path


def save_samples(path: Path, found: Evaluation) -> None:
    """The bound of every sample, in nats, with its Monte Carlo variance, as one .npz."""
    elbo = found.elbo
    with atomic(path, "--per-sample") as temporary, temporary.open("wb") as file:
        np.savez(
            file,
            nats=elbo.nats.numpy(),
            measurement=elbo.measurement.numpy(),
            reconstruction=elbo.reconstruction.numpy(),
            prior=elbo.prior.numpy(),
            variance=elbo.sample_variance.numpy(),
        )
