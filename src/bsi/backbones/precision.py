"""Float32 outside, something faster inside.

The parameters, the optimizer, the Fourier features and everything around the network stay in float32. Inside the
network, after `backbone.compute_dtype = compute_dtype("auto", device)`, autocast runs matrix products, convolutions and
attention in bfloat16 (or float16), and sums in float32; it converts each weight when it is used. fp8 is bfloat16 with
the products of a DiT's blocks in 8 bits (fp8.py): experimental, and only where a user asks for it.
"""

from typing import get_args

import torch

from bsi.backbones.config import Precision
from bsi.errors import UsageError

__all__ = ["Precision", "compute_dtype", "type_name"]


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """The type inside the network on this device: None is float32. float16 needs loss scaling, which is the trainer's.

    `auto` is bfloat16 where the hardware computes in it, float16 on older GPUs, float32 elsewhere: a CPU would only
    emulate the other two.
    """
    cuda = device.type == "cuda"
    has_bf16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    match precision:
        case "float32":
            return None
        case "auto":
            return torch.bfloat16 if has_bf16 else torch.float16 if cuda else None
        case "fp8" if not cuda or torch.cuda.get_device_capability(device) < (8, 9):
            name = torch.cuda.get_device_name(device) if cuda else f"the {device.type}"
            raise UsageError(f"{name} does not compute in fp8: that takes a GPU of compute capability 8.9. Use auto.")
        case "bf16" if cuda and not has_bf16:
            raise UsageError(f"{torch.cuda.get_device_name(device)} does not compute in bf16. Use float16 or auto.")
        case "bf16" | "fp8":
            return torch.bfloat16
        case "float16" if not cuda:
            raise UsageError(f"float16 needs a CUDA device: got {device.type}. Use auto or float32.")
        case "float16":
            return torch.float16
        case _:
            raise UsageError(f"unknown precision {precision!r}. Use one of {', '.join(get_args(Precision))}.")


def type_name(dtype: torch.dtype | None) -> str:
    """What `compute_dtype` found, for a record."""
    return "float32" if dtype is None else str(dtype).removeprefix("torch.")
