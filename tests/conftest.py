"""Shapes in annotations are checked while the tests run (pyproject switches jaxtyping's hook on with beartype)."""

import os
from collections.abc import Iterator

import pytest

import repetitions

# Networks are small: one thread per process is fastest.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switch shape checks off: the compiler cannot trace them, and they are slow for small tensors."""
    import torch

    with repetitions.unchecked():
        yield
    torch._dynamo.reset()
