"""Regions of a network compiled by torch.compile: each kind of block once, reused for all blocks of that kind.

Modules are compiled in place, so that the names in the state dict do not change. Blocks of one class share their code
and take their parameters as inputs of the graph, so every further block uses the first one's kernels. Only the batch
size may become a variable of the kernels. By default the compiler would make variables of all sizes that differ between
two blocks (as between two resolutions of a U-Net), and such kernels are slower.

The compiler splits a block into forward and backward. By default it keeps everything that the backward pass would have
to write to memory again before a matrix product can read it. Here it may compute anything again except matrix products,
convolutions and attention: pointwise work is cheap, and its results are most of the memory (see backbones/layers.py).

Inductor then decides what to write to memory between kernels. By default it writes a result that took more than a few
reads or operations and is used twice: in a norm's gradient, complete images in float32. Here pointwise results are
never written but computed again in the kernel that reads them. Results with one number per channel or group are
written, since otherwise every pixel's thread would compute them. For a training step of the U-Net 128x32, without the
convolutions and products, this is 62 GB of memory traffic instead of 76.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch._dynamo
import torch._functorch.config
from torch import Tensor, fx, nn

# Disable torch's heuristics against recomputation. Costly operations stay on its list of those never to repeat.
RECOMPUTE_POINTWISE = {
    "ban_recompute_materialized_backward": False,
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
}

# Raise Inductor's limits on what it computes again instead of writing it; sums of a few numbers are not unrolled.
NEVER = 10**6
WRITE_NO_POINTWISE = {
    "realize_reads_threshold": NEVER,
    "realize_acc_reads_threshold": NEVER,
    "realize_opcount_threshold": NEVER,
    "unroll_reductions_threshold": 1,
}


# Variants of one block's code: down and up, at each resolution, training and not, each batch size once and then any.
# Torch's own limit is 8, beyond which a region could not be compiled and the run would stop.
FORMS = 64


def compile_call(region: nn.Module, backend: str) -> Callable[..., Any]:
    """The call of a region, compiled for inputs whose sizes are fixed except for the batch's."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FORMS)
    run = torch.compile(region._call_impl, backend=_lean(backend), fullgraph=True)

    def call(*inputs: Any) -> Any:
        for tensor in inputs:
            if isinstance(tensor, Tensor):
                torch._dynamo.mark_static(tensor, list(range(1, tensor.ndim)))
        return run(*inputs)

    return call


@functools.cache  # one object for all regions and networks: compiled code is shared only within one backend
def _lean(backend: str) -> Callable[..., Any]:
    compiler: Callable[..., Any] = torch._dynamo.lookup_backend(backend)
    if backend == "inductor":
        # As an argument, not around the call: the backward is compiled later, when it first runs.
        compiler = functools.partial(compiler, config_patches=WRITE_NO_POINTWISE)

    def compile_graph(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with torch._functorch.config.patch(RECOMPUTE_POINTWISE):
            return compiler(graph, inputs)

    return compile_graph
