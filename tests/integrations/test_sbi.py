"""Posterior estimation with sbi, against an exact posterior."""

import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("sbi", reason="pip install sbi")

from sbi.inference import NPE
from sbi.utils import BoxUniform
from sbi.utils.metrics import c2st

from bsi.integrations.sbi import sbi_estimator

OBSERVED = torch.zeros(1, 2)


def two_moons(theta: Tensor) -> Tensor:
    """The simulator of Greenberg et al. (2019)."""
    moon = crescent(len(theta))
    sums = torch.stack([-(theta[:, 0] + theta[:, 1]).abs(), theta[:, 1] - theta[:, 0]], 1)
    return moon + sums / math.sqrt(2)


def crescent(num: int) -> Tensor:
    angle, radius = math.pi * (torch.rand(num) - 0.5), 0.1 + 0.01 * torch.randn(num)
    return torch.stack([radius * angle.cos() + 0.25, radius * angle.sin()], 1)


def exact_posterior(num: int) -> Tensor:
    """Given x = 0: the crescent determines theta up to the sign of theta_1 + theta_2, with a constant Jacobian."""
    moon = math.sqrt(2) * crescent(num)
    sums, differences = moon[:, 0] * (2 * torch.randint(2, (num,)) - 1), -moon[:, 1]
    return torch.stack([(sums - differences) / 2, (sums + differences) / 2], 1)


def test_shapes_and_density_of_an_untrained_estimator() -> None:
    """An untrained network predicts a Gaussian, and `log_prob` is its density."""
    torch.manual_seed(0)
    theta, x = torch.randn(512, 2) * torch.tensor([1.0, 3.0]), torch.randn(512, 3)
    estimator = sbi_estimator()(theta, x)
    assert estimator.loss(theta[:5], x[:5]).shape == (5,)
    drawn = estimator.sample((2000,), x[:2])
    assert drawn.shape == (2000, 2, 2)
    log_prob = estimator.log_prob(drawn[:7], x[:2])
    assert log_prob.shape == (7, 2)
    center, deviation = theta.mean(0), theta.std(0)
    # with c_skip alone the flow leads to the Normal with the deviation sigma_data = 1, plus the last noise
    wanted = torch.distributions.Normal(center, deviation).log_prob(drawn[:7]).sum(-1)
    torch.testing.assert_close(log_prob, wanted, atol=0.05, rtol=0)


@pytest.mark.slow
def test_the_posterior_of_two_moons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A classifier cannot distinguish samples of the estimated posterior from exact ones much better than chance."""
    monkeypatch.chdir(tmp_path)  # where sbi writes its logs
    torch.manual_seed(1)
    prior = BoxUniform(-torch.ones(2), torch.ones(2))
    theta = prior.sample((10_000,))
    inference = NPE(prior, density_estimator=sbi_estimator(), show_progress_bars=False)
    inference.append_simulations(theta, two_moons(theta))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Maximum number of epochs")
        estimator = inference.train(training_batch_size=500, learning_rate=1e-3, max_num_epochs=150)
    posterior = inference.build_posterior(estimator)
    drawn = posterior.sample((1000,), x=OBSERVED, show_progress_bars=False)
    exact = exact_posterior(1000)
    assert float(c2st(exact, drawn)) < 0.65
    density = posterior.log_prob(exact[:100], x=OBSERVED)
    far = posterior.log_prob(prior.sample((100,)), x=OBSERVED)
    assert float(density.median()) > float(far.median()) + 5
