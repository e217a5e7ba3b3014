"""Compiled, checkpointed and 16-bit forms agree with float32 eager networks, dropout included.

Tolerances are relative: |a - b| / |b| over the output, and over all gradients together.
"""

import copy
import importlib.util
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import bsi
from bsi.backbones import Backbone, BackboneConfig, DiTConfig, MLPConfig, UNetConfig, build, compute_dtype
from bsi.backbones import acceleration as forms
from bsi.backbones.layers import draw_seeds, dropout
from bsi.devices import compiles, type_name
from bsi.errors import UsageError
from bsi.recipes import digits
from bsi.runtime.ema import EmaModel
from test_memory_account import kept_per_image

SMALL: dict[str, tuple[BackboneConfig, tuple[int, ...]]] = {
    "dit": (DiTConfig(width=32, depth=3, heads=2, patch=2, dropout=0.2), (3, 8, 8)),
    "unet": (UNetConfig(width=16, levels=3, dropout=0.2), (3, 8, 8)),
    "unet-coarser": (UNetConfig(width=16, levels=2, heads=2, dropout=0.2, coarser=(24,)), (3, 8, 8)),
    "mlp": (MLPConfig(width=32, depth=3, dropout=0.2), (6,)),
}
every_kind = pytest.mark.parametrize("kind", SMALL)
own_access = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own

EXACT, ROUNDING = 0.0, 2e-5
# bfloat16 keeps 8 bits: 2^-9 = 0.2 % per rounding, and some tens of them in a row; float16 keeps 11
HALF = {torch.bfloat16: 0.03, torch.float16: 0.004}
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def small(kind: str, **settings: Any) -> Backbone:
    """A network of this kind, always the same, with no parameter at 0; a U-Net channels-last, as it is used."""
    torch.manual_seed(0)
    config, shape = SMALL[kind]
    network = build(replace(config, **settings), shape, bins_count=256, num_classes=3)
    for parameter in network.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return network.to(memory_format=torch.channels_last) if kind.startswith("unet") else network


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
    for found, expected in zip(run(network), run(reference), strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.fixture
def compiler(unchecked: None) -> None:
    """A fresh compiler, which cannot trace shape checks."""
    torch._dynamo.reset()
    counters.clear()


# --- Compiled.


@every_kind
@own_access
@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_compiled_networks_agree_and_each_kind_of_region_is_compiled_once(kind: str) -> None:
    network = small(kind)
    forms.compile_regions(network, backend="aot_eager")
    assert_agree(network, small(kind), ROUNDING)
    # Blocks and head; blocks down, attention, blocks up and head; with one coarser resolution, blocks there and in the
    # middle, down- and upsampling.
    kinds = {"dit": 2, "unet": 4, "unet-coarser": 9, "mlp": 2}
    assert counters["stats"]["unique_graphs"] == kinds[kind]
    other = small(kind)
    forms.compile_regions(other, backend="aot_eager")
    assert_agree(other, network, EXACT)
    assert counters["stats"]["unique_graphs"] == kinds[kind], "a second network did not reuse the first one's code"
    assert set(network.state_dict()) == set(small(kind).state_dict())
    if kind in ("dit", "unet-coarser"):
        torch._dynamo.reset()
        inductor = small(kind)
        forms.compile_regions(inductor)
        assert_agree(inductor, small(kind), ROUNDING)


@own_access
@pytest.mark.usefixtures("compiler")
def test_copies_of_compiled_networks_are_compiled() -> None:
    plain, network = small("mlp"), small("mlp")
    forms.compile_regions(network, backend="aot_eager")
    for original in (plain, network):
        copied = copy.deepcopy(original)
        assert not forms.is_compiled(copied), "torch copies compiled code now: compile_like can be removed"
        forms.compile_like(torch.nn.Sequential(copied), torch.nn.Sequential(original), backend="aot_eager")
        assert forms.is_compiled(copied) == forms.is_compiled(original)
        assert_agree(copied, original, EXACT)
    average = EmaModel(bsi.Model(network, bsi.BSI(), (6,), bsi.Bins.uint8())).model
    assert forms.is_compiled(average.denoiser.backbone)


@pytest.mark.slow
@own_access
@pytest.mark.usefixtures("compiler")
def test_a_block_may_have_more_variants_than_torch_allows_by_default() -> None:
    """All variants of one block: down and up, training and evaluation, with and without gradients, any batch size."""
    network = build(UNetConfig(width=4, levels=1, dropout=0.1), (1, 3, 3))
    network.to(memory_format=torch.channels_last)
    forms.compile_regions(network, backend="eager")
    for mode in (True, False):
        for gradients in (True, False):
            for count in (4, 6, 1):
                with torch.set_grad_enabled(gradients):
                    network.train(mode)(torch.randn(count, 1, 3, 3), torch.rand(count))
    assert counters["stats"]["unique_graphs"] > 2 * 8


# --- Checkpointed.


@pytest.mark.parametrize("kind", ["dit", "unet", "unet-coarser"])
def test_checkpointing_saves_memory_without_changing_results(kind: str) -> None:
    assert_agree(small(kind, checkpoint=True), small(kind), EXACT)
    assert kept_per_image(small(kind, checkpoint=True)) < 0.4 * kept_per_image(small(kind))


# --- Sixteen bits.


@every_kind
@pytest.mark.parametrize("half", HALF, ids=str)
def test_networks_in_16_bits_agree_with_float32(kind: str, half: torch.dtype) -> None:
    network = small(kind)
    network.compute_dtype = half
    assert_agree(network, small(kind), HALF[half])
    inside = network.eval()(x := torch.randn(4, *network.shape), t := torch.rand(4))
    network.compute_dtype = None
    with torch.autocast("cpu", half):
        assert network(x, t).equal(inside), "the caller's own autocast has the same effect"


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
def test_frozen_16_bit_weights_agree_with_autocast(kind: str) -> None:
    reference, frozen = small(kind).eval(), small(kind).eval()
    reference.compute_dtype = frozen.compute_dtype = torch.bfloat16
    forms.freeze(frozen)
    assert {p.dtype for p in frozen.parameters()} == {torch.bfloat16, torch.float32}
    assert {p.dtype for p in frozen.condition.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in frozen.parameters())
    x, t = torch.randn(4, *frozen.shape), torch.rand(4)
    with torch.no_grad():
        assert frozen(x, t).equal(reference(x, t))


def test_the_default_precision_depends_on_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compute_dtype("auto", CPU) is compute_dtype("float32", CPU) is compute_dtype("float32", CUDA) is None
    assert compute_dtype("bf16", CPU) is torch.bfloat16  # slow, but requested
    for precision in ("float16", "fp8"):
        with pytest.raises(UsageError, match=f"{precision} needs"):
            compute_dtype(precision, CPU)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert compute_dtype("auto", CUDA) is compute_dtype("bf16", CUDA) is torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    assert compute_dtype("auto", CUDA) is compute_dtype("float16", CUDA) is torch.float16
    with pytest.raises(UsageError, match="Tesla V100"):
        compute_dtype("bf16", CUDA)
    assert [type_name(dtype) for dtype in (None, torch.bfloat16)] == ["float32", "bfloat16"]


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_precision_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"'fp16'\. Use one of auto, bf16, fp8, float16, float32"):
        compute_dtype("fp16", CPU)


# --- Dropout.


def test_dropout_drops_a_fraction_p_independently_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    n, p = 2**20, 0.05
    seeds = draw_seeds(2, CPU)
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
def test_each_branch_draws_its_dropout_seed_from_torchs_generator(kind: str) -> None:
    network = small(kind)
    x, t = torch.randn(2, *network.shape), torch.rand(2)
    drawn: list[torch.Tensor] = []
    for block in network.modules():
        if type(block).__name__ in ("DiTBlock", "UNetBlock", "MLPBlock"):
            block.register_forward_pre_hook(lambda _, args: drawn.append(args[-1]))
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(network(x, t))
    assert outputs[0].equal(outputs[1])
    assert not outputs[0].equal(outputs[2])
    # Two branches in a DiT's block; a U-Net's blocks down, in the middle and up.
    count = {"dit": 2 * 3, "unet": 3 + 2 + 4, "unet-coarser": 2 * 2 + 2 + 2 * 3, "mlp": 3}[kind]
    seeds = torch.cat([each.reshape(-1, 2) for each in drawn]).view(3, count, 2)
    assert len(seeds[[0, 2]].reshape(-1, 2).unique(dim=0)) == 2 * count
    assert network.eval()(x, t).equal(network(x, t))
    assert drawn[-1] is None, "no dropout in evaluation"


# --- The choice of a form: GPUs are simulated, and no kernel runs.

PASCAL, AMPERE = (6, 0), (8, 0)
DIT, UNET = DiTConfig(width=32, depth=1, heads=2), UNetConfig(width=8, levels=1)


def simulate(
    monkeypatch: pytest.MonkeyPatch, generation: tuple[int, int], triton: bool = True, platform: str = "linux",
    cuda: str | None = "13.0",
) -> None:  # fmt: skip
    find = importlib.util.find_spec
    found = find("math") if triton else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "triton" else find(name))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: generation)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(sys, "platform", platform)


def test_a_dit_and_a_unet_in_bfloat16_are_fused_and_all_others_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, AMPERE)
    both, half = {"fused", "lean"}, torch.bfloat16

    def selected(config: BackboneConfig, dtype: torch.dtype | None = half) -> set[str]:
        return {forms.form_of(config, dtype, CUDA, lean) for lean in (False, True)}

    for config in (DIT, UNET):
        assert selected(config) == both
        assert selected(config, torch.float16) == selected(replace(config, checkpoint=True)) == {"compiled"}
    assert selected(DIT, None) == selected(replace(DIT, width=36)) == selected(MLPConfig()) == {"compiled"}
    assert forms.form_of(DIT, half, CPU) == "plain"
    for elsewhere in ({"platform": "win32"}, {"cuda": None}):
        simulate(monkeypatch, AMPERE, **elsewhere)
        assert selected(DIT) == {"compiled"}, "cuBLASLt is called by its name on Linux, with CUDA"


@pytest.mark.parametrize(
    ("device", "generation", "triton"),
    [(CPU, AMPERE, True), (CUDA, PASCAL, True), (CUDA, AMPERE, False)],
    ids=["cpu", "old", "no-triton"],
)
def test_networks_are_unchanged_where_nothing_can_be_compiled(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, generation: tuple[int, int], triton: bool
) -> None:
    networks = [build(config, (3, 4, 4)) for config in (DIT, UNET, MLPConfig(8, 1))]
    simulate(monkeypatch, generation, triton)
    assert not compiles(device)
    for network in networks:
        network.compute_dtype = torch.float16
        forms.accelerate(network, device)
        assert not forms.is_compiled(network)
        assert network.fast is None
    if device == CUDA:
        with pytest.raises(UsageError, match="fp8 needs Triton"):
            forms.accelerate(build(replace(DIT, patch=1), (3, 4, 4)), CUDA, fp8=True)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (UNET, (3, 8, 8)),
        (MLPConfig(16, 1), (16,)),
        (DIT, (3, 8, 12)),
        (replace(DIT, width=24), (3, 8, 8)),
        (replace(DIT, checkpoint=True), (3, 8, 8)),
    ],
    ids=str,
)
def test_fp8_needs_a_dit_with_sizes_divisible_by_sixteen(config: BackboneConfig, shape: tuple[int, ...]) -> None:
    forms.check_fp8(DIT, (3, 8, 8))
    with pytest.raises(UsageError, match=r"only for the DiT|divisible by 16"):
        forms.check_fp8(config, shape)


def test_fp8_is_never_replaced_silently(monkeypatch, tmp_path) -> None:
    with pytest.raises(UsageError, match="lean"):
        replace(digits(), precision="fp8", lean=True)
    own, fp8 = torch.nn.Bilinear(3, 1, 3), replace(digits(), precision="fp8", compile=True)
    with pytest.raises(UsageError, match="fp8"):
        bsi.train(fp8, data=torch.randn(8, 3), backbone=own, out=tmp_path / "own", device="cpu")
    requested = []
    monkeypatch.setattr(
        "bsi.training.train.accelerate", lambda network, device, lean, fp8: requested.append((lean, fp8))
    )
    bsi.train(replace(digits(), steps=1, batch=64, compile=True, lean=True), out=tmp_path / "run", device="cpu")
    assert requested == [(True, False)]
