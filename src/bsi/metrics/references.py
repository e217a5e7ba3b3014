"""Reference statistics: the features of real data, computed once and kept beside the data.

A set of features belongs to the data (a hash of its content, and the split) and to the extractor (a hash of its
weights, its resize, its precision). All of these are in the key, so that a changed dataset or network is a miss and
never a wrong value.

    references/cifar10-test-0f3a....safetensors      mean, scatter, and the vectors when they were asked for
    references/cifar10-test-0f3a....json             the key, the count and the SHA-256 of the file above

Each file is written beside and renamed, the JSON last; tensors that do not hash to what it says are computed again.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from bsi.errors import DataError
from bsi.io import data_folder, write_bytes
from bsi.metrics.extractor import Extractor, QualityWarning
from bsi.metrics.features import Features, collect
from bsi.metrics.frechet import Moments

FORMAT = 1


@dataclass(frozen=True)
class Key:
    """All that the statistics depend on."""

    dataset: str
    version: str
    split: str
    extractor: str
    extractor_hash: str
    resize: str
    precision: str

    @property
    def stem(self) -> str:
        """The files' name: readable, and unique through a hash of the whole key."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        readable = re.sub(r"[^A-Za-z0-9]+", "-", f"{self.dataset}-{self.split}").strip("-")
        return f"{readable}-{digest[:16]}"


@dataclass(frozen=True)
class Reference:
    """What samples are compared with; a folder or a file has neither split nor version."""

    dataset: str
    split: str | None
    version: str | None
    features: Features


def reference(
    dataset: str,
    version: str,
    split: str,
    images: Iterable[Tensor],
    extractor: Extractor,
    keep: bool = False,
    folder: Path | None = None,
) -> Reference:
    """The features of a dataset's split, from `folder` (by default the data cache) or else computed and stored there.

    `images` are read on a miss only. `keep` asks for the vectors too, as `collect` does. In a distributed run call this
    on one rank: the others need no reference.
    """
    key = Key(dataset, version, split, extractor.name, extractor.hash, extractor.resize, extractor.precision)
    folder = folder or data_folder() / "references"
    features = load_reference(key, folder, extractor)
    if features is None or (keep and features.vectors is None):
        features = collect(images, extractor, keep)
        if features.n < 2:
            raise DataError(f"a reference needs at least 2 images: {dataset} {split} gave {features.n}.")
        try:
            store_reference(key, features, folder)
        except OSError as error:
            warnings.warn(f"the reference of {dataset} {split} is not stored: {error}", QualityWarning, stacklevel=2)
    return Reference(dataset, split, version, features if keep else Features(features.moments))


def load_reference(key: Key, folder: Path, extractor: Extractor) -> Features | None:
    """The stored features, on the extractor's device; None when there are none or when they are damaged."""
    described, tensors = folder / f"{key.stem}.json", folder / f"{key.stem}.safetensors"
    if not described.exists():
        return None
    try:
        record = json.loads(described.read_text())
        data = tensors.read_bytes()
        found = hashlib.sha256(data).hexdigest()
        if record["format"] != FORMAT or record["key"] != asdict(key) or record["sha256"] != found:
            raise ValueError(f"{tensors} does not hold what {described.name} says")
        stored = {name: tensor.to(extractor.device) for name, tensor in load(data).items()}
        return Features(Moments(record["n"], stored["mean"], stored["scatter"]), stored.get("vectors"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"a damaged reference is computed again: {error}", QualityWarning, stacklevel=3)
        return None


def store_reference(key: Key, features: Features, folder: Path) -> None:
    """Write the tensors, then the JSON that vouches for them."""
    tensors = {"mean": features.moments.mean, "scatter": features.moments.scatter}
    if features.vectors is not None:
        tensors["vectors"] = features.vectors
    data = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
    record = {"format": FORMAT, "key": asdict(key), "n": features.n, "sha256": hashlib.sha256(data).hexdigest()}
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / f"{key.stem}.safetensors", data)
    write_bytes(folder / f"{key.stem}.json", (json.dumps(record, indent=2) + "\n").encode())
