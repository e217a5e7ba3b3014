"""When memory runs out: an error that says how many images it had at a time, how many fit, and which option does it.

A batch is computed in pieces (`--accumulation`), and but for rounding and dropout's masks the run is the same: so the
answer keeps the batch, and cuts it finer. How many images fit is the closed form of `bsi.backbones.memory`; of a
network that is not ours nothing is known, and half as many are tried.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bsi.backbones.config import DiTConfig, MLPConfig
from bsi.backbones.memory import Form, Memory, training_memory
from bsi.backbones.precision import compute_dtype
from bsi.errors import UsageError
from bsi.training.dataset import DataSpec
from bsi.training.distributed import World
from bsi.training.recipe import Recipe
from bsi.training.watchdog import Watchdog

__all__ = ["enough_for_batch", "enough_to_train", "room"]


def room(device: torch.device) -> int:
    """Bytes that this process has or could have: on a GPU, what is free and what it holds already."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def enough_to_train(recipe: Recipe, data: DataSpec, world: World, watchdog: Watchdog) -> Iterator[None]:
    """Turn running out of memory while training, or while looking at the model on the way, into what to do about it."""
    try:
        with _host_too():
            yield
    except torch.OutOfMemoryError as error:
        step, phase = watchdog.where
        if phase == "evaluate":
            raise UsageError(_evaluation(recipe, step, world.device)) from error
        where = "before the first step" if phase == "start" else f"in step {step} ({phase})"
        raise UsageError(_training(recipe, data, world, where)) from error


@contextmanager
def enough_for_batch(batch: int, option: str, device: torch.device, memory: Memory | None = None) -> Iterator[None]:
    """The same for any other work on `batch` samples at a time, which `option` sets and `memory` accounts for."""
    try:
        with _host_too():
            yield
    except torch.OutOfMemoryError as error:
        fits = _fitting(memory, batch, device)
        fix = f"Use {option} {fits}." if fits else "Not even one fits: take a larger device, or a smaller network."
        raise UsageError(f"{_full(device)} with {batch} samples at a time. {fix}") from error


@contextmanager
def _host_too() -> Iterator[None]:
    """A host that is out of memory as torch's own error, which a GPU's already is."""
    try:
        yield
    except RuntimeError as error:
        if "DefaultCPUAllocator" in str(error):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


def _full(device: torch.device) -> str:
    return f"out of memory on {device} ({room(device) / 2**30:.1f} GiB for this process)"


def _fitting(memory: Memory | None, had: int, device: torch.device, ranks: int = 1) -> int:
    """How many images fit at a time, by the closed form; fewer than did not, whatever it says."""
    account = had // 2 if memory is None else memory.largest(room(device), ranks)
    return max(0, min(account, had - 1))


def _training(recipe: Recipe, data: DataSpec, world: World, where: str) -> str:
    pieces = recipe.virtual_shards // world.size if recipe.audit else recipe.accumulation
    had = recipe.batch // (world.size * pieces)
    memory = _account(recipe, data, world)
    fits = _fitting(memory, had, world.device, world.size)
    said = (
        f"{_full(world.device)} {where}, with {had} samples at a time: --batch {recipe.batch} on {world.size} "
        f"rank{'s' if world.size > 1 else ''}, --accumulation {recipe.accumulation}. "
    )
    by = "half of that may fit" if memory is None else f"by the account of bsi.backbones.memory {fits} fit"
    shards = recipe.virtual_shards // world.size
    finer = [d for d in range(pieces + 1, shards + 1) if shards % d == 0 and recipe.batch // (world.size * d) <= fits]
    if finer and not recipe.audit:
        smaller = recipe.batch // (world.size * finer[0])
        return (
            f"{said}{by[0].upper()}{by[1:]}: add --accumulation {finer[0]}, which computes the same batch of "
            f"{recipe.batch} with {smaller} at a time; the same --out goes on."
        )
    least = recipe.batch // recipe.virtual_shards
    batch = min(fits, least - 1) * recipe.virtual_shards if min(fits, least - 1) else 0
    smaller_batch = f"--batch {batch} --accumulation {shards}" if batch else "a smaller network (--backbone)"
    recompute = ""
    if recipe.backbone is not None and not isinstance(recipe.backbone, MLPConfig) and not recipe.backbone.checkpoint:
        recompute = ", or --backbone.checkpoint, which keeps less and computes it again"
    return (
        f"{said}{by[0].upper()}{by[1:]}, which is less than a virtual shard of {least}: use {smaller_batch}{recompute}."
    )


def _account(recipe: Recipe, data: DataSpec, world: World) -> Memory | None:
    """What the recipe's network takes on this device; None for a network of the caller's."""
    config = recipe.backbone
    if config is None:
        return None
    half = compute_dtype("float32" if recipe.audit else recipe.precision, world.device)
    fast = world.device.type == "cuda" and recipe.compile and not recipe.audit
    fuses = isinstance(config, DiTConfig) and half == torch.bfloat16 and not config.checkpoint
    form: Form = "plain" if not fast else "fused" if fuses else "compiled"
    bins_count = None if data.bins is None else data.bins.count
    averages = 1 + len(recipe.ema.powers)
    return training_memory(config, data.shape, bins_count, data.classes, form, half is not None, averages)


def _evaluation(recipe: Recipe, step: int, device: torch.device) -> str:
    batch, count = recipe.evaluation.batch, recipe.samples.count
    return (
        f"{_full(device)} while looking at the model after step {step}, with --evaluation.batch {batch} and "
        f"--samples.count {count}: use half of both, --evaluation.batch {max(1, batch // 2)} --samples.count "
        f"{max(1, count // 2)}; the same --out goes on."
    )
