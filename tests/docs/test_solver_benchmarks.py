"""docs/benchmarks/solvers.py: it stops in time, resumes, and its errors are paired."""

import argparse
import importlib
import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

import bsi
from bsi.backbones import MLPConfig, build
from bsi.grids import GRIDS
from bsi.methods import Method
from bsi.metrics import Moments
from bsi.metrics.frechet import Yardstick
from bsi.solvers import SOLVERS

SHAPE = (3, 4, 4)


@pytest.fixture(autouse=True)
def folder_of_scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "benchmarks"))


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


class Pixels:
    """Features that are cheap: the pixels themselves."""

    name, hash, resize, precision, dim = "pixels", "", "none", "float32", math.prod(SHAPE)
    device = torch.device("cpu")

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1).float() / 255


def network(name: str, method: Method) -> object:
    torch.manual_seed(0)
    backbone = build(MLPConfig(16, 1), SHAPE, 256)
    for parameter in backbone.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return script("solver_fid").Network(name, bsi.Model(backbone, method, SHAPE, bsi.Bins.uint8()).eval(), name)


def measuring(folder: Path, seconds: float = math.inf) -> object:
    module, results = script("solver_fid"), script("solver_results").Results
    real = torch.rand(300, 48, generator=torch.Generator().manual_seed(1))
    found = results(folder, "fid", {"of": "pixels"})
    return module.Measuring(found, Pixels(), Yardstick(Moments.of(real)), module.Clock(seconds), 60, 20)


def asked(*stages: str) -> argparse.Namespace:
    return argparse.Namespace(stages=stages, solvers=["posterior", "ode2"], grids=list(GRIDS), batch=20, num=60)


def rows(folder: Path) -> list[dict]:
    return json.loads((folder / "results.json").read_text())["rows"]


@torch.no_grad()
def test_the_decisive_cases_come_first_and_are_counted_in_evaluations(tmp_path, monkeypatch):
    monkeypatch.setattr(script("solver_fid"), "PAPER", (20, 40))
    networks = [network("bsi", bsi.BSI()), network("vdm", bsi.VDM())]
    script("solver_fid").run_fid(measuring(tmp_path), networks, asked("default", "sixteen", "paper"))
    found = rows(tmp_path)
    assert [(row["network"], row["solver"], row["grid"], row["seed"]) for row in found[:6]] == [
        (name, solver, "edm", seed) for name, solver in (("bsi", "ode2"), ("vdm", "sde2")) for seed in (0, 1, 2)
    ]
    longest = {row["network"]: row["evaluations"] for row in found}
    assert longest == {"bsi": 41, "vdm": 40}
    sixteen = [row for row in found if row["evaluations"] == 16 and row["seed"] == 0 and row["network"] == "bsi"]
    assert len(sixteen) == 4  # two solvers on two grids that differ
    for row in found:
        alone = row["error"] / row["fid"]
        assert 0 < row["ratio_error"] < 3 * alone or row["ratio"] == 1
    verdicts = list(measuring(tmp_path).verdicts(networks))
    assert "bsi: our default, 16 evaluations, 3 seeds" in verdicts[0]
    mean = sum(row["ratio"] for row in found if row["solver"] == "ode2" and row["grid"] == "edm"
               and row["evaluations"] == 16 and row["network"] == "bsi") / 3  # fmt: skip
    assert f"3 seeds: {mean:.4f} ±" in verdicts[0]
    table = (tmp_path / "table.md").read_text()
    assert "| `posterior`, paper |" in table
    assert " 41 |" in table
    assert "<svg" in (tmp_path / "figure.svg").read_text()


@torch.no_grad()
def test_a_run_that_was_cut_off_ends_with_the_numbers_of_one_that_was_not(tmp_path, monkeypatch):
    module, networks = script("solver_fid"), [network("bsi", bsi.BSI())]
    module.run_fid(measuring(tmp_path / "whole"), networks, asked("sixteen"))
    checks = iter([False] * 4 + [True])  # one whole case, a batch of the next, and then no time

    def check(self: object, case: object, count: int) -> None:
        if next(checks, False):
            raise module.OutOfTime("no time")

    monkeypatch.setattr(module.Clock, "check", check)
    module.run_fid(measuring(tmp_path / "cut"), networks, asked("sixteen"))
    assert len(rows(tmp_path / "cut")) == 1
    assert len(list((tmp_path / "cut" / "parts").iterdir())) == 1
    module.run_fid(measuring(tmp_path / "cut"), networks, asked("sixteen"))
    ours, theirs = rows(tmp_path / "cut"), rows(tmp_path / "whole")
    assert [row["fid"] for row in ours] == pytest.approx([row["fid"] for row in theirs], rel=1e-9)
    assert not list((tmp_path / "cut" / "parts").iterdir())
    # and once more, with nothing left to do
    module.run_fid(measuring(tmp_path / "cut"), networks, asked("sixteen"))
    assert rows(tmp_path / "cut") == ours


@torch.no_grad()
def test_it_stops_itself_before_the_time_is_over(tmp_path):
    module = script("solver_fid")
    clock = module.Clock(deadline=module.time.monotonic() + 1.0, evaluation=0.01)
    case = script("solver_results").Case("bsi", "ode2", "edm", 16)
    clock.check(case, 5)
    with pytest.raises(module.OutOfTime, match="would take 2 s"):
        clock.check(case, 10)
    module.run_fid(measuring(tmp_path, seconds=0.0), [network("bsi", bsi.BSI())], asked("default"))
    assert not list(tmp_path.glob("results.csv"))


def test_results_of_something_else_are_not_mixed_in(tmp_path):
    results, case = script("solver_results").Results, script("solver_results").Case("a", "ode2", "edm", 16)
    results(tmp_path, "fid", {"num": 10}).add(case, "w", fid=1.0)
    assert results(tmp_path, "fid", {"num": 10}).find(case, "w")["fid"] == 1.0
    assert results(tmp_path, "fid", {"num": 10}).find(case, "other weights") is None
    with pytest.raises(SystemExit, match="another --out"):
        results(tmp_path, "fid", {"num": 20})


def test_the_distance_to_the_converged_sample_falls_with_evaluations(tmp_path, monkeypatch):
    module = script("solvers")
    images = torch.randint(0, 256, (200, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    monkeypatch.setattr(module, "cifar10", lambda part: images)
    words = "--side 4 --images 200 --num 8 --reference 128 --evaluations 4 32 --many 64 --device cpu"
    module.main(["distance", "--out", str(tmp_path), *words.split()])
    found = rows(tmp_path)
    assert {row["solver"] for row in found} == set(SOLVERS)
    assert {row["grid"] for row in found} == set(GRIDS)
    few, more = (sum(row["distance"] for row in found if row["evaluations"] == count) for count in (4, 32))
    assert 0 < more < 0.5 * few
    assert (tmp_path / "figure.svg").exists()
