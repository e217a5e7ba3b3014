"""The compute dtype of a device, its support for Triton kernels, and timings of CPU threads.

The parameters, the optimizer, the Fourier features and everything around a network stay in float32. Inside the network,
after `backbone.compute_dtype = compute_dtype("auto", device)`, autocast runs matrix products, convolutions and
attention in bfloat16 (or float16) and sums in float32; each weight is converted when it is used. "fp8" is bfloat16 with
the products of a DiT's blocks in 8 bits (experimental).
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

from bsi.errors import UsageError

if TYPE_CHECKING:
    import torch

Precision = Literal["auto", "bf16", "fp8", "float16", "float32"]


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """The type inside a network on this device; None is float32. float16 needs loss scaling, which the trainer does.

    `auto` is bfloat16 where the hardware computes in it, float16 on older GPUs, and float32 elsewhere: a CPU would only
    emulate the other two.

    Raises:
        UsageError: The device does not support the precision.
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

    available = device.type == "cuda" and all(map(importlib.util.find_spec, ("triton", "bsi.kernels")))
    return available and torch.cuda.get_device_capability(device) >= (7, 0)


def seconds_by_threads(work: Callable[[], object], repeats: int = 3) -> dict[int, float]:
    """The least time of `work` on the CPU with one thread, and with PyTorch's current number of threads.

    On a busy machine one thread can be several times as fast as all threads, which wait for each other. On a machine
    with one thread the result has one entry.
    """
    import torch

    threads, seconds = torch.get_num_threads(), {}
    try:
        for count in {1, threads}:
            torch.set_num_threads(count)
            work()  # starts the threads
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                work()
                times.append(time.perf_counter() - start)
            seconds[count] = min(times)
    finally:
        torch.set_num_threads(threads)
    return seconds
