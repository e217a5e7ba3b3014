"""Sharding by torch's FSDP2: a rank has 1 / N of the rows of each parameter, moment and average.

    fsdp     a block's parameters are gathered before it is computed
    hsdp     the same over the ranks of one host; hosts have copies, and sum the gradients of their parts

The unit that is gathered is a block, or another layer of more than a million parameters; the rest is one more unit.
Blocks are gathered and compute in the run's 16 bits if it has them; gradients are summed in float32. The norm of the
gradient is a sum over ranks, and Muon gathers one matrix at a time. A checkpoint holds every rank's rows.

The first rank builds the recipe's network on its host as a single rank would; the others build it on the meta device,
without memory. Each tensor is then sent to all devices, which keep their rows: sharded weights are those of an
unsharded build to the bit, also those of the caller's own network. For an evaluation every rank gathers the average of
all weights into a plain copy of the network. In the audit mode every rank has all of it: a vectorized update rounds the
last elements of a tensor differently, so that parts would not have the bits of the whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import swap_tensors

from bsi.backbones.acceleration import compile_regions
from bsi.backbones.costs import LARGE_LAYER
from bsi.backbones.layers import Backbone, Wide
from bsi.devices import compiles
from bsi.errors import UsageError
from bsi.model import Model
from bsi.recipe import Recipe
from bsi.runtime.checkpoint import Peers
from bsi.runtime.distributed import Mail, World
from bsi.runtime.ema import lerp_
from bsi.training.optimizers import Optimizers, polar
from bsi.training.step import Engine, Rows, Stream


@torch.no_grad()
def shard(recipe: Recipe, model: Model, world: World, half: torch.dtype | None, shards: int) -> None:
    """Divide a model among groups of `shards` ranks, in place."""
    backbone, kind = model.denoiser.backbone, world.device.type
    blocks = blocks_of(backbone)
    if len([*backbone.named_parameters(remove_duplicate=False)]) > len([*backbone.parameters()]):
        raise UsageError(f"{type(backbone).__name__} uses a parameter in two places. Use --parallel ddp.")
    weights = [tensor.detach() for tensor in _tensors(backbone)]  # the first rank sends its own
    backbone.to("meta")
    sizes = (shards,) if shards == world.size else (world.size // shards, shards)
    mesh = init_device_mesh(kind, sizes, mesh_dim_names=("copies", "shards")[-len(sizes) :])
    for block in [*large_layers(backbone, blocks), *reversed(blocks)]:  # inner blocks before those around them
        # Weights that stay in float32 in 16-bit networks, those of norms, are gathered with their block.
        narrow = isinstance(backbone, Backbone) and not any(isinstance(m, Wide) for m in block.modules())
        policy = MixedPrecisionPolicy(half if narrow else None, torch.float32, cast_forward_inputs=False)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(backbone, mesh=mesh, reshard_after_forward=True)
    backbone.to_empty(device=world.device)
    for weight, tensor in zip(weights, _tensors(backbone), strict=True):
        whole = weight.to(world.device) if world.first else torch.empty_like(weight, device=world.device)
        world.broadcast(whole)
        if isinstance(tensor, DTensor):
            mine = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.to_local().copy_(mine.to_local())
        else:
            tensor.copy_(whole)
    if isinstance(backbone, Backbone) and recipe.compile and compiles(world.device):
        compile_regions(backbone)
    model.to(world.device)


def _tensors(backbone: nn.Module) -> list[Tensor]:
    return [*backbone.parameters(), *backbone.buffers()]


def blocks_of(backbone: nn.Module) -> list[nn.Module]:
    """The repeated parts of a network; raises if there are none."""
    if isinstance(backbone, Backbone):
        return list(backbone.regions())[:-1]
    lists = [module for module in backbone.modules() if isinstance(module, nn.ModuleList)]
    blocks = [block for blocks in lists for block in blocks if not isinstance(block, nn.ModuleList)]
    if not blocks:
        raise UsageError(
            f"{type(backbone).__name__} has no blocks to shard: FSDP gathers one block at a time. Put the repeated "
            f"layers of the network into an nn.ModuleList, or use --parallel ddp."
        )
    return blocks


def large_layers(backbone: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Single layers outside the blocks that are gathered on their own, except for those that stay in float32."""
    apart = [*blocks, *(module for module in backbone.modules() if isinstance(module, Wide))]
    known = {id(module) for part in apart for module in part.modules()} | {id(backbone)}
    leaves = [m for m in backbone.modules() if id(m) not in known and not list(m.children())]
    return [m for m in leaves if sum(p.numel() for p in m.parameters()) > LARGE_LAYER]


class ShardedEngine(Engine):
    """Every rank has some rows of each parameter, as torch.chunk divides them."""

    sharded = True

    def divide(self) -> None:
        model, world = self.model, self.world
        meta = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in model.parameters()}
        skeleton = copy.deepcopy(model, meta).eval()
        self.shards = world.place.local_size if self.recipe.parallel == "hsdp" else world.size
        self.index, self.divisor = world.rank % self.shards, 1
        self.writes = world.rank < self.shards  # with hsdp, the others have copies
        shard(self.recipe, model, world, self.half, self.shards)
        for module in self.backbone.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot average
                module.set_gradient_divide_factor(1.0)
                module.unshard()  # now FSDP has arranged the parts in memory
                module.reshard()
        self.whole = {n: cast(DTensor, p) for n, p in self.backbone.named_parameters()}
        self.parts = {n: nn.Parameter(p.to_local().detach(), p.requires_grad) for n, p in self.whole.items()}
        mesh = next(iter(self.whole.values())).device_mesh
        self.group = mesh.get_group(mesh.ndim - 1)
        self.ema = ShardedAverage(self, skeleton)
        self.optimizer = Optimizers(self.backbone, self.recipe.optimizer, self.parts, self._orthogonalize)

    def begin(self, stream: Stream) -> None:
        """FSDP always sums in the same order."""

    @contextmanager
    def piece(self, last: bool) -> Iterator[None]:
        self.backbone.set_requires_gradient_sync(last)  # type: ignore[operator]
        yield

    def zero_grad(self) -> None:
        super().zero_grad()
        for p in self.whole.values():
            p.grad = None

    def collect(self) -> None:
        for part, p in zip(self.parts.values(), self.whole.values(), strict=True):
            part.grad = None if p.grad is None else cast(DTensor, p.grad).to_local()

    def norm(self) -> Float[Tensor, ""]:
        """In float64, whose squares do not overflow; all ranks get the same bits."""
        square = super().norm().to(self.world.device).double().square()
        return (self.world.sum(square) * self.shards / self.world.size).sqrt().float()

    def _orthogonalize(self, matrices: Float[Tensor, "count mine columns"], rows: int) -> Tensor:
        """This rank's rows of the polar factors."""
        return polar(self._gather(matrices.movedim(1, 0), rows).movedim(0, 1))[:, self._rows(rows)]

    def stored(self, name: str, part: Tensor) -> Tensor:
        like = self.whole.get(name)
        if like is None or part.ndim == 0:  # a step count
            return part
        return DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def place(self, tensor: Tensor) -> tuple[Tensor, Rows]:
        return (tensor.to_local(), self._rows(len(tensor))) if isinstance(tensor, DTensor) else (tensor, ...)

    def written(self, tensor: Tensor) -> Tensor | None:
        if not isinstance(tensor, DTensor):
            return super().written(tensor)
        part = tensor.to_local()
        return part if len(part) else None

    def peers(self, timeout_s: float) -> Peers | None:
        if self.shards == 1 or not self.writes:
            return None
        return Peers(Mail(self.world, "checkpoints", timeout_s), self.world.rank, self.shards)

    def gathered(self, tensor: Tensor) -> Tensor:
        return self._gather(tensor.to_local(), len(tensor)) if isinstance(tensor, DTensor) else tensor

    def _rows(self, rows: int) -> slice:
        each = -(-rows // self.shards)
        return slice(min(rows, self.index * each), min(rows, (self.index + 1) * each))

    def _gather(self, part: Tensor, rows: int) -> Tensor:
        """All rows of a tensor, from each rank's."""
        missing = -(-rows // self.shards) - len(part)
        part = torch.cat([part, part.new_zeros(missing, *part.shape[1:])])
        parts = [torch.empty_like(part) for _ in range(self.shards)]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat(parts)[:rows]


class ShardedAverage:
    """The moving average of the weights, sharded like them.

    For an evaluation every rank gathers all of it into a plain copy of the model, since ranks evaluate independently of
    each other: `skeleton` is the model with parameters on the meta device.
    """

    def __init__(self, engine: ShardedEngine, skeleton: Model) -> None:
        self._engine, self._skeleton = engine, skeleton
        self._averages = {name: part.detach().clone() for name, part in engine.parts.items()}

    @torch.no_grad()
    def update(self, weight: Float[Tensor, ""]) -> None:
        """Update the average with the current weights."""
        lerp_(list(self._averages.values()), [p.detach() for p in self._engine.parts.values()], weight)

    @contextmanager
    def evaluating(self) -> Iterator[Model]:
        """The model with the average, in evaluation mode; all ranks must enter together."""
        state = self.state()
        for mine, theirs in zip(self._skeleton.buffers(), self._engine.model.buffers(), strict=True):
            swap_tensors(mine, theirs.clone())
        parameters = dict(self._skeleton.denoiser.backbone.named_parameters())
        try:
            for name, parameter in parameters.items():
                swap_tensors(parameter, nn.Parameter(self._engine.gathered(state[name]), requires_grad=False))
            yield self._skeleton
        finally:
            for parameter in parameters.values():
                swap_tensors(parameter, nn.Parameter(parameter.to("meta"), requires_grad=False))

    def state(self) -> dict[str, Tensor]:
        """The tensors of the network with the average, by name."""
        return {
            name: self._engine.stored(name, self._averages[name]) if name in self._averages else buffer
            for name, buffer in self._engine.backbone.state_dict().items()
        }
