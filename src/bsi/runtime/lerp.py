"""Many tensors, each moved towards its end by one share that lives on the device.

    tensor <- tensor + share (end - tensor)        exactly the tensor at share 0, and the end, to a rounding, at share 1

`torch._foreach_lerp_` launches a kernel for each tensor when the share is a tensor, and a network has hundreds of small
ones. They are moved together, in three passes; a large one alone, in one. (Not by factors 1 - share and share: rounded,
they do not sum to 1, and of an average over 10,000 steps 1e-8 in each makes 1e-4.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["lerp_"]

LARGE = 2**20  # elements, whose passes over memory take longer than a launch


def lerp_(tensors: Sequence[Tensor], ends: Sequence[Tensor], share: Float[Tensor, ""]) -> None:
    pairs = list(zip(tensors, ends, strict=True))
    small = [(tensor, end) for tensor, end in pairs if tensor.numel() < LARGE]
    if small:
        moved, towards = [tensor for tensor, _ in small], [end for _, end in small]
        ways = torch._foreach_sub(towards, moved)
        torch._foreach_mul_(ways, share)
        torch._foreach_add_(moved, ways)
    for tensor, end in pairs:
        if tensor.numel() >= LARGE:
            tensor.lerp_(end, share.to(tensor.dtype))
