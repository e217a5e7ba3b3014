"""What a step sees, as a function of the seed and the count: nothing here has a state that could be lost.

Training sees one stream of samples; step s takes its positions s b .. (s + 1) b - 1, b the global batch. From the seed
and a position or a step follow

    the sample        sample_ids(seed, position)                    which image
    its mirror coin   coins(seed, position)                         whether it is flipped
    its label's       uniforms(seed', position) < p                 whether it is seen without, where labels are learned
    its noise         philox(seed, position)                        eps
    its level         t_i = (i / b + delta(seed, step)) mod 1       stratified over the global batch
    dropout           generator(seed, step, first virtual shard)    reset before each piece is computed

The global batch is cut into virtual shards, a rank takes whole ones, and computes them in `accumulation` pieces (in the
audit mode, one by one). Everything but dropout is the same for any number of ranks; dropout is too wherever the pieces
are the same: ranks x accumulation unchanged, or the audit mode.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from bsi.data.batches import BatchSource, ahead, flip
from bsi.data.order import shards_of
from bsi.levels import low_discrepancy
from bsi.recipe import Recipe
from bsi.rng import derive, sample_ids, seed_words, standard_normal, uniforms
from bsi.runtime.distributed import World

__all__ = ["Batch", "Piece", "Stream", "piece_ids", "piece_levels", "pieces"]


@dataclass(frozen=True)
class Piece:
    """Consecutive samples of one step's global batch: whole virtual shards, from `shard` on."""

    step: int
    shard: int
    offset: int
    count: int


def pieces(recipe: Recipe, step: int, rank: int, world: int) -> list[Piece]:
    """What a rank computes in a step, one forward and backward pass for each."""
    shards = shards_of(rank, world, recipe.virtual_shards)
    each = 1 if recipe.audit else len(shards) // recipe.accumulation
    samples = recipe.batch // recipe.virtual_shards
    return [Piece(step, s, s * samples, each * samples) for s in range(shards.start, shards.stop, each)]


def piece_ids(recipe: Recipe, n: int, piece: Piece) -> Int64[np.ndarray, " count"]:
    """Which of the n samples a piece holds."""
    return sample_ids(recipe.seed, n, piece.step * recipe.batch + piece.offset, piece.count)


def piece_levels(recipe: Recipe, piece: Piece) -> Float[Tensor, " count"]:
    """t for a piece's samples: their part of the strata over the global batch."""
    delta = derive(recipe.seed, "levels", piece.step) / 2**63
    return low_discrepancy(recipe.batch, delta)[piece.offset : piece.offset + piece.count]


@dataclass(frozen=True)
class Batch:
    """A piece with its data, levels and noise on the device."""

    piece: Piece
    data: Tensor
    t: Float[Tensor, " batch"]
    eps: Float[Tensor, "batch *data"]
    cond: Int64[Tensor, " batch"] | None
    """Labels; the number of classes stands for none."""

    def clone(self) -> Batch:
        """The same in memory of its own."""
        cond = None if self.cond is None else self.cond.clone()
        return Batch(self.piece, self.data.clone(), self.t.clone(), self.eps.clone(), cond)

    def copy_(self, other: Batch) -> None:
        """Take another batch's tensors in, of the same shapes."""
        self.data.copy_(other.data)
        self.t.copy_(other.t)
        self.eps.copy_(other.eps)
        if self.cond is not None and other.cond is not None:
            self.cond.copy_(other.cond)

    def seed_dropout(self, seed: int) -> None:
        """What the network draws from torch's generator becomes a function of the seed and the piece."""
        torch.manual_seed(derive(seed, "dropout", self.piece.step, self.piece.shard))


class Stream:
    """A rank's batches from a step on, in order; the data of the next ones is fetched while one is computed."""

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
        """The batches of a step. Steps are asked for one after the other."""
        for piece in self._pieces(step):
            yield self._batch(piece, next(self._data))

    def first(self, step: int) -> Batch:
        """The first batch of a step, out of turn."""
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
        device, start = self.world.device, piece.step * self.recipe.batch + piece.offset
        if self.recipe.data.flips:
            data = flip(data, self.recipe.seed, start)
        positions = torch.arange(start, start + piece.count, device=device)
        eps = standard_normal(self._noise_seed, positions, 0, self.shape)
        t = piece_levels(self.recipe, piece).to(device, non_blocking=True)
        return Batch(piece, data, t, eps, self._condition(piece, start))

    def _condition(self, piece: Piece, start: int) -> Int64[Tensor, " batch"] | None:
        if self.labels is None:
            return None
        chance = uniforms(derive(self.recipe.seed, "unlabelled"), start, piece.count)
        seen = np.where(chance < self.recipe.data.unlabeled, self._classes, self.labels[self._ids(piece)])
        return torch.from_numpy(seen).to(self.world.device, non_blocking=True)
