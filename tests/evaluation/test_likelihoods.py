"""All likelihoods of one model, their order, and the rate and distortion of the first steps of a chain."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import bsi
from bsi.bound import estimate
from bsi.cli import main
from bsi.cli.eval import audit_text
from bsi.data import open_dataset
from bsi.elbo import Estimator
from bsi.errors import UsageError
from bsi.evaluation.likelihoods import OrderedPair, rate_distortion


class Zero(nn.Module):
    """A network that leaves the best linear prediction unchanged."""

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def test_importance_weights_reach_the_exact_probability() -> None:
    """For standard Normal data the linear prediction is exact, and the flow's probability of a bin is known."""
    method = bsi.BSI(alpha_M=8.0)
    model = bsi.Model(Zero(), method, (1,), bsi.Bins(-2.0, 2.0, 5)).eval()
    x = torch.arange(5, dtype=torch.uint8)[:, None]
    sigma = math.sqrt(1 + 1 / float(bsi.methods.base.rho_at(method, torch.tensor(method.levels.high).double())) ** 2)
    edge = (torch.arange(5).double()[:, None] + torch.tensor([-2.5, -1.5])) / sigma
    exact = torch.special.ndtr(edge).diff(dim=1)[:, 0].log()
    often = x.repeat(100, 1)
    found = {
        draws: model.log_likelihood(often, probes=None, draws=draws, tolerance=1e-4).view(100, 5) for draws in (1, 16)
    }
    error = found[16].std(0) / 10
    assert bool((found[1].mean(0) < found[16].mean(0)).all())
    assert bool((found[16].mean(0) < exact + 4 * error).all())
    assert float((found[16].mean(0) - exact).abs().max()) < float((found[1].mean(0) - exact).abs().max()) / 4


def test_importance_weights_need_exact_traces_and_bins() -> None:
    model = bsi.Model(Zero(), bsi.BSI(alpha_M=8.0), (1,), bsi.Bins(-2.0, 2.0, 5)).eval()
    x = torch.zeros(2, 1, dtype=torch.uint8)
    with pytest.raises(UsageError, match="probes=None"):
        model.log_likelihood(x, draws=4)
    with pytest.raises(UsageError, match="draws"):
        model.log_likelihood(x, probes=None, draws=0)
    continuous = bsi.Model(Zero(), bsi.BSI(), (1,)).eval()
    with pytest.raises(UsageError, match="binned"):
        continuous.log_likelihood(torch.randn(2, 1), probes=None, draws=2)


def test_the_rate_of_all_steps_is_the_bound_without_reconstruction() -> None:
    model = bsi.load("digits")
    digits = open_dataset("digits")
    variance = model.fit_variance(digits.train[:256], "level")
    for each in (None, variance):
        subject = replace(model.on(digits.test[:64]), variance=each)
        found = rate_distortion(subject, 16)
        bound = estimate(subject, Estimator(measure=16, finite_k=16))
        expected = float(bound.measurement.mean() + bound.prior.mean()) / (64 * math.log(2))
        assert found.bits_per_dim[-1] == pytest.approx(expected, abs=5 * bound.monte_carlo_error + 0.02)
        assert found.bits_per_dim[0] == 0.0, "BSI's prior is exact"
        assert all(a <= b for a, b in zip(found.bits_per_dim, found.bits_per_dim[1:], strict=False))
        assert found.squared_error[-1] < found.squared_error[8] < found.squared_error[0]


def test_an_audit_prints_all_likelihoods_and_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("constriction")
    words = ["audit", "digits", "--limit", "8", "--steps", "3", "--device", "cpu"]
    assert main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in record["likelihoods"]]
    assert [name.split(",")[0].split(" ")[0] for name in names] == ["bound", "bound", "bound", "coded", "flow"]
    infinite, paper, aware, coded, flow = (row["bits_per_dim"] for row in record["likelihoods"])
    assert infinite < aware < paper
    assert coded == pytest.approx(aware, rel=0.1)
    assert flow == pytest.approx(infinite, abs=0.3)
    assert record["ordered"]
    assert record["split"] == "test"
    printed = audit_text(record)
    assert "another model" in printed
    assert printed.count("as it must be") == 2
    wrong = OrderedPair("a code", "a bound", -0.1, 0.01)
    assert not wrong.holds
    assert OrderedPair("a code", "a bound", -0.02, 0.01).holds
