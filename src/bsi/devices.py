"""What a device computes in, which kernels run on it, how much memory it has, and how many CPU threads pay off.

The parameters, the optimizer, the Fourier features and everything around a network stay in float32. Inside the network,
after `backbone.compute_dtype = compute_dtype("auto", device)`, autocast runs matrix products, convolutions and
attention in bfloat16 (or float16) and sums in float32; each weight is converted when it is used. "fp8" is bfloat16 with
the products of a DiT's blocks in 8 bits (experimental).
"""

from __future__ import annotations

import importlib.util
import os
import re
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from bsi.errors import UsageError
from bsi.progress import readable_bytes

if TYPE_CHECKING:
    import torch

Precision = Literal["auto", "bf16", "fp8", "float16", "float32"]

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


# ---- Precision and kernels -------------------------------------------------------------------------------------------


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """The type inside a network on this device; None is float32. float16 needs loss scaling, which the trainer does.

    `auto` is bfloat16 where the hardware computes in it, float16 on older GPUs, and float32 elsewhere: a CPU would only
    emulate the other two.
    """
    import torch

    cuda = device.type == "cuda"
    has_bf16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    match precision:
        case "float32":
            return None
        case "auto":
            return torch.bfloat16 if has_bf16 else torch.float16 if cuda else None
        case "fp8" if not cuda or torch.cuda.get_device_capability(device) < (8, 9):
            name = torch.cuda.get_device_name(device) if cuda else f"the {device.type}"
            raise UsageError(f"fp8 needs a GPU of compute capability 8.9 or higher, got {name}. Use auto.")
        case "bf16" if cuda and not has_bf16:
            raise UsageError(f"bf16 is not supported by {torch.cuda.get_device_name(device)}. Use float16 or auto.")
        case "bf16" | "fp8":
            return torch.bfloat16
        case "float16" if not cuda:
            raise UsageError(f"float16 needs a CUDA device, got {device.type}. Use auto or float32.")
        case "float16":
            return torch.float16
        case _:
            raise UsageError(f"unknown precision {precision!r}. Use one of {', '.join(get_args(Precision))}.")


def type_name(dtype: torch.dtype | None) -> str:
    """The name of a result of `compute_dtype`, for a record."""
    return "float32" if dtype is None else str(dtype).removeprefix("torch.")


def compiles(device: torch.device) -> bool:
    """Whether kernels written in Triton run on this device: NVIDIA GPUs from Volta on, where Triton is installed.

    False where the package was installed without `bsi.kernels`: everything then runs in PyTorch's own operations.
    """
    import torch

    installed = device.type == "cuda" and all(map(importlib.util.find_spec, ("triton", "bsi.kernels")))
    return installed and torch.cuda.get_device_capability(device) >= (7, 0)


def seconds_by_threads(work: Callable[[], object], repeats: int = 3) -> dict[int, float]:
    """The least time of `work` on the CPU with one thread, and with PyTorch's current number of threads.

    On a busy machine one thread can be several times as fast as all threads, which wait for each other.
    """
    import torch

    threads, seconds = torch.get_num_threads(), {}
    try:
        for count in {1, threads}:
            torch.set_num_threads(count)
            work()  # starts the threads
            seconds[count] = min(timeit.repeat(work, number=1, repeat=repeats))
    finally:
        torch.set_num_threads(threads)
    return seconds


# ---- Memory ----------------------------------------------------------------------------------------------------------


def available(device: torch.device, sharing: int = 1) -> int:
    """Bytes that this process has or could allocate; on a CPU, `sharing` ranks share the free memory."""
    import torch

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
    own = proc / "self" / "cgroup"
    found = re.search("^0::/*(.*)$", own.read_text(), re.MULTILINE) if own.is_file() else None
    group = cgroups / found[1] if found else cgroups.parent
    for folder in (group, *group.parents):
        with suppress(OSError):  # not visible from here, or without limits
            if folder.is_relative_to(cgroups) and (most := (folder / "memory.max").read_text().strip()) != "max":
                stat = _numbers(folder / "memory.stat")
                cached = stat.get("inactive_file", 0) + stat.get("active_file", 0)
                yield int(most) - int((folder / "memory.current").read_text()) + cached


def _numbers(path: Path) -> dict[str, int]:
    """A file of lines "name number"."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation has failed, on a GPU or on the host."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def enough_for_batch(batch: int, option: str, device: torch.device) -> Iterator[None]:
    """Add advice to an out-of-memory error of work on `batch` samples at a time, a number set by `option`."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        fix = f"Use {option} {batch // 2}." if batch > 1 else "Use a larger device, or a smaller network."
        where = f"{device} ({readable_bytes(available(device))} for this process)"
        raise UsageError(f"out of memory on {where} with {batch} samples at a time. {fix}") from error
