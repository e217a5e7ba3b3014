"""Metrics that need the features themselves: the kernel inception distance, and precision and recall.

**KID** (Binkowski et al., 2018) is the squared maximum mean discrepancy of two sets of features. With the kernel
k(x, y) = (x . y / dim + 1)^3, the unbiased estimate over m samples of each set is

    MMD^2 = 1/(m (m - 1)) sum_{i != j} [k(x_i, x_j) + k(y_i, y_j)] - 2/m^2 sum_{i, j} k(x_i, y_j).

Both sets are cut into disjoint blocks of m samples, and the value is the mean of their estimates. The blocks are
independent, so their spread over sqrt(blocks) is its standard error; that of the usual overlapping subsets is not. They
are drawn at random with a fixed seed: images are often sorted by class, and a block of neighbors would be a block of
one class. KID is unbiased, may be negative, and needs fewer samples than FID.

**Precision and recall** (Kynkaanniemi et al., 2019) measure how much of each set is on the other's manifold: the union
of balls around its samples, each with the distance to its k-th nearest neighbor as radius. Precision is the part of the
generated samples on the real manifold (do the samples look real?), recall the part of the real ones on the generated
manifold (is everything real generated?). Both grow with the number of samples: compare equal numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from bsi.errors import DataError, NonFinite

TILE = 1 << 23  # distances that are computed at a time: 64 MiB in float64


@dataclass(frozen=True)
class Kid:
    """Mean over blocks and its standard error; no error with a single block."""

    value: float
    standard_error: float | None
    blocks: int
    block_size: int


def kernel_distance(a: Float[Tensor, "n dim"], b: Float[Tensor, "m dim"], block_size: int = 1000) -> Kid:
    """KID of two sets of features. Sets smaller than `block_size` make one block of the smaller set's size.

    Samples after the last complete block are not used.
    """
    smaller = min(len(a), len(b))
    if smaller < 2 or block_size < 2:
        raise DataError(f"KID needs at least 2 samples of each set, got {len(a)}, {len(b)}, block {block_size}.")
    size = min(block_size, smaller)
    blocks = smaller // size
    generator = torch.Generator().manual_seed(0)  # each set has its own order
    orders = (torch.randperm(len(each), generator=generator)[: blocks * size].to(each.device) for each in (a, b))
    x, y = (each[order].double().split(size) for each, order in zip((a, b), orders, strict=True))
    estimates = torch.stack([_mmd2(*pair) for pair in zip(x, y, strict=True)])
    if not estimates.isfinite().all():
        raise NonFinite("the features hold NaN or infinity. Check the extractor's weights.")
    error = estimates.std().item() / blocks**0.5 if blocks > 1 else None
    return Kid(estimates.mean().item(), error, blocks, size)


def _mmd2(x: Float64[Tensor, "m dim"], y: Float64[Tensor, "m dim"]) -> Float64[Tensor, ""]:
    m = len(x)
    within = sum((k.sum() - k.trace()) / (m * (m - 1)) for k in (_kernel(x, x), _kernel(y, y)))
    return within - 2 * _kernel(x, y).mean()


def _kernel(x: Float64[Tensor, "m dim"], y: Float64[Tensor, "m dim"]) -> Float64[Tensor, "m m"]:
    return (x @ y.T / x.shape[1] + 1) ** 3


@dataclass(frozen=True)
class PrecisionRecall:
    precision: float
    recall: float
    k: int


def precision_recall(samples: Float[Tensor, "n dim"], real: Float[Tensor, "m dim"], k: int = 3) -> PrecisionRecall:
    """Precision and recall of `samples` against `real`, both as features."""
    if k < 1 or min(len(samples), len(real)) <= k:
        found = f"{len(samples)} and {len(real)}"
        raise DataError(f"precision and recall with k = {k} need more than k samples, got {found}.")
    if not (samples.isfinite().all() and real.isfinite().all()):
        raise NonFinite("the features hold NaN or infinity. Check the extractor's weights.")
    # Distances are differences of squared norms and a product: float64 and a mean near zero keep their digits.
    center = real.double().mean(0)
    samples, real = samples.double() - center, real.double() - center
    precision = _inside(samples, real, _radii(real, k)).double().mean().item()
    recall = _inside(real, samples, _radii(samples, k)).double().mean().item()
    return PrecisionRecall(precision, recall, k)


def _radii(x: Float64[Tensor, "n dim"], k: int) -> Float64[Tensor, " n"]:
    """Squared distance of each sample to its k-th nearest neighbor."""
    # One more than k: the sample itself is among them.
    nearest = (each.topk(k + 1, largest=False).values[:, -1] for each in _distances(x, x))
    return torch.cat(list(nearest))


def _inside(
    x: Float64[Tensor, "n dim"], centers: Float64[Tensor, "m dim"], radii: Float64[Tensor, " m"]
) -> Bool[Tensor, " n"]:
    """Whether each x is in any of the balls."""
    return torch.cat([(each <= radii).any(1) for each in _distances(x, centers)])


def _distances(x: Float64[Tensor, "n dim"], y: Float64[Tensor, "m dim"]) -> Iterator[Float64[Tensor, "rows m"]]:
    """The squared distances of some rows of x at a time to all of y."""
    for rows in x.split(max(1, TILE // len(y))):
        yield (rows.square().sum(1, keepdim=True) + y.square().sum(1) - 2 * rows @ y.T).clamp(min=0)
