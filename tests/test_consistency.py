"""Consistency tuning, against the exact flow map of a mixture."""

import copy

import pytest
import torch
from torch import Tensor

from bsi.backbones import MLPConfig, build
from bsi.consistency import consistency_loss, few_steps, gap_at, sigmas
from bsi.denoiser import Denoiser
from bsi.grids import geometric_grid
from bsi.levels import low_discrepancy
from bsi.methods import BFN, BSI, VDM, Method
from bsi.methods.base import level_at, rho_at
from bsi.objective import training_loss
from bsi.rng import SeededNoise
from bsi.sampling import sample
from mixtures import at, mixture

METHODS = [BSI(alpha_M=1e4), BFN(sigma_1=0.01), VDM()]


class Waves(torch.nn.Module):
    """A network that is not trained, and not 0."""

    def forward(self, latent: Tensor, t: Tensor) -> Tensor:
        return torch.sin(3 * latent) + t[:, None]


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return build(MLPConfig(width=64, depth=2, mlp_ratio=2), (2,))


def data(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    return mixture().sample(uniform, torch.randn(count, 2, generator=generator, dtype=torch.float64))


def trained(denoiser: Denoiser, steps: int, tuned: bool, method: Method) -> Denoiser:
    optimizer = torch.optim.Adam(denoiser.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        x = data(256, step).float()
        eps, t = torch.randn_like(x), low_discrepancy(256, float(torch.rand(())))
        if tuned:
            loss = consistency_loss(method, denoiser, x, t, eps, gap_at(step / steps))
        else:
            loss = training_loss(method, denoiser, x, t, eps)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        schedule.step()
    return denoiser


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_it_is_the_identity_at_the_last_level_to_the_bit(method: Method) -> None:
    denoiser = Denoiser(Waves(), method, consistent=True)
    psi, last = torch.randn(5, 2), torch.full((5,), method.levels.high, dtype=torch.float64)
    signal = method.encoder(last).signal.float()[:, None]
    assert torch.equal(denoiser(psi, last), (1 / method.encoder(last).signal).float()[:, None] * psi)
    torch.testing.assert_close(denoiser(psi, last), psi / signal)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_it_is_the_denoiser_where_there_is_noise(method: Method) -> None:
    plain, psi = Denoiser(Waves(), method), torch.randn(5, 2)
    level = level_at(method, torch.full((5,), 0.5, dtype=torch.float64))
    tuned = Denoiser(plain.backbone, method, consistent=True)
    torch.testing.assert_close(tuned(psi, level), plain(psi, level), atol=2e-4, rtol=0)


def test_tuning_approaches_the_flow_map_of_a_mixture() -> None:
    method = BSI(alpha_M=1e4)
    denoiser = trained(Denoiser(network(), method, consistent=True), 300, False, method)
    level = level_at(method, at(1 / 2.0))  # a level at which the flow map is far from the posterior mean
    x, eps = data(500, 10**6), torch.randn(500, 2, dtype=torch.float64)
    psi = method.encoder(level.expand(500)).encode(x, eps)
    grid = geometric_grid(method, 2000)
    grid = torch.cat([level, grid[grid > level]])
    exact = sample(method, mixture().predictor(method), lambda a, b: eps, grid, "ode2", start=psi)

    def error(f: Denoiser) -> float:
        with torch.no_grad():
            return float((f(psi.float(), level.expand(500)) - exact).square().sum(1).mean().sqrt())

    before = error(denoiser)
    after = error(trained(copy.deepcopy(denoiser), 700, True, method))
    assert after < 0.6 * before


def test_samples_take_the_given_number_of_evaluations() -> None:
    method, calls = BSI(), []

    def predict(latent: Tensor, level: Tensor) -> Tensor:
        calls.append(float(1 / rho_at(method, level[:1])))
        return torch.zeros_like(latent)

    for steps in (1, 2, 4):
        calls.clear()
        drawn = list(few_steps(method, predict, SeededNoise(0, torch.arange(3), (2,), torch.float32), steps))
        assert len(calls) == len(drawn) == steps
        torch.testing.assert_close(calls, sigmas(steps))
