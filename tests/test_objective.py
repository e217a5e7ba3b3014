"""Algorithm "Estimating the BSI training loss": 2 L_M / n for all three methods."""

import math

import pytest
import torch

from bsi.elbo import finite_measurement_loss, measurement_loss
from bsi.grids import paper_grid
from bsi.methods import BFN, BSI, VDM
from bsi.objective import finite_training_loss, training_loss

METHODS = [BSI(), BFN(), VDM()]


def network(latent: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    return torch.tanh(latent + torch.log1p(level).to(latent.dtype).reshape(-1, *[1] * (latent.ndim - 1)))


def draws(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(seed: int, count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_algorithm_training_loss_line_by_line():
    """The printed algorithm returns an estimate of 2 L_M; training divides it by n."""
    method = BSI()
    x, eps, t = draws(0, 8, 2, 3), draws(1, 8, 2, 3), uniform(2, 8)
    lambda_0, lambda_M = method.lambda_0, method.lambda_0 + method.alpha_M
    losses = []
    for i in range(8):
        level = math.exp((math.log(lambda_M) - math.log(lambda_0)) * t[i].item() + math.log(lambda_0))
        mu = (level - lambda_0) / level * x[i] + math.sqrt(1 / level) * eps[i]
        x_hat = network(mu[None], torch.tensor([level], dtype=torch.float64))[0]
        losses.append((math.log(lambda_M) - math.log(lambda_0)) * level * (x[i] - x_hat).square().sum().item())
    expected = torch.tensor(losses, dtype=torch.float64) / 6
    torch.testing.assert_close(training_loss(method, network, x, t, eps), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_training_loss_is_twice_the_measurement_loss_per_dimension(method, shape):
    x, eps, t = draws(3, 5, *shape), draws(4, 5, *shape), uniform(5, 5)
    loss = training_loss(method, network, x, t, eps)
    torch.testing.assert_close(loss, 2 / math.prod(shape) * measurement_loss(method, network, x, t, eps))
    assert loss.shape == (5,)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_finite_training_loss_is_twice_the_finite_loss_per_dimension(method):
    x, eps, grid = draws(6, 5, 4), draws(7, 5, 4), paper_grid(method, 5)
    i = torch.arange(5)
    loss = finite_training_loss(method, network, x, grid, i, eps)
    torch.testing.assert_close(loss, 2 / 4 * finite_measurement_loss(method, network, x, grid, i, eps))


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_weight_multiplies_the_loss_at_each_level(method):
    x, eps, t = draws(8, 5, 4), draws(9, 5, 4), uniform(10, 5)
    seen = []

    def weight(level: torch.Tensor) -> torch.Tensor:
        seen.append(level)
        return 1 / (1 + level)

    weighted = training_loss(method, network, x, t, eps, weight)
    level = method.levels.icdf(t)
    torch.testing.assert_close(weighted, training_loss(method, network, x, t, eps) / (1 + level))
    torch.testing.assert_close(seen[0], level)
    assert seen[0].dtype == torch.float64


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_float32_data_keeps_float32_losses_that_agree_with_float64(method):
    x, eps, t = draws(11, 64, 8), draws(12, 64, 8), uniform(13, 64)
    ours, exact = (training_loss(method, network, x.to(d), t, eps.to(d)) for d in (torch.float32, torch.float64))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)
