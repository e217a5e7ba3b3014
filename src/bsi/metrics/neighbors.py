"""Improved precision and recall (Kynkaanniemi et al.): how much of each set lies on the other's manifold.

The manifold of a set is the union of balls around its samples, each reaching to its k-th nearest neighbor in the set.
Precision is the part of the generated samples on the real manifold: do the samples look real? Recall is the part of the
real ones on the generated manifold: is everything real generated? Both grow with the number of samples; compare equal
n.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from bsi.errors import DataError, NonFinite

ROWS, COLUMNS = 1024, 8192
"""Distances are held in tiles of this size, 64 MiB in float64, whatever the number of samples."""


@dataclass(frozen=True)
class PrecisionRecall:
    precision: float
    recall: float
    k: int


def precision_recall(samples: Float[Tensor, "n dim"], real: Float[Tensor, "m dim"], k: int = 3) -> PrecisionRecall:
    """Precision and recall of `samples` against `real`, both as features."""
    if k < 1 or min(len(samples), len(real)) <= k:
        raise DataError(
            f"precision and recall with k = {k} need more than k samples: got {len(samples)} and {len(real)}."
        )
    if not (samples.isfinite().all() and real.isfinite().all()):
        raise NonFinite("the features hold NaN or infinity: precision and recall do not exist. Check the extractor.")
    # Distances come from squared norms and a product: float64, and a mean near zero, keep their difference sharp.
    center = real.double().mean(0)
    samples, real = samples.double() - center, real.double() - center
    precision = _inside(samples, real, _radii(real, k)).double().mean().item()
    recall = _inside(real, samples, _radii(samples, k)).double().mean().item()
    return PrecisionRecall(precision, recall, k)


def _radii(x: Float64[Tensor, "n dim"], k: int) -> Float64[Tensor, " n"]:
    """Squared distance of each sample to its k-th nearest neighbor."""
    radii = []
    for rows in x.split(ROWS):
        nearest = rows.new_full((len(rows), k + 1), torch.inf)  # one more than k: the sample itself is among them
        for columns in x.split(COLUMNS):
            nearest = torch.cat([nearest, _squared(rows, columns)], 1).topk(k + 1, largest=False).values
        radii.append(nearest[:, -1])
    return torch.cat(radii)


def _inside(x: Float64[Tensor, "n dim"], centers: Float64[Tensor, "m dim"], radii: Float64[Tensor, " m"]) -> Tensor:
    """Whether each x lies in any of the balls."""
    parts = []
    for rows in x.split(ROWS):
        found = torch.zeros(len(rows), dtype=torch.bool, device=x.device)
        for columns, reach in zip(centers.split(COLUMNS), radii.split(COLUMNS), strict=True):
            found |= (_squared(rows, columns) <= reach).any(1)
        parts.append(found)
    return torch.cat(parts)


def _squared(x: Float64[Tensor, "n dim"], y: Float64[Tensor, "m dim"]) -> Float64[Tensor, "n m"]:
    return (x.square().sum(1, keepdim=True) + y.square().sum(1) - 2 * x @ y.T).clamp(min=0)
