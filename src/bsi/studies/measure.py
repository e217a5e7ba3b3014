"""What is measured of a network: its bound, its errors over the levels, the quality of its samples.

Noise, levels and the order of images depend on the seed alone, so that two networks are compared on the same draws.
"""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

import bsi
from bsi.backbones import Backbone, accelerate, compute_dtype, freeze
from bsi.data.batches import as_source
from bsi.data.store import Dataset
from bsi.elbo import reconstruction_loss
from bsi.errors import NonFinite, UsageError
from bsi.evaluation.bound import Evaluation, Procedure, evaluate
from bsi.evaluation.runs import inner_precision
from bsi.evaluation.samples import SampleFile
from bsi.evaluation.subject import Subject
from bsi.gaussian import squared_norm
from bsi.methods import BSI
from bsi.metrics import (
    Extractor,
    Inception,
    collect,
    frechet_distance,
    frechet_error,
    metric_name,
    reference,
)
from bsi.metrics.images import array_batches
from bsi.model import Model
from bsi.recipe import Recipe
from bsi.rng import standard_normal
from bsi.runtime.distributed import Place, World
from bsi.sampler import Sampler
from bsi.studies.deadline import Deadline
from bsi.studies.digits_features import DigitsFeatures
from bsi.studies.job import Bound, Measure, Profile, Quality, Reconstruction, name_of
from bsi.studies.scale import MetricName, Scale
from bsi.studies.store import Result
from bsi.values import to_uint8

__all__ = ["Laboratory"]

SHOWN = 64  # samples that are kept for pictures


@dataclass(frozen=True)
class Laboratory:
    """Where measurements are made: the data, the device, a folder for what is made on the way."""

    scale: Scale
    dataset: Dataset
    device: torch.device
    folder: Path

    @property
    def world(self) -> World:
        return World(Place(), self.device)

    @torch.no_grad()
    def measure(self, job: Measure, model: Model, deadline: Deadline) -> Result:
        match job:
            case Bound():
                return self._bound(job, model)
            case Reconstruction():
                return self._reconstruction(job, model)
            case Profile():
                return self._profile(job, model)
            case Quality():
                return self._quality(job, model, deadline)

    def load(self, weights: Path, recipe: Recipe) -> Model:
        """A network that was kept, on the device and in its fastest form."""
        model = bsi.load(weights).to(self.device)
        network = model.denoiser.backbone
        if isinstance(network, Backbone):
            network.compute_dtype = compute_dtype(recipe.precision, self.device)
            accelerate(network, self.device)
            freeze(network)
        return model

    def _test(self, model: Model) -> Subject:
        return Subject.of(model, as_source(self.dataset.split("test"), self.device))

    def _bound(self, job: Bound, model: Model) -> Result:
        procedure = Procedure(job.levels, job.recon, job.finite_k, batch=self.scale.measured.batch)
        found = evaluate(self._test(model), procedure, self.world)
        elbo, unit = found.elbo, found.n * math.log(2)
        return Result(
            {
                "bits_per_dim": elbo.bits_per_dim,
                "monte_carlo_error": elbo.monte_carlo_error,
                "data_error": elbo.data_error,
                "measurement": float(elbo.measurement.mean()) / unit,
                "reconstruction": float(elbo.reconstruction.mean()) / unit,
                "prior": float(elbo.prior.mean()) / unit,
                "images": len(elbo.nats),
                "dimensions": found.n,
            },
            _arrays(found),
        )

    def _reconstruction(self, job: Reconstruction, model: Model) -> Result:
        """L_R of every image, for each factor: the prediction does not depend on alpha_R."""
        if not isinstance(model.method, BSI):
            raise UsageError(f"alpha_R is a parameter of BSI alone: got {type(model.method).__name__}")
        subject, method = self._test(model), model.method
        nats = torch.zeros(len(job.factors), subject.count, dtype=torch.float64)
        for ids in subject.batches(subject.count, self.scale.measured.batch, self.world):
            x, predict = subject.x(ids), subject.predict(ids)
            for draw_number in range(job.recon):
                eps = standard_normal(1, ids, draw_number, subject.shape)
                for row, factor in enumerate(job.factors):
                    decoding = replace(method, alpha_R=factor * method.alpha_M)
                    loss = reconstruction_loss(decoding, predict, x, eps, subject.bins)
                    nats[row, ids.cpu()] += loss.double().cpu() / job.recon
        bits = nats / (math.prod(subject.shape) * math.log(2))
        return Result({"factors": list(job.factors), "reconstruction": bits.mean(1).tolist()}, {"bits": bits.numpy()})

    def _profile(self, job: Profile, model: Model) -> Result:
        """For each level, |x - x_hat|^2 and |psi - x_hat| / |psi| of the same images with the same noise."""
        subject, method = self._test(model), model.method
        count = min(job.images, subject.count)
        ids = torch.arange(count, device=self.device) * subject.count // count
        x, predict, eps = subject.x(ids), subject.predict(ids), standard_normal(2, ids, 0, subject.shape)
        t = torch.linspace(0, 1, job.levels, dtype=torch.float64)
        levels = method.levels.icdf(t)
        errors, distances = [], []
        for level in levels.to(self.device):
            at = level.expand(count)
            psi = method.encoder(at).encode(x, eps)
            x_hat = predict(psi, at)
            errors.append(squared_norm(x - x_hat).double().cpu())
            distances.append((squared_norm(psi - x_hat) / squared_norm(psi)).sqrt().double().cpu())
        arrays = {"level": levels, "t": t, "error": torch.stack(errors), "distance": torch.stack(distances)}
        if not bool(torch.isfinite(arrays["error"]).all()):
            raise NonFinite("predictions hold NaN or infinity at some level")
        return Result({"images": count, "levels": job.levels}, {name: a.numpy() for name, a in arrays.items()})

    def _quality(self, job: Quality, model: Model, deadline: Deadline) -> Result:
        """Samples are on the disk on their way, and gone at the end."""
        folder = self.folder / "measurements" / f"{name_of(job)}-samples"
        folder.mkdir(parents=True, exist_ok=True)
        found = self._distance(job, self._drawn(job, model, deadline, folder / "samples.npz"))
        shutil.rmtree(folder)
        return found

    def _distance(self, job: Quality, drawn: np.ndarray) -> Result:
        extractor = _extractor(job.metric, self.device)
        bins = self.dataset.bins
        assert bins is not None
        batch = self.scale.drawn.batch

        def images(indices: np.ndarray) -> Iterator[UInt8[Tensor, "n 3 h w"]]:
            pixels = (
                to_uint8(bins.values(indices[i : i + batch]), bins.low, bins.high)
                for i in range(0, len(indices), batch)
            )
            yield from array_batches(pixels, batch, self.dataset.name)

        test = self.dataset.split("test")
        real = reference(
            self.dataset.name, self.dataset.version, "test", images(test), extractor, folder=self.folder / "references"
        )
        samples = collect(images(drawn), extractor, keep=True)
        assert samples.vectors is not None
        return Result(
            {
                "metric": metric_name(extractor),
                "distance": frechet_distance(samples.moments, real.features.moments),
                "error": frechet_error(samples.vectors, real.features.moments),
                "samples": len(drawn),
                "reference_images": len(test),
                "extractor_hash": extractor.hash,
                "precision": extractor.precision,
            },
            {"images": drawn[:SHOWN]},
        )

    def _drawn(self, job: Quality, model: Model, deadline: Deadline, path: Path) -> np.ndarray:
        """All samples as bin indices, drawn part by part: an interrupted drawing goes on where it was."""
        sampler, batch = Sampler(job.steps, job.solver, job.grid), self.scale.drawn.batch
        parts = SampleFile(path, job.num, {"job": name_of(job), "precision": inner_precision(model)})
        for rows in parts.missing():
            deadline.check(f"{rows.start} of {job.num} samples are drawn")
            parts.write(rows, model.sample(rows, sampler, seed=job.seed, batch_size=batch).cpu().numpy())
        return parts.join()


@functools.cache
def _extractor(metric: MetricName, device: torch.device) -> Extractor:
    return DigitsFeatures(device) if metric == "fd-digits" else Inception(device=device)


def _arrays(found: Evaluation) -> dict[str, np.ndarray]:
    """The replicates of every image's terms in nats: differences between networks are made of these."""
    return {
        "measurement": found.measurement.values.numpy(),
        "measurement_sizes": found.measurement.sizes.numpy(),
        "reconstruction": found.reconstruction.values.numpy(),
        "reconstruction_sizes": found.reconstruction.sizes.numpy(),
        "block": found.measurement.block.numpy(),
        "prior": found.prior.numpy(),
    }
