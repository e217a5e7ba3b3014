"""The memory of a network in closed form, and the number of images that fit at a time. Imports no torch.

A training step with float32 weights takes, in bytes for P parameters,

    4 P  weights          8 P  Adam's two moments          4 P  for each moving average          4 P  gradients

and, if it computes in 16 bits, 2 P of rounded weights. Muon has one moment for matrices inside the network: at most 6 P
in all. Its update orthogonalizes all matrices of one shape at once, with copies of 5 P for a DiT, 7 P for an MLP and
11 P for a U-Net, and half as much again in float32, when activations are freed and gradients exist. These figures for
Muon are rounded up.

Activations of every image are stored for the backward pass. In units of one pass over a block's stream (tokens x width
for a DiT; pixels x width for a U-Net, summed over its resolutions; width for an MLP), a block stores

| form | DiT | U-Net, a level down and up | MLP |
|---|---|---|---|
| plain, by autograd | 21.3 | 28.1 (14.6 in float32) | 16.1 |
| compiled | 11.3 | 6.1 | 9.1 |
| fused | 18.1 | 9.1 | |
| lean | 12.1 | 4.1 | |
| checkpoint: the block's input | 1.1 | 2 | |

Attention after a block of a U-Net stores 6.1 passes, 7.1 in the plain form with 16 bits, 5.1 compiled, and none if its
block is recomputed. The backward pass of one block needs about as much additional memory as autograd would store for
that block (11 for a fused DiT; 18 for a U-Net). The peak is at the start of the backward pass: gradients then take the
memory that activations free, so the larger of the two counts. With several ranks, DDP's buckets hold the gradients from
the start.

Measured on an H200 in bfloat16, without the driver's own memory, and in brackets this estimate: DiT-L/2 compiled 26.7
GiB at batch 128 (26.8), fused 63 GiB at batch 256 (65.4); U-Net 128 x 32 at batch 128 fused 10.5 GiB (11.2), lean 5.3
(5.8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bsi.backbones.config import BackboneConfig, DiTConfig, MLPConfig, UNetConfig, cost, input_channels

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
    moments, update = (8, 0) if optimizer == "adamw" else (6, MUON_UPDATE[type(config)] * (2 if half else 3) // 2)
    size = 2 if half else 4
    features = input_channels(shape[0], bins_count) * math.prod(shape[1:])
    return Memory(
        state=parameters * (4 + 4 * averages + (2 if half else 0) + moments),
        gradients=4 * parameters,
        update=update * parameters,
        per_image=round(size * _unit(config, shape) * _passes(config, shape, form, half)) + size * features,
    )


MUON_UPDATE = {DiTConfig: 5, UNetConfig: 11, MLPConfig: 7}
DIT: dict[Form, float] = {"plain": 21.3, "compiled": 11.3, "fused": 18.1, "lean": 12.1}
UNET: dict[Form, tuple[float, float, float]] = {  # a level down and up, the ends, attention after a block
    "plain": (28.1, 51.0, 7.1), "compiled": (6.1, 14.9, 5.1), "fused": (9.1, 21.2, 6.1), "lean": (4.1, 14.2, 6.1),
}  # fmt: skip


def _passes(config: BackboneConfig, shape: tuple[int, ...], form: Form, half: bool) -> float:
    """Passes over the stream: stored by all blocks, stored before and after them, and needed by the current block."""
    plain = form == "plain"
    match config:
        case DiTConfig(depth=depth):
            working = 11.0 if form in ("fused", "lean") else DIT["plain"]
            return depth * (1.1 if config.checkpoint else DIT[form]) + (3.3 if plain else 1.3) + working
        case UNetConfig(levels=levels, width=width):
            pair, ends, attention = UNET[form] if half or not plain else (14.6, 30.0, 6.1)
            if config.checkpoint:  # every block's input and skip, and the middle's attention
                pair, ends, attention = 2.0, 15.9, 0.0
            coarser = 1 - math.prod(shape[1:]) * width / _unit(config, shape)  # their share of the stream
            return levels * pair + (2 * levels + 1) * attention * coarser + ends + 18.0
        case MLPConfig(depth=depth):
            return depth * (16.1 if plain else 9.1) + 3.3 + 16.1


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
