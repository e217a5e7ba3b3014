"""The kernels are optional: with their folder deleted, a run trains, samples and is evaluated as before."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bsi

CODE = """
import sys
from dataclasses import replace
from pathlib import Path

import torch

import bsi
from bsi.backbones import DiTConfig, UNetConfig, accelerate, build, freeze
from bsi.devices import compiles

out = Path(sys.argv[1])
recipe = replace(bsi.recipes.digits(), steps=2, batch=64, compile=True)
bsi.train(recipe, out=out / "run", device="cpu")
model = bsi.load(out / "run")
print(model.sample(2, steps=2, seed=0).double().mean().item())

torch.cuda.get_device_capability = lambda device: (9, 0)  # a GPU that would use kernels, if they were there
assert kernels or not compiles(torch.device("cuda"))
network = build(DiTConfig(width=32, depth=1, heads=2), (3, 8, 8), 256)
network.compute_dtype = torch.bfloat16
if not kernels:
    accelerate(network, torch.device("cuda"))
    freeze(network)
print(network(torch.zeros(1, 3, 8, 8), torch.zeros(1)).abs().max().item())
"""


def run(package: Path, out: Path, kernels: bool) -> list[str]:
    env = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", f"kernels = {kernels}" + CODE, str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line and line[0] in "-0123456789"]


@pytest.mark.slow
def test_everything_works_without_the_kernels(tmp_path: Path) -> None:
    source = Path(bsi.__file__).parents[1]
    shutil.copytree(source / "bsi", tmp_path / "bsi", ignore=shutil.ignore_patterns("kernels", "__pycache__"))
    assert run(tmp_path, tmp_path / "without", False) == run(source, tmp_path / "with", True)


def test_importing_the_trainer_imports_no_compiler() -> None:
    """Triton and torch's compiler take seconds to import, and are needed only where they run."""
    code = (
        "import sys, bsi.training.train, bsi.runtime.export; from bsi.backbones import accelerate\n"
        "print(*{'triton', 'torch._dynamo', 'torch._inductor'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == []
