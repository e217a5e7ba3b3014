"""The memory of a network in closed form, against what autograd keeps and what optimizers hold."""

import runpy
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from bsi.backbones import Backbone, BackboneConfig, DiTConfig, MLPConfig, UNetConfig, build, compile_regions, resolve
from bsi.backbones.memory import CONTEXT, Form, OptimizerKind, evaluation_memory, training_memory
from bsi.recipe import Optimizer
from bsi.training.optimizers import Optimizers

GIB = 2**30
SHAPE = (3, 16, 16)
own_access = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own access


@pytest.fixture
def compiler() -> Iterator[None]:
    """A fresh compiler, and no shape checks inside compiled code, which it cannot trace."""
    torch._dynamo.reset()
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch._dynamo.reset()


def kept_per_image(network: Backbone) -> float:
    """Bytes that autograd saves for one more image, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}

    def kept(batch: int) -> int:
        found: dict[int, int] = {}

        def note(saved: torch.Tensor) -> torch.Tensor:
            storage = saved.untyped_storage()
            if storage.data_ptr() not in weights:
                found[storage.data_ptr()] = storage.nbytes()
            return saved

        with saved_tensors_hooks(note, lambda saved: saved):
            output = network(torch.randn(batch, *SHAPE), torch.rand(batch))
        del output
        return sum(found.values())

    return (kept(8) - kept(4)) / 4


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (DiTConfig(64, 2, 2), DiTConfig(64, 4, 2)),
        (UNetConfig(32, 2), UNetConfig(32, 4)),
        pytest.param(UNetConfig(32, 2, coarser=(64,)), UNetConfig(32, 4, coarser=(64,)), marks=pytest.mark.slow),
        (MLPConfig(64, 2), MLPConfig(64, 4)),
    ],
    ids=["dit", "unet", "unet-coarser", "mlp"],
)
@pytest.mark.parametrize(("form", "half"), [("plain", False), ("compiled", True)])
@own_access
@pytest.mark.usefixtures("compiler")
def test_the_account_is_what_autograd_keeps(small: BackboneConfig, large: BackboneConfig, form: Form, half: bool):
    """Of two blocks or levels more, and in total; the working memory of one block is added in the estimate."""
    _compare(small, large, form, half, at_most=2.5)


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (DiTConfig(64, 2, 2, checkpoint=True), DiTConfig(64, 4, 2, checkpoint=True)),
        (UNetConfig(32, 2, checkpoint=True), UNetConfig(32, 4, checkpoint=True)),
        (UNetConfig(32, 2, checkpoint=True, coarser=(64,)), UNetConfig(32, 4, checkpoint=True, coarser=(64,))),
    ],
    ids=["dit", "unet", "unet-coarser"],
)
def test_the_account_is_what_checkpointing_keeps(small: BackboneConfig, large: BackboneConfig):
    """Little: the working memory of one block is most of the estimate."""
    _compare(small, large, "plain", half=True, at_most=6)


def _compare(small: BackboneConfig, large: BackboneConfig, form: Form, half: bool, at_most: float):
    found = []
    for config in (small, large):
        network = build(config, SHAPE, 256).train()
        network.compute_dtype = torch.bfloat16 if half else None
        if form == "compiled":
            compile_regions(network, backend="aot_eager_decomp_partition")
        found.append(kept_per_image(network))
    accounts = [training_memory(config, SHAPE, 256, form=form, half=half).per_image for config in (small, large)]
    assert accounts[1] - accounts[0] == pytest.approx(found[1] - found[0], rel=0.05)
    assert found[0] < accounts[0] < at_most * found[0]


@pytest.mark.parametrize(
    ("name", "form", "batch", "gib"),
    [
        ("dit-l/2", "compiled", 128, 26.7),
        ("dit-l/2", "fused", 256, 63.0),
        ("unet-128x32", "fused", 128, 10.5),
        ("unet-128x32", "lean", 128, 5.3),
    ],
)
def test_the_account_meets_what_was_measured_on_an_h200(name: str, form: Form, batch: int, gib: float):
    account = training_memory(resolve(name), (3, 32, 32), 256, form=form).bytes(batch) - CONTEXT
    assert 0.98 < account / GIB / gib < 1.1


@pytest.mark.parametrize("name", ["dit-mini/2", "dit-l/2", "unet-128x32", "unet-128-256-256x2", "mlp-256x4"])
@pytest.mark.parametrize("ranks", [1, 8])
def test_the_largest_batch_is_the_largest(name: str, ranks: int):
    for memory in (
        training_memory(resolve(name), (3, 32, 32), 256),
        evaluation_memory(resolve(name), (3, 32, 32), 256),
    ):
        for room in (8 * GIB, 24 * GIB, 80 * GIB):
            images = memory.largest(room, ranks)
            assert images == 0 or memory.bytes(images, ranks) <= room
            assert memory.bytes(images + 1, ranks) > room - 2 * memory.per_image
    assert training_memory(resolve("dit-xl/2"), (3, 32, 32), 256).largest(8 * GIB) == 0


NETWORKS = [
    DiTConfig(64, 2, 2), DiTConfig(48, 3, 2, mlp_ratio=3), MLPConfig(32, 3), MLPConfig(64, 2, mlp_ratio=1),
    UNetConfig(32, 2), UNetConfig(16, 1, coarser=(32, 48)),
]  # fmt: skip


@pytest.mark.parametrize("config", NETWORKS, ids=str)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_account_has_every_byte_of_the_optimizers_moments(config: BackboneConfig, kind: OptimizerKind):
    """AdamW has two, Muon one for the matrices inside the network. Step counts are not included."""
    network = build(config, SHAPE, 256, num_classes=3)
    state = Optimizers(network, Optimizer(lr=1e-3, kind=kind)).state()
    found = sum(tensor.nbytes for name, tensor in state.items() if not name.startswith("step/"))
    weights_and_average = 2 * sum(p.nbytes for p in network.parameters())
    account = training_memory(config, SHAPE, 256, 3, half=False, optimizer=kind)
    assert account.state == weights_and_average + found


class Peak(TorchDispatchMode):
    """The most bytes that operations hold at once, in addition to the given tensors."""

    def __init__(self, there: list[torch.Tensor]) -> None:
        super().__init__()
        self.held = {tensor.untyped_storage()._cdata: 0 for tensor in there}
        self.peak = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.held:
                self.held[storage._cdata] = storage.nbytes()
                self.peak = max(self.peak, sum(self.held.values()))
                weakref.finalize(storage, self.held.pop, storage._cdata, 0)
        return result


@pytest.mark.parametrize("config", NETWORKS, ids=str)
@pytest.mark.parametrize("half", [False, True])
def test_the_account_has_what_muon_takes_for_its_update(config: BackboneConfig, half: bool, monkeypatch):
    """With 16 bits as on a GPU, where a step differs only in the type."""
    if half:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    network = build(config, SHAPE, 256)
    muon = Optimizers(network, Optimizer(lr=1e-3, kind="muon")).muon
    for matrix in muon.matrices:
        matrix.grad = torch.randn_like(matrix)
    one, there = torch.ones(()), [*muon.matrices, *muon.momenta, *(p.grad for p in muon.matrices if p.grad is not None)]
    with Peak(there) as found:
        muon.step(0.1 * one, one, one > 0)
    account = training_memory(config, SHAPE, 256, half=half, optimizer="muon")
    assert found.peak <= account.update + 64 < 1.3 * found.peak  # a few numbers on the way
    few, none = account.bytes(1) - CONTEXT, training_memory(config, SHAPE, 256, half=half).update
    assert few >= account.state + account.gradients + account.update
    assert none == 0


def test_the_documented_table_of_largest_batches_is_what_its_script_prints(monkeypatch, capsys):
    folder = Path(__file__).parents[2] / "docs" / "benchmarks"
    monkeypatch.setattr(sys, "argv", ["batches.py"])
    runpy.run_path(str(folder / "batches.py"), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    section = (folder / "networks.md").read_text().partition("## The largest batch that fits")[2]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 10
    assert [row for row in rows if row not in printed] == []
