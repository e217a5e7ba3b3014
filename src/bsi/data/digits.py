"""The embedded dataset: 1797 handwritten digits of 8 x 8 pixels with 17 gray levels, inside the package (digits.npz,
digits.txt).

The split is fixed: image i of the published order is a test image if i % 6 == 5, which gives 1498 training and 299 test
images. The published order runs writer by writer, so both parts hold all thirteen writers.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import ClassVar

import numpy as np
from jaxtyping import UInt8

from bsi.data.plan import Block, Plan
from bsi.values import Bins

__all__ = ["BINS", "OPTIONS", "SOURCE", "Digits", "EmbeddedDigits", "load"]

SOURCE = "Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI, CC BY 4.0, by way of scikit-learn"
BINS = Bins(-1.0, 1.0, 17)
OPTIONS = {"split": "image i is for testing if i % 6 == 5"}


@dataclass(frozen=True)
class Digits:
    """Bin indices 0 .. 16 and labels 0 .. 9 of both parts."""

    train: UInt8[np.ndarray, "1498 1 8 8"]
    test: UInt8[np.ndarray, "299 1 8 8"]
    train_labels: UInt8[np.ndarray, "1498"]
    test_labels: UInt8[np.ndarray, "299"]


def load() -> Digits:
    """The digits, from the package alone."""
    with (resources.files("bsi.data") / "digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    is_test = np.arange(len(images)) % 6 == 5
    return Digits(images[~is_test], images[is_test], labels[~is_test], labels[is_test])


@dataclass(frozen=True)
class EmbeddedDigits:
    """The digits as a source, for a copy of them in a folder."""

    summary: ClassVar[str] = "1797 handwritten digits of 8 x 8 pixels, inside the package: always there"

    def plan(self) -> Plan:
        loaded = load()
        total = len(loaded.train) + len(loaded.test)
        block = Block(
            total,
            {"train": loaded.train, "test": loaded.test},
            {"train": loaded.train_labels, "test": loaded.test_labels},
        )
        return Plan(
            name="digits",
            source=SOURCE,
            shape=(1, 8, 8),
            dtype=np.dtype("uint8"),
            bins=BINS,
            options=OPTIONS,
            input="embedded",
            total=total,
            rows=total,
            unit="image",
            blocks=lambda start: iter([block] if start == 0 else []),
            label_dtype=np.dtype("uint8"),
        )
