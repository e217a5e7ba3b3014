"""Code in a separate process, in Triton's interpreter, which is selected when Triton is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton, with its interpreter, is not installed"
)


def printed(code: str, interpret: bool = True) -> list[str]:
    """The lines that the code prints."""
    paths = [str(Path(__file__).parent / "backbones"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"TRITON_INTERPRET": str(int(interpret)), "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def about(lines: list[str], what: str) -> list[list[str]]:
    """The words of the lines that begin with `what`, without it."""
    return [line.split()[1:] for line in lines if line.startswith(what)]
