"""docs/benchmarks/latent_images.py: all phases at a tiny size, with generated pictures and without FIDs."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "latent_images.py"


@pytest.mark.slow
def test_the_benchmark_of_latents_runs_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSI_DATA", str(tmp_path / "data"))  # without the weights of the FID network
    places = ["--photos", "none", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"), "--tiny"]
    for phases in (["autoencoder"], ["autoencoder", "latents", "evaluate"]):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *phases, *places])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    figures = [json.loads(line) for line in (tmp_path / "out" / "figures.jsonl").read_text().splitlines()]
    bound = next(figure for figure in figures if "bound" in figure)
    assert 0 < bound["bits_per_dim"] < 12
    assert bound["images"] == 16
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".jsonl", ".webp"}
