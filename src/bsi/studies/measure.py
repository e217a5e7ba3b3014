"""Measure a network: its bound, its errors over the levels, and the quality of its samples.

Noise, levels and the order of images depend on the seed alone, so that networks are compared on the same draws.

The metric of the scale smoke is `fd-digits`, a Fréchet distance for 8x8 digits, which are too small for Inception. Its
features are the 32 activations before the logits of a small classifier, whose weights (digits_features.safetensors) are
part of the package and were trained by docs/benchmarks/digits_features.py. Its values are comparable with each other
only.
"""

from __future__ import annotations

import functools
import hashlib
import math
import shutil
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

import bsi
from bsi.backbones import Backbone, accelerate, compute_dtype, freeze
from bsi.bound import EvaluatedModel, OneRank, estimate
from bsi.data.batches import as_source
from bsi.data.store import Dataset, open_dataset
from bsi.elbo import Estimator, reconstruction_loss
from bsi.errors import DataError, NonFinite, Preempted, UsageError
from bsi.evaluation.likelihoods import rate_distortion
from bsi.evaluation.runs import fitted_variance
from bsi.evaluation.samples import SampleFile, draw_into, image_batches
from bsi.gaussian import squared_norm
from bsi.methods import BSI
from bsi.metrics import Extractor, Inception, collect, frechet_distance, frechet_error, metric_name, reference
from bsi.model import Model
from bsi.recipe import Recipe
from bsi.rng import standard_normal
from bsi.runtime.distributed import Place, World
from bsi.studies.job import Bound, LevelErrors, Measure, Quality, Rate, Reconstruction, Result, name_of
from bsi.studies.scale import MetricName, Scale

SHOWN = 64  # samples that are kept for figures


@dataclass(frozen=True)
class Deadline:
    """A time to stop at, on the clock of time.monotonic()."""

    at: float = math.inf

    @property
    def left_s(self) -> float:
        return self.at - time.monotonic()

    def check(self, progress: str, needed_s: float = 0.0) -> None:
        """Raise `Preempted` if less time than needed is left; all finished work has been saved."""
        if self.left_s <= needed_s:
            raise Preempted(f"out of time: {progress}. Run the same command to resume.")


def load_network(weights: Path, recipe: Recipe, device: torch.device) -> Model:
    """A trained network on the device, in its fastest form."""
    model = bsi.load(weights).to(device)
    network = model.denoiser.backbone
    if isinstance(network, Backbone):
        network.compute_dtype = compute_dtype(recipe.precision, device)
        accelerate(network, device)
        freeze(network)
    return model


@torch.no_grad()
def measure(job: Measure, model: Model, scale: Scale, folder: Path, deadline: Deadline) -> Result:
    """Measure a model on the test set of its dataset. Partial drawings and features are kept in `folder`."""
    dataset = open_dataset(job.network.data.name)
    kind = job.sampler.variance if isinstance(job, Quality) else getattr(job, "variance", "none")
    variance = None if kind == "none" else fitted_variance(model, dataset, kind, scale.batch)
    subject = replace(model.on(as_source(dataset.split("test"), model.device)), variance=variance)
    match job:
        case Bound():
            return _bound(job, subject, scale.batch)
        case Reconstruction():
            return _reconstruction(job, subject, scale.batch)
        case LevelErrors():
            return _level_errors(job, subject)
        case Quality():
            return _quality(job, model, dataset, scale.sample_batch, folder, deadline)
        case Rate():
            found = rate_distortion(subject, job.steps, scale.batch)
            return Result({name: list(values) for name, values in vars(found).items()})


def _bound(job: Bound, subject: EvaluatedModel, batch: int) -> Result:
    """The bound, with the replicates of every image in nats: differences between networks are computed from these."""
    found = estimate(subject, Estimator(job.levels, job.recon, job.finite_k, batch_size=batch))
    arrays = {
        "measurement": found.measurements.values,
        "measurement_sizes": found.measurements.sizes,
        "reconstruction": found.reconstructions.values,
        "reconstruction_sizes": found.reconstructions.sizes,
        "block": found.measurements.block,
        "prior": found.prior,
    }
    values = {**found.record(), "images": len(found.nats), "dimensions": found.n}
    return Result(values, {name: array.numpy() for name, array in arrays.items()})


def _reconstruction(job: Reconstruction, subject: EvaluatedModel, batch: int) -> Result:
    """L_R of every image for each factor."""
    method = subject.method
    if not isinstance(method, BSI):
        raise UsageError(f"alpha_R is a parameter of BSI, got {type(method).__name__}. Use a network of BSI.")
    nats = torch.zeros(len(job.factors), subject.count, dtype=torch.float64)
    for ids in subject.batches(subject.count, batch, OneRank()):
        x, predict = subject.x(ids), subject.predict(ids)
        for number in range(job.recon):
            eps = standard_normal(1, ids, number, subject.shape)
            for row, factor in enumerate(job.factors):
                decoder = replace(method, alpha_R=factor * method.alpha_M)
                loss = reconstruction_loss(decoder, predict, x, eps, subject.kind)
                nats[row, ids.cpu()] += loss.double().cpu() / job.recon
    bits = nats / (math.prod(subject.shape) * math.log(2))
    return Result({"factors": list(job.factors), "reconstruction": bits.mean(1).tolist()}, {"bits": bits.numpy()})


def _level_errors(job: LevelErrors, subject: EvaluatedModel) -> Result:
    """For each level, |x - x_hat|^2 and |psi - x_hat| / |psi| of the same images with the same noise."""
    method = subject.method
    count = min(job.images, subject.count)
    ids = torch.arange(count, device=subject.device) * subject.count // count
    x, predict, eps = subject.x(ids), subject.predict(ids), standard_normal(2, ids, 0, subject.shape)
    t = torch.linspace(0, 1, job.levels, dtype=torch.float64)
    levels = method.levels.icdf(t)
    errors, distances = [], []
    for level in levels.to(subject.device):
        at = level.expand(count)
        psi = method.encoder(at).encode(x, eps)
        x_hat = predict(psi, at)
        errors.append(squared_norm(x - x_hat).double().cpu())
        distances.append((squared_norm(psi - x_hat) / squared_norm(psi)).sqrt().double().cpu())
    arrays = {"level": levels, "t": t, "error": torch.stack(errors), "distance": torch.stack(distances)}
    if not bool(torch.isfinite(arrays["error"]).all()):
        raise NonFinite("predictions are NaN or infinite at some level")
    return Result({"images": count, "levels": job.levels}, {name: a.numpy() for name, a in arrays.items()})


def _quality(job: Quality, model: Model, dataset: Dataset, batch: int, folder: Path, deadline: Deadline) -> Result:
    """The distance to each part of the dataset, with the error from drawing these samples.

    Samples are kept in files until their distance is known, so that an interrupted drawing resumes.
    """
    kept = folder / "measurements" / f"{name_of(job)}-samples"
    file = SampleFile.of(model, job.sampler, job.seed, None, kept / "samples.npz", job.num)

    def check(ids: range) -> None:
        deadline.check(f"{ids.start} of {job.num} samples are drawn")

    alone = World(Place(), model.device)
    drawn = draw_into(file, file.missing(), model, job.sampler, job.seed, None, batch, alone, check)
    assert drawn is not None
    assert dataset.bins is not None
    extractor = _extractor(job.metric, model.device)
    samples = collect(image_batches(drawn, dataset.bins, batch), extractor, keep=True)
    assert samples.vectors is not None
    values: dict[str, Any] = {
        "metric": metric_name(extractor),
        "samples": len(drawn),
        "extractor_hash": extractor.hash,
        "precision": extractor.precision,
    }
    for part in job.references:
        images = image_batches(dataset.split(part), dataset.bins, batch)
        real = reference(dataset.name, dataset.version, part, images, extractor, folder=folder / "references")
        values[f"distance_{part}"] = frechet_distance(samples.moments, real.features.moments)
        values[f"error_{part}"] = frechet_error(samples.vectors, real.features.moments)
    shutil.rmtree(kept)
    return Result(values, {"images": drawn[:SHOWN]})


@functools.cache
def _extractor(metric: MetricName, device: torch.device) -> Extractor:
    return DigitsFeatures(device) if metric == "fd-digits" else Inception(device=device)


def digits_classifier() -> nn.Sequential:
    """Values in [-1, 1] of 8x8 digits to features and logits, with new weights."""
    return nn.Sequential(
        OrderedDict(
            conv_1=nn.Conv2d(1, 16, 3, padding=1),
            silu_1=nn.SiLU(),
            conv_2=nn.Conv2d(16, 32, 3, padding=1, stride=2),
            silu_2=nn.SiLU(),
            flatten=nn.Flatten(),
            hidden=nn.Linear(32 * 16, DigitsFeatures.dim),
            silu_3=nn.SiLU(),
            logits=nn.Linear(DigitsFeatures.dim, 10),
        )
    )


class DigitsFeatures:
    """A `bsi.metrics.Extractor`: the classifier with the weights of the package."""

    name, resize, precision, dim = "digits", "none", "float32", 32

    def __init__(self, device: torch.device | str = "cpu") -> None:
        weights = (resources.files("bsi.studies") / "digits_features.safetensors").read_bytes()
        self.hash = hashlib.sha256(weights).hexdigest()
        self.device = torch.device(device)
        self.network = digits_classifier()
        self.network.load_state_dict(safetensors.torch.load(weights))
        self.network.to(self.device).eval()

    @torch.no_grad()
    def __call__(self, images: UInt8[Tensor, "n 3 h w"]) -> Float[Tensor, "n dim"]:
        if images.shape[2:] != (8, 8):
            raise DataError(f"fd-digits needs images of 8x8 pixels, got {tuple(images.shape[2:])}. Use FID for others.")
        return self.network[:-1](images[:, :1].to(self.device).float() / 127.5 - 1)
