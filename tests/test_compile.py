"""Losses, the terms of the bound and a sampler's step compile whole (`fullgraph=True`) and give the same numbers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "compile_whole.py"
FUNCTIONS = [
    "training_loss",
    "weighted_training_loss",
    "measurement_loss",
    "finite_measurement_loss",
    "reconstruction_loss",
    "continuous_reconstruction_loss",
    "step",
    "model",
]


def compiled(backend: str) -> tuple[set[str], str]:
    """The functions that were compiled and agreed, and stderr."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(SCRIPT), backend],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    return set(run.stdout.splitlines()), run.stderr


@pytest.fixture(scope="module")
def with_aot_eager() -> tuple[set[str], str]:
    return compiled("aot_eager")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("method", ["BSI", "BFN", "VDM"])
def test_compiles_to_one_graph_with_the_same_value_and_gradient(with_aot_eager, method, function):
    agreed, errors = with_aot_eager
    assert f"{function} {method} aot_eager" in agreed, errors


@pytest.mark.slow
def test_inductor_compiles_the_training_loss():
    agreed, errors = compiled("inductor")
    assert agreed == {"training_loss BSI inductor"}, errors
