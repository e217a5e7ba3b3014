"""Variance-aware transitions: closed forms for Gaussian data, where the best variance is known."""

import math
from dataclasses import replace

import pytest
import scipy.fft
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

import bsi
from bsi import BFN, BSI, VDM
from bsi.backbones import MLPConfig
from bsi.bound import EvaluatedModel, estimate
from bsi.data import open_dataset
from bsi.elbo import Elbo, Estimator
from bsi.errors import UsageError
from bsi.grids import paper_grid
from bsi.methods import Method, Predictor
from bsi.oracle import Mixture
from bsi.rng import SeededNoise
from bsi.sampler import Sampler
from bsi.sampling import sample
from bsi.variance import (
    OrthonormalBasis,
    Variance,
    dct_basis,
    fit_variance,
    named_variance,
    pca_basis,
    pixel_basis,
    transition_kl,
)
from repetitions import unchecked

METHODS = [BSI(alpha_M=1e4), BFN(sigma_1=1e-2), VDM(nu_max=1e4)]
SCALES = torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)  # variances of the data along its axes


def rotation(n: int = 3) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]


def exact_variance(method: Method, basis: OrthonormalBasis, knots: int = 400) -> Variance:
    """Of x given the latent, for a Gaussian with variances SCALES along the basis."""
    low, high = method.levels.low, method.levels.high
    level = torch.logspace(math.log10(low), math.log10(high), knots, dtype=torch.float64)
    gain = method.gain(level).clamp(min=0)
    known = gain.square() / (gain + method.c).clamp(min=1e-300)
    return Variance(basis, low, high, 1 / (1 / SCALES + known[:, None]), torch.arange(3))


def constant(basis: OrthonormalBasis, value: float, n: int = 3) -> Variance:
    return Variance(basis, 1e-3, 1e9, torch.full((2, n), value, dtype=torch.float64), torch.arange(n))


@pytest.mark.parametrize("shape", [(3,), (3, 8), (3, 4, 6)])
def test_bases_are_orthonormal_and_invertible(shape: tuple[int, ...]) -> None:
    x = torch.randn(200, *shape, dtype=torch.float64)
    bases = [pixel_basis(shape), pca_basis(x)] + ([dct_basis(x)] if len(shape) > 1 else [])
    for basis in bases:
        coordinates = basis.coordinates(x)
        assert torch.allclose(coordinates.square().sum(1), x.square().flatten(1).sum(1))
        assert torch.allclose(basis.values(coordinates, x), x)


def test_the_cosine_transform_is_scipys() -> None:
    x = torch.randn(5, 1, 7, 4, dtype=torch.float64)
    ours = dct_basis(x).coordinates(x).reshape(5, 7, 4)
    theirs = scipy.fft.dctn(x[:, 0].numpy(), axes=(1, 2), norm="ortho")
    assert torch.allclose(ours.abs(), torch.from_numpy(theirs).abs())


def test_pca_diagonalizes_the_covariance() -> None:
    x = torch.randn(5000, 3, dtype=torch.float64) * SCALES.sqrt() @ rotation().T
    covariance = torch.cov(pca_basis(x).coordinates(x).T)
    assert torch.allclose(covariance, torch.diag(covariance.diagonal()), atol=1e-10)


def test_the_divergence_is_that_of_the_two_gaussians() -> None:
    basis = OrthonormalBasis((3,), (rotation().T,))
    s, x, x_hat = torch.randn(3, 6, 3, dtype=torch.float64).unbind()
    d = torch.logspace(-2, 2, 6, dtype=torch.float64)
    v = torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64)
    variance = Variance(basis, 1e-3, 1e9, v.expand(2, 3), torch.arange(3))
    found = transition_kl(variance, x, x_hat, torch.ones(6, dtype=torch.float64), d)
    eye, axes = torch.eye(3, dtype=torch.float64), rotation()
    for i in range(6):
        q = MultivariateNormal(s[i] + d[i] * x[i], d[i] * eye)
        p = MultivariateNormal(s[i] + d[i] * x_hat[i], d[i] * eye + d[i] ** 2 * axes @ torch.diag(v) @ axes.T)
        assert float(found[i]) == pytest.approx(float(kl_divergence(q, p)), rel=1e-7)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_the_best_variance_costs_half_the_logarithm(method: Method) -> None:
    """E KL = 1/2 sum ln(1 + D v) for Gaussian data and its exact predictor, for any start."""
    basis, axes = OrthonormalBasis((3,), (rotation().T,)), rotation()
    data = Mixture.gaussian(torch.zeros(3, dtype=torch.float64), axes @ torch.diag(SCALES) @ axes.T)
    variance, predict = exact_variance(method, basis), data.predictor(method)
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(40_000, 3, generator=generator, dtype=torch.float64)  # noqa: E731
    for level, gained in ((method.levels.low * 3, 1.0), (5.0, 20.0)):
        x = draw() * SCALES.sqrt() @ axes.T
        levels = torch.full((len(x),), level, dtype=torch.float64)
        x_hat = predict(method.encoder(levels).encode(x, draw()), levels)
        kl = transition_kl(variance, x, x_hat, levels, torch.full_like(levels, gained))
        expected = 0.5 * torch.log1p(gained * variance.of_level(levels[:1])).sum()
        assert abs(float(kl.mean() - expected)) < 4 * float(kl.std()) / math.sqrt(len(x)) + 1e-4


def test_any_number_of_steps_gives_the_infinite_bound_of_a_gaussian() -> None:
    """Without belief prior (c = 0) the exact transitions of a Gaussian are Gaussian: the bound telescopes."""
    method = BFN(sigma_1=1e-2)
    low, high = method.levels.low, method.levels.high
    infinite = 0.5 * torch.log((1 / SCALES + high - low) / (1 / SCALES)).sum()
    for k in (1, 4, 64):
        grid = paper_grid(method, k)
        v = 1 / (1 / SCALES + (grid[:-1] - low)[:, None])
        total = 0.5 * torch.log1p(torch.diff(grid)[:, None] * v).sum()
        assert float(total) == pytest.approx(float(infinite), rel=1e-9)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_a_fit_finds_the_variance_of_a_gaussian(method: Method) -> None:
    axes = rotation()
    basis = OrthonormalBasis((3,), (axes.T,))
    data = Mixture.gaussian(torch.zeros(3, dtype=torch.float64), axes @ torch.diag(SCALES) @ axes.T)
    x = torch.randn(8000, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * SCALES.sqrt() @ axes.T
    fitted = fit_variance(method, data.predictor(method), x, basis, torch.arange(3))
    level = torch.logspace(math.log10(method.levels.low) + 0.2, math.log10(method.levels.high) - 0.2, 9)
    ratio = fitted.of_level(level) / exact_variance(method, basis).of_level(level)
    assert float((ratio - 1).abs().max()) < 0.2
    average = fit_variance(method, data.predictor(method), x, basis, torch.zeros(3, dtype=torch.long))
    assert average.values.shape[1] == 1
    assert torch.allclose(average.of_level(level)[:, 0], fitted.of_level(level).mean(1), rtol=0.2)


@pytest.mark.parametrize("method", [BFN(sigma_1=1e-3), VDM(nu_max=1e6)], ids=["BFN", "VDM"])
def test_few_aware_steps_draw_a_gaussian_exactly(method: Method) -> None:
    """The paper's sampler loses variance in large steps; the missing part is exactly D^2 v."""
    axes = rotation()
    basis = OrthonormalBasis((3,), (axes.T,))
    data = Mixture.gaussian(torch.zeros(3, dtype=torch.float64), axes @ torch.diag(SCALES) @ axes.T)
    predict, grid, n = data.predictor(method), paper_grid(method, 4), 40_000

    def variances(aware: bool) -> Tensor:
        noise = SeededNoise(0, torch.arange(n), (3,), torch.float64)
        variance = exact_variance(method, basis) if aware else None
        return torch.var(sample(method, predict, noise, grid, variance=variance) @ axes, 0)

    assert float((variances(True) / SCALES - 1).abs().max()) < 0.05
    assert float((variances(False) / SCALES - 1).abs().max()) > 0.2


def test_named_variances() -> None:
    x = torch.randn(64, 1, 4, 4)
    method = BSI(alpha_M=1e3)
    found = {
        name: named_variance(name, method, lambda latent, level: latent, x)
        for name in ("level", "pixels", "dct", "pca", "learned")
    }
    assert [len(found[name].values[0]) for name in found] == [1, 16, 5, 16, 16]
    with pytest.raises(UsageError, match="dct"):
        named_variance("cosine", method, lambda latent, level: latent, x)
    with pytest.raises(UsageError, match="pca"):
        named_variance("dct", method, lambda latent, level: latent, x.flatten(1))


@pytest.mark.parametrize("shape", [(2,), (1, 4, 4)])
def test_a_learned_variance_knows_what_the_prediction_says(shape: tuple[int, ...]) -> None:
    """Values of -1 or 1: a prediction of 0 is uncertain and one of 1 is not, at the same level."""
    method = BSI(alpha_M=1e3)
    x = torch.randint(0, 2, (3000, *shape), generator=torch.Generator().manual_seed(0)).double() * 2 - 1

    def predict(latent: Tensor, level: Tensor) -> Tensor:
        encoder = method.encoder(level)
        ratio = (encoder.signal / encoder.noise.square()).reshape(-1, *[1] * len(shape))
        return torch.tanh(ratio * latent)

    fitted = {name: named_variance(name, method, predict, x) for name in ("pixels", "learned")}
    fresh = torch.randint(0, 2, (2000, *shape), generator=torch.Generator().manual_seed(1)).double() * 2 - 1
    level = torch.full((2000,), 2.0, dtype=torch.float64)
    eps = torch.randn(fresh.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x_hat = predict(method.encoder(level).encode(fresh, eps), level)
    exact, found = (1 - x_hat.square()).flatten(1), fitted["learned"].at(level, x_hat)
    off = {
        name: float((torch.log1p(20 * v.at(level, x_hat)) - torch.log1p(20 * exact)).square().mean())
        for name, v in fitted.items()
    }
    assert off["learned"] < off["pixels"] / 2
    kl = {name: transition_kl(v, fresh, x_hat, level, 20 * torch.ones_like(level)) for name, v in fitted.items()}
    gain = kl["pixels"] - kl["learned"]
    assert float(gain.mean()) > 4 * float(gain.std()) / math.sqrt(len(gain))
    assert bool(torch.isfinite(found).all())


def bound(k: int | None, variance: Variance | None, predict: Predictor, method: Method, x: Tensor) -> Elbo:
    model = replace(EvaluatedModel.of(method, predict, x), variance=variance)
    return estimate(model, Estimator(measure=20, finite_k=k))


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_the_finite_bound_is_tighter_and_stays_a_bound(method: Method) -> None:
    """Between the exact negative log-likelihood of a mixture and the paper's transition; close to the infinite one."""
    data = Mixture.isotropic(torch.tensor([[-1.0, 0.0], [1.0, 0.5]], dtype=torch.float64), 0.2)
    generator = torch.Generator().manual_seed(3)
    x = data.sample(torch.rand(1000, generator=generator), torch.randn(1000, 2, generator=generator).double())
    predict = data.predictor(method)
    fitted = named_variance("level", method, predict, x)
    exact = float(-data.log_density(x).mean())
    paper, aware, infinite = (bound(k, v, predict, method, x) for k, v in ((8, None), (8, fitted), (None, None)))
    error = 4 * aware.monte_carlo_error * 2 * math.log(2)
    assert float(aware.nats.mean()) > exact - error
    assert float(aware.nats.mean()) < float(paper.nats.mean()) - error
    assert float(aware.nats.mean()) > float(infinite.nats.mean()) - error
    many = [float(bound(2000, v, predict, method, x).nats.mean()) for v in (None, fitted)]
    assert many[0] == pytest.approx(many[1], abs=0.05)


def test_a_variance_needs_finitely_many_steps() -> None:
    model = bsi.Model(bsi.backbones.build(MLPConfig(width=8, depth=1), (3,), None, 0), BSI(alpha_M=1e3), (3,))
    with pytest.raises(UsageError, match="finite_k"):
        model.elbo(torch.randn(8, 3), variance=constant(pixel_basis((3,)), 0.1))


@pytest.fixture(scope="module")
def digits() -> bsi.Model:
    model = bsi.load("digits")
    model.fit_variance(open_dataset("digits").train[:256], "level")
    return model


def test_a_sampler_draws_with_the_fitted_variance(digits: bsi.Model) -> None:
    plain, aware = (digits.sample(8, steps=4, solver="posterior", variance=kind) for kind in ("none", "level"))
    assert torch.equal(plain, digits.sample(8, steps=4, solver="posterior"))
    assert not torch.equal(plain, aware)
    assert torch.equal(aware, digits.sample(8, Sampler(steps=4, variance="level"))), "posterior is implied"
    x = digits.values(open_dataset("digits").test[:16])
    by_name = digits.elbo(x, finite_k=4, variance="level")
    assert torch.equal(by_name.nats, digits.elbo(x, finite_k=4, variance=digits.variance("level")).nats)


def test_a_variance_that_cannot_be_used(digits: bsi.Model) -> None:
    with pytest.raises(UsageError, match="fit_variance"):
        digits.sample(2, steps=4, variance="pca")
    with pytest.raises(UsageError, match="posterior"):
        digits.sample(2, steps=4, solver="ode2", variance="level")
    with unchecked(), pytest.raises(UsageError, match="variance"):
        Sampler(variance="cosine")
    with pytest.raises(UsageError, match="posterior"):
        sample(
            digits.method,
            digits.denoiser,
            SeededNoise(0, torch.arange(2), digits.shape),
            paper_grid(digits.method, 3),
            "sde2",
            variance=digits.variance("level"),
        )
