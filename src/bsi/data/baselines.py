"""Baselines to compare a bound with, in the units of the bound: what simple models and file formats reach.

| data | baselines |
|---|---|
| 8-bit images | a histogram of each pixel with the frequencies in the training images; PNG and lossless WebP |
| series of bins, such as sound | linear prediction with Rice codes, as in FLAC, for each sample of the data; LZMA |
| text | n-grams (n = 1 and 6) with Kneser-Ney smoothing; LZMA (xz), given the training text |
| other symbols | a histogram of each element |
| continuous | Gaussians fitted to the training samples, with a diagonal and with a full covariance |

Images are stacked into tall pictures and series into one file, so that headers do not dominate the size.
"""

from __future__ import annotations

import io
import lzma
import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Integer, Shaped
from PIL import Image

from bsi.rng import subset
from bsi.values import Bins, DataKind, Latents, Standardize, unit_of_bounds

MOST_TRAIN, MOST_TEST = 20_000, 2048  # larger sets are subsampled, which changes the results in the third digit
TALLEST = 16_000  # rows of one picture: WebP allows at most 16383
WIDEST = 1024  # dimensions of a full covariance
MOST_VALUES = 1 << 21  # of series that are coded: a few seconds
ORDERS = (2, 4, 8, 12)  # of linear prediction
WEIGHT_BITS = 15  # of a weight of linear prediction
LONGEST, DISCOUNT = 6, 0.75  # n-grams


def baselines(
    train: Shaped[np.ndarray, "train *data"], test: Shaped[np.ndarray, "test *data"], kind: DataKind
) -> dict[str, float]:
    """Bits per dimension of the test samples by each baseline; empty for data that has none."""
    if not len(train) or not len(test) or isinstance(kind, Latents):
        return {}
    train, test = train[subset(len(train), MOST_TRAIN)], test[subset(len(test), MOST_TEST)]
    if isinstance(kind, Standardize):
        return _gaussians(train, test)
    if not isinstance(kind, Bins):
        if test.ndim != 2 or kind.count**LONGEST > 2**62:
            return {"histogram": _histogram(train, test, kind.count)}
        known = train.tobytes()
        xz = len(lzma.compress(known + test.tobytes())) - len(lzma.compress(known))
        grams = {f"{n}-grams": _ngrams(train, test, kind.count, n) for n in (1, LONGEST)}
        return {**grams, "LZMA": 8 * xz / test.size}
    if kind.count <= 256 and test.ndim == 4 and test.shape[1] in (1, 3):
        return {
            "histogram": _histogram(train, test, kind.count),
            "PNG": _stacked(test, "PNG", optimize=True),
            "WebP": _stacked(test, "WEBP", lossless=True),
        }
    if test.ndim == 3 and kind.count <= 1 << 16:
        series = test[: max(1, MOST_VALUES // test[0].size)].astype(np.int64)
        raw = series.astype("<u2" if kind.count > 256 else "u1").tobytes()
        return {"linear prediction": _linear_prediction(series), "LZMA": 8 * len(lzma.compress(raw)) / series.size}
    return {}


def baselines_text(found: Mapping[str, float], binned: bool = True, element: str = "dim") -> str:
    """`histogram 2.44, PNG 3.02, WebP 2.31 bits/dim`, for continuous data in nats/dim, or nothing."""
    unit, scale = unit_of_bounds(binned)
    values = ", ".join(f"{key} {scale * bits:.2f}" for key, bits in found.items())
    return f"{values} {unit}/{element}" if found else ""


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


def _ngrams(
    train: Integer[np.ndarray, "train length"], test: Integer[np.ndarray, "test length"], count: int, longest: int
) -> float:
    """Interpolated Kneser-Ney smoothing: each n-gram's frequency, discounted, and the rest from the shorter ones.

    Shorter n-grams are counted by the number of different symbols that precede them in the training text.
    """

    def codes(rows: Integer[np.ndarray, "rows length"], n: int) -> Integer[np.ndarray, " windows"]:
        windows = np.lib.stride_tricks.sliding_window_view(rows.astype(np.int64), n, axis=1)
        return (windows @ count ** np.arange(n - 1, -1, -1, dtype=np.int64)).reshape(-1)

    def looked_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        places = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
        return np.where(keys[places] == wanted, values[places], 0)

    longest = min(longest, test.shape[1])
    tables = [np.unique(codes(train, longest), return_counts=True)]
    for n in range(longest - 1, 0, -1):
        tables.append(np.unique(tables[-1][0] % count**n, return_counts=True))
    p = np.full(test.shape, 1.0 / count)
    for n, (grams, counts) in enumerate(reversed(tables), 1):
        contexts, first = np.unique(grams // count, return_index=True)
        wanted = codes(test, n)
        total = looked_up(contexts, np.add.reduceat(counts, first), wanted // count)
        kinds = looked_up(contexts, np.diff(np.append(first, len(grams))), wanted // count)
        shorter = p[:, n - 1 :].reshape(-1)
        discounted = np.maximum(looked_up(grams, counts, wanted) - DISCOUNT, 0) + DISCOUNT * kinds * shorter
        p[:, n - 1 :] = np.where(total > 0, discounted / np.maximum(total, 1), shorter).reshape(len(test), -1)
    return float(-np.log2(p).mean())


def _linear_prediction(series: Integer[np.ndarray, "samples channels length"]) -> float:
    """Rice codes of the residuals, with the best order for each channel of each sample and its weights in the header.

    Rounded to integers, the values are predicted from those before them; the first ones are stored as they are.
    """
    raw_bits = math.ceil(math.log2(int(series.max()) + 1)) if series.max() > 0 else 1
    bits = 0.0
    for piece in series.reshape(-1, series.shape[-1]).astype(np.float64) - series.mean():
        costs = [float(raw_bits * len(piece))]
        for order in (p for p in ORDERS if 2 * p < len(piece)):
            past = np.lib.stride_tricks.sliding_window_view(piece[:-1], order)
            weights = np.linalg.lstsq(past, piece[order:], rcond=None)[0]
            weights = np.round(weights * 2 ** (WEIGHT_BITS - 2)) / 2 ** (WEIGHT_BITS - 2)
            residual = np.rint(piece[order:] - past @ weights).astype(np.int64)
            folded = np.where(residual >= 0, 2 * residual, -2 * residual - 1)
            coded = min(float(((folded >> k) + 1 + k).sum()) for k in range(17))
            costs.append(coded + (raw_bits + WEIGHT_BITS) * order)
        bits += min(costs) + 8
    return bits / series.size


def _gaussians(train: Shaped[np.ndarray, "train *data"], test: Shaped[np.ndarray, "test *data"]) -> dict[str, float]:
    """Both in the units of the data. A covariance that cannot be inverted has no density and is left out."""
    train, test = (rows.reshape(len(rows), -1).astype(np.float64) for rows in (train, test))
    mean, std = train.mean(axis=0), train.std(axis=0)
    if not (std > 0).all() or len(train) < 2:
        return {}
    train, test, units = (train - mean) / std, (test - mean) / std, float(np.log2(std).mean())
    found = {"diagonal Gaussian": units + _gaussian(np.eye(len(std)), test)}
    if len(std) <= WIDEST and len(train) > 2 * len(std):
        covariance = train.T @ train / len(train)
        if np.linalg.eigvalsh(covariance)[0] > 1e-9:
            found["full Gaussian"] = units + _gaussian(covariance, test)
    return found


def _gaussian(covariance: Float[np.ndarray, "n n"], test: Float[np.ndarray, "test n"]) -> float:
    z = np.linalg.solve(np.linalg.cholesky(covariance), test.T)
    nats = ((z**2).sum(axis=0).mean() + np.linalg.slogdet(2 * np.pi * covariance)[1]) / 2
    return float(nats) / (test.shape[1] * math.log(2))
