"""Many small operations as one kernel, on CUDA, where launching each of them costs more than its arithmetic."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["compiles", "fused"]

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    return torch.compile(function)


def fused(function: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """The function's compiled form where there is a compiler, else the function itself. Compiles when first called."""
    return _compiled(function) if compiles(device) else function


def compiles(device: torch.device) -> bool:
    """Whether a compiler's kernels run on this device, and are worth their time: Triton's, on GPUs from Volta on."""
    has_triton = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return has_triton and torch.cuda.get_device_capability(device) >= (7, 0)
