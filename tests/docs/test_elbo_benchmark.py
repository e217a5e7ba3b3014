"""docs/benchmarks/elbo_variance.py: it runs whole, stops in time, and its ratios are those of the variances."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "benchmarks"))
    return importlib.import_module("elbo_variance")


@pytest.mark.slow
def test_the_script_runs_whole_and_writes_as_it_goes(script, tmp_path, capsys):
    out = tmp_path / "figures.json"
    words = ["digits", "--images", "8", "--seeds", "3", "--measure", "4", "6", "--device", "cpu", "--json", str(out)]
    script.main(words)
    record = json.loads(out.read_text())
    assert record["measure 6"]["seeds"] == 3
    assert set(record["measure 4"]["cost"]) == set(script.ESTIMATORS)
    assert record["measure 4"]["cost"]["independent"] == record["measure 6"]["cost"]["independent"]  # measured once
    for of in ("mean", "single"):
        costs = {name: each[of] for name, each in record["measure 4"]["cost"].items()}
        for other in script.TARGETS:
            got = record["measure 4"][f"{of}, than {other}"]
            assert got["times"] == pytest.approx(costs[other] / costs["fitted"])
            assert got["optimum"] == pytest.approx(costs[other] / record["measure 4"]["floor"])
            assert got["error"] > 0
        parts = record["measure 4"]["parts"][of]
        assert sum(parts.values()) == pytest.approx(costs["fitted"])
        assert parts["noise"] > record["measure 4"]["floor"]  # the best proposal's, which no other undercuts
    assert "times fewer evaluations" in capsys.readouterr().out


def test_the_script_begins_no_seed_after_its_time(script, tmp_path, capsys):
    script.main(["digits", "--images", "8", "--measure", "4", "--device", "cpu", "--minutes", "0"])
    assert "stopped after 0 of 16 seeds" in capsys.readouterr().out


def test_the_error_of_a_saving_is_that_of_its_variances(script):
    """Two estimators with known variances, 4 to 1: the ratio is 4 within what the jackknife says, most of the time."""
    generator, block, near = torch.Generator().manual_seed(0), torch.arange(64) // 4, 0
    for _ in range(60):
        values = [10 + scale * torch.randn(12, 64, generator=generator, dtype=torch.float64) for scale in (2.0, 1.0)]
        other, fitted = ([script.Estimate(row, 64) for row in table] for table in values)
        got = script.saving(other, fitted, block, 1, "mean")
        near += abs(got.times - 4) < 2 * got.error
    assert near >= 50
