"""Each kind of block compiled once and reused by its siblings: a cold start costs one block, not the network.

Modules are compiled in place, so that the names in the state dict do not change. Blocks of one class share their
code, their parameters are inputs of the graph, and every further block finds the first one's kernels.

The compiler splits a block into forward and backward. By default it keeps everything that the backward would have to
write to memory again before a matrix product can read it. Here it may compute anything again that is neither a matrix
product nor a convolution nor attention: pointwise work is cheap, and keeping its results is what fills the memory
(adaln.py has the account).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch._dynamo
import torch._functorch.config
from torch import fx

from bsi.backbones.base import Backbone

# Torch's heuristics against recomputation, lifted; what is costly stays on its list of operations never to repeat.
RECOMPUTE_POINTWISE = {
    "ban_recompute_materialized_backward": False,
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
}


def compile_regions(backbone: Backbone, backend: str = "inductor") -> None:
    """Compile the parts of a network that repeat or touch every token. Compilation happens at the first call.

    The network computes the same function as before, dropout included, up to rounding.
    """
    for region in backbone.regions():
        region.compile(backend=_lean(backend), fullgraph=True)


@functools.cache  # one object for all regions and networks: compiled code is shared only within one backend
def _lean(backend: str) -> Callable[..., Any]:
    compiler = torch._dynamo.lookup_backend(backend)

    def compile_graph(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with torch._functorch.config.patch(RECOMPUTE_POINTWISE):
            return compiler(graph, inputs)

    return compile_graph
