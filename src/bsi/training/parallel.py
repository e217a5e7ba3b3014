"""How ranks share a network: each has all of it (DDP), or some rows of each tensor (FSDP, in sharding.py).

    ddp      every rank has all parameters, moments and averages, and the ranks sum their gradients
    fsdp     a rank has 1 / N of the rows of each tensor; a block's parameters are gathered before it is computed
    hsdp     the same over the ranks of one host; hosts have copies, and sum the gradients of their parts

In the audit mode every rank has all of it: a vectorized update rounds the last elements of a tensor differently, so
that parts would not have the bits of the whole.

The training step sees a `Layout`: a rank's parts of the parameters, plain tensors on which AdamW, the averages and the
counters work without communication.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import EllipsisType

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bsi.errors import UsageError
from bsi.model import Model
from bsi.recipe import Optimizer, Recipe
from bsi.runtime.checkpoint import Peers
from bsi.runtime.distributed import World
from bsi.runtime.ema import Average, EmaModel
from bsi.training.optimizers import Optimizers

Rows = slice | EllipsisType


def check_layout(recipe: Recipe, world: World) -> None:
    """Raise if the ranks of this run cannot share a network as the recipe says."""
    kind, size, local = recipe.parallel, world.size, world.place.local_size
    if kind == "ddp":
        return
    if size == 1 and world.device.type == "cpu":
        raise UsageError(f"--parallel {kind} divides a network among ranks, got one CPU process. Use --parallel ddp.")
    if kind == "hsdp" and (size % local or local == 1 or local == size):
        raise UsageError(
            f"--parallel hsdp needs several hosts with an equal number of ranks, at least two on each: got {size} "
            f"rank{'s' if size > 1 else ''}, {local} on this host. Use --parallel fsdp."
        )


def parallelize(recipe: Recipe, model: Model, world: World, half: torch.dtype | None) -> Layout:
    """Divide a model among the ranks in place, or let each have all of it."""
    if not recipe.sharded:
        return Layout(model, world)
    from bsi.training.sharding import shard  # imports torch's FSDP, which takes half a second

    return shard(recipe, model, world, half)


class Layout:
    """Every rank has the whole network: a single rank, or DDP.

    Attributes:
        network: What a step calls.
        parts: This rank's part of each parameter, by name.
        divisor: By what the ranks' sum of gradients is divided.
        sharded: Whether ranks hold different parts.
    """

    sharded = False

    def __init__(self, model: Model, world: World) -> None:
        self.model, self.world, self.backbone = model, world, model.denoiser.backbone
        self.network: nn.Module = model.denoiser
        self.parts: dict[str, nn.Parameter] = dict(self.backbone.named_parameters())
        self.divisor = world.size

    def average(self) -> Average:
        """The moving average of the weights."""
        return EmaModel(self.model)

    def optimizers(self, settings: Optimizer) -> Optimizers:
        return Optimizers(self.backbone, settings)

    def begin(self, backward: Callable[[], None]) -> None:
        """Let DDP sum the gradients, from weights that are the same on all ranks.

        DDP rearranges its buckets after the first backward pass, which with three ranks or more changes the order of
        sums. A first pass without an update fixes it, so that a resumed run has the sums of an uninterrupted one.
        """
        ids = [self.world.device.index] if self.world.device.type == "cuda" else None
        # Buffers are the same on all ranks; sending them in every forward pass would cost a collective.
        buffers = dict(self.network.named_buffers())
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.network, list(buffers))
        self.network = DistributedDataParallel(self.network, device_ids=ids, gradient_as_bucket_view=True)
        before = [buffer.clone() for buffer in buffers.values()]  # the pass would change running statistics
        backward()
        self.zero_grad()
        for buffer, value in zip(buffers.values(), before, strict=True):
            buffer.copy_(value)

    def close(self) -> None:
        """Release DDP and its reference to the process group.

        If its reducer held the last reference, the destructor would wait under the GIL for gloo's thread, which may
        itself wait for the GIL to release a tensor: a finished run would never exit.
        """
        self.network = self.model.denoiser

    def piece(self, last: bool) -> AbstractContextManager[None]:
        """A forward and backward pass; ranks exchange gradients in the last one of a step."""
        skip = isinstance(self.network, DistributedDataParallel) and not last
        return self.network.no_sync() if skip else nullcontext()  # type: ignore[operator]

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.grad = None

    def collect(self) -> None:
        """Set the gradients of the parts, after the last backward pass."""

    def trained(self) -> list[nn.Parameter]:
        """The parts that are trained."""
        return [part for part in self.parts.values() if part.requires_grad]

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

    @property
    def writes(self) -> bool:
        """Whether this rank writes a part of a checkpoint."""
        return self.world.first

    def peers(self, timeout_s: float) -> Peers | None:
        """The other ranks that do, if there are any."""
        return None
