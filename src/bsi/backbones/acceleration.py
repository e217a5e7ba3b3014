"""The fastest form of a network that this machine can run, and what makes a finished network faster still.

A DiT or a U-Net in bfloat16 on an NVIDIA GPU that has Triton takes the fused form (fused.py, fused_unet.py), unless it
is checkpointed; everything else is compiled region by region (compiled.py). Convolutions are in channels-last order.
Each form computes what the plain one computes, dropout included, up to rounding. Where there is no Triton, or none for
a GPU so old, a network runs plainly, and on a CPU too: there a compiler would cost more than it saves. With 8-bit
products (fp8.py) the rounding is coarse; a network takes that form only where it is asked for.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import nn

from bsi.backbones.base import Backbone
from bsi.backbones.config import BackboneConfig, DiTConfig, UNetConfig
from bsi.backbones.dit import DiT
from bsi.backbones.embeddings import ConditionEmbedding
from bsi.backbones.memory import Form
from bsi.backbones.unet import UNet
from bsi.devices import compiles
from bsi.errors import UsageError

__all__ = ["accelerate", "check_fp8", "compile_like", "compile_regions", "form_of", "freeze", "is_compiled"]


def accelerate(backbone: Backbone, device: torch.device, lean: bool = False, fp8: bool = False) -> None:
    """Change a network in place, before an optimizer sees it; its weights and their names stay the same.

    `lean` keeps less for the backward pass and computes norms and pointwise work again: a step of DiT-L/2 takes a
    quarter less memory and 4 % longer, one of the U-Net 128 x 32 half the memory and 9 % longer. `fp8` takes 8-bit
    products, and keeps less already. Fast forms have no second derivatives, and a DiT's goes backward once for each
    forward pass: what multiplies with its Jacobian (flow.py, conditioning.py) takes a network that is left as it is.
    """
    if device.type != "cuda":
        return
    if isinstance(backbone, UNet):
        order = torch.channels_last_3d if len(backbone.shape) == 4 else torch.channels_last
        backbone.to(memory_format=order)  # type: ignore[call-overload]  # torch's stubs leave it out
    if fp8:
        check_fp8(backbone.config, backbone.shape)
    form = form_of(backbone.config, backbone.compute_dtype, device, lean)
    if isinstance(backbone, DiT) and form in ("fused", "lean"):
        backbone.trunk = "fp8" if fp8 else form
    elif isinstance(backbone, UNet) and form in ("fused", "lean"):
        backbone.trunk = form
    elif fp8:
        raise UsageError("fp8 needs Triton, and a network that computes in bfloat16. Use --precision bf16.")
    elif form == "compiled":
        compile_regions(backbone)


def form_of(
    config: BackboneConfig, compute_dtype: torch.dtype | None, device: torch.device, lean: bool = False
) -> Form:
    """The form that `accelerate` gives such a network on this device, for the account of its memory (memory.py)."""
    if not compiles(device):
        return "plain"
    generation = torch.cuda.get_device_capability(device)
    # cuBLASLt (cublaslt.py) is NVIDIA's, called by the name that it has on Linux; a DiT's rows are whole 16-byte words.
    ours = generation >= (8, 0) and torch.version.cuda is not None and sys.platform == "linux"
    if ours and compute_dtype == torch.bfloat16 and isinstance(config, DiTConfig | UNetConfig):
        if isinstance(config, DiTConfig) and config.width % 8:
            return "compiled"
        return "compiled" if config.checkpoint else "lean" if lean else "fused"
    return "compiled"


def check_fp8(config: BackboneConfig | None, shape: tuple[int, ...]) -> None:
    """Refuse what fp8.py cannot do, before anything is allocated."""
    if not isinstance(config, DiTConfig):
        raise UsageError("fp8 exists for the DiT alone. Use --precision bf16 for other networks.")
    tokens = math.prod(config.grid(shape))
    if config.width % 16 or tokens % 16 or config.checkpoint:
        raise UsageError(
            f"fp8 needs a width and a number of tokens divisible by 16, and no checkpointing: got width "
            f"{config.width}, {tokens} tokens, checkpoint={config.checkpoint}. Use --precision bf16."
        )


def freeze(backbone: Backbone) -> None:
    """Round the weights to the type of the computation, once: for a network that will not be trained any more."""
    if backbone.compute_dtype is None:
        return
    if isinstance(backbone, DiT) and backbone.trunk == "fp8":
        backbone.freeze_fp8()
    kept = {
        id(p)
        for m in backbone.modules()
        if isinstance(m, ConditionEmbedding | torch.nn.GroupNorm)
        for p in m.parameters()
    }
    for parameter in backbone.parameters():
        parameter.requires_grad_(False)
        if id(parameter) not in kept:  # what autocast too uses in float32
            parameter.data = parameter.data.to(backbone.compute_dtype)


def compile_regions(backbone: Backbone, backend: str = "inductor") -> None:
    """Compile the parts of a network that repeat or touch every token. Compilation happens at the first call.

    The network computes the same function as before, dropout included, up to rounding.
    """
    from bsi.kernels.compiled import compile_call  # imports torch's compiler, which takes seconds

    for region in backbone.regions():
        region._compiled_call_impl = compile_call(region, backend)  # as `region.compile` sets it


def compile_like(copied: nn.Module, original: nn.Module, backend: str = "inductor") -> None:
    """Compile the networks in a copy that are compiled in the original: `copy.deepcopy` does not copy compiled code."""
    for mine, theirs in zip(copied.modules(), original.modules(), strict=True):
        if isinstance(mine, Backbone) and isinstance(theirs, Backbone) and is_compiled(theirs):
            compile_regions(mine, backend)


def is_compiled(backbone: Backbone) -> bool:
    return any(region._compiled_call_impl is not None for region in backbone.regions())
