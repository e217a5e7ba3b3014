"""The measurements of a network: its bound, its errors over the levels, and the quality of its samples.

    Bound            bits per dimension of the test set, with L_M^inf or L_M^k
    Reconstruction   L_R for several precisions alpha_R of the decoder
    LevelErrors      errors of the predictions at levels from the first to the last
    Quality          the Fréchet distance of samples to the test set, or to the training set too

Noise, levels and the order of images depend on the seed alone, so that networks are compared on the same draws.

The metric of the scale smoke is `fd-digits`, a Fréchet distance for 8x8 digits, which are too small for Inception. Its
features are the 32 activations before the logits of a small classifier, whose weights (digits_features.safetensors) are
part of the package and were trained by docs/benchmarks/digits_features.py. Its values are comparable with each other
only.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import shutil
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import safetensors.torch
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from bsi.bound import EvaluatedModel, OneRank
from bsi.bound import estimate as estimate_bound
from bsi.data.batches import as_source
from bsi.data.store import open_dataset
from bsi.elbo import Estimator, reconstruction_loss
from bsi.errors import DataError, NonFinite, Preempted, UsageError
from bsi.evaluation.runs import fitted_variance
from bsi.evaluation.samples import SampleFile, draw_into, image_batches
from bsi.gaussian import squared_norm
from bsi.methods import BSI
from bsi.metrics import Extractor, Inception, collect, frechet_distance, frechet_error, metric_name, reference
from bsi.model import Model
from bsi.recipe import Recipe
from bsi.rng import standard_normal
from bsi.runtime.distributed import Place, World
from bsi.sampler import Sampler, VarianceKind
from bsi.studies.job import Job, Result, Store, describe
from bsi.studies.scale import MetricName, Scale

SHOWN = 64  # samples that are kept for figures
OURS = Sampler()
OURS_NAME = f"our solver on {OURS.grid} in {OURS.steps}"  # in tables


def paper_sampler(steps: int) -> Sampler:
    return Sampler(steps, "posterior", "paper")


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


@dataclass(frozen=True)
class OfTestSet(Job):
    """A measurement of the network on the test set."""

    @abstractmethod
    def of(self, model: EvaluatedModel, batch: int) -> Result: ...


@dataclass(frozen=True)
class Bound(OfTestSet):
    """Bits per dimension of the test set: `levels` and `recon` evaluations of each image."""

    levels: int
    recon: int
    finite_k: int | None = None
    variance: VarianceKind = "none"

    def title(self) -> str:
        at = "" if self.finite_k is None else f" at k={self.finite_k}"
        return f"bits/dim of {describe(self.network)}{at}: {self.levels} levels{_with_variance(self.variance)}"

    def evaluations(self) -> int:
        return self.data.test_images * (self.levels + self.recon)

    def of(self, model: EvaluatedModel, batch: int) -> Result:
        """The bound, with the replicates of every image in nats: differences of networks are computed from these."""
        found = estimate_bound(model, Estimator(self.levels, self.recon, self.finite_k, batch_size=batch))
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


@dataclass(frozen=True)
class Reconstruction(OfTestSet):
    """L_R of BSI with alpha_R = factor alpha_M, from the same predictions for every factor."""

    factors: tuple[float, ...]
    recon: int

    def title(self) -> str:
        return f"L_R of {describe(self.network)} for {len(self.factors)} values of alpha_R"

    def evaluations(self) -> int:
        return self.data.test_images * self.recon * len(self.factors)

    def of(self, model: EvaluatedModel, batch: int) -> Result:
        """L_R of every image for each factor."""
        method = model.method
        if not isinstance(method, BSI):
            raise UsageError(f"alpha_R is a parameter of BSI, got {type(method).__name__}. Use a network of BSI.")
        nats = torch.zeros(len(self.factors), model.count, dtype=torch.float64)
        for ids in model.batches(model.count, batch, OneRank()):
            x, predict = model.x(ids), model.predict(ids)
            for number in range(self.recon):
                eps = standard_normal(1, ids, number, model.shape)
                for row, factor in enumerate(self.factors):
                    decoder = replace(method, alpha_R=factor * method.alpha_M)
                    loss = reconstruction_loss(decoder, predict, x, eps, model.kind)
                    nats[row, ids.cpu()] += loss.double().cpu() / self.recon
        bits = nats / (math.prod(model.shape) * math.log(2))
        return Result({"factors": list(self.factors), "reconstruction": bits.mean(1).tolist()}, {"bits": bits.numpy()})


@dataclass(frozen=True)
class LevelErrors(OfTestSet):
    """|x - x_hat|^2 and |psi - x_hat| / |psi| of `images` test images at `levels` levels, evenly spaced in t."""

    levels: int
    images: int

    def title(self) -> str:
        return f"errors of {describe(self.network)}: {self.images} images at {self.levels} levels"

    def evaluations(self) -> int:
        return self.levels * self.images

    def of(self, model: EvaluatedModel, batch: int) -> Result:
        """Both at each level, of the same images with the same noise."""
        count = min(self.images, model.count)
        ids = torch.arange(count, device=model.device) * model.count // count
        x, predict, eps = model.x(ids), model.predict(ids), standard_normal(2, ids, 0, model.shape)
        t = torch.linspace(0, 1, self.levels, dtype=torch.float64)
        levels = model.method.levels.icdf(t)
        errors, distances = [], []
        for level in levels.to(model.device):
            at = level.expand(count)
            psi = model.method.encoder(at).encode(x, eps)
            x_hat = predict(psi, at)
            errors.append(squared_norm(x - x_hat).double().cpu())
            distances.append((squared_norm(psi - x_hat) / squared_norm(psi)).sqrt().double().cpu())
        arrays = {"level": levels, "t": t, "error": torch.stack(errors), "distance": torch.stack(distances)}
        if not bool(torch.isfinite(arrays["error"]).all()):
            raise NonFinite("predictions are NaN or infinite at some level")
        return Result({"images": count, "levels": self.levels}, {name: a.numpy() for name, a in arrays.items()})


@dataclass(frozen=True)
class Quality(Job):
    """The Fréchet distance of `num` samples to parts of the dataset. Sample i has the same noise for every network."""

    metric: MetricName
    num: int
    sampler: Sampler
    references: tuple[str, ...] = ("test",)
    seed: int = 0

    def title(self) -> str:
        how = self.sampler
        drawn = f"{self.num} samples, {how.steps} steps of {how.solver} on {how.grid}"
        return f"{self.metric} of {describe(self.network)}: {drawn}{_with_variance(how.variance)}"

    def evaluations(self) -> int:
        return self.num * (self.sampler.steps + 1)

    def seconds(self, scale: Scale) -> float:
        return super().seconds(scale) + self.num / scale.throughput.metric

    def of_samples(self, model: Model, store: Store, deadline: Deadline) -> Result:
        """The distance to each part of the dataset, with the error from drawing these samples.

        Samples are kept in the store until their distance is known, so that an interrupted drawing resumes.
        """
        dataset, extractor = open_dataset(self.network.data.name), _extractor(self.metric, model.device)
        batch, kept = store.scale.sample_batch, store.folder / "measurements" / f"{self.name}-samples"
        file = SampleFile.of(model, self.sampler, self.seed, None, kept / "samples.npz", self.num)

        def check(ids: range) -> None:
            deadline.check(f"{ids.start} of {self.num} samples are drawn")

        alone = World(Place(), model.device)
        drawn = draw_into(file, file.missing(), model, self.sampler, self.seed, None, batch, alone, check)
        assert drawn is not None
        assert dataset.bins is not None
        samples = collect(image_batches(drawn, dataset.bins, batch), extractor, keep=True)
        assert samples.vectors is not None
        values: dict[str, Any] = {
            "metric": metric_name(extractor),
            "samples": len(drawn),
            "extractor_hash": extractor.hash,
            "precision": extractor.precision,
        }
        for part in self.references:
            images = image_batches(dataset.split(part), dataset.bins, batch)
            real = reference(dataset.name, dataset.version, part, images, extractor, folder=store.folder / "references")
            values[f"distance_{part}"] = frechet_distance(samples.moments, real.features.moments)
            values[f"error_{part}"] = frechet_error(samples.vectors, real.features.moments)
        shutil.rmtree(kept)
        return Result(values, {"images": drawn[:SHOWN]})


def _with_variance(kind: VarianceKind) -> str:
    return "" if kind == "none" else f", variance {kind}"


@torch.no_grad()
def measure(job: Job, model: Model, store: Store, deadline: Deadline) -> Result:
    """Measure a model, with a predictive variance if the job has one, fitted to training samples."""
    dataset, batch = open_dataset(job.network.data.name), store.scale.batch
    kind = job.sampler.variance if isinstance(job, Quality) else getattr(job, "variance", "none")
    variance = None if kind == "none" else fitted_variance(model, dataset, kind, batch)
    if isinstance(job, Quality):
        return job.of_samples(model, store, deadline)
    assert isinstance(job, OfTestSet)
    test = model.on(as_source(dataset.split("test"), model.device))
    return job.of(replace(test, variance=variance), batch)


# The measurements of a scale


def bound(scale: Scale, network: Recipe, finite_k: int | None = None) -> Bound:
    return Bound(network, scale.levels, scale.recon, finite_k)


def quality(scale: Scale, network: Recipe, sampler: Sampler = OURS) -> Quality:
    return Quality(network, scale.metric, scale.samples, sampler.named(network.method), scale.references)


def samplers_of(scale: Scale, *steps: int, ours: Sampler = OURS) -> dict[str, Sampler]:
    """The paper's sampler with these numbers of steps, and ours, by the columns of their distances."""
    return {f"{scale.metric} at {k}": paper_sampler(k) for k in steps} | {f"{scale.metric}, {OURS_NAME}": ours}


def measurements(scale: Scale, groups: Mapping[Any, Iterable[Recipe]], samplers: Mapping[str, Sampler]) -> list[Job]:
    """The bound of each network, and the quality of its samples by each sampler."""
    jobs: list[Job] = []
    for network in itertools.chain.from_iterable(groups.values()):
        jobs += [bound(scale, network), *(quality(scale, network, sampler) for sampler in samplers.values())]
    return jobs


# The features of digits


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
