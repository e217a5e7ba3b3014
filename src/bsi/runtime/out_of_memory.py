"""Out-of-memory errors: the available memory, and errors that name the option that makes the work fit.

A batch can be computed in more and smaller pieces (`--accumulation`), which changes only rounding and dropout masks.
The number of images that fit is estimated by `bsi.backbones.config`; for a network passed by the caller half as many
are suggested.

A GPU reports that its memory is full. Linux does not: an allocation succeeds, and the kernel kills the process when it
writes to memory that is not available. On a CPU the estimate is therefore compared with the available memory before
the first step. Measured steps took 0.85 to 1.6 times the estimate (DiT and U-Net at 8 to 128 images).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bsi.backbones.acceleration import form_of
from bsi.backbones.config import CONTEXT, Memory, MLPConfig, training_memory
from bsi.devices import compute_dtype
from bsi.errors import UsageError
from bsi.progress import readable_bytes
from bsi.recipe import Recipe
from bsi.runtime.data_spec import DataSpec
from bsi.runtime.distributed import Watchdog, World

LEAST, MOST = 0.85, 1.6  # measured ratios to the estimate, on a CPU

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


# ---- Available memory ------------------------------------------------------------------------------------------------


def available(device: torch.device, sharing: int = 1) -> int:
    """Bytes that this process has or could allocate; on a CPU, `sharing` ranks share the free memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return host_memory(sharing)


def host_memory(sharing: int = 1, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that this process has or could allocate on its host.

    This is the memory that it has, plus its share of the free memory: `MemAvailable` and free swap, within the limits
    of the control groups of containers and Slurm jobs. Cached files count as free. On a system without these files all
    memory is assumed to be free.
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
    """The free bytes of each control group (version 2), from this process's own up to the root."""
    try:
        path = next(line[3:] for line in (proc / "self" / "cgroup").read_text().splitlines() if line[:3] == "0::")
    except (OSError, StopIteration):
        return
    group = cgroups / path.lstrip("/")
    for folder in (group, *group.parents):
        try:
            most = (folder / "memory.max").read_text().strip() if folder.is_relative_to(cgroups) else "max"
            if most != "max":
                stat = _numbers(folder / "memory.stat")
                cached = stat.get("inactive_file", 0) + stat.get("active_file", 0)
                yield int(most) - int((folder / "memory.current").read_text()) + cached
        except OSError:  # not visible from here, or without limits
            continue


def _numbers(path: Path) -> dict[str, int]:
    """A file of lines "name number"."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}


# ---- Checks and advice -----------------------------------------------------------------------------------------------


def check_host(recipe: Recipe, data: DataSpec, world: World) -> None:
    """On a CPU, raise if the first step would run out of memory. Every rank must call it, and all raise together."""
    memory = _estimate(recipe, data, world)
    if world.device.type != "cpu" or memory is None:
        return
    needed = round(LEAST * (memory.bytes(_at_a_time(recipe, world), world.size) - CONTEXT))
    there = available(world.device, world.place.local_size)
    what = (
        f"not enough memory: a step takes at least {readable_bytes(needed)}, and this process can have "
        f"{readable_bytes(there)}"
    )
    world.agree(UsageError(_advice(recipe, data, world, what)) if needed > there else None)


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
    """An error message: what is wrong, the number of samples at a time, and the options that reduce it."""
    pieces, had = _pieces(recipe, world), _at_a_time(recipe, world)
    there = available(world.device, world.place.local_size)
    if world.device.type == "cpu":
        there = CONTEXT + round(there / MOST)  # a CPU has no driver memory, but a fragmented heap
    fits = _fitting(_estimate(recipe, data, world), had, there, world.size)
    given = (
        f"{what}, with {had} samples at a time: --batch {recipe.batch} on {world.size} "
        f"rank{'s' if world.size > 1 else ''}, --accumulation {recipe.accumulation}. About {fits} fit"
    )
    config = recipe.backbone
    recompute = config is not None and not isinstance(config, MLPConfig) and not config.checkpoint
    again = ", or --backbone.checkpoint, which stores less and computes it again" if recompute else ""
    shards = recipe.shards // world.size
    finer = [d for d in range(pieces + 1, shards + 1) if shards % d == 0 and recipe.batch // (world.size * d) <= fits]
    if finer and not recipe.audit:
        return (
            f"{given}: add --accumulation {finer[0]}, which computes the same batch of {recipe.batch} with "
            f"{recipe.batch // (world.size * finer[0])} at a time{again}, and use the same --out."
        )
    least = recipe.batch // recipe.shards
    batch = max(0, min(fits, least - 1)) * recipe.shards
    smaller = f"--batch {batch} --accumulation {shards}" if batch else "a smaller network (--backbone)"
    return f"{given}, which is less than a virtual shard of {least}: use {smaller}{again}."


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
