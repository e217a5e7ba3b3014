"""Reference denoisers with known errors, the regression on them, and the proposal for the residual."""

import math

import pytest
import torch

from bsi.bound import Integral
from bsi.control_variate import Basis, Valuewise, Wiener, fit_control, fit_proposal, knots
from bsi.gaussian import squared_norm
from bsi.levels import Interpolation
from bsi.methods import BFN, BSI, VDM
from bsi.oracle import Mixture
from bsi.values import CONTINUOUS, Bins

METHODS = [BSI(), BFN(), VDM()]
BINS = Bins(-1.0, 1.0, 5)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int = 40, seed: int = 0) -> torch.Tensor:
    """Values on the bins of BINS, with correlated neighbors."""
    x = torch.randn(count, 2, 3, 4, generator=generator(seed), dtype=torch.float64).cumsum(-1) / 3
    return BINS.values(BINS.indices(x), torch.float64)


def integrand(method, predict, x, eps, level):
    level = level.expand(len(x))
    return 0.5 * level * squared_norm(x - predict(method.encoder(level).encode(x, eps), level))


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_wiener_is_the_posterior_mean_of_gaussian_data(method):
    """With the identity for its axes, `expected` + `deviations` is the oracle's integrand, eps by eps."""
    x = images(400)[:, 0, 0]
    x = x * torch.tensor([1.0, 0.5, 2.0, 0.1], dtype=torch.float64)
    levels = torch.exp(knots(method.levels, 7))
    wiener = Wiener.fit(method, levels, x)
    axes = wiener.axes[0]
    covariance = axes @ torch.diag(wiener.variance) @ axes.T
    predict = Mixture.gaussian(wiener.mean, covariance).predictor(method)
    eps = torch.randn(400, 4, generator=generator(1), dtype=torch.float64)
    for k in range(6):
        left = torch.full((400,), k)
        found = wiener.expected(x)[:, [k, k + 1]] + wiener.deviations(x, eps, left)
        for side in (0, 1):
            expected = integrand(method, predict, x, eps, levels[k + side])
            torch.testing.assert_close(found[:, side], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shape", [(5,), (2, 3, 2)])
def test_the_conditional_reference_is_exact_for_gaussian_data(shape):
    """The conditional mean by its textbook formula, from the covariance itself; it does not depend on the value."""
    x = torch.randn(300, *shape, generator=generator(), dtype=torch.float64).cumsum(-1)
    wiener, rounding = Wiener.fit(BSI(), torch.exp(knots(BSI().levels, 3)), x), 0.01
    axes = torch.ones(1, 1, dtype=torch.float64)
    for matrix in wiener.axes:
        axes = torch.kron(axes, matrix)
    n = math.prod(shape)
    covariance = axes @ torch.diag(wiener.variance + rounding) @ axes.T
    offset = (x - wiener.mean).flatten(1)
    predicted = wiener.from_others(x, rounding).flatten(1)
    for i in range(n):
        others = [j for j in range(n) if j != i]
        weights = torch.linalg.solve(covariance[others][:, others], covariance[others, i])
        torch.testing.assert_close(predicted[:, i], wiener.mean.flatten()[i] + offset[:, others] @ weights)
    flat = x.flatten(1).clone()
    flat[:, 0] += 1
    torch.testing.assert_close(wiener.from_others(flat.view_as(x), rounding).flatten(1)[:, 0], predicted[:, 0])


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_in_context_reference_is_the_posterior_mean_under_a_histogram(method):
    x = images(400)
    levels = torch.exp(knots(method.levels, 9))
    wiener = Wiener.fit(method, levels, x)
    in_context = Valuewise.fit(wiener, x, BINS)
    predicted = wiener.from_others(x, BINS.width**2 / 12).flatten()
    context = Bins(-1.0, 1.0, 17).indices(predicted)
    assert len(context.unique()) > 5
    index = BINS.indices(x).flatten().long()
    overall = torch.bincount(index, minlength=5).double() / len(index)
    centers = BINS.values(torch.arange(5), torch.float64)[:, None]
    # in the middle of a cell the table is exact
    eps = torch.full((400, 2, 3, 4), 0.125 * 3 + 0.0625, dtype=torch.float64)
    for k in (0, 3, 5, 7):
        expected = torch.zeros(len(index), dtype=torch.float64)
        for c in context.unique():
            here = context == c
            weights = torch.bincount(index[here], minlength=5) + overall
            predict = Mixture.isotropic(centers, 0.0, weights).predictor(method)
            values, noise = x.flatten()[here][:, None], eps.flatten()[here][:, None]
            expected[here] = integrand(method, predict, values, noise, levels[k])
        found = in_context.expected(x)[:, k] + in_context.deviations(x, eps, torch.full((400,), k))[:, 0]
        torch.testing.assert_close(found, expected.view(400, -1).sum(1), rtol=1e-6, atol=1e-9)


def test_values_missing_in_the_data_are_finite():
    """A bin and a context that do not occur in the data, at almost no noise."""
    x = BINS.values(torch.randint(0, 2, (30, 1, 4), generator=generator()), torch.float64)
    method = BSI()
    levels = torch.exp(knots(method.levels, 9))
    in_context = Valuewise.fit(Wiener.fit(method, levels, x), x, BINS)
    new = torch.ones(2, 1, 4, dtype=torch.float64)
    eps = torch.randn(2, 1, 4, generator=generator(1), dtype=torch.float64)
    assert bool(torch.isfinite(in_context.expected(new)).all())
    assert bool(torch.isfinite(in_context.deviations(new, eps, torch.tensor([7, 7]))).all())


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_deviations_have_mean_zero(method):
    x = images(8)
    basis = Basis.fit(method, x, BINS)
    draws = 4000
    eps = torch.randn(draws, 8, 2, 3, 4, generator=generator(3), dtype=torch.float64)
    for k in (0, 10, 16, 22, 28):
        u, many = basis.knots[k].expand(8 * draws), x.repeat(draws, 1, 1, 1)
        found = basis.values(basis.steady(many), many, eps.flatten(0, 1), u)[..., 3:].reshape(draws, 8, -1)
        error = found.std(0) / math.sqrt(draws)
        assert bool((found.mean(0).abs() <= 4.5 * error + 1e-12).all())


def test_more_than_256_bins_have_no_valuewise_reference():
    x = images(8)
    assert len(Basis.fit(BSI(), x, Bins(-1.0, 1.0, 65536)).references) == 1
    assert len(Basis.fit(BSI(), x, CONTINUOUS).references) == 1
    assert len(Basis.fit(BSI(), x, BINS).references) == 2


def evaluated(basis, x, seed, count, model):
    """u, g and the functions of the basis, where g is `model` of the functions, interpolated between the knots."""
    u = torch.linspace(float(basis.knots[0]), float(basis.knots[-1]), count, dtype=torch.float64)
    some = x[torch.arange(count) % len(x)]
    eps = torch.randn(some.shape, generator=generator(seed), dtype=torch.float64)
    values, between = basis.values(basis.steady(some), some, eps, u), Interpolation.of(basis.knots, u)
    left, right = model(between.left, values).unbind(1)
    return u, left * (1 - between.fraction) + right * between.fraction, values


def test_the_regression_finds_the_coefficients_of_the_integrand():
    x = images(50)
    basis, steady = Basis.fit(BSI(), x, BINS), Basis.fit(BSI(), x, BINS).steady(x)

    def model(left, values):
        return 40 + 0.8 * values[..., 1] + 0.5 * values[..., 2] + 0.6 * values[..., 3]

    control = fit_control(basis, *evaluated(basis, x, 0, 4000, model))
    u, g, values = evaluated(basis, x, 10, 500, model)
    assert float((g - control.predict(u, values)).var()) < 0.01 * float(g.var())
    hats = Integral(BSI().levels).hats(basis.knots)
    exact = (40 + 0.8 * steady[..., 1] + 0.5 * steady[..., 2]) @ hats
    torch.testing.assert_close(control.known(steady, hats), exact, rtol=0.01, atol=0.0)


def test_a_small_pilot_selects_an_exact_reference():
    """Up to the levels where its error is almost 0 in most draws."""
    x = images(50)
    basis = Basis.fit(BSI(), x, BINS)

    def model(left, values):
        return basis.center[torch.stack([left, left + 1], 1), 1] + values[..., 2] + values[..., 4]

    control = fit_control(basis, *evaluated(basis, x, 0, 256, model))
    u, g, values = evaluated(basis, x, 10, 2000, model)
    left_over = g - control.predict(u, values)
    for there in (u < 4, (u > 4) & (u < 6)):
        assert float(left_over[there].var()) < 0.006 * float(g[there].var())


def test_the_fitted_proposal_follows_the_root_of_the_mean_square():
    levels = BSI().levels
    at = knots(levels, 9)
    u = torch.rand(20_000, generator=generator(), dtype=torch.float64) * (at[-1] - at[0]) + at[0]
    size = torch.exp(-((u - 4) ** 2) / 40)
    left_over = size * torch.randn(20_000, generator=generator(1), dtype=torch.float64)
    proposal = fit_proposal(levels, at, u, left_over)
    level = torch.exp(at[1:-1])
    density = proposal.density(level) * level
    wanted = torch.exp(-((at[1:-1] - 4) ** 2) / 40)
    assert float(torch.corrcoef(torch.stack([density, wanted]))[0, 1]) > 0.98
    assert min(proposal.weights) > 0.05 * max(proposal.weights)
