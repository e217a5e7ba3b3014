"""When memory runs out: an error that says how many images it had at a time, how many fit, and which option does it.

A batch is computed in pieces (`--accumulation`), and but for rounding and dropout's masks the run is the same: so the
answer keeps the batch, and cuts it finer. How many images fit is the closed form of `bsi.backbones.memory`; of a
network that is not ours nothing is known, and half as many are tried.

A GPU says when it is full. A host does not: its kernel ends the process (host.py). There the account is compared with
what there is before the first step. It is no exact one: a step on a CPU took 0.85 of it where tensors are large, and
up to 1.6 times it where they are smaller than 32 MiB, which the C library keeps on a heap with holes (measured with
DiT-mini/2, DiT-S/2, U-Net-32x2 and U-Net-64x4 at 8 to 128 images). So what does not fit by the smaller figure is
refused, and what may not by the larger one is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from bsi.backbones.acceleration import form_of
from bsi.backbones.config import MLPConfig
from bsi.backbones.memory import CONTEXT, Memory, training_memory
from bsi.devices import compute_dtype
from bsi.errors import UsageError
from bsi.progress import readable_bytes
from bsi.recipe import Recipe
from bsi.runtime.dataset import DataSpec
from bsi.runtime.distributed import World
from bsi.runtime.watchdog import Watchdog
from bsi.training.host import host_memory

__all__ = ["check_host", "enough_for_batch", "enough_to_train", "room"]

LEAST, MOST = 0.85, 1.6  # of the account, on a CPU


def room(device: torch.device, sharing: int = 1) -> int:
    """Bytes that this process has or could have: what it holds, and what is free, on a host for so many ranks."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return host_memory(sharing)


def check_host(recipe: Recipe, data: DataSpec, world: World, say: Callable[[str], None]) -> None:
    """On a CPU, refuse what would be killed in the first step; every rank calls it, and all refuse together."""
    memory = _account(recipe, data, world)
    if world.device.type != "cpu" or memory is None:
        return
    needed = memory.bytes(_at_a_time(recipe, world), world.size) - CONTEXT
    there = room(world.device, world.place.local_size)
    least, most, has = (readable_bytes(round(count)) for count in (LEAST * needed, MOST * needed, there))
    refused = None
    if LEAST * needed > there:
        what = f"not enough memory: a step takes at least {least}, and this process can have {has}"
        refused = UsageError(_training(recipe, data, world, what))
    elif MOST * needed > there:
        what = f"this may run out of memory, and be killed: a step can take {most}, and this process can have {has}"
        say(_training(recipe, data, world, what))
    world.agree(refused)


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
        full = _full(world.device, world.place.local_size)
        raise UsageError(_training(recipe, data, world, f"{full} {where}")) from error


@contextmanager
def enough_for_batch(batch: int, option: str, device: torch.device, memory: Memory | None = None) -> Iterator[None]:
    """The same for any other work on `batch` samples at a time, which `option` sets and `memory` accounts for."""
    try:
        with _host_too():
            yield
    except torch.OutOfMemoryError as error:
        fits = _fitting(memory, batch, room(device))
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


def _full(device: torch.device, sharing: int = 1) -> str:
    return f"out of memory on {device} ({readable_bytes(room(device, sharing))} for this process)"


def _fitting(memory: Memory | None, had: int, there: int, ranks: int = 1) -> int:
    """How many images fit at a time into so many bytes, by the closed form; fewer than did not, whatever it says."""
    account = had // 2 if memory is None else memory.largest(there, ranks)
    return max(0, min(account, had - 1))


def _pieces(recipe: Recipe, world: World) -> int:
    """In how many pieces a rank computes its part of a batch."""
    return recipe.virtual_shards // world.size if recipe.audit else recipe.accumulation


def _at_a_time(recipe: Recipe, world: World) -> int:
    return recipe.batch // (world.size * _pieces(recipe, world))


def _training(recipe: Recipe, data: DataSpec, world: World, what: str) -> str:
    """What is wrong, with how many samples at a time, and the option that computes fewer."""
    pieces, had = _pieces(recipe, world), _at_a_time(recipe, world)
    memory = _account(recipe, data, world)
    there = room(world.device, world.place.local_size)
    if world.device.type == "cpu":
        there = CONTEXT + round(there / MOST)  # nothing of a driver's, and holes in the heap
    fits = _fitting(memory, had, there, world.size)
    said = (
        f"{what}, with {had} samples at a time: --batch {recipe.batch} on {world.size} "
        f"rank{'s' if world.size > 1 else ''}, --accumulation {recipe.accumulation}. "
    )
    by = "half of that may fit" if memory is None else f"by the account of bsi.backbones.memory {fits} fit"
    shards = recipe.virtual_shards // world.size
    finer = [d for d in range(pieces + 1, shards + 1) if shards % d == 0 and recipe.batch // (world.size * d) <= fits]
    if finer and not recipe.audit:
        smaller = recipe.batch // (world.size * finer[0])
        return (
            f"{said}{by[0].upper()}{by[1:]}: {_leaner(recipe, data, world, had, there)}add --accumulation {finer[0]}, "
            f"which computes the same batch of {recipe.batch} with {smaller} at a time; the same --out goes on."
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


def _leaner(recipe: Recipe, data: DataSpec, world: World, had: int, there: int) -> str:
    """The option that keeps less, where there is one and it is enough."""
    if recipe.lean or recipe.precision == "fp8":
        return ""
    usual, lean = (_account(replace(recipe, lean=lean), data, world) for lean in (False, True))
    if usual is None or lean is None or lean == usual or lean.largest(there, world.size) < had:
        return ""
    return "add --lean, which keeps less and computes it again, or "


def _account(recipe: Recipe, data: DataSpec, world: World) -> Memory | None:
    """What the recipe's network takes on this device; None for a network of the caller's."""
    config = recipe.backbone
    if config is None:
        return None
    half = compute_dtype("float32" if recipe.audit else recipe.precision, world.device)
    form = form_of(config, half, world.device, recipe.lean) if recipe.compile and not recipe.audit else "plain"
    bins_count = None if data.bins is None else data.bins.count
    averages, kind = 1 + len(recipe.ema.powers), recipe.optimizer.kind
    return training_memory(config, data.shape, bins_count, data.classes, form, half is not None, averages, kind)


def _evaluation(recipe: Recipe, step: int, device: torch.device) -> str:
    batch, count = recipe.evaluation.at_a_time(recipe.evaluation.images), recipe.samples.count
    return (
        f"{_full(device)} while looking at the model after step {step}, with {batch} test samples at a time and "
        f"--samples.count {count}: use half of both, --evaluation.batch {max(1, batch // 2)} --samples.count "
        f"{max(1, count // 2)}; the same --out goes on."
    )
