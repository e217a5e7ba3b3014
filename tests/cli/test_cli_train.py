"""`bsi train`: typed keys, suggestions, dry runs, the list; `bsi export` and the permissions of its file."""

import json
from pathlib import Path

import numpy as np
import pytest

from bsi.cli import main
from bsi.cli.training import parse
from bsi.methods import BFN, VDM
from bsi.recipes import RECIPES


def test_options_change_the_recipe():
    words = "digits --steps 7 --optimizer.lr 1e-4 --backbone.width 32 --no-compile --out x --allow seed steps".split()  # noqa: SIM905
    args, named = parse(words)
    assert (args.recipe.steps, args.recipe.optimizer.lr, args.recipe.backbone.width) == (7, 1e-4, 32)
    assert (args.options.out, args.options.allow) == (Path("x"), ("seed", "steps"))
    assert named == RECIPES["digits"]("bsi")


@pytest.mark.parametrize("words", [["--method", "bfn"], ["--method=bfn"], ["--method", "vdm", "--method", "bfn"]])
def test_method_and_backbone_are_selected_by_name_with_their_options(words):
    args, named = parse(["digits", *words, "--method.sigma-1", "0.02"])
    assert args.recipe.method == BFN(sigma_1=0.02)
    assert named == RECIPES["digits"]("bfn")
    args, _ = parse(["cifar10-unet", "--backbone", "dit-s/4", "--backbone.heads", "3", "--method", "vdm"])
    assert args.recipe.backbone is not None
    assert (args.recipe.backbone.patch, args.recipe.backbone.heads) == (4, 3)
    assert args.recipe.method == VDM()


def test_a_dry_run_prints_the_plan(capsys, tmp_path):
    assert main(["train", "digits", "--dry-run", "--json", "--steps", "30", "--out", str(tmp_path / "run")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recipe"]["steps"] == 30
    assert f"steps: {RECIPES['digits']('bsi').steps} -> 30" in found["changed"]
    assert found["images"] == 30 * found["recipe"]["batch"]
    assert found["parameters"] > 0
    assert not (tmp_path / "run").exists()
    assert main(["train", "digits", "--dry-run"]) == 0
    assert "changed from digits: nothing" in capsys.readouterr().out
    assert main(["train", "folder", "--data.name", "no-such-data", "--dry-run"]) == 0
    assert "no-such-data" in capsys.readouterr().err


def test_the_list_shows_every_recipe_with_its_expected_value(capsys):
    assert main(["train", "--list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == list(RECIPES)
    assert all(record["expected"] for record in found.values())
    assert main(["train", "--list"]) == 0
    assert "2.65" in capsys.readouterr().out
    assert main(["train"]) == 2
    assert "cifar10-unet" in capsys.readouterr().out


def test_a_rejected_run_leaves_no_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BSI_DATA", str(tmp_path / "data"))
    np.save("points.npy", np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32))
    assert main(["data", "arrays", "--from", "points.npy"]) == 0
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    words = "train digits --data.name points --backbone mlp-16x1 --device cpu --steps 1 --batch 16 --every.sample 0"
    rejected = [f"{words} {wrong}" for wrong in ("--data.labels", "--init-from x", "--samples.sampler.solver magic")]
    for wrong in rejected:
        assert main(wrong.split()) in (2, 3)
        err = capsys.readouterr().err
        assert "into runs" not in err
        assert len(err.splitlines()) == 1
        assert sorted(tmp_path.rglob("*")) == before
    assert main(words.split()) == 0
    assert "samples of 2" in capsys.readouterr().err
    for wrong in rejected:
        main(wrong.split())
        assert Path("runs/digits/status.json").is_file(), "an existing run stays"


def test_the_files_of_a_run_have_the_permissions_of_its_folder(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(0o755)
    quick = ["--steps", "1", "--every.evaluate", "0", "--every.sample", "0", "--samples.sampler.solver", "sde2"]
    assert main(["train", "digits", *quick, "--device", "cpu", "--out", str(run)]) == 0
    assert main(["export", str(run)]) == 0
    (exported,) = run.glob("*.safetensors")
    assert exported.stat().st_mode & 0o777 == 0o644
    stored = list((run / "checkpoints").rglob("*.safetensors"))
    assert len(stored) == 3
    for path in stored:
        assert path.stat().st_mode & 0o666 == path.parent.stat().st_mode & 0o666, path.name
