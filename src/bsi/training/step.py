"""One training step: a batch, its gradients, then an update that happens only if everything is finite.

Training reads one stream of samples, a function of the seed: there is no state to save. Step s takes the positions
s b .. (s + 1) b - 1, where b is the global batch:

    sample            sample_ids(seed, position)
    mirror image      coins(seed, position)
    label hidden      uniforms(seed', position) < p                 if labels are learned
    noise eps         philox(seed, position)
    level             t_i = (i / b + delta(seed, step)) mod 1       stratified over the global batch
    dropout           generator(seed, step, first virtual shard)    seeded when a piece is read

The global batch is divided into virtual shards. A rank takes consecutive shards and computes them in `accumulation`
pieces. Everything is the same for any number of ranks, except for rounding and dropout, which is the same if ranks x
accumulation is.

    loss              (1/b) sum_i 2 L_M(x_i) / n over the global batch, with the weights of the recipe's objective
    gradient          the sum over ranks and pieces by DDP, or by FSDP (sharding.py); in the audit mode a sum over
                      virtual shards in a fixed order
    update            AdamW or Muon (optimizers.py) with the gradient's norm clipped, then the averages of the weights

In the audit mode the gradient has the same bits for any number of ranks: each shard is computed separately, and the
gradients are added in a binary tree, ((g_0 + g_1) + (g_2 + g_3)) + ... A rank holds a power of two of consecutive
shards, which is a subtree.

A step counts as long as all losses and gradient norms have been finite, on all ranks alike, since both are sums over
ranks. The host reads this flag some steps later, so that no step waits for it. A step changes its state in place, and
all values that differ between steps are in tensors: on a single GPU it is recorded once and replayed (replay.py).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import EllipsisType
from typing import cast

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bsi.backbones.layers import Backbone
from bsi.consistency import gap_at
from bsi.data.batches import BatchSource, ahead, flip
from bsi.errors import UsageError
from bsi.levels import low_discrepancy
from bsi.methods.base import Predictor
from bsi.model import Model
from bsi.objective import Loss
from bsi.recipe import Recipe
from bsi.rng import derive, sample_ids, seed_words, standard_normal, uniforms
from bsi.runtime.checkpoint import Peers, Stored
from bsi.runtime.distributed import Watchdog, World
from bsi.runtime.ema import Average, EmaModel, PowerAverages, Profile
from bsi.runtime.export import differences
from bsi.training.optimizers import Optimizers
from bsi.training.replay import Replay, replayable

PerSample = Float[Tensor, " batch"]
Vector = Float[Tensor, " n"]
Rows = slice | EllipsisType

# The loss scale in float16, as in torch.amp.GradScaler: halved if a gradient overflows, doubled after good steps.
FIRST_SCALE, GROWTH_STEPS = 2.0**16, 2000


# ---- The batch -------------------------------------------------------------------------------------------------------


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


# ---- The step --------------------------------------------------------------------------------------------------------


class Engine:
    """A model, its optimizer, its averages and the counters on the device. `step` advances all of them.

    Every rank has the whole network, and DDP sums the gradients of several ranks. sharding.py has the engine of ranks
    that divide a network; `engine_of` chooses.
    """

    sharded = False  # whether ranks hold different parts of the network

    def __init__(
        self, recipe: Recipe, model: Model, world: World, half: torch.dtype | None, record: bool = True
    ) -> None:
        self.recipe, self.model, self.world, self.half = recipe, model, world, half
        self.backbone, self.network = model.denoiser.backbone, cast(nn.Module, model.denoiser)  # a step calls `network`
        self.divisor = world.size  # by which DDP divides the sum of gradients
        self.writes = world.first  # whether this rank writes a part of a checkpoint
        self.divide()
        self.parameters = [part for part in self.parts.values() if part.requires_grad]
        self.powers = PowerAverages(self.parts, recipe.ema.powers)
        loss = recipe.objective
        self.loss = Loss(
            model.method, world.device, loss.weight, loss.bias, loss.expected_levels, loss.finite_k, loss.consistency
        )
        self.steps_done, self.updating = 0, False  # the state is incomplete during an update
        record = record and world.device.type == "cuda" and replayable(recipe, model, world)
        self._replay = Replay(world.device) if record else None
        # Values of the next step, on the device: a recorded step would repeat values passed from the host. The averages
        # have the weight of the new parameters.
        self.this_step = torch.zeros((), dtype=torch.int64, device=world.device)
        self.lr, self.ema_weight, *self.power_weights = torch.zeros(2 + len(recipe.ema.powers), device=world.device)
        # The counters: the first step that was not finite; the loss scale and the good steps since it changed; sums of
        # losses, gradient norms, steps, and losses without their weight.
        self.bad_step = torch.full_like(self.this_step, -1)
        self.scale = torch.full((), FIRST_SCALE if half == torch.float16 else 1.0, device=world.device)
        self.scale_age = torch.zeros_like(self.this_step)
        self.sums = torch.zeros(2 + self.loss.terms, dtype=torch.float64, device=world.device)

    def divide(self) -> None:
        """Set this rank's parts, and the average and the optimizer of the weights."""
        self.parts: dict[str, nn.Parameter] = dict(self.backbone.named_parameters())
        self.ema: Average = EmaModel(self.model)
        self.optimizer = Optimizers(self.backbone, self.recipe.optimizer)

    def begin(self, stream: Stream) -> None:
        """Let DDP sum the gradients, from weights that are the same on all ranks.

        DDP rearranges its buckets after the first backward pass, which with three ranks or more changes the order of
        sums. A first pass without an update fixes it, so that a resumed run has the sums of an uninterrupted one.
        """
        if self.world.size == 1 or self.recipe.audit:
            return
        ids = [self.world.device.index] if self.world.device.type == "cuda" else None
        # Buffers are the same on all ranks; sending them in every forward pass would cost a collective.
        buffers = dict(self.network.named_buffers())
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.network, list(buffers))
        self.network = DistributedDataParallel(self.network, device_ids=ids, gradient_as_bucket_view=True)
        before = [buffer.clone() for buffer in buffers.values()]  # the pass would change running statistics
        self._losses(stream.first(self.steps_done)).sum().backward()
        self.zero_grad()
        for buffer, value in zip(buffers.values(), before, strict=True):
            buffer.copy_(value)

    def close(self) -> None:
        """Release DDP and its reference to the process group.

        If its reducer held the last reference, the destructor would wait under the GIL for gloo's thread, which may
        itself wait for the GIL to release a tensor: a finished run would never exit.
        """
        self.network = self.model.denoiser

    def step(self, stream: Stream, watchdog: Watchdog) -> None:
        """One step. On a GPU it returns before the device has finished."""
        step, ema = self.steps_done, self.recipe.ema
        watchdog.at(step, "data")
        self.this_step.fill_(step)
        self.lr.fill_(self.recipe.rate(step))
        self.ema_weight.fill_(ema.weight(step + 1))
        for weight, width in zip(self.power_weights, ema.powers, strict=True):
            weight.fill_(1 - Profile(step + 1, width).beta)
        if self.recipe.objective.consistency:
            self.loss.gap.fill_(gap_at(step / self.recipe.steps))
        batches = self._watched(stream.step(step), watchdog)
        if self._replay is not None:
            self._replay(lambda tensors: self._train([Batch(*tensors)]), next(batches).tensors)
        else:
            self._train(batches)
        self.steps_done += 1

    def _watched(self, batches: Iterator[Batch], watchdog: Watchdog) -> Iterator[Batch]:
        for batch in batches:
            watchdog.at(self.steps_done, "compute")
            yield batch
        watchdog.at(self.steps_done, "update")

    def _train(self, batches: Iterable[Batch]) -> None:
        """The gradients of the batches and the update, from values on the device alone."""
        self.zero_grad()
        self._update(self._audited(batches) if self.recipe.audit else self._summed(batches))

    def _summed(self, batches: Iterable[Batch]) -> Float[Tensor, " terms"]:
        """Sum gradients over pieces and ranks; returns the loss of the global batch."""
        total = torch.zeros(self.loss.terms, device=self.world.device)
        for i, batch in enumerate(batches):
            with self.piece(last=i == self.recipe.accumulation - 1):
                losses = self._losses(batch)
                loss = losses.sum() / self.recipe.batch
                (loss * self.scale * self.divisor).backward()
            total += self.loss.sums(losses, batch.t) / self.recipe.batch
        self.collect()
        return self.world.sum(total)

    def _audited(self, batches: Iterable[Batch]) -> Float[Tensor, " terms"]:
        """The same shard by shard, in an order that does not depend on the number of ranks."""
        total = tree_sum(self.world.gather(tree_sum(map(self._gradient, batches))))
        *parts, losses = total.split([*(p.numel() for p in self.parameters), self.loss.terms])
        for p, part in zip(self.parameters, parts, strict=True):
            p.grad = part.view_as(p)
        return losses

    def _gradient(self, batch: Batch) -> Vector:
        """The gradients and losses of a shard as one vector."""
        losses = self._losses(batch)
        (losses.sum() / self.recipe.batch).backward()
        parts = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in self.parameters]
        self.zero_grad()
        return torch.cat([*parts, self.loss.sums(losses, batch.t) / self.recipe.batch])

    def _losses(self, batch: Batch) -> PerSample:
        network, cond = self.network, batch.cond
        predict = network if cond is None else lambda latent, level: network(latent, level, cond)
        x = self.model.kind.values(batch.data, torch.float32)
        # Our backbones set their compute dtype themselves; networks passed by the caller run under autocast.
        foreign = self.half is not None and not isinstance(self.model.denoiser.backbone, Backbone)
        with torch.autocast(self.world.device.type, self.half, enabled=foreign):
            return self.loss(cast(Predictor, predict), x, batch.t, batch.eps)

    @torch.no_grad()
    def _update(self, losses: Float[Tensor, " terms"]) -> None:
        self.updating, loss = True, losses[0]
        norm = self.norm() / self.scale
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        # A gradient that overflows float16 at a large loss scale is not a fault: the step is skipped, the scale halved.
        excused = torch.isfinite(loss) & (self.scale > 1)
        first_fault = ~finite & ~excused & (self.bad_step < 0)
        self.bad_step.copy_(torch.where(first_fault, self.this_step, self.bad_step))
        counts = finite & (self.bad_step < 0)

        scale = self.scale * torch.clamp(norm / self.recipe.optimizer.clip, min=1.0)
        self.optimizer.step(self.lr, scale, counts)
        self.ema.update(counts * self.ema_weight)
        self.powers.update(counts, self.power_weights)
        seen = torch.stack([loss, norm, torch.ones_like(loss), *losses[1:]]).double()
        self.sums += torch.where(counts, seen, 0.0)
        if self.half == torch.float16:
            age = torch.where(finite, self.scale_age + 1, 0)
            grown = age >= GROWTH_STEPS
            self.scale.mul_(torch.where(finite, torch.where(grown, 2.0, 1.0), 0.5))
            self.scale_age.copy_(torch.where(grown, 0, age))
        self.updating = False

    def first_fault(self) -> int | None:
        """The first step whose loss or gradient was not finite, if there was one. Waits for the device."""
        return None if (step := int(self.bad_step)) < 0 else step

    def means(self) -> Means:
        """Averages since the last call. Waits for the device."""
        loss, norm, _, *unweighted = (self.sums / self.sums[2].clamp(min=1.0)).tolist()
        self.sums.zero_()
        return Means(loss, norm, *(unweighted or [loss]))

    @property
    def recorded(self) -> bool:
        """Whether steps are replayed by now."""
        return self._replay is not None and self._replay.recorded

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The tensors that the next step depends on, by file and name. Of a sharded tensor a rank has some rows."""

        def stored(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:  # by kind/parameter or width/parameter
            return {name: self.stored(name.partition("/")[2], part) for name, part in parts.items()}

        counters = {"counter/sums": self.sums, "counter/scale": self.scale, "counter/scale_age": self.scale_age}
        return {
            "model": self.model.denoiser.backbone.state_dict(),
            "ema": self.ema.state(),
            "optimizer": {**stored(self.optimizer.state()), **counters},
            **({"powers": stored(self.powers.state())} if self.recipe.ema.powers else {}),
        }

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """A copy on the host of what this rank writes of the state."""
        return {
            file: {
                name: mine.detach().to("cpu", copy=True).contiguous()
                for name, tensor in group.items()
                if (mine := self.written(tensor)) is not None
            }
            for file, group in self.state().items()
        }

    def averages(self) -> dict[str, Tensor]:
        """The power-function averages, gathered on the host. All ranks must call it."""
        return {name: self.gathered(tensor).cpu() for name, tensor in self.state().get("powers", {}).items()}

    @torch.no_grad()
    def restore(self, step: int, tensors: Mapping[str, Mapping[str, Stored]]) -> None:
        """Set the state from the whole tensors; raises if names or shapes do not match this network."""
        state = self.state()
        for file, group in state.items():
            if found := differences(tensors[file], group):
                other = f"the {file} of the checkpoint is of another network. Pass the same, or use another --out."
                raise UsageError("\n".join([other, *found]))
        for file, group in state.items():
            for name, mine in group.items():
                part, rows = self.place(mine)
                part.copy_(tensors[file][name][rows])
        self.steps_done = step

    # What ranks that divide the network do otherwise, see sharding.py.

    def piece(self, last: bool) -> AbstractContextManager[None]:
        """A forward and backward pass; ranks exchange gradients in the last one of a step."""
        skip = isinstance(self.network, DistributedDataParallel) and not last
        return self.network.no_sync() if skip else nullcontext()  # type: ignore[operator]

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.grad = None

    def collect(self) -> None:
        """Set the gradients of the parts, after the last backward pass."""

    def norm(self) -> Float[Tensor, ""]:
        """The norm of the gradient."""
        return nn.utils.get_total_norm([p.grad for p in self.parts.values() if p.grad is not None], foreach=True)

    def stored(self, name: str, part: Tensor) -> Tensor:
        """The tensor that a part belongs to, for a parameter of that name."""
        return part

    def place(self, tensor: Tensor) -> tuple[Tensor, Rows]:
        """The part of a tensor of the state that this rank holds, and its rows."""
        return tensor, ...

    def written(self, tensor: Tensor) -> Tensor | None:
        """What this rank writes of a tensor of the state."""
        return tensor if self.world.first else None

    def gathered(self, tensor: Tensor) -> Tensor:
        """The whole tensor."""
        return tensor

    def peers(self, timeout_s: float) -> Peers | None:
        """The other ranks that write parts of a checkpoint, if there are any."""
        return None


def engine_of(recipe: Recipe, model: Model, world: World, half: torch.dtype | None) -> Engine:
    """The engine of this recipe, which may divide the model among the ranks, in place."""
    if not recipe.sharded:
        return Engine(recipe, model, world, half)
    from bsi.training.sharding import ShardedEngine  # imports torch's FSDP, which takes half a second

    return ShardedEngine(recipe, model, world, half)


def tree_sum(vectors: Iterable[Vector]) -> Vector:
    """The sum of 2^k vectors in a binary tree. Like a binary counter it keeps at most one sum of each height."""
    heights: dict[int, Vector] = {}
    for vector in vectors:
        height = 0
        while height in heights:
            vector = heights.pop(height) + vector
            height += 1
        heights[height] = vector
    (total,) = heights.values()
    return total


@dataclass(frozen=True)
class Means:
    """Averages over the steps since the host last read them. `measured` is 2 L_M / n, the loss without its weight."""

    loss: float
    grad_norm: float
    measured: float
