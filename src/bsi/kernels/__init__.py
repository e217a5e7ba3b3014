"""Where kernels that are compiled on the spot can run: ours, and those of torch's compiler."""

from __future__ import annotations

import importlib.util

import torch

__all__ = ["compiles"]


def compiles(device: torch.device) -> bool:
    """Whether a compiler's kernels run on this device, and are worth their time: Triton's, on GPUs from Volta on."""
    has_triton = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return has_triton and torch.cuda.get_device_capability(device) >= (7, 0)
