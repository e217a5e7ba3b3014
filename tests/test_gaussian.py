"""Lemmas "Posterior Update" and "Update Marginal", the collapse of measurements, and the KL of two update marginals."""

import math

import numpy as np
import pytest
import torch

from brute_force import condition, mean_and_variance, source
from bsi.gaussian import Belief, Encoder, Normal, kl_divergence, over, squared_norm, sum_over_data

PRECISIONS = [(1e-2, 1e-3), (1e-2, 1e6), (1.0, 0.5), (3.0, 40.0), (1e6, 1e-2)]


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("precision", "alpha"), PRECISIONS)
def test_posterior_update_is_conditioning_on_the_measurement(precision, alpha):
    mu, y = 0.7, -1.3
    x = source(0, 2, mu, precision**-0.5)
    measured = x + source(1, 2, 0.0, alpha**-0.5)
    mean, variance = condition(x, [measured], [y])
    belief = Belief(tensor(mu), tensor(precision)).update(tensor(y), tensor(alpha))
    assert belief.mean.item() == pytest.approx(mean, rel=1e-9)
    assert 1 / belief.precision.item() == pytest.approx(variance, rel=1e-6)  # the reference subtracts
    assert belief.precision.item() == precision + alpha


@pytest.mark.parametrize(("precision", "alpha"), PRECISIONS)
def test_update_marginal_is_the_updated_mean_over_all_measurements(precision, alpha):
    mu, x = 0.7, -1.3
    updated = (precision * source(0, 1, mu, 0.0) + alpha * source(0, 1, x, alpha**-0.5)) / (precision + alpha)
    mean, variance = mean_and_variance(updated)
    marginal = Belief(tensor(mu), tensor(precision)).update_marginal(tensor(x), tensor(alpha))
    assert marginal.mean.item() == pytest.approx(mean, rel=1e-12)
    assert marginal.std.item() ** 2 == pytest.approx(variance, rel=1e-12)
    assert marginal.std.item() ** -2 == pytest.approx((precision + alpha) ** 2 / alpha, rel=1e-12)  # as printed


def test_measurements_collapse_into_one_of_their_total_precision():
    """The lemma after "Update Marginal": k updates are distributed as one, here for k = 4."""
    precision, alphas, mu, x = 0.3, [0.1, 2.0, 0.7, 11.0], 0.4, -0.9
    level, mean = precision, source(0, len(alphas), mu, 0.0)
    for i, alpha in enumerate(alphas):
        mean = (level * mean + alpha * source(i, len(alphas), x, alpha**-0.5)) / (level + alpha)
        level += alpha
    expected = mean_and_variance(mean)
    single = Belief(tensor(mu), tensor(precision)).update_marginal(tensor(x), tensor(math.fsum(alphas)))
    assert (single.mean.item(), single.std.item() ** 2) == pytest.approx(expected, rel=1e-12)


def test_belief_after_many_measurements_is_the_belief_after_their_weighted_mean():
    generator = torch.Generator().manual_seed(0)
    alphas = torch.rand(6, generator=generator, dtype=torch.float64) * 10
    ys = torch.randn(6, 5, 2, 3, generator=generator, dtype=torch.float64)
    start = Belief(torch.randn(5, 2, 3, generator=generator, dtype=torch.float64), tensor(0.2))
    belief = start
    for y, alpha in zip(ys, alphas, strict=True):
        belief = belief.update(y, alpha[None])
    once = start.update(torch.einsum("k,k...->...", alphas / alphas.sum(), ys), alphas.sum()[None])
    torch.testing.assert_close(belief.mean, once.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(belief.precision, once.precision, rtol=1e-14, atol=0)


@pytest.mark.parametrize(("precision", "alpha"), PRECISIONS)
def test_kl_of_two_update_marginals_is_half_alpha_times_the_squared_distance(precision, alpha):
    generator = torch.Generator().manual_seed(1)
    mu, x, other = torch.randn(3, 4, 2, 3, generator=generator, dtype=torch.float64)
    belief = Belief(mu, tensor(precision).expand(4))
    kl = kl_divergence(
        belief.update_marginal(x, tensor(alpha).expand(4)), belief.update_marginal(other, tensor(alpha).expand(4))
    )
    torch.testing.assert_close(kl, 0.5 * alpha * squared_norm(x - other), rtol=1e-8, atol=0)


def test_kl_and_log_density_agree_with_another_implementation():
    generator = torch.Generator().manual_seed(2)
    means = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    stds = torch.rand(2, 4, generator=generator, dtype=torch.float64) + 0.1
    p, q = (Normal(mean, std) for mean, std in zip(means, stds, strict=True))
    theirs = [torch.distributions.Normal(m, s[:, None]) for m, s in zip(means, stds, strict=True)]
    expected = torch.distributions.kl_divergence(*theirs).sum(1)
    torch.testing.assert_close(kl_divergence(p, q), expected, rtol=1e-12, atol=1e-12)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(p.log_prob(x), theirs[0].log_prob(x).sum(1), rtol=1e-12, atol=1e-12)


def test_samples_of_an_encoder_have_its_mean_and_deviation():
    eps = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = torch.full_like(eps, 1.5)
    encoder = Encoder(signal=tensor(0.5, 1e-3), noise=tensor(2.0, 0.0))
    psi = encoder.encode(x, eps)
    torch.testing.assert_close(psi, encoder.distribution(x).sample(eps), rtol=0, atol=0)
    assert abs(psi[0].mean() - 0.75) < 4 * 2 / math.sqrt(50_000)
    assert abs(psi[0].var() - 4) < 4 * 4 * math.sqrt(2 / 50_000)
    assert (psi[1] == 1.5e-3).all()


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (1, 2, 3)])
def test_a_sample_may_have_any_number_of_dimensions(shape):
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(2, 4, *shape, generator=generator, dtype=torch.float64)
    precision = torch.rand(4, generator=generator, dtype=torch.float64) + 1
    updated = Belief(x, precision).update(y, 2 * precision).mean
    for i in range(4):
        np.testing.assert_allclose(updated[i].numpy(), (x[i].numpy() + 2 * y[i].numpy()) / 3, rtol=1e-12)
        assert squared_norm(x)[i].item() == pytest.approx(float((x[i].numpy() ** 2).sum()))
        assert sum_over_data(x)[i].item() == pytest.approx(float(x[i].numpy().sum()))


def test_coefficients_are_cast_to_the_data_last():
    """lambda - lambda_0 cancels: in float32 the difference below would be 0."""
    difference = tensor(1.0 + 1e-12) - tensor(1.0)
    cast = over(difference, torch.zeros(1, 2, 3, dtype=torch.float32))
    assert cast.dtype == torch.float32
    assert cast.shape == (1, 1, 1)
    assert cast.item() == pytest.approx(1e-12, rel=1e-3)
