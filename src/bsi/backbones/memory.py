"""The memory of a network in closed form, and the number of images that fit at a time. Imports no torch.

A training step with float32 weights takes, in bytes for P parameters,

    4 P  weights          8 P  Adam's two moments          4 P  for each moving average          4 P  gradients

and, if it computes in 16 bits, 2 P of rounded weights. Muon has one moment for the M parameters of the matrices inside
the network, hence 8 P - 4 M. In addition, activations of every image are stored for the backward pass. In units of one
pass over a block's stream (tokens x width for a DiT; pixels x width for a U-Net, summed over its resolutions; width for
an MLP), a block stores

| form | DiT | U-Net, a level down and up | MLP |
|---|---|---|---|
| plain, by autograd | 21.3 | 28.1 (14.6 in float32) | 16.1 |
| compiled | 11.3 | 6.1 | 9.1 |
| fused | 18.1 | 9.1 | |
| lean | 12.1 | 4.1 | |
| checkpoint: the block's input | 1.1 | 2 | |

A fused DiT block stores the stream, h and the branch of both half-blocks, q, k, v and the attention's output, and
GELU's argument and output; the lean form stores neither h nor GELU's output. A U-Net's block stores its input, the
input of its second norm and, unless lean, the inputs of both convolutions. The numbers of the other forms are checked
by a test that counts the tensors saved by autograd. Attention after a block of a U-Net stores 6.1 passes, 7.1 in the
plain form with 16 bits, 5.1 compiled, and none if its block is recomputed.

The backward pass of one block needs about as much additional memory as autograd would store for that block (11 for a
fused DiT; 18 for a U-Net in every form). The peak is at the start of the backward pass: gradients then take the memory
that activations free, so the larger of the two counts. With several ranks, DDP's buckets hold the gradients from the
start. Muon orthogonalizes all matrices of one shape at once, when activations are freed and gradients exist. It takes 7
to 9 times their bytes, or 5 to 6 on a GPU, where it computes in 16 bits; square matrices take the most. This matters
when few images fit.

Measured on an H200 in bfloat16, without the driver's own memory, and in brackets this estimate: DiT-L/2 compiled 26.7
GiB at batch 128 (26.8), fused 63 GiB at batch 256 (65.4); U-Net 128 x 32 at batch 128 fused 10.5 GiB (11.2), lean 5.3
(5.8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bsi.backbones.config import BackboneConfig, DiTConfig, MLPConfig, UNetConfig, cost, inner_matrices, input_channels

__all__ = ["CONTEXT", "Form", "Memory", "OptimizerKind", "evaluation_memory", "training_memory"]

Form = Literal["plain", "compiled", "fused", "lean"]
OptimizerKind = Literal["adamw", "muon"]

CONTEXT = 1 << 30  # the driver, workspaces of libraries, and memory that the allocator cannot use
SLACK = 1.03  # small tensors, and rounding up to pages


@dataclass(frozen=True)
class Memory:
    """An estimate in bytes.

    Attributes:
        state: Weights, moments and averages.
        gradients: Gradients of all weights.
        update: Memory of the optimizer's update in addition to the gradients.
        per_image: Activations for each image in a forward and backward pass.
    """

    state: int
    gradients: int
    update: int
    per_image: int

    def bytes(self, images: int, ranks: int = 1) -> int:
        """The peak, with this number of images at a time on each rank."""
        backward = images * self.per_image + (self.gradients if ranks > 1 else 0)
        return CONTEXT + round(SLACK * (self.state + max(backward, self.gradients + self.update)))

    def largest(self, available: int, ranks: int = 1) -> int:
        """The number of images at a time that fit into `available` bytes; 0 if none fits."""
        if self.bytes(1, ranks) > available:
            return 0
        shared = self.gradients if ranks > 1 else 0
        return int(((available - CONTEXT) / SLACK - self.state - shared) // max(1, self.per_image))


def training_memory(
    config: BackboneConfig,
    shape: tuple[int, ...],
    bins_count: int | None = None,
    num_classes: int = 0,
    form: Form = "compiled",
    half: bool = True,
    averages: int = 1,
    optimizer: OptimizerKind = "adamw",
) -> Memory:
    """The memory of a training step of `build(config, shape, bins_count, num_classes)`.

    Args:
        form: The form in which the network is computed (`bsi.backbones.acceleration.form_of`).
        half: Whether it computes in 16 bits.
        averages: The number of moving averages of the weights.
        optimizer: Which optimizer updates the weights.
    """
    parameters = cost(config, shape, bins_count, num_classes).parameters
    matrices = inner_matrices(config, shape) if optimizer == "muon" else {}
    moments = 2 * parameters - sum(rows * columns * count for (rows, columns), count in matrices.items())
    size = 2 if half else 4
    unit, features = _unit(config, shape) * size, _features(shape, bins_count) * size
    kept = _kept(config, shape, form, half)
    return Memory(
        state=parameters * (4 + 4 * averages + (2 if half else 0)) + 4 * moments,
        gradients=4 * parameters,
        update=max((_orthogonalizing(*matrix, count, half) for matrix, count in matrices.items()), default=0),
        per_image=round(unit * (kept.blocks + kept.ends + kept.working)) + features,
    )


def evaluation_memory(
    config: BackboneConfig,
    shape: tuple[int, ...],
    bins_count: int | None = None,
    num_classes: int = 0,
    half: bool = True,
) -> Memory:
    """The memory of an evaluation without gradients: that of one block at a time, and of a U-Net's skips."""
    parameters = cost(config, shape, bins_count, num_classes).parameters
    size = 2 if half else 4
    kept = _kept(config, shape, "compiled", half)
    skips = config.levels + 1 if isinstance(config, UNetConfig) else 0
    work = round(_unit(config, shape) * size * (kept.working + skips)) + _features(shape, bins_count) * size
    return Memory(
        state=parameters * (6 if half else 4),
        gradients=0,
        update=0,
        per_image=work + 8 * 4 * math.prod(shape),  # data, noise, latents and predictions around it are float32
    )


def _orthogonalizing(rows: int, columns: int, count: int, half: bool) -> int:
    """Memory of Muon's update for `count` matrices of one shape: copies of them and of their Gram matrices, and at most
    as much again for the previous shape."""
    squares = min(rows, columns) / max(rows, columns)
    return round(4 * rows * columns * count * (5 + squares if half else 7 + 2 * squares))


@dataclass(frozen=True)
class _Kept:
    """Passes over the stream: stored by all blocks, stored before and after them, and needed by the current block."""

    blocks: float
    ends: float
    working: float


DIT: dict[Form, float] = {"plain": 21.3, "compiled": 11.3, "fused": 18.1, "lean": 12.1}
UNET: dict[Form, tuple[float, float, float]] = {  # a level down and up, the ends, attention after a block
    "plain": (28.1, 51.0, 7.1), "compiled": (6.1, 14.9, 5.1), "fused": (9.1, 21.2, 6.1), "lean": (4.1, 14.2, 6.1),
}  # fmt: skip


def _kept(config: BackboneConfig, shape: tuple[int, ...], form: Form, half: bool) -> _Kept:
    plain = form == "plain"
    match config:
        case DiTConfig(depth=depth):
            blocks = depth * (1.1 if config.checkpoint else DIT[form])
            return _Kept(blocks, 3.3 if plain else 1.3, 11.0 if form in ("fused", "lean") else DIT["plain"])
        case UNetConfig(levels=levels):
            pair, ends, attention = UNET[form] if half or not plain else (14.6, 30.0, 6.1)
            if config.checkpoint:  # every block's input and skip, and the middle's attention
                pair, ends, attention = 2.0, 15.9, 0.0
            return _Kept(levels * pair + (2 * levels + 1) * attention * _attending(config, shape), ends, 18.0)
        case MLPConfig(depth=depth):
            return _Kept(depth * (16.1 if plain else 9.1), 3.3, 16.1)


def _unit(config: BackboneConfig, shape: tuple[int, ...]) -> int:
    """The number of elements of one pass over the stream of one image."""
    match config:
        case DiTConfig(width=width):
            return math.prod(config.grid(shape)) * width
        case UNetConfig():
            spaces = config.spaces(shape)
            return sum(math.prod(space) * width for space, width in zip(spaces, config.widths, strict=True))
        case MLPConfig(width=width):
            return width


def _attending(config: UNetConfig, shape: tuple[int, ...]) -> float:
    """The share of a U-Net's stream at coarser resolutions."""
    return 1 - math.prod(shape[1:]) * config.width / _unit(config, shape)


def _features(shape: tuple[int, ...], bins_count: int | None) -> int:
    """The number of elements of one image with its Fourier features."""
    return input_channels(shape[0], bins_count) * math.prod(shape[1:])
