"""Shapes in annotations are checked while the tests run (pyproject switches jaxtyping's hook on with beartype)."""

import os
from collections.abc import Iterator

import pytest

import repetitions

# Small networks: one thread per process is faster than two that wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def unchecked() -> Iterator[None]:
    """No shape checks, into which the compiler cannot look, and which cost more than small tensors do."""
    import torch

    with repetitions.unchecked():
        yield
    torch._dynamo.reset()
