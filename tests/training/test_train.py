"""`bsi.train` and `bsi.load` from a script: tensors, Datasets, custom networks, and the same rules to resume."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bsi
from bsi import recipes
from bsi.backbones import DiTConfig, MLPConfig, build, resolve
from bsi.backbones.mlp import MLP
from bsi.errors import BsiError, DataError, NonFinite, Preempted, UsageError
from bsi.recipe import Ema, Evaluation, Every, Objective, Optimizer, Recipe, Samples
from bsi.runtime.distributed import Place, World
from bsi.runtime.export import config_of, export, read_trained
from bsi.runtime.run_folder import RunRecord, Value, read_journal
from bsi.sampler import Sampler
from bsi.training.dataset import open_training_data
from bsi.training.loop import bound
from bsi.training.resume import check_changes
from bsi.training.step import Piece, piece_ids

IMAGES = torch.randint(0, 256, (200, 1, 4, 4), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
TEST = IMAGES[:20]


class MyNet(nn.Module):
    """A network that the package has never seen."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(17, width), nn.Linear(width, 16)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.inner(torch.cat([x.flatten(1), t[:, None]], 1)))
        return self.outer(nn.functional.dropout(h, 0.1, self.training)).view_as(x)


class MyData(torch.utils.data.Dataset):
    """Any map-style Dataset: here with labels, which are ignored."""

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return IMAGES[index], index % 10


def recipe(**changes) -> Recipe:
    base = replace(
        recipes.digits(),
        name="mine",
        method=bsi.BSI(),
        steps=12,
        batch=16,
        virtual_shards=8,
        ema=Ema(0.9, 4),
        every=Every(journal=3, evaluate=6, sample=6, checkpoint=5),
        evaluation=Evaluation(images=20, measure=2, recon=2, batch=8),
        samples=Samples(4, Sampler(3)),
    )
    return replace(base, **changes)


def network() -> MyNet:
    torch.manual_seed(0)
    return MyNet()


def stop_at(step: int):
    """A sink that sends this process a signal, as a scheduler would."""

    def sink(record: Mapping[str, Value]) -> None:
        if record["step"] == step and record["event"] == "train":
            os.kill(os.getpid(), signal.SIGTERM)

    return sink


def train(out: Path, settings: Recipe | None = None, **given) -> Path:
    """A run of `MyNet` on the images."""
    return bsi.train(settings or recipe(), out=out, **{"data": IMAGES, "backbone": network()} | given).path


def stopped(out: Path, step: int, settings: Recipe | None = None, **given) -> None:
    """The same, stopped by a signal after a step."""
    with pytest.raises(Preempted, match=f"SIGTERM: saved step {step} of"):
        train(out, settings, sinks=[stop_at(step)], **given)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return bsi.load(run, backbone=MyNet()).state_dict()


def same(a: Path, b: Path) -> bool:
    ours, theirs = weights(a), weights(b)
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def events(run: Path) -> list[tuple[Value, Value, Value | None]]:
    return [(line["event"], line["step"], line.get("bits_per_dim")) for line in read_journal(run)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from a tensor, never interrupted."""
    return train(tmp_path_factory.mktemp("w") / "run", test=TEST)


def test_a_dataset_and_a_tensor_give_the_same_run_for_any_number_of_workers(whole: Path, tmp_path: Path) -> None:
    """Row 9: no worker, then three; and an interruption between."""
    out = tmp_path / "run"
    stopped(out, 6, data=MyData(), test=TEST)
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["step"]) == ("preempted", 6)
    assert events(out)[-1][0] == "train", "the save came before the evaluation"
    train(out, recipe(data=replace(recipe().data, workers=3)), data=MyData(), test=TEST)
    assert same(out, whole)
    assert events(out) == events(whole), "the pending evaluation is made"


@pytest.mark.parametrize(("event", "step"), [("train", 3), ("train", 6), ("evaluate", 6)])
def test_a_sink_that_raises_loses_no_step(
    whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], event: str, step: int
) -> None:
    """Row 39: its exception reaches the caller; the same call resumes and makes pending evaluations."""

    def sink(record: Mapping[str, Value]) -> None:
        if (record["event"], record["step"]) == (event, step):
            raise ValueError("no server to log to")

    out = tmp_path / "run"
    with pytest.raises(ValueError, match="no server to log to"):
        train(out, test=TEST, sinks=[sink])
    assert f"a sink failed at step {step}" in capfd.readouterr().err
    assert (out / "checkpoints" / "latest").read_text().strip() == f"step-{step:08d}"
    train(out, test=TEST)
    assert same(out, whole)
    assert events(out) == events(whole)


def test_training_does_not_change_the_callers_random_state(tmp_path: Path) -> None:
    net = network()
    expected = torch.randn(3)
    torch.manual_seed(0)
    MyNet()
    train(tmp_path / "run", recipe(steps=2), backbone=net)
    assert torch.equal(torch.randn(3), expected)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_a_network_not_in_float32_is_rejected_before_files_are_created(kind: torch.dtype, tmp_path: Path) -> None:
    existing = tmp_path / "run"
    existing.mkdir()
    for out in (tmp_path / "runs" / "run", existing):
        with pytest.raises(UsageError, match=rf"float32, got {kind} .*backbone.float"):
            train(out, recipe(steps=1), backbone=MyNet().to(kind))
    assert list(tmp_path.rglob("*")) == [existing], "an existing folder is unchanged"
    train(existing, recipe(steps=1), backbone=MyNet().to(kind).float())


def test_loading_a_run_with_a_custom_network_asks_for_its_class(whole: Path) -> None:
    with pytest.raises(UsageError, match=r"MyNet, .*Pass one like it again, backbone=MyNet\(\.\.\.\)"):
        bsi.load(whole)
    with pytest.raises(UsageError, match=r"inner.weight: \(8, 17\) there, \(9, 17\) here"):
        bsi.load(whole, backbone=MyNet(9))
    model = bsi.load(whole, backbone=MyNet())
    assert not model.training
    assert model.sample(2, steps=2).shape == (2, 1, 4, 4)


@pytest.mark.parametrize("name", ["dit-mini/4", "unet-4x1", "mlp-16x1"])
def test_load_rebuilds_a_package_network_that_was_passed(name: str, tmp_path: Path) -> None:
    config = replace(resolve(name), dropout=0.25)
    if isinstance(config, DiTConfig):
        config = replace(config, width=8, depth=1, heads=2)
    passed = build(config, (1, 4, 4), 256)
    run = train(tmp_path / "run", recipe(steps=1), backbone=passed)
    model = bsi.load(run, ema=False)
    assert model.denoiser.backbone.config == config
    theirs = passed.state_dict()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in model.denoiser.backbone.state_dict().items())
    exported = bsi.load(export(run, ema=False))
    assert torch.equal(model.sample(2, steps=2), exported.sample(2, steps=2))
    with pytest.raises(UsageError, match="Leave backbone out"):
        bsi.load(run, backbone=MyNet())


def test_loading_asks_for_a_network_that_its_config_does_not_describe(tmp_path: Path) -> None:
    """A subclass; other Fourier features than the data's; labels that the data has not; a part replaced."""

    class Changed(MLP):
        pass

    config, shape = MLPConfig(width=16, depth=1), (1, 4, 4)
    replaced = build(config, shape, 256)
    replaced.head = nn.Sequential(replaced.head)
    other = [Changed(config, shape, 256), build(config, shape), build(config, shape, 256, num_classes=3), replaced]
    data = open_training_data(recipe(), torch.device("cpu"), IMAGES)
    assert [config_of(network, data.spec) for network in other] == [None] * 4
    run = train(tmp_path / "run", recipe(steps=1), backbone=other[1])
    with pytest.raises(UsageError, match=r"bsi.backbones.mlp.MLP, .*Pass one like it again"):
        bsi.load(run)
    bsi.load(run, backbone=other[1])


def test_a_run_without_a_network_description_resumes(tmp_path: Path) -> None:
    ours, out = build(MLPConfig(width=16, depth=1), (1, 4, 4), 256), tmp_path / "run"
    stopped(out, 3, backbone=ours)
    record = json.loads((out / "run.json").read_text())
    record["recipe"]["backbone"] = None
    (out / "run.json").write_text(json.dumps(record))
    train(out, backbone=ours)
    assert bsi.load(out).sample(1, steps=2).shape == (1, 1, 4, 4)


def test_bounds_during_training_have_a_standard_error() -> None:
    """With one degree of freedom 6 of 40 values would be off by more than four errors; with eight, one in 250."""
    world, data = World(Place(), torch.device("cpu")), torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = bsi.Model(build(MLPConfig(width=8, depth=1), (3,)), bsi.BSI(), shape=(3,))
    test = open_training_data(recipe(), world.device, data, data).test
    assert test is not None
    small = recipe(evaluation=Evaluation(images=64, measure=2, recon=2))
    found = [bound(model, test, replace(small, seed=seed), world) for seed in range(40)]
    mean = sum(each.bits_per_dim for each in found) / len(found)
    assert sum(abs(each.bits_per_dim - mean) > 4 * each.monte_carlo_error for each in found) < 3


def test_a_small_test_set_is_evaluated_at_more_levels() -> None:
    """Its Monte Carlo error is then that of a larger one."""
    world, model = World(Place(), torch.device("cpu")), bsi.Model(MyNet(), bsi.BSI(), (1, 4, 4), data=bsi.Bins.uint8())
    small, sets = recipe(evaluation=Evaluation(images=40, measure=2, recon=2)), []
    for count in (40, 10):
        test = open_training_data(recipe(), world.device, IMAGES, IMAGES[:count]).test
        assert test is not None
        sets.append(bound(model, test, small, world))
    assert [len(found.nats) for found in sets] == [40, 10]
    assert sets[0].evaluations == sets[1].evaluations


def test_overfitting_is_reported(tmp_path: Path, capsys) -> None:
    data = torch.randn(264, 6, generator=torch.Generator().manual_seed(0))
    small = recipe(
        steps=80, backbone=MLPConfig(width=64, depth=2), method=bsi.BSI(alpha_M=100.0), ema=Ema(0.5, 4),
        optimizer=Optimizer(lr=1e-2), every=Every(journal=80, evaluate=20, sample=0, checkpoint=80),
        evaluation=Evaluation(images=256, batch=256),
    )  # fmt: skip
    bsi.train(small, data=data[:8], test=data[8:], out=tmp_path / "small")
    bounds = [float(found["nats_per_dim"]) for found in bsi.Run(tmp_path / "small").evaluations()]
    more = bounds[-1] - min(bounds)
    assert f"the bound was {more:.4f} nats/dim lower" in capsys.readouterr().err  # in the unit of the bound
    bsi.train(small, data=data, test=data, out=tmp_path / "large")
    assert "overfits" not in capsys.readouterr().err


def test_progress_names_the_term_that_continuous_data_is_trained_on(tmp_path: Path, capsys) -> None:
    """The loss cannot be compared with the bound next to it; and vectors are not called images."""
    vectors = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    small = recipe(steps=1, backbone=MLPConfig(width=16, depth=1))
    bsi.train(small, data=vectors, out=tmp_path / "vectors")
    said = capsys.readouterr().err
    assert re.search(r"measurement term [\d.]+ nats/dim · [\d.e+]+ samples/s", said)
    assert "loss" not in said
    assert "images" not in said
    assert "saved" not in said, "the only record has no value yet"
    bsi.train(small, data=IMAGES, out=tmp_path / "images")
    assert re.search(r"loss [\d.]+ bits/dim · [\d.e+]+ images/s", capsys.readouterr().err)


@pytest.mark.parametrize(
    "kind",
    [torch.as_tensor, np.asarray, lambda x: torch.utils.data.Subset(x, range(len(x)))],
    ids=["tensor", "array", "Dataset"],
)
def test_uint8_data_of_few_levels_gives_a_warning(kind, tmp_path: Path, capsys) -> None:
    """Rejected for few levels, accepted with a warning for more, and without one if all levels occur."""
    few, most, all_levels = IMAGES % 17, IMAGES.clamp(max=200), IMAGES
    one = recipe(steps=1)
    with pytest.raises(UsageError, match=r"maximum of 16\. Pass kind=bsi.Bins\(-1.0, 1.0, 17\)"):
        train(tmp_path / "few", one, data=kind(few))
    train(tmp_path / "said", one, data=kind(few), kind=bsi.Bins(-1.0, 1.0, 17))
    assert "8-bit" not in capsys.readouterr().err
    train(tmp_path / "most", one, data=kind(most))
    assert "largest value of the data is 200. Pass kind=" in capsys.readouterr().err
    train(tmp_path / "all", one, data=kind(all_levels))
    assert "8-bit" not in capsys.readouterr().err


def test_another_network_cannot_resume_a_run(tmp_path: Path) -> None:
    """Rows 20 and 22: another class, other data, other shapes."""

    class Other(MyNet):
        pass

    class Scaled(MyNet):
        def __init__(self, scales: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(scales)) if scales else None

        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return super().forward(x, t) * (1.0 if self.scale is None else self.scale)

    out = tmp_path / "run"
    stopped(out, 3, backbone=Scaled(1))
    with pytest.raises(UsageError, match=r"network: .*Scaled -> .*Other"):
        train(out, backbone=Other())
    with pytest.raises(UsageError, match=r"data.version"):
        train(out, backbone=Scaled(1), data=IMAGES[:-1])
    for scales, here in ((4, r"\(4,\)"), (0, "missing")):  # the first would be broadcast, the other ignored
        with pytest.raises(
            UsageError, match=rf"another network\. Pass the same(.|\n)* scale: \(1,\) there, {here} here"
        ):
            train(out, backbone=Scaled(scales))
    frozen = Scaled(1)
    frozen.inner.requires_grad_(False)
    with pytest.raises(UsageError, match=r"optimizer of the checkpoint is of another network(.|\n)*inner.weight"):
        train(out, backbone=frozen)
    train(out, backbone=Scaled(1), data=IMAGES[:-1], allow=["data.version"])


def test_an_allowed_change_is_kept_before_the_next_checkpoint(tmp_path: Path) -> None:
    def killed(record: Mapping[str, Value]) -> None:
        raise KeyboardInterrupt

    out, small = tmp_path / "run", recipe(steps=4, every=Every(journal=1))
    stopped(out, 2, small)
    slower = replace(small, optimizer=replace(small.optimizer, lr=1e-5))
    with pytest.raises(KeyboardInterrupt):
        train(out, slower, allow=["optimizer.lr"], sinks=[killed])
    train(out, slower)


def test_stop_signals_work_when_stderr_is_closed(tmp_path: Path, capsys) -> None:
    """Ctrl-C also ends the `tee` of a pipe; and a stderr in Python only, as in a notebook, has no file descriptor."""
    reader, writer = os.pipe()
    os.close(reader)
    before = os.dup(2)
    os.dup2(writer, 2)
    try:
        stopped(tmp_path / "run", 3)
        os.write(2, b"goes nowhere from there on")
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(writer)


@pytest.mark.parametrize("audit", [False, True])
def test_changed_accumulation_with_dropout_is_reported(audit: bool, tmp_path: Path, capfd) -> None:
    out, small = tmp_path / "run", recipe(steps=4, accumulation=2, audit=audit)
    stopped(out, 3, small)
    train(out, replace(small, accumulation=4))
    assert ("ranks x accumulation was 2 and is 4: " in capfd.readouterr().err) == (not audit)


def test_a_pending_evaluation_at_the_last_step_is_made_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, one = tmp_path / "run", recipe(every=Every(journal=3, evaluate=6, checkpoint=5))
    stopped(out, 12, one, test=TEST)
    train(out, one, test=TEST)
    capfd.readouterr()
    train(out, one, test=TEST)
    assert "is finished: 12 steps" in capfd.readouterr().err
    assert [line["step"] for line in read_journal(out) if line["event"] == "evaluate"] == [6, 12]


@pytest.mark.parametrize("every", [Every(journal=1, checkpoint=6), Every(journal=3, checkpoint=4)])
def test_a_folder_moved_during_training_is_not_created_again(every: Every, whole: Path, tmp_path: Path) -> None:
    out, moved, one = tmp_path / "run", tmp_path / "moved", recipe(every=every)
    with pytest.raises(BsiError, match="the run folder was moved"):
        train(out, one, sinks=[lambda record: record["step"] == 3 and out.rename(moved)])
    assert not out.exists()
    (moved / "lock.json").unlink()  # it names this process, which is still running
    train(moved, one)
    assert same(moved, whole)


def test_a_process_that_lost_its_lock_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def taken(record: Mapping[str, Value]) -> None:
        thief = {"host": "elsewhere", "pid": 1, "started": "", "job": "", "token": "theirs"}
        (out / "lock.json").write_text(json.dumps(thief))
        for name in ("status.json", "journal.jsonl"):
            (out / name).write_text("theirs")

    each = recipe(
        every=Every(journal=1, sample=1, evaluate=1, checkpoint=1), ema=Ema(0.9, 4, powers=(0.1,), snapshot=1)
    )
    with pytest.raises(BsiError, match="taken over by host elsewhere"):
        train(out, each, test=TEST, sinks=[taken])
    assert (out / "status.json").read_text() == "theirs"
    assert (out / "journal.jsonl").read_text() == "theirs"
    assert {path.name for path in out.iterdir() if path.is_dir()} <= {"checkpoints"}
    assert not list(out.rglob("*.safetensors"))


def test_the_suggested_allow_option_names_all_changes() -> None:
    before, rates = recipe(), replace(recipe().optimizer, lr=0.1, clip=2.0, beta_1=0.8, beta_2=0.9, momentum=0.9)
    now = replace(before, optimizer=rates, seed=1, batch=32, sigma_data=0.5, ema=Ema(0.8, 5))
    then, now = RunRecord(before, ""), RunRecord(now, "")
    with pytest.raises(UsageError, match="and 3 more") as rejected:
        check_changes(then, now, ("a", "a"), 5, ())
    assert len(str(rejected.value).splitlines()) <= 10
    check_changes(then, now, ("a", "a"), 5, str(rejected.value).rpartition("--allow ")[2].rstrip(".").split())
    for safe in (replace(before, lean=True), replace(before, accumulation=2)):  # changes that affect only rounding
        assert check_changes(then, RunRecord(safe, ""), ("a", "a"), 5, ())


def test_changes_of_the_tensors_in_a_checkpoint_cannot_be_allowed(tmp_path: Path) -> None:
    out, small = tmp_path / "run", recipe(steps=3, every=Every(journal=1, checkpoint=1))
    small = replace(small, optimizer=replace(small.optimizer, schedule="constant"))
    bsi.train(small, data=IMAGES, out=out)
    more = replace(small, steps=4)
    changed = {
        "optimizer.kind": replace(more, optimizer=replace(more.optimizer, kind="adamw")),
        "objective.weight": replace(more, objective=replace(more.objective, weight="edm")),
        "ema.powers": replace(more, ema=replace(more.ema, powers=(0.05, 0.1))),
        "data.labels": replace(more, data=replace(more.data, labels=True)),
    }
    for name, other in changed.items():
        labels = torch.arange(len(IMAGES)) % 3 if other.data.labels else None
        with pytest.raises(UsageError, match=f"{name}[^:]*: (.|\n)*another out"):
            bsi.train(other, data=IMAGES, labels=labels, out=out, allow=[name, "data.version"])


def test_the_average_and_the_weights_of_any_kept_checkpoint_can_be_loaded(whole: Path) -> None:
    average, plain, earlier = (
        bsi.load(whole, backbone=MyNet(), **which).state_dict() for which in ({}, {"ema": False}, {"step": 10})
    )
    name = "denoiser.backbone.outer.weight"
    assert not torch.equal(average[name], plain[name])
    assert not torch.equal(average[name], earlier[name])
    with pytest.raises(UsageError, match=r"no checkpoint of step 3\. There are: 12, 10"):
        bsi.load(whole, backbone=MyNet(), step=3)


def test_three_lines_load_what_export_wrote(whole: Path, tmp_path: Path) -> None:
    file = export(whole, tmp_path / "model.safetensors")
    model = bsi.load(file, backbone=MyNet())
    expected = bsi.load(whole, backbone=MyNet())
    assert torch.equal(model.sample(3, steps=2, seed=5), expected.sample(3, steps=2, seed=5))
    assert (model.method, model.shape, model.bins) == (expected.method, expected.shape, expected.bins)
    assert read_trained(file).recipe == replace(recipe(), backbone=None)
    assert export(whole).name == "mine-12.safetensors"
    with pytest.raises(UsageError, match="a single step"):
        bsi.load(file, backbone=MyNet(), step=3)


def test_a_network_for_other_data_is_rejected_before_files_are_created(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"one shape, got \(3, 32, 32\)"):
        train(tmp_path / "run", recipe(steps=1), backbone=build("mlp-8x1", (3, 32, 32), 256))
    assert not (tmp_path / "run").exists()


def test_initial_weights_are_taken_from_another_run(whole: Path, tmp_path: Path) -> None:
    frozen = recipe(steps=1, optimizer=replace(recipe().optimizer, lr=1e-30, final_lr=0.0, weight_decay=0.0, warmup=0))
    out = train(tmp_path / "run", frozen, init_from=whole)
    assert same(out, whole)
    assert json.loads((out / "status.json").read_text())["step"] == 1
    with pytest.raises(UsageError, match="those of another network"):
        train(tmp_path / "other", recipe(steps=1), backbone=MyNet(5), init_from=whole)


def test_a_finished_run_is_returned_unchanged(whole: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = (whole / "checkpoints" / "latest").stat().st_mtime_ns
    assert train(whole, test=TEST) == whole
    assert (whole / "checkpoints" / "latest").stat().st_mtime_ns == before
    reported = capfd.readouterr().err
    assert "is finished: 12 steps" in reported
    assert "more steps" not in reported, "a cosine cannot be extended"


def test_floats_of_any_precision_train_as_float32(tmp_path: Path) -> None:
    exact = torch.randn(60, 6, generator=torch.Generator().manual_seed(0)).bfloat16()  # exact in all types
    flat = recipe(steps=3, backbone=recipes.arrays().backbone, every=Every(journal=1, evaluate=3))
    wanted, found = (
        bsi.load(bsi.train(flat, data=data, test=data[:20], out=tmp_path / str(data.dtype)))
        for data in (exact.float(), exact.double().numpy())
    )
    for a, b in zip(found.parameters(), wanted.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_arguments_without_effect_are_rejected(tmp_path: Path) -> None:
    for match, given in (
        (r"data\.labels=True", {"labels": torch.arange(len(IMAGES)) % 3}),
        ("test was given without data", {"data": None, "test": IMAGES}),
        *(("hang_after_s must be positive", {"hang_after_s": seconds}) for seconds in (0.0, -1.0, float("nan"))),
    ):
        with pytest.raises(UsageError, match=match):
            train(tmp_path / "run", **given)


def test_continuous_data_is_standardized_and_keeps_its_units(tmp_path: Path) -> None:
    data = 50 + 3 * torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
    flat = recipe(steps=4, backbone=recipes.arrays().backbone)
    run = bsi.train(flat, data=data, test=data[:20], out=tmp_path / "run").path
    model = bsi.load(run)
    assert isinstance(model.kind, bsi.Standardize)
    assert model.kind.mean == pytest.approx([50] * 6, abs=0.5)
    drawn = model.sample(64, steps=4)
    assert 30 < float(drawn.mean()) < 70
    assert list((run / "samples").glob("*.npy")), "no picture can be made of these"


@pytest.mark.parametrize(
    ("data", "test", "error", "message"),
    [
        (torch.zeros(10, 1, 4, 4, dtype=torch.int64), None, UsageError, "needs a kind"),
        (torch.full((10, 1, 4, 4), float("nan")), None, DataError, "NaN or infinity in 10 of 10 samples"),
        (torch.zeros(10, 1, 4, 4), None, DataError, "constant"),
        ([1, 2, 3], None, UsageError, "cannot take samples"),
        (torch.zeros(0, 1, 4, 4, dtype=torch.uint8), None, DataError, "at least one"),
        (IMAGES, IMAGES[..., :2], UsageError, "like training samples"),
        (IMAGES / 255, IMAGES, UsageError, "like training samples"),
    ],
)
def test_unsupported_training_data_is_rejected(data, test, error, message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        train(tmp_path / "run", data=data, test=test)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (IMAGES / 255, "centers"),  # torchvision's ToTensor
        (IMAGES.float(), "outside its bins"),
        (IMAGES.int() + 200, "outside its bins"),
        (torch.full((10, 1, 4, 4), float("nan")), "NaN"),
    ],
)
def test_data_that_is_not_of_the_given_kind_is_rejected(wrong: torch.Tensor, message: str, tmp_path: Path) -> None:
    kind = bsi.Bins.uint8()
    right = kind.values(IMAGES) if wrong.is_floating_point() else IMAGES
    for data, test in ((wrong, None), (wrong.numpy(), None), (right, wrong)):
        with pytest.raises(DataError, match=message):
            train(tmp_path / "run", data=data, test=test, kind=kind)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "objective", [Objective(), Objective(levels="expected"), Objective(weight="edm"), Objective(finite_k=5)], ids=str
)
def test_a_nan_in_the_data_stores_the_step_for_replay(objective: Objective, tmp_path: Path) -> None:
    """A Dataset is not scanned in advance: here one sample is NaN, and step 3 reads it."""
    n, whole = 100_000, recipe(every=Every(journal=50, checkpoint=500), objective=objective)
    bad = int(piece_ids(whole, n, Piece(3, 0, 0, whole.batch))[5])

    class Large(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return n

        def __getitem__(self, index: int) -> torch.Tensor:
            x = torch.linspace(-1, 1, 16).view(1, 4, 4) * (index % 7)
            return x * float("nan") if index == bad else x

    network, seen = MyNet(), []
    network.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    with pytest.raises(NonFinite, match="step 3 was not finite"):
        train(tmp_path / "run", whole, data=Large(), backbone=network)
    replay = json.loads((tmp_path / "run" / "replay-00000003.json").read_text())
    assert bad in replay["ids"]
    levels = torch.tensor(replay["levels"], dtype=torch.float64)
    assert torch.allclose(whole.method.levels.cdf(levels).float(), seen[3], atol=1e-6)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"


def test_a_run_folder_holds_no_secrets_and_no_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HOME", "/home/somebody")
    paths = ["/home/somebody/runs/x", "--data.name=/home/somebody", "/mnt/home/me/x", "/home/some", "/home/somebodys/x"]
    monkeypatch.setattr("sys.argv", ["/home/somebody/bin/bsi", "train", "--out", *paths])
    run = train(tmp_path / "run", recipe(steps=1), named=recipe())
    text = (run / "run.json").read_text()
    assert "hf_secret" not in text
    assert not re.search(r"somebody\b", text)
    record = json.loads(text)
    elsewhere = ["/mnt/home/me/x", "/home/some", "/home/somebodys/x"]
    assert record["command"] == ["bsi", "train", "--out", "~/runs/x", "--data.name=~", *elsewhere]
    assert "steps: 12 -> 1" in record["changed"]


def test_the_journal_and_sinks_get_the_same_records(tmp_path: Path) -> None:
    heard: list[Mapping[str, Value]] = []
    train(tmp_path / "run", test=TEST, sinks=[heard.append])
    assert [(record["event"], record["step"]) for record in heard] == [
        ("train", 3), ("train", 6), ("evaluate", 6), ("sample", 6),
        ("train", 9), ("train", 12), ("evaluate", 12), ("sample", 12),
    ]  # fmt: skip
    assert read_journal(tmp_path / "run") == [dict(record) for record in heard]
    assert {"loss", "bits_per_dim", "lr", "grad_norm", "images_per_s"} <= set(heard[0])
    assert heard[2]["error"] > 0
    assert heard[2]["data_error"] > 0


# ---- Logging errors do not end a run, and every exit saves first -----------------------------------------------------


def test_a_journal_that_cannot_be_written_is_reported_once(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Row 51."""

    def full(path: Path, line: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("bsi.runtime.run_folder.append_line", full)
    out = train(tmp_path / "run", test=TEST)
    assert same(out, whole)
    assert capfd.readouterr().err.count("Training continues without it") == 1


@pytest.mark.parametrize("where", ["data", "network"])
def test_any_error_saves_the_last_complete_step_first(where: str, whole: Path, tmp_path: Path) -> None:
    """Row 51: between the checkpoints of steps 5 and 10. The data of the next step is prefetched."""
    seen: list[Mapping[str, Value]] = []

    class Broken(MyData):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            if where == "data" and seen and seen[-1]["step"] == 6:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().__getitem__(index)

    net, calls = network(), []

    def count(*_: object) -> None:
        calls.append(0)
        if where == "network" and net.training and len(calls) > 7:
            raise RuntimeError("device lost")

    handle = net.register_forward_pre_hook(count)
    alone = recipe(every=Every(journal=3, checkpoint=5))
    with pytest.raises((OSError, RuntimeError)):
        train(tmp_path / "run", alone, data=Broken(), backbone=net, sinks=[seen.append])
    handle.remove()
    saved = int((tmp_path / "run" / "checkpoints" / "latest").read_text()[5:])
    assert saved in ([7] if where == "network" else [6, 7, 8])
    train(tmp_path / "run", alone, data=MyData())
    assert same(tmp_path / "run", whole)


SCRIPT = """
import os, signal, sys
import bsi
from dataclasses import replace
from bsi.recipe import Every

recipe = replace(bsi.recipes.digits(), steps=6, batch=32, backbone=bsi.backbones.MLPConfig(width=8, depth=1),
                 every=Every(journal=1, evaluate=3, checkpoint=100))

def sink(record):
    if record["event"] == "train" and record["step"] == 4 and sys.argv[2] != "none":
        os.kill(os.getpid(), int(sys.argv[2]) if sys.argv[2].isdigit() else getattr(signal, sys.argv[2]))

bsi.train(recipe, out=sys.argv[1], device="cpu", sinks=[sink])
"""


@pytest.mark.parametrize(
    ("name", "code"), [("SIGINT", 75), ("SIGHUP", 75), ("SIGXCPU", 75), ("SIGVTALRM", 75), ("37", 75), ("none", 0)]
)
@pytest.mark.slow
def test_a_script_with_a_full_log_stops_without_a_traceback(name: str, code: int, tmp_path: Path) -> None:
    """Row 51: with stderr on a full disk, and with a readable one."""
    for log in ("/dev/full", str(tmp_path / "log")):
        out = tmp_path / f"run-{Path(log).name}"
        with open(log, "w") as stderr:
            done = subprocess.run([sys.executable, "-c", SCRIPT, str(out), name], stderr=stderr, check=False)
        assert done.returncode == code
        step = 6 if name == "none" else 4
        assert (out / "checkpoints" / "latest").read_text().strip() == f"step-{step:08d}"
    printed = (tmp_path / "log").read_text()
    assert "Traceback" not in printed
    assert re.search(r"step 3: test [\d.]+ bits/dim ± [\d.]+", printed)
    assert ("saved step 4 of 6" in printed) == (name != "none")
