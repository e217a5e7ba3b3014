"""Select the fastest implementation of a network on this machine. Only this module uses `bsi.kernels`.

A DiT or a U-Net in bfloat16 on an NVIDIA GPU with Triton takes the fused form (kernels/fused_dit.py, fused_unet.py),
unless it is checkpointed. Everything else is compiled region by region (`compile_regions`). Each form computes the same
function as the plain one, dropout included, up to rounding. Without Triton, on a GPU that is too old for it, or on a
CPU, a network is not changed: there, compiling would cost more time than it saves. 8-bit products in a DiT have large
rounding errors and are used only on request.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from bsi.backbones.autoencoder import Autoencoder
from bsi.backbones.config import BackboneConfig, DiTConfig, UNetConfig
from bsi.backbones.costs import Form
from bsi.backbones.layers import Backbone
from bsi.backbones.unet import UNet
from bsi.devices import compiles
from bsi.errors import UsageError

# Torch's compiler may recompute everything except matrix products, convolutions and attention, instead of storing what
# the backward pass would otherwise write to memory again: pointwise operations are cheap, and their results take most
# of the memory (see backbones/dit.py).
RECOMPUTE_POINTWISE = {
    "ban_recompute_materialized_backward": False,
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
}

# By default Inductor writes a result that needs more than a few reads or operations and is used twice: in a norm's
# gradient, complete images in float32. With these limits it is recomputed in the kernel that reads it. Sums of a few
# numbers are not unrolled: results with one number per channel or group are written, since otherwise the threads of all
# pixels would compute them. For a training step of the U-Net 128x32, without convolutions and products, this is 62 GB
# of memory traffic instead of 76 GB.
WRITE_NO_POINTWISE = {
    "realize_reads_threshold": 10**6,
    "realize_acc_reads_threshold": 10**6,
    "realize_opcount_threshold": 10**6,
    "unroll_reductions_threshold": 1,
}

# Limit on the compiled variants of one block: down and up, at each resolution, in training and evaluation, for a fixed
# and for a dynamic batch size. With torch's default of 8 the compilation would fail.
VARIANTS = 64


def accelerate(backbone: Backbone, device: torch.device, lean: bool = False, fp8: bool = False) -> None:
    """Change a network in place, before an optimizer uses it. Its weights and their names do not change.

    Fast forms have no second derivatives, and a DiT's backward pass can run only once for each forward pass. Code that
    needs Jacobian products (flow.py, conditioning.py) must use a network that is not accelerated.

    Args:
        backbone: The network, with its `compute_dtype` set.
        device: The device on which it will run.
        lean: Store less for the backward pass, and recompute norms and pointwise operations: a step of DiT-L/2 takes a
            quarter less memory and 4 % more time, one of the U-Net 128 x 32 half the memory and 9 % more time.
        fp8: Use 8-bit products, for a DiT. They also store less for the backward pass.
    """
    if device.type != "cuda":
        return
    if isinstance(backbone, UNet | Autoencoder):
        order = torch.channels_last_3d if len(backbone.shape) == 4 else torch.channels_last
        backbone.to(memory_format=order)  # type: ignore[call-overload]  # missing in torch's stubs
    if fp8:
        check_fp8(backbone.config, backbone.shape)
    form = form_of(backbone.config, backbone.compute_dtype, device, lean)
    if fp8 and form not in ("fused", "lean"):
        raise UsageError("fp8 needs Triton, and a network that computes in bfloat16. Use --precision bf16.")
    if form == "compiled":
        compile_regions(backbone)
    elif form != "plain" and isinstance(backbone, UNet):
        from bsi.kernels.fused_unet import FusedUNet  # imported here because Triton may not be installed

        backbone.fast = FusedUNet(form == "lean")
    elif form != "plain":
        from bsi.kernels.fused_dit import FusedDiT

        backbone.fast = FusedDiT(form == "lean" and not fp8, fp8)


def form_of(
    config: BackboneConfig, compute_dtype: torch.dtype | None, device: torch.device, lean: bool = False
) -> Form:
    """The form that `accelerate` selects for this network and device; memory estimates depend on it too."""
    if not compiles(device):
        return "plain"
    generation = torch.cuda.get_device_capability(device)
    # cuBLASLt (kernels/cublaslt.py) needs CUDA, is loaded by its file name on Linux, and needs 16-byte aligned rows.
    fuses = generation >= (8, 0) and torch.version.cuda is not None and sys.platform == "linux"
    unaligned = isinstance(config, DiTConfig) and config.width % 8 > 0
    if not fuses or unaligned or compute_dtype != torch.bfloat16 or not isinstance(config, DiTConfig | UNetConfig):
        return "compiled"
    return "compiled" if config.checkpoint else "lean" if lean else "fused"


def check_fp8(config: BackboneConfig | None, shape: tuple[int, ...]) -> None:
    """Raise UsageError for a network that does not support 8-bit products, before anything is allocated."""
    if not isinstance(config, DiTConfig):
        raise UsageError("fp8 exists only for the DiT. Use --precision bf16 for other networks.")
    tokens = math.prod(config.grid(shape))
    if config.width % 16 or tokens % 16 or config.checkpoint:
        got = f"got width {config.width}, {tokens} tokens, checkpoint={config.checkpoint}. Use --precision bf16."
        raise UsageError(f"fp8 needs a width and a number of tokens divisible by 16, and no checkpointing, {got}")


def freeze(backbone: Backbone) -> None:
    """Convert the weights to the compute dtype, for a network that will not be trained again."""
    if backbone.compute_dtype is None:
        return
    if backbone.fast is not None:
        backbone.fast.freeze(backbone)
    backbone.requires_grad_(False)
    backbone.to(backbone.compute_dtype)


def compile_regions(backbone: Backbone, backend: str = "inductor") -> None:
    """Compile the repeated parts of a network and those that process every token, at their first call.

    The network computes the same function as before, dropout included, up to rounding, and the names in its state dict
    do not change. Blocks of one class share their code and take their parameters as inputs of the graph, so every
    further block uses the first one's kernels. Only the batch size may be a dynamic shape: by default the compiler
    would also make every size dynamic that differs between two blocks, and such kernels are slower.
    """
    import torch._dynamo  # takes seconds

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    for region in backbone.regions():
        if hasattr(region, "unshard"):  # the hooks of FSDP communicate, and are not compiled
            region.forward = _static(torch.compile(region.forward, backend=_lean(backend), fullgraph=True))
        else:  # as `region.compile` sets it
            call = torch.compile(region._call_impl, backend=_lean(backend), fullgraph=True)
            region._compiled_call_impl = _static(call)


def _static(run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*inputs: Any) -> Any:
        for tensor in inputs:
            if isinstance(tensor, Tensor):
                torch._dynamo.mark_static(tensor, list(range(1, tensor.ndim)))
        return run(*inputs)

    return call


@functools.cache  # one object for all regions and networks: compiled code is shared only within one backend
def _lean(backend: str) -> Callable[..., Any]:
    import torch._functorch.config

    compiler: Callable[..., Any] = torch._dynamo.lookup_backend(backend)
    if backend == "inductor":
        # Passed as an argument instead of a context, since the backward pass is compiled later, when it first runs.
        compiler = functools.partial(compiler, config_patches=WRITE_NO_POINTWISE)

    def compile_graph(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with torch._functorch.config.patch(RECOMPUTE_POINTWISE):
            return compiler(graph, inputs)

    return compile_graph


def compile_like(copied: nn.Module, original: nn.Module, backend: str = "inductor") -> None:
    """Compile the networks of a copy that are compiled in the original, since `copy.deepcopy` drops compiled code."""
    for mine, theirs in zip(copied.modules(), original.modules(), strict=True):
        if isinstance(mine, Backbone) and isinstance(theirs, Backbone) and is_compiled(theirs):
            compile_regions(mine, backend)


def is_compiled(backbone: Backbone) -> bool:
    return any(region._compiled_call_impl is not None for region in backbone.regions())
