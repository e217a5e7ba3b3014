"""Shapes in annotations are checked while the tests run (pyproject switches jaxtyping's hook on with beartype)."""

import os

# Small networks: one thread per process is faster than two that wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
