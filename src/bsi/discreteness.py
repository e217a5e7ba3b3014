"""Continuous data that is discrete: repeated or rounded values, which have no density.

A model can put its density on such values alone, so that its bound in nats falls without limit as the last precision
grows. Rounding is harmless if its steps are below the noise of the last level.
"""

from __future__ import annotations

import math
import warnings

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from bsi.gaussian import Data

SEARCHED, SEARCHED_VALUES = 4096, 1 << 22  # rows and values that are searched for repetitions
ROUNDED_ROWS, FEWEST_ROUNDED = 64, 32  # and for rounded values, and the fewest that are not multiples by chance
NAMED = 3  # columns in the message
BY_CHANCE = 4  # pairs of equal values that are no sign of discrete data


def warn_discrete(data: Data, noise: Float64[Tensor, "..."]) -> None:
    """Warn if values are repeated or rounded, in one column of a table or anywhere in other data: it has no density.

    Rounding to steps below the noise of the last level makes no difference.
    """
    columns = data if data.ndim == 2 else data.reshape(-1, 1)
    some, noise = searched(columns, columns.shape[1]), noise.expand(columns.shape[1])
    share, repeated = _repeated(some, noise)
    rounded = _step(some[:ROUNDED_ROWS], noise)
    for problem, found in (
        (f"repeated (a share of {float(share.max()):.2g})", repeated),
        (f"multiples of {float(rounded.max()):.3g}, more than the noise of the last level", rounded > 0),
    ):
        if bad := found.nonzero()[:, 0].tolist():
            more = f" and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
            where = f" in column {', '.join(map(str, bad[:NAMED]))}{more}" if data.ndim == 2 else ""
            warnings.warn(
                f"values{where} are {problem}: they have no density, and a bound in nats can fall without limit. "
                f"Add uniform noise as wide as their steps, leave them out, or use bsi.Bins or bsi.Symbols.",
                stacklevel=6,
            )
            return


def searched(rows: Tensor, width: int) -> Tensor:
    """Every n-th of the rows, of which each has `width` values, so that the search takes little time."""
    most = min(SEARCHED, max(1, SEARCHED_VALUES // width))
    return rows[:: -(-len(rows) // most)]


def _repeated(
    columns: Float[Tensor, "rows columns"], noise: Float64[Tensor, " columns"]
) -> tuple[Float64[Tensor, " columns"], Bool[Tensor, " columns"]]:
    """The share of repeated values in each column, and whether it is a sign of discrete data.

    Of a density, and of values rounded to steps below the noise of the last level, more pairs are closer than this
    noise than are equal, in the whole column and around each value.
    """
    x = columns.double().sort(dim=0).values.T.contiguous()

    def between(low: Tensor, high: Tensor) -> Tensor:
        return torch.searchsorted(x, high, right=True) - torch.searchsorted(x, low)

    same, near = between(x, x), between(x - noise[:, None], x + noise[:, None])
    equal, close = (same - 1).sum(1) // 2, (near - same).sum(1) // 2
    one_value = (same - 1 - (near - same) / 2 > BY_CHANCE * same.sqrt()).any(1)
    found = one_value | (equal > close + BY_CHANCE)
    if not bool(found.any()) and int(equal.sum()) > int(close.sum()) + BY_CHANCE:
        found = equal > close  # too few in each column, but not in all together
    return (same > 1).double().mean(1), found


def _step(columns: Float[Tensor, "rows columns"], least: Float64[Tensor, " columns"]) -> Float64[Tensor, " columns"]:
    """The largest power of 10 or 2 above `least` that divides all values of a column; 0 if there is none.

    Powers close to the resolution of the dtype divide everything, and a few values may be multiples by chance.
    """
    x, eps = columns.double(), torch.finfo(columns.dtype).eps
    largest, found = x.abs().amax(0), torch.zeros_like(least)
    least = torch.maximum(least, 8 * eps * largest)
    if len(x) < FEWEST_ROUNDED or not bool((largest > least).any()):
        return found
    for base in (10.0, 2.0):
        first = (largest.log() / math.log(base)).floor().clamp(min=-300)
        for i in range(math.ceil(math.log(float((largest / least).max()), base)) + 1):
            step = base ** (first - i)
            multiple = x / step
            divides = ((multiple - multiple.round()).abs() <= eps * multiple.abs()).all(0) & (step > least)
            found = torch.where(divides, torch.maximum(found, step), found)
    return found
