"""Baselines to compare a bound with: the bits per dimension of a histogram and of lossless image formats.

- histogram: each pixel independently, with the frequencies in the training images plus one count for each level.
- PNG and WebP: lossless, with the images stacked into tall pictures, so that headers do not dominate the size.
"""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
from jaxtyping import Shaped
from PIL import Image

from bsi.pictures import is_image
from bsi.rng import subset
from bsi.values import Bins

__all__ = ["MOST_TEST", "MOST_TRAIN", "baselines", "baselines_text"]

MOST_TRAIN, MOST_TEST = 20_000, 2048  # larger sets are subsampled, which changes the results in the third digit
TALLEST = 16_000  # rows of one picture: WebP allows at most 16383


def baselines(
    train: Shaped[np.ndarray, "train *data"], test: Shaped[np.ndarray, "test *data"], bins: Bins | None
) -> dict[str, float]:
    """Bits per dimension of the test images by each baseline; empty for data that is not 8-bit images."""
    if bins is None or bins.count > 256 or not is_image(tuple(test.shape[1:])) or not len(train) or not len(test):
        return {}
    train, test = train[subset(len(train), MOST_TRAIN)], test[subset(len(test), MOST_TEST)]
    return {
        "histogram": _histogram(train, test, bins.count),
        "PNG": _stacked(test, "PNG", optimize=True),
        "WebP": _stacked(test, "WEBP", lossless=True),
    }


def baselines_text(found: Mapping[str, float]) -> str:
    """`histogram 2.44, PNG 3.02, WebP 2.31 bits/dim`, or nothing."""
    return ", ".join(f"{name} {bits:.2f}" for name, bits in found.items()) + " bits/dim" if found else ""


def _histogram(train: Shaped[np.ndarray, "train *data"], test: Shaped[np.ndarray, "test *data"], levels: int) -> float:
    pixels = np.arange(test[0].size) * levels
    counts = np.ones(test[0].size * levels)
    for start in range(0, len(train), 1000):
        part = train[start : start + 1000].reshape(-1, test[0].size) + pixels
        counts += np.bincount(part.reshape(-1), minlength=len(counts))
    table = counts.reshape(-1, levels)
    bits = -np.log2(table / table.sum(1, keepdims=True)).reshape(-1)
    return float(bits[test.reshape(len(test), -1) + pixels].mean())


def _stacked(test: Shaped[np.ndarray, "test channels height width"], kind: str, **options: object) -> float:
    each = max(1, TALLEST // test.shape[2])
    size = 0
    for start in range(0, len(test), each):
        images = test[start : start + each].astype(np.uint8).transpose(0, 2, 3, 1)
        tall = images.reshape(-1, *images.shape[2:])
        file = io.BytesIO()
        Image.fromarray(tall[..., 0] if tall.shape[2] == 1 else tall).save(file, kind, **options)
        size += file.tell()
    return 8 * size / test.size
