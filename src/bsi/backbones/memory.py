"""How much memory a network takes, in closed form, and hence how many images fit at a time. Imports no torch.

A training step in float32 weights holds, in bytes for P parameters,

    4 P  weights          8 P  Adam's two moments          4 P  for each moving average          4 P  gradients

and, where it computes in 16 bits, 2 P of rounded weights. Muon has one moment for its matrices, the M of P inside the
network: 8 P - 4 M. Beside that every image keeps for the backward pass what its gradients need. In units of one pass
over a block's stream (tokens x width for a DiT, pixels x width for a U-Net, summed over its resolutions, width for an
MLP), a block keeps

| form | DiT | U-Net, a level down and up | MLP |
|---|---|---|---|
| plain, by autograd | 21.3 | 28.1 (14.6 in float32) | 16.1 |
| compiled (compiled.py) | 11.3 | 6.1 | 9.1 |
| fused (fused.py, fused_unet.py) | 18.1 | 9.1 | |
| lean | 12.1 | 4.1 | |
| checkpoint: the block's input | 1.1 | 2 | |

Fused, a DiT block keeps stream, h and branch of both halves, q, k, v and their mixture, and GELU's argument and value;
lean, neither h nor GELU's value. A U-Net's blocks keep their input, the input of their second norm, and, unless lean,
of both convolutions. The other forms are counted by a test, from what autograd saves. Attention after a block of a
U-Net keeps 6.1, 7.1 plainly in 16 bits, 5.1 compiled, and nothing where its block is computed again.

While one block's backward runs it holds about as much again as autograd would keep of that block (11 where a DiT is
fused; for a U-Net 18 in every form). The peak is where the backward begins: gradients fill the room that activations
leave, so the larger of the two counts. With several ranks, DDP's buckets hold the gradients from the start. Muon turns
all matrices of one shape at once, with activations gone and gradients there: it takes 7 to 9 times their bytes, on a
GPU, where it turns them in 16 bits, 5 to 6, the more the squarer they are. That counts where few images fit.

Measured on an H200 in bfloat16, the driver's own left out: DiT-L/2 compiled 26.7 GiB at batch 128 (this account: 26.8),
fused 63 GiB at batch 256 (65.4); U-Net 128 x 32 at batch 128 fused 10.5 GiB (11.2), lean 5.3 (5.8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bsi.backbones.config import BackboneConfig, DiTConfig, MLPConfig, UNetConfig, input_channels
from bsi.backbones.cost import cost, inner_matrices

__all__ = ["CONTEXT", "Form", "Memory", "OptimizerKind", "evaluation_memory", "training_memory"]

Form = Literal["plain", "compiled", "fused", "lean"]
OptimizerKind = Literal["adamw", "muon"]

CONTEXT = 1 << 30  # the driver's own, the libraries' workspaces, and what an allocator cannot use
SLACK = 1.03  # small tensors, and rounding up to whole pages


@dataclass(frozen=True)
class Memory:
    """Bytes: of what is there in any case, of gradients, of what the update takes beside them, and for each image at a
    time."""

    state: int
    gradients: int
    update: int
    per_image: int

    def bytes(self, images: int, ranks: int = 1) -> int:
        """At the peak, with so many images at a time on each rank."""
        backward = images * self.per_image + (self.gradients if ranks > 1 else 0)
        return CONTEXT + round(SLACK * (self.state + max(backward, self.gradients + self.update)))

    def largest(self, room: int, ranks: int = 1) -> int:
        """How many images at a time fit into `room` bytes; 0 if none do."""
        if self.bytes(1, ranks) > room:
            return 0
        shared = self.gradients if ranks > 1 else 0
        return int(((room - CONTEXT) / SLACK - self.state - shared) // max(1, self.per_image))


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
    """Of a training step of `build(config, shape, bins_count, num_classes)`, with so many moving averages."""
    parameters = cost(config, shape, bins_count, num_classes).parameters
    turned = inner_matrices(config, shape) if optimizer == "muon" else {}
    moments = 2 * parameters - sum(rows * columns * count for (rows, columns), count in turned.items())
    size = 2 if half else 4
    unit, features = _unit(config, shape) * size, _features(shape, bins_count) * size
    kept = _kept(config, shape, form, half)
    return Memory(
        state=parameters * (4 + 4 * averages + (2 if half else 0)) + 4 * moments,
        gradients=4 * parameters,
        update=max((_turning(*matrix, count, half) for matrix, count in turned.items()), default=0),
        per_image=round(unit * (kept.blocks + kept.ends + kept.working)) + features,
    )


def evaluation_memory(
    config: BackboneConfig,
    shape: tuple[int, ...],
    bins_count: int | None = None,
    num_classes: int = 0,
    half: bool = True,
) -> Memory:
    """Of an evaluation without gradients: one block's work at a time, and a U-Net's skips."""
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


def _turning(rows: int, columns: int, count: int, half: bool) -> int:
    """What Muon takes to turn so many matrices of one shape: copies of them and of their squares, and as much as they
    take of the shape before, at most."""
    squares = min(rows, columns) / max(rows, columns)
    return round(4 * rows * columns * count * (5 + squares if half else 7 + 2 * squares))


@dataclass(frozen=True)
class _Kept:
    """In passes over the stream: kept by all blocks, by what is before and after them, and held by one at work."""

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
            if config.checkpoint:  # every block's input and skip; the middle's attention is not computed again
                pair, ends, attention = 2.0, 15.9, 0.0
            return _Kept(levels * pair + (2 * levels + 1) * attention * _attending(config, shape), ends, 18.0)
        case MLPConfig(depth=depth):
            return _Kept(depth * (16.1 if plain else 9.1), 3.3, 16.1)


def _unit(config: BackboneConfig, shape: tuple[int, ...]) -> int:
    """Numbers in one pass over the stream of one image."""
    match config:
        case DiTConfig(width=width):
            return math.prod(config.grid(shape)) * width
        case UNetConfig():
            spaces = config.spaces(shape)
            return sum(math.prod(space) * width for space, width in zip(spaces, config.widths, strict=True))
        case MLPConfig(width=width):
            return width


def _attending(config: UNetConfig, shape: tuple[int, ...]) -> float:
    """The share of a U-Net's stream that lies at coarser resolutions."""
    return 1 - math.prod(shape[1:]) * config.width / _unit(config, shape)


def _features(shape: tuple[int, ...], bins_count: int | None) -> int:
    """Numbers in the input of one image with its Fourier features."""
    return input_channels(shape[0], bins_count) * math.prod(shape[1:])
