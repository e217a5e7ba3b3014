"""What an untrusted export may say of itself."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import bsi
from bsi.cli import main
from bsi.errors import BsiError
from bsi.runtime.export import BUNDLED


def changed(path: Path, **values: Any) -> Path:
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


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "a/b", "..", "", "x" * 300, "a\nb"])
def test_a_name_in_a_file_leads_no_export_outside(
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
def test_a_small_file_cannot_ask_for_a_large_network(values: dict[str, Any], tmp_path: Path) -> None:
    """Row 53: its shapes are compared with those of the weights before memory is taken."""
    path = changed(tmp_path / "model.safetensors", **values)
    started = time.monotonic()
    with pytest.raises(BsiError):
        bsi.load(path)
    assert time.monotonic() - started < 20


def test_the_bundled_network_itself_is_loaded(tmp_path: Path) -> None:
    ours, theirs = bsi.load("digits"), bsi.load(changed(tmp_path / "model.safetensors"))
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor)
