"""Out-of-memory errors of training, with the option that makes the step fit.

A batch can be computed in more and smaller pieces (`--accumulation`), which changes only rounding and dropout masks.
The number of images that fit is estimated by `bsi.backbones.costs`; for a network passed by the caller half as many
are suggested.

A GPU reports that its memory is full. Linux does not: an allocation succeeds, and the kernel kills the process when it
writes to memory that is not available. On a CPU the estimate is therefore compared with the available memory before
the first step. Measured steps took 0.85 to 1.6 times the estimate (DiT and U-Net at 8 to 128 images).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bsi.backbones.acceleration import form_of
from bsi.backbones.config import DiTConfig, UNetConfig
from bsi.backbones.costs import CONTEXT, Memory, cost, training_memory
from bsi.devices import available, compute_dtype, host_memory, is_out_of_memory
from bsi.errors import UsageError
from bsi.progress import readable_bytes
from bsi.recipe import Recipe
from bsi.runtime.distributed import Watchdog, World
from bsi.runtime.export import DataSpec

LEAST, MOST = 0.85, 1.75  # measured ratios to the estimate, on a CPU


def check_host(recipe: Recipe, data: DataSpec, world: World) -> None:
    """Raise if the host's memory does not suffice. Every rank must call it, and all raise together.

    The first rank builds a sharded network on its host; on a CPU, the steps need memory of the host.
    """
    memory, sharing = _estimate(recipe, data, world), world.place.local_size
    with world.together():
        if recipe.sharded and recipe.backbone is not None and world.first:
            weights, there = 4 * cost(recipe.backbone, *data.sizes).parameters, host_memory(1)
            if weights > there:
                raise UsageError(
                    f"not enough memory: the first rank builds all weights on its host before they are divided, got "
                    f"{readable_bytes(weights)}, and this host has {readable_bytes(there)}. Use a host with more "
                    f"memory, or a smaller --backbone."
                )
        if world.device.type == "cpu" and memory is not None:
            needed = round(LEAST * (memory.bytes(_at_a_time(recipe, world), world.size) - CONTEXT))
            if needed > (there := available(world.device, sharing)):
                sizes = f"at least {readable_bytes(needed)}, and this process can have {readable_bytes(there)}"
                raise UsageError(_advice(recipe, data, world, f"not enough memory: a step takes {sizes}"))


@contextmanager
def enough_to_train(recipe: Recipe, data: DataSpec, world: World, watchdog: Watchdog) -> Iterator[None]:
    """Add advice to an out-of-memory error of training, or of the evaluation during training."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        step, phase = watchdog.where
        free = readable_bytes(available(world.device, world.place.local_size))
        full = f"out of memory on {world.device} ({free} for this process)"
        if phase == "evaluate":
            batch, count = min(recipe.evaluation.batch, recipe.evaluation.images), recipe.samples.count
            message = (
                f"{full} in the evaluation after step {step}, with {batch} test samples at a time and --samples.count "
                f"{count}. Use --evaluation.batch {max(1, batch // 2)} --samples.count {max(1, count // 2)} and the "
                f"same --out."
            )
        else:
            where = "before the first step" if phase == "start" else f"in step {step} ({phase})"
            message = _advice(recipe, data, world, f"{full} {where}")
        raise UsageError(message) from error


def _at_a_time(recipe: Recipe, world: World) -> int:
    """The number of samples that a rank computes at a time."""
    return recipe.batch // (recipe.shards if recipe.audit else world.size * recipe.accumulation)


def _estimate(recipe: Recipe, data: DataSpec, world: World) -> Memory | None:
    """The memory that the recipe's network takes on this device; None for a network passed by the caller."""
    config = recipe.backbone
    if config is None:
        return None
    half = compute_dtype("float32" if recipe.audit else recipe.precision, world.device)
    form = form_of(config, half, world.device, recipe.lean) if recipe.compile and not recipe.audit else "plain"
    form = "compiled" if recipe.sharded and form == "fused" else form  # as in sharding.py
    averages, kind = 1 + len(recipe.ema.powers), recipe.optimizer.kind
    shards = (world.place.local_size if recipe.parallel == "hsdp" else world.size) if recipe.sharded else None
    accumulates = recipe.accumulation > 1
    return training_memory(config, *data.sizes, form, half is not None, averages, kind, shards, accumulates)


def _advice(recipe: Recipe, data: DataSpec, world: World, what: str) -> str:
    """An error message: what is wrong, the number of samples at a time, and the options that reduce it."""
    config, memory, had = recipe.backbone, _estimate(recipe, data, world), _at_a_time(recipe, world)
    there = available(world.device, world.place.local_size)
    if world.device.type == "cpu":
        there = CONTEXT + round(there / MOST)  # a CPU has no driver memory, but a fragmented heap
    fits = max(0, min(had // 2 if memory is None else memory.largest(there, world.size), had - 1))  # `had` did not fit
    given = (
        f"{what}, with {had} samples at a time: --batch {recipe.batch} on {world.size} "
        f"rank{'s' if world.size > 1 else ''}, --accumulation {recipe.accumulation}. About {fits} fit"
    )
    recompute = isinstance(config, DiTConfig | UNetConfig) and not config.checkpoint
    again = ", or --backbone.checkpoint, which stores less and computes it again" if recompute else ""
    shards = recipe.shards // world.size
    for pieces in () if recipe.audit else range(recipe.accumulation + 1, shards + 1):
        fewer = recipe.batch // (world.size * pieces)
        if shards % pieces == 0 and fewer <= fits:
            return (
                f"{given}: add --accumulation {pieces}, which computes the same batch of {recipe.batch} with {fewer} "
                f"at a time{again}, and use the same --out."
            )
    least = recipe.batch // recipe.shards
    batch = max(0, min(fits, least - 1)) * recipe.shards
    smaller = f"--batch {batch} --accumulation {shards}" if batch else "a smaller network (--backbone)"
    return f"{given}, which is less than a virtual shard of {least}: use {smaller}{again}."
