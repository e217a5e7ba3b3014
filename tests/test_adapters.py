"""Adapters: the same function in other coordinates, in both directions, up to rounding."""

import math

import pytest
import torch
from torch import Tensor

from bsi.adapters import Schedule, as_denoiser, as_noise_prediction, from_denoiser, from_noise_prediction
from bsi.denoiser import Denoiser
from bsi.errors import UsageError
from bsi.gaussian import Encoder
from bsi.grids import geometric_grid, paper_grid
from bsi.methods import BFN, BSI, VDM
from bsi.methods.base import level_at
from bsi.oracle import Mixture
from bsi.sampling import sample

METHODS = [BSI(), BFN(), VDM(), BSI(gamma_0=0.1)]


def data() -> Mixture:
    means = torch.tensor([[-1.0, 0.5], [0.8, 0.9], [0.2, -1.0]], dtype=torch.float64)
    return Mixture.isotropic(means, 0.2)


def exact_denoiser(z: Tensor, sigma: Tensor) -> Tensor:
    """E[x | z = x + sigma eps], without any method."""
    return data().posterior_mean(Encoder(torch.ones_like(sigma), sigma), z)


def exact_noise(x_t: Tensor, alpha_bar: Tensor) -> Tensor:
    """E[eps | x_t = sqrt(alpha_bar) x + sqrt(1 - alpha_bar) eps], without any method."""
    encoder = Encoder(alpha_bar.sqrt(), (1 - alpha_bar).sqrt())
    x_hat = data().posterior_mean(encoder, x_t)
    return (x_t - encoder.signal[:, None] * x_hat) / encoder.noise[:, None]


def latents(method: BSI | BFN | VDM, k: int = 9) -> tuple[Tensor, Tensor]:
    """A latent at each level of a grid but the first."""
    levels = geometric_grid(method, k)[1:]
    x, eps = torch.randn(2, k, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return method.encoder(levels).encode(x, eps), levels


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_foreign_denoisers_become_equivalent_predictors(method):
    latent, level = latents(method)
    expected = data().predictor(method)(latent, level)
    found = from_denoiser(method, exact_denoiser, sigma_max=1e4)(latent, level)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    found = from_noise_prediction(method, exact_noise, sigma_max=1e4)(latent, level)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_adapters_round_trip_to_the_same_network(method, dtype, rounding):
    """At every level, the sharpest too, where 1 - alpha_bar is 1e-6 and float32 has one digit of it."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.SiLU(), torch.nn.Linear(8, 2)).to(dtype)

    class Net(torch.nn.Module):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return network(x) * (1 + t[:, None])

    predict = Denoiser(Net(), method)
    latent, level = latents(method)
    latent = latent.to(dtype)
    with torch.no_grad():
        expected = predict(latent, level)
        for there, back in ((as_denoiser, from_denoiser), (as_noise_prediction, from_noise_prediction)):
            found = back(method, there(method, predict), sigma_max=1e4)(latent, level)
            torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding)


def test_a_foreign_denoiser_is_called_only_within_its_noise_range():
    method, requested = BSI(), []

    def denoiser(z, sigma):
        requested.append((z, sigma))
        return z

    level = level_at(method, 1 / torch.tensor([500.0, 81.0, 79.0], dtype=torch.float64))
    w = torch.ones(3, 2, dtype=torch.float64)
    from_denoiser(method, denoiser)(method.encoder(level).noise[:, None] * w, level)
    ((z, sigma),) = requested
    torch.testing.assert_close(sigma, torch.tensor([80.0, 80.0, 79.0], dtype=torch.float64))
    torch.testing.assert_close(z, sigma[:, None] * w, msg="the noise, standardized, is the same")


@pytest.mark.parametrize("method", [BSI(), BFN()], ids=repr)
def test_a_foreign_denoiser_samples_from_its_noisiest_level(method):
    """BSI and BFN start at sigma = infinity, where no denoiser was trained: it is evaluated at sigma_max instead."""
    noise = torch.randn(64, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grid = paper_grid(method, 64) if isinstance(method, BSI) else geometric_grid(method, 64)
    ours, theirs = (
        sample(method, predict, lambda start, end: noise, grid, "ode2")
        for predict in (data().predictor(method), from_denoiser(method, exact_denoiser))
    )
    torch.testing.assert_close(theirs, ours, rtol=0, atol=0.02)


def test_noise_outside_the_models_range_is_rejected():
    for method, sigma in ((VDM(), 50.0), (VDM(), 1e-4), (BSI(), 1e-5)):
        denoiser = as_denoiser(method, data().predictor(method))
        with pytest.raises(UsageError, match="sigma must be"):
            denoiser(torch.zeros(1, 2, dtype=torch.float64), torch.tensor([sigma], dtype=torch.float64))


def test_a_schedule_maps_levels_to_times():
    schedule = Schedule.ddpm()
    times = torch.tensor([0.0, 1.0, 500.0, 999.0])
    table = torch.tensor(schedule.alpha_bar, dtype=torch.float64)
    torch.testing.assert_close(schedule.time(table[times.long()]), times, rtol=0, atol=1e-4)
    between = schedule.time(torch.sqrt(table[500] * table[501])[None])
    assert 500 < float(between) < 501
    beyond = schedule.time(torch.tensor([1 - 1e-9, 1e-12], dtype=torch.float64))
    torch.testing.assert_close(beyond, torch.tensor([0.0, 999.0]))
    assert schedule.sigma_max == pytest.approx(math.sqrt(1 / schedule.alpha_bar[-1] - 1))
    for wrong in ((0.9,), (0.5, 0.9), (1.0, 0.5), (0.5, 0.0)):
        with pytest.raises(UsageError, match="alpha_bar"):
            Schedule(wrong)
