"""examples/own_data.py: every kind of data from raw values to a bound next to baselines, with a few steps each."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import bsi
from bsi.errors import UsageError

SCRIPT = Path(__file__).parents[2] / "examples" / "own_data.py"
NUMBER = r"(-?\d+\.\d+)"
PRINTED = {
    "table": rf"BSI +{NUMBER} nats/dim ± .*Monte Carlo.*data set.*\ndiagonal Gaussian +{NUMBER} nats/dim ± .*\nfull",
    "series": rf"BSI +{NUMBER} nats/dim ± .*Monte Carlo.*data set.*\ndiagonal Gaussian +{NUMBER} nats/dim ± .*\nfull",
    "audio": rf"(?s){NUMBER} bits/dim ± .*Monte Carlo.*data set.*linear prediction +{NUMBER} bits/dim",
    "images": rf"(?s){NUMBER} bits/dim ± .*Monte Carlo.*data set.*PNG {NUMBER}, WebP",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PRINTED)
def test_own_data_gets_a_bound_and_baselines(kind: str, tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), kind, "--out", str(tmp_path), "--scale", "0.02"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(words, capture_output=True, text=True, encoding="utf-8", env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    found = re.search(PRINTED[kind], done.stdout)
    assert found is not None, done.stdout
    bound, baseline = map(float, found.groups())
    assert baseline - 2 < bound < baseline + 8  # after a few steps the bound is finite and not below the entropy
    assert "Traceback" not in done.stderr


def test_a_backbone_given_by_name_raises_with_the_right_call(unchecked: None) -> None:
    with pytest.raises(UsageError, match=r"bsi.backbones.resolve\('mlp-128x2'\)"):
        replace(bsi.recipes.arrays(), backbone="mlp-128x2")
