"""adaLN-Zero (Peebles & Xie): the parts of a block that are neither matrix product nor attention, all in this file.

    h = modulated_norm(x, shift, scale)   = LayerNorm(x) * (1 + scale) + shift
    x = gated_residual(x, gate, branch)   = x + gate * dropout(branch)

and GELU between the two products of the MLP. The residual stream x has the type of the computation (bfloat16 under
autocast); means and variances are taken in float32 inside the fused kernel. These three functions are the seam for
faster kernels: nothing else in a block touches memory outside a matrix product or the attention.

Memory traffic of one block, in passes over the stream (tokens x width; 64 MiB for DiT-L/2 at batch 128 in bfloat16),
beside the products and the attention, and what is kept for the backward when compiled by `compile_regions`:

| step | forward | kept |
|---|---|---|
| h = modulated_norm(x) | read x, write h: 2 | x: 1 |
| qkv product, attention | - | q, k, v: 3; the attention's output: 1 |
| gated_residual, and the second norm in the same pass | read x and branch, write x and h: 4 | branch: 1, for dgate |
| first product of the MLP, GELU | read 4, write 4: 8 | GELU's input: 4 |
| second product, gated_residual | read x and branch, write x: 3 | branch: 1, for dgate |
| total | 17 | 11: 16.5 GiB for the 24 blocks of DiT-L/2 |

h, the stream between the branches, GELU's output and the dropout masks are pointwise functions of what is kept, and
are computed again. Left to itself the compiler keeps 18 (autograd 22). All projections of the condition, which are
(6 depth + 2) width numbers per sample, are one product before the first block.
"""

import torch
from jaxtyping import Float, Int32
from torch import Tensor, nn

from bsi.backbones.dropout import dropout
from bsi.backbones.starts import xavier_, zero_

NORM_EPS = 1e-6


def modulated_norm(
    x: Float[Tensor, "batch tokens width"], shift: Float[Tensor, "batch width"], scale: Float[Tensor, "batch width"]
) -> Float[Tensor, "batch tokens width"]:
    """LayerNorm(x) * (1 + scale) + shift, in the type of x."""
    normed = nn.functional.layer_norm(x, x.shape[-1:], eps=NORM_EPS)
    return (normed * (1 + scale[:, None]) + shift[:, None]).to(x.dtype)


def gated_residual(
    x: Float[Tensor, "batch tokens width"],
    gate: Float[Tensor, "batch width"],
    branch: Float[Tensor, "batch tokens width"],
    p: float,
    seed: Int32[Tensor, " 2"] | None,
) -> Float[Tensor, "batch tokens width"]:
    """x + gate * dropout(branch), without dropout where there is no seed."""
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
        return self.contract(nn.functional.gelu(self.expand(h), approximate="tanh"))


class Modulation(nn.Module):
    """Shifts, scales and gates of all blocks and of the head from the condition, in one product; all 0 at the start."""

    def __init__(self, width: int, per_block: int, depth: int) -> None:
        super().__init__()
        self.width = width
        self.sizes = [per_block] * depth + [2]
        self.project = nn.Linear(width, sum(self.sizes) * width)
        zero_(self.project)

    def forward(self, condition: Float[Tensor, "batch width"]) -> tuple[Float[Tensor, "batch _ width"], ...]:
        """One (batch, per_block, width) for each block, then (batch, 2, width) for the head."""
        return self.project(condition).unflatten(1, (-1, self.width)).split(self.sizes, dim=1)


class Head(nn.Module):
    """Modulated norm, then a linear layer that starts at 0."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, outputs)
        zero_(self.project)

    def forward(
        self, x: Float[Tensor, "batch tokens width"], modulation: Float[Tensor, "batch 2 width"]
    ) -> Float[Tensor, "batch tokens outputs"]:
        shift, scale = modulation.unbind(1)
        return self.project(modulated_norm(x, shift, scale))
