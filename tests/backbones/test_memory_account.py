"""The memory of a network in closed form, against what autograd keeps and what optimizers hold."""

import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from bsi.backbones import Backbone, BackboneConfig, DiTConfig, MLPConfig, UNetConfig, build, resolve
from bsi.backbones.costs import CONTEXT, Form, training_memory
from bsi.recipe import Optimizer
from bsi.training.optimizers import Optimizers

GIB = 2**30
SHAPE = (3, 16, 16)


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
            output = network(torch.randn(batch, *network.shape), torch.rand(batch))
        del output
        return sum(found.values())

    return (kept(8) - kept(4)) / 4


SMALL = {
    "dit": DiTConfig(64, 2, 2),
    "unet": UNetConfig(32, 2),
    "unet-coarser": UNetConfig(32, 2, coarser=(64,)),
    "mlp": MLPConfig(64, 2),
}


def assert_kept(config: BackboneConfig, half: bool, at_most: float) -> None:
    """By two blocks or levels more, and in total; the working memory of one block is added in the estimate."""
    found, accounts = [], []
    more = {"levels" if isinstance(config, UNetConfig) else "depth": 4}
    for each in (config, replace(config, **more)):
        network = build(each, SHAPE, 256).train()
        network.compute_dtype = torch.bfloat16 if half else None
        found.append(kept_per_image(network))
        accounts.append(training_memory(each, SHAPE, 256, form="plain", half=half).per_image)
    assert accounts[1] - accounts[0] == pytest.approx(found[1] - found[0], rel=0.05)
    assert found[0] < accounts[0] < at_most * found[0]


@pytest.mark.parametrize("kind", SMALL)
def test_the_memory_estimate_equals_what_autograd_keeps(kind: str) -> None:
    assert_kept(SMALL[kind], half=False, at_most=2.5)


@pytest.mark.parametrize("kind", ["dit", "unet", "unet-coarser"])
def test_the_memory_estimate_equals_what_checkpointing_keeps(kind: str) -> None:
    """Checkpointing stores little: the working memory of one block is most of the estimate."""
    assert_kept(replace(SMALL[kind], checkpoint=True), half=True, at_most=6)


L2, RECOMPUTED = resolve("dit-l/2"), replace(resolve("dit-l/2"), checkpoint=True)
WIDE = DiTConfig(width=2048, depth=40, heads=16, checkpoint=True)


@pytest.mark.parametrize(
    ("config", "form", "shards", "batch", "gib"),
    [
        (L2, "fused", None, 128, 35.43),
        (L2, "fused", None, 512, 118.3),
        (L2, "lean", None, 128, 26.7),
        (L2, "compiled", 1, 128, 24.21),
        (RECOMPUTED, "compiled", None, 128, 10.28),
        (RECOMPUTED, "compiled", 1, 128, 9.73),
        (WIDE, "compiled", 1, 32, 64.15),
        (replace(WIDE, depth=72), "compiled", 1, 32, 115.17),
        (replace(WIDE, depth=80), "compiled", 1, 32, 127.93),
        (resolve("unet-128x32"), "fused", None, 128, 10.5),
        (resolve("unet-128x32"), "lean", None, 128, 5.3),
    ],
    ids=str,
)
def test_the_memory_estimate_agrees_with_measurements_on_an_h200(
    config: BackboneConfig, form: Form, shards: int | None, batch: int, gib: float
):
    """The peak of torch's allocator in a training step in bfloat16; with FSDP, a single rank that gathers from itself.

    docs/benchmarks/sharding.py and networks.md have the commands.
    """
    account = training_memory(config, (3, 32, 32), 256, form=form, shards=shards).bytes(batch) - CONTEXT
    assert 0.98 < account / GIB / gib < 1.07


@pytest.mark.parametrize("name", ["dit-mini/2", "dit-l/2", "unet-128x32", "unet-128-256-256x2", "mlp-256x4"])
@pytest.mark.parametrize("ranks", [1, 8])
def test_the_largest_batch_fits_and_one_more_does_not(name: str, ranks: int):
    memory = training_memory(resolve(name), (3, 32, 32), 256)
    for available in (8 * GIB, 24 * GIB, 80 * GIB):
        images = memory.largest(available, ranks)
        assert images == 0 or memory.bytes(images, ranks) <= available
        assert memory.bytes(images + 1, ranks) > available - 2 * memory.per_image
    assert training_memory(resolve("dit-xl/2"), (3, 32, 32), 256).largest(8 * GIB) == 0


@pytest.mark.parametrize(
    "config", [DiTConfig(64, 2, 2), UNetConfig(16, 1, coarser=(32, 48)), MLPConfig(32, 3)], ids=str
)
def test_the_memory_estimate_has_every_byte_of_the_optimizers_moments(config: BackboneConfig):
    """AdamW has two of each weight, Muon fewer. Step counts are not included."""
    network = build(config, SHAPE, 256, num_classes=3)
    weights_and_average = 2 * sum(p.nbytes for p in network.parameters())
    for kind in ("adamw", "muon"):
        state = Optimizers(network, Optimizer(lr=1e-3, kind=kind)).state()
        found = weights_and_average + sum(t.nbytes for name, t in state.items() if not name.startswith("step/"))
        account = training_memory(config, SHAPE, 256, 3, half=False, optimizer=kind).state
        assert found == account if kind == "adamw" else 0.85 * account < found < 1.15 * account


def test_the_documented_table_of_largest_batches_is_the_output_of_its_script(monkeypatch, capsys):
    folder = Path(__file__).parents[2] / "docs" / "benchmarks"
    monkeypatch.setattr(sys, "argv", ["batches.py"])
    runpy.run_path(str(folder / "batches.py"), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    section = (folder / "networks.md").read_text().partition("## The largest batch that fits")[2]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 10
    assert [row for row in rows if row not in printed] == []
