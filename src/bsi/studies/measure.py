"""Jobs, which train or measure a network, and the store of their results.

    Training         train a network and keep its moving average
    Bound            bits per dimension of the test set, with L_M^inf or L_M^k
    LevelErrors      errors of the predictions at levels from the first to the last
    Rates            what the first steps of a chain cost and convey
    Quality          the Fréchet distance of samples to the test set, or to the training set too

A job is a record, and its name is a hash of the record. Its result is kept in files of that name, written atomically:

    FOLDER/networks/HASH/network.safetensors     the moving average, next to the run's journal
    FOLDER/measurements/KIND-HASH.json           the job, the values, and how they were measured
    FOLDER/measurements/KIND-HASH.npz            arrays, if there are any

Noise, levels and the order of images depend on the seed alone, so that networks are compared on the same draws.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import shutil
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import safetensors.torch
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from bsi.backbones.config import UNetConfig
from bsi.backbones.costs import cost
from bsi.bound import estimate as estimate_bound
from bsi.data.batches import as_source
from bsi.data.store import open_dataset
from bsi.elbo import Estimator
from bsi.errors import DataError, NonFinite, Preempted
from bsi.evaluation.likelihoods import rate_distortion
from bsi.evaluation.runs import fitted_variance
from bsi.evaluation.samples import SampleFile, draw_into, image_batches
from bsi.gaussian import squared_norm
from bsi.io import atomic, canonical_json, write_json
from bsi.methods import BSI
from bsi.metrics import Extractor, Inception, collect, frechet_distance, frechet_error, metric_name, reference
from bsi.model import Model
from bsi.recipe import Objective, Recipe, changes, from_plain, to_plain
from bsi.rng import standard_normal
from bsi.runtime.distributed import Place, World
from bsi.runtime.export import installed, read_trained
from bsi.sampler import Sampler, VarianceKind
from bsi.studies.scale import DATASETS, MetricName, Scale
from bsi.training.resume import SAFE

SHOWN = 64  # samples that are kept for figures
OURS = Sampler()


@dataclass(frozen=True)
class Job:
    """A measurement of a network, or its training."""

    network: Recipe

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()

    @property
    def name(self) -> str:
        return f"{self.kind}-{_hash({'network': network_name(self.network), **self.settings()})}"

    def settings(self) -> dict[str, Any]:
        """All settings except the network, for JSON. Newer ones are left out at their defaults, to keep names."""
        newer = {"variance": "none", "alpha_R": None, "clips": False, "images": None}
        kept = ((k, v) for k, v in vars(self).items() if k != "network" and not (k in newer and v == newer[k]))
        return {k: v.record() if isinstance(v, Sampler) else to_plain(v) for k, v in kept}

    def title(self) -> str:
        """The job in a few words."""
        settings = ", ".join(f"{name} {value}" for name, value in self.settings().items() if value is not None)
        return f"{self.kind} of {describe(self.network)}: {settings}"

    def measure(self, model: Model, store: Store) -> Result:
        """Measure the trained network."""
        raise NotImplementedError

    def seconds(self, scale: Scale) -> float:
        """An estimate, from floating-point operations and the speed of the scale's hardware."""
        network, data, speed = self.network, DATASETS[self.network.data.name], scale.throughput
        assert network.backbone is not None
        relative = speed.unet if isinstance(network.backbone, UNetConfig) else 1.0
        flops = cost(network.backbone, data.shape, data.bins).flops / relative
        match self:
            case Training() if self.name in installed_networks():
                return speed.startup_s
            case Training():  # the backward pass takes as long as two evaluations
                return speed.startup_s + 3 * network.batch * network.steps * flops / speed.training
            case Bound():
                evaluations, compared = (self.images or data.test_images) * (self.levels + self.recon), 0
            case Rates():
                evaluations, compared = (self.steps + 1) * self.images, 0
            case LevelErrors():
                evaluations, compared = self.levels * self.images, 0
            case Quality():
                evaluations, compared = self.num * (self.sampler.steps + 1), self.num
        return 0.2 * speed.startup_s + evaluations * flops / speed.evaluation + compared / speed.metric


@dataclass(frozen=True)
class Training(Job):
    @property
    def name(self) -> str:
        return network_name(self.network)

    def title(self) -> str:
        return f"training of {describe(self.network)}: {self.network.steps} steps of {self.network.batch}"


@dataclass(frozen=True)
class Bound(Job):
    """Bits per dimension of the test set, or of its first `images`: `levels` and `recon` evaluations of each image.

    `alpha_R` is the precision of BSI's decoder, in place of the method's own. With `clips` predictions are clipped to
    the range of the bins, whether the network was trained so or not.
    """

    levels: int
    recon: int
    finite_k: int | None = None
    variance: VarianceKind = "none"
    alpha_R: float | None = None
    clips: bool = False
    images: int | None = None

    def measure(self, model: Model, store: Store) -> Result:
        """The bound, with the replicates of every image in nats: differences of networks are computed from these."""
        dataset, batch = open_dataset(self.network.data.name), store.scale.batch
        test = model.on(as_source(dataset.split("test")[: self.images], model.device))
        test = replace(test, variance=fitted_variance(model, dataset, self.variance, batch))
        if self.alpha_R is not None:
            assert isinstance(test.method, BSI)
            test = replace(test, method=replace(test.method, alpha_R=self.alpha_R))
        if self.clips:
            assert model.bins is not None
            low, high = model.bins.low, model.bins.high
            test = replace(test, predict=lambda ids: lambda *at: model.denoiser(*at).clamp(low, high))
        found = estimate_bound(test, Estimator(self.levels, self.recon, self.finite_k, batch_size=batch))
        terms = {"measurement": found.measurements, "reconstruction": found.reconstructions}
        arrays = {name: term.values for name, term in terms.items()} | {"prior": found.prior}
        arrays |= {f"{name}_sizes": term.sizes for name, term in terms.items()} | {"block": found.measurements.block}
        values = {**found.record(), "images": len(found.nats), "dimensions": found.n}
        return Result(values, {name: array.numpy() for name, array in arrays.items()})


@dataclass(frozen=True)
class Rates(Job):
    """The rate and the distortion of `images` test images after each step of a chain."""

    steps: int
    images: int
    variance: VarianceKind = "none"

    def measure(self, model: Model, store: Store) -> Result:
        dataset, batch = open_dataset(self.network.data.name), store.scale.batch
        test = model.on(as_source(dataset.split("test")[: self.images], model.device))
        test = replace(test, variance=fitted_variance(model, dataset, self.variance, batch))
        found = rate_distortion(test, self.steps, batch)
        arrays = {"rate": np.array(found.bits_per_dim), "error": np.array(found.squared_error)}
        return Result({"images": test.count}, arrays)


@dataclass(frozen=True)
class LevelErrors(Job):
    """|x - x_hat|^2 and |psi - x_hat| / |psi| of `images` test images at `levels` levels, evenly spaced in t."""

    levels: int
    images: int

    @torch.no_grad()
    def measure(self, model: Model, store: Store) -> Result:
        """Both at each level, of the same images with the same noise."""
        test = open_dataset(self.network.data.name).split("test")
        count = min(self.images, len(test))
        chosen = np.arange(count) * len(test) // count
        x, ids = model.values(torch.from_numpy(test[chosen])).to(model.device), torch.from_numpy(chosen)
        eps = standard_normal(2, ids.to(model.device), 0, model.shape)
        levels = model.method.levels.icdf(torch.linspace(0, 1, self.levels, dtype=torch.float64))
        errors, distances = [], []
        for level in levels.to(model.device):
            at = level.expand(count)
            psi = model.method.encoder(at).encode(x, eps)
            x_hat = model.denoiser(psi, at)
            errors.append(squared_norm(x - x_hat).double().cpu())
            distances.append((squared_norm(psi - x_hat) / squared_norm(psi)).sqrt().double().cpu())
        arrays = {"level": levels, "error": torch.stack(errors), "distance": torch.stack(distances)}
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
        variance = "" if how.variance == "none" else f", variance {how.variance}"
        drawn = f"{self.num} samples, {how.steps} steps of {how.solver} on {how.grid}{variance}"
        return f"{self.metric} of {describe(self.network)}: {drawn}"

    def measure(self, model: Model, store: Store) -> Result:
        """The distance to each part of the dataset, with the error from drawing these samples.

        Samples are kept in the store until their distance is known, so that an interrupted drawing resumes.
        """
        dataset, extractor = open_dataset(self.network.data.name), _extractor(self.metric, model.device)
        fitted_variance(model, dataset, self.sampler.variance, store.scale.batch)
        batch, kept = store.scale.batch, store.folder / "measurements" / f"{self.name}-samples"
        file = SampleFile.of(model, self.sampler, self.seed, None, kept / "samples.npz", self.num)

        def check(ids: range) -> None:
            store.check_time(f"{ids.start} of {self.num} samples are drawn")

        alone = World(Place(), model.device)
        drawn = draw_into(file, file.missing(), model, self.sampler, self.seed, None, batch, alone, check)
        assert drawn is not None
        assert dataset.bins is not None
        samples = collect(image_batches(drawn, dataset.bins, batch), extractor, keep=True)
        assert samples.vectors is not None
        values: dict[str, Any] = {"metric": metric_name(extractor), "samples": len(drawn)}
        values |= {"extractor_hash": extractor.hash, "precision": extractor.precision}
        for part in self.references:
            images = image_batches(dataset.split(part), dataset.bins, batch)
            real = reference(dataset.name, dataset.version, part, images, extractor, folder=store.folder / "references")
            values[f"distance_{part}"] = frechet_distance(samples.moments, real.features.moments)
            values[f"error_{part}"] = frechet_error(samples.vectors, real.features.moments)
        shutil.rmtree(kept)
        return Result(values, {"images": drawn[:SHOWN]})


def paper_sampler(steps: int) -> Sampler:
    return Sampler(steps, "posterior", "paper")


def samplers_of(scale: Scale, *steps: int, ours: Sampler = OURS) -> dict[str, Sampler]:
    """The paper's sampler with these numbers of steps, and ours, by the columns of their distances in tables."""
    papers = {f"{scale.metric} at {k}": paper_sampler(k) for k in steps}
    return {**papers, f"{scale.metric}, our solver on {ours.grid} in {ours.steps}": ours}


def bound(scale: Scale, network: Recipe, finite_k: int | None = None, clips: bool = False) -> Bound:
    return Bound(network, scale.levels, scale.recon, finite_k, clips=clips)


def quality(scale: Scale, network: Recipe, sampler: Sampler = OURS) -> Quality:
    return Quality(network, scale.metric, scale.samples, sampler.named(network.method), scale.references)


def bound_and_quality(scale: Scale, samplers: Mapping[str, Sampler], *groups: Iterable[Recipe]) -> list[Job]:
    """The bound of each network of these groups, and the quality of its samples by each sampler."""
    jobs = ((bound(scale, n), *(quality(scale, n, s) for s in samplers.values())) for group in groups for n in group)
    return list(chain.from_iterable(jobs))


def network_name(recipe: Recipe) -> str:
    """A hash of the settings that decide the weights.

    Settings at their defaults are left out, so that a setting added in a later version changes no name. If a default
    changes instead, the recipe that is stored with each result shows it (`check_network`).
    """
    return _hash(_changed_settings(recipe, ""))


@functools.cache
def installed_networks() -> dict[str, str]:
    """The names of the installed networks, by the settings that decided their weights."""
    trained = {name: read_trained(path).recipe for name, path in installed().items()}
    return {network_name(recipe): name for name, recipe in trained.items() if isinstance(recipe, Recipe)}


def check_network(stored: object, wanted: Recipe, path: Path) -> None:
    """Raise if two recipes with one name differ in a setting that decides the weights."""
    if not all(_keeps_weights(change.name) for change in changes(stored, wanted)):
        raise DataError(f"{path} is of a network trained with other defaults. Delete it and run the study again.")


def _hash(plain: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(plain).encode()).hexdigest()[:12]


def _keeps_weights(name: str) -> bool:
    return any(name == safe or name.startswith(f"{safe}.") for safe in SAFE)


def _changed_settings(record: Any, prefix: str) -> dict[str, Any]:
    """The settings of a record that decide the weights and differ from their defaults."""
    found: dict[str, Any] = {"is": type(record).__name__}
    for f in fields(record):
        value = getattr(record, f.name)
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if value != default and not _keeps_weights(prefix + f.name):
            nested = is_dataclass(value)
            found[f.name] = _changed_settings(value, f"{prefix}{f.name}.") if nested else to_plain(value)
    return found


def describe(recipe: Recipe) -> str:
    """A network in a few words: its method, the settings that studies vary, and its seed."""
    method, usual, objective = recipe.method, vars(type(recipe.method)()), vars(recipe.objective)
    varied = {name: value for name, value in vars(method).items() if name in ("lambda_0", "gamma_0", "clips")}
    words = [type(method).__name__, *(f"{name}={value}" for name, value in varied.items() if value != usual[name])]
    words += ["U-Net"] if isinstance(recipe.backbone, UNetConfig) else []
    words += [recipe.parametrization] if recipe.parametrization is not None else []
    words += [f"{name}={value}" for name, value in objective.items() if value != vars(Objective())[name]]
    return f"{' '.join(words)}, seed {recipe.seed}"


@dataclass(frozen=True)
class Result:
    """What was measured: JSON values and arrays by name; `about` has the time, the machine and the commit."""

    values: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = (f"{name} {value:.5g}" for name, value in self.values.items() if isinstance(value, float))
        return ", ".join(shown) or f"{len(self.arrays)} arrays"


@dataclass(frozen=True)
class Store:
    """The folder that all studies share, at one scale, and the time to stop at by the clock of time.monotonic()."""

    folder: Path
    scale: Scale
    deadline: float = math.inf

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def check_time(self, progress: str, needed_s: float = 0.0) -> None:
        """Raise `Preempted` if less time than needed is left; all finished work has been saved."""
        if self.left_s <= needed_s:
            raise Preempted(f"out of time: {progress}. Run the same command to resume.")

    def network(self, recipe: Recipe) -> Path:
        """The run folder of a network."""
        return self.folder / "networks" / network_name(recipe)

    def file(self, job: Job) -> Path:
        """The file that exists if the job is done: the weights, or the record of a measurement."""
        if isinstance(job, Training):
            return self.network(job.network) / "network.safetensors"
        return self.folder / "measurements" / f"{job.name}.json"

    def done(self, job: Job) -> bool:
        return self.file(job).is_file()

    def write(self, job: Job, result: Result) -> None:
        """Write a result, its arrays first: a record that exists is complete."""
        path = self.file(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        if result.arrays:
            with atomic(path.with_suffix(".npz")) as temporary:
                np.savez_compressed(temporary, allow_pickle=False, **result.arrays)
        about_job = {"kind": job.kind, "recipe": to_plain(job.network), **job.settings()}
        found = {"job": about_job, "values": dict(result.values), "arrays": sorted(result.arrays)}
        write_json(path, {**found, "about": dict(result.about)})

    def read(self, job: Job) -> Result:
        """Read a result. Raises a DataError if files are missing, damaged, or belong to another network."""
        path, arrays = self.file(job), {}
        try:
            found = json.loads(path.read_text("utf-8"))
            recipe = from_plain(Recipe, found["job"]["recipe"], "recipe")
            if found["arrays"]:
                with np.load(path.with_suffix(".npz"), allow_pickle=False) as stored:
                    arrays = {name: stored[name] for name in found["arrays"]}
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            raise DataError(
                f"{path} or its .npz is missing or damaged ({error}). Delete both and run the study again."
            ) from error
        check_network(recipe, job.network, path)
        return Result(found["values"], arrays, found["about"])


@functools.cache
def _extractor(metric: MetricName, device: torch.device) -> Extractor:
    return DigitsFeatures(device) if metric == "fd-digits" else Inception(device=device)


def digits_classifier() -> nn.Sequential:
    """Values in [-1, 1] of 8x8 digits to features and logits, with new weights."""
    layers = {
        "conv_1": nn.Conv2d(1, 16, 3, padding=1),
        "silu_1": nn.SiLU(),
        "conv_2": nn.Conv2d(16, 32, 3, padding=1, stride=2),
        "silu_2": nn.SiLU(),
        "flatten": nn.Flatten(),
        "hidden": nn.Linear(32 * 16, DigitsFeatures.dim),
        "silu_3": nn.SiLU(),
        "logits": nn.Linear(DigitsFeatures.dim, 10),
    }
    return nn.Sequential(OrderedDict(layers))


class DigitsFeatures:
    """A `bsi.metrics.Extractor` for digits, which are too small for Inception: 32 activations of a small classifier.

    Its weights are part of the package; docs/benchmarks/digits_features.py trained them. The values of the metric are
    comparable with each other only.
    """

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
