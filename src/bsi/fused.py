"""Many small operations as one kernel, on CUDA, where launching each of them costs more than its arithmetic."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import ParamSpec

import torch
from torch import Tensor

__all__ = ["fused"]

P = ParamSpec("P")


@functools.cache
def _compiled(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    return torch.compile(function) if importlib.util.find_spec("triton") else function


def fused(function: Callable[P, Tensor], device: torch.device) -> Callable[P, Tensor]:
    """The function itself on a CPU; on CUDA its compiled form, if Triton is installed. Compiles when first called."""
    return _compiled(function) if device.type == "cuda" else function
