"""Sharding by torch's FSDP2: a rank has 1 / N of the rows of each parameter, moment and average.

The unit that is gathered is a block, or another layer of more than a million parameters; the rest is one more unit.
Blocks are gathered and compute in the run's 16 bits if it has them; gradients are summed in float32. The norm of the
gradient is a sum over ranks, and Muon gathers one matrix at a time. A checkpoint holds every rank's rows.

Every rank builds the network on its host as a single rank would, takes the first rank's weights, and keeps its rows:
sharded weights are those of an unsharded build to the bit, for any network. A rank's host needs memory for all weights
until then. For an evaluation every rank gathers the average of all weights into a plain copy of the network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils import swap_tensors

from bsi.backbones.acceleration import compile_regions
from bsi.backbones.config import LARGE_LAYER
from bsi.backbones.layers import Backbone, Wide
from bsi.devices import compiles
from bsi.errors import UsageError
from bsi.model import Model
from bsi.recipe import Optimizer, Recipe
from bsi.runtime.checkpoint import Peers
from bsi.runtime.distributed import Mail, World
from bsi.runtime.ema import lerp_
from bsi.training.optimizers import Optimizers, polar
from bsi.training.parallel import Layout, Rows


def shard(recipe: Recipe, model: Model, world: World, half: torch.dtype | None) -> Shards:
    """Divide a model among the ranks, in place."""
    backbone, kind = model.denoiser.backbone, world.device.type
    blocks = blocks_of(backbone)
    meta = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in model.parameters()}
    skeleton = copy.deepcopy(model, meta).eval()
    for tensor in backbone.state_dict().values():
        there = tensor.to(world.device)
        world.broadcast(there)
        tensor.copy_(there)
    shards = world.place.local_size if recipe.parallel == "hsdp" else world.size
    sizes = (shards,) if shards == world.size else (world.size // shards, shards)
    mesh = init_device_mesh(kind, sizes, mesh_dim_names=("copies", "shards")[-len(sizes) :])
    for block in [*large_layers(backbone, blocks), *reversed(blocks)]:  # inner blocks before those around them
        # Weights that stay in float32 in 16-bit networks, those of norms, are gathered with their block.
        narrow = isinstance(backbone, Backbone) and not any(isinstance(m, Wide) for m in block.modules())
        policy = MixedPrecisionPolicy(half if narrow else None, torch.float32, cast_forward_inputs=False)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(backbone, mesh=mesh, reshard_after_forward=True)
    if isinstance(backbone, Backbone) and recipe.compile and compiles(world.device):
        compile_regions(backbone)
    return Shards(model.to(world.device), world, shards, skeleton)


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


class Shards(Layout):
    """FSDP: every rank has some rows of each parameter, as torch.chunk divides them."""

    sharded = True

    def __init__(self, model: Model, world: World, shards: int, skeleton: Model) -> None:
        super().__init__(model, world)
        self.skeleton = skeleton
        self.shards, self.index = shards, world.rank % shards
        self.divisor = 1
        self.modules = [m for m in self.backbone.modules() if isinstance(m, FSDPModule)]
        for module in self.modules:
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot average
            module.set_gradient_divide_factor(1.0)
            module.unshard()  # now FSDP has arranged the parts in memory
            module.reshard()
        self.sharded_parameters = {n: cast(DTensor, p) for n, p in self.backbone.named_parameters()}
        self.parts = {
            n: nn.Parameter(p.to_local().detach(), p.requires_grad) for n, p in self.sharded_parameters.items()
        }
        mesh = next(iter(self.sharded_parameters.values())).device_mesh
        self.group = mesh.get_group(mesh.ndim - 1)

    def average(self) -> ShardedAverage:
        return ShardedAverage(self, self.skeleton)

    def optimizers(self, settings: Optimizer) -> Optimizers:
        return Optimizers(self.backbone, settings, self.parts, self._orthogonalize)

    def begin(self, backward: Callable[[], None]) -> None:
        """FSDP always sums in the same order."""

    @contextmanager
    def piece(self, last: bool) -> Iterator[None]:
        self.backbone.set_requires_gradient_sync(last)  # type: ignore[operator]
        yield

    def zero_grad(self) -> None:
        super().zero_grad()
        for p in self.sharded_parameters.values():
            p.grad = None

    def collect(self) -> None:
        for part, p in zip(self.parts.values(), self.sharded_parameters.values(), strict=True):
            part.grad = None if p.grad is None else cast(DTensor, p.grad).to_local()

    def norm(self) -> Float[Tensor, ""]:
        """In float64, whose squares do not overflow; all ranks get the same bits."""
        square = super().norm().to(self.world.device).double().square()
        return (self.world.sum(square) * self.shards / self.world.size).sqrt().float()

    def _orthogonalize(self, matrices: Float[Tensor, "count mine columns"], rows: int) -> Tensor:
        """This rank's rows of the polar factors."""
        return polar(self._gather(matrices.movedim(1, 0), rows).movedim(0, 1))[:, self._rows(rows)]

    def stored(self, name: str, part: Tensor) -> Tensor:
        like = self.sharded_parameters.get(name)
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

    @property
    def writes(self) -> bool:
        return self.world.rank < self.shards  # with hsdp, the others have copies

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

    def __init__(self, layout: Shards, skeleton: Model) -> None:
        self._layout, self._skeleton = layout, skeleton
        self._averages = {name: part.detach().clone() for name, part in layout.parts.items()}

    @torch.no_grad()
    def update(self, weight: Float[Tensor, ""]) -> None:
        """Update the average with the current weights."""
        lerp_(list(self._averages.values()), [p.detach() for p in self._layout.parts.values()], weight)

    @contextmanager
    def evaluating(self) -> Iterator[Model]:
        """The model with the average, in evaluation mode; all ranks must enter together."""
        state = self.state()
        for mine, theirs in zip(self._skeleton.buffers(), self._layout.model.buffers(), strict=True):
            swap_tensors(mine, theirs.clone())
        parameters = dict(self._skeleton.denoiser.backbone.named_parameters())
        try:
            for name, parameter in parameters.items():
                swap_tensors(parameter, nn.Parameter(self._layout.gathered(state[name]), requires_grad=False))
            yield self._skeleton
        finally:
            for parameter in parameters.values():
                swap_tensors(parameter, nn.Parameter(parameter.to("meta"), requires_grad=False))

    def state(self) -> dict[str, Tensor]:
        """The tensors of the network with the average, by name."""
        return {
            name: self._layout.stored(name, self._averages[name]) if name in self._averages else buffer
            for name, buffer in self._layout.backbone.state_dict().items()
        }
