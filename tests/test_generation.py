"""Samples and likelihoods of a model, against closed forms for Gaussian data, whose predictor is exact."""

import doctest
import math

import numpy as np
import pytest
import torch

import bsi
from bsi.brownian import BrownianPath
from bsi.conditioning import denoise
from bsi.denoiser import Denoiser
from bsi.density import Density
from bsi.errors import UsageError
from bsi.oracle import Mixture
from mixtures import at

METHODS = [bsi.BSI(alpha_M=1e4), bsi.VDM(nu_min=1e-13, nu_max=1e4)]
MEAN, COVARIANCE = at(0.3, -0.2), torch.stack([at(1.0, 0.6), at(0.6, 0.8)])


class Silent(torch.nn.Module):
    """A network with one float64 parameter, which is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(at(0.0))

    def forward(self, mu, t, cond=None):
        raise AssertionError


class Exact(Denoiser):
    """The posterior mean of Gaussian data in place of a network's prediction."""

    def forward(self, latent, level, cond=None):
        data = Mixture.gaussian(MEAN.to(latent.dtype), COVARIANCE.to(latent.dtype))
        return data.posterior_mean(self.method.encoder(level), latent)


def exact(method=METHODS[0], data=None) -> bsi.Model:
    model = bsi.Model(Silent(), method, (2,), data=data)
    model.denoiser = Exact(Silent(), method)
    return model


def close(found, expected, tolerance):
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


NAMES = {"bsi": bsi, "torch": torch}
EXAMPLES = [test for cls in (bsi.Model, Density) for test in doctest.DocTestFinder().find(cls, "Model", globs=NAMES)]


@pytest.mark.parametrize("example", [test for test in EXAMPLES if test.examples], ids=lambda test: test.name)
def test_docstring_examples_run(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = doctest.DocTestRunner().run(example)
    assert (found.failed, found.attempted) == (0, len(example.examples))


def test_every_public_method_has_an_example():
    verbs = "sample trajectory denoise inpaint restore interpolate predict score log_likelihood elbo fit_variance "
    verbs += "from_pretrained save_pretrained"
    assert {f"Model.{verb}" for verb in verbs.split()} <= {test.name for test in EXAMPLES if test.examples}


def test_denoising_is_that_of_the_conditioning_module_in_the_units_of_the_data():
    method, y = METHODS[0], torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = BrownianPath(3, torch.arange(6), (2,), torch.float64)
    expected = denoise(method, exact().denoiser, noise, y, 9.0, 8)
    close(exact().denoise(y, 9.0, steps=8, seed=3, batch_size=4), expected, 1e-12)
    scaled = exact(data=bsi.Standardize(5.0, 3.0))
    close(scaled.denoise(5 + 3 * y.numpy(), 1.0, steps=8, seed=3), 5 + 3 * expected, 1e-9)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_an_inpainted_part_has_its_conditional_distribution(method):
    known = torch.full((1000, 2), math.nan, dtype=torch.float64)
    known[:, 0] = 1.0
    x = exact(method).inpaint(known, np.array([True, False]), steps=60)
    assert bool((x[:, 0] == 1.0).all())
    mean = MEAN[1] + COVARIANCE[0, 1] / COVARIANCE[0, 0] * (1.0 - MEAN[0])
    variance = COVARIANCE[1, 1] - COVARIANCE[0, 1] ** 2 / COVARIANCE[0, 0]
    assert abs(x[:, 1].mean() - mean) < 5 * (variance / len(x)).sqrt()
    assert abs(x[:, 1].var() / variance - 1) < 0.2


def test_restoration_uses_the_units_of_the_data_with_an_affine_operator():
    """y = 2 u + 3 v + 7 + noise, where the data (u, v) has other units than the network."""
    mean, std = at(10.0, -4.0), at(2.0, 0.5)
    model = exact(data=bsi.Standardize(tuple(mean.tolist()), tuple(std.tolist())))
    row, precision = at(2.0, 3.0), 4.0
    m, c = mean + std * MEAN, std[:, None] * COVARIANCE * std
    y = torch.full((1000, 1), float(row @ m) + 9.0, dtype=torch.float64)
    x = model.restore(y, lambda x: x @ row[:, None] + 7.0, precision, steps=30)
    gain = c @ row / (row @ c @ row + 1 / precision)
    close(x.mean(0), m + 2 * gain, float(5 * std.max() / math.sqrt(len(x))))
    expected = c - torch.outer(gain, row @ c)
    close(torch.cov(x.T), expected, 0.2 * float(expected.diagonal().max()))


def test_per_column_units_are_restored_and_rejected_by_denoise():
    model = exact(data=bsi.Standardize((1.0, 2.0), (1.0, 10.0)))
    with pytest.raises(UsageError, match="restore"):
        model.denoise(torch.zeros(2, 2), 1.0)
    with pytest.raises(UsageError, match="bins"):
        exact().denoise(torch.zeros(2, 2, dtype=torch.uint8), 1.0)
    with pytest.raises(UsageError, match="mask"):
        exact().inpaint(torch.zeros(2, 2), torch.ones(3))


def test_a_mask_may_be_of_any_type_and_be_shared_by_samples_and_channels():
    model, images = bsi.load("digits"), torch.tensor(bsi.data.open_dataset("digits").test[:2])
    mask = torch.ones(2, 1, 8, 8)
    mask[..., 4:, :] = 0
    expected = model.inpaint(images, mask, steps=2)
    for same in (mask[0, 0].numpy().astype(np.float64), mask[0].bool(), mask[:1, 0].to(torch.uint8), mask[0, :, :, :1]):
        assert torch.equal(model.inpaint(images, same, steps=2), expected)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_interpolation_begins_and_ends_at_the_data_and_is_an_arc_in_the_noise(method):
    a, b = torch.stack([at(1.0, 0.5), at(-1.0, 2.0)]), torch.stack([at(0.0, -1.0), at(2.0, 0.0)])
    between = exact(method).interpolate(a, b, num=5, tolerance=1e-6)
    close(between[:, 0], a, 2e-3)
    close(between[:, -1], b, 2e-3)
    values, axes = torch.linalg.eigh(COVARIANCE)
    root = axes * values.sqrt() @ axes.T  # the flow of Gaussian data, as noise becomes small
    w, v = ((x - MEAN) @ root.inverse() for x in (a, b))
    angle = torch.arccos((w * v).sum(1) / (w.norm(dim=1) * v.norm(dim=1)))[:, None]
    middle = (w + v) * torch.sin(angle / 2) / torch.sin(angle)
    close(between[:, 2], middle @ root + MEAN, 5e-3)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_log_likelihoods_are_those_of_the_data_in_its_units(method):
    model = exact(method, bsi.Standardize(5.0, 3.0))
    x = 5 + 3 * torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    noise = float((method.encoder(at(method.levels.high)).noise / method.encoder(at(method.levels.high)).signal) ** 2)
    normal = torch.distributions.MultivariateNormal(5 + 3 * MEAN, 9 * (COVARIANCE + noise * torch.eye(2)))
    found = model.log_likelihood(x, probes=None, tolerance=1e-4, batch_size=3)
    close(found, normal.log_prob(x), 1e-3)
    estimated = torch.stack([model.log_likelihood(x, probes=4, tolerance=1e-2, seed=seed) for seed in range(8)])
    assert bool(((estimated.mean(0) - found).abs() < 5 * estimated.std(0) / math.sqrt(8) + 1e-2).all())


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_score_is_the_gradient_of_the_log_density_of_the_latent(method):
    level, latent = 30.0, torch.stack([at(0.5, 0.1), at(-1.0, 0.4)]).requires_grad_()
    encoder = method.encoder(at(level))
    covariance = encoder.signal**2 * COVARIANCE + encoder.noise**2 * torch.eye(2)
    log_density = torch.distributions.MultivariateNormal(encoder.signal * MEAN, covariance).log_prob(latent)
    (gradient,) = torch.autograd.grad(log_density.sum(), latent)
    model = exact(method)
    close(model.score(latent.detach(), level), gradient, 1e-9)
    assert torch.equal(model.predict(latent, level), model.denoiser(latent, at(level).expand(2)))
    assert not torch.equal(model.predict(latent, at(level, 2 * level)), model.predict(latent, level))


def test_progress_is_shown_on_request(capsys):
    model = bsi.Model.from_pretrained("digits")
    images = np.full((2, 1, 8, 8), 8, np.uint8)
    model.sample(2, steps=2, progress=True)
    model.elbo(images, progress=True)
    model.log_likelihood(images, tolerance=0.5, progress=True)
    shown = capsys.readouterr().err
    assert "sample 6/6" in shown
    assert "levels" in shown
    assert "log-likelihood 2/2" in shown
    model.inpaint(images, torch.ones(1, 8, 8), steps=2)
    assert capsys.readouterr().err == ""
