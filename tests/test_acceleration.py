"""Which form a network takes on which machine: the GPUs are pretended, and no kernel runs."""

import importlib.util
import sys
from dataclasses import replace

import pytest
import torch

from bsi.backbones import BackboneConfig, DiTConfig, MLPConfig, UNetConfig, accelerate, build
from bsi.backbones.acceleration import check_fp8, form_of, is_compiled
from bsi.devices import compiles
from bsi.errors import UsageError

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
PASCAL, VOLTA, AMPERE = (6, 0), (7, 0), (8, 0)
DIT, UNET = DiTConfig(width=32, depth=1, heads=2), UNetConfig(width=8, levels=1)


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    generation: tuple[int, int],
    triton: bool = True,
    platform: str = "linux",
    cuda: str | None = "13.0",
) -> None:
    find = importlib.util.find_spec
    found = importlib.util.find_spec("math") if triton else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "triton" else find(name))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: generation)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(sys, "platform", platform)


def forms(config: BackboneConfig, half: torch.dtype | None = torch.bfloat16) -> tuple[str, str]:
    """Usual, and lean."""
    return form_of(config, half, CUDA), form_of(config, half, CUDA, lean=True)


def test_a_dit_and_a_unet_in_bfloat16_are_fused_and_all_else_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, AMPERE)
    assert forms(DIT) == ("fused", "lean")
    assert forms(DIT, torch.float16) == forms(DIT, None) == ("compiled", "compiled")
    assert forms(replace(DIT, checkpoint=True)) == forms(replace(DIT, width=36)) == ("compiled", "compiled")
    assert forms(UNET) == ("fused", "lean")
    assert forms(UNET, torch.float16) == forms(replace(UNET, checkpoint=True)) == ("compiled", "compiled")
    assert forms(MLPConfig()) == ("compiled", "compiled")
    assert form_of(DIT, torch.bfloat16, CPU) == "plain"


@pytest.mark.parametrize("elsewhere", [{"platform": "win32"}, {"cuda": None}], ids=["windows", "amd"])
def test_a_dit_is_compiled_where_cublaslt_is_not_linuxs_or_not_there(
    monkeypatch: pytest.MonkeyPatch, elsewhere: dict
) -> None:
    pretend(monkeypatch, AMPERE, **elsewhere)
    assert forms(DIT) == ("compiled", "compiled")


@pytest.mark.parametrize(("generation", "triton"), [(PASCAL, True), (AMPERE, False)], ids=["old", "no-triton"])
def test_where_nothing_can_be_compiled_networks_run_plainly(
    monkeypatch: pytest.MonkeyPatch, generation: tuple[int, int], triton: bool
) -> None:
    """The compiler writes its kernels in Triton, and ends a run with an error where it cannot."""
    networks = [build(config, (3, 4, 4)) for config in (DIT, UNET, MLPConfig(8, 1))]
    pretend(monkeypatch, generation, triton)
    for network in networks:
        network.compute_dtype = torch.float16
        accelerate(network, CUDA)
        assert not is_compiled(network)
    assert networks[0].fast is None
    with pytest.raises(UsageError, match="fp8 needs Triton"):
        accelerate(build(replace(DIT, patch=1), (3, 4, 4)), CUDA, fp8=True)
    assert not compiles(CUDA)


def test_fp8_takes_whole_tiles_of_sixteen_alone() -> None:
    check_fp8(DIT, (3, 8, 8))
    for config, shape in (
        (DIT, (3, 8, 12)),
        (replace(DIT, width=24), (3, 8, 8)),
        (replace(DIT, checkpoint=True), (3, 8, 8)),
    ):
        with pytest.raises(UsageError, match="divisible by 16"):
            check_fp8(config, shape)


def test_a_unet_takes_the_form_that_it_is_said_to_have(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, AMPERE)
    for lean, form in ((False, "fused"), (True, "lean")):
        network = build(UNET, (3, 4, 4))
        network.compute_dtype = torch.bfloat16
        accelerate(network, CUDA, lean)
        assert network.fast.lean == (form == "lean")
        assert not is_compiled(network)


def test_volta_and_later_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    network = build(DIT, (3, 4, 4))
    pretend(monkeypatch, VOLTA)
    network.compute_dtype = torch.float16
    accelerate(network, CUDA)
    assert is_compiled(network)
    assert network.fast is None
    assert compiles(CUDA)
    assert not compiles(CPU)


@pytest.mark.parametrize("space", [(4,), (4, 4), (4, 4, 4)], ids=["1d", "2d", "3d"])
def test_a_unets_weights_lie_channels_last_with_any_number_of_axes(
    monkeypatch: pytest.MonkeyPatch, space: tuple[int, ...]
) -> None:
    network = build(UNET, (3, *space))
    pretend(monkeypatch, VOLTA)
    accelerate(network, CUDA)
    order = {2: torch.channels_last, 3: torch.channels_last_3d}.get(len(space), torch.contiguous_format)
    assert all(p.is_contiguous(memory_format=order) for p in network.parameters() if p.ndim == 2 + len(space))


def test_on_a_cpu_accelerating_changes_nothing() -> None:
    network = build(DIT, (3, 4, 4))
    accelerate(network, CPU)
    assert network.fast is None
    assert not is_compiled(network)
