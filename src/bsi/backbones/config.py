"""Which network, in numbers: the sizes of the paper's tables and the names a recipe or a command line calls them by.

A config is a frozen dataclass that knows no torch, so that a recipe can hold it, a JSON file can store it, and a size
that cannot be built is refused before anything is allocated. What a config leaves out is the data's: the shape, the
number of bins (which sets the Fourier features) and the number of classes are given to `build`.

| name | network |
|---|---|
| `dit-l/2` | DiT of size s, b, l, xl or mini with patches of 2 (4, 8, ...) per axis; L/2 and L/4 are the paper's |
| `unet-128x32` | VDM's U-Net of width 128 with 32 levels (CIFAR-10 in the paper; 256 wide for ImageNet32) |
| `unet-128-256-256x2` | the same at three resolutions, each half of the one before, with 2 levels at each |
| `mlp-256x4` | residual MLP of width 256 with 4 blocks, for vectors |
"""

import math
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches

from bsi.errors import UsageError

PRECISION_DIM = 32  # section "Architecture": t becomes a 32-dimensional precision embedding


def _at_least_one(sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"{name} must be at least 1: got {size}.")


def _heads_divide(width: int, heads: int) -> None:
    if width % heads:
        fits = [h for h in range(1, width + 1) if width % h == 0 and h <= 2 * heads]
        raise UsageError(
            f"heads must divide width (each head gets width / heads channels): "
            f"got width={width}, heads={heads}. Use {_listed(fits)} heads."
        )


def _probability(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise UsageError(f"dropout is a probability in [0, 1): got {dropout}.")


def _spatial(network: str, shape: tuple[int, ...], most: int | None) -> None:
    many = most is not None and len(shape) > most + 1
    if len(shape) < 2 or min(shape) < 1 or many:
        axes = "at least one spatial axis" if most is None else f"1 to {most} spatial axes"
        instead = "a DiT (dit-s/2) for more axes" if many else "an MLP (mlp-256x4) for vectors"
        raise UsageError(
            f"{network} takes data of shape (channels, *space) with {axes}, all sizes at least 1: got {shape}. "
            f"Use {instead}."
        )


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape[1:])


def _listed(numbers: list[int]) -> str:
    *first, last = (str(number) for number in numbers)
    return f"{', '.join(first)} or {last}" if first else last


@dataclass(frozen=True)
class DiTConfig:
    """A DiT. `dropout` acts on the outputs of the attention and the MLP branch of each block (paper: 0.05).

    `checkpoint` keeps only each block's input for the backward and computes the block again there.
    """

    width: int
    depth: int
    heads: int
    patch: int = 2
    mlp_ratio: int = 4
    dropout: float = 0.05
    checkpoint: bool = False

    def __post_init__(self) -> None:
        _at_least_one({"width": self.width, "depth": self.depth, "heads": self.heads})
        _at_least_one({"patch": self.patch, "mlp_ratio": self.mlp_ratio})
        _heads_divide(self.width, self.heads)
        _probability(self.dropout)

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse data that this network cannot take."""
        _spatial("a DiT", shape, most=None)
        if any(size % self.patch for size in shape[1:]):
            fits = [p for p in range(1, min(shape[1:]) + 1) if all(size % p == 0 for size in shape[1:])]
            raise UsageError(
                f"a DiT with patch {self.patch} needs every spatial size to be a multiple of {self.patch}: "
                f"got {_sizes(shape)}. Use a patch of {_listed(fits)}, or crop or pad the data."
            )
        axes = len(shape) - 1
        if self.width < 2 * axes:
            raise UsageError(
                f"positions on {axes} axes need a width of at least {2 * axes}, a sine and a cosine each: "
                f"got width={self.width}."
            )

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """How many patches lie along each spatial axis."""
        return tuple(size // self.patch for size in shape[1:])


@dataclass(frozen=True)
class UNetConfig:
    """VDM's U-Net: `levels` blocks down, as many and one up, all at full resolution. Paper: 128 or 256 wide, 32 levels.

    `coarser` are the widths at further resolutions, each half of the one before and with as many levels: there every
    block is followed by attention. Far cheaper, good for samples; the paper has none, which is better for likelihoods.
    `checkpoint` keeps only each block's input for the backward and computes the block again there.
    """

    width: int
    levels: int = 32
    heads: int = 1
    dropout: float = 0.1
    checkpoint: bool = False
    coarser: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _at_least_one({"levels": self.levels, "heads": self.heads})
        for width in self.widths:
            _at_least_one({"width": width})
            _heads_divide(width, self.heads)
        _probability(self.dropout)

    @property
    def widths(self) -> tuple[int, ...]:
        """Of all resolutions, the data's own first."""
        return (self.width, *self.coarser)

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse data that this network cannot take."""
        _spatial("a U-Net", shape, most=3)
        halvings = len(self.coarser)
        if any(size % 2**halvings for size in shape[1:]):
            most = min((size & -size).bit_length() - 1 for size in shape[1:])
            raise UsageError(
                f"a U-Net at {halvings + 1} resolutions needs every spatial size to be a multiple of {2**halvings}: "
                f"got {_sizes(shape)}. Use at most {most + 1}, or crop or pad the data."
            )

    def spaces(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The spatial sizes at all resolutions."""
        return tuple(tuple(size >> i for size in shape[1:]) for i in range(len(self.widths)))


@dataclass(frozen=True)
class MLPConfig:
    """A residual MLP on the flattened data, for vectors."""

    width: int = 256
    depth: int = 4
    mlp_ratio: int = 4
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _at_least_one({"width": self.width, "depth": self.depth, "mlp_ratio": self.mlp_ratio})
        _probability(self.dropout)

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse data that this network cannot take."""
        if not shape or min(shape) < 1:
            raise UsageError(f"an MLP takes data of shape (n,) or more axes, all at least 1: got {shape}.")


BackboneConfig = DiTConfig | UNetConfig | MLPConfig

# Published sizes; `mini` is ours, for studies (10M parameters).
DIT_SIZES = {
    "mini": DiTConfig(width=256, depth=8, heads=4),
    "s": DiTConfig(width=384, depth=12, heads=6),
    "b": DiTConfig(width=768, depth=12, heads=12),
    "l": DiTConfig(width=1024, depth=24, heads=16),
    "xl": DiTConfig(width=1152, depth=28, heads=16),
}

KNOWN_NAMES = (
    *(f"dit-{size}/{patch}" for size in DIT_SIZES for patch in (2, 4, 8)),
    "unet-128x32",
    "unet-256x32",
    "unet-128-256-256x2",
    "mlp-256x4",
)


def resolve(name: str) -> BackboneConfig:
    """The config a name stands for.

    >>> resolve("dit-l/2")
    DiTConfig(width=1024, depth=24, heads=16, patch=2, mlp_ratio=4, dropout=0.05, checkpoint=False)
    """
    lowered = name.lower()
    if (match := re.fullmatch(r"dit-([a-z]+)/(\d+)", lowered)) and match[1] in DIT_SIZES:
        return replace(DIT_SIZES[match[1]], patch=int(match[2]))
    if match := re.fullmatch(r"unet-(\d+)((?:-\d+)*)x(\d+)", lowered):
        coarser = tuple(int(width) for width in match[2].split("-")[1:])
        return UNetConfig(width=int(match[1]), levels=int(match[3]), coarser=coarser)
    if match := re.fullmatch(r"mlp-(\d+)x(\d+)", lowered):
        return MLPConfig(width=int(match[1]), depth=int(match[2]))
    nearest = get_close_matches(lowered, KNOWN_NAMES, n=1, cutoff=0.0)[0]
    raise UsageError(
        f"unknown backbone {name!r}. Did you mean {nearest!r}? Known: {', '.join(KNOWN_NAMES)}; "
        "widths, levels, depths and patches may be other numbers."
    )


def fourier_exponents(bins_count: int | None) -> range:
    """The exponents i of the Fourier features sin(2^i pi u), cos(2^i pi u); none for continuous data.

    256 bins on [-1, 1] are 2^-7 wide, and the paper's i = 6, 7, 8 have periods of 4, 2 and 1 bins. Another count keeps
    periods of about 4, 2 and 1 bins: the range moves by log2(count / 256), rounded to the nearest integer.
    """
    if bins_count is None:
        return range(0)
    if bins_count < 2:
        raise UsageError(f"bins_count must be at least 2: got {bins_count}. Use None for continuous data.")
    shift = round(math.log2(bins_count / 256))
    return range(6 + shift, 9 + shift)


def input_channels(channels: int, bins_count: int | None) -> int:
    """Channels after the Fourier features: n become 7n."""
    return channels * (1 + 2 * len(fourier_exponents(bins_count)))
