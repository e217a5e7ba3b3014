"""Samplers of azula with a denoiser of this package: the same steps and similar samples."""

import pytest
import torch

import bsi
from bsi import sampling
from bsi.grids import paper_grid
from bsi.rng import SeededNoise
from bsi.solvers import Path, Table

azula = pytest.importorskip("azula", reason="azula is not installed: pip install --no-deps azula")

from azula.sample import DDIMSampler, DDPMSampler  # noqa: E402

from bsi.integrations.azula import AzulaDenoiser  # noqa: E402


def first_order(method: bsi.methods.Method, grid: torch.Tensor) -> Table:
    """w' = w + (rho' - rho) x_hat, the step of DDIM."""
    path = Path.of(method, grid)
    moved, nothing = torch.diff(path.rho) * path.noise[1:], torch.zeros(len(grid) - 1, dtype=torch.float64)
    return Table(path.shrinkage, moved, nothing, nothing)


@pytest.mark.parametrize("method", [bsi.BSI(alpha_M=100.0), bsi.VDM()], ids=repr)
def test_ddim_equals_the_probability_flow(method) -> None:
    digits = bsi.load("digits").double()
    model = bsi.Model(digits.denoiser.backbone, method, digits.shape, digits.kind).double().eval()
    noise = SeededNoise(0, torch.arange(3), model.shape, torch.float64)
    steps = list(sampling.trajectory(method, model.denoiser, noise, paper_grid(method, 12), first_order))
    denoiser = AzulaDenoiser(model)
    sampler = DDIMSampler(denoiser, steps=12, silent=True, dtype=torch.float64)
    last = sampler(steps[0].latent)
    torch.testing.assert_close(last, steps[-1].latent, rtol=1e-9, atol=1e-9)
    expected = model.denoiser(last, steps[-1].level.expand(3))
    torch.testing.assert_close(denoiser(last, torch.zeros((), dtype=torch.float64)).mean, expected)


@pytest.mark.slow
def test_a_sampler_with_noise_draws_digits_like_ours() -> None:
    """Means of pixels, in standard errors, and conditions reach the network."""
    model = bsi.load("digits").eval()
    sampler = DDPMSampler(AzulaDenoiser(model), steps=64, silent=True)
    torch.manual_seed(0)
    x = sampler(sampler.init((100, *model.shape), var=0.0))
    theirs = AzulaDenoiser(model)(x, torch.tensor(0.0)).mean
    ours = model.kind.values(model.sample(100, steps=64, solver="posterior", seed=1))
    error = (theirs.var(0) / 100 + ours.var(0) / 100).sqrt()
    score = ((theirs.mean(0) - ours.mean(0)) / error)[error > 1e-3]
    assert len(score) > 40
    assert score.abs().max() < 4.5
    assert score.square().mean() < 2
