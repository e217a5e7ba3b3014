"""Labels in training: dropped as often as configured, learned, stored in the run, and selected in sampling."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import bsi
from bsi.backbones import MLPConfig, build
from bsi.cli import main
from bsi.data.arrays import Arrays
from bsi.data.batches import as_source
from bsi.data.files import for_testing
from bsi.data.prepare import prepare
from bsi.denoiser import Denoiser
from bsi.errors import DataError, UsageError
from bsi.evaluation.samples import drawn_images
from bsi.methods import BSI
from bsi.recipe import Data, Every, Objective, Optimizer, Recipe
from bsi.runtime.distributed import Place, World
from bsi.runtime.export import DataSpec, export
from bsi.sampler import Sampler
from bsi.sampling import drawing
from bsi.training.step import Stream
from bsi.values import CONTINUOUS

CPU = World(Place(), torch.device("cpu"))
LABELS = torch.arange(600) % 3


def _points() -> torch.Tensor:
    """Three blobs on a line, far apart, one for each label."""
    noise = torch.randn(600, 2, generator=torch.Generator().manual_seed(0))
    return torch.stack([6.0 * (LABELS - 1), torch.zeros(600)], 1) + 0.3 * noise


def _recipe(**changes: object) -> Recipe:
    recipe = Recipe(
        name="blobs",
        method=BSI(alpha_M=1e3),
        backbone=MLPConfig(width=64, depth=2),
        data=Data("blobs", labels=True, unlabeled=0.25),
        steps=400,
        batch=64,
        optimizer=Optimizer(lr=3e-3, warmup=20, schedule="cosine"),
        virtual_shards=4,
        objective=Objective(),
        every=Every(journal=100, evaluate=0, sample=400, checkpoint=200),
        threads=1,
    )
    return replace(recipe, **changes)  # type: ignore[arg-type]


def test_the_given_share_of_labels_is_dropped() -> None:
    recipe = _recipe()
    stream = Stream(recipe, as_source(_points()), (2,), CPU, 0, LABELS.numpy(), 3)
    seen, expected = [], []
    for step in range(100):
        for batch in stream.step(step):
            assert batch.cond is not None
            seen.append(batch.cond)
            # The position of a blob determines its label.
            expected.append((batch.data[:, 0] / 6 + 1).round().long())
    cond, own = torch.cat(seen), torch.cat(expected)
    hidden = cond == 3
    assert torch.equal(cond[~hidden], own[~hidden])
    share, n = float(hidden.double().mean()), len(cond)
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / n) ** 0.5
    often = hidden.view(100, 64).double().mean(0)  # by the position in a batch: each step drops other labels
    assert 0.0 < float(often.min()) < float(often.max()) < 1.0
    stream.close()
    again = next(iter(Stream(recipe, as_source(_points()), (2,), CPU, 0, LABELS.numpy(), 3).step(0)))
    assert torch.equal(again.cond, seen[0])  # type: ignore[arg-type]


def test_a_network_with_labels_draws_the_selected_class_or_all(tmp_path: Path) -> None:
    run = bsi.train(_recipe(), data=_points(), labels=LABELS, out=tmp_path / "run").path
    model = bsi.load(run)
    assert model.classes == 3
    for label in range(3):
        x = model.sample(64, cond=torch.full((64,), label))
        assert float((x[:, 0] - 6.0 * (label - 1)).abs().mean()) < 1.0
    free = model.sample(300)[:, 0]
    for label in range(3):
        share = float(((free - 6.0 * (label - 1)).abs() < 2).double().mean())
        assert abs(share - 1 / 3) < 0.15
    assert (run / "samples").is_dir()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.usefixtures("unchecked")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_network_with_labels_is_evaluated_during_training_on_a_gpu(tmp_path: Path) -> None:
    every = Every(journal=2, evaluate=2, sample=2, checkpoint=4)
    run = bsi.train(_recipe(steps=4, every=every), data=_points(), labels=LABELS, out=tmp_path / "run", device="cuda")
    assert (run.path / "samples").is_dir()


def test_a_resumed_run_compares_labels(tmp_path: Path) -> None:
    out, short = tmp_path / "run", _recipe(steps=2, optimizer=Optimizer(lr=3e-3), every=Every(journal=1, checkpoint=1))
    bsi.train(short, data=_points(), labels=LABELS, out=out)
    with pytest.raises(UsageError, match=r"data\.version"):
        bsi.train(replace(short, steps=4), data=_points(), labels=(LABELS + 1) % 3, out=out)
    bsi.train(replace(short, steps=4), data=_points(), labels=LABELS, out=out)


def test_missing_or_invalid_labels_are_rejected_before_building_the_network(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no labels"):
        bsi.train(_recipe(), data=_points(), out=tmp_path / "run")
    for labels in (LABELS[:-1], LABELS - 1, LABELS.double()):
        with pytest.raises(DataError, match="whole numbers"):
            bsi.train(_recipe(), data=_points(), labels=labels, out=tmp_path / "run")
    with pytest.raises(UsageError, match=r"data\.unlabeled"):
        Data("blobs", labels=True, unlabeled=0.0)


def test_labels_of_a_dataset_train_and_sample_by_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    options = ["--data.labels", "--steps", "2", "--batch", "8", "--virtual-shards", "1", "--optimizer.warmup", "1"]
    looked = ["--every.evaluate", "0", "--every.sample", "2", "--samples.count", "20", "--samples.sampler.steps", "2"]
    assert main(["train", "digits", *options, *looked, "--out", str(run)]) == 0
    assert bsi.load(run).classes == 10
    with Image.open(run / "samples" / "step-00000002.png") as sheet:
        assert sheet.width > 4 * sheet.height, "two rows, and a column for each class"
    assert f"bsi sample {run} --labels ·" in capsys.readouterr().err
    drawn = ["--num", "4", "--steps", "2", "--npz", str(tmp_path / "x.npz"), "--out", str(tmp_path / "x.png")]
    assert main(["sample", str(run), "--label", "7", "--guidance", "2", *drawn, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["label"] == 7
    with np.load(tmp_path / "x.npz") as found:
        assert len(found[found.files[0]]) == 4
    for words, message in (
        (f"sample {run} --label 10 --out {tmp_path / 'y.png'}", "its labels are 0 to 9"),
        ("eval digits --fid --labels", "trained without labels"),
        ("eval digits --fid --guidance 2", "needs --labels"),
        ("eval digits --fid --guidance", "--guidance"),
        ("eval digits --bpd --labels", "--labels"),
    ):
        assert main(words.split()) == 2
        assert message in capsys.readouterr().err


def test_class_names_reach_run_export_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BSI_DATA", str(tmp_path / "data"))
    test_only = next(f"{i}.png" for i in range(1000) if for_testing(f"owl/{i}.png", 0.1))
    names = [*(f"{kind}/{i}.png" for kind in ("cat", "dog") for i in range(16)), f"owl/{test_only}"]
    for name in names:
        (tmp_path / "pets" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), 90 if name.startswith("cat") else 200).save(tmp_path / "pets" / name)
    shape = ["--size", "4", "--channels", "1"]
    assert main(["data", "folder", "--from", str(tmp_path / "pets"), "--labels", *shape]) == 0
    recipe = _recipe(
        method=BSI(), data=Data("pets", labels=True), steps=2, optimizer=Optimizer(lr=1e-3), every=Every(evaluate=0)
    )
    run = bsi.train(recipe, out=tmp_path / "run").path
    for model in (bsi.load(run), bsi.load(export(run))):
        assert (model.classes, model.class_names) == (3, ("cat", "dog", "owl"))
    capsys.readouterr()
    wanted = ["--num", "2", "--steps", "2", "--out", str(tmp_path / "x.png"), "--json"]
    assert main(["sample", str(run), "--label", "dog", *wanted]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["label"], record["class"]) == (1, "dog")
    assert main(["sample", str(run), "--label", "owls", *wanted]) == 2
    assert "Did you mean 'owl'?" in capsys.readouterr().err
    plain = bsi.train(replace(recipe, data=Data("pets")), out=tmp_path / "plain").path
    assert (bsi.load(plain).classes, bsi.load(plain).class_names) == (0, ())


def test_class_names_that_do_not_match_the_labels_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="got 2 names for 3 labels"):
        bsi.Model(build(MLPConfig(8, 1), (2,), None, 3), bsi.BSI(), (2,), class_names=("cat", "dog"))
    with pytest.raises(DataError, match=r"a class has the name 'b\\x1b'"):
        DataSpec("x", "0", 1, (2,), CONTINUOUS, 2, ("a", "b\x1b"))
    np.savez(tmp_path / "x.npz", x=np.arange(50.0), y=np.arange(50) % 3)
    manifest = prepare(Arrays(tmp_path / "x.npz").plan(), tmp_path / "x").folder / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "classes": ["a", "b"]}))
    with pytest.raises(DataError, match="3 classes"):
        bsi.train(_recipe(data=Data(str(tmp_path / "x"), labels=True)), out=tmp_path / "run")


def test_a_distance_draws_all_classes_in_turn() -> None:
    torch.manual_seed(0)
    network = build(MLPConfig(width=16, depth=1), (1, 4, 4), 17, num_classes=3)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    model = bsi.Model(network, bsi.BSI(), (1, 4, 4), bsi.Bins(-1.0, 1.0, 17)).eval()
    requested = model.sample(6, steps=4, cond=torch.arange(6) % 3)
    free = model.sample(6, steps=4)
    for label, expected in ((None, free), (range(3), requested)):
        pictures = torch.cat(list(drawn_images(model, Sampler(steps=4), 6, CPU, 4, label=label)))
        gray = expected.double() * (255 / 16)
        assert float((pictures[:, :1].double() - gray).abs().max()) <= 1
    assert not torch.equal(requested, free)


def test_guidance_moves_samples_away_from_unlabeled_ones() -> None:
    class Told(nn.Module):
        def forward(self, x: torch.Tensor, t: torch.Tensor, cond: torch.Tensor | None = None) -> torch.Tensor:
            return torch.zeros_like(x) if cond is None else cond.view(-1, 1).expand_as(x).to(x.dtype)

    denoiser, labels = Denoiser(Told(), bsi.BSI()), torch.tensor([1, 2])
    plain, guided, free = (
        next(drawing(denoiser.method, denoiser.given(cond, scale), Sampler(steps=1), torch.arange(2), (2,)))
        for scale, cond in ((1.0, labels), (3.0, labels), (1.0, None))
    )
    torch.testing.assert_close(guided.x_hat, free.x_hat + 3 * (plain.x_hat - free.x_hat))
    assert bool((guided.x_hat > plain.x_hat).all())
