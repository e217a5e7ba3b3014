"""Measure a network: its bound, its errors over the levels, and the quality of its samples.

Noise, levels and the order of images depend on the seed alone, so that networks are compared on the same draws.
"""

from __future__ import annotations

import functools
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

import bsi
from bsi.backbones import Backbone, accelerate, compute_dtype, freeze
from bsi.bound import EvaluatedModel, OneRank, estimate
from bsi.data.batches import as_source
from bsi.data.store import Dataset, open_dataset
from bsi.elbo import Estimator, reconstruction_loss
from bsi.errors import NonFinite, Preempted, UsageError
from bsi.evaluation.likelihoods import rate_distortion
from bsi.evaluation.runs import fitted_variance, inner_precision
from bsi.evaluation.samples import SampleFile
from bsi.gaussian import squared_norm
from bsi.methods import BSI
from bsi.metrics import Extractor, Inception, collect, frechet_distance, frechet_error, metric_name, reference
from bsi.metrics.features import array_batches
from bsi.model import Model
from bsi.recipe import Recipe
from bsi.rng import standard_normal
from bsi.sampler import VarianceKind
from bsi.studies.digits_features import DigitsFeatures
from bsi.studies.job import Bound, LevelErrors, Measure, Quality, Rate, Reconstruction, Result, name_of
from bsi.studies.scale import MetricName, Scale
from bsi.values import to_uint8

SHOWN = 64  # samples that are kept for figures


@dataclass(frozen=True)
class Deadline:
    """A time to stop at, on the clock of time.monotonic()."""

    at: float = math.inf

    @classmethod
    def after(cls, minutes: float | None) -> Deadline:
        return cls() if minutes is None else cls(time.monotonic() + 60 * minutes)

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


@dataclass(frozen=True)
class Laboratory:
    """Measures a model on the test set of its dataset. Partial drawings and features are kept in `folder`."""

    model: Model
    dataset: Dataset
    scale: Scale
    folder: Path
    deadline: Deadline

    @classmethod
    def of(cls, model: Model, recipe: Recipe, scale: Scale, folder: Path, deadline: Deadline) -> Laboratory:
        return cls(model, open_dataset(recipe.data.name), scale, folder, deadline)

    @torch.no_grad()
    def measure(self, job: Measure) -> Result:
        match job:
            case Bound():
                return self._bound(job)
            case Reconstruction():
                return self._reconstruction(job)
            case LevelErrors():
                return self._level_errors(job)
            case Quality():
                if job.sampler.variance != "none":
                    fitted_variance(self.model, self.dataset, job.sampler.variance, self.scale.batch)
                return self._quality(job)
            case Rate():
                found = rate_distortion(self._test(job.variance), job.steps, self.scale.batch)
                return Result({name: list(values) for name, values in vars(found).items()})

    def _test(self, kind: VarianceKind = "none") -> EvaluatedModel:
        """The model on the test set; its transitions have a variance that is fitted to training samples."""
        subject = self.model.on(as_source(self.dataset.split("test"), self.model.device))
        if kind == "none":
            return subject
        return replace(subject, variance=fitted_variance(self.model, self.dataset, kind, self.scale.batch))

    def _bound(self, job: Bound) -> Result:
        found = estimate(
            self._test(job.variance), Estimator(job.levels, job.recon, job.finite_k, batch_size=self.scale.batch)
        )
        # Differences between networks are computed from the replicates of every image, in nats.
        arrays = {
            "measurement": found.measurements.values.numpy(),
            "measurement_sizes": found.measurements.sizes.numpy(),
            "reconstruction": found.reconstructions.values.numpy(),
            "reconstruction_sizes": found.reconstructions.sizes.numpy(),
            "block": found.measurements.block.numpy(),
            "prior": found.prior.numpy(),
        }
        return Result({**found.record(), "images": len(found.nats), "dimensions": found.n}, arrays)

    def _reconstruction(self, job: Reconstruction) -> Result:
        """L_R of every image for each factor."""
        subject, method = self._test(), self.model.method
        if not isinstance(method, BSI):
            raise UsageError(f"alpha_R is a parameter of BSI, got {type(method).__name__}. Use a network of BSI.")
        nats = torch.zeros(len(job.factors), subject.count, dtype=torch.float64)
        for ids in subject.batches(subject.count, self.scale.batch, OneRank()):
            x, predict = subject.x(ids), subject.predict(ids)
            for number in range(job.recon):
                eps = standard_normal(1, ids, number, subject.shape)
                for row, factor in enumerate(job.factors):
                    decoder = replace(method, alpha_R=factor * method.alpha_M)
                    loss = reconstruction_loss(decoder, predict, x, eps, subject.kind)
                    nats[row, ids.cpu()] += loss.double().cpu() / job.recon
        bits = nats / (math.prod(subject.shape) * math.log(2))
        return Result({"factors": list(job.factors), "reconstruction": bits.mean(1).tolist()}, {"bits": bits.numpy()})

    def _level_errors(self, job: LevelErrors) -> Result:
        """For each level, |x - x_hat|^2 and |psi - x_hat| / |psi| of the same images with the same noise."""
        subject, method, device = self._test(), self.model.method, self.model.device
        count = min(job.images, subject.count)
        ids = torch.arange(count, device=device) * subject.count // count
        x, predict, eps = subject.x(ids), subject.predict(ids), standard_normal(2, ids, 0, subject.shape)
        t = torch.linspace(0, 1, job.levels, dtype=torch.float64)
        levels = method.levels.icdf(t)
        errors, distances = [], []
        for level in levels.to(device):
            at = level.expand(count)
            psi = method.encoder(at).encode(x, eps)
            x_hat = predict(psi, at)
            errors.append(squared_norm(x - x_hat).double().cpu())
            distances.append((squared_norm(psi - x_hat) / squared_norm(psi)).sqrt().double().cpu())
        arrays = {"level": levels, "t": t, "error": torch.stack(errors), "distance": torch.stack(distances)}
        if not bool(torch.isfinite(arrays["error"]).all()):
            raise NonFinite("predictions are NaN or infinite at some level")
        return Result({"images": count, "levels": job.levels}, {name: a.numpy() for name, a in arrays.items()})

    def _quality(self, job: Quality) -> Result:
        """Samples are kept in files until their distance is known, so that an interrupted drawing resumes."""
        folder = self.folder / "measurements" / f"{name_of(job)}-samples"
        folder.mkdir(parents=True, exist_ok=True)
        found = self._distance(job, self._draw(job, folder / "samples.npz"))
        shutil.rmtree(folder)
        return found

    def _draw(self, job: Quality, path: Path) -> np.ndarray:
        """All samples as bin indices."""
        model, batch = self.model, self.scale.sample_batch
        parts = SampleFile(path, job.num, {"job": name_of(job), "precision": inner_precision(model)})
        for rows in parts.missing():
            self.deadline.check(f"{rows.start} of {job.num} samples are drawn")
            parts.write(rows, model.sample(rows, job.sampler, seed=job.seed, batch_size=batch).cpu().numpy())
        return parts.join()

    def _distance(self, job: Quality, drawn: np.ndarray) -> Result:
        """The distance to each part of the dataset, with the error from drawing these samples."""
        extractor, folder = _extractor(job.metric, self.model.device), self.folder / "references"
        samples = collect(self._pixels(drawn), extractor, keep=True)
        assert samples.vectors is not None
        values: dict[str, Any] = {
            "metric": metric_name(extractor),
            "samples": len(drawn),
            "extractor_hash": extractor.hash,
            "precision": extractor.precision,
        }
        for part in job.references:
            name, version, images = self.dataset.name, self.dataset.version, self._pixels(self.dataset.split(part))
            real = reference(name, version, part, images, extractor, folder=folder).features.moments
            values[f"distance_{part}"] = frechet_distance(samples.moments, real)
            values[f"error_{part}"] = frechet_error(samples.vectors, real)
        return Result(values, {"images": drawn[:SHOWN]})

    def _pixels(self, indices: np.ndarray) -> Iterator[UInt8[Tensor, "n 3 h w"]]:
        """Images in batches of 8-bit pixels, from bin indices."""
        bins, batch = self.dataset.bins, self.scale.sample_batch
        assert bins is not None
        parts = (indices[start : start + batch] for start in range(0, len(indices), batch))
        pixels = (to_uint8(bins.values(part), bins.low, bins.high) for part in parts)
        return array_batches(pixels, batch, self.dataset.name)


@functools.cache
def _extractor(metric: MetricName, device: torch.device) -> Extractor:
    return DigitsFeatures(device) if metric == "fd-digits" else Inception(device=device)
