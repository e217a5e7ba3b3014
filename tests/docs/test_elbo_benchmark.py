"""docs/benchmarks/elbo_variance.py runs, and its ratios are those of the variances."""

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
def test_the_benchmark_script_runs(script, tmp_path):
    out = tmp_path / "figures.json"
    script.main(["digits", "--images", "8", "--seeds", "3", "--measure", "4", "--json", str(out)])
    found = json.loads(out.read_text())["measure 4"]
    assert set(found) == set(script.ESTIMATORS)
    for of in ("mean", "single"):
        times, error = found["independent"]["times"][of]
        assert times == pytest.approx(found["independent"][of] / found["fitted"][of])
        assert error > 0


def test_the_error_of_a_variance_ratio_follows_from_both_variances(script):
    """Two estimators with variances 4 and 1: the ratio is usually 4 within two jackknife errors."""
    generator, block, near = torch.Generator().manual_seed(0), torch.arange(64) // 4, 0
    for _ in range(60):
        values = [10 + scale * torch.randn(12, 64, generator=generator, dtype=torch.float64) for scale in (2.0, 1.0)]
        other, fitted = ([script.Run(row, 64) for row in table] for table in values)
        times, error = script.saving(other, fitted, block, "mean")
        near += abs(times - 4) < 2 * error
    assert near >= 50
