"""The package bsi-networks: its script writes a network with a model card, and an installed one is found by name."""

import json
import runpy
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bsi
from bsi.cli import main
from bsi.errors import UsageError
from bsi.recipe import Every
from bsi.studies.measure import installed_networks, network_name
from bsi.studies.scale import SCALES

NETWORKS = Path(__file__).parents[1] / "networks"


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with a network that was trained for two steps."""
    package, out = tmp_path_factory.mktemp("networks") / "networks", tmp_path_factory.mktemp("runs") / "tiny"
    shutil.copytree(NETWORKS, package)
    recipe = replace(bsi.recipes.digits(), name="tiny", steps=2, batch=8, every=Every(evaluate=0, sample=0))
    run = bsi.train(recipe, out=out)
    assert main(["eval", str(run.path), "--bpd", "--limit", "20"]) == 0
    add = runpy.run_path(str(package / "add.py"))["add"]
    folder = add(run.path, "tiny", "Tests | nothing else.", "abc123", "", "MIT", package / "src" / "bsi_networks")
    assert main(["eval", str(folder), "--bpd", "--limit", "20"]) == 0
    assert add(run.path, "tiny", "Tests | nothing else.", "abc123", "", "MIT", folder.parent) == folder
    return package


def test_the_card_names_data_recipe_commit_bounds_license_and_use(added: Path) -> None:
    card = (added / "src" / "bsi_networks" / "tiny" / "README.md").read_text("utf-8")
    rows = {line.split(" | ")[0].strip("| "): line for line in card.splitlines() if line.startswith("| ")}
    assert "digits, 1,498 training samples of 1 x 8 x 8" in rows["data"]
    assert "`tiny`, step 2" in rows["recipe"]
    assert "commit abc123" in rows["made with"]
    assert "MIT" in rows["license"]
    assert "Tests / nothing else." in rows["intended use"]  # an unescaped bar would end the cell
    assert "bfloat16" in rows["network"]
    bounds = [line for line in card.splitlines() if line.startswith("| bits/dim")]
    assert ["before rounding" in line for line in bounds] == [True, False]


def test_an_installed_network_is_found_by_its_name(
    added: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hatchling", reason="the package is built with hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=added, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("bsi_networks-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"bsi_networks/tiny/{name}" for name in ("model.safetensors", "config.json", "README.md")} <= names
    assert not any("evaluations" in name for name in names)
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")

    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    model = bsi.Model.from_pretrained("tiny")
    assert "bsi_networks" not in sys.modules  # it is data, and is not imported
    original = bsi.Model.from_pretrained(added / "src" / "bsi_networks" / "tiny")
    assert torch.equal(model.sample(2, steps=2), original.sample(2, steps=2))
    assert main(["sample", "tiny", "--num", "2", "--steps", "2", "--out", "tiny.png"]) == 0
    about = json.loads((tmp_path / "site" / "bsi_networks" / "tiny" / "config.json").read_text("utf-8"))
    assert about["recipe"]["name"] == "tiny"
    with pytest.raises(UsageError, match=r"Did you mean tiny\?"):
        bsi.load("tini")


def test_a_missing_network_is_an_error_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"pip install.*bsi\[networks\]"):
        bsi.Model.from_pretrained("cifar10-classes")
    assert main(["sample", "cifar10-classes"]) == 2
    assert "bsi[networks]" in capsys.readouterr().err


def test_a_network_that_is_too_large_is_rejected(added: Path, tmp_path: Path) -> None:
    script = runpy.run_path(str(added / "add.py"))
    script["add"].__globals__["LARGEST"] = 1000
    run = next(iter(tmp_path.parent.glob("runs*/tiny")))
    with pytest.raises(UsageError, match="more than"):
        script["add"](run, "large", "none", "abc123", "", "MIT", tmp_path)
    assert not (tmp_path / "large" / "model.safetensors").exists()


def test_the_study_of_variances_measures_the_released_network() -> None:
    assert installed_networks()[network_name(SCALES["mini"].transitions("bsi"))] == "cifar10"
