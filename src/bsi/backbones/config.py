"""The sizes and names of networks.

A config is a frozen dataclass that imports no torch, so that a recipe can hold it, a JSON file can store it, and
invalid sizes raise an error before memory is allocated. The data's properties are given to `build`: the shape, the
number of bins (which sets the Fourier features) and the number of classes.

| name | network |
|---|---|
| `dit-l/2` | DiT of size mini, s, b, l, xl, h or g with patches of 2 (4, 8, ...) per axis; the paper has L/2 and L/4 |
| `unet-128x32` | VDM's U-Net of width 128 with 32 levels (CIFAR-10 in the paper; 256 wide for ImageNet32) |
| `unet-128-256-256x2` | the same at three resolutions, each half of the previous one, with 2 levels at each |
| `mlp-256x4` | residual MLP of width 256 with 4 blocks, for vectors |
"""

import math
import re
from dataclasses import dataclass, replace
from typing import ClassVar

from bsi.errors import UsageError, unknown

PRECISION_DIM = 32  # section "Architecture": t becomes a 32-dimensional precision embedding

# Bounds on sizes, far beyond any network that can be trained. `build` also compares the weights with the memory.
LARGEST = dict.fromkeys(("depth", "levels", "heads", "patch"), 1 << 12) | {"width": 1 << 16, "mlp_ratio": 1 << 8}

Shape = tuple[int, ...]  # of one sample: (channels, *space)


def _check_sizes(width: int, heads: int = 1, dropout: float = 0.0, **sizes: int) -> None:
    for name, size in {"width": width, "heads": heads, **sizes}.items():
        if not 1 <= size <= LARGEST[name]:
            raise UsageError(f"{name} must be at least 1 and at most {LARGEST[name]}, got {size}.")
    if width % heads:
        fits = max(h for h in range(1, heads) if width % h == 0)
        raise UsageError(f"heads must divide width, got width={width}, heads={heads}. Use heads={fits}.")
    if not 0 <= dropout < 1:
        raise UsageError(f"dropout is a probability in [0, 1), got {dropout}.")


def _check_space(network: str, shape: Shape) -> None:
    if len(shape) < 2 or min(shape) < 1:
        fix = "Use an MLP (mlp-256x4) for vectors; a series needs an axis of channels (data[:, None])."
        raise UsageError(f"{network} takes data of shape (channels, *space), all at least 1, got {shape}. {fix}")


@dataclass(frozen=True)
class DiTConfig:
    """A DiT.

    Args:
        width: Channels of a token.
        depth: Number of blocks.
        heads: Attention heads; they divide the width.
        patch: Side of a patch: a token is patch x patch pixels.
        mlp_ratio: Hidden channels of a block's MLP, as a multiple of the width.
        dropout: Dropout of the outputs of each block's attention and MLP (paper: 0.05).
        checkpoint: Store only each block's input for the backward pass, and recompute the block there.
        kernel: Side of the window of patches that a token is computed from, an odd number. The published 1 is the patch
            alone: blocks must then find neighbors by their positions, which takes long where a patch is one symbol.
    """

    width: int
    depth: int
    heads: int
    patch: int = 2
    mlp_ratio: int = 4
    dropout: float = 0.05
    checkpoint: bool = False
    kernel: int = 1

    def __post_init__(self) -> None:
        _check_sizes(self.width, self.heads, self.dropout, depth=self.depth, patch=self.patch, mlp_ratio=self.mlp_ratio)
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise UsageError(f"kernel must be an odd number of patches, got {self.kernel}. Use 1, 3 or 5.")

    def check(self, shape: Shape) -> None:
        """Raise UsageError for data that this network cannot take."""
        _check_space("a DiT", shape)
        if any(size % self.patch for size in shape[1:]):
            fix = f"Use a patch that divides {math.gcd(*shape[1:])}, or another size of the data (`bsi data --size`)."
            raise UsageError(f"the patch must divide all spatial sizes, got {shape[1:]} and patch {self.patch}. {fix}")
        least = 2 * (len(shape) - 1)
        if self.width < least:
            raise UsageError(f"positions of {shape[1:]} need a width of at least {least}, got width={self.width}.")

    def grid(self, shape: Shape) -> tuple[int, ...]:
        """The number of patches along each spatial axis."""
        return tuple(size // self.patch for size in shape[1:])


@dataclass(frozen=True)
class UNetConfig:
    """VDM's U-Net: `levels` blocks down and `levels` + 1 blocks up, all at full resolution.

    Args:
        width: Channels of an image (paper: 128 or 256).
        levels: Blocks down at each resolution (paper: 32).
        heads: Attention heads; they divide all widths.
        dropout: Dropout between the convolutions of each block.
        checkpoint: As in `DiTConfig`.
        coarser: Widths at further resolutions, each half of the previous one, with the same number of levels and with
            attention after every block. They make a network much cheaper and give good samples. The paper's networks
            have none, which gives better likelihoods.
    """

    width: int
    levels: int = 32
    heads: int = 1
    dropout: float = 0.1
    checkpoint: bool = False
    coarser: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for width in self.widths:
            _check_sizes(width, self.heads, self.dropout, levels=self.levels)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths at all resolutions, starting with the full one."""
        return (self.width, *self.coarser)

    def check(self, shape: Shape) -> None:
        _check_space("a U-Net", shape)
        if len(shape) > 4:
            raise UsageError(f"a U-Net takes 1 to 3 spatial axes, got {shape}. Use a DiT (dit-s/2) for more axes.")
        factor = 2 ** len(self.coarser)
        if any(size % factor for size in shape[1:]):
            need = f"{len(self.widths)} resolutions need every spatial size to be a multiple of {factor}"
            raise UsageError(f"{need}, got {shape[1:]}. Use fewer, or another size of the data (`bsi data --size`).")

    def pixels(self, shape: Shape) -> list[int]:
        """The number of pixels at each resolution."""
        return [math.prod(size >> i for size in shape[1:]) for i in range(len(self.widths))]


@dataclass(frozen=True)
class MLPConfig:
    """A residual MLP on the flattened data, for vectors."""

    width: int = 256
    depth: int = 4
    mlp_ratio: int = 4
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_sizes(self.width, dropout=self.dropout, depth=self.depth, mlp_ratio=self.mlp_ratio)

    def check(self, shape: Shape) -> None:
        if not shape or min(shape) < 1:
            raise UsageError(f"an MLP takes data of shape (n,) or more axes, all at least 1, got {shape}.")

    def grid(self, shape: Shape) -> tuple[int, ...]:
        """No axes: all pixels are one token."""
        return ()


@dataclass(frozen=True)
class AutoencoderConfig:
    """A convolutional autoencoder, whose latents are 2^(number of widths) times smaller along each axis than an image.

    Args:
        channels: Channels of the latents.
        widths: Channels at each resolution, from half of the image's to that of the latents.
        blocks: Residual blocks at each resolution, of the encoder and of the decoder.
        noise: Standard deviation of the latents given an image; their mean square is 1.
    """

    channels: int = 4
    widths: tuple[int, ...] = (128, 256)
    blocks: int = 2
    noise: float = 0.1
    dropout: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        for width in (self.channels, *self.widths):
            _check_sizes(width, depth=self.blocks)
        if not self.widths:
            raise UsageError("an autoencoder needs at least one width, got none. Use widths=(128, 256).")
        if not 0 < self.noise < 1:
            raise UsageError(f"noise is relative to latents of mean square 1, between 0 and 1, got {self.noise}.")

    @property
    def factor(self) -> int:
        """How many times smaller latents are along each axis."""
        return 2 ** len(self.widths)

    def check(self, shape: Shape) -> None:
        if len(shape) != 3 or min(shape) < 1 or any(size % self.factor for size in shape[1:]):
            need = f"images (channels, height, width) with sides that are multiples of {self.factor}"
            raise UsageError(f"this autoencoder takes {need}, got {shape}. Use fewer widths, or crop the images.")

    def pixels(self, shape: Shape) -> list[int]:
        """The number of positions at each resolution."""
        return [math.prod(size >> (i + 1) for size in shape[1:]) for i in range(len(self.widths))]


BackboneConfig = DiTConfig | UNetConfig | MLPConfig | AutoencoderConfig

# Published sizes. Ours are `mini`, for studies (10M parameters), and `h` and `g`, for many GPUs (0.95 and 3.0 billion).
DIT_SIZES = {
    "mini": DiTConfig(width=256, depth=8, heads=4),
    "s": DiTConfig(width=384, depth=12, heads=6),
    "b": DiTConfig(width=768, depth=12, heads=12),
    "l": DiTConfig(width=1024, depth=24, heads=16),
    "xl": DiTConfig(width=1152, depth=28, heads=16),
    "h": DiTConfig(width=1280, depth=32, heads=16),
    "g": DiTConfig(width=2048, depth=40, heads=16),
}

KNOWN_NAMES = [f"dit-{size}/{patch}" for size in DIT_SIZES for patch in (2, 4, 8)]
KNOWN_NAMES += ["unet-128x32", "unet-256x32", "unet-128-256-256x2", "mlp-256x4"]


def resolve(name: str) -> BackboneConfig:
    """The config with this name.

    >>> resolve("dit-l/2")
    DiTConfig(width=1024, depth=24, heads=16, patch=2, mlp_ratio=4, dropout=0.05, checkpoint=False, kernel=1)
    """
    lowered = name.lower()
    if (match := re.fullmatch(r"dit-([a-z]+)/(\d{1,9})", lowered)) and match[1] in DIT_SIZES:
        return replace(DIT_SIZES[match[1]], patch=int(match[2]))
    if match := re.fullmatch(r"unet-(\d{1,9})((?:-\d{1,9}){0,16})x(\d{1,9})", lowered):
        coarser = tuple(int(width) for width in match[2].split("-")[1:])
        return UNetConfig(width=int(match[1]), levels=int(match[3]), coarser=coarser)
    if match := re.fullmatch(r"mlp-(\d{1,9})x(\d{1,9})", lowered):
        return MLPConfig(width=int(match[1]), depth=int(match[2]))
    raise unknown("backbone", lowered[:99], KNOWN_NAMES)


def fourier_exponents(bins_count: int | None) -> range:
    """The exponents i of the Fourier features sin(2^i pi u), cos(2^i pi u); none for continuous data.

    256 bins on [-1, 1] are 2^-7 wide, and the paper's i = 6, 7, 8 have periods of 4, 2 and 1 bins. For another count,
    the range moves by log2(count / 256), rounded to the nearest integer, so that the periods stay about the same.
    """
    if bins_count is None:
        return range(0)
    if bins_count < 2:
        raise UsageError(f"bins_count must be at least 2, got {bins_count}. Use None for continuous data.")
    shift = round(math.log2(bins_count / 256))
    return range(6 + shift, 9 + shift)


def input_channels(channels: int, bins_count: int | None) -> int:
    """The number of channels after the Fourier features: 7n for n channels, or n for continuous data."""
    return channels * (1 + 2 * len(fourier_exponents(bins_count)))
