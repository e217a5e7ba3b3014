"""The embedded dataset: 1797 handwritten digits of 8 x 8 pixels with 17 gray levels (digits.npz, digits.txt).

The split is fixed: image i of the published order is a test image if i % 6 == 5, which gives 1498 training and 299 test
images. The published order is sorted by writer, so both splits contain all thirteen writers.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import ClassVar

import numpy as np

from bsi.data.npy import header_bytes
from bsi.data.prepare import Block, Plan
from bsi.data.store import Dataset, FileRecord, Labels, Manifest
from bsi.io import digest
from bsi.values import Bins

__all__ = ["EmbeddedDigits", "embedded_digits"]


def embedded_digits() -> Dataset:
    """The digits, read from the package."""
    with (resources.files("bsi.data") / "digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    is_test = np.arange(len(images)) % 6 == 5
    stored = {
        "train.npy": images[~is_test],
        "test.npy": images[is_test],
        "train_labels.npy": labels[~is_test],
        "test_labels.npy": labels[is_test],
    }
    # The records of the files that a prepared copy would have, so that both have the same version.
    contents = {name: header_bytes(array.dtype, array.shape) + array.tobytes() for name, array in stored.items()}
    manifest = Manifest(
        name="digits",
        source="Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI, CC BY 4.0, by way of "
        "scikit-learn",
        counts={"train": len(stored["train.npy"]), "test": len(stored["test.npy"])},
        shape=(1, 8, 8),
        dtype="uint8",
        bins=Bins(-1.0, 1.0, 17),
        standardize=None,
        files={name: FileRecord(len(data), digest([data])) for name, data in contents.items()},
        options={"split": "image i is for testing if i % 6 == 5"},
        input="embedded",
    )
    known = Labels(stored["train_labels.npy"], stored["test_labels.npy"])
    return Dataset(manifest, stored["train.npy"], stored["test.npy"], known)


@dataclass(frozen=True)
class EmbeddedDigits:
    """The digits as a source, for a prepared copy in a folder."""

    summary: ClassVar[str] = "1797 handwritten digits of 8 x 8 pixels, inside the package: always there"

    def plan(self) -> Plan:
        dataset = embedded_digits()
        manifest, labels = dataset.manifest, dataset.labels
        assert labels is not None
        total = len(dataset.train) + len(dataset.test)
        rows = {"train": dataset.train, "test": dataset.test}
        block = Block(total, rows, {"train": labels.train, "test": labels.test})
        return Plan(
            name=manifest.name,
            source=manifest.source,
            shape=manifest.shape,
            bins=manifest.bins,
            options=manifest.options,
            input=manifest.input,
            total=total,
            unit="image",
            blocks=lambda start: iter([block] if start == 0 else []),
            label_dtype=np.dtype("uint8"),
        )
