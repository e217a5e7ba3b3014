"""Jobs, and the store that keeps their results.

    Training         train a network by its recipe
    Bound            bits per dimension of the test set, with L_M^inf or L_M^k
    Reconstruction   L_R for several precisions alpha_R of the decoder
    LevelErrors      errors of the predictions at levels from the first to the last
    Quality          the Fréchet distance of samples to the test set, or to the training set too
    Rate             the rate and the distortion after each step of a chain

A job is a record, and its name is a hash of the record. Results are files under that name, written atomically:

    FOLDER/networks/HASH/network.safetensors     the moving average, next to the run's journal
    FOLDER/measurements/KIND-HASH.json           the job, the values, and how they were measured
    FOLDER/measurements/KIND-HASH.npz            arrays, if there are any
    FOLDER/NAME-SCALE/                           a finished study: figure.png and numbers.json
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from bsi.backbones.config import DiTConfig, UNetConfig, cost
from bsi.errors import DataError
from bsi.io import atomic, canonical_json, write_json
from bsi.recipe import Objective, Recipe
from bsi.runtime.serialization import changes, from_plain, to_plain
from bsi.sampler import Sampler, VarianceKind
from bsi.studies.scale import DATASETS, MetricName, Scale
from bsi.training.resume import SAFE

OURS = Sampler()
OURS_NAME = f"our solver on {OURS.grid} in {OURS.steps}"  # in tables


def paper_sampler(steps: int) -> Sampler:
    return Sampler(steps, "posterior", "paper")


@dataclass(frozen=True)
class Training:
    """Train a network and keep its moving average."""

    network: Recipe


@dataclass(frozen=True)
class Bound:
    """Bits per dimension of the test set: `levels` and `recon` evaluations of each image."""

    network: Recipe
    levels: int
    recon: int
    finite_k: int | None = None
    variance: VarianceKind = "none"


@dataclass(frozen=True)
class Reconstruction:
    """L_R of BSI with alpha_R = factor alpha_M, from the same predictions for every factor."""

    network: Recipe
    factors: tuple[float, ...]
    recon: int


@dataclass(frozen=True)
class LevelErrors:
    """|x - x_hat|^2 and |psi - x_hat| / |psi| of `images` test images at `levels` levels, evenly spaced in t."""

    network: Recipe
    levels: int
    images: int


@dataclass(frozen=True)
class Quality:
    """The Fréchet distance of `num` samples to parts of the dataset. Sample i has the same noise for every network."""

    network: Recipe
    metric: MetricName
    num: int
    sampler: Sampler
    references: tuple[str, ...] = ("test",)
    seed: int = 0


@dataclass(frozen=True)
class Rate:
    """The rate and the distortion after each of the steps of a chain, on average over the test set."""

    network: Recipe
    steps: int
    variance: VarianceKind = "none"


Measure = Bound | Reconstruction | LevelErrors | Quality | Rate
Job = Training | Measure


def bound(scale: Scale, network: Recipe, finite_k: int | None = None) -> Bound:
    """The bound at the scale's settings."""
    return Bound(network, scale.levels, scale.recon, finite_k)


def quality(scale: Scale, network: Recipe, sampler: Sampler = OURS) -> Quality:
    """The Fréchet distance at the scale's settings; by default with the package's default sampler."""
    return Quality(network, scale.metric, scale.samples, sampler.named(network.method), scale.references)


def samplers_of(scale: Scale, *steps: int, ours: Sampler = OURS) -> dict[str, Sampler]:
    """The paper's sampler with these numbers of steps, and ours, by the columns of their distances."""
    return {f"{scale.metric} at {k}": paper_sampler(k) for k in steps} | {f"{scale.metric}, {OURS_NAME}": ours}


def measures_of(scale: Scale, networks: Iterable[Recipe], samplers: Mapping[str, Sampler]) -> list[Measure]:
    """The bound of each network, and the quality of its samples by each sampler."""
    jobs: list[Measure] = []
    for network in networks:
        jobs += [bound(scale, network), *(quality(scale, network, sampler) for sampler in samplers.values())]
    return jobs


# Names


def network_name(recipe: Recipe) -> str:
    """A hash of the settings that decide the weights.

    Settings at their defaults are left out, so that a setting added in a later version changes no name. If a default
    changes instead, the recipe that is stored with each result shows it (`check_network`).
    """
    return _hash(_changed_settings(recipe, ""))


def name_of(job: Job) -> str:
    """The name of a job's result, unique to its settings."""
    network = network_name(job.network)
    if isinstance(job, Training):
        return network
    return f"{type(job).__name__.lower()}-{_hash({'network': network, **_settings(job)})}"


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


def _settings(job: Measure) -> dict[str, Any]:
    found = {f.name: to_plain(getattr(job, f.name)) for f in fields(job) if f.name not in ("network", "sampler")}
    if found.get("variance") == "none":  # the names of results without a variance are those of earlier versions
        del found["variance"]
    return found | ({"sampler": job.sampler.record()} if isinstance(job, Quality) else {})


# Words and times


def describe(recipe: Recipe) -> str:
    """A network in a few words: its method, the settings that studies vary, and its seed."""
    method, objective = recipe.method, recipe.objective
    words = [type(method).__name__, *_differing(method, type(method)(), "lambda_0", "gamma_0", "clips")]
    words += ["U-Net"] if isinstance(recipe.backbone, UNetConfig) else []
    words += [recipe.parametrization] if recipe.parametrization is not None else []
    words += _differing(objective, Objective(), *(f.name for f in fields(objective)))
    return f"{' '.join(words)}, seed {recipe.seed}"


def _differing(record: object, default: object, *names: str) -> list[str]:
    values = {name: (getattr(record, name, None), getattr(default, name, None)) for name in names}
    return [f"{name}={value}" for name, (value, usual) in values.items() if value != usual]


def title(job: Job) -> str:
    """A job in a few words."""
    network = describe(job.network)
    match job:
        case Training(network=recipe):
            return f"train {network}: {recipe.steps} steps of {recipe.batch}"
        case Bound(finite_k=k, levels=levels, variance=kind):
            at = "" if k is None else f" at k={k}"
            return f"bits/dim of {network}{at}: {levels} levels{_with_variance(kind)}"
        case Reconstruction(factors=factors):
            return f"L_R of {network} for {len(factors)} values of alpha_R"
        case LevelErrors(levels=levels, images=images):
            return f"errors of {network}: {images} images at {levels} levels"
        case Quality(metric=metric, num=num, sampler=how):
            drawn = f"{num} samples, {how.steps} steps of {how.solver} on {how.grid}"
            return f"{metric} of {network}: {drawn}{_with_variance(how.variance)}"
        case Rate(steps=steps, variance=kind):
            return f"rate and distortion of {network}: {steps} steps, variance {kind}"


def _with_variance(kind: VarianceKind) -> str:
    return "" if kind == "none" else f", variance {kind}"


def estimate_s(job: Job, scale: Scale) -> float:
    """The estimated seconds of a job, from its floating-point operations and the speed of the scale's hardware."""
    backbone, speed, data = job.network.backbone, scale.throughput, DATASETS[job.network.data.name]
    assert backbone is not None
    flops = cost(backbone, data.shape, data.bins).flops / (1.0 if isinstance(backbone, DiTConfig) else speed.unet)
    match job:
        case Training(network=recipe):
            return speed.startup_s + 3 * flops * recipe.batch * recipe.steps / speed.training
        case Bound(levels=levels, recon=recon):
            evaluations = data.test_images * (levels + recon)
        case Reconstruction(factors=factors, recon=recon):
            evaluations = data.test_images * recon * len(factors)
        case LevelErrors(levels=levels, images=shown):
            evaluations = levels * shown
        case Quality(num=num, sampler=how):
            evaluations = num * (how.steps + 1)
        case Rate(steps=steps):
            evaluations = data.test_images * (steps + 1)
    features = job.num / speed.metric if isinstance(job, Quality) else 0.0
    return 0.2 * speed.startup_s + flops * evaluations / speed.evaluation + features


# Results


@dataclass(frozen=True)
class Result:
    """What was measured: values by name, for JSON, and arrays by name."""

    values: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    """The time, the machine and the commit of the measurement."""

    def __str__(self) -> str:
        shown = (f"{name} {value:.5g}" for name, value in self.values.items() if isinstance(value, float))
        return ", ".join(shown) or f"{len(self.arrays)} arrays"


@dataclass(frozen=True)
class Store:
    """The folder that all studies share."""

    folder: Path

    def network(self, recipe: Recipe) -> Path:
        """The run folder of a network."""
        return self.folder / "networks" / network_name(recipe)

    def weights(self, recipe: Recipe) -> Path:
        """The file of a finished network."""
        return self.network(recipe) / "network.safetensors"

    def record(self, job: Measure) -> Path:
        return self.folder / "measurements" / f"{name_of(job)}.json"

    def done(self, job: Job) -> bool:
        return (self.weights(job.network) if isinstance(job, Training) else self.record(job)).is_file()

    def write(self, job: Measure, result: Result) -> None:
        """Write a result, its arrays first: a record that exists is complete."""
        path = self.record(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        if result.arrays:
            with atomic(path.with_suffix(".npz")) as temporary:
                np.savez_compressed(temporary, allow_pickle=False, **result.arrays)
        settings = {"kind": type(job).__name__.lower(), "recipe": to_plain(job.network), **_settings(job)}
        found = {"job": settings, "values": dict(result.values), "arrays": sorted(result.arrays)}
        write_json(path, {**found, "about": dict(result.about)})

    def read(self, job: Measure) -> Result:
        """Read a result. Raises a DataError if files are missing, damaged, or belong to another network."""
        path, arrays = self.record(job), {}
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
