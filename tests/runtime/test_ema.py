"""Averages of the weights: the EMA, power-function averages of any width, and the folder for the hub."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bsi
from bsi import recipes
from bsi.backbones import MLPConfig
from bsi.cli import main
from bsi.errors import Preempted, UsageError
from bsi.recipe import Ema, Every
from bsi.runtime import ema as module
from bsi.runtime.ema import EmaModel, PowerAverages, Profile, coefficients, exponent, lerp_, reconstruct, store_averages
from bsi.runtime.export import read_trained
from bsi.training import loop

IMAGES = torch.randint(0, 256, (64, 1, 4, 4), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def weights_of(profile: Profile) -> np.ndarray:
    """The weight of each of the first steps in an average, from its recursion."""
    steps = np.arange(1, profile.step + 1)
    beta = (1 - 1 / steps) ** (profile.gamma + 1)
    stays = np.append(np.cumprod(beta[:0:-1])[::-1], 1.0)
    return (1 - beta) * stays


@pytest.mark.parametrize("sigma_rel", [0.05, 0.1, 0.2])
def test_the_width_of_a_profile_is_its_standard_deviation_over_its_length(sigma_rel: float) -> None:
    share, t = weights_of(Profile(4000, sigma_rel)), np.arange(1, 4001) / 4000
    assert share.sum() == pytest.approx(1.0)
    mean = (share * t).sum()
    assert np.sqrt((share * (t - mean) ** 2).sum()) == pytest.approx(sigma_rel, rel=1e-3)


def test_inner_products_are_those_of_the_profiles() -> None:
    profiles = [Profile(1500, 0.1), Profile(2000, 0.05), Profile(2000, 0.15)]
    for p in profiles:
        for q in profiles:
            n = min(p.step, q.step)
            assert (weights_of(p)[:n] * weights_of(q)[:n]).sum() == pytest.approx(p.dot(q), rel=5e-3)


@pytest.mark.parametrize("wanted", [0.05, 0.07, 0.1, 0.13])
def test_an_intermediate_width_is_nearly_a_combination_of_averages(wanted: float) -> None:
    stored = [Profile(step, width) for width in (0.05, 0.1) for step in range(100, 2001, 100)]
    share = coefficients(stored, Profile(2000, wanted))
    found = np.zeros(2000)
    for profile, weight in zip(stored, share, strict=True):
        found[: profile.step] += weight * weights_of(profile)
    target = weights_of(Profile(2000, wanted))
    assert np.linalg.norm(found - target) / np.linalg.norm(target) < 0.03
    assert found.sum() == pytest.approx(1.0, abs=0.01)


def test_the_average_of_a_straight_line_is_known() -> None:
    """theta(t) = t has the average (gamma + 1) / (gamma + 2) t, up to discretization."""
    line = nn.Linear(1, 1, bias=False)
    averages = PowerAverages(dict(line.named_parameters()), [0.1])
    for step in range(1, 2001):
        line.weight.data.fill_(float(step))
        averages.update(torch.tensor(True), [torch.tensor(1 - Profile(step, 0.1).beta)])
    gamma = exponent(0.1)
    assert float(averages.state()["0.1/weight"]) == pytest.approx((gamma + 1) / (gamma + 2) * 2000, rel=1e-3)


def test_skipped_steps_do_not_change_the_average() -> None:
    line = nn.Linear(1, 1, bias=False)
    averages = PowerAverages(dict(line.named_parameters()), [0.1])
    before = averages.state()["0.1/weight"].clone()
    line.weight.data.fill_(9.0)
    averages.update(torch.tensor(False), [torch.tensor(0.5)])
    assert torch.equal(averages.state()["0.1/weight"], before)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = replace(
        recipes.digits(),
        name="mine",
        method=bsi.BSI(),
        backbone=MLPConfig(width=32, depth=2),
        steps=30,
        batch=16,
        virtual_shards=8,
        ema=Ema(beta=0.9, start=2, powers=(0.05, 0.1), snapshot=5),
        every=Every(journal=10, checkpoint=10),
    )
    return bsi.train(recipe, data=IMAGES, out=tmp_path_factory.mktemp("power") / "run").path


def test_stored_averages_are_reconstructed_exactly(run: Path) -> None:
    stored = sorted(path.stem for path in (run / "averages").glob("*.safetensors"))
    assert stored == [f"step-{step:08d}" for step in range(5, 31, 5)]
    step, weights = reconstruct(run, 0.1)
    assert step == 30
    from safetensors.torch import load_file

    exact = load_file(run / "averages" / "step-00000030.safetensors")
    for name, tensor in weights.items():
        assert torch.allclose(tensor, exact[f"0.1/{name}"], atol=1e-4)


@pytest.mark.parametrize("widths", [[(0.05, 0.1), (0.05,)], [(0.05,), (0.05, 0.1)]])
def test_the_widths_of_stored_averages_may_change_during_a_run(widths: list[tuple[float, ...]], tmp_path: Path) -> None:
    """The result is the best combination of exactly the averages that were stored."""
    stored = [Profile(step, width) for step, here in zip((1000, 2000), widths, strict=True) for width in here]
    for step in (1000, 2000):
        state = {f"{p.sigma_rel}/weight": torch.tensor([1.0 / p.sigma_rel]) for p in stored if p.step == step}
        store_averages(tmp_path, step, state)
    expected = coefficients(stored, Profile(2000, 0.07)) @ np.array([1.0 / p.sigma_rel for p in stored])
    assert float(reconstruct(tmp_path, 0.07)[1]["weight"]) == pytest.approx(expected, rel=1e-6)


def test_averages_are_stored_when_a_run_stops_at_their_step(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = read_trained(run).recipe
    often = replace(recipe, every=Every(journal=5, checkpoint=10))
    with pytest.raises(Preempted, match="saved step 5 of 30"):
        bsi.train(often, data=IMAGES, out=tmp_path / "run", sinks=[lambda _: os.kill(os.getpid(), signal.SIGTERM)])
    monkeypatch.setattr(loop, "READ_EVERY", {"cpu": 10})  # as on a GPU
    bsi.train(recipe, data=IMAGES, out=tmp_path / "run")
    for path in sorted((run / "averages").iterdir()):
        assert (tmp_path / "run" / "averages" / path.name).read_bytes() == path.read_bytes()


def test_an_average_of_another_width_is_exported_and_loads(run: Path, tmp_path: Path) -> None:
    assert (
        main(["export", str(run), "--sigma-rel", "0.07", "--step", "25", "--out", str(tmp_path / "a.safetensors")]) == 0
    )
    assert bsi.load(tmp_path / "a.safetensors").sample(1, steps=1).shape == (1, 1, 4, 4)
    with pytest.raises(UsageError, match=r"no averages of step 26. Use one of 5, 10"):
        reconstruct(run, 0.07, 26)
    with pytest.raises(UsageError, match=r"between 0 and 0\.288"):
        reconstruct(run, 0.4)


def test_a_run_without_averages_raises_with_the_option(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--ema\.powers"):
        reconstruct(tmp_path, 0.1)
    with pytest.raises(UsageError, match=r"0\.05 0\.1"):
        Ema(powers=(0.5,))


@pytest.mark.parametrize("large", [1, 4, 2**20])  # one, some and all of them
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_each_tensor_moves_by_its_weight(large: int, weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", large)
    torch.manual_seed(0)
    before, ends = ([torch.randn(s, dtype=torch.float64) for s in [(), (3,), (2, 5), (7, 1, 2)]] for _ in range(2))
    tensors = [tensor.clone() for tensor in before]
    lerp_(tensors, ends, torch.tensor(weight))
    for tensor, start, end in zip(tensors, before, ends, strict=True):
        assert torch.equal(tensor, start) if weight == 0 else torch.allclose(tensor, start + weight * (end - start))


def test_a_long_average_of_constant_weights_is_constant() -> None:
    """Constant weights: factors that do not sum to 1 would change their average."""
    weights, average = [torch.full((5,), 1.7)], [torch.full((5,), 1.7)]
    for _ in range(10_000):
        lerp_(average, weights, torch.tensor(1e-4))
    assert torch.equal(average[0], weights[0])


def test_the_average_copies_buffers() -> None:
    class Normed(nn.BatchNorm2d):
        def forward(self, input: torch.Tensor, t: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(input)

    network = Normed(1)
    model = bsi.Model(network, bsi.BSI(), (1, 4, 4), bsi.Bins.uint8())
    ema = EmaModel(model)
    network(1 + torch.randn(8, 1, 4, 4))
    ema.update(torch.tensor(0.1))
    assert torch.equal(ema.model.denoiser.backbone.running_mean, network.running_mean)
    assert float(network.running_mean) != 0
    assert network.training
    assert not ema.model.training, "it is only used for evaluation, without dropout"
