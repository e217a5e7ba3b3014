"""How gradients are summed over ranks.

In the audit mode the sum has the same bits for any number of ranks. Floating-point sums depend on their order. So each
virtual shard is computed separately, with its own dropout, and the gradients are added in a binary tree over shard
numbers: ((g_0 + g_1) + (g_2 + g_3)) + ... A rank holds a power of two of consecutive shards, which is a subtree; the
ranks exchange the sums of their subtrees and all add the rest of the tree in the same order. Everything is computed in
float32 on one thread, with deterministic kernels and no compiler.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bsi.recipe import Recipe

Vector = Float[Tensor, " n"]


class TreeSum:
    """Adds vectors like a binary counter: sums of equal height are merged at once, so that few are kept in memory."""

    def __init__(self) -> None:
        self._heights: dict[int, Vector] = {}

    def add(self, vector: Vector) -> None:
        height = 0
        while height in self._heights:
            vector = self._heights.pop(height) + vector
            height += 1
        self._heights[height] = vector

    def total(self) -> Vector:
        (only,) = self._heights.values()  # the number of added vectors is a power of two
        return only


def flatten_gradients(parameters: Sequence[nn.Parameter], losses: Float[Tensor, " terms"]) -> Vector:
    """All gradients and the losses as one vector. Clears the gradients."""
    parts = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters]
    for p in parameters:
        p.grad = None
    return torch.cat([*parts, losses])


def set_gradients(parameters: Sequence[nn.Parameter], vector: Vector) -> Float[Tensor, " terms"]:
    """The inverse of `flatten_gradients`: set the gradients from a vector, and return the losses."""
    sizes = [p.numel() for p in parameters]
    *parts, losses = vector.split([*sizes, len(vector) - sum(sizes)])
    for p, part in zip(parameters, parts, strict=True):
        p.grad = part.view_as(p)
    return losses


@contextmanager
def numerics(recipe: Recipe) -> Iterator[None]:
    """Set the recipe's number of threads; in the audit mode, one thread and deterministic kernels. Restored on exit."""
    threads, before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    wanted = 1 if recipe.audit else recipe.threads
    if wanted is not None:
        torch.set_num_threads(wanted)
    if recipe.audit:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires it
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.set_num_threads(threads)
