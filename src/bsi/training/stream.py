"""The batches of a run as a function of the seed and the step: there is no state to save.

Training reads one stream of samples; step s takes the positions s b .. (s + 1) b - 1, where b is the global batch:

    sample            sample_ids(seed, position)
    mirror image      coins(seed, position)
    label hidden      uniforms(seed', position) < p                 if labels are learned
    noise eps         philox(seed, position)
    level             t_i = (i / b + delta(seed, step)) mod 1       stratified over the global batch
    dropout           generator(seed, step, first virtual shard)    seeded when a piece is read

The global batch is divided into virtual shards. A rank takes consecutive shards and computes them in `accumulation`
pieces, or one by one in the audit mode. Everything except dropout is the same for any number of ranks. Dropout is the
same if the pieces are: if ranks x accumulation is unchanged, or in the audit mode.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from bsi.data.batches import BatchSource, ahead, flip
from bsi.levels import low_discrepancy
from bsi.recipe import Recipe
from bsi.rng import derive, sample_ids, seed_words, standard_normal, uniforms
from bsi.runtime.distributed import World


@dataclass(frozen=True)
class Piece:
    """Consecutive virtual shards of one step's global batch, from `shard` on."""

    step: int
    shard: int
    offset: int
    count: int


def shards_of(rank: int, world: int, shards: int) -> range:
    """The virtual shards of a rank: consecutive, and the same number for each rank."""
    each = shards // world
    return range(rank * each, (rank + 1) * each)


def pieces(recipe: Recipe, step: int, rank: int, world: int) -> list[Piece]:
    """The pieces that a rank computes in a step, each in one forward and backward pass."""
    shards = shards_of(rank, world, recipe.shards)
    each = 1 if recipe.audit else len(shards) // recipe.accumulation
    samples = recipe.batch // recipe.shards
    return [Piece(step, s, s * samples, each * samples) for s in range(shards.start, shards.stop, each)]


def piece_ids(recipe: Recipe, n: int, piece: Piece) -> Int64[np.ndarray, " count"]:
    """The samples of a piece, out of n."""
    return sample_ids(recipe.seed, n, piece.step * recipe.batch + piece.offset, piece.count)


def piece_levels(recipe: Recipe, piece: Piece) -> Float[Tensor, " count"]:
    """t for the samples of a piece, stratified over the global batch."""
    delta = derive(recipe.seed, "levels", piece.step) / 2**63
    return low_discrepancy(recipe.batch, delta)[piece.offset : piece.offset + piece.count]


@dataclass(frozen=True)
class Batch:
    """The data, levels and noise of a piece, on the device."""

    data: Tensor
    t: Float[Tensor, " batch"]
    eps: Float[Tensor, "batch *data"]
    cond: Int64[Tensor, " batch"] | None = None
    """Labels; the number of classes stands for a hidden label."""

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.data, self.t, self.eps, self.cond) if tensor is not None]

    def clone(self) -> Batch:
        return Batch(*(tensor.clone() for tensor in self.tensors))

    def copy_(self, other: Batch) -> None:
        """Copy the tensors of another batch of the same shape."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine.copy_(theirs)


class Stream:
    """A rank's batches from step `start` on. The data of the next batches is fetched in the background."""

    def __init__(
        self,
        recipe: Recipe,
        source: BatchSource,
        shape: tuple[int, ...],
        world: World,
        start: int,
        labels: Int64[np.ndarray, " count"] | None = None,
        classes: int = 0,
    ) -> None:
        self.recipe, self.source, self.shape, self.world = recipe, source, shape, world
        self.labels, self._classes = labels, classes
        self._noise_seed = seed_words(derive(recipe.seed, "noise"), world.device)
        ids = (self._ids(piece) for step in range(start, recipe.steps) for piece in self._pieces(step))
        self._data = ahead(source, ids)

    def step(self, step: int) -> Iterator[Batch]:
        """The batches of a step. Steps must be read in order, and each batch computed before the next is read."""
        for piece in self._pieces(step):
            yield self._batch(piece, next(self._data))

    def first(self, step: int) -> Batch:
        """The first batch of a step, without advancing the stream."""
        piece = self._pieces(step)[0]
        return self._batch(piece, self.source.take(self._ids(piece)))

    def close(self) -> None:
        """Stop fetching."""
        if isinstance(self._data, Generator):
            self._data.close()

    def _pieces(self, step: int) -> list[Piece]:
        return pieces(self.recipe, step, self.world.rank, self.world.size)

    def _ids(self, piece: Piece) -> Int64[np.ndarray, " count"]:
        return piece_ids(self.recipe, len(self.source), piece)

    def _batch(self, piece: Piece, data: Tensor) -> Batch:
        """A piece with its levels, noise and labels; also seeds torch's generator, which draws its dropout masks."""
        recipe, device = self.recipe, self.world.device
        start = piece.step * recipe.batch + piece.offset
        if recipe.data.flips:
            data = flip(data, recipe.seed, start)
        t = piece_levels(recipe, piece).to(device, non_blocking=True)
        positions = torch.arange(start, start + piece.count, device=device)
        eps = standard_normal(self._noise_seed, positions, 0, self.shape)
        cond = None
        if self.labels is not None:
            hidden = uniforms(derive(recipe.seed, "unlabelled"), start, piece.count) < recipe.data.unlabeled
            seen = np.where(hidden, self._classes, self.labels[self._ids(piece)])
            cond = torch.from_numpy(seen).to(device, non_blocking=True)
        torch.manual_seed(derive(recipe.seed, "dropout", piece.step, piece.shard))
        return Batch(data, t, eps, cond)
