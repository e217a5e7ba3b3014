"""Sizes of networks, the names by which recipes and the command line refer to them, and their cost in closed form.

A config is a frozen dataclass that imports no torch, so that a recipe can hold it, a JSON file can store it, and
invalid sizes raise an error before memory is allocated. The data's properties are given to `build`: the shape, the
number of bins (which sets the Fourier features) and the number of classes.

| name | network |
|---|---|
| `dit-l/2` | DiT of size s, b, l, xl or mini with patches of 2 (4, 8, ...) per axis; the paper has L/2 and L/4 |
| `unet-128x32` | VDM's U-Net of width 128 with 32 levels (CIFAR-10 in the paper; 256 wide for ImageNet32) |
| `unet-128-256-256x2` | the same at three resolutions, each half of the previous one, with 2 levels at each |
| `mlp-256x4` | residual MLP of width 256 with 4 blocks, for vectors |
"""

import math
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise

from bsi.errors import UsageError

PRECISION_DIM = 32  # section "Architecture": t becomes a 32-dimensional precision embedding

# Bounds on sizes, far beyond any network that can be trained. `build` also compares the weights with the memory.
LARGEST = {
    "width": 1 << 16,
    "depth": 1 << 12,
    "levels": 1 << 12,
    "heads": 1 << 12,
    "patch": 1 << 12,
    "mlp_ratio": 1 << 8,
}


def _check_sizes(width: int, heads: int = 1, dropout: float = 0.0, **sizes: int) -> None:
    for name, size in {"width": width, "heads": heads, **sizes}.items():
        if not 1 <= size <= LARGEST[name]:
            raise UsageError(f"{name} must be at least 1 and at most {LARGEST[name]}, got {size}.")
    if width % heads:
        fits = [h for h in range(1, width + 1) if width % h == 0 and h <= 2 * heads]
        raise UsageError(
            f"heads must divide width (each head gets width / heads channels), "
            f"got width={width}, heads={heads}. Use {_or(fits)} heads."
        )
    if not 0 <= dropout < 1:
        raise UsageError(f"dropout is a probability in [0, 1), got {dropout}.")


def _check_space(network: str, shape: tuple[int, ...], most: int | None) -> None:
    many = most is not None and len(shape) > most + 1
    if len(shape) < 2 or min(shape) < 1 or many:
        axes = "at least one spatial axis" if most is None else f"1 to {most} spatial axes"
        instead = (
            "a DiT (dit-s/2) for more axes"
            if many
            else "an MLP (mlp-256x4) for vectors; a series needs an axis of channels (data[:, None])"
        )
        raise UsageError(
            f"{network} takes data of shape (channels, *space) with {axes}, all sizes at least 1, got {shape}. "
            f"Use {instead}."
        )


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape[1:])


def _or(numbers: list[int]) -> str:
    *first, last = (str(number) for number in numbers)
    return f"{', '.join(first)} or {last}" if first else last


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
    """

    width: int
    depth: int
    heads: int
    patch: int = 2
    mlp_ratio: int = 4
    dropout: float = 0.05
    checkpoint: bool = False

    def __post_init__(self) -> None:
        sizes = {"depth": self.depth, "patch": self.patch, "mlp_ratio": self.mlp_ratio}
        _check_sizes(self.width, self.heads, self.dropout, **sizes)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise UsageError for data that this network cannot take."""
        _check_space("a DiT", shape, most=None)
        if any(size % self.patch for size in shape[1:]):
            common = math.gcd(*shape[1:])
            fits = [p for p in range(1, min(common, LARGEST["patch"]) + 1) if common % p == 0]
            raise UsageError(
                f"a DiT with patch {self.patch} needs every spatial size to be a multiple of {self.patch}, "
                f"got {_by(shape)}. Use a patch of {_or(fits)}, or crop or pad the data."
            )
        axes = len(shape) - 1
        if self.width < 2 * axes:
            raise UsageError(
                f"positions on {axes} axes need a width of at least {2 * axes}, a sine and a cosine each, "
                f"got width={self.width}."
            )

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
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
        checkpoint: Store only each block's input for the backward pass, and recompute the block there.
        coarser: Widths at further resolutions, each half of the previous one, with the same number of levels and with
            attention after every block. Networks with coarser resolutions are much cheaper and give good samples. The
            paper's networks have none, which gives better likelihoods.
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

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise UsageError for data that this network cannot take."""
        _check_space("a U-Net", shape, most=3)
        halvings = len(self.coarser)
        if any(size % 2**halvings for size in shape[1:]):
            most = min((size & -size).bit_length() - 1 for size in shape[1:])
            raise UsageError(
                f"a U-Net at {halvings + 1} resolutions needs every spatial size to be a multiple of {2**halvings}, "
                f"got {_by(shape)}. Use at most {most + 1}, or crop or pad the data."
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
        _check_sizes(self.width, dropout=self.dropout, depth=self.depth, mlp_ratio=self.mlp_ratio)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise UsageError for data that this network cannot take."""
        if not shape or min(shape) < 1:
            raise UsageError(f"an MLP takes data of shape (n,) or more axes, all at least 1, got {shape}.")


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
    """The config with this name.

    >>> resolve("dit-l/2")
    DiTConfig(width=1024, depth=24, heads=16, patch=2, mlp_ratio=4, dropout=0.05, checkpoint=False)
    """
    lowered = name.lower()
    if (match := re.fullmatch(r"dit-([a-z]+)/(\d{1,9})", lowered)) and match[1] in DIT_SIZES:
        return replace(DIT_SIZES[match[1]], patch=int(match[2]))
    if match := re.fullmatch(r"unet-(\d{1,9})((?:-\d{1,9}){0,16})x(\d{1,9})", lowered):
        coarser = tuple(int(width) for width in match[2].split("-")[1:])
        return UNetConfig(width=int(match[1]), levels=int(match[3]), coarser=coarser)
    if match := re.fullmatch(r"mlp-(\d{1,9})x(\d{1,9})", lowered):
        return MLPConfig(width=int(match[1]), depth=int(match[2]))
    nearest = get_close_matches(lowered[:99], KNOWN_NAMES, n=1, cutoff=0.0)[0]
    raise UsageError(
        f"unknown backbone {name[:99]!r}. Did you mean {nearest!r}? Known: {', '.join(KNOWN_NAMES)}; "
        "other widths, levels, depths and patches are possible."
    )


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


# ---- Cost in closed form: parameters, and floating-point operations of a forward pass of one image.
#
# The count includes matrix products, convolutions and attention, with two operations per multiply-add. Norms and
# activations are not counted, as is usual. A training step without checkpointing costs three times the forward pass.
#
#     DiT block, T tokens of width W:  2 T W^2 (3 + 1 + 2 mlp_ratio) + 4 T^2 W
#     U-Net block, P pixels, k = 3^dim: 2 P k (in W + W^2), and 2 P in W for the shortcut of an up block (in = 2W)
#     attention over P pixels:         8 P W^2 + 4 P^2 W; after every block at the coarser resolutions of a U-Net


@dataclass(frozen=True)
class Cost:
    """Parameters, and forward FLOPs per image (or other sample)."""

    parameters: int
    flops: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.parameters + other.parameters, self.flops + other.flops)

    def __mul__(self, times: int) -> "Cost":
        return Cost(self.parameters * times, self.flops * times)


def cost(
    config: BackboneConfig,
    shape: tuple[int, ...],
    bins_count: int | None = None,
    num_classes: int = 0,
    out_channels: int | None = None,
) -> Cost:
    """The cost of `build` with the same arguments, without building the network."""
    config.check(shape)
    channels, space = input_channels(shape[0], bins_count), shape[1:]
    outputs = shape[0] if out_channels is None else out_channels
    match config:
        case DiTConfig(width=width):
            tokens, pixels = math.prod(config.grid(shape)), config.patch ** len(space)
            block = _total(
                _linear(width, 3 * width, tokens),
                Cost(0, 4 * tokens**2 * width),
                _linear(width, width, tokens),
                _feed_forward(width, config.mlp_ratio, tokens),
            )
            return _total(
                _condition(width, num_classes),
                _linear(width, (6 * config.depth + 2) * width),
                _linear(channels * pixels, width, tokens),
                block * config.depth,
                _linear(width, outputs * pixels, tokens),
            )
        case MLPConfig(width=width):
            values = math.prod(space)
            return _total(
                _condition(width, num_classes),
                _linear(width, (3 * config.depth + 2) * width),
                _linear(channels * values, width),
                _feed_forward(width, config.mlp_ratio) * config.depth,
                _linear(width, outputs * values),
            )
        case UNetConfig(width=width, levels=levels):
            pixels, kernel = [math.prod(axes) for axes in config.spaces(shape)], 3 ** len(space)
            *_, (deepest, fewest) = sizes = list(zip(config.widths, pixels, strict=True))
            blocks = (
                _residual(w, w, kernel, p) * levels + _residual(2 * w, w, kernel, p) * (levels + 1) for w, p in sizes
            )
            between = (
                _convolution(w, v, kernel, q) + _convolution(v, w, kernel, p) + _attention(v, q) * (2 * levels + 1)
                for (w, p), (v, q) in pairwise(sizes)
            )
            return _total(
                _condition(4 * width, num_classes),
                _linear(4 * width, (2 * levels + 1) * sum(config.widths) + 2 * deepest, bias=False),
                _convolution(channels, width, kernel, pixels[0]),
                *blocks,
                *between,
                _residual(deepest, deepest, kernel, fewest) * 2,
                _attention(deepest, fewest),
                _norm(width),
                _convolution(width, outputs, kernel, pixels[0]),
            )


def _total(*parts: Cost) -> Cost:
    return sum(parts, Cost(0, 0))


def _linear(inputs: int, outputs: int, times: int = 1, bias: bool = True) -> Cost:
    return Cost(inputs * outputs + (outputs if bias else 0), 2 * inputs * outputs * times)


def _convolution(inputs: int, outputs: int, kernel: int, pixels: int) -> Cost:
    return Cost(kernel * inputs * outputs + outputs, 2 * kernel * inputs * outputs * pixels)


def _attention(width: int, pixels: int) -> Cost:
    projections = _linear(width, 3 * width, pixels) + _linear(width, width, pixels)
    return _norm(width) + projections + Cost(0, 4 * pixels**2 * width)


def _norm(channels: int) -> Cost:
    return Cost(2 * channels, 0)


def _feed_forward(width: int, ratio: int, times: int = 1) -> Cost:
    return _linear(width, ratio * width, times) + _linear(ratio * width, width, times)


def _condition(width: int, num_classes: int) -> Cost:
    labels = Cost((num_classes + 1) * width if num_classes else 0, 0)
    return _total(_linear(PRECISION_DIM, width), _linear(width, width), labels)


def _residual(inputs: int, width: int, kernel: int, pixels: int) -> Cost:
    shortcut = _linear(inputs, width, pixels) if inputs != width else Cost(0, 0)
    return _total(
        _norm(inputs),
        _convolution(inputs, width, kernel, pixels),
        _norm(width),
        _convolution(width, width, kernel, pixels),
        shortcut,
    )
