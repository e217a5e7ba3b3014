"""The probability flow's likelihood, against densities and probabilities that are known."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bsi.errors import NonFinite, UsageError
from bsi.flow import binned_flow, flow_density, hutchinson
from bsi.methods import BFN, BSI, VDM, Method
from bsi.methods.base import Predictor
from bsi.oracle import Mixture
from bsi.values import Bins
from mixtures import at, mixture

# VDM's own prior is not its encoder at e^-5; with less signal there, it is.
METHODS = [BSI(), BFN(), VDM(nu_min=1e-13), BSI(gamma_0=0.1)]


def noisy(data: Mixture, method: Method) -> Mixture:
    """The law of z: the data with the last level's noise."""
    encoder = method.encoder(at(method.levels.high))
    variance = (encoder.noise / encoder.signal).square()
    return Mixture(data.weights, data.means, data.variances + variance, data.axes)


def points(count: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return mixture().sample(
        torch.rand(count, generator=generator, dtype=torch.float64),
        torch.randn(count, 2, generator=generator, dtype=torch.float64),
    )


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_flow_assigns_the_exact_density_of_a_mixture(method):
    z = points()
    flow = flow_density(method, mixture().predictor(method), z, tolerance=1e-6)
    torch.testing.assert_close(flow.log_density, noisy(mixture(), method).log_density(z), rtol=0, atol=1e-5)
    assert flow.evaluations < 400
    assert flow.nats_per_dim == pytest.approx(-float(flow.log_density.mean()) / 2)
    assert flow.bits_per_dim == pytest.approx(flow.nats_per_dim / math.log(2))


def test_vdms_prior_is_exact_for_data_of_unit_variance():
    """Such data has latents of unit variance, like its prior: the prior is exact at any first level."""
    method, data = VDM(nu_min=1.0, nu_max=1e3), Mixture.isotropic(torch.zeros(1, 2, dtype=torch.float64), 1.0)
    flow = flow_density(method, data.predictor(method), points(4))
    torch.testing.assert_close(flow.log_density, noisy(data, method).log_density(points(4)), rtol=0, atol=1e-5)


def test_progress_adds_up_to_the_whole_integral():
    shares = list[float]()
    flow_density(BSI(), mixture().predictor(BSI()), points(3), tolerance=1e-3, watch=shares.append)
    assert len(shares) > 10
    assert min(shares) >= 0
    assert max(shares) < 0.5
    assert sum(shares) == pytest.approx(1)


def test_the_flow_differentiates_under_no_grad():
    method, z = BSI(), points(3)
    predict = mixture().predictor(method)
    expected = flow_density(method, predict, z, tolerance=1e-3).log_density
    with torch.inference_mode():
        found = flow_density(method, predict, z.clone(), tolerance=1e-3).log_density
    assert torch.equal(found, expected)


def test_the_likelihood_of_a_sample_does_not_depend_on_its_batch():
    method, z = BSI(), points(6)
    predict, divergence = mixture().predictor(method), hutchinson(3, (2,))
    whole = flow_density(method, predict, z, divergence)
    alone = flow_density(method, predict, z[4:5], divergence, samples=torch.tensor([4]))
    torch.testing.assert_close(alone.log_density, whole.log_density[4:5], rtol=0, atol=1e-9)


def test_a_condition_keeps_its_rows_when_some_samples_take_fewer_steps():
    method, z = BSI(), torch.tensor([-1e-6, 1.0, 50.0], dtype=torch.float64)[:, None]
    center = torch.tensor([0.0, 2.0, -3.0], dtype=torch.float64)[:, None]  # a condition, one row for each sample

    def predict(rows: slice) -> Predictor:
        return lambda latent, level: center[rows] + 0.1 * latent.tanh()

    whole = flow_density(method, predict(slice(None)), z)
    for i in range(3):
        alone = flow_density(method, predict(slice(i, i + 1)), z[i : i + 1])
        assert alone.evaluations <= whole.evaluations
        torch.testing.assert_close(alone.log_density, whole.log_density[i : i + 1], rtol=0, atol=1e-9)


def test_hutchinsons_estimate_is_unbiased():
    method, count = BSI(), 400
    z = points(1).expand(count, 2)
    flow = flow_density(method, mixture().predictor(method), z, hutchinson(0, (2,)), tolerance=1e-4)
    exact = float(noisy(mixture(), method).log_density(z[:1]))
    error = float(flow.log_density.std()) / math.sqrt(count)
    assert error > 1e-4  # it is an estimate
    assert abs(float(flow.log_density.mean()) - exact) < 4 * error
    fewer = flow_density(method, mixture().predictor(method), z, hutchinson(0, (2,), probes=4), tolerance=1e-4)
    assert fewer.log_density.std() < 0.7 * flow.log_density.std()


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_data_in_bins_has_its_exact_probability(method):
    """Data on three gray values: P(x) is its weight, less the part of the last level's noise that leaves the bin."""
    bins = Bins.uint8()
    index = torch.tensor([[20, 30], [200, 90], [130, 250]])
    data = Mixture.isotropic(bins.values(index, torch.float64), 0.0, at(0.2, 0.5, 0.3))
    uniform = torch.rand(3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    flow = binned_flow(method, data.predictor(method), index, bins, uniform, tolerance=1e-5)
    encoder = method.encoder(at(method.levels.high))
    mass = torch.erf(0.5 * bins.width * encoder.signal / encoder.noise / math.sqrt(2))
    torch.testing.assert_close(flow.log_density, torch.log(data.weights) + 2 * torch.log(mass), rtol=0, atol=1e-4)
    assert (flow.log_density < torch.log(data.weights)).all()
    assert flow.error > 0
    alone = replace(flow, log_density=flow.log_density[:1], w=flow.w[:1])
    assert math.isnan(alone.error)  # one sample has no spread


def test_dequantized_values_stay_in_their_bins():
    """A coarse sigma_1: the last level's noise is wider than a bin."""
    method, bins = BFN(sigma_1=0.02), Bins.uint8()
    seen: list[Tensor] = []

    def predict(latent: Tensor, level: Tensor) -> Tensor:
        if not seen:
            seen.append((latent / method.encoder(level).signal[:, None]).detach())
        return 0 * latent

    index = torch.tensor([[7, 250, 128]])
    for value in (1e-9, 0.4, 1 - 1e-9):
        seen.clear()
        binned_flow(method, predict, index, bins, torch.full((1, 3), value, dtype=torch.float64))
        assert torch.equal(bins.indices(seen[0]).long(), index)
    # Where a bin is much wider than the noise. torch.rand sometimes draws 0.
    sharp = binned_flow(BFN(), lambda x, _: 0 * x, torch.tensor([[3]]), Bins(-1.0, 1.0, 17), torch.zeros(1, 1))
    assert sharp.log_density.isfinite().all()


def test_invalid_flows_are_rejected():
    method = BSI()
    with pytest.raises(UsageError, match="tolerance"):
        flow_density(method, mixture().predictor(method), points(1), tolerance=0.0)
    with pytest.raises(UsageError, match="probe"):
        hutchinson(0, (2,), probes=0)
    with pytest.raises(NonFinite, match="not finite"):
        flow_density(method, lambda latent, level: latent * math.nan, points(1))
