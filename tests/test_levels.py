"""Distributions over the level, the precision encoding, the default schedule and low-discrepancy t."""

import math

import mpmath
import numpy as np
import pytest
import torch

from bsi.grids import paper_grid
from bsi.levels import ExpectedError, Fitted, LogUniform, Proposal, Uniform, low_discrepancy
from bsi.methods import BFN, BSI, VDM

LOW, HIGH = 1e-2, 1e6
PROPOSALS = [
    LogUniform(LOW, HIGH),
    Uniform(LOW, HIGH),
    ExpectedError(LOW, HIGH, offset=LOW**2),
    ExpectedError(LOW, HIGH, offset=1.0),
    Fitted(LOW, HIGH, weights=(5.0, 1.0, 0.25, 2.0)),
]


def mass(proposal: Proposal, low: float, high: float, count: int = 40_000) -> float:
    """The integral of the density from low to high, in ln(level) by the midpoint rule."""
    edges = torch.linspace(math.log(low), math.log(high), count + 1, dtype=torch.float64)
    level = torch.exp((edges[1:] + edges[:-1]) / 2)
    return float((proposal.density(level) * level * torch.diff(edges)).sum())


@pytest.mark.parametrize("proposal", PROPOSALS, ids=repr)
def test_densities_integrate_to_one(proposal):
    assert mass(proposal, LOW, HIGH) == pytest.approx(1, abs=1e-7)


@pytest.mark.parametrize("proposal", PROPOSALS, ids=repr)
def test_the_inverse_cdf_has_mass_t_below_it(proposal):
    for t in (0.003, 0.2, 0.5, 0.77, 0.999):
        level = float(proposal.icdf(torch.tensor([t])))
        assert mass(proposal, LOW, level) == pytest.approx(t, abs=1e-6)


def test_a_fitted_density_of_one_weight_is_log_uniform():
    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    fitted, plain = Fitted(LOW, HIGH, weights=(3.0,)), LogUniform(LOW, HIGH)
    torch.testing.assert_close(fitted.icdf(t), plain.icdf(t), rtol=1e-12, atol=0)
    torch.testing.assert_close(fitted.density(plain.icdf(t)), plain.density(plain.icdf(t)), rtol=1e-12, atol=0)


def test_a_fitted_proposal_moves_to_a_device():
    fitted = Fitted(LOW, HIGH, weights=(5.0, 1.0, 0.25, 2.0))
    elsewhere = fitted.to(torch.device("meta"))
    assert elsewhere == fitted
    assert elsewhere.icdf(torch.zeros(3, device="meta")).device.type == "meta"


def test_a_fitted_proposal_made_without_gradients_can_be_trained_with():
    with torch.inference_mode():
        fitted = Fitted(LOW, HIGH, weights=(5.0, 1.0, 0.25, 2.0))
    x = torch.ones(4, requires_grad=True)
    t = torch.linspace(0, 1, 4)
    (x / fitted.density(fitted.icdf(t))).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("proposal", [p for p in PROPOSALS if not isinstance(p, Uniform | Fitted)], ids=repr)
def test_cdf_and_inverse_cdf_are_inverse(proposal):
    t = torch.cat([torch.logspace(-14, -1, 40, dtype=torch.float64), torch.linspace(0, 1, 41, dtype=torch.float64)])
    torch.testing.assert_close(proposal.cdf(proposal.icdf(t)), t, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("proposal", PROPOSALS, ids=repr)
def test_levels_rise_from_low_to_high_in_float64(proposal):
    level = proposal.icdf(torch.linspace(0, 1, 101, dtype=torch.float32))
    assert level.dtype == torch.float64
    assert (level[0].item(), level[-1].item()) == pytest.approx((LOW, HIGH), rel=1e-14)
    assert (torch.diff(level) > 0).all()
    assert level.max() <= HIGH
    assert level.min() >= LOW
    assert float(LogUniform(LOW, 7.3e5).icdf(torch.ones(()))) == 7.3e5, "where rounding of ln and exp leads beyond it"


@pytest.mark.parametrize("offset", [0.0, 1e-8, 1e-4, 1e-2, 1.0, 1e3, 1e8])
def test_expected_error_is_inverted_to_twelve_digits(offset):
    """Against Lambert's W; where the CDF is flat, a rounding of t itself moves u by `condition` times it."""
    proposal = ExpectedError(LOW, HIGH, offset)
    t = torch.tensor([0.0, 1e-13, 1e-6, 0.01, 0.3, 0.5, 0.9, 0.999, 1 - 1e-9, 1.0], dtype=torch.float64)
    level = proposal.icdf(t)
    with mpmath.workdps(50):
        low, bend = mpmath.mpf(LOW), mpmath.mpf(offset) / mpmath.mpf(LOW)
        end = mpmath.log(mpmath.mpf(HIGH) / low)
        total = end + bend * (1 - mpmath.exp(-end))
        for ours, target in zip(level.tolist(), t.tolist(), strict=True):
            goal = mpmath.mpf(target) * total
            u = goal - bend + mpmath.lambertw(bend * mpmath.exp(bend - goal)).real  # u + bend (1 - e^-u) = goal
            condition = float(goal / (1 + bend * mpmath.exp(-u)))
            error = abs(float(mpmath.log(mpmath.mpf(ours) / low) - u))
            assert error <= 1e-12 + 1e-15 * condition


def test_expected_error_follows_the_expected_squared_error_of_the_identity():
    """Equation "expected-h": with f(mu, lambda) = mu and unit-variance data, h = lambda_0^2/lambda^2 + 1/lambda."""
    method = BSI()
    level = paper_grid(method, 50)
    encoder = method.encoder(level)
    h = (1 - encoder.signal).square() + encoder.noise.square()
    torch.testing.assert_close(h, method.lambda_0**2 / level.square() + 1 / level, rtol=1e-9, atol=0)
    density = ExpectedError(method.levels.low, method.levels.high, method.lambda_0**2).density(level)
    ratio = h / density
    torch.testing.assert_close(ratio, ratio[0].expand_as(ratio), rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", [BSI(), BFN(), VDM()], ids=repr)
def test_precision_encoding_is_the_log_uniform_cdf(method):
    low, high = method.levels.low, method.levels.high
    level = torch.logspace(math.log10(low), math.log10(high), 20, dtype=torch.float64).clamp(low, high)
    expected = [(math.log(value) - math.log(low)) / (math.log(high) - math.log(low)) for value in level.tolist()]
    np.testing.assert_allclose(method.levels.cdf(level).numpy(), expected, atol=1e-13)
    assert method.levels.cdf(torch.tensor([low, high], dtype=torch.float64)).tolist() == pytest.approx([0, 1])


@pytest.mark.parametrize("k", [1, 2, 16, 1024])
def test_default_schedule_steps_uniformly_through_the_inverse_cdf(k):
    method = BSI()
    low, high = method.lambda_0, method.lambda_0 + method.alpha_M

    def inverse_cdf(t: float) -> float:
        return math.exp((math.log(high) - math.log(low)) * t + math.log(low))

    expected = [inverse_cdf(i / k) - inverse_cdf((i - 1) / k) for i in range(1, k + 1)]
    grid = paper_grid(method, k)
    np.testing.assert_allclose(torch.diff(grid).numpy(), expected, rtol=1e-9)
    assert math.fsum(torch.diff(grid).tolist()) == pytest.approx(method.alpha_M, rel=1e-12)
    ratios = grid[1:] / grid[:-1]
    torch.testing.assert_close(ratios, ratios[0].expand_as(ratios), rtol=1e-9, atol=0)  # exponential steps


def test_precision_gained_near_the_start_keeps_its_digits():
    """lambda - lambda_0 cancels; in float32 it would be 0 at t = 1e-9."""
    method = BSI()
    t = torch.logspace(-9, -1, 9, dtype=torch.float64)
    expected = method.lambda_0 * torch.expm1(t * method.levels.log_range)
    torch.testing.assert_close(method.gain(method.levels.icdf(t)), expected, rtol=1e-6, atol=0)
    assert (method.levels.icdf(t).float() - method.lambda_0 == 0).any()


@pytest.mark.parametrize("b", [1, 2, 7, 128])
@pytest.mark.parametrize("delta", [0.0, 0.1234, 0.5, 0.999])
def test_low_discrepancy_is_the_appendix_formula(b, delta):
    expected = [math.modf((i - 1) / b + delta)[0] for i in range(1, b + 1)]  # mod 1 discards the integer part
    assert low_discrepancy(b, delta).tolist() == pytest.approx(expected, abs=1e-15)


def test_each_low_discrepancy_t_is_uniform():
    """Over delta = (j + 1/2) / 1000 each t_i takes every one of the thousandths exactly once."""
    deltas = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    t = torch.stack([low_discrepancy(7, delta) for delta in deltas])
    for i in range(7):
        assert sorted((t[:, i] * 1000).floor().long().tolist()) == list(range(1000))


def test_stratified_batches_vary_less_than_independent_ones():
    generator = torch.Generator().manual_seed(0)
    stratified = torch.stack(
        [low_discrepancy(32, float(d)).square().mean() for d in torch.rand(400, generator=generator)]
    )
    independent = torch.rand(400, 32, generator=generator, dtype=torch.float64).square().mean(1)
    for estimate in (stratified, independent):
        assert abs(estimate.mean() - 1 / 3) < 4 * estimate.std() / math.sqrt(400)
    assert stratified.std() < independent.std() / 5
