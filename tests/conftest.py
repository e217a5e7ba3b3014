"""Shapes in annotations are checked while the tests run (pyproject switches jaxtyping's hook on with beartype)."""

import os
import signal
from collections.abc import Iterator

import pytest

import repetitions

# Networks are small: one thread per process is fastest.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell ignores these signals in background jobs and under nohup, and so would the processes that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switch shape checks off: the compiler cannot trace them, and they are slow for small tensors."""
    import torch

    with repetitions.unchecked():
        yield
    torch._dynamo.reset()
