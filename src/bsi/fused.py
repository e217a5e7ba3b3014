"""Many small operations as one kernel, on CUDA, where launching each of them costs more than its arithmetic."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["fused"]

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    return torch.compile(function)


def fused(function: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """The function's compiled form on CUDA, else the function itself. Compiles when first called.

    The kernels are written by Triton: without it, or on a GPU too old for it, the function is left as it is.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return function
    return _compiled(function) if torch.cuda.get_device_capability(device) >= (7, 0) else function
