"""The oracle is exact: against linear algebra, numerical integration and the data itself."""

import math

import numpy as np
import pytest
import scipy.integrate
import torch

from brute_force import condition, source
from bsi.gaussian import Encoder
from bsi.methods import BFN, BSI, VDM
from bsi.oracle import Mixture

METHODS = [BSI(), BFN(), VDM(), BSI(gamma_0=1.0)]


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


SKEWED = Mixture(tensor([0.2, 0.5, 0.3]), tensor([[-2.0], [0.1], [1.5]]), tensor([[0.3], [0.01], [1.2]]))
PLANE = Mixture.general(
    tensor([1.0, 3.0]),
    tensor([[-1.0, 0.5], [0.7, 0.0]]),
    tensor([[[0.5, 0.3], [0.3, 0.4]], [[1.0, -0.8], [-0.8, 0.9]]]),
)


def density(mixture: Mixture, x: np.ndarray) -> np.ndarray:
    return np.exp(mixture.log_density(tensor(x.reshape(-1, mixture.means.shape[1]))).numpy()).reshape(x.shape[:-1])


@pytest.mark.parametrize("t", [0.0, 0.2, 0.4, 0.6])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_posterior_mean_in_one_dimension_is_the_integral(method, t):
    level = method.levels.icdf(tensor([t]))
    signal, noise = (float(v) for v in (method.encoder(level).signal, method.encoder(level).noise))
    if noise == 0:
        expected, psi = float(SKEWED.weights @ SKEWED.means[:, 0]), 0.0  # BFN's first level says nothing
    else:
        psi = signal * 0.4 + noise * 0.9

        def posterior(x: float, power: int) -> float:
            return (
                x**power
                * float(density(SKEWED, np.array([[x]]))[0])
                * math.exp(-0.5 * ((psi - signal * x) / noise) ** 2)
            )

        moments = [
            scipy.integrate.quad(
                posterior, -9, 9, (power,), points=[-2, 0.1, 1.5, 0.4], epsabs=0, epsrel=1e-10, limit=200
            )[0]
            for power in (0, 1)
        ]
        expected = moments[1] / moments[0]
    assert SKEWED.predictor(method)(tensor([[psi]]), level).item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_gaussian_data_with_a_full_covariance_is_conditioned_by_linear_algebra(method):
    """Each latent dimension in turn, as six jointly Gaussian numbers."""
    mean, root = np.array([0.3, -1.0, 0.5]), np.array([[1.0, 0, 0], [0.6, 0.5, 0], [-0.3, 0.8, 0.2]])
    level = method.levels.icdf(tensor([0.4]))
    signal, noise = (float(v) for v in (method.encoder(level).signal, method.encoder(level).noise))
    x = [source(0, 6, mean[j], 0.0) + sum(root[j, i] * source(i, 6) for i in range(3)) for j in range(3)]
    psi = [signal * x[j] + source(3 + j, 6, 0.0, noise) for j in range(3)]
    values = [0.4, -0.2, 0.9]
    expected = [condition(x[j], psi, values)[0] for j in range(3)]
    oracle = Mixture.gaussian(tensor(mean), tensor(root @ root.T))
    ours = oracle.predictor(method)(tensor([values]), level)[0]
    assert ours.tolist() == pytest.approx(expected, rel=1e-8)


def test_points_without_width_are_recovered_at_the_last_level_and_averaged_at_the_first():
    points = tensor([[-1.0, 0.0], [1.0, 1.0], [0.2, -0.5]])
    for method in METHODS:
        predict = Mixture.isotropic(points, 0.0).predictor(method)
        level = torch.full((3,), method.levels.high, dtype=torch.float64)
        sharp = method.encoder(level).encode(points, torch.ones_like(points))
        torch.testing.assert_close(predict(sharp, level), points)
        if not isinstance(method, VDM):  # VDM's first latent has some information
            first = torch.full((1,), method.levels.low, dtype=torch.float64)
            start = method.prior(torch.zeros(1, 2, dtype=torch.float64))
            torch.testing.assert_close(predict(start, first), points.mean(0, keepdim=True))


def test_data_of_any_shape_is_read_as_a_vector():
    method = VDM()
    level = method.levels.icdf(tensor([0.5, 0.7]))
    images = torch.randn(2, 1, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    predict = PLANE.predictor(method)
    torch.testing.assert_close(predict(images, level).flatten(1), predict(images.flatten(1), level))
    torch.testing.assert_close(PLANE.log_density(images), PLANE.log_density(images.flatten(1)))
    scalars = SKEWED.posterior_mean(Encoder(tensor(0.5), tensor(0.3)), tensor([0.1, 0.9]))
    assert scalars.shape == (2,)


def test_log_density_agrees_with_another_implementation():
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    covariances = tensor([[[0.5, 0.3], [0.3, 0.4]], [[1.0, -0.8], [-0.8, 0.9]]])
    components = torch.distributions.MultivariateNormal(PLANE.means, covariances)
    theirs = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(tensor([0.25, 0.75])), components)
    torch.testing.assert_close(PLANE.log_density(x), theirs.log_prob(x), rtol=1e-10, atol=1e-10)


def test_samples_have_the_mixtures_moments():
    generator, count = torch.Generator().manual_seed(3), 50_000
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    x = PLANE.sample(uniform, torch.randn(count, 2, generator=generator, dtype=torch.float64))
    mean = tensor([0.25 * -1.0 + 0.75 * 0.7, 0.25 * 0.5])
    assert ((x.mean(0) - mean).abs() < 4 * x.std(0) / math.sqrt(count)).all()
    product = (x - mean).prod(1)
    expected = 0.25 * 0.3 + 0.75 * -0.8 + 0.25 * (-1.425 * 0.375) + 0.75 * (0.275 * -0.125)
    assert abs(product.mean() - expected) < 4 * product.std() / math.sqrt(count)


def test_the_oracle_has_the_smallest_error():
    """The posterior mean minimizes E |x - x_hat|^2: any other function of psi has a larger error."""
    method, count = BSI(), 20_000
    generator = torch.Generator().manual_seed(4)
    x = PLANE.sample(
        torch.rand(count, generator=generator, dtype=torch.float64),
        torch.randn(count, 2, generator=generator, dtype=torch.float64),
    )
    level = torch.full((count,), 2.0, dtype=torch.float64)
    psi = method.encoder(level).encode(x, torch.randn(count, 2, generator=generator, dtype=torch.float64))
    best = PLANE.predictor(method)(psi, level)
    for other in (psi, 0.9 * best, best + 0.05, best + 0.1 * torch.tanh(psi)):
        difference = (x - other).square().sum(1) - (x - best).square().sum(1)
        assert difference.mean() > 2 * difference.std() / math.sqrt(count)
