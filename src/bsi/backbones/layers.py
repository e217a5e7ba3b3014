"""What the networks share: their interface, embeddings, initialization, dropout and attention.

A backbone maps (x, t, cond) to an array like x. x is scaled to unit variance (c_in mu), t in [0, 1] is 0 at the noisy
end, and the output is exactly 0 before training, so that the preconditioned f = c_skip mu + c_out backbone(c_in mu,
t) begins as the best linear prediction.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from bsi.backbones.config import PRECISION_DIM, BackboneConfig, fourier_exponents, input_channels
from bsi.errors import UsageError

NORM_EPS = 1e-6  # as in the DiT and in VDM's U-Net (Flax's default)

Image = Float[Tensor, "batch _ *space"]
Tokens = Float[Tensor, "batch tokens width"]
PerSample = Float[Tensor, "batch width"]
Times = Float[Tensor, " batch"]
Labels = Int[Tensor, " batch"]
Seed = Int32[Tensor, " 2"]


class Wide(nn.Module):
    """A module whose parameters and buffers stay in float32 when a network is converted to 16 bits."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Wide":
        def wide(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            return tensor.to(out.device) if out.dtype in (torch.float16, torch.bfloat16) else out

        return super()._apply(wide, recurse)


class Backbone(nn.Module, ABC):
    """Base class of the networks.

    Attributes:
        shape: The shape of one input, (channels, *space).
        out_shape: The shape of one output, (out_channels, *space).
        num_classes: The number of labels; 0 if the network has none. The label `num_classes` stands for no label.
        compute_dtype: The dtype inside the network, under autocast. With None the caller's autocast applies.
        fast: A faster implementation of everything before the last linear layer, set by `accelerate`; or None.
    """

    compute_dtype: torch.dtype | None = None
    fast: Any = None
    config: BackboneConfig

    def __init__(
        self, config: BackboneConfig, shape: tuple[int, ...], bins_count: int | None = None, num_classes: int = 0,
        out_channels: int | None = None,
    ) -> None:  # fmt: skip
        config.check(shape)
        super().__init__()
        self.config = config
        self.shape = shape
        self.num_classes = num_classes
        self.out_shape = (shape[0] if out_channels is None else out_channels, *shape[1:])
        self.fourier = FourierFeatures(bins_count)
        self.make_layers(input_channels(shape[0], bins_count), num_classes)

    @abstractmethod
    def make_layers(self, inputs: int, num_classes: int) -> None:
        """Make the layers after the Fourier features, which have `inputs` channels."""

    @abstractmethod
    def network(self, features: Image, t: Times, cond: Labels | None) -> Image:
        """The network from the Fourier features to the output, in the dtype selected by autocast."""

    @abstractmethod
    def regions(self) -> Iterator[nn.Module]:
        """The parts to compile: repeated ones, and those that process every token or pixel."""

    def matrices(self) -> list[nn.Parameter]:
        """Weights between hidden features: those of all regions except the last one, the head."""
        return [p for region in list(self.regions())[:-1] for p in region.parameters() if p.ndim >= 2]

    def seeds(self, count: int, device: torch.device) -> Int32[Tensor, "count 2"] | None:
        """Seeds for the dropout masks of one pass; None if nothing is dropped."""
        return draw_seeds(count, device) if self.training and self.config.dropout > 0 else None

    def forward(self, x: Image, t: Times, cond: Labels | None = None) -> Float[Tensor, "batch out_channels *space"]:
        if x.shape[1:] != self.shape:
            got = f"got a batch of {tuple(x.shape[1:])}. Build it with the shape of the data."
            raise UsageError(f"this network was built for data of shape {self.shape}, {got}")
        features = self.fourier(x)  # outside autocast, so that sines are computed in the dtype of x
        inside = nullcontext() if self.compute_dtype is None else torch.autocast(x.device.type, self.compute_dtype)
        with inside:
            out = self.network(features, t, cond)
        return out.to(x.dtype)


# ---- Embeddings.


class FourierFeatures(nn.Module):
    """(u, sin(2^i pi u) for all i, cos(2^i pi u) for all i), concatenated along the channels; u alone without bins.

    They let the network distinguish values of u = c_in mu that differ by less than a bin. They are computed in float32
    or wider: bfloat16 resolves u to 2^-9, and the phase 2^8 pi u would be noise. Features rounded to bfloat16
    *afterwards* still resolve u to about 1e-5.
    """

    def __init__(self, bins_count: int | None) -> None:
        super().__init__()
        self.exponents = fourier_exponents(bins_count)

    def forward(self, u: Image) -> Image:
        phases = [2.0**i * math.pi * u for i in self.exponents]
        return torch.cat([u, *map(torch.sin, phases), *map(torch.cos, phases)], dim=1)


class PrecisionEmbedding(nn.Module):
    """t in [0, 1] -> 16 sines and cosines, with geometrically spaced frequencies f and amplitudes ~ f^(-1/2).

    Then e(t) . e(s) depends on t - s alone, with spectral density 1/f^2, that of exp(-|t - s| / l): similarity falls
    with the distance (it never rises again by more than 0.007) and has a cusp at 0, so that near values differ clearly.
    With equal amplitudes, the usual choice, it would rise again by up to 0.7.

    The mean square is 1/2. The slowest component makes an eighth of a turn over [0, 1], which is almost linear in t;
    the fastest makes 128 turns, an eighth of one per 1/1024. Then |e(t + 1/1024) - e(t)| = 0.097 for every t.
    """

    SLOWEST, FASTEST = 1 / 8, 128.0

    def __init__(self) -> None:
        super().__init__()
        count = PRECISION_DIM // 2
        ratio = (self.FASTEST / self.SLOWEST) ** (1 / (count - 1))
        frequencies = torch.tensor([self.SLOWEST * ratio**i for i in range(count)], dtype=torch.float64)
        power = 1 / frequencies
        self.register_buffer("angular", (2 * math.pi * frequencies).float(), persistent=False)
        self.register_buffer("amplitude", (count * power / power.sum()).sqrt().float(), persistent=False)
        self.angular: Tensor
        self.amplitude: Tensor

    def forward(self, t: Times) -> Float[Tensor, "batch dim"]:
        phase = t[:, None] * self.angular
        return torch.cat([self.amplitude * phase.sin(), self.amplitude * phase.cos()], dim=1)


class ConditionEmbedding(Wide):
    """SiLU(MLP(embedding of t) + label): the vector that every block is conditioned on.

    The label `num_classes` is the null class, for samples without a label, and for all samples if `cond` is None. The
    vector is computed in float32 even under autocast: with one row per sample, the cost is negligible.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        if num_classes < 0:
            raise UsageError(f"num_classes must be 0 (no labels) or more, got {num_classes}.")
        self.num_classes = num_classes
        self.embed = PrecisionEmbedding()
        self.expand = nn.Linear(PRECISION_DIM, width)
        self.mix = nn.Linear(width, width)
        self.labels = nn.Embedding(num_classes + 1, width) if num_classes else None
        lecun_(self.expand)
        lecun_(self.mix)
        if self.labels is not None:
            nn.init.normal_(self.labels.weight, std=0.5)  # about the standard deviation that t contributes

    def forward(self, t: Times, cond: Labels | None = None) -> PerSample:
        with torch.autocast(t.device.type, enabled=False):
            condition = self.mix(silu(self.expand(self.embed(t))))
            if self.labels is not None:
                labels = torch.full_like(t, self.num_classes, dtype=torch.long) if cond is None else cond
                condition = condition + self.labels(labels)
            elif cond is not None:
                raise UsageError("got labels for a network built without them. Build it with num_classes=...")
            return silu(condition)


def positions(grid: tuple[int, ...], width: int) -> Float[Tensor, "tokens width"]:
    """Fixed sinusoidal positions of the points of a grid with any number of axes, row-major.

    Each axis gets 2 * (width // (2 * axes)) channels: first sines, then cosines of n / 10000^(i / count). Remaining
    channels are 0. On two axes they are the published DiT's up to the order of the channels.
    """
    count = width // (2 * len(grid))
    omega = 10000.0 ** (-torch.arange(count, dtype=torch.float64) / count)
    coordinates = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
    phases = [axis.reshape(-1, 1) * omega for axis in coordinates]
    features = torch.cat([part for phase in phases for part in (phase.sin(), phase.cos())], dim=1)
    return pad(features, (0, width - features.shape[1])).float()


# ---- Initialization: biases and the last layer of every network are 0. The other weights are as published: Xavier for
# the DiT's blocks, LeCun for VDM's U-Net and for the embedding of the condition.

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
CONVOLUTIONS: list[type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]] = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
Layer = nn.Linear | Convolution


def zero_(layer: Layer) -> None:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)


def xavier_(layer: Layer) -> None:
    zero_(layer)
    nn.init.xavier_uniform_(layer.weight)


def lecun_(layer: Layer) -> None:
    """Draw the weight from a Normal of variance 1 / inputs, which preserves the scale of activations.

    PyTorch's default has a third of this variance. After the 33 shortcuts of the U-Net's up blocks, the input would
    have vanished.
    """
    zero_(layer)
    nn.init.normal_(layer.weight, std=layer.weight[0].numel() ** -0.5)


# ---- Dropout: the mask is a hash of the element's index and a seed, keep(i) = hash(i; seed) >= threshold.
#
# `torch.nn.functional.dropout` draws its mask from a generator inside the network. The mask must then be stored for the
# backward pass (one byte per element: half the size of a bfloat16 tensor), checkpointing must save and restore
# generators, and compiled and eager code draw different numbers. Here the seeds are drawn once per pass, and the mask
# is pointwise arithmetic that is recomputed in the backward pass: all forms of a network drop the same elements.

DROPOUT_WEYL = 0x9E3779B9 - 2**32, 0x7FEB352D  # odd, as signed 32-bit integers


def draw_seeds(count: int, device: torch.device) -> Int32[Tensor, "count 2"]:
    """Seeds for `count` dropout masks, from PyTorch's generator on that device."""
    return torch.randint(-(2**31), 2**31, (count, 2), dtype=torch.int32, device=device)


def dropout(x: Float[Tensor, "..."], p: float, seed: Seed) -> Float[Tensor, "..."]:
    """x / (1 - p) where the mask keeps x, else 0."""
    index = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    threshold = round(p * 2**32) - 2**31
    return torch.where(_hash(index, seed) >= threshold, x * (1 / (1 - p)), 0.0)


def _hash(index: Int32[Tensor, "..."], seed: Seed) -> Int32[Tensor, "..."]:
    """Three rounds of Widynski's Squares (square, add, swap the halves) in 32-bit integers that wrap around.

    It uses only shifts, sums and products, which the compiler considers cheap to recompute, unlike xor.
    """
    # The seed is added first: the compiler treats a product of the index alone as an index expression and folds the
    # factors of shapes into it until they no longer fit 32 bits.
    a, b = (index + seed[0]) * DROPOUT_WEYL[0], (index + seed[1]) * DROPOUT_WEYL[1]
    h = a * a + b
    h = (h >> 16) + (h << 16)
    h = h * h + a
    h = (h >> 16) + (h << 16)
    return h * h + b


def run_block(block: nn.Module, recompute: bool, *inputs: Any) -> Tensor:
    """block(*inputs). With `recompute`, only its inputs are stored and the backward pass recomputes the block."""
    if recompute:
        # Blocks draw no random numbers, so generators need not be saved, which a CUDA graph would not allow.
        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
    return block(*inputs)


def attend(qkv: Float[Tensor, "batch tokens three_widths"], heads: int) -> Tokens:
    """Multi-head attention of concatenated queries, keys and values, which are not copied."""
    batch, tokens, three_widths = qkv.shape
    q, k, v = qkv.view(batch, tokens, 3, heads, three_widths // 3 // heads).transpose(1, 3).unbind(2)
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, three_widths // 3)
