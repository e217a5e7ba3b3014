"""Out-of-memory errors: the available memory, and errors that name the option that makes the work fit.

A batch can be computed in more and smaller pieces (`--accumulation`), which changes only rounding and dropout masks. So
the advice keeps the batch and computes it in smaller pieces. The number of images that fit is estimated by
`bsi.backbones.memory`; for a network passed by the caller half as many are suggested.

A GPU reports that its memory is full. Linux does not: an allocation succeeds, and the kernel kills the process when it
writes to memory that is not available. On a CPU the estimate is therefore compared with the available memory before
the first step.
Measured steps took 0.85 times the estimate if tensors are large, and up to 1.6 times if they are smaller than 32 MiB,
which the C library keeps on a fragmented heap (DiT-mini/2, DiT-S/2, U-Net-32x2 and U-Net-64x4 at 8 to 128 images). So a
step raises an error if it does not fit by the smaller figure, and prints a warning if it may not by the larger one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from bsi.backbones.acceleration import form_of
from bsi.backbones.config import MLPConfig
from bsi.backbones.memory import CONTEXT, Memory, training_memory
from bsi.devices import compute_dtype
from bsi.errors import UsageError
from bsi.progress import readable_bytes
from bsi.recipe import Recipe
from bsi.runtime.data_spec import DataSpec
from bsi.runtime.distributed import Watchdog, World

__all__ = ["LEAST", "MOST", "available", "check_host", "enough_for_batch", "enough_to_train", "host_memory"]

LEAST, MOST = 0.85, 1.6  # smallest and largest measured ratio to the estimate, on a CPU

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")

# Control groups of version 2 and 1: the limit, the usage, and the lines of memory.stat that count cached files.
V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


# ---- Available memory ------------------------------------------------------------------------------------------------


def available(device: torch.device, sharing: int = 1) -> int:
    """Bytes that this process has or could allocate; on a CPU, `sharing` ranks share the free memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return host_memory(sharing)


def host_memory(sharing: int = 1, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that this process has or could allocate on its host.

    This is the memory that it has, plus its share of the free memory: `MemAvailable` and free swap, within the limits
    of the control groups (version 1 or 2) of containers and Slurm jobs. Cached files count as free. On a system without
    these files all memory is assumed to be free.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        known = _numbers(proc / "meminfo")
        free = 1024 * (known["MemAvailable:"] + known.get("SwapFree:", 0))
        own = page * int((proc / "self" / "statm").read_text().split()[1])
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * page // sharing
    return max(0, min([free, *_free_in_groups(proc, cgroups)])) // sharing + own


def _free_in_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """The free bytes of each control group, from this process's own up to the root."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, (limit, used, cached) = (cgroups / "memory", V1) if controllers else (cgroups, V2)
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            try:
                most = (folder / limit).read_text().strip() if folder.is_relative_to(root) else "max"
                if most != "max":
                    stat = _numbers(folder / "memory.stat")
                    yield int(most) - int((folder / used).read_text()) + sum(stat.get(name, 0) for name in cached)
            except OSError:  # not visible from here, or without limits
                continue


def _numbers(path: Path) -> dict[str, int]:
    """A file of lines "name number"."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}


# ---- Checks and advice -----------------------------------------------------------------------------------------------


def check_host(recipe: Recipe, data: DataSpec, world: World, warn: Callable[[str], None]) -> None:
    """On a CPU, raise if the first step would run out of memory. Every rank must call it, and all raise together."""
    memory = _estimate(recipe, data, world)
    if world.device.type != "cpu" or memory is None:
        return
    needed = memory.bytes(_at_a_time(recipe, world), world.size) - CONTEXT
    there = available(world.device, world.place.local_size)
    least, most, has = (readable_bytes(round(count)) for count in (LEAST * needed, MOST * needed, there))
    error = None
    if LEAST * needed > there:
        what = f"not enough memory: a step takes at least {least}, and this process can have {has}"
        error = UsageError(_advice(recipe, data, world, what))
    elif MOST * needed > there:
        what = f"this may run out of memory, and be killed: a step can take {most}, and this process can have {has}"
        warn(_advice(recipe, data, world, what))
    world.agree(error)


@contextmanager
def enough_to_train(recipe: Recipe, data: DataSpec, world: World, watchdog: Watchdog) -> Iterator[None]:
    """Add advice to an out-of-memory error of training, or of the evaluation during training."""
    try:
        with _host_errors():
            yield
    except torch.OutOfMemoryError as error:
        step, phase = watchdog.where
        full = _full(world.device, world.place.local_size)
        if phase == "evaluate":
            batch, count = min(recipe.evaluation.batch, recipe.evaluation.images), recipe.samples.count
            raise UsageError(
                f"{full} in the evaluation after step {step}, with {batch} test samples at a time and --samples.count "
                f"{count}. Use --evaluation.batch {max(1, batch // 2)} --samples.count {max(1, count // 2)} and the "
                f"same --out."
            ) from error
        where = "before the first step" if phase == "start" else f"in step {step} ({phase})"
        raise UsageError(_advice(recipe, data, world, f"{full} {where}")) from error


@contextmanager
def enough_for_batch(batch: int, option: str, device: torch.device, memory: Memory | None = None) -> Iterator[None]:
    """Add advice to an out-of-memory error of other work on `batch` samples at a time, a number set by `option`."""
    try:
        with _host_errors():
            yield
    except torch.OutOfMemoryError as error:
        fits = _fitting(memory, batch, available(device))
        fix = f"Use {option} {fits}." if fits else "Not even one fits: use a larger device, or a smaller network."
        raise UsageError(f"{_full(device)} with {batch} samples at a time. {fix}") from error


@contextmanager
def _host_errors() -> Iterator[None]:
    """Raise torch.OutOfMemoryError also for a failed allocation on the host."""
    try:
        yield
    except RuntimeError as error:
        if "DefaultCPUAllocator" in str(error):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


def _full(device: torch.device, sharing: int = 1) -> str:
    return f"out of memory on {device} ({readable_bytes(available(device, sharing))} for this process)"


def _fitting(memory: Memory | None, had: int, there: int, ranks: int = 1) -> int:
    """The number of images that fit into `there` bytes; always fewer than `had`, which did not fit."""
    return max(0, min(had // 2 if memory is None else memory.largest(there, ranks), had - 1))


def _pieces(recipe: Recipe, world: World) -> int:
    """The number of pieces in which a rank computes its part of a batch."""
    return recipe.shards // world.size if recipe.audit else recipe.accumulation


def _at_a_time(recipe: Recipe, world: World) -> int:
    return recipe.batch // (world.size * _pieces(recipe, world))


def _advice(recipe: Recipe, data: DataSpec, world: World, what: str) -> str:
    """An error message: what is wrong, the number of samples at a time, and the option that reduces it."""
    pieces, had = _pieces(recipe, world), _at_a_time(recipe, world)
    memory = _estimate(recipe, data, world)
    there = available(world.device, world.place.local_size)
    if world.device.type == "cpu":
        there = CONTEXT + round(there / MOST)  # a CPU has no driver memory, but a fragmented heap
    fits = _fitting(memory, had, there, world.size)
    given = (
        f"{what}, with {had} samples at a time: --batch {recipe.batch} on {world.size} "
        f"rank{'s' if world.size > 1 else ''}, --accumulation {recipe.accumulation}. "
        + ("Half of that may fit" if memory is None else f"By the account of bsi.backbones.memory {fits} fit")
    )
    shards = recipe.shards // world.size
    finer = [d for d in range(pieces + 1, shards + 1) if shards % d == 0 and recipe.batch // (world.size * d) <= fits]
    if finer and not recipe.audit:
        lean = "add --lean, which keeps less and computes it again, or " if _lean_fits(recipe, data, world, had) else ""
        return (
            f"{given}: {lean}add --accumulation {finer[0]}, which computes the same batch of {recipe.batch} with "
            f"{recipe.batch // (world.size * finer[0])} at a time, and use the same --out."
        )
    least = recipe.batch // recipe.shards
    batch = max(0, min(fits, least - 1)) * recipe.shards
    smaller = f"--batch {batch} --accumulation {shards}" if batch else "a smaller network (--backbone)"
    recompute = ""
    if recipe.backbone is not None and not isinstance(recipe.backbone, MLPConfig) and not recipe.backbone.checkpoint:
        recompute = ", or --backbone.checkpoint, which keeps less and computes it again"
    return f"{given}, which is less than a virtual shard of {least}: use {smaller}{recompute}."


def _lean_fits(recipe: Recipe, data: DataSpec, world: World, had: int) -> bool:
    """Whether the lean form of the network needs less memory and would fit."""
    if recipe.lean or recipe.precision == "fp8":
        return False
    usual, lean = (_estimate(replace(recipe, lean=lean), data, world) for lean in (False, True))
    there = available(world.device, world.place.local_size)
    return usual is not None and lean is not None and lean != usual and lean.largest(there, world.size) >= had


def _estimate(recipe: Recipe, data: DataSpec, world: World) -> Memory | None:
    """The memory that the recipe's network takes on this device; None for a network passed by the caller."""
    config = recipe.backbone
    if config is None:
        return None
    half = compute_dtype("float32" if recipe.audit else recipe.precision, world.device)
    form = form_of(config, half, world.device, recipe.lean) if recipe.compile and not recipe.audit else "plain"
    bins_count = None if data.bins is None else data.bins.count
    averages, kind = 1 + len(recipe.ema.powers), recipe.optimizer.kind
    return training_memory(config, data.latent_shape, bins_count, data.classes, form, half is not None, averages, kind)
