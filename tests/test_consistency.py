"""Consistency tuning, against the exact flow map of a mixture."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import bsi
from bsi.backbones import MLPConfig, build
from bsi.cli import main
from bsi.consistency import consistency_loss, gap_at
from bsi.denoiser import Denoiser
from bsi.errors import UsageError
from bsi.grids import geometric_grid
from bsi.levels import low_discrepancy
from bsi.methods import BFN, BSI, VDM, Method
from bsi.methods.base import level_at
from bsi.metrics.frechet import Moments, frechet_distance
from bsi.objective import training_loss
from bsi.recipe import Every, Objective
from bsi.sampler import Sampler
from bsi.sampling import drawing, evaluations, sample
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
def test_the_consistency_function_is_the_identity_at_the_last_level(method: Method) -> None:
    denoiser = Denoiser(Waves(), method, consistent=True)
    psi, last = torch.randn(5, 2), torch.full((5,), method.levels.high, dtype=torch.float64)
    signal = method.encoder(last).signal.float()[:, None]
    assert torch.equal(denoiser(psi, last), (1 / method.encoder(last).signal).float()[:, None] * psi)
    torch.testing.assert_close(denoiser(psi, last), psi / signal)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_consistency_function_is_the_denoiser_at_high_noise(method: Method) -> None:
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


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_samples_of_a_known_flow_map_are_exact(method: Method, steps: int) -> None:
    """For a point mass the consistency function is constant: every number of steps draws the point, to rounding."""
    point, calls = torch.tensor([0.3, -0.7]), []

    def predict(latent: Tensor, level: Tensor) -> Tensor:
        calls.append(float(level[0]))
        return point.expand_as(latent)

    drawn = list(drawing(method, predict, Sampler(steps, "consistency"), torch.arange(3), (2,)))
    torch.testing.assert_close(drawn[-1].x_hat, point.expand(3, 2))
    assert len(calls) == evaluations(method, steps)
    assert calls == sorted(calls)
    assert calls[0] == method.levels.low


def test_a_distilled_model_only_draws_samples() -> None:
    model = bsi.Model(network(), BSI(), (2,), consistent=True)
    assert model.sample(3, steps=1).shape == (3, 2)
    with pytest.raises(UsageError, match="solver"):
        model.sample(3, solver="ode2")
    x = torch.zeros(3, 2)
    for verb in (model, model.elbo, model.log_likelihood, lambda x: model.score(x, 1.0), model.fit_variance,
                 lambda x: model.denoise(x, 1.0), lambda x: model.inpaint(x, x), lambda x: model.interpolate(x, x),
                 lambda x: model.restore(x, lambda y: y, 1.0)):  # fmt: skip
        with pytest.raises(UsageError, match="distilled"):
            verb(x)


def test_distilling_needs_numbers_and_a_package_network(tmp_path: Path) -> None:
    bsi.Model(network(), BSI(), (2,)).save_pretrained(tmp_path / "own")
    with pytest.raises(UsageError, match="recipe"):
        bsi.distill(tmp_path / "own")
    with pytest.raises(UsageError, match="bound"):
        replace(bsi.recipes.digits(), objective=Objective(consistency=True), every=Every(evaluate=10))


@pytest.mark.slow
def test_digits_are_drawn_in_two_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The Fréchet distance of pixels to the test set, with two evaluations, and that of the teacher with 2 and 16."""
    out = tmp_path / "fast"
    assert main(["distill", "digits", "--steps", "600", "--lr", "5e-4", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"
    test = torch.tensor(bsi.data.open_dataset("digits").test).flatten(1).double()

    real = Moments.of(test)

    def distance(source: str | Path, steps: int) -> float:
        drawn = bsi.load(source).sample(2000, steps=steps).flatten(1).double()
        return frechet_distance(Moments.of(drawn), real)

    few, teacher = distance(out, 1), {steps: distance("digits", steps) for steps in (1, 15)}
    assert few < 0.1 * teacher[1]
    assert few < 1.5 * teacher[15]
    assert main(["export", str(out), "--out", str(tmp_path / "fast.safetensors")]) == 0
    same = bsi.load(tmp_path / "fast.safetensors").sample(2, steps=1)
    assert torch.equal(same, bsi.load(out).sample(2, steps=1))
