"""The order of the U-Net's images in memory: channels-last wherever a convolution reads or writes one, both ways.

A tensor in another order is not wrong, only slow: the convolution copies it first, a transposition of a whole image.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.functional import group_norm as torch_group_norm
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from bsi.backbones import Backbone, UNetConfig, build, compile_regions
from bsi.backbones.layers import GroupNorm

CONFIG = UNetConfig(width=8, levels=2, dropout=0.1)
COARSER = UNetConfig(width=8, levels=2, dropout=0.1, coarser=(16,))
every_config = pytest.mark.parametrize("config", [CONFIG, COARSER], ids=["one", "coarser"])
FORWARD, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default


def convolutions(config: UNetConfig) -> int:
    """Of one pass: stem and head, two for each block, and two between resolutions."""
    blocks = 2 + (2 * config.levels + 1) * len(config.widths)
    return 2 + 2 * blocks + 2 * len(config.coarser)


def unet(dtype: torch.dtype | None = None, config: UNetConfig = CONFIG) -> Backbone:
    torch.manual_seed(0)
    network = build(config, (3, 6, 10), bins_count=16).train().to(memory_format=torch.channels_last)
    for parameter in network.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    network.compute_dtype = dtype
    return network


def step(network: Backbone) -> None:
    network.zero_grad()
    network(torch.randn(2, *network.shape), torch.rand(2)).square().sum().backward()


def in_order(image: Tensor) -> bool:
    return image.is_contiguous(memory_format=torch.channels_last)


class Orders(TorchDispatchMode):
    """Whether all images and weights were in order, for each convolution that ran, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Any, list[bool]] = {FORWARD: [], BACKWARD: []}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self.found:
            results = out[:2] if func is BACKWARD else [out]
            tensors = [t for t in (*args[:3], *results) if isinstance(t, Tensor) and t.ndim == 4]
            self.found[func].append(all(map(in_order, tensors)))
        return out


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@every_config
def test_no_convolution_meets_an_image_or_a_gradient_in_another_order(
    config: UNetConfig, dtype: torch.dtype | None
) -> None:
    network = unet(dtype, config)
    with Orders() as orders:
        step(network)
    count = convolutions(config)
    assert orders.found == {FORWARD: [True] * count, BACKWARD: [True] * count}


@every_config
def test_images_are_channels_last_whatever_the_order_of_the_weights(config: UNetConfig) -> None:
    network = unet(config=config).to(memory_format=torch.contiguous_format)
    seen: list[Tensor] = []
    for block in (*network.down, *network.up):
        block.register_forward_hook(lambda _, __, out: seen.append(out))
    network(torch.randn(2, *network.shape), torch.rand(2))
    assert len(seen) == len(network.down) + len(network.up)
    assert all(map(in_order, seen))


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    jaxtyping.config.update("jaxtyping_disable", True)  # compiled code cannot look into the type checker
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own access
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("config", "kinds"),
    # Two convolutions of a block down, two of a block up, the head's; blocks down, in the middle and up twice over, two
    # between resolutions, and the head's.
    [(CONFIG, 5), (COARSER, 13)],
    ids=["one", "coarser"],
)
def test_no_convolution_of_a_compiled_region_meets_another_order(config: UNetConfig, kinds: int) -> None:
    """In the graphs that the compiler gets: it keeps the orders that it finds there at every convolution."""
    found: dict[Any, list[bool]] = {FORWARD: [], BACKWARD: []}

    def note(graph: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if node.target in found:
                values = [n.meta["val"] for n in node.args[:3] if isinstance(n, fx.Node)]
                results = node.meta["val"][:2] if node.target is BACKWARD else [node.meta["val"]]
                found[node.target].append(all(in_order(v) for v in (*values, *results) if v.ndim == 4))
        return make_boxed_func(graph.forward)

    noting = aot_autograd(fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    torch._dynamo.register_backend(noting, name=f"noting-{kinds}")
    network = unet(config=config)
    compile_regions(network, backend=f"noting-{kinds}")
    step(network)
    assert found == {FORWARD: [True] * kinds, BACKWARD: [True] * kinds}


def test_norm_and_its_gradients_are_those_of_the_shifted_image_taken_whole() -> None:
    torch.manual_seed(0)
    norm = GroupNorm(6, 24, eps=1e-6).double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    parts = [(3 + torch.randn(2, 12, 3, 5, dtype=torch.float64)).requires_grad_() for _ in range(2)]
    shift = torch.randn(2, 24, dtype=torch.float64, requires_grad=True)
    whole = torch.cat(parts, dim=1)
    results = {
        "apart": torch.cat(norm.each(parts, shift), dim=1),
        "whole": norm(whole, shift),
        "torch": torch_group_norm(whole + shift[..., None, None], 6, norm.weight, norm.bias, eps=1e-6),
    }
    assert_close(norm(whole), torch_group_norm(whole, 6, norm.weight, norm.bias, eps=1e-6))
    direction = torch.randn_like(whole)
    inputs = [*parts, shift, *norm.parameters()]
    gradients = {k: torch.autograd.grad(out, inputs, direction, retain_graph=True) for k, out in results.items()}
    for form in ("apart", "whole"):
        assert_close(results[form], results["torch"])
        assert_close(gradients[form], gradients["torch"])


def test_a_norm_of_sixteen_bits_is_that_of_the_rounded_image_in_float32() -> None:
    """Far from 0, moments in bfloat16 would have no digit of the variance."""
    torch.manual_seed(0)
    norm, x = GroupNorm(2, 8), (100 + torch.randn(2, 8, 3, 3)).bfloat16()
    assert norm(x).dtype == torch.float32
    assert_close(norm(x), norm(x.float()))
