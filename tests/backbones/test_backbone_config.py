"""Sizes and names of networks, their cost in closed form, and sizes that raise an error before allocation."""

import subprocess
import sys
import time

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bsi.backbones import BackboneConfig, DiTConfig, MLPConfig, UNetConfig, build, cost, resolve
from bsi.backbones.config import DIT_SIZES, KNOWN_NAMES
from bsi.cli import main
from bsi.errors import UsageError
from test_networks import TINY, batch, every_kind, tiny


@every_kind
def test_cost_counts_every_parameter_and_flop_of_a_forward_pass(kind: str) -> None:
    config, shape = TINY[kind]
    for bins_count, num_classes in ((None, 10), (256, 0)):
        network = tiny(kind, bins_count, num_classes).eval()
        counted = cost(config, shape, bins_count, num_classes)
        assert counted.parameters == sum(p.numel() for p in network.parameters())
        # As two products: the counter does not support the CPU's fused attention.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            network(*batch(network))
        assert counter.get_total_flops() == 3 * counted.flops


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("dit-mini/2", 9.7),
        ("dit-s/2", 32.4),
        ("dit-b/2", 129),
        ("dit-l/2", 457),
        ("dit-xl/2", 673),
        ("dit-h/2", 949.4),
        ("dit-g/2", 3034.0),
        ("unet-128x32", 30.5),
        ("unet-128-256-256x2", 27.4),
    ],
)
def test_named_sizes_have_about_the_published_parameters(name: str, millions: float) -> None:
    with torch.device("meta"):
        network = build(name, (3, 32, 32), 256)
    real = sum(p.numel() for p in network.parameters())
    assert cost(resolve(name), (3, 32, 32), 256).parameters == real
    assert real / 1e6 == pytest.approx(millions, rel=0.005)


def test_the_papers_networks_have_the_papers_sizes() -> None:
    assert resolve("dit-l/2") == DiTConfig(width=1024, depth=24, heads=16, patch=2, dropout=0.05)
    assert resolve("DiT-L/4") == DiTConfig(width=1024, depth=24, heads=16, patch=4, dropout=0.05)
    assert resolve("unet-128x32") == UNetConfig(width=128, levels=32, heads=1, dropout=0.1)
    assert resolve("unet-256x32") == UNetConfig(width=256, levels=32, heads=1, dropout=0.1)
    assert resolve("unet-64-96-128x3") == UNetConfig(width=64, levels=3, coarser=(96, 128))
    assert resolve("mlp-64x3") == MLPConfig(width=64, depth=3)
    ours = ("mini", "h", "g")
    assert {name: (c.width, c.depth, c.heads) for name, c in DIT_SIZES.items() if name not in ours} == {
        "s": (384, 12, 6),
        "b": (768, 12, 12),
        "l": (1024, 24, 16),
        "xl": (1152, 28, 16),
    }
    for name in KNOWN_NAMES:
        resolve(name).check((3, 32, 32) if name.startswith(("dit", "unet")) else (2,))


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("dit-l2", "dit-l/2"),
        ("dit-xxl/2", "dit-xl/2"),
        ("unet128x32", "unet-128x32"),
        ("mlp", "mlp-256x4"),
        ("unet-" + "9" * 5000 + "x2", "unet"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(typo: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean '{meant}"):
        resolve(typo)


@pytest.mark.parametrize(
    ("config", "shape", "message"),
    [
        (DiTConfig(16, 1, 2, patch=4), (3, 32, 30), r"got \(32, 30\) and patch 4\. Use a patch that divides 2"),
        (DiTConfig(16, 1, 2, patch=2), (3,), "Use an MLP"),
        (DiTConfig(6, 1, 2), (1, 2, 2, 2, 2), "width of at least 8.*got width=6"),
        (UNetConfig(8, 1), (3,), "Use an MLP"),
        (UNetConfig(8, 1), (3, 2, 2, 2, 2), r"Use a DiT \(dit-s/2\) for more axes"),
        (UNetConfig(8, 1, coarser=(8, 8)), (3, 12, 6), r"multiple of 4, got \(12, 6\)"),
        (MLPConfig(8, 1), (), "got \\(\\)"),
        (MLPConfig(8, 1), (0,), "at least 1"),
    ],
)
def test_data_of_a_wrong_shape_is_rejected_before_memory_is_allocated(
    config: BackboneConfig, shape: tuple[int, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda _: pytest.fail("a module was made"))
    for function in (build, cost):
        with pytest.raises(UsageError, match=message):
            function(config, shape)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DiTConfig(width=100, depth=1, heads=3), r"width=100, heads=3\. Use heads=2"),
        (lambda: UNetConfig(width=8, heads=4, coarser=(10,)), "got width=10, heads=4"),
        (lambda: DiTConfig(width=8, depth=0, heads=1), "depth .* got 0"),
        (lambda: MLPConfig(dropout=1.0), r"\[0, 1\), got 1"),
        (lambda: DiTConfig(width=1_000_000_001, depth=1, heads=1), "width .* got 1000000001"),
        (lambda: UNetConfig(width=8, levels=10**9), "levels .* got 1000000000"),
        (lambda: UNetConfig(width=8, coarser=(10**12,)), "width .* got 1000000000000"),
        (lambda: MLPConfig(depth=10**40), "depth .* got 1000"),
        (lambda: resolve("dit-s/99999999"), "patch .* got 99999999"),
        (lambda: build(MLPConfig(width=65536, depth=4096), (2,)), "more memory than this machine has"),
        (lambda: build("dit-xl/2", (10**12, 2, 2)), "more memory than this machine has"),
    ],
)
def test_impossible_sizes_raise_an_error_before_memory_is_allocated(make, message: str, monkeypatch) -> None:
    monkeypatch.setattr(torch.nn, "Linear", lambda *_: pytest.fail("a layer was made"))
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    "option",
    [
        "--backbone.width 1000000001",
        "--backbone dit-s/2 --backbone.width 65536 --backbone.heads 1",
        "--batch 1000000000",
    ],
)
def test_the_command_line_rejects_absurd_sizes_before_memory_is_allocated(option: str, tmp_path, capsys) -> None:
    started = time.monotonic()
    words = ["train", "digits", "--out", str(tmp_path / "run"), "--device", "cpu", *option.split()]
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert "65536" in printed or "not enough memory" in printed
    assert time.monotonic() - started < 30
    assert list(tmp_path.iterdir()) == []


def test_configs_and_costs_import_no_torch() -> None:
    code = (
        "import sys, bsi.backbones as b; b.cost(b.resolve('dit-l/2'), (3, 32, 32)); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
