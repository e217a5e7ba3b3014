"""Shapes in annotations are checked while the tests run (pyproject switches jaxtyping's hook on with beartype)."""

import os
from collections.abc import Iterator

import jaxtyping
import pytest

# Small networks: one thread per process is faster than two that wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def unchecked() -> Iterator[None]:
    """No shape checks, into which the compiler cannot look."""
    import torch

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch._dynamo.reset()
