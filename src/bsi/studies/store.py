"""Where a study's networks and measurements are: files that are whole or not there, named by what they hold.

FOLDER/
  networks/HASH/network.safetensors     the moving average, as `bsi export` writes it; beside it the run's journal
  measurements/KIND-HASH.json           what was measured, the values, when, where and by which commit
  measurements/KIND-HASH.npz            arrays, if there are any
  NAME-SCALE/                           a finished study: figure.png, figure.svg, numbers.json, numbers.csv
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from bsi.errors import DataError
from bsi.io import atomic, write_json
from bsi.recipe import Recipe
from bsi.runtime.serialization import from_plain, to_plain
from bsi.studies.job import Job, Measure, Train, name_of, network_name, same_network, settings

__all__ = ["Result", "Store"]

Values = Mapping[str, Any]
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Result:
    """Numbers by name, for JSON, and arrays by name."""

    values: Values
    arrays: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class Store:
    """The folder of all studies."""

    folder: Path

    def network(self, recipe: Recipe) -> Path:
        """The run folder of a network."""
        return self.folder / "networks" / network_name(recipe)

    def weights(self, recipe: Recipe) -> Path:
        """The file that a finished network is."""
        return self.network(recipe) / "network.safetensors"

    def record(self, job: Measure) -> Path:
        return self.folder / "measurements" / f"{name_of(job)}.json"

    def results(self, study: str, scale: str) -> Path:
        return self.folder / f"{study}-{scale}"

    def done(self, job: Job) -> bool:
        return (self.weights(job.network) if isinstance(job, Train) else self.record(job)).is_file()

    def write(self, job: Measure, result: Result, about: Values) -> None:
        """Arrays first: the record vouches for them."""
        path = self.record(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        if result.arrays:
            with atomic(path.with_suffix(".npz")) as temporary:
                np.savez_compressed(temporary, allow_pickle=False, **result.arrays)
        kind = type(job).__name__.lower()
        what = {"kind": kind, "network": network_name(job.network), "recipe": to_plain(job.network), **settings(job)}
        names = sorted(result.arrays)
        write_json(path, {"job": what, "values": dict(result.values), "arrays": names, "about": dict(about)})

    def read(self, job: Measure) -> Result:
        """What was measured. Refuses a record of another network, as a changed default would leave it behind."""
        path, arrays = self.record(job), self.record(job).with_suffix(".npz")
        try:
            record = json.loads(path.read_text("utf-8"))
            values, recipe = record["values"], from_plain(Recipe, record["job"]["recipe"], "recipe")
            # records of before did not say whether there are arrays
            found = _load(arrays) if record.get("arrays") or arrays.is_file() else {}
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            raise DataError(
                f"{path} or its .npz is missing or damaged ({error}): delete both and run the study again"
            ) from error
        if not same_network(recipe, job.network):
            raise DataError(f"{path} was measured of another network, with other defaults: delete it and run again")
        return Result(values, found)

    def about(self, job: Measure) -> Values:
        """When, where and by which commit something was measured."""
        return dict(json.loads(self.record(job).read_text("utf-8"))["about"])


def _load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}
