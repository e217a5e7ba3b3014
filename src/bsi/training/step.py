"""One training step: gradients of the global batch, then an update that happens only if everything is finite.

    loss      (1/b) sum_i 2 L_M(x_i) / n over the global batch, with the weights of the recipe's objective
    gradient  DDP's sum over ranks and pieces; in the audit mode a sum over virtual shards in a fixed order
    update    AdamW or Muon (optimizers.py) with the norm of the gradient clipped, then the averages of the weights

A flag on the device decides whether a step counts: it is set as long as all losses and gradient norms have been finite,
on all ranks alike, since both are sums over ranks. The host reads it some steps later, so that no step waits for it. A
step changes its state in place, and all values that differ between steps are in tensors, so that on a single GPU it can
be recorded once and replayed (replay.py).

In the audit mode the gradient has the same bits for any number of ranks. Floating-point sums depend on their order, so
each virtual shard is computed separately, with its own dropout, and the gradients are added in a binary tree over shard
numbers: ((g_0 + g_1) + (g_2 + g_3)) + ... A rank holds a power of two of consecutive shards, which is a subtree; the
ranks exchange the sums of their subtrees and all add the rest of the tree in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bsi.backbones.layers import Backbone
from bsi.consistency import consistency_loss, gap_at
from bsi.errors import UsageError
from bsi.grids import paper_grid
from bsi.levels import Proposal
from bsi.methods.base import Method, Predictor
from bsi.model import Model
from bsi.objective import edm_weight, expected_levels, finite_training_loss, sigmoid_weight, training_loss
from bsi.recipe import Objective, Recipe
from bsi.runtime.distributed import Watchdog, World
from bsi.runtime.ema import EmaModel, PowerAverages, Profile
from bsi.runtime.export import differences
from bsi.training.optimizers import Optimizers
from bsi.training.replay import Replay
from bsi.training.stream import Batch, Stream

PerSample = Float[Tensor, " batch"]
Vector = Float[Tensor, " n"]

# The loss scale in float16, as in torch.amp.GradScaler: halved if a gradient overflows, doubled after good steps.
FIRST_SCALE, GROWTH_STEPS = 2.0**16, 2000
MOST_LABELS = 3072  # for larger batches the gradient of torch's embedding sorts the labels and synchronizes


class Engine:
    """A model, its optimizer, its averages and the counters on the device. `step` advances all of them."""

    def __init__(
        self, recipe: Recipe, model: Model, world: World, half: torch.dtype | None, record: bool = True
    ) -> None:
        self.recipe, self.model, self.world, self.half = recipe, model, world, half
        self.ema = EmaModel(model)
        self.powers = PowerAverages(model.denoiser.backbone, recipe.ema.powers)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = Optimizers(model.denoiser.backbone, recipe.optimizer)
        self.loss = Loss(recipe.objective, model.method, world.device)
        self.steps_done = 0
        self.updating = False  # True during an update, when the state is incomplete
        self._network: nn.Module = model.denoiser
        record = record and world.device.type == "cuda" and replayable(recipe, model, world)
        self._replay = Replay(world.device) if record else None
        # Values of the next step, on the device: a recorded step would repeat values passed from the host. The EMA and
        # each power-function average have the weight of the new parameters.
        self.this_step = torch.zeros((), dtype=torch.int64, device=world.device)
        self.lr, self.ema_weight, *self.power_weights = torch.zeros(2 + len(recipe.ema.powers), device=world.device)
        # The counters: the first step that was not finite; the loss scale and the good steps since it changed; sums of
        # losses, gradient norms, steps, and losses without their weight.
        self.bad_step = torch.full_like(self.this_step, -1)
        self.scale = torch.full((), FIRST_SCALE if half == torch.float16 else 1.0, device=world.device)
        self.scale_age = torch.zeros_like(self.this_step)
        self.sums = torch.zeros(2 + self.loss.terms, dtype=torch.float64, device=world.device)

    # ---- A step, from the batch to the update ----

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
            self._replay(lambda batch: self._train([batch]), next(batches))
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
        self.optimizer.zero_grad()
        self._update(self._audited(batches) if self.recipe.audit else self._summed(batches))

    def _summed(self, batches: Iterable[Batch]) -> Float[Tensor, " terms"]:
        """Sum gradients over pieces and ranks; returns the loss of the global batch."""
        total = torch.zeros(self.loss.terms, device=self.world.device)
        for i, batch in enumerate(batches):
            network, last = self._network, i == self.recipe.accumulation - 1  # ranks exchange gradients once
            with network.no_sync() if isinstance(network, DistributedDataParallel) and not last else nullcontext():
                losses = self._losses(batch)
                loss = losses.sum() / self.recipe.batch
                (loss * self.scale * self.world.size).backward()  # DDP divides by the number of ranks
            total += self.loss.sums(losses, batch.t) / self.recipe.batch
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
        self.optimizer.zero_grad()
        return torch.cat([*parts, self.loss.sums(losses, batch.t) / self.recipe.batch])

    def _losses(self, batch: Batch) -> PerSample:
        network, cond = self._network, batch.cond
        predict = network if cond is None else lambda latent, level: network(latent, level, cond)
        x = self.model.kind.values(batch.data, torch.float32)
        # Our backbones set their compute dtype themselves; networks passed by the caller run under autocast.
        foreign = self.half is not None and not isinstance(self.model.denoiser.backbone, Backbone)
        with torch.autocast(self.world.device.type, self.half, enabled=foreign):
            return self.loss(cast(Predictor, predict), x, batch.t, batch.eps)

    @torch.no_grad()
    def _update(self, losses: Float[Tensor, " terms"]) -> None:
        self.updating = True
        loss = losses[0]
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(grads, foreach=True) / self.scale
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
        seen = torch.cat([losses[:1], norm.reshape(1), torch.ones_like(losses[:1]), losses[1:]]).double()
        self.sums += torch.where(counts, seen, 0.0)
        if self.half == torch.float16:
            age = torch.where(finite, self.scale_age + 1, 0)
            grown = age >= GROWTH_STEPS
            self.scale.mul_(torch.where(finite, torch.where(grown, 2.0, 1.0), 0.5))
            self.scale_age.copy_(torch.where(grown, 0, age))
        self.updating = False

    # ---- Values read by the host ----

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

    # ---- The state ----

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The tensors that the next step depends on, by file and name."""
        counters = {"counter/sums": self.sums, "counter/scale": self.scale, "counter/scale_age": self.scale_age}
        return {
            "model": self.model.denoiser.backbone.state_dict(),
            "ema": self.ema.model.denoiser.backbone.state_dict(),
            "optimizer": {**self.optimizer.state(), **counters},
            **({"powers": self.powers.state()} if self.recipe.ema.powers else {}),
        }

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """A copy of the state on the host."""
        return {
            file: {name: t.detach().to("cpu", copy=True).contiguous() for name, t in group.items()}
            for file, group in self.state().items()
        }

    @torch.no_grad()
    def restore(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Set the state that `tensors` returned; raises if names or shapes do not match this network."""
        state = self.state()
        for file, group in state.items():
            if found := differences(tensors[file], group):
                other = f"the {file} of the checkpoint is of another network. Pass the same, or use another --out."
                raise UsageError("\n".join([other, *found]))
        for file, group in state.items():
            for name, mine in group.items():
                mine.copy_(tensors[file][name])
        self.steps_done = step

    @torch.no_grad()
    def share(self) -> None:
        """Copy the first rank's state to all others."""
        step = torch.tensor(self.steps_done, device=self.world.device)
        for tensor in (step, *(t for group in self.state().values() for t in group.values())):
            self.world.broadcast(tensor)
        self.steps_done = int(step)

    # ---- DDP ----

    def begin(self, stream: Stream) -> None:
        """Let DDP sum the gradients, from weights that are the same on all ranks.

        DDP rearranges its buckets after the first backward pass, which with three ranks or more changes the order of
        sums. A first pass without an update fixes it, so that a resumed run has the sums of an uninterrupted one.
        """
        if self.world.size == 1 or self.recipe.audit:
            return
        ids = [self.world.device.index] if self.world.device.type == "cuda" else None
        network = self.model.denoiser
        # Buffers are the same on all ranks; sending them in every forward pass would cost a collective.
        buffers = dict(network.named_buffers())
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, list(buffers))
        self._network = DistributedDataParallel(network, device_ids=ids, gradient_as_bucket_view=True)
        before = [buffer.clone() for buffer in buffers.values()]  # the pass would change running statistics
        self._losses(stream.first(self.steps_done)).sum().backward()
        self.optimizer.zero_grad()
        for buffer, value in zip(buffers.values(), before, strict=True):
            buffer.copy_(value)

    def close(self) -> None:
        """Release DDP and its reference to the process group.

        If its reducer held the last reference, the destructor would wait under the GIL for gloo's thread, which may
        itself wait for the GIL to release a tensor: a finished run would never exit.
        """
        self._network = self.model.denoiser


def replayable(recipe: Recipe, model: Model, world: World) -> bool:
    """Whether a step is a single batch that never waits for the host.

    A network passed by the caller might, and the gradient of an embedding of many labels does.
    """
    single = world.size == 1 and recipe.accumulation == 1 and not recipe.audit
    few = not recipe.data.labels or recipe.batch <= MOST_LABELS
    return recipe.compile and single and few and isinstance(model.denoiser.backbone, Backbone)


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


class Loss:
    """The loss of a recipe's objective, see bsi.objective, with its tables on the device."""

    def __init__(self, objective: Objective, method: Method, device: torch.device) -> None:
        weights = {"sigmoid": sigmoid_weight(method, objective.bias), "edm": edm_weight(method)}
        self.method, self.weight, k = method, weights.get(objective.weight), objective.finite_k
        self.terms = 1 if self.weight is None else 2  # the length of `sums`
        self.grid = None if k is None else paper_grid(method, k).to(device)
        self.consistency, self.gap = objective.consistency, torch.zeros((), device=device)
        self.levels: Proposal = method.levels
        if objective.expected_levels:
            self.levels = expected_levels(method, self.weight).to(device)

    def __call__(
        self, predict: Predictor, x: Float[Tensor, "batch *data"], t: PerSample, eps: Float[Tensor, "batch *data"]
    ) -> PerSample:
        if self.consistency:
            return consistency_loss(self.method, predict, x, t, eps, self.gap)
        if self.grid is None:
            return training_loss(self.method, predict, x, t, eps, self.weight, self.levels)
        return finite_training_loss(self.method, predict, x, self.grid, self._measurement(self.grid, t), eps)

    def level(self, t: PerSample) -> PerSample:
        """The level of each t of a batch."""
        return self.levels.icdf(t) if self.grid is None else self.grid[self._measurement(self.grid, t)]

    def sums(self, losses: PerSample, t: PerSample) -> Float[Tensor, " terms"]:
        """The sum of a batch's losses; if the loss is weighted, also the sum of the losses without the weight."""
        losses = losses.detach()
        if self.weight is None:
            return losses.sum().reshape(1)
        weight = self.weight(self.level(t)).clamp(min=1e-300)  # EDM's is zero at level 0
        return torch.stack([losses.sum(), (losses / weight).sum().to(losses.dtype)])

    @staticmethod
    def _measurement(grid: Float[Tensor, " levels"], t: PerSample) -> Int64[Tensor, " batch"]:
        """The index of a measurement on the grid for each t in [0, 1); it is stratified over the batch like t."""
        k = len(grid) - 1
        return (t * k).long().clamp(max=k - 1)
