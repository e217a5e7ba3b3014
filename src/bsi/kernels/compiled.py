"""Compile regions of a network by torch.compile: each type of block is compiled once and reused.

Modules are compiled in place, so that the names in the state dict do not change. Blocks of one class share their code
and take their parameters as inputs of the graph, so every further block uses the first one's kernels. Only the batch
size may be a dynamic shape. By default the compiler would also make every size dynamic that differs between two blocks
(as between two resolutions of a U-Net), and such kernels are slower.

By default the compiler stores all tensors that the backward pass would otherwise have to write to memory again before a
matrix product can read them. Here it may recompute everything except matrix products, convolutions and attention:
pointwise operations are cheap, and their results take most of the memory (see backbones/dit.py).

By default Inductor also writes a result that needs more than a few reads or operations and is used twice: in a norm's
gradient, complete images in float32. Here pointwise results are recomputed in the kernel that reads them. Results with
one number per channel or group are written, since otherwise the threads of all pixels would compute them. For a
training step of the U-Net 128x32, without convolutions and products, this is 62 GB of memory traffic instead of 76 GB.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch._dynamo
import torch._functorch.config
from torch import Tensor, fx, nn

# Disable torch's heuristics against recomputation. Expensive operations are still never recomputed.
RECOMPUTE_POINTWISE = {
    "ban_recompute_materialized_backward": False,
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
}

# Raise Inductor's limits for recomputing a result instead of writing it; sums of a few numbers are not unrolled.
WRITE_NO_POINTWISE = {
    "realize_reads_threshold": 10**6,
    "realize_acc_reads_threshold": 10**6,
    "realize_opcount_threshold": 10**6,
    "unroll_reductions_threshold": 1,
}

# Limit on the compiled variants of one block: down and up, at each resolution, in training and evaluation, for a fixed
# and for a dynamic batch size. With torch's default of 8 the compilation would fail.
FORMS = 64


def compile_call(region: nn.Module, backend: str) -> Callable[..., Any]:
    """The compiled call of a region, for inputs whose sizes are static except for the batch size."""
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
        # Passed as an argument instead of a context, since the backward pass is compiled later, when it first runs.
        compiler = functools.partial(compiler, config_patches=WRITE_NO_POINTWISE)

    def compile_graph(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with torch._functorch.config.patch(RECOMPUTE_POINTWISE):
            return compiler(graph, inputs)

    return compile_graph
