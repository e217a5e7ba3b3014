"""Jobs, and the store that keeps their results.

A job trains a network, or measures it (measure.py). It is a record, and its name is a hash of the record. Results are
files under that name, written atomically:

    FOLDER/networks/HASH/network.safetensors     the moving average, next to the run's journal
    FOLDER/measurements/KIND-HASH.json           the job, the values, and how they were measured
    FOLDER/measurements/KIND-HASH.npz            arrays, if there are any
    FOLDER/NAME-SCALE/                           a finished study: figure.png and numbers.json
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
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
from bsi.sampler import Sampler
from bsi.studies.scale import DATASETS, DatasetSize, Scale
from bsi.training.resume import SAFE


@dataclass(frozen=True)
class Job(ABC):
    """A measurement of a network, or its training; the result is kept under the job's name."""

    network: Recipe

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()

    @property
    def name(self) -> str:
        return f"{self.kind}-{_hash({'network': network_name(self.network), **self.settings()})}"

    def settings(self) -> dict[str, Any]:
        """All settings except the network, for JSON. No variance is left out, as before there were variances."""
        found = {name: value for name, value in vars(self).items() if name != "network"}
        if found.get("variance") == "none":
            del found["variance"]
        return {name: v.record() if isinstance(v, Sampler) else to_plain(v) for name, v in found.items()}

    @abstractmethod
    def title(self) -> str:
        """The job in a few words."""

    @abstractmethod
    def evaluations(self) -> int:
        """Evaluations of the network by single images; the backward passes of a training count as two."""

    def seconds(self, scale: Scale) -> float:
        """An estimate, from floating-point operations and the speed of the scale's hardware."""
        speed, trains = scale.throughput, isinstance(self, Training)
        backbone, data = self.network.backbone, self.data
        assert backbone is not None
        flops = cost(backbone, data.shape, data.bins).flops / (1.0 if isinstance(backbone, DiTConfig) else speed.unet)
        startup = speed.startup_s if trains else 0.2 * speed.startup_s
        return startup + flops * self.evaluations() / (speed.training if trains else speed.evaluation)

    @property
    def data(self) -> DatasetSize:
        return DATASETS[self.network.data.name]


@dataclass(frozen=True)
class Training(Job):
    """Train a network and keep its moving average."""

    @property
    def name(self) -> str:
        return network_name(self.network)

    def title(self) -> str:
        return f"train {describe(self.network)}: {self.network.steps} steps of {self.network.batch}"

    def evaluations(self) -> int:
        return 3 * self.network.batch * self.network.steps


# Names and words


def network_name(recipe: Recipe) -> str:
    """A hash of the settings that decide the weights.

    Settings at their defaults are left out, so that a setting added in a later version changes no name. If a default
    changes instead, the recipe that is stored with each result shows it (`check_network`).
    """
    return _hash(_changed_settings(recipe, ""))


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
    method, objective = recipe.method, recipe.objective
    words = [type(method).__name__, *_differing(method, type(method)(), "lambda_0", "gamma_0", "clips")]
    words += ["U-Net"] if isinstance(recipe.backbone, UNetConfig) else []
    words += [recipe.parametrization] if recipe.parametrization is not None else []
    words += _differing(objective, Objective(), *vars(objective))
    return f"{' '.join(words)}, seed {recipe.seed}"


def _differing(record: object, default: object, *names: str) -> list[str]:
    values = {name: (getattr(record, name, None), getattr(default, name, None)) for name in names}
    return [f"{name}={value}" for name, (value, usual) in values.items() if value != usual]


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
    """The folder that all studies share, at one scale."""

    folder: Path
    scale: Scale

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
