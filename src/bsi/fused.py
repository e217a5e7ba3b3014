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
    return torch.compile(function) if importlib.util.find_spec("triton") else function


def fused(function: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """The function itself on a CPU; on CUDA its compiled form, if Triton is installed. Compiles when first called."""
    return _compiled(function) if device.type == "cuda" else function
