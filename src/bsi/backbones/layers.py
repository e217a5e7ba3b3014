"""Layers that the networks share: initialization, dropout, attention, group normalization, and adaLN-Zero.

adaLN-Zero (Peebles & Xie, 2023) surrounds each branch (attention or MLP) of a block by two pointwise functions,

    h = modulated_norm(x, shift, scale)   = LayerNorm(x) * (1 + scale) + shift
    x = gated_residual(x, gate, branch)   = x + gate * dropout(branch)

with shifts, scales and gates computed from the condition. The residual stream x has the compute dtype (bfloat16 under
autocast); means and variances are float32. Apart from matrix products and attention, these functions are the only
memory traffic of a block. The table counts it for one block, in passes over the stream (tokens x width; 64 MiB for
DiT-L/2 at batch 128 in bfloat16), and the tensors stored for the backward pass after `compile_regions`:

| step | forward | stored |
|---|---|---|
| h = modulated_norm(x) | read x, write h: 2 | x: 1 |
| qkv product, attention | - | q, k, v: 3; the attention's output: 1 |
| gated_residual, and the second norm in the same pass | read x and branch, write x and h: 4 | branch: 1, for dgate |
| first product of the MLP, GELU | read 4, write 4: 8 | GELU's input: 4 |
| second product, gated_residual | read x and branch, write x: 3 | branch: 1, for dgate |
| total | 17 | 11: 16.5 GiB for the 24 blocks of DiT-L/2 |

h, the stream between the branches, GELU's output and the dropout masks are pointwise functions of the stored tensors
and are recomputed in the backward pass. With default settings the compiler stores 18 passes, and eager autograd 22.
"""

from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

NORM_EPS = 1e-6  # as in the DiT and in VDM's U-Net (Flax's default)

# --- Initialization. The last layer of every network is initialized to 0, so that its output is 0. The other layers are
# initialized as published: Xavier for the DiT's blocks, LeCun for VDM's U-Net and for the embedding of the condition.

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


def zero_(layer: Layer) -> None:
    """Set the weight and the bias to 0."""
    nn.init.zeros_(layer.weight)
    _clear(layer)


def xavier_(layer: nn.Linear) -> None:
    """Draw the weight from Xavier's uniform distribution; the bias is 0."""
    nn.init.xavier_uniform_(layer.weight)
    _clear(layer)


def lecun_(layer: Layer) -> None:
    """Draw the weight from a Normal of variance 1 / inputs, which preserves the scale of activations; the bias is 0.

    PyTorch's default has a third of this variance. After the 33 shortcuts of the U-Net's up blocks, the input would
    have vanished.
    """
    nn.init.normal_(layer.weight, std=layer.weight[0].numel() ** -0.5)
    _clear(layer)


def _clear(layer: Layer) -> None:
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


# --- Dropout. The mask is a hash of the element's index and a seed, keep(i) = hash(i; seed) >= threshold.
#
# `torch.nn.functional.dropout` draws its mask from a generator inside the network. The mask must then be stored for the
# backward pass (one byte per element: half the size of a bfloat16 tensor), checkpointing must save and restore
# generators, and compiled and eager code draw different numbers. Here the seeds are drawn once per pass, and the mask
# is pointwise arithmetic that is recomputed in the backward pass: all forms of a network drop the same elements.

DROPOUT_WEYL = 0x9E3779B9 - 2**32, 0x7FEB352D  # odd, as signed 32-bit integers


def draw_seeds(count: int, device: torch.device) -> Int32[Tensor, "count 2"]:
    """Seeds for `count` dropout masks, from PyTorch's generator on that device."""
    return torch.randint(-(2**31), 2**31, (count, 2), dtype=torch.int32, device=device)


def dropout(x: Float[Tensor, "..."], p: float, seed: Int32[Tensor, " 2"]) -> Float[Tensor, "..."]:
    """x / (1 - p) where the mask keeps x, else 0."""
    index = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    threshold = round(p * 2**32) - 2**31
    return torch.where(_hash(index, seed) >= threshold, x * (1 / (1 - p)), 0.0)


def _hash(index: Int32[Tensor, "..."], seed: Int32[Tensor, " 2"]) -> Int32[Tensor, "..."]:
    """Three rounds of Widynski's Squares (square, add, swap the halves) in 32-bit integers that wrap around.

    It uses only shifts, sums and products, which the compiler considers cheap to recompute, unlike xor.
    """
    # The seed is added first: the compiler treats a product of the index alone as an index expression and folds the
    # factors of shapes into it until they no longer fit 32 bits.
    a, b = (index + seed[0]) * DROPOUT_WEYL[0], (index + seed[1]) * DROPOUT_WEYL[1]
    h = _swap(a * a + b)
    h = _swap(h * h + a)
    return h * h + b


def _swap(h: Int32[Tensor, "..."]) -> Int32[Tensor, "..."]:
    return (h >> 16) + (h << 16)


# --- Blocks, attention and adaLN-Zero.


def run_block(block: nn.Module, recompute: bool, *inputs: Any) -> Tensor:
    """block(*inputs). With `recompute`, only its inputs are stored and the backward pass recomputes the block."""
    if recompute:
        # Blocks draw no random numbers, so generators need not be saved, which a CUDA graph would not allow.
        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
    return block(*inputs)


def attend(qkv: Float[Tensor, "batch tokens three_widths"], heads: int) -> Float[Tensor, "batch tokens width"]:
    """Multi-head attention of concatenated queries, keys and values, which are not copied."""
    batch, tokens, three_widths = qkv.shape
    q, k, v = qkv.view(batch, tokens, 3, heads, three_widths // 3 // heads).transpose(1, 3).unbind(2)
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, three_widths // 3)


def modulated_norm(
    x: Float[Tensor, "batch tokens width"], shift: Float[Tensor, "batch width"], scale: Float[Tensor, "batch width"]
) -> Float[Tensor, "batch tokens width"]:
    """LayerNorm(x) * (1 + scale) + shift, in the dtype of x."""
    normed = layer_norm(x, x.shape[-1:], eps=NORM_EPS)
    return (normed * (1 + scale[:, None]) + shift[:, None]).to(x.dtype)


def gated_residual(
    x: Float[Tensor, "batch tokens width"],
    gate: Float[Tensor, "batch width"],
    branch: Float[Tensor, "batch tokens width"],
    p: float,
    seed: Int32[Tensor, " 2"] | None,
) -> Float[Tensor, "batch tokens width"]:
    """x + gate * dropout(branch), without dropout if there is no seed."""
    if seed is not None:
        branch = dropout(branch, p, seed)
    return torch.addcmul(x, gate[:, None], branch)


class FeedForward(nn.Module):
    """Linear, GELU (tanh form), Linear."""

    def __init__(self, width: int, ratio: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, ratio * width)
        self.contract = nn.Linear(ratio * width, width)
        xavier_(self.expand)
        xavier_(self.contract)

    def forward(self, h: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        return self.contract(gelu(self.expand(h), approximate="tanh"))


class Modulation(nn.Module):
    """Shifts, scales and gates of all blocks and of the head, computed from the condition by one linear layer.

    Its weight and bias are initialized to 0.
    """

    def __init__(self, width: int, per_block: int, depth: int) -> None:
        super().__init__()
        self.width = width
        self.sizes = [per_block] * depth + [2]
        self.project = nn.Linear(width, sum(self.sizes) * width)
        zero_(self.project)

    def forward(self, condition: Float[Tensor, "batch width"]) -> tuple[Float[Tensor, "batch _ width"], ...]:
        """One (batch, per_block, width) for each block, then (batch, 2, width) for the head."""
        return self.project(condition).unflatten(1, (-1, self.width)).split(self.sizes, dim=1)


class ModulatedHead(nn.Module):
    """Modulated norm, then a linear layer that is initialized to 0."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, outputs)
        zero_(self.project)

    def forward(
        self, x: Float[Tensor, "batch tokens width"], modulation: Float[Tensor, "batch 2 width"]
    ) -> Float[Tensor, "batch tokens outputs"]:
        shift, scale = modulation.unbind(1)
        return self.project(modulated_norm(x, shift, scale))


# --- Group normalization of channels-last images.


class GroupNorm(nn.GroupNorm):
    """Group normalization that preserves the channels-last memory format. The result is float32 or wider.

        y = x scale + offset,   scale = w (var + eps)^(-1/2),   offset = b - (mean - shift) scale

    is the norm of x + shift, where mean and var are those of a group of channels and shift is one number per channel.
    x + shift is never formed. The moments of each channel are computed first, then those of the groups: the mean of the
    means (each with its shift), and the mean of the variances plus the variance of the means. PyTorch's own group norm
    would copy each image to the contiguous format and back.
    """

    def forward(
        self, x: Float[Tensor, "batch channels *space"], shift: Float[Tensor, "batch channels"] | None = None
    ) -> Float[Tensor, "batch channels *space"]:
        """The norm of x + shift."""
        return self.each([x], shift)[0]

    def each(
        self, images: list[Float[Tensor, "batch _ *space"]], shift: Float[Tensor, "batch channels"] | None = None
    ) -> list[Float[Tensor, "batch _ *space"]]:
        """The norm of images concatenated along the channels, as one part per image, without concatenating them."""
        groups = self.num_groups, self.num_channels // self.num_groups
        rows = [to_rows(_wide(image)) for image in images]
        moments = zip(*(torch.var_mean(part, dim=1, correction=0) for part in rows), strict=True)
        var, mean = (torch.cat(parts, dim=1).unflatten(1, groups) for parts in moments)
        shifts = torch.zeros_like(mean) if shift is None else _wide(shift).unflatten(1, groups)
        mean = mean + shifts
        center = mean.mean(2, keepdim=True)
        var = var.mean(2, keepdim=True) + (mean - center).square().mean(2, keepdim=True)
        scale = torch.rsqrt(var + self.eps) * self.weight.view(groups)
        offset = self.bias.view(groups) - (center - shifts) * scale
        sizes = [image.shape[1] for image in images]
        factors = (part.flatten(1)[:, None].split(sizes, dim=2) for part in (scale, offset))
        return [to_image(r * s + o, x) for r, s, o, x in zip(rows, *factors, images, strict=True)]


def group_norm(channels: int, parts: int = 1) -> GroupNorm:
    """A norm with 32 groups, or fewer if they would have less than four channels (as in the paper's narrowest network).

    With one channel per group, the norm would remove the condition, which is added to all pixels of a channel. Each of
    `parts` equal parts of the channels consists of complete groups.
    """
    fitting = (g for g in range(parts, 33) if channels % g == 0 and g % parts == 0)
    return GroupNorm(max(g for g in fitting if 4 * g <= channels or g == parts), channels, eps=NORM_EPS)


def to_rows(x: Float[Tensor, "batch channels *space"]) -> Float[Tensor, "batch pixels channels"]:
    """A row of channels for each pixel: a view of a channels-last image."""
    return x.flatten(2).transpose(1, 2)


def to_image(
    rows: Float[Tensor, "batch pixels channels"], like: Float[Tensor, "batch _ *space"]
) -> Float[Tensor, "batch channels *space"]:
    """The inverse of `to_rows`, with the spatial sizes of `like`."""
    return rows.transpose(1, 2).unflatten(2, like.shape[2:])


def _wide(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return x.to(torch.promote_types(x.dtype, torch.float32))
