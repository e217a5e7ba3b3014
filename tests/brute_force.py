"""Jointly Gaussian variables by linear algebra, independent of the paper's formulas, which are tested against them.

A variable is offset + coefficients . (independent standard Normals), held as one vector; sums and multiples of
variables are those of the vectors.
"""

import numpy as np


def source(i: int, count: int, mean: float = 0.0, std: float = 1.0) -> np.ndarray:
    """The i-th of `count` independent Normals."""
    variable = np.zeros(1 + count)
    variable[0], variable[1 + i] = mean, std
    return variable


def mean_and_variance(variable: np.ndarray) -> tuple[float, float]:
    return float(variable[0]), float(variable[1:] @ variable[1:])


def condition(target: np.ndarray, given: list[np.ndarray], values: list[float]) -> tuple[float, float]:
    """Mean and variance of `target` once the variables `given` are known to have `values`."""
    known = np.stack([variable[1:] for variable in given])
    gain = np.linalg.solve(known @ known.T, known @ target[1:])
    surprise = np.array(values) - np.array([variable[0] for variable in given])
    return float(target[0] + gain @ surprise), float(target[1:] @ target[1:] - gain @ known @ target[1:])
