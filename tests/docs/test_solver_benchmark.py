"""docs/benchmarks/solvers.py: all solvers and grids come closer to the converged sample with more evaluations."""

import importlib
import json
from pathlib import Path

import torch

from bsi.grids import GRIDS
from bsi.solvers import SOLVERS


def test_the_distance_to_the_converged_sample_falls_with_evaluations(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "benchmarks"))
    module = importlib.import_module("solvers")
    images = torch.randint(0, 256, (200, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    monkeypatch.setattr(module, "cifar10", lambda part: images)
    words = "--side 4 --images 200 --num 8 --reference 128 --evaluations 4 32 --many 64 --device cpu"
    module.main(["--out", str(tmp_path), *words.split()])
    found = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["solver"] for row in found} == set(SOLVERS)
    assert {row["grid"] for row in found} == set(GRIDS)
    few, more = (sum(row["distance"] for row in found if row["evaluations"] == count) for count in (4, 32))
    assert 0 < more < 0.5 * few
    assert len((tmp_path / "table.md").read_text().splitlines()) == 2 + len({(r["solver"], r["grid"]) for r in found})
    assert (tmp_path / "figure.svg").exists()
