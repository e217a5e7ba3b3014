"""Networks in closed form: their sizes and names, parameters and operations, and the memory of a training step.

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

import itertools
import math
import re
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

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


@dataclass(frozen=True)
class Cost:
    """Parameters, and floating-point operations of a forward pass of one image (or other sample).

    There are two for each multiply-add of a product, convolution or attention. Norms and activations are not counted,
    as is usual. A training step without checkpointing costs three times the forward pass.
    """

    parameters: int
    flops: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.parameters + other.parameters, self.flops + other.flops)

    def __mul__(self, times: int) -> "Cost":
        return Cost(self.parameters * times, self.flops * times)


def cost(
    config: BackboneConfig, shape: Shape, bins_count: int | None = None, num_classes: int = 0,
    out_channels: int | None = None,
) -> Cost:  # fmt: skip
    """The cost of `build` with the same arguments, without building the network."""
    config.check(shape)
    if isinstance(config, AutoencoderConfig):
        return _autoencoder(config, shape)
    inputs, outputs = input_channels(shape[0], bins_count), shape[0] if out_channels is None else out_channels
    if isinstance(config, UNetConfig):
        width, network = 4 * config.width, _unet(config, shape, inputs, outputs)
    else:
        width, network = config.width, _blocks(config, shape, inputs, outputs)
    labels = Cost((num_classes + 1) * width if num_classes else 0)
    return network + labels + _product(PRECISION_DIM, width) + _product(width, width)


def _blocks(config: DiTConfig | MLPConfig, shape: Shape, inputs: int, outputs: int) -> Cost:
    width, tokens = config.width, math.prod(config.grid(shape))
    pixels = math.prod(shape[1:]) // tokens
    block, modulation = _block_and_modulation(config, tokens)
    ends = _product(inputs * pixels * _window(config, shape), width, tokens) + _product(width, outputs * pixels, tokens)
    return modulation + block * config.depth + ends


def _window(config: DiTConfig | MLPConfig, shape: Shape) -> int:
    """The patches that a token's embedding reads."""
    return config.kernel ** (len(shape) - 1) if isinstance(config, DiTConfig) else 1


def _block_and_modulation(config: DiTConfig | MLPConfig, tokens: int) -> tuple[Cost, Cost]:
    width, hidden = config.width, config.mlp_ratio * config.width
    block, modulations = _product(width, hidden, tokens) + _product(hidden, width, tokens), 3
    if isinstance(config, DiTConfig):
        block, modulations = block + _attention(width, tokens), 6
    return block, _product(width, (modulations * config.depth + 2) * width)


def _unet(config: UNetConfig, shape: Shape, inputs: int, outputs: int) -> Cost:
    kernel, levels, width = 3 ** (len(shape) - 1), config.levels, config.width
    sizes = list(zip(config.widths, config.pixels(shape), strict=True))
    (_, pixels), (deepest, fewest) = sizes[0], sizes[-1]
    total = _product(4 * width, (2 * levels + 1) * sum(config.widths) + 2 * deepest, bias=False)
    total += _product(inputs, width, pixels, kernel) + _norm(width) + _product(width, outputs, pixels, kernel)
    total += _residual(deepest, deepest, kernel, fewest) * 2 + _norm(deepest) + _attention(deepest, fewest)
    for w, p in sizes:
        total += _residual(w, w, kernel, p) * levels + _residual(2 * w, w, kernel, p) * (levels + 1)
    for (finer, more), (w, p) in itertools.pairwise(sizes):
        total += _product(finer, w, p, kernel) + _product(w, finer, more, kernel)
        total += (_norm(w) + _attention(w, p)) * (2 * levels + 1)
    return total


def _autoencoder(config: AutoencoderConfig, shape: Shape) -> Cost:
    """Encoder and decoder have the same layers, but for the resolution of those that change it."""
    sizes = list(zip(config.widths, config.pixels(shape), strict=True))
    (width, pixels), (deepest, fewest) = sizes[0], sizes[-1]
    total = _product(4 * shape[0], width, pixels, 9) + _product(width, 4 * shape[0], pixels, 9) + _norm(width)
    total += _product(deepest, config.channels, fewest, 9) + _product(config.channels, deepest, fewest, 9)
    total += _norm(deepest)
    for w, p in sizes:
        total += (_norm(w) * 2 + _product(w, w, p, 9) * 2) * (2 * config.blocks)
    for (finer, more), (w, p) in itertools.pairwise(sizes):
        total += _product(finer, w, p, 9) + _product(w, finer, more, 9)
    return total


def _product(inputs: int, outputs: int, times: int = 1, kernel: int = 1, bias: bool = True) -> Cost:
    """A linear layer, or a convolution with a kernel of some pixels, at `times` tokens or pixels."""
    weights = kernel * inputs * outputs
    return Cost(weights + (outputs if bias else 0), 2 * weights * times)


def _attention(width: int, tokens: int) -> Cost:
    products = _product(width, 3 * width, tokens) + _product(width, width, tokens)
    return products + Cost(0, 4 * tokens**2 * width)


def _norm(channels: int) -> Cost:
    return Cost(2 * channels)


def _residual(inputs: int, width: int, kernel: int, pixels: int) -> Cost:
    """A block of a U-Net; one that reads a skip has a shortcut."""
    convolutions = _product(inputs, width, pixels, kernel) + _product(width, width, pixels, kernel)
    shortcut = _product(inputs, width, pixels) if inputs != width else Cost(0)
    return _norm(inputs) + _norm(width) + convolutions + shortcut


# ---- Memory of a training step. With float32 weights it takes, in bytes for P parameters,
#
#     4 P  weights          8 P  Adam's two moments          4 P  for each moving average          4 P  gradients
#
# and, if it computes in 16 bits, 2 P of rounded weights. Muon has one moment for matrices inside the network: at most
# 6 P in all. Its update orthogonalizes all matrices of one shape at once, when activations are freed and gradients
# exist; the copies in MUON_UPDATE are half as large again in float32.
#
# The unit of the tables of stored activations is one pass over the stream of a block: tokens x width for a DiT; pixels
# x width for a U-Net, summed over its resolutions; width for an MLP. The backward pass of one block needs about as much
# additional memory as autograd would store for it. The peak is at the start of the backward pass: gradients then take
# the memory that activations free, so the larger of the two counts. With several ranks, DDP's buckets hold the
# gradients from the start.
#
# Measured on an H200 in bfloat16, without the driver's own memory, and in brackets this estimate: DiT-L/2 compiled 26.7
# GiB at batch 128 (26.8), fused 63 GiB at batch 256 (65.4); U-Net 128 x 32 at batch 128 fused 10.5 GiB (11.2), lean 5.3
# (5.8).

Form = Literal["plain", "compiled", "fused", "lean"]
OptimizerKind = Literal["adamw", "muon"]

CONTEXT = 1 << 30  # the driver, workspaces of libraries, and memory that the allocator cannot use
SLACK = 1.03  # small tensors, and rounding up to pages
MUON_UPDATE = {DiTConfig: 5, UNetConfig: 11, MLPConfig: 7, AutoencoderConfig: 11}
DIT: dict[Form, float] = {"plain": 21.3, "compiled": 11.3, "fused": 18.1, "lean": 12.1}  # a block; its input: 1.1
UNET: dict[Form, tuple[float, float, float]] = {  # a level down and up, the ends, attention after a block
    "plain": (28.1, 51.0, 7.1), "compiled": (6.1, 14.9, 5.1), "fused": (9.1, 21.2, 6.1), "lean": (4.1, 14.2, 6.1),
}  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """An estimate in bytes."""

    state: int  # weights, moments and averages
    gradients: int
    update: int  # the optimizer's update, in addition to the gradients
    per_image: int  # activations in a forward and backward pass
    gathered: int = 0  # with FSDP, the parts of the network that are gathered at a time, and their gradients

    def bytes(self, images: int, ranks: int = 1) -> int:
        """The peak, with this number of images at a time on each rank."""
        backward = images * self.per_image + self.gathered + (self.gradients if ranks > 1 else 0)
        return CONTEXT + round(SLACK * (self.state + max(backward, self.gradients + self.update)))

    def largest(self, available: int, ranks: int = 1) -> int:
        """The number of images at a time that fit into `available` bytes; 0 if none fits."""
        if self.bytes(1, ranks) > available:
            return 0
        shared = self.gathered + (self.gradients if ranks > 1 else 0)
        return int(((available - CONTEXT) / SLACK - self.state - shared) // max(1, self.per_image))


def training_memory(
    config: BackboneConfig, shape: Shape, bins_count: int | None = None, num_classes: int = 0,
    form: Form = "compiled", half: bool = True, averages: int = 1, optimizer: OptimizerKind = "adamw",
    shards: int | None = None, accumulates: bool = False,
) -> Memory:  # fmt: skip
    """The memory of a training step of `build(config, shape, bins_count, num_classes)`.

    The network is computed in one of the forms of acceleration.py, `half` in 16 bits, with a number of moving averages.
    With FSDP it has `shards`, and a rank that `accumulates` several pieces keeps whole gradients between them.
    """
    parameters = cost(config, shape, bins_count, num_classes).parameters
    moments, update = (8, 0) if optimizer == "adamw" else (6, MUON_UPDATE[type(config)] * (2 if half else 3) // 2)
    size = 2 if half else 4
    features = input_channels(shape[0], bins_count) * math.prod(shape[1:])
    per_image = round(size * _stored(config, shape, form, half)) + size * features
    if shards is None or isinstance(config, AutoencoderConfig):  # autoencoders are not sharded
        state = parameters * (4 + 4 * averages + (2 if half else 0) + moments)
        return Memory(state, gradients=4 * parameters, update=update * parameters, per_image=per_image)
    parts = units(config, shape, bins_count, num_classes)
    size = 4 if isinstance(config, UNetConfig) else size  # the U-Net's norms stay in float32, and blocks with them
    # A part with its gradient, and that in float32 for the sum; the next block comes in a buffer from which it is
    # copied. The backward pass of large layers comes last: there are no activations left.
    block, layer = max(parts.blocks), max(parts.layers, default=0)
    return Memory(
        state=parameters * (4 + 4 * averages + moments) // shards,
        gradients=4 * parameters // (1 if accumulates else shards),
        update=max(update * block, (2 * size + 4) * layer),
        per_image=per_image,
        gathered=(4 * size + 4) * block + 8 * parts.rest,
    )


def _stored(config: BackboneConfig, shape: Shape, form: Form, half: bool) -> float:
    """Elements for each image: stored by all blocks, before and after them, and needed by the current block."""
    plain = form == "plain"
    match config:
        case DiTConfig(width=width, depth=depth):
            working = 11.0 if form in ("fused", "lean") else DIT["plain"]
            passes = depth * (1.1 if config.checkpoint else DIT[form]) + (3.3 if plain else 1.3) + working
            return math.prod(config.grid(shape)) * width * passes
        case UNetConfig(levels=levels, width=width):
            pair, ends, attention = UNET[form] if half or not plain else (14.6, 30.0, 6.1)
            if config.checkpoint:  # every block's input and skip, and the middle's attention
                pair, ends, attention = 2.0, 15.9, 0.0
            stream = sum(p * w for p, w in zip(config.pixels(shape), config.widths, strict=True))
            coarser = 1 - math.prod(shape[1:]) * width / stream  # their share of the stream
            return stream * (levels * pair + (2 * levels + 1) * attention * coarser + ends + 18.0)
        case AutoencoderConfig(blocks=blocks):
            stream = sum(p * w for p, w in zip(config.pixels(shape), config.widths, strict=True))
            return stream * ((16.1 if plain else 6.1) * 2 * blocks + 20.0)
        case MLPConfig(width=width, depth=depth):
            return width * (depth * (16.1 if plain else 9.1) + 3.3 + 16.1)


# ---- Many ranks. FSDP gathers the parameters of a unit for its forward pass and again for its backward pass, and sums
# its gradients. Of n bytes that are gathered or scattered among N ranks, each rank sends n (N - 1) / N; a sum that all
# ranks get takes both. So a step of P parameters in `size` bytes sends
#
#     ddp     2 (N - 1) / N x 4 P
#     fsdp    (N - 1) / N x (2 size P x pieces + 4 P)
#     hsdp    the same among the S ranks of a host, and 2 (H - 1) / H x 4 P / S between its H hosts.
#
# DDP communicates during the backward pass, two thirds of the computation; FSDP during all of it.

Parallel = Literal["ddp", "fsdp", "hsdp"]

LARGE_LAYER = 1 << 20  # parameters of a layer outside the blocks that FSDP gathers on its own
UPDATE_BYTES = 44  # per parameter: moved by AdamW, clipping and one average
UPDATE_GB_PER_S = 4000  # of an H200's memory


@dataclass(frozen=True)
class Units:
    """The parameters of the parts that FSDP gathers one at a time."""

    blocks: list[int]
    layers: list[int]
    rest: int


def units(
    config: DiTConfig | UNetConfig | MLPConfig, shape: Shape, bins_count: int | None = None, num_classes: int = 0
) -> Units:
    """The parts of `build` with the same arguments that FSDP gathers one at a time."""
    if isinstance(config, UNetConfig):
        kernel, levels, deepest = 3 ** (len(shape) - 1), config.levels, config.widths[-1]
        blocks = [_residual(deepest, deepest, kernel, 1)] * 2 + [_norm(deepest) + _attention(deepest, 1)]
        for i, w in enumerate(config.widths):
            attends = _norm(w) + _attention(w, 1) if i else Cost(0)
            blocks += [_residual(w, w, kernel, 1) + attends] * levels
            blocks += [_residual(2 * w, w, kernel, 1) + attends] * (levels + 1)
        for finer, w in itertools.pairwise(config.widths):
            blocks += [_product(finer, w, 1, kernel), _product(w, finer, 1, kernel)]
        rows = (2 * levels + 1) * sum(config.widths) + 2 * deepest
        layers = [_product(4 * config.width, rows, bias=False)]
    else:
        block, modulation = _block_and_modulation(config, 1)
        pixels = math.prod(shape[1:]) // math.prod(config.grid(shape))
        inputs = input_channels(shape[0], bins_count) * pixels * _window(config, shape)
        layers = [modulation, _product(inputs, config.width)]
        blocks = [block] * config.depth
    inside = [block.parameters for block in blocks]
    large = [layer.parameters for layer in layers if layer.parameters > LARGE_LAYER]
    total = cost(config, shape, bins_count, num_classes).parameters
    return Units(inside, large, total - sum(inside) - sum(large))


@dataclass(frozen=True)
class Cluster:
    """The ranks of a run, and how fast they compute and communicate.

    Args:
        ranks: Number of GPUs.
        local: GPUs in a host.
        tflops: What a GPU reaches in the network's products, in TFLOP/s.
        host_gb_per_s: Bus bandwidth between the GPUs of a host, as all_reduce_perf of nccl-tests prints it.
        network_gb_per_s: The same between hosts.
    """

    ranks: int
    local: int = 8
    tflops: float = 400.0
    host_gb_per_s: float = 380.0
    network_gb_per_s: float = 340.0


@dataclass(frozen=True)
class Prediction:
    """A training step on a cluster, calculated."""

    memory_bytes: int
    gather_bytes: int  # weights that an evaluation gathers on each rank, in addition to the state of training
    sent_bytes: int
    communication_s: float
    computation_s: float
    update_s: float
    step_s: float
    images_per_s: float


def predict(
    config: BackboneConfig, shape: Shape, cluster: Cluster, batch: int, parallel: Parallel, accumulation: int = 1,
    bins_count: int | None = None, num_classes: int = 0, averages: int = 1, optimizer: OptimizerKind = "adamw",
) -> Prediction:  # fmt: skip
    """The memory, communication and time of a training step in bfloat16."""
    costs, ranks = cost(config, shape, bins_count, num_classes), cluster.ranks
    size, images = 4 if isinstance(config, UNetConfig) else 2, batch // ranks
    shards = {"ddp": None, "fsdp": ranks, "hsdp": min(ranks, cluster.local)}[parallel]
    memory = training_memory(
        config, shape, bins_count, num_classes, "compiled", True, averages, optimizer, shards, accumulation > 1
    )
    gradients, hosts = 4 * costs.parameters, -(-ranks // cluster.local)
    gathers = 0 if shards is None else 2 * size * costs.parameters * accumulation
    if parallel == "hsdp":
        assert shards is not None
        within = (shards - 1) / shards * (gathers + gradients)
        between = 2 * (hosts - 1) / hosts * gradients / shards
    else:
        sent = (ranks - 1) / ranks * (gathers + (gradients if shards else 2 * gradients))
        within, between = (sent, 0.0) if hosts == 1 else (0.0, sent)
    communication = within / (1e9 * cluster.host_gb_per_s) + between / (1e9 * cluster.network_gb_per_s)
    passes = 4 if getattr(config, "checkpoint", False) else 3
    forward = costs.flops * images / (1e12 * cluster.tflops)
    update = UPDATE_BYTES * costs.parameters / (shards or 1) / (1e9 * UPDATE_GB_PER_S)
    computation = passes * forward
    hidden = computation if shards else computation - forward
    step = computation + max(0.0, communication - hidden) + update
    return Prediction(
        memory.bytes(-(-images // accumulation), ranks), 0 if shards is None else 4 * costs.parameters,
        round(within + between), communication, computation, update, step, batch / step,
    )  # fmt: skip
