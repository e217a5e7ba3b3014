"""Kernel inception distance: the squared maximum mean discrepancy of two sets of features.

With the kernel k(x, y) = (x . y / dim + 1)^3, the unbiased estimate over m samples of each set is

    MMD^2 = 1/(m (m - 1)) sum_{i != j} [k(x_i, x_j) + k(y_i, y_j)] - 2/m^2 sum_{i, j} k(x_i, y_j).

Both sets are cut into disjoint blocks of m samples, each block gives one estimate, and the value is their mean. The
blocks are independent, so that their spread over sqrt(blocks) is the standard error of that mean: unlike the usual
overlapping subsets, whose spread says nothing about it. They are drawn at random, from a fixed seed: images often lie
sorted, by class or by folder, and a block of neighbors would be a block of one class. Unbiased, KID may be negative,
and needs fewer samples than FID.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from bsi.errors import DataError, NonFinite


@dataclass(frozen=True)
class Kid:
    """Mean over blocks and its standard error; no error with a single block."""

    value: float
    standard_error: float | None
    blocks: int
    block_size: int


def kernel_distance(a: Float[Tensor, "n dim"], b: Float[Tensor, "m dim"], block_size: int = 1000) -> Kid:
    """KID of two sets of features. Sets smaller than `block_size` make one block of the smaller set's size.

    Samples beyond the last whole block are left out.
    """
    smaller = min(len(a), len(b))
    if smaller < 2 or block_size < 2:
        raise DataError(
            f"KID needs at least 2 samples of each set in a block: got {len(a)}, {len(b)}, block {block_size}."
        )
    size = min(block_size, smaller)
    blocks = smaller // size
    generator = torch.Generator().manual_seed(0)  # each set has an order of its own
    pairs = zip(*(_shuffled(each, generator)[: blocks * size].split(size) for each in (a, b)), strict=True)
    estimates = torch.stack([_mmd2(x.double(), y.double()) for x, y in pairs])
    if not estimates.isfinite().all():
        raise NonFinite("the features hold NaN or infinity, so that no KID exists. Check the extractor's weights.")
    error = estimates.std().item() / blocks**0.5 if blocks > 1 else None
    return Kid(estimates.mean().item(), error, blocks, size)


def _shuffled(x: Float[Tensor, "n dim"], generator: torch.Generator) -> Float[Tensor, "n dim"]:
    return x[torch.randperm(len(x), generator=generator).to(x.device)]


def _mmd2(x: Float64[Tensor, "m dim"], y: Float64[Tensor, "m dim"]) -> Float64[Tensor, ""]:
    m = len(x)
    within = sum((k.sum() - k.trace()) / (m * (m - 1)) for k in (_kernel(x, x), _kernel(y, y)))
    return within - 2 * _kernel(x, y).mean()


def _kernel(x: Float64[Tensor, "m dim"], y: Float64[Tensor, "m dim"]) -> Float64[Tensor, "m m"]:
    return (x @ y.T / x.shape[1] + 1) ** 3
