"""One step: gradients of the global batch, then an update that happens only if everything is finite.

    loss      (1/b) sum_i 2 L_M(x_i) / n over the global batch; L_M^k or a weighted L_M if the recipe says so (loss.py)
    gradient  DDP's sum over ranks and pieces; in the audit mode, a sum over virtual shards in a fixed order
    update    AdamW (or Muon: optimizers.py) with the gradient's norm clipped, then the EMA; under a flag on the device

The flag is up while every loss and every gradient norm so far was finite. Once one was not, nothing moves any more, on
any rank: the norm of the summed gradient and the summed loss are the same everywhere. The host finds out when it next
looks, and until then the weights stay as they were before the bad step. So no step waits for the host, and on one GPU
a step is recorded and replayed (replay.py): all that it changes, it changes in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bsi.backbones.base import Backbone
from bsi.errors import UsageError
from bsi.methods.base import Predictor
from bsi.model import Model
from bsi.recipe import Recipe
from bsi.runtime.averages import PowerAverages
from bsi.runtime.checkpoint import differences
from bsi.runtime.distributed import World
from bsi.runtime.watchdog import Watchdog
from bsi.training.audit import TreeSum, flatten_gradients, set_gradients
from bsi.training.dials import Dials
from bsi.training.ema import EmaModel
from bsi.training.loss import Loss
from bsi.training.optimizers import Optimizers
from bsi.training.replay import Replay
from bsi.training.stream import Batch, Stream

__all__ = ["Engine", "Means", "replayable"]

# The loss's scale in float16, as in torch.amp.GradScaler: halved when a gradient overflows, doubled after good steps.
FIRST_SCALE, GROWTH_STEPS = 2.0**16, 2000
MOST_LABELS = 3072  # beyond that the gradient of torch's embedding sorts them, and has the host count


@dataclass(frozen=True)
class Means:
    """Averages over the steps since the host last looked. `measured` is 2 L_M / n: the loss, its levels not weighed."""

    loss: float
    grad_norm: float
    measured: float


class Engine:
    """The model, its optimizer, its average, and the counters on the device. `step` advances all of them."""

    def __init__(
        self, recipe: Recipe, model: Model, world: World, half: torch.dtype | None, record: bool = True
    ) -> None:
        self.recipe, self.model, self.world, self.half = recipe, model, world, half
        self.ema = EmaModel(model)
        self.powers = PowerAverages(model.denoiser.backbone, recipe.ema.powers)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = Optimizers(model.denoiser.backbone, recipe.optimizer)
        self.steps_done = 0
        self.dials = Dials.new(recipe, world.device)
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=world.device)
        self.scale = torch.full((), FIRST_SCALE if half == torch.float16 else 1.0, device=world.device)
        self.scale_age = torch.zeros((), dtype=torch.int64, device=world.device)
        self._network: nn.Module = model.denoiser
        self.loss = Loss.of(recipe.objective, model.method, world.device)
        # Of losses, of norms, of steps; and of the losses before they are weighed, if they are.
        self.sums = torch.zeros(2 + self.loss.terms, dtype=torch.float64, device=world.device)
        record = record and world.device.type == "cuda" and replayable(recipe, model, world)
        self._replay = Replay(world.device) if record else None

    @property
    def recorded(self) -> bool:
        """Whether a step is one launch by now (replay.py)."""
        return self._replay is not None and self._replay.recorded

    def begin(self, stream: Stream) -> None:
        """Let DDP sum the gradients, from weights that are in place and the same on all ranks.

        DDP lays out its buckets anew after the first backward pass, and with three ranks or more the layout decides the
        order of sums. One pass that does not count settles it, so that a resumed run adds as the uninterrupted one did.
        """
        if self.world.size == 1 or self.recipe.audit:
            return
        ids = [self.world.device.index] if self.world.device.type == "cuda" else None
        network = self.model.denoiser
        # Buffers are shared already; sending them in every forward pass would be a collective that nobody needs.
        buffers = [name for name, _ in network.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, buffers)
        self._network = DistributedDataParallel(network, device_ids=ids, gradient_as_bucket_view=True)
        before = [buffer.clone() for buffer in network.buffers()]  # running statistics would count the pass
        batch = stream.first(self.steps_done)
        batch.seed_dropout(self.recipe.seed)
        self._losses(batch).sum().backward()
        self.optimizer.zero_grad()
        for buffer, value in zip(network.buffers(), before, strict=True):
            buffer.copy_(value)

    def close(self) -> None:
        """Let go of DDP, and with it of the process group, which must not go while Python's lock is held.

        DDP's reducer holds the group too. Were it the last to do so, its end would wait under the lock for gloo's
        thread, and that may be waiting for the lock to end a tensor: a run would be finished and never exit.
        """
        self._network = self.model.denoiser

    def step(self, stream: Stream, watchdog: Watchdog) -> None:
        """One step; the device may still be busy with it when this returns."""
        watchdog.at(self.steps_done, "data")
        self.dials.turn(self.recipe, self.steps_done)
        batches = self._seeded(stream, watchdog)
        if self._replay is not None:
            self._replay(self._whole, next(batches))
        else:
            self.optimizer.zero_grad()
            losses = self._audited(batches) if self.recipe.audit else self._summed(batches)
            watchdog.at(self.steps_done, "update")
            self._update(losses)
        self.steps_done += 1

    def _seeded(self, stream: Stream, watchdog: Watchdog) -> Iterator[Batch]:
        """The batches of a step, each with what dropout draws from set before it is computed."""
        for batch in stream.step(self.steps_done):
            watchdog.at(self.steps_done, "compute")
            batch.seed_dropout(self.recipe.seed)
            yield batch

    def _whole(self, batch: Batch) -> None:
        """A step of one batch: nothing in it depends on the host."""
        self.optimizer.zero_grad()
        self._update(self._summed([batch]))

    def _losses(self, batch: Batch) -> Float[Tensor, " batch"]:
        x = self.model.values(batch.data)
        # Our backbones set their own type inside; a network from elsewhere gets it from autocast.
        foreign = self.half is not None and not isinstance(self.model.denoiser.backbone, Backbone)
        with torch.autocast(self.world.device.type, self.half, enabled=foreign):
            return self.loss(self._given(batch.cond), x, batch.t, batch.eps)

    def _told(self, losses: Float[Tensor, " batch"], batch: Batch) -> Float[Tensor, " told"]:
        """The batch's part of the loss; and of the loss before it is weighed, if it is."""
        return self.loss.told(losses, batch.t) / self.recipe.batch

    def _given(self, cond: Tensor | None) -> Predictor:
        """The network with a condition bound into it; as `Denoiser.given`, whatever DDP wraps."""
        network = cast(Predictor, self._network)
        return network if cond is None else lambda latent, level: self._network(latent, level, cond)

    def _summed(self, batches: Iterable[Batch]) -> Float[Tensor, " told"]:
        """Gradients summed over pieces and ranks; the loss of the global batch."""
        total = torch.zeros(self.loss.terms, device=self.world.device)
        pieces = self.recipe.accumulation
        for i, batch in enumerate(batches):
            with self._exchange(i == pieces - 1):
                losses = self._losses(batch)
                loss = losses.sum() / self.recipe.batch
                (loss * self.scale * self.world.size).backward()  # DDP divides by the number of ranks
            total += self._told(losses, batch)
        return self.world.sum(total)

    def _exchange(self, now: bool) -> AbstractContextManager[None]:
        """Ranks exchange gradients with the last piece only."""
        if isinstance(self._network, DistributedDataParallel) and not now:
            return self._network.no_sync()
        return nullcontext()

    def _audited(self, batches: Iterable[Batch]) -> Float[Tensor, " told"]:
        """The same, shard by shard, in an order that does not depend on the ranks."""
        mine, all_ranks = TreeSum(), TreeSum()
        for batch in batches:
            losses = self._losses(batch)
            (losses.sum() / self.recipe.batch).backward()
            mine.add(flatten_gradients(self.parameters, self._told(losses, batch)))
        for part in self.world.gather(mine.total()):
            all_ranks.add(part)
        return set_gradients(self.parameters, all_ranks.total())

    @torch.no_grad()
    def _update(self, losses: Float[Tensor, " told"]) -> None:
        loss = losses[0]
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(grads, foreach=True) / self.scale
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        # A gradient that overflows float16 at a large scale is no fault: the step is left out, the scale halved.
        excused = torch.isfinite(loss) & (self.scale > 1)
        first_fault = ~finite & ~excused & (self.bad_step < 0)
        self.bad_step.copy_(torch.where(first_fault, self.dials.step, self.bad_step))
        counts = finite & (self.bad_step < 0)

        scale = self.scale * torch.clamp(norm / self.recipe.optimizer.clip, min=1.0)
        self.optimizer.step(self.dials.lr, scale, counts)
        self.ema.update(counts * self.dials.ema)
        self.powers.update(counts, self.dials.powers)
        seen = torch.cat([losses[:1], norm.reshape(1), torch.ones_like(losses[:1]), losses[1:]]).double()
        self.sums += torch.where(counts, seen, 0.0)
        if self.half == torch.float16:
            self._rescale(finite)

    def _rescale(self, finite: Tensor) -> None:
        age = torch.where(finite, self.scale_age + 1, 0)
        grown = age >= GROWTH_STEPS
        self.scale.mul_(torch.where(finite, torch.where(grown, 2.0, 1.0), 0.5))
        self.scale_age.copy_(torch.where(grown, 0, age))

    def first_fault(self) -> int | None:
        """The step whose loss or gradient was not finite, if there was one. Waits for the device."""
        step = int(self.bad_step)
        return None if step < 0 else step

    def means(self) -> Means:
        """What was averaged since the last call. Waits for the device."""
        loss, norm, _, *unweighed = (self.sums / self.sums[2].clamp(min=1.0)).tolist()
        self.sums.zero_()
        return Means(loss, norm, *(unweighed or [loss]))

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything that the next step depends on, copied to the host, by file and name."""
        return {file: {name: _on_host(t) for name, t in group.items()} for file, group in self._state().items()}

    @torch.no_grad()
    def restore(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Become what `tensors` described; refuses those of another network, though its class be the same."""
        state = self._state()
        for file, group in state.items():
            if found := differences(tensors[file], group):
                lines = [f"the checkpoint's {file} is of another network: pass the same, or use another --out", *found]
                raise UsageError("\n".join(lines))
        for file, group in state.items():
            for name, mine in group.items():
                mine.copy_(tensors[file][name])
        self.steps_done = step

    @torch.no_grad()
    def share(self) -> None:
        """The first rank's state to all others."""
        step = torch.tensor(self.steps_done, device=self.world.device)
        for tensor in (step, *(t for group in self._state().values() for t in group.values())):
            self.world.broadcast(tensor)
        self.steps_done = int(step)

    def _state(self) -> dict[str, dict[str, Tensor]]:
        """The tensors themselves, by file and name."""
        counters = {"counter/sums": self.sums, "counter/scale": self.scale, "counter/scale_age": self.scale_age}
        return {
            "model": self.model.denoiser.backbone.state_dict(),
            "ema": self.ema.model.denoiser.backbone.state_dict(),
            "optimizer": {**self.optimizer.state(), **counters},
            **({"powers": self.powers.state()} if self.recipe.ema.powers else {}),
        }

    @property
    def files(self) -> tuple[str, ...]:
        """The files that `tensors` and `restore` speak of."""
        return tuple(self._state())


def replayable(recipe: Recipe, model: Model, world: World) -> bool:
    """Whether a step is one batch that never asks the host, as a network from elsewhere might, or many labels do."""
    alone = world.size == 1 and recipe.accumulation == 1 and not recipe.audit
    few = not recipe.data.labels or recipe.batch <= MOST_LABELS
    return recipe.compile and alone and few and isinstance(model.denoiser.backbone, Backbone)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
