"""Conditioning on real measurements, against the exact posteriors of Gaussians and mixtures."""

import math

import pytest
import torch
from torch import Tensor

import bsi
from bsi.brownian import BrownianPath
from bsi.conditioning import denoise, guided, inpainted, measured, replaced, start_of
from bsi.data.store import open_dataset
from bsi.errors import DataError, NonFinite, UsageError
from bsi.grids import geometric_grid, named_grid
from bsi.methods import BFN, BSI, VDM, Method, Predictor
from bsi.oracle import Mixture
from bsi.sampler import FLOW_SOLVER, Sampler
from bsi.sampling import sample
from mixtures import at, mixture

METHODS = [BSI(), BFN(), VDM()]


def covariances(data: Mixture) -> Tensor:
    return data.axes @ torch.diag_embed(data.variances) @ data.axes.mT


def given(data: Mixture, matrix: Tensor, y: Tensor, variance: float) -> Mixture:
    """The exact posterior of a mixture after y = A x + N(0, variance): a mixture."""
    cov = covariances(data)
    inside = matrix @ cov @ matrix.T + variance * torch.eye(len(matrix), dtype=torch.float64)
    gain = cov @ matrix.T @ torch.linalg.inv(inside)
    rest = y - data.means @ matrix.T
    means = data.means + (gain @ rest[:, :, None])[:, :, 0]
    fit = -0.5 * (rest[:, None, :] @ torch.linalg.solve(inside, rest[:, :, None]))[:, 0, 0] - 0.5 * torch.logdet(inside)
    weights = torch.softmax(torch.log(data.weights) + fit, 0)
    return Mixture.general(weights, means, cov - gain @ matrix @ cov)


def moments(data: Mixture) -> tuple[Tensor, Tensor]:
    mean = (data.weights[:, None] * data.means).sum(0)
    offsets = data.means - mean
    second = covariances(data) + offsets[:, :, None] * offsets[:, None, :]
    return mean, (data.weights[:, None, None] * second).sum(0)


def path(count: int, n: int = 2) -> BrownianPath:
    return BrownianPath(11, torch.arange(count), (n,), torch.float64)


# Denoising


@pytest.mark.parametrize("method", [*METHODS, BSI(gamma_0=0.1)], ids=repr)
def test_a_measurement_is_a_latent_at_the_level_of_its_precision(method):
    for precision in (0.1, 1.0, 300.0):
        encoder = method.encoder(at(start_of(method, precision)))
        assert (encoder.signal / encoder.noise).square().item() == pytest.approx(precision, rel=1e-9)
    for wrong in (0.0, -1.0, -0.01, math.nan, math.inf, 1e9):
        with pytest.raises(UsageError, match="precision"):
            start_of(method, wrong)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_denoising_draws_from_the_exact_posterior(method):
    data, y, precision, count = mixture(), at(0.1, 0.2), 3.0, 3000
    drawn = denoise(method, data.predictor(method), path(count), y.expand(count, 2), precision, k=48)
    mean, covariance = moments(given(data, torch.eye(2, dtype=torch.float64), y, 1 / precision))
    error = torch.sqrt(covariance.diagonal() / count)
    assert ((drawn.mean(0) - mean).abs() < 4 * error + 0.003).all()
    found = torch.cov(drawn.T)
    assert (found - covariance).abs().max() < 4 * 2 * covariance.max() / math.sqrt(count) + 0.005
    modes = (drawn[:, None, :] - data.means).norm(dim=-1).argmin(1)
    assert len(modes.unique()) == 3


def test_only_steps_that_measure_draw_from_the_posterior():
    method, y = BSI(), torch.zeros(2, 2, dtype=torch.float64)
    for solver in ("ode2", "churn"):
        with pytest.raises(UsageError, match="use posterior or sde2"):
            denoise(method, mixture().predictor(method), path(2), y, 1.0, solver=solver)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_grid_may_start_at_any_level(method):
    grid = geometric_grid(method, 6, start=40.0)
    assert (grid[0], grid[-1]) == (40.0, method.levels.high)
    steps = torch.diff(torch.log(method.gain(grid) + method.c))
    torch.testing.assert_close(steps, steps.mean().expand(6), rtol=1e-9, atol=0)
    for wrong in (method.levels.low, 2 * method.levels.high):
        with pytest.raises(UsageError, match="between"):
            geometric_grid(method, 6, start=wrong)


# Linear measurements


MATRIX = torch.tensor([[0.5, -0.3, 0.2, 0.9], [0.0, 1.0, -0.5, 0.4]], dtype=torch.float64)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_moment_matched_prediction_is_exact_for_gaussian_data(method):
    generator = torch.Generator().manual_seed(2)
    root = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    data = Mixture.gaussian(at(0.3, -0.2, 0.1, 0.5), root @ root.T / 4)
    y, precision = at(0.7, -0.4), 20.0
    predict = measured(method, data.predictor(method), lambda x: x @ MATRIX.T, y.expand(5, 2), precision, iterations=2)
    known = given(data, MATRIX, y, 1 / precision).predictor(method)
    for level in geometric_grid(method, 8)[2:]:
        latent = method.encoder(level).encode(*torch.randn(2, 5, 4, generator=generator, dtype=torch.float64))
        levels = level.expand(5)
        torch.testing.assert_close(predict(latent, levels), known(latent, levels), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_without_information_the_prediction_follows_the_measurement(method):
    """At the first level d x_hat / d psi vanishes; the prediction is still nearly that of y and the prior."""
    data, y = Mixture.gaussian(at(0.2, 0.1), torch.stack([at(0.3, 0.2), at(0.2, 0.4)])), at(0.9)
    matrix = torch.stack([at(1.0, 0.0)])
    predict = measured(method, data.predictor(method), lambda x: x @ matrix.T, y.expand(3, 1), 50.0)
    latent = method.prior(torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    found = predict(latent, at(method.levels.low).expand(3))
    expected = given(data, matrix, y, 1 / 50.0)
    prior = expected.predictor(method)(latent, at(method.levels.low).expand(3))
    torch.testing.assert_close(found, prior, rtol=0, atol=0.02)


def distance(drawn: Tensor, exact: Tensor) -> float:
    """Mean Wasserstein-1 over 24 directions."""
    angles = torch.arange(24, dtype=torch.float64) * math.pi / 24
    directions = torch.stack([torch.cos(angles), torch.sin(angles)])
    return float(((drawn @ directions).sort(0).values - (exact @ directions).sort(0).values).abs().mean())


def inpainting_errors(method: Method, y: Tensor, count: int = 1500) -> tuple[float, float]:
    """Distances to the exact posterior, of moment matching and of replacement; two sets of draws are 0.015 apart."""
    data, grid = mixture(), geometric_grid(method, 32)
    exact, generator = given(data, torch.stack([at(0.0, 1.0)]), y[1:], 1e-6), torch.Generator().manual_seed(0)
    reference = exact.sample(
        torch.rand(count, generator=generator, dtype=torch.float64),
        torch.randn(count, 2, generator=generator, dtype=torch.float64),
    )
    predict, mask, known = data.predictor(method), at(0.0, 1.0).expand(count, 2), y.expand(count, 2)
    matched = sample(method, inpainted(method, predict, known, mask), path(count), grid, "sde2")
    plain = sample(method, replaced(predict, known, mask), path(count), grid, "sde2")
    assert (matched[:, 1] - y[1]).abs().max() < 0.02
    return distance(matched, reference), distance(plain, reference)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_inpainting_by_moments_is_nearer_to_the_posterior_than_replacement(method):
    """Measured at seven places y with 32 steps: 0.13 on average, and 0.21 (worst 0.35 and 0.49, between two modes)."""
    errors = [inpainting_errors(method, at(0.0, y)) for y in (-1.05, 0.1, 0.6)]
    assert all(matched < plain for matched, plain in errors)
    matched, plain = (sum(values) for values in zip(*errors, strict=True))
    assert matched < 0.75 * plain


# A trained network, whose Jacobian is no covariance


@pytest.mark.parametrize("variance", [(0.5, -0.3), (0.5, -0.289)])
def test_directions_of_negative_variance_are_ignored(variance):
    """V + 1 / a is nearly 0 in the second direction: solving with it gives errors of a factor of 30 or 289."""
    method, level, y = BSI(), at(3.0).expand(4), torch.randn(4, 2, generator=torch.Generator().manual_seed(0)).double()
    encoder = method.encoder(level[:1])
    slope = at(*variance) * encoder.signal / encoder.noise.square()
    corrected = measured(method, lambda latent, level: latent * slope, lambda x: x, y, precision=1 / 0.29)
    found = corrected(torch.zeros(4, 2, dtype=torch.float64), level)  # where the prediction is 0
    torch.testing.assert_close(found[:, 0], y[:, 0] * 0.5 / 0.79, rtol=0.35, atol=0)
    assert (found[:, 1] / y[:, 1]).min() > -1e-9
    assert (found.abs() <= y.abs()).all()


def digits(count: int) -> tuple[bsi.Model, Tensor]:
    model = bsi.load("digits")
    model.requires_grad_(False)
    return model, model.values(torch.from_numpy(open_dataset("digits").test[:count].copy()))


@pytest.mark.slow
@pytest.mark.parametrize(("solver", "grid"), [(FLOW_SOLVER, Sampler.grid), ("sde2", "geometric")])
def test_inpainting_digits_is_better_than_replacement(solver, grid):
    """Conjugate gradients reached errors of 10^9 here. Mean squared error of the lower half over 64 test digits:

    0.469 against 0.518 by replacement (ode2, edm), 0.417 against 0.452 (sde2, geometric); the differences are 5.7 and
    3.9 standard errors.
    """
    model, x = digits(64)
    mask, levels = torch.ones_like(x), named_grid(grid)(model.method, Sampler.steps)
    mask[..., 4:, :] = 0

    def error(predict: Predictor) -> Tensor:
        noise = BrownianPath(0, torch.arange(len(x)), model.shape)
        drawn = sample(model.method, predict, noise, levels, solver)
        assert drawn.abs().max() < 1.5
        assert ((drawn - x) * mask).abs().max() < 1e-5
        return ((drawn - x) * (1 - mask)).square().flatten(1).sum(1) / 32

    with torch.no_grad():
        gap = error(inpainted(model.method, model.denoiser, x, mask)) - error(replaced(model.denoiser, x, mask))
    assert gap.mean() < -3 * gap.std() / math.sqrt(len(gap))


def test_exactly_known_values_are_kept_bit_for_bit():
    method, data = BSI(), mixture()
    y, mask = torch.full((3, 2), 1 / 3, dtype=torch.float64), torch.tensor([[1.0, 0.0]]).double().expand(3, 2)
    latent = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = inpainted(method, data.predictor(method), y, mask)(latent, at(5.0).expand(3))
    assert torch.equal(found[:, 0], y[:, 0])


def test_a_constant_predictor_is_corrected_by_the_mean_error():
    method = BSI()
    y = torch.tensor([[2.0, -1.0]], dtype=torch.float64)
    predict = measured(method, lambda latent, level: 0 * latent, lambda x: x, y, precision=1e6)
    torch.testing.assert_close(predict(torch.zeros_like(y), at(5.0).expand(1)), y, rtol=1e-3, atol=0)


def test_unknown_values_may_be_nan():
    predict, latent = mixture().predictor(BSI()), torch.zeros(4, 2, dtype=torch.float64)
    for precision in (100.0, math.inf):
        found = []
        for missing in (0.0, 5.0, math.nan):
            y, mask = at(0.7, missing).expand(4, 2), at(1.0, 0.0).expand(4, 2)
            found.append(inpainted(BSI(), predict, y, mask, precision)(latent, at(3.0).expand(4)))
        assert all(torch.equal(found[0], other) for other in found[1:])


def test_measurements_must_be_finite():
    """Integer data once gave a latent of zeros, since the signal was cast to an integer."""
    method, predict, noise = BSI(), mixture().predictor(BSI()), path(3)
    whole, missing = torch.full((3, 2), 200, dtype=torch.uint8), torch.full((3, 2), math.nan, dtype=torch.float64)
    mask = torch.tensor([[1, 0]]).expand(3, 2)
    for rejected in (
        lambda y: denoise(method, predict, noise, y, 100.0),
        lambda y: measured(method, predict, lambda x: x, y, 100.0),
        lambda y: inpainted(method, predict, y, mask),
    ):
        with pytest.raises(UsageError, match=r"not of bins: got torch\.uint8"):
            rejected(whole)
        with pytest.raises(DataError, match="NaN or infinity"):
            rejected(missing)


def test_a_measured_predictor_differentiates_under_no_grad():
    method, predict = BSI(), mixture().predictor(BSI())
    mask, y = torch.tensor([[1, 0]]).expand(3, 2), torch.ones(3, 2, dtype=torch.float64)

    def drawn() -> Tensor:
        informed = inpainted(method, predict, y.clone(), mask.clone())
        return sample(method, informed, path(3), geometric_grid(method, 4), "sde2")

    expected = drawn()
    assert not expected.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(drawn(), expected)
    truths = inpainted(method, predict, y, mask.bool())
    assert torch.equal(sample(method, truths, path(3), geometric_grid(method, 4), "sde2"), expected)


def test_impossible_measurements_are_rejected():
    def never(latent: Tensor, level: Tensor) -> Tensor:
        raise AssertionError("evaluated")

    y, level = torch.zeros(3, 2), torch.full((3,), 4.0, dtype=torch.float64)
    with pytest.raises(UsageError, match=r"y of \(3, 2\)"):
        measured(BSI(), never, lambda x: x[:, :1], y, 1.0)(torch.zeros(3, 4), level)
    with pytest.raises(NonFinite, match="predictions are not finite"):
        measured(BSI(), lambda latent, level: latent * math.nan, lambda x: x, y, 1.0)(torch.zeros(3, 2), level)
    with pytest.raises(UsageError, match="mask is 1 where"):
        inpainted(BSI(), never, y, torch.full((3, 2), 0.5))
    for precision, iterations in ((0.0, 3), (-1.0, 3), (1.0, 1)):
        with pytest.raises(UsageError, match="precision"):
            measured(BSI(), mixture().predictor(BSI()), lambda x: x, torch.zeros(1, 2), precision, iterations)


# Guidance


def test_guidance_extrapolates_from_one_predictor_through_the_other():
    one, other = (lambda latent, level, value=value: torch.full_like(latent, value) for value in (3.0, 1.0))
    latent, level = torch.zeros(2, 3), torch.ones(2)
    for scale, expected in ((0.0, 1.0), (1.0, 3.0), (2.5, 6.0)):
        assert torch.equal(guided(one, other, scale)(latent, level), torch.full((2, 3), expected))
