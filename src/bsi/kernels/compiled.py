"""Each kind of block compiled once and reused by its siblings: a cold start costs one block, not the network.

Modules are compiled in place, so that the names in the state dict do not change. Blocks of one class share their
code, their parameters are inputs of the graph, and every further block finds the first one's kernels. Only the size of
a batch may become a variable of the kernels. Left to itself the compiler would make variables of all sizes that differ
between two blocks, as between two resolutions of a U-Net, and its kernels for any size are slower than those for one.

The compiler splits a block into forward and backward. By default it keeps everything that the backward would have to
write to memory again before a matrix product can read it. Here it may compute anything again that is neither a matrix
product nor a convolution nor attention: pointwise work is cheap, and keeping its results is what fills the memory
(adaln.py has the account).

Inductor then decides what to write to memory between kernels. By default it writes whatever took more than a few reads
or operations to compute and is used twice: in a norm's gradient, whole images in float32. Here pointwise work is never
written, always computed again in the kernel that reads it; what has one number per channel or group is written (the
sums over a group are kernels of their own), for every pixel's thread would otherwise compute it. For a training step of
the U-Net 128x32, without the convolutions and products, that is 62 GB of memory traffic instead of 76.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch._dynamo
import torch._functorch.config
from torch import Tensor, fx, nn

# Torch's heuristics against recomputation, lifted; what is costly stays on its list of operations never to repeat.
RECOMPUTE_POINTWISE = {
    "ban_recompute_materialized_backward": False,
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
}

# Inductor's limits on what it computes again instead of writing it, lifted; sums of a few numbers are not unrolled.
NEVER = 10**6
WRITE_NO_POINTWISE = {
    "realize_reads_threshold": NEVER,
    "realize_acc_reads_threshold": NEVER,
    "realize_opcount_threshold": NEVER,
    "unroll_reductions_threshold": 1,
}


# Forms of one block's code: down and up, at each resolution, training and not, each batch size once and then any.
# Beyond torch's limit of 8 a region could not be compiled at all, and the run would stop.
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
