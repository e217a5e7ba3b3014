"""Compiled, checkpointed, channels-last and half-precision forms agree with the float32 eager form, dropout included.

The tolerances are relative: |a - b| / |b| over the whole output, and over all gradients taken together.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jaxtyping
import pytest
import torch
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

import bsi
from bsi.backbones import (
    Backbone,
    BackboneConfig,
    DiTConfig,
    MLPConfig,
    UNetConfig,
    build,
    compile_regions,
    compute_dtype,
    freeze,
    layers,
    unet,
)
from bsi.backbones.acceleration import compile_like, is_compiled
from bsi.backbones.layers import draw_seeds, dropout
from bsi.devices import type_name
from bsi.errors import UsageError
from bsi.runtime.ema import EmaModel

SMALL: dict[str, tuple[BackboneConfig, tuple[int, ...]]] = {
    "dit": (DiTConfig(width=32, depth=3, heads=2, patch=2, dropout=0.2), (3, 8, 8)),
    "unet": (UNetConfig(width=16, levels=3, dropout=0.2), (3, 8, 8)),
    "unet-coarser": (UNetConfig(width=16, levels=2, heads=2, dropout=0.2, coarser=(24,)), (3, 8, 8)),
    "mlp": (MLPConfig(width=32, depth=3, dropout=0.2), (6,)),
}
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own access
every_kind = pytest.mark.parametrize("kind", SMALL)

EXACT, ROUNDING = 0.0, 2e-5
# bfloat16 keeps 8 bits: 2^-9 = 0.2 % per rounding, and some tens of them in a row; float16 keeps 11
HALF = {torch.bfloat16: 0.03, torch.float16: 0.004}


def small(kind: str, checkpoint: bool = False) -> Backbone:
    """A network of this kind, always the same, with nothing at 0 any more."""
    torch.manual_seed(0)
    config, shape = SMALL[kind]
    if checkpoint:
        assert not isinstance(config, MLPConfig)
        config = replace(config, checkpoint=True)
    network = build(config, shape, bins_count=256, num_classes=3)
    for parameter in network.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return network


def run(network: Backbone) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and gradients of one training pass; the same input, labels and dropout masks each time."""
    torch.manual_seed(1)
    x, t, labels = torch.randn(4, *network.shape), torch.rand(4), torch.tensor([0, 1, 2, 3])
    target = torch.randn_like(x)
    network.zero_grad()
    out = network(x, t, labels)
    assert out.dtype == torch.float32
    (out - target).square().mean().backward()
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    return out.detach(), torch.cat([g.float().flatten() for g in gradients])


def assert_agree(network: Backbone, reference: Backbone, tolerance: float) -> None:
    for got, want in zip(run(network), run(reference), strict=True):
        assert (got - want).norm() <= tolerance * want.norm()


@pytest.fixture
def compiler() -> Iterator[None]:
    """A fresh compiler, and no shape checks inside compiled code: it cannot look into the type checker."""
    torch._dynamo.reset()
    counters.clear()
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch._dynamo.reset()


def as_it_runs(kind: str) -> Backbone:
    """In the order in memory that the compiled form is used with: otherwise blocks see images of different strides."""
    network = small(kind)
    return network.to(memory_format=torch.channels_last) if kind.startswith("unet") else network


@every_kind
@compiles
@pytest.mark.usefixtures("compiler")
def test_compiled_form_agrees_and_each_kind_of_region_is_compiled_once(kind: str) -> None:
    network = as_it_runs(kind)
    compile_regions(network, backend="aot_eager")
    assert_agree(network, small(kind), ROUNDING)
    # Blocks and head; blocks down, attention, blocks up and head; with one coarser resolution, blocks there and in the
    # middle, and what halves and doubles.
    kinds = {"dit": 2, "unet": 4, "unet-coarser": 9, "mlp": 2}
    assert counters["stats"]["unique_graphs"] == kinds[kind]
    other = as_it_runs(kind)
    compile_regions(other, backend="aot_eager")
    assert_agree(other, network, EXACT)
    assert counters["stats"]["unique_graphs"] == kinds[kind], "a second network did not find the first one's code"
    assert set(network.state_dict()) == set(small(kind).state_dict())


@every_kind
@compiles
@pytest.mark.usefixtures("compiler")
def test_only_the_size_of_a_batch_becomes_a_variable_of_compiled_code(kind: str) -> None:
    """Blocks at another resolution share their code, and would otherwise share kernels for any height and width."""
    batches, others = set(), set()

    def note(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        values = (node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder"))
        for shape in (value.shape for value in values if isinstance(value, torch.Tensor)):
            batches.update(map(type, shape[:1]))
            others.update(map(type, shape[1:]))
        return graph.forward

    torch._dynamo.register_backend(note, name=f"note-{kind}")
    network = as_it_runs(kind)
    compile_regions(network, backend=f"note-{kind}")
    for count in (4, 3):
        network(torch.randn(count, *network.shape), torch.rand(count)).sum().backward()
    assert torch.SymInt in batches
    assert others == {int}
    with torch.compiler.set_stance("fail_on_recompile"):
        network(torch.randn(5, *network.shape), torch.rand(5))


@pytest.mark.slow
@every_kind
@compiles
@pytest.mark.usefixtures("compiler")
def test_inductor_agrees(kind: str) -> None:
    network = small(kind)
    compile_regions(network)
    assert_agree(network, small(kind), ROUNDING)


@compiles
@pytest.mark.usefixtures("compiler")
def test_a_copy_is_compiled_where_its_original_is() -> None:
    plain, network = small("mlp"), small("mlp")
    compile_regions(network, backend="aot_eager")
    for original in (plain, network):
        copied = copy.deepcopy(original)
        assert not is_compiled(copied), "torch keeps what is compiled: compile_like is not needed any more"
        compile_like(torch.nn.Sequential(copied), torch.nn.Sequential(original), backend="aot_eager")
        assert is_compiled(copied) == is_compiled(original)
        assert_agree(copied, original, EXACT)


@compiles
@pytest.mark.usefixtures("compiler")
def test_a_block_may_take_more_forms_than_torch_allows_by_itself() -> None:
    """Down and up, training, evaluation and gradients in it, a batch size, any size, and one."""
    network = build(UNetConfig(width=4, levels=1, dropout=0.1), (1, 3, 3))
    network.to(memory_format=torch.channels_last)
    compile_regions(network, backend="eager")
    for mode in (True, False):
        for gradients in (True, False):
            for count in (4, 6, 1):
                with torch.set_grad_enabled(gradients):
                    network.train(mode)(torch.randn(count, 1, 3, 3), torch.rand(count))
    assert counters["stats"]["unique_graphs"] > 2 * 8
    with torch._dynamo.config.patch(recompile_limit=1000):
        compile_regions(network, backend="eager")
        assert torch._dynamo.config.recompile_limit == 1000, "whoever allows more keeps it"


@compiles
@pytest.mark.usefixtures("compiler")
def test_a_compiled_block_keeps_eleven_passes_for_the_backward() -> None:
    """The account of adaln.py: x, q, k, v, attention's output, two branches, GELU's input; no h, no mask."""
    network = build(DiTConfig(width=64, depth=1, heads=2, dropout=0.1), (3, 32, 32))
    compile_regions(network, backend="aot_eager_decomp_partition")
    stream = torch.randn(2, 256, 64, requires_grad=True)
    inputs = (stream, torch.randn(2, 6, 64, requires_grad=True), draw_seeds(2, stream.device))
    block = network.blocks[0]
    block(*inputs)  # compiles
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, int] = {}

    def note(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with saved_tensors_hooks(note, lambda saved: saved):
        block(*inputs)
    passes = sum(kept.values()) / (stream.numel() * stream.element_size())
    assert 11 <= passes < 11.5  # and a few numbers per token


@pytest.mark.parametrize("kind", ["dit", "unet", "unet-coarser"])
def test_checkpointing_changes_what_is_kept_and_nothing_else(kind: str) -> None:
    assert_agree(small(kind, checkpoint=True), small(kind), EXACT)
    assert _bytes_kept(small(kind, checkpoint=True)) < 0.4 * _bytes_kept(small(kind))


def _bytes_kept(network: Backbone) -> int:
    kept: dict[int, int] = {}

    def note(saved: torch.Tensor) -> torch.Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with saved_tensors_hooks(note, lambda saved: saved):
        network(torch.randn(8, *network.shape), torch.rand(8))
    return sum(kept.values()) - sum(p.numel() * 4 for p in network.parameters())


def test_channels_last_agrees() -> None:
    network = small("unet").to(memory_format=torch.channels_last)
    seen = []
    network.up[0].register_forward_hook(lambda _, __, out: seen.append(out))
    assert_agree(network, small("unet"), ROUNDING)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


@every_kind
@pytest.mark.parametrize("half", HALF, ids=str)
def test_sixteen_bits_inside_agree(kind: str, half: torch.dtype) -> None:
    network = small(kind)
    network.compute_dtype = half
    assert_agree(network, small(kind), HALF[half])


@every_kind
def test_bfloat16_of_the_callers_autocast_agrees(kind: str) -> None:
    network = small(kind)
    network.compute_dtype = torch.bfloat16
    torch.manual_seed(1)
    x, t = torch.randn(4, *network.shape), torch.rand(4)
    inside = network.eval()(x, t)
    network.compute_dtype = None
    with torch.autocast("cpu", torch.bfloat16):
        assert network(x, t).equal(inside)


@every_kind
def test_fourier_features_stay_in_float32(kind: str) -> None:
    """Rounded before the sines, an input half a bin away would be the same input."""
    network = small(kind).eval()
    network.compute_dtype = torch.bfloat16
    x, t = 2 + torch.rand(4, *network.shape), torch.rand(4)
    x = x.bfloat16().float()
    assert (x + 0.002).bfloat16().equal(x.bfloat16())
    assert (network(x + 0.002, t) - network(x, t)).norm() > 0.05 * network(x, t).norm()


@every_kind
def test_frozen_weights_compute_what_autocast_computes(kind: str) -> None:
    reference, frozen = small(kind).eval(), small(kind).eval()
    for network in (reference, frozen):
        network.compute_dtype = torch.bfloat16
    freeze(frozen)
    assert {p.dtype for p in frozen.parameters()} == {torch.bfloat16, torch.float32}
    assert {p.dtype for p in frozen.condition.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in frozen.parameters())
    x, t = torch.randn(4, *frozen.shape), torch.rand(4)
    with torch.no_grad():
        assert frozen(x, t).equal(reference(x, t))


def test_precision_on_a_cpu_is_float32() -> None:
    assert compute_dtype("auto", torch.device("cpu")) is None
    assert type_name(compute_dtype("auto", torch.device("cpu"))) == "float32"
    assert compute_dtype("float32", torch.device("cpu")) is None
    assert compute_dtype("bf16", torch.device("cpu")) is torch.bfloat16  # slow, but what was asked for
    with pytest.raises(UsageError, match="float16 needs a CUDA device"):
        compute_dtype("float16", torch.device("cpu"))


@pytest.mark.usefixtures("unchecked")
def test_a_precision_with_another_name_is_not_taken_for_float32() -> None:
    with pytest.raises(UsageError, match=r"unknown precision 'fp16'\. Use one of auto, bf16, fp8, float16, float32"):
        compute_dtype("fp16", torch.device("cpu"))


def test_precision_on_a_gpu_is_what_its_hardware_has(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert compute_dtype("auto", cuda) is compute_dtype("bf16", cuda) is torch.bfloat16
    assert type_name(compute_dtype("auto", cuda)) == "bfloat16"
    assert compute_dtype("float32", cuda) is None
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    assert compute_dtype("auto", cuda) is compute_dtype("float16", cuda) is torch.float16
    assert type_name(compute_dtype("auto", cuda)) == "float16"
    with pytest.raises(UsageError, match="bf16 is not supported by Tesla V100"):
        compute_dtype("bf16", cuda)


def test_dropout_drops_a_fraction_p_independently_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    n, p = 2**20, 0.05
    seeds = draw_seeds(2, torch.device("cpu"))
    out, other = (dropout(torch.ones(1024, 1024), p, seed) for seed in seeds)
    assert out.unique().equal(torch.tensor([0, 1 / (1 - p)]))
    dropped = (out == 0).double()
    error = (p * (1 - p) / n) ** 0.5
    assert abs(dropped.mean() - p) < 4 * error
    assert abs(out.double().mean() - 1) < 4 * error / (1 - p)
    pairs = {f"lag {lag}": dropped.flatten().roll(lag) for lag in (1, 2, 3, 64, 1024, 4096)}
    pairs["another seed"] = (other == 0).double().flatten()
    for name, shifted in pairs.items():
        both = (dropped.flatten() * shifted).mean()
        assert abs(both - p**2) < 4 * (p**2 / n) ** 0.5, name


@every_kind
def test_every_branch_of_every_block_drops_by_a_seed_of_its_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, seeds = small(kind), list[tuple[int, ...]]()

    def noted(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
        assert p == 0.2
        seeds.append(tuple(seed.tolist()))
        return dropout(x, p, seed)

    for home in (layers, unet):
        monkeypatch.setattr(home, "dropout", noted)
    network(torch.randn(2, *network.shape), torch.rand(2))
    # Two branches a block; blocks down, in the middle and up.
    count = {"dit": 2 * 3, "unet": 3 + 2 + 4, "unet-coarser": 2 * 2 + 2 + 2 * 3, "mlp": 3}[kind]
    assert len(seeds) == len(set(seeds)) == count
    seeds.clear()
    network.eval()(torch.randn(2, *network.shape), torch.rand(2))
    assert seeds == []


def test_dropout_differs_between_blocks_and_passes_and_is_off_in_evaluation() -> None:
    network = small("dit")
    x, t = torch.randn(2, *network.shape), torch.rand(2)
    seeds: list[torch.Tensor] = []
    for block in network.blocks:
        block.register_forward_pre_hook(lambda _, args: seeds.append(args[2]))
    assert not network(x, t).equal(network(x, t))
    assert torch.stack(seeds).view(-1, 2).unique(dim=0).shape[0] == 2 * 3 * 2
    network.eval()
    assert network(x, t).equal(network(x, t))
    assert seeds[-1] is None


def test_dropout_follows_torchs_seed() -> None:
    network = small("unet")
    x, t = torch.randn(2, *network.shape), torch.rand(2)
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(network(x, t))
    assert outputs[0].equal(outputs[1])
    assert not outputs[0].equal(outputs[2])


def test_the_average_of_a_compiled_network_is_compiled_too():
    network = build(UNetConfig(width=32, levels=2), (3, 8, 8), 256)
    model = bsi.Model(network, bsi.BSI(), (3, 8, 8), bsi.Bins.uint8())
    assert not is_compiled(EmaModel(model).model.denoiser.backbone)
    compile_regions(network)  # nothing is compiled before the first call
    assert is_compiled(EmaModel(model).model.denoiser.backbone)
