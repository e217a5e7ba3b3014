"""Models as files and folders: saved, loaded, and rejected if damaged, malicious or of another version."""

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

import bsi
from bsi.backbones import build
from bsi.backbones.config import DiTConfig
from bsi.cli import main
from bsi.errors import BsiError, UsageError
from bsi.runtime import export
from bsi.runtime.export import BUNDLED, is_repository, read_trained

METHODS = [bsi.BSI(alpha_M=1e4), bsi.BFN(sigma_1=1e-2), bsi.VDM(nu_max=1e4)]


class MyNet(torch.nn.Module):
    """A network with tied weights and a buffer."""

    def __init__(self, n: int = 4) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(n, n, bias=False)
        self.tied = torch.nn.Linear(n, n, bias=False)
        self.tied.weight = self.layer.weight
        self.register_buffer("shift", torch.arange(float(n)))

    def forward(self, mu, t, cond=None):
        return self.tied(torch.tanh(self.layer(mu))) + self.shift * t[:, None]


def changed(path: Path, **values) -> Path:
    """The bundled network with other values in its description, by their dotted names with _ for the dots."""
    with safetensors.safe_open(BUNDLED["digits"], framework="pt") as file:
        about = json.loads(file.metadata()["bsi"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, value in values.items():
        *place, last = name.split("__")
        record = about
        for key in place:
            record = record[key]
        record[last] = value
    safetensors.torch.save_file(weights, path, {"bsi": json.dumps(about)})
    return path


def same(a: bsi.Model, b: bsi.Model) -> bool:
    return torch.equal(a.sample(3, steps=3, seed=5), b.sample(3, steps=3, seed=5))


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_model_with_a_custom_network_is_saved_without_a_run(method, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = bsi.Model(
        MyNet(), method, (4,), data=bsi.Standardize((1.0, 2.0, 3.0, 4.0), (1.0, 1.0, 2.0, 2.0)),
        parametrization="edm", sigma_data=0.7,
    )  # fmt: skip
    folder = model.save_pretrained(tmp_path / "my model")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    again = bsi.Model.from_pretrained(folder, backbone=MyNet())
    assert same(model, again)
    x = torch.randn(2, 4)
    assert torch.equal(model.elbo(x).nats, again.elbo(x).nats)
    assert "MyNet(...)" in (folder / "README.md").read_text()
    with pytest.raises(UsageError, match=r"backbone=MyNet\(\.\.\.\)"):
        bsi.Model.from_pretrained(folder)
    with pytest.raises(UsageError, match="another network"):
        bsi.Model.from_pretrained(folder, backbone=MyNet(5))


def test_a_network_of_this_package_is_rebuilt_and_usable_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = build(DiTConfig(width=16, depth=1, heads=2, patch=2), (1, 4, 4), bins_count=17, num_classes=2)
    model = bsi.Model(network, METHODS[0], (1, 4, 4), bsi.Bins(-1.0, 1.0, 17), class_names=("a", "b"))
    folder = model.save_pretrained(tmp_path / "tiny", name="tiny")
    again = bsi.Model.from_pretrained(folder)
    assert same(model, again)
    assert (again.class_names, again.bins) == (("a", "b"), model.bins)
    config = json.loads((folder / "config.json").read_text())
    assert config["model"]["backbone"]["kind"] == "dit"
    with safetensors.safe_open(folder / "model.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["bsi"]) == config
    assert main(["sample", str(folder), "--num", "2", "--label", "b", "--out", str(tmp_path / "x.png")]) == 0
    assert "unfinished" not in capsys.readouterr().err
    again.sample(1, label=1)
    with pytest.raises(UsageError, match="without labels"):
        bsi.load("digits").sample(1, label=1)


def test_a_loaded_model_keeps_its_recipe(tmp_path: Path) -> None:
    model = bsi.Model.from_pretrained("digits")
    folder = model.save_pretrained(tmp_path / "copy")
    assert read_trained(folder).recipe == read_trained(BUNDLED["digits"]).recipe
    assert "bsi train digits" in (folder / "README.md").read_text()
    assert same(model, bsi.Model.from_pretrained(folder))
    model.method = replace(model.method, alpha_M=2e4)  # other weights than those of the recipe
    changed = read_trained(model.save_pretrained(tmp_path / "changed"))
    assert (changed.recipe.method, changed.step) == (model.method, 0)


def test_an_unregistered_method_is_not_saved(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Mine(bsi.BSI):
        pass

    with pytest.raises(UsageError, match="register"):
        bsi.Model(MyNet(), Mine(), (4,)).save_pretrained(tmp_path / "mine")


def test_a_file_of_a_newer_version_is_rejected_with_the_remedy(tmp_path: Path) -> None:
    for values in ({"format": 2}, {"recipe__lr_of_the_future": 1}):
        file = changed(tmp_path / "new.safetensors", bsi="9.1", **values)
        with pytest.raises(UsageError, match=r"bsi 9\.1.*pip install --upgrade bsi"):
            bsi.load(file)


# Untrusted files


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "a/b", "..", "", "x" * 300, "a\nb"])
def test_a_name_in_a_file_cannot_move_an_export_outside(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row 50."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    changed(Path("model.safetensors"), recipe__name=name)
    assert main(["export", "model.safetensors"]) == 2
    assert "name must have" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["model.safetensors"]


HUGE = [
    {"recipe__backbone__width": 20_000},
    {"recipe__backbone__width": 1_000_000_001},
    {"recipe__backbone__depth": 10**9},
    {"recipe__backbone__width": 1024},
    {"recipe__backbone__heads": 10**9},
    {"data__shape": [1, 2**20, 2**20]},
    {"data__shape": [10**30]},
    {"data__shape": [1, -8, -8]},
    {"data__shape": [1, 10**5, 10**5]},
    {"data__classes": 10**12},
    {"data__bins__count": 10**18},
    {"recipe__steps": 10**40},
    {"recipe__batch": 1e999},
]


@pytest.mark.parametrize("values", HUGE, ids=str)
def test_a_small_file_cannot_allocate_a_large_network(
    values: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 53: its shapes are compared with those of the weights before memory is taken."""
    monkeypatch.setattr(export, "build_model", lambda *given: pytest.fail("memory is allocated"))
    path = changed(tmp_path / "model.safetensors", **values)
    started = time.monotonic()
    with pytest.raises(BsiError):
        bsi.load(path)
    assert time.monotonic() - started < 20


def test_the_bundled_network_is_loaded_by_name(tmp_path: Path) -> None:
    assert same(bsi.load("digits"), bsi.load(changed(tmp_path / "model.safetensors")))


# The hub


@pytest.mark.parametrize("name", ["digts", "digit"])
def test_a_wrong_name_suggests_the_right_one(name: str) -> None:
    with pytest.raises(UsageError, match="Did you mean digits"):
        bsi.Model.from_pretrained(name)


def test_a_repository_is_distinguished_from_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    assert [is_repository(name) for name in ("user/model", "runs/model", "model", "a/b/c", "/user/model")] == [
        True, False, False, False, False
    ]  # fmt: skip
    with pytest.raises(UsageError, match="neither a run folder"):
        bsi.Model.from_pretrained("runs/model")


def test_a_hub_that_cannot_be_reached_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants", reason="the extra hub")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match=r"cannot download someone/model.*path"):
        bsi.Model.from_pretrained("someone/model")
    with pytest.raises(UsageError, match="cannot upload to someone/model"):
        bsi.Model(MyNet(), bsi.BSI(), (4,)).push_to_hub("someone/model")


def test_the_hub_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"bsi\[hub\]"):
        bsi.Model.from_pretrained("someone/model")


def test_an_upload_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "digits", "--hub-folder", str(tmp_path / "hub"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == str(tmp_path / "hub")
    assert same(bsi.load(tmp_path / "hub"), bsi.load("digits"))
    assert main(["export", "digits", "--upload", "me/mine"]) == 2
    assert "--hub-folder" in capsys.readouterr().err
