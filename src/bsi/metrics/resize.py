"""The bilinear resize of TensorFlow 1, which the published FID network was always fed through.

Output pixel i reads the input at i * in / out: no half-pixel shift, no antialiasing. Between the pixels on either side,
the upper one kept inside the image, and with f the coordinate's fraction,

    value = lower + (upper - lower) * f        along each row first, then along each column,

all in float32, in this order, as TensorFlow's kernel does it. Another resize (half-pixel, antialiased, through 8 bits)
moves the FID by up to whole points, so a value is only comparable together with the resize's name.
"""

import torch
from jaxtyping import Float
from torch import Tensor

NAME = "tf1-bilinear-299"


def tf1_bilinear(images: Float[Tensor, "n c h w"], size: int) -> Float[Tensor, "n c size size"]:
    """`images` resized to size x size."""
    rows = _interpolate(images, size, dim=3)
    return _interpolate(rows, size, dim=2)


def _interpolate(x: Float[Tensor, "n c h w"], size: int, dim: int) -> Float[Tensor, "n c _ _"]:
    length = x.shape[dim]
    scale = torch.tensor(length, dtype=torch.float32, device=x.device) / size
    coordinate = torch.arange(size, dtype=torch.float32, device=x.device) * scale
    lower = coordinate.floor()
    fraction = (coordinate - lower).view([-1 if axis == dim else 1 for axis in range(4)])
    start = lower.long()
    end = (start + 1).clamp(max=length - 1)
    below, above = x.index_select(dim, start), x.index_select(dim, end)
    return below + (above - below) * fraction
