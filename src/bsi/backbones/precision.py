"""Float32 outside, something faster inside.

The parameters, the optimiser, the Fourier features and everything around the network stay in float32. Inside the
network, autocast runs matrix products, convolutions and attention in bfloat16 (or float16), and sums in float32. Two
ways:

1. `backbone.compute_dtype = compute_dtype("auto", device)`: autocast converts each weight when it is used. Nothing else
   changes.
2. `HalfCopy(backbone)`: a second network whose weights *are* bfloat16; forward and backward go through it, the float32
   network stays the master that the optimiser, the EMA and checkpoints see. The same results bit for bit (autocast
   rounds the same weights), without converting 458M weights in every pass, and gradients cross the wire in half the
   bytes:

       half = HalfCopy(backbone, torch.bfloat16)
       loss(half.module, batch).backward(); half.hand_over_gradients()     # once per micro-batch: sums in float32
       optimizer.step(); half.refresh()
"""

import copy
from typing import Literal

import torch
from torch import nn

from bsi.backbones.base import Backbone
from bsi.backbones.embeddings import ConditionEmbedding
from bsi.errors import UsageError

Precision = Literal["auto", "bf16", "float16", "float32"]


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
        case "bf16" if cuda and not has_bf16:
            raise UsageError(f"{torch.cuda.get_device_name(device)} does not compute in bf16. Use float16 or auto.")
        case "bf16":
            return torch.bfloat16
        case "float16" if not cuda:
            raise UsageError(f"float16 needs a CUDA device: got {device.type}. Use auto or float32.")
        case "float16":
            return torch.float16


class HalfCopy:
    """A network with half-precision weights beside its float32 master. `module` is the one to call."""

    def __init__(self, master: Backbone, dtype: torch.dtype = torch.bfloat16) -> None:
        self.module = copy.deepcopy(master)
        self.module.compute_dtype = dtype
        _to_half(self.module, dtype)
        self._masters: list[torch.Tensor] = list(master.parameters())
        self._copies: list[torch.Tensor] = list(self.module.parameters())

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the master's weights, after each step of the optimiser."""
        torch._foreach_copy_(self._copies, self._masters)

    @torch.no_grad()
    def hand_over_gradients(self) -> None:
        """Add the copy's gradients to the master's, in float32, and clear the copy's."""
        for master, half in zip(self._masters, self._copies, strict=True):
            if half.grad is None:
                continue
            if master.grad is None:
                master.grad = half.grad.to(master.dtype)
            else:
                master.grad += half.grad
            half.grad = None


def _to_half(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert a network's parameters, but for those that autocast too uses in float32: norms, the condition."""
    if isinstance(module, ConditionEmbedding | nn.GroupNorm):
        return
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(dtype)
    for child in module.children():
        _to_half(child, dtype)
