"""Grids: where they start and end, how they are spaced, which are rejected."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from bsi.grids import GRIDS, cheapest_grid, check_grid, edm_grid, geometric_grid, named_grid, paper_grid
from bsi.methods import BFN, BSI, VDM
from bsi.methods.base import level_at, rho_at

METHODS = [BSI(), BFN(), VDM(), BSI(gamma_0=0.1), BSI(gamma_0=math.inf)]


@pytest.mark.parametrize("k", [1, 2, 3, 16, 1000])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_grids_rise_from_the_priors_level_to_the_last(method, grid, k):
    levels = named_grid(grid)(method, k)
    assert len(levels) == k + 1
    assert (levels[0], levels[-1]) == (method.levels.low, method.levels.high)
    assert levels.dtype == torch.float64
    assert torch.equal(check_grid(method, levels), levels)


def test_the_papers_grid_is_geometric_for_bsi_and_vdm():
    for method in (BSI(), VDM()):
        torch.testing.assert_close(paper_grid(method, 16), geometric_grid(method, 16), rtol=1e-12, atol=0)
    assert not torch.allclose(paper_grid(BFN(), 16), geometric_grid(BFN(), 16))


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_geometric_steps_are_equal_in_the_logarithm_of_the_information(method):
    steps = torch.diff(torch.log(method.gain(geometric_grid(method, 12)) + method.c))
    steps = steps[torch.isfinite(steps)]  # the first step of a method that starts without information
    torch.testing.assert_close(steps, steps.mean().expand_as(steps), rtol=1e-9, atol=0)


def test_the_first_geometric_step_from_zero_reaches_edms_largest_sigma():
    first = BFN().encoder(geometric_grid(BFN(), 12)[1])
    assert float(first.noise / first.signal) == pytest.approx(80)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_edm_steps_are_equal_in_the_seventh_root_of_sigma(method):
    encoder = method.encoder(edm_grid(method, 12))
    roots = (encoder.noise[1:] / encoder.signal[1:]) ** (1 / 7)
    steps = torch.diff(roots)
    torch.testing.assert_close(steps, steps.mean().expand_as(steps), rtol=1e-6, atol=0)
    first = float(roots[0] - steps.mean()) ** 7  # the start of the skipped first step
    nothing_known = method.c == 0 and not isinstance(method, VDM)
    expected = 20.0 if nothing_known else math.exp(2.5) if isinstance(method, VDM) else 80.0
    assert first == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_level_of_a_signal_to_noise_ratio_is_where_the_encoder_has_it(method):
    levels = geometric_grid(method, 12)
    encoder, rho = method.encoder(levels[1:]), rho_at(method, levels)
    torch.testing.assert_close(rho[1:], encoder.signal / encoder.noise, rtol=1e-12, atol=0)
    torch.testing.assert_close(level_at(method, rho), levels, rtol=1e-9, atol=0)
    if not isinstance(method, VDM):
        assert rho[0] == 0  # at first nothing is known


@pytest.mark.parametrize("method", [*METHODS, BSI(lambda_0=0.1)], ids=repr)
def test_a_grid_given_as_a_list_or_in_float32_starts_at_the_prior(method):
    """Neither 0.01 nor 0.1 is exact in float32: one is rounded down, the other up."""
    levels = geometric_grid(method, 5)
    assert torch.equal(check_grid(method, levels.tolist()), levels)
    rounded = check_grid(method, levels.float())
    assert rounded[0] == method.levels.low
    torch.testing.assert_close(rounded, levels, rtol=1e-6, atol=0)
    assert torch.equal(check_grid(method, levels[1:3], from_prior=False), levels[1:3])


def test_the_cheapest_grid_is_that_of_a_search_of_all() -> None:
    levels = torch.arange(1.0, 25.0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    cost = torch.rand(24, 24, generator=generator, dtype=torch.float64)
    cost = torch.where(levels[:, None] < levels, cost, math.inf)
    ending = torch.rand(24, generator=generator, dtype=torch.float64)

    def total(grid: Sequence[int]) -> float:
        return float(sum(cost[a, b] for a, b in itertools.pairwise(grid)) + ending[grid[-1]])

    for k in (1, 2, 3):
        best = min(total((0, *rest)) for rest in itertools.combinations(range(1, 24), k))
        found = (cheapest_grid(levels, cost, ending, k) - 1).long().tolist()
        assert len(found) == k + 1
        assert found[0] == 0
        assert total(found) == pytest.approx(best)
    many = cheapest_grid(levels, cost, ending, 100)
    assert len(many) == 101
    assert bool((torch.diff(many) > 0).all())
