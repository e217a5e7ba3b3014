"""Noise as a path: the law of Brownian motion, from keys alone."""

import itertools
import math
import subprocess
import sys

import pytest
import torch

from bsi.brownian import HIGH, LOW, RESOLUTION, BrownianPath, expansion
from bsi.errors import UsageError

PLACES = [1e-7, 1e-3, LOW, 0.01, 0.0101, 1.0, 7.3, 1e3, 1e6, HIGH, 2 * HIGH]


def path(seed: int = 0, samples: range = range(4), n: int = 3, dtype: torch.dtype = torch.float64) -> BrownianPath:
    return BrownianPath(seed, torch.tensor(list(samples)), (n,), dtype)


def test_two_times_have_the_covariance_of_brownian_motion():
    """E W(a) W(b) = min(a, b): exactly, from the weights of the Normals they share."""
    for a in PLACES:
        for b in PLACES:
            left, right = expansion(a), expansion(b)
            shared = dict(zip(left.keys, left.weights, strict=True))
            covariance = sum(
                shared.get(key, 0.0) * weight for key, weight in zip(right.keys, right.weights, strict=True)
            )
            assert covariance == pytest.approx(min(a, b), rel=1e-12), (a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_path_in_half_precision_is_the_path_rounded(dtype):
    for start, end in ((0.0, 0.01), (0.5, 3.0), (1e6, HIGH)):
        half, full = path(dtype=dtype)(start, end), path(dtype=torch.float32)(start, end)
        assert half.dtype == dtype
        torch.testing.assert_close(half, full.to(dtype))


def test_no_two_grid_points_share_a_leaf_at_steps_above_the_resolution():
    steps = torch.arange(-1000, 1000, dtype=torch.float64) * 1.01 * RESOLUTION
    leaves = [expansion(float(place)).leaf for place in torch.exp(steps)]
    assert len(set(leaves)) == len(leaves)


def test_increments_are_independent_standard_normals():
    grid = [0.01 * 2.5**i for i in range(16)]
    noise = path(seed=5, samples=range(1500), n=16)
    increments = torch.stack([noise(a, b) for a, b in zip([0.0, *grid], grid, strict=False)]).flatten(1)
    error = 1 / math.sqrt(increments.shape[1])
    correlation = increments @ increments.T / increments.shape[1]
    off = correlation - torch.diag(correlation.diagonal())
    assert off.abs().max() < 4.5 * error  # the largest of 120
    assert (correlation.diagonal() - 1).abs().max() < 4 * math.sqrt(2) * error
    assert increments.mean(1).abs().max() < 4 * error
    assert (increments.pow(4).mean(1) - 3).abs().max() < 4 * math.sqrt(96) * error


def test_increments_add_up_on_any_grid():
    """W(b) - W(a) in one step or in many."""
    whole = path()(0.01, 50.0) * math.sqrt(50.0 - 0.01)
    for k in (2, 7, 100):
        grid = torch.logspace(math.log10(0.01), math.log10(50.0), k + 1, dtype=torch.float64).tolist()
        grid[0], grid[-1] = 0.01, 50.0
        noise = path()
        parts = sum(noise(a, b) * math.sqrt(b - a) for a, b in itertools.pairwise(grid))
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-10)


def test_a_path_depends_on_seed_and_sample_only():
    together = path(seed=3, samples=range(10), n=7, dtype=torch.float32)
    alone = path(seed=3, samples=range(6, 7), n=7, dtype=torch.float32)
    for a, b in ((0.0, 0.01), (0.01, 0.3), (0.3, 1e6)):
        assert torch.equal(together(a, b)[6:7], alone(a, b))
    wide = BrownianPath(3, torch.arange(300), (3, 20, 20))  # made in several parts on a CPU
    assert torch.equal(wide.at(2.0)[217:218], BrownianPath(3, torch.tensor([217]), (3, 20, 20)).at(2.0))
    assert not torch.equal(path(seed=4).at(1.0), path(seed=3).at(1.0))
    assert not torch.equal(path(seed=2**32).at(1.0), path(seed=0).at(1.0))


def test_single_precision_follows_double():
    grid = [0.01 * 1.02**i for i in range(40)]
    single, double = path(dtype=torch.float32), path()
    for a, b in itertools.pairwise(grid):
        torch.testing.assert_close(single(a, b).double(), double(a, b), rtol=0, atol=2e-5)


def test_a_path_starts_at_zero_information():
    assert not path()(0.0, 0.0).any()
    assert not path().at(0.0).any()


def test_a_short_first_step_is_resolved():
    assert torch.isfinite(path()(0.0, 1e-3 * LOW)).all()


def test_steps_below_the_resolution_are_rejected():
    assert pytest.approx(0.004, rel=0.05) == RESOLUTION
    with pytest.raises(UsageError, match="independent noise"):
        path()(1.0, 1.0 + RESOLUTION / 1000)


PROGRAM = """
import torch
from bsi.brownian import expansion
from bsi.rng import seed_words, standard_normal, weighted_normals
terms = expansion(3.0)
seed = seed_words(5, torch.device("cpu"))
arguments = (seed, torch.arange(3), torch.tensor(terms.keys), torch.tensor(terms.weights), 10)
compiled = torch.compile(weighted_normals, fullgraph=True)
torch.testing.assert_close(compiled(*arguments), weighted_normals(*arguments))
compiled = torch.compile(standard_normal, fullgraph=True)
torch.testing.assert_close(compiled(seed, torch.arange(5), 0, (10,)), standard_normal(5, torch.arange(5), 0, (10,)))
"""


@pytest.mark.slow
def test_compiled_noise_is_the_same_noise():
    """A product that overflowed was undefined behavior, and compiled C++ drew other numbers.

    In a separate process, since torch.compile cannot trace the checks of annotations under pytest.
    """
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=600)
