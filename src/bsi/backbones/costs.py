"""What a network costs, in closed form: parameters, operations, the memory of a training step, and many ranks.

Nothing here builds a network or imports torch.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from bsi.backbones.config import (
    PRECISION_DIM,
    AutoencoderConfig,
    BackboneConfig,
    DiTConfig,
    MLPConfig,
    Shape,
    UNetConfig,
    input_channels,
)

LARGE_LAYER = 1 << 20  # parameters of a layer outside the blocks that FSDP gathers on its own


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


@dataclass(frozen=True)
class Parts:
    """The parts of a network that FSDP gathers one at a time: its blocks, other large layers, and the rest."""

    blocks: list[Cost]
    layers: list[Cost]
    rest: Cost


def cost(
    config: BackboneConfig, shape: Shape, bins_count: int | None = None, num_classes: int = 0,
    out_channels: int | None = None,
) -> Cost:  # fmt: skip
    """The cost of `build` with the same arguments, without building the network."""
    found = parts(config, shape, bins_count, num_classes, out_channels)
    return sum([*found.blocks, *found.layers], found.rest)


def parts(
    config: BackboneConfig, shape: Shape, bins_count: int | None = None, num_classes: int = 0,
    out_channels: int | None = None,
) -> Parts:  # fmt: skip
    """The parts of `build` with the same arguments."""
    config.check(shape)
    if isinstance(config, AutoencoderConfig):
        return Parts([], [], _autoencoder(config, shape))
    inputs, outputs = input_channels(shape[0], bins_count), shape[0] if out_channels is None else out_channels
    if isinstance(config, UNetConfig):
        blocks, layers, rest = _unet(config, shape, inputs, outputs)
        condition = 4 * config.width
    else:
        blocks, layers, rest = _residual_network(config, shape, inputs, outputs)
        condition = config.width
    labels = Cost((num_classes + 1) * condition if num_classes else 0)
    rest += labels + _product(PRECISION_DIM, condition) + _product(condition, condition)
    large = [layer for layer in layers if layer.parameters > LARGE_LAYER]
    return Parts(blocks, large, sum((layer for layer in layers if layer not in large), rest))


def _residual_network(
    config: DiTConfig | MLPConfig, shape: Shape, inputs: int, outputs: int
) -> tuple[list[Cost], list[Cost], Cost]:
    """Blocks, single layers and the head, which is compiled with its norm."""
    width, hidden, tokens = config.width, config.mlp_ratio * config.width, math.prod(config.grid(shape))
    pixels = math.prod(shape[1:]) // tokens
    block, modulations, window = _product(width, hidden, tokens) + _product(hidden, width, tokens), 3, 1
    if isinstance(config, DiTConfig):
        block, modulations = block + _attention(width, tokens), 6
        window = config.kernel ** (len(shape) - 1)
    modulation = _product(width, (modulations * config.depth + 2) * width)
    embed = _product(inputs * pixels * window, width, tokens)
    return [block] * config.depth, [modulation, embed], _product(width, outputs * pixels, tokens)


def _unet(config: UNetConfig, shape: Shape, inputs: int, outputs: int) -> tuple[list[Cost], list[Cost], Cost]:
    kernel, levels, width = 3 ** (len(shape) - 1), config.levels, config.width
    sizes = list(zip(config.widths, config.pixels(shape), strict=True))
    (_, pixels), (deepest, fewest) = sizes[0], sizes[-1]
    blocks = [_residual(deepest, deepest, kernel, fewest)] * 2 + [_norm(deepest) + _attention(deepest, fewest)]
    for i, (w, p) in enumerate(sizes):
        attends = _norm(w) + _attention(w, p) if i else Cost(0)
        blocks += [_residual(w, w, kernel, p) + attends] * levels
        blocks += [_residual(2 * w, w, kernel, p) + attends] * (levels + 1)
    for (finer, more), (w, p) in pairwise(sizes):
        blocks += [_product(finer, w, p, kernel), _product(w, finer, more, kernel)]
    shifts = _product(4 * width, (2 * levels + 1) * sum(config.widths) + 2 * deepest, bias=False)
    ends = _product(inputs, width, pixels, kernel) + _norm(width) + _product(width, outputs, pixels, kernel)
    return blocks, [shifts], ends


def _autoencoder(config: AutoencoderConfig, shape: Shape) -> Cost:
    """Encoder and decoder have the same layers, but for the resolution of those that change it."""
    sizes = list(zip(config.widths, config.pixels(shape), strict=True))
    (width, pixels), (deepest, fewest) = sizes[0], sizes[-1]
    total = _product(4 * shape[0], width, pixels, 9) + _product(width, 4 * shape[0], pixels, 9) + _norm(width)
    total += _product(deepest, config.channels, fewest, 9) + _product(config.channels, deepest, fewest, 9)
    total += _norm(deepest)
    for w, p in sizes:
        total += _residual(w, w, 9, p) * (2 * config.blocks)
    for (finer, more), (w, p) in pairwise(sizes):
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
    """Two convolutions, each after a norm; a block that reads a skip has a shortcut."""
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
# x width of each resolution for a U-Net; width for an MLP. The backward pass of one block needs about as much
# additional memory as autograd would store for it. The peak is at the start of the backward pass, or at its end:
# gradients take the memory that activations free, so the larger of the two counts. With several ranks, DDP's buckets
# hold the gradients from the start.
#
# tests/backbones/test_memory_account.py has measurements on an H200.

Form = Literal["plain", "compiled", "fused", "lean"]
OptimizerKind = Literal["adamw", "muon"]

CONTEXT = 1 << 30  # not counted by torch: the driver, workspaces of libraries, and memory that nothing fits into
MUON_UPDATE = {DiTConfig: 5, UNetConfig: 11, MLPConfig: 7, AutoencoderConfig: 11}
DIT: dict[Form, tuple[float, float]] = {  # stored by a block, and the working memory of one; a block's input: 1.1
    "plain": (21.3, 21.3), "compiled": (11.3, 14.3), "fused": (18.1, 11.0), "lean": (12.1, 11.0),
}  # fmt: skip
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
        return CONTEXT + self.state + max(backward, self.gradients + self.update)

    def largest(self, available: int, ranks: int = 1) -> int:
        """The number of images at a time that fit into `available` bytes; 0 if none fits."""
        if self.bytes(1, ranks) > available:
            return 0
        fixed = CONTEXT + self.state + self.gathered + (self.gradients if ranks > 1 else 0)
        return (available - fixed) // max(1, self.per_image)


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
    state = parameters * (4 + 4 * averages + moments)
    if shards is None or isinstance(config, AutoencoderConfig):  # autoencoders are not sharded
        rounded = 2 * parameters if half else 0
        return Memory(state + rounded, 4 * parameters, update * parameters, per_image)
    found = parts(config, shape, bins_count, num_classes)
    size = 4 if isinstance(config, UNetConfig) else size  # the U-Net's norms stay in float32, and blocks with them
    block, layer = (max((c.parameters for c in costs), default=0) for costs in (found.blocks, found.layers))
    return Memory(
        state=state // shards,
        gradients=4 * parameters // (1 if accumulates else shards),
        # The backward pass of large layers comes last: there are no activations left.
        update=max(update * block, (2 * size + 4) * layer),
        per_image=per_image,
        # A block with its gradient, and that in float32 for the sum; the next one comes in a buffer that it is copied
        # from.
        gathered=(4 * size + 4) * block + 8 * found.rest.parameters,
    )


def _stored(config: BackboneConfig, shape: Shape, form: Form, half: bool) -> float:
    """Elements for each image: stored by all blocks, before and after them, and needed by the current block."""
    plain = form == "plain"
    match config:
        case DiTConfig(width=width, depth=depth):
            block, working = DIT[form]
            passes = depth * (1.1 if config.checkpoint else block) + (3.3 if plain else 1.3) + working
            return math.prod(config.grid(shape)) * width * passes
        case UNetConfig(levels=levels):
            pair, ends, attention = UNET[form] if half or not plain else (14.6, 30.0, 6.1)
            if config.checkpoint:  # every block's input and skip, and the middle's attention
                pair, ends, attention = 2.0, 15.9, 0.0
            sizes = [p * w for p, w in zip(config.pixels(shape), config.widths, strict=True)]
            blocks = sum(sizes) * levels * pair + sum(sizes[1:]) * (2 * levels + 1) * attention
            return blocks + max(sizes) * (ends + 18.0)
        case AutoencoderConfig(blocks=blocks):
            stream = sum(p * w for p, w in zip(config.pixels(shape), config.widths, strict=True))
            return stream * ((16.1 if plain else 6.1) * 2 * blocks + 20.0)
        case MLPConfig(width=width, depth=depth):
            return width * (depth * (16.1 if plain else 9.1) + 3.3 + 16.1)


# ---- Many ranks. FSDP gathers the parameters of a part for its forward pass and again for its backward pass, and sums
# its gradients. Of n bytes that are gathered or scattered among N ranks, each rank sends n (N - 1) / N; a sum that all
# ranks get takes both. So a step of P parameters in `size` bytes sends
#
#     (S - 1) / S x (2 size P x pieces + 4 P) among S shards, and 2 (C - 1) / C x 4 P / S among their C copies,
#
# with S = 1 for ddp, C = 1 for fsdp, and the ranks of a host as S for hsdp. DDP communicates during the backward pass,
# two thirds of the computation; FSDP during all of it.

Parallel = Literal["ddp", "fsdp", "hsdp"]

UPDATE_BYTES = 44  # per parameter: moved by AdamW, clipping and one average
UPDATE_GB_PER_S = 4000  # of an H200's memory


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

    gib_per_rank: float
    gib_gathered_in_evaluations: float  # weights on each rank, in addition to the state of training
    gb_sent_per_step: float
    communication_ms: float
    computation_ms: float
    update_ms: float
    step_ms: float
    predicted_images_per_s: float


def predict(
    config: BackboneConfig, shape: Shape, cluster: Cluster, batch: int, parallel: Parallel, accumulation: int = 1,
    bins_count: int | None = None, num_classes: int = 0, averages: int = 1, optimizer: OptimizerKind = "adamw",
) -> Prediction:  # fmt: skip
    """The memory, communication and time of a training step in bfloat16."""
    costs, ranks = cost(config, shape, bins_count, num_classes), cluster.ranks
    shards = {"ddp": 1, "fsdp": ranks, "hsdp": min(ranks, cluster.local)}[parallel]
    sharded, copies, images = parallel != "ddp", ranks // shards, batch // ranks
    memory = training_memory(
        config, shape, bins_count, num_classes, averages=averages, optimizer=optimizer,
        shards=shards if sharded else None, accumulates=accumulation > 1,
    )  # fmt: skip
    size, gradients = 4 if isinstance(config, UNetConfig) else 2, 4 * costs.parameters
    gathered = 2 * size * costs.parameters * accumulation + gradients  # and scattered, among the shards
    sent = (shards - 1) / shards * gathered, 2 * (copies - 1) / copies * gradients / shards
    far = shards > cluster.local, ranks > cluster.local  # beyond a host
    speeds = (cluster.network_gb_per_s if beyond else cluster.host_gb_per_s for beyond in far)
    communication = sum(n / (1e9 * speed) for n, speed in zip(sent, speeds, strict=True))
    forward = costs.flops * images / (1e12 * cluster.tflops)
    computation = forward * (4 if getattr(config, "checkpoint", False) else 3)
    update = UPDATE_BYTES * costs.parameters / shards / (1e9 * UPDATE_GB_PER_S)
    exposed = communication - (computation if sharded else computation - forward)
    step = computation + max(0.0, exposed) + update
    return Prediction(
        memory.bytes(-(-images // accumulation), ranks) / 2**30, (4 * costs.parameters if sharded else 0) / 2**30,
        sum(sent) / 1e9, 1e3 * communication, 1e3 * computation, 1e3 * update, 1e3 * step, batch / step,
    )  # fmt: skip
