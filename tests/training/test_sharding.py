"""FSDP and HSDP with real processes on gloo: rows 1, 3, 8, 15 and 17 of docs/reliability.md, and equality with DDP.

Rows 2, 4, 10, 12, 13 and 36 are in test_faults_ranks.py.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

import bsi
from bsi.backbones import build
from bsi.backbones.config import BackboneConfig, DiTConfig, resolve
from bsi.backbones.costs import Cluster, cost, parts, predict, training_memory
from bsi.cli import main
from bsi.errors import UsageError
from bsi.recipe import from_plain, to_plain
from bsi.recipes import autoencoder_mini, digits
from bsi.runtime import checkpoint, out_of_memory
from bsi.runtime.distributed import Place, World
from bsi.runtime.export import DataSpec, export
from bsi.training.sharding import ShardedEngine, blocks_of, large_layers, shard
from faults.runs import Ended, Entry, fault, fingerprint, latest, metrics, samples, sequence, status

STOPS = (1, 11)
PHASES = ("save:write", "save:half", "save:publish", "save:latest", "save:prune")
ALL = (
    "--accumulation 2 --ema.powers 0.05 0.1 --ema.snapshot 12 --backbone.checkpoint --backbone.depth 2 "
    "--steps 50 --every.journal 1 --every.evaluate 25 --every.sample 25 --samples.count 2"
)

Chains = dict[str, list[Ended]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def chains(base: Path) -> Chains:
    """Chains of runs of two or four forked ranks, by the name of their folder."""

    def out(name: str, *faults: dict, parallel: str = "fsdp", copy: str = "", words: str = "", **more: int) -> Entry:
        log = base / f"{name}.log" if name in ("whole", "stopped") else None
        options = ["--parallel", parallel, *words.split()]
        return Entry(base / name, options, list(faults), log=log, copy=base / copy if copy else None, **{
            "ranks": 2, **more
        })  # fmt: skip

    plans = {
        "whole": [out("whole", copy="damaged")],
        "stopped": [*(out("stopped", fault("step", "signal SIGTERM self", s)) for s in STOPS), out("stopped")],
        "killed": [
            *(out("killed", fault(p, "kill", 16, rank=1), copy=f"killed-1-{p[5:]}") for p in PHASES[:2]),
            *(out("killed", fault(p, "kill", 16), copy=f"killed-0-{p[5:]}") for p in PHASES),
            out("killed"),
        ],
        "full": [
            out("full", fault("save:space", "none left", 16), copy="full-before"),
            out("full", fault("save:half", "no space", 16, rank=1), copy="full-within"),
            out("full"),
        ],
        "all-ddp": [out("all-ddp", parallel="ddp", words=ALL)],
        "all-fsdp": [out("all-fsdp", words=ALL)],
        "adamw-ddp": [out("adamw-ddp", parallel="ddp", words="--optimizer.kind adamw", ranks=4)],
        "adamw-hsdp": [out("adamw-hsdp", parallel="hsdp", words="--optimizer.kind adamw", ranks=4, local=2)],
        "audited": [out("audited", words="--audit --optimizer.kind adamw", ranks=4)],
        "audited-alone": [out("audited-alone", parallel="ddp", words="--audit --optimizer.kind adamw", ranks=1)],
        "alone": [out("alone", ranks=1)],
        "odd": [out("odd", parallel="hsdp", ranks=2, local=1)],
        "changed": [
            out("changed", fault("step", "signal SIGTERM self", 3)),
            out("changed", parallel="ddp"),
        ],
    }  # fmt: skip
    ended = iter(sequence(base / "plans", *(entry for plan in plans.values() for entry in plan)))
    return {name: [next(ended) for _ in plan] for name, plan in plans.items()}


def codes(chain: list[Ended]) -> list[list[int]]:
    return [ended.codes for ended in chain]


def losses(run: Path) -> np.ndarray:
    return np.array([line["loss"] for line in metrics(run) if line["event"] == "train"])


def far(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The relative distance of all tensors together: the gradients of key biases are only rounding errors."""
    assert a.keys() == b.keys()
    x, y = (torch.cat([tensors[name].flatten().double() for name in a]) for tensors in (a, b))
    return float((x - y).norm() / y.norm())


@pytest.mark.slow
def test_a_stopped_run_has_the_bits_of_an_uninterrupted_one(base: Path, chains: Chains) -> None:
    """Rows 1 and 8."""
    assert codes(chains["stopped"]) == [[75, 75]] * len(STOPS) + [[0, 0]]
    assert fingerprint(base / "stopped") == fingerprint(base / "whole")
    assert metrics(base / "stopped") == metrics(base / "whole")
    assert samples(base / "stopped.log") == samples(base / "whole.log")


@pytest.mark.slow
def test_a_kill_in_any_phase_of_a_sharded_save_keeps_a_valid_checkpoint(base: Path, chains: Chains) -> None:
    """Row 3: the second rank while it writes its part, then the first in every phase."""
    assert [ended.codes[1] for ended in chains["killed"][:2]] == [-9] * 2
    assert [ended.codes[0] for ended in chains["killed"][2:]] == [-9] * len(PHASES) + [0]
    steps = {"1-write": 8, "1-half": 8, "0-write": 8, "0-half": 8, "0-publish": 8, "0-latest": 8, "0-prune": 16}
    for name, step in steps.items():
        found = checkpoint.find(base / f"killed-{name}" / "checkpoints", pytest.fail)
        assert found is not None
        assert found.step == step, name
    assert not list((base / "killed" / "checkpoints").glob(".*"))
    assert fingerprint(base / "killed") == fingerprint(base / "whole")
    assert metrics(base / "killed") == metrics(base / "whole")


@pytest.mark.slow
def test_a_full_disk_of_any_rank_keeps_the_previous_checkpoint(base: Path, chains: Chains) -> None:
    """Row 17."""
    assert codes(chains["full"]) == [[1, 1], [1, 1], [0, 0]]
    for ended, copy in zip(chains["full"][:2], ("full-before", "full-within"), strict=True):
        assert "no space for a checkpoint in" in ended.stderr
        assert "Traceback" not in ended.stderr
        assert latest(base / copy) == "step-00000008"
        assert not list((base / copy / "checkpoints").glob(".step-*"))
        assert status(base / copy)["state"] == "failed"
    assert fingerprint(base / "full") == fingerprint(base / "whole")


@pytest.mark.slow
def test_damage_to_any_rank_s_file_is_named_and_the_previous_checkpoint_is_used(base: Path, chains: Chains) -> None:
    """Row 15."""
    path = base / "damaged" / "checkpoints" / "step-00000024" / "ema-00001-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    (ended,) = sequence(base / "plans", Entry(base / "damaged", ["--parallel", "fsdp"], ranks=2))
    assert ended.codes == [0, 0]
    assert f"{path.name} is damaged" in ended.stderr
    assert "step-00000016" in ended.stderr
    assert fingerprint(base / "damaged") == fingerprint(base / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("pair", [("all-ddp", "all-fsdp"), ("adamw-ddp", "adamw-hsdp")])
def test_losses_and_weights_are_those_of_ddp(base: Path, chains: Chains, pair: tuple[str, str]) -> None:
    """50 steps in float32 with Muon, pieces, recomputed blocks and stored averages; and AdamW on two hosts of two."""
    ours, theirs = (base / name for name in reversed(pair))
    assert {code for name in pair for code in chains[name][0].codes} == {0}, chains[pair[1]][0].stderr
    assert np.allclose(losses(ours), losses(theirs), rtol=1e-6, atol=0)
    tests = [[line["bits_per_dim"] for line in metrics(run) if line["event"] == "evaluate"] for run in (ours, theirs)]
    assert tests[0] == pytest.approx(tests[1], rel=1e-6)
    assert far(*(dict(bsi.load(run).state_dict()) for run in (ours, theirs))) < 1e-3
    for path in sorted((ours / "averages").glob("*")):
        assert far(*(safetensors.torch.load_file(run / "averages" / path.name) for run in (ours, theirs))) < 1e-3


@pytest.mark.slow
def test_an_audited_run_has_the_bits_of_a_single_rank(base: Path, chains: Chains) -> None:
    """With AdamW; test_faults_ranks.py has Muon and changing layouts."""
    assert codes(chains["audited"]) == [[0] * 4]
    assert fingerprint(base / "audited") == fingerprint(base / "audited-alone")
    assert metrics(base / "audited") == metrics(base / "audited-alone")


@pytest.mark.slow
def test_a_sharded_run_is_exported_and_sampled(base: Path, chains: Chains, tmp_path: Path) -> None:
    run = base / "whole"
    assert len(list((run / "checkpoints" / "step-00000024").glob("model-*-of-00002.safetensors"))) == 2
    path = export(run, tmp_path / "model.safetensors")
    exported, loaded = bsi.load(path), bsi.load(run)
    assert all(torch.equal(a, b) for a, b in zip(exported.parameters(), loaded.parameters(), strict=True))
    assert torch.equal(exported.sample(2, steps=2), loaded.sample(2, steps=2))
    assert list((base / "all-fsdp" / "samples").glob("*.png")), "drawn during training"


@pytest.mark.slow
def test_layouts_that_do_not_fit_are_an_error_before_the_first_step(base: Path, chains: Chains) -> None:
    for name, words in (("alone", "got one CPU process"), ("odd", "at least two on each")):
        assert set(chains[name][0].codes) == {2}
        assert words in chains[name][0].stderr
        assert not (base / name).exists()
    assert codes(chains["changed"]) == [[75, 75], [2, 2]]
    assert "parallel: fsdp -> ddp" in chains["changed"][1].stderr
    assert "--allow parallel" in chains["changed"][1].stderr


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shards"), [("whole", 2), ("adamw-hsdp", 2)])
def test_a_rank_has_the_bytes_of_the_closed_form(base: Path, chains: Chains, name: str, shards: int) -> None:
    """Weights, average and moments in its part of a checkpoint, in float32; rows are not always divisible."""
    state = checkpoint.verify(base / name / "checkpoints" / "step-00000024").state
    recipe = from_plain(bsi.Recipe, state["recipe"])
    kind = recipe.optimizer.kind
    account = training_memory(recipe.backbone, (1, 8, 8), 17, half=False, optimizer=kind, shards=shards)
    for rank in range(shards):
        found = 0
        for file in ("model", "ema", "optimizer"):
            part = base / name / "checkpoints" / "step-00000024" / f"{file}-{rank:05d}-of-{shards:05d}.safetensors"
            tensors = safetensors.torch.load_file(part)
            found += sum(t.nbytes for key, t in tensors.items() if not key.startswith(("counter/", "step/")))
        assert found == pytest.approx(account.state, rel=0.01 if kind == "adamw" else 0.15)


@pytest.mark.parametrize("name", ["dit-s/2", "dit-b/8", "unet-32x2", "unet-64-128x1", "mlp-512x4"])
def test_the_units_that_are_gathered_are_those_of_the_closed_form(name: str) -> None:
    """All blocks, and the layers that would otherwise stay gathered with the rest."""
    shape = (3, 8, 8)
    with torch.device("meta"):
        network = build(name, shape, 256, num_classes=3)
    blocks = blocks_of(network)
    counted = parts(resolve(name), shape, 256, num_classes=3)
    sizes = [
        sorted(sum(p.numel() for p in m.parameters()) for m in ms) for ms in (blocks, large_layers(network, blocks))
    ]
    assert sizes == [sorted(part.parameters for part in found) for found in (counted.blocks, counted.layers)]
    assert sum(map(sum, sizes)) + counted.rest.parameters == sum(p.numel() for p in network.parameters())


def test_what_stays_in_float32_is_not_gathered_in_16_bits() -> None:
    """The embedding of the condition is computed in float32, though a layer of it is large."""
    with torch.device("meta"):
        network = build("dit-g/2", (3, 8, 8))
    condition = {id(module) for module in network.condition.modules()}
    assert network.condition.mix.weight.numel() > 1 << 20
    assert not condition & {id(layer) for layer in large_layers(network, blocks_of(network))}


def test_what_a_step_sends() -> None:
    """2 (N - 1) / N x 4 P bytes for DDP; with FSDP the weights twice in 16 bits and the gradients once."""
    config, shape = resolve("dit-g/2"), (3, 32, 32)
    parameters = cost(config, shape, 256).parameters

    def of(parallel, ranks, **more):
        return predict(config, shape, Cluster(ranks), 64 * ranks, parallel, bins_count=256, **more)

    def sent(parallel, ranks, **more):
        return round(1e9 * of(parallel, ranks, **more).gb_sent_per_step)

    assert sent("ddp", 1) == sent("fsdp", 1) == 0
    assert sent("ddp", 8) == sent("fsdp", 8) == sent("hsdp", 8) == 7 * parameters
    assert sent("fsdp", 8, accumulation=2) == pytest.approx(7 / 8 * 12 * parameters)
    assert sent("hsdp", 64) == pytest.approx(7 / 8 * 8 * parameters + 2 * 7 / 8 * 4 / 8 * parameters)
    assert of("fsdp", 512).gib_per_rank < of("fsdp", 64).gib_per_rank < of("ddp", 64).gib_per_rank
    slow = Cluster(64, network_gb_per_s=1.0)
    alone = predict(config, shape, slow, 64 * 64, "fsdp", bins_count=256)
    assert alone.step_ms == pytest.approx(alone.communication_ms + alone.update_ms), "nothing is hidden twice"


@pytest.mark.slow
def test_the_documented_table_is_what_its_script_prints() -> None:
    docs = Path(__file__).parents[2] / "docs"
    script = runpy.run_path(str(docs / "benchmarks" / "many_gpus.py"))
    page = (docs / "many-gpus.md").read_text("utf-8")
    assert [row for case in script["ROWS"] if (row := script["row"](*case)) not in page] == []


def test_a_dry_run_for_ranks_needs_a_shape_or_data(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "digits", "--dry-run", "--json", "--ranks", "8", "--parallel", "hsdp"]
    assert main([*words, "--local-ranks", "3"]) == 2
    assert "equal number of ranks" in capsys.readouterr().err
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["parallel"], found["parameters"]) == (
        8,
        "hsdp",
        cost(digits().backbone, (1, 8, 8), 17).parameters,
    )
    assert found["predicted_images_per_s"] > 0


def test_blocks_of_other_networks_are_the_elements_of_their_lists() -> None:
    own = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    assert blocks_of(own) == list(own[1])


@pytest.fixture
def alone() -> Iterator[World]:
    """A process group of one rank, as a single GPU has with FSDP."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(Place(), torch.device("cpu"))
    dist.destroy_process_group()


def model_of(config: BackboneConfig) -> bsi.Model:
    torch.manual_seed(0)
    network = build(config, (1, 8, 8), 17)
    for parameter in network.parameters():
        if not bool(parameter.any()):
            nn.init.normal_(parameter, std=0.02)  # a layer of zeros would hide the layers before it
    return bsi.Model(network, bsi.BSI(), (1, 8, 8), bsi.Bins(-1.0, 1.0, 17)).train()


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_gradients_are_those_of_the_plain_network(alone: World, checkpoint: bool, half: torch.dtype | None) -> None:
    """In both precisions, and with recomputed blocks."""
    config = DiTConfig(32, 2, 2, dropout=0.1, checkpoint=checkpoint)
    plain, model = model_of(config), model_of(config)
    for each in (plain, model):
        each.denoiser.backbone.compute_dtype = half
    engine = ShardedEngine(replace(digits(), backbone=config, parallel="fsdp"), model, alone, half)
    x, t = torch.randn(4, 1, 8, 8), torch.rand(4)
    for network in (plain.denoiser.backbone, model.denoiser.backbone):
        torch.manual_seed(1)
        network(x, t).square().sum().backward()
    engine.collect()
    for name, parameter in plain.denoiser.backbone.named_parameters():
        found = engine.parts[name].grad
        assert torch.allclose(found, parameter.grad, rtol=1e-4, atol=1e-5 * float(parameter.grad.abs().max())), name


COMPILED = """
import torch
import torch.distributed as dist

from bsi.backbones.acceleration import compile_regions
from training.test_sharding import DiTConfig, Place, World, digits, model_of, replace, ShardedEngine

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
config = DiTConfig(32, 2, 2, dropout=0.1, checkpoint=True)
plain, model = model_of(config), model_of(config)
recipe = replace(digits(), backbone=config, parallel="fsdp")
engine = ShardedEngine(recipe, model, World(Place(), torch.device("cpu")), None)
compile_regions(model.denoiser.backbone, backend="aot_eager")
x, t = torch.randn(4, 1, 8, 8), torch.rand(4)
for network in (plain.denoiser.backbone, model.denoiser.backbone):
    torch.manual_seed(1)
    network(x, t).square().sum().backward()
engine.collect()
for name, parameter in plain.denoiser.backbone.named_parameters():
    assert torch.allclose(engine.parts[name].grad, parameter.grad, rtol=1e-4, atol=1e-6), name
print(sum(region.forward.__qualname__.startswith("_static") for region in model.denoiser.backbone.blocks))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_blocks_are_compiled_inside_the_hooks_of_fsdp() -> None:
    """In a process without the checks of shapes, which the compiler cannot trace."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{Path(__file__).parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    ended = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, env=environment, timeout=300
    )
    assert ended.stdout.strip() == "2", ended.stderr


def test_an_evaluation_has_the_average_and_leaves_no_weights_behind(alone: World) -> None:
    plain = model_of(DiTConfig(32, 2, 2))
    engine = ShardedEngine(replace(digits(), parallel="fsdp"), model_of(DiTConfig(32, 2, 2)), alone, None)
    with torch.no_grad():
        for part in engine.parts.values():
            part.zero_()
    with engine.ema.evaluating() as model:
        assert torch.equal(model.sample(2, steps=2), plain.eval().sample(2, steps=2))
    assert all(parameter.is_meta for parameter in model.parameters())


RANK = """
import sys, torch, torch.distributed as dist
from dataclasses import replace
import bsi
from bsi.backbones import build
from bsi.backbones.config import UNetConfig
from bsi.recipes import digits
from bsi.runtime.distributed import Place, World
from bsi.training.sharding import shard

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
torch.manual_seed(0)
with torch.device("cpu" if rank == 0 else "meta"):
    network = build(UNetConfig(width=4, levels=1, dropout=0.0), (1, 8, 8), 17)
plain = {name: value.clone() for name, value in network.state_dict().items()}
model = bsi.Model(network, bsi.BSI(), (1, 8, 8), bsi.Bins(-1.0, 1.0, 17))
shard(replace(digits(), parallel="fsdp", compile=False), model, World(Place(rank, 2), torch.device("cpu")), None, 2)
whole = {name: p.full_tensor() for name, p in model.denoiser.backbone.named_parameters()}
assert any(p.to_local().numel() < p.numel() for p in model.denoiser.backbone.parameters())
if rank == 0:
    assert whole and all(torch.equal(value, plain[name]) for name, value in whole.items())
dist.barrier()
"""


def test_only_the_first_rank_needs_memory_for_all_weights(tmp_path: Path) -> None:
    """The other rank builds on the meta device, and has rows of the first rank's weights, to the bit."""
    words = [sys.executable, "-c", RANK]
    ranks = [subprocess.Popen([*words, str(rank), str(tmp_path)]) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]


def test_a_parameter_in_two_places_is_an_error(alone: World) -> None:
    model = model_of(DiTConfig(width=16, depth=2, heads=2, patch=4, dropout=0.0))
    blocks = blocks_of(model.denoiser.backbone)
    blocks[1].attention = blocks[0].attention
    with pytest.raises(UsageError, match="two places"):
        shard(digits(), model, alone, None, 1)


def test_a_network_without_blocks_is_an_error() -> None:
    with pytest.raises(UsageError, match="ModuleList"):
        blocks_of(nn.Linear(2, 2))


def test_recipes_hold_the_layout() -> None:
    recipe = from_plain(bsi.Recipe, {**to_plain(digits()), "parallel": "hsdp"})
    assert recipe.parallel == "hsdp"
    with pytest.raises(UsageError, match="autoencoder"):
        replace(autoencoder_mini(), parallel="fsdp")
    with pytest.raises(UsageError, match="lean"):
        from_plain(bsi.Recipe, {**to_plain(digits()), "parallel": "fsdp", "lean": True})


def rows(name: str, count: int, parts: int) -> list[dict[str, torch.Tensor]]:
    """The rows of a tensor in as many files; the last may have none."""
    whole = torch.arange(3.0 * count).view(count, 3)
    return [{name: part} for part in torch.chunk(whole, parts)]


def test_rows_are_read_from_the_files_that_have_them(tmp_path: Path) -> None:
    for i, tensors in enumerate(rows("w", 7, 4)):
        extra = {"step": torch.tensor(5.0)} if i == 0 else {}
        safetensors.torch.save_file({**tensors, **extra}, tmp_path / f"model-{i:05d}-of-00004.safetensors")
    stored = checkpoint.open_tensors(checkpoint.Checkpoint(tmp_path, 1, {}), "model")
    whole = torch.arange(21.0).view(7, 3)
    assert stored["w"].shape == (7, 3)
    assert torch.equal(stored["w"][...], whole)
    for start in range(8):
        for stop in range(start, 9):
            assert torch.equal(stored["w"][start:stop], whole[start:stop])
    assert stored["step"][...] == 5.0


def test_too_little_memory_to_build_a_sharded_network_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank builds all weights on its host."""
    recipe, world = replace(digits(), parallel="fsdp"), World(Place(), torch.device("cpu"))
    data = DataSpec("digits", "", 1797, (1, 8, 8), bsi.Bins(-1.0, 1.0, 17))
    monkeypatch.setattr(out_of_memory, "host_memory", lambda sharing: 1000)
    with pytest.raises(UsageError, match="builds all weights"):
        out_of_memory.check_host(recipe, data, world)


def test_too_little_memory_to_gather_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, tensors in enumerate(rows("w", 8, 2)):
        safetensors.torch.save_file(tensors, tmp_path / f"ema-{i:05d}-of-00002.safetensors")
    monkeypatch.setattr(checkpoint, "host_memory", lambda: 8 * 3 * 4 - 1)
    with pytest.raises(UsageError, match="more memory"):
        checkpoint.read_tensors(checkpoint.Checkpoint(tmp_path, 1, {}), "ema")
