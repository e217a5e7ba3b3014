"""What turns images into features, and what is asked of the images.

Distances between sets of images are distances between their features, so that a value means something only together
with its extractor. An `Extractor` says who it is (`name`), which weights it holds (`hash`), how it resizes and how it
computes; every record carries these. The distance of Inception's published features is called FID, that of any other
"fd-" + name.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from bsi.errors import DataError


class QualityWarning(UserWarning):
    """A value that can be computed but should not be compared without a thought."""


@runtime_checkable
class Extractor(Protocol):
    """Features of 8-bit images. `Inception` is one; a classifier of one's own data is another."""

    @property
    def name(self) -> str:
        """Stands in the value's name: the Frechet distance is called "fd-" + name."""

    @property
    def hash(self) -> str:
        """SHA-256 of the weights."""

    @property
    def resize(self) -> str:
        """Name of the resize between the images and the network, "none" without one."""

    @property
    def precision(self) -> str:
        """How it multiplies: "float32", "tf32", ..."""

    @property
    def dim(self) -> int:
        """Number of features."""

    @property
    def device(self) -> torch.device:
        """Where the features are."""

    def __call__(self, images: UInt8[Tensor, "n 3 h w"]) -> Float[Tensor, "n dim"]: ...


def require_images(images: Tensor) -> UInt8[Tensor, "n 3 h w"]:
    """`images` when they are what every extractor takes; an error that says what they are otherwise.

    Floats are refused rather than converted: truncating them makes every value half a step too dark, and the FID moves.
    """
    if images.dtype != torch.uint8:
        raise DataError(
            f"images must be 8-bit (torch.uint8, values 0 to 255): got {images.dtype}. Round first, never truncate: "
            "for values in [-1, 1], ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)."
        )
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape[2:]:
        raise DataError(
            f"images must have the shape (n, 3, height, width): got {tuple(images.shape)}. "
            "Repeat a single gray channel three times; permute(0, 3, 1, 2) if channels come last."
        )
    return images
