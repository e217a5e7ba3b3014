"""The decoders of Appendix "ELBO in Bits per Dimension", against mpmath and against each other."""

import math

import mpmath
import numpy as np
import pytest
import torch

import bsi
from bsi.likelihood import bits_per_dim, categorical_normal, discretized_normal, normal
from bsi.values import Bins, Standardize

GREY, BYTE, AUDIO = Bins(-1.0, 1.0, 17), Bins.uint8(), Bins.int16()
SKEWED = Bins(0.3, 7.9, 11)


def log_mass(bins: Bins, index: int, x_hat: float, precision: float) -> mpmath.mpf:
    """ln N'(x | x_hat, precision) of the bin `index`, by mpmath with as many digits as the tail needs."""
    with mpmath.workdps(60):
        width = (mpmath.mpf(bins.high) - mpmath.mpf(bins.low)) / (bins.count - 1)
        center, scale = mpmath.mpf(bins.low) + index * width - mpmath.mpf(x_hat), mpmath.sqrt(mpmath.mpf(precision))
        left, right = (center - width / 2) * scale, (center + width / 2) * scale
    with mpmath.workdps(40 + int(0.22 * max(abs(left), abs(right)) ** 2)):  # e^-(z^2 / 2) has 0.217 z^2 zeros
        upper = mpmath.mpf(1) if index == bins.count - 1 else mpmath.erfc(-right / mpmath.sqrt(2)) / 2
        lower = mpmath.mpf(0) if index == 0 else mpmath.erfc(-left / mpmath.sqrt(2)) / 2
        return mpmath.log(upper - lower)


@pytest.mark.parametrize("bins", [GREY, BYTE, AUDIO, SKEWED], ids=repr)
@pytest.mark.parametrize("sharpness", [1e-6, 1e-3, 0.05, 0.5, 1.0, 3.0, 30.0])
def test_discretized_normal_agrees_with_mpmath_far_into_the_tails(bins, sharpness):
    """`sharpness` is a bin's width in standard deviations: from narrow bins to bins that hold all the mass."""
    precision = (sharpness / bins.width) ** 2
    deviation = 1 / math.sqrt(precision)
    cases = [
        (index, bins.low + index * bins.width + offset * deviation)
        for index in (0, 1, bins.count // 3, bins.count - 1)
        for offset in (-39.0, -8.0, -0.4, 0.0, 0.7, 5.0, 21.0)
    ]
    index = torch.tensor([i for i, _ in cases])[:, None]
    x_hat = torch.tensor([prediction for _, prediction in cases], dtype=torch.float64)[:, None]
    ours = discretized_normal(bins, index, x_hat, precision)
    for value, (i, prediction) in zip(ours.tolist(), cases, strict=True):
        # A rounding of the bin's edge, relative to a deviation, cannot be avoided.
        slack = 4e-16 * (abs(bins.low) + abs(bins.high)) / deviation * 45
        assert value == pytest.approx(float(log_mass(bins, i, prediction, precision)), rel=1e-10, abs=slack)


@pytest.mark.parametrize("decoder", [discretized_normal, categorical_normal])
@pytest.mark.parametrize(("bins", "precision"), [(GREY, 2.0), (GREY, 1e3), (BYTE, 1e4), (BYTE, 2e6), (AUDIO, 1e8)])
@pytest.mark.parametrize("x_hat", [-3.0, 0.1234, 1.0])
def test_probabilities_of_all_bins_sum_to_one(decoder, bins, precision, x_hat):
    index = torch.arange(bins.count)[:, None]
    log_p = decoder(bins, index, torch.full((bins.count, 1), x_hat, dtype=torch.float64), precision)
    assert torch.exp(log_p).sum().item() == pytest.approx(1, abs=1e-11)


@pytest.mark.parametrize("count", [2, 3, 17, 256])
def test_bins_follow_the_papers_edge_rules(count):
    """The printed cases of l_j and r_j for data on the scale 0 .. r - 1, also between and on the edges."""
    bins = Bins(0.0, count - 1.0, count)

    def bounds(x: float) -> tuple[float, float]:
        if x < 0.5:
            return -math.inf, 0.5
        if x >= count - 1.5:
            return count - 1.5, math.inf
        return math.floor(x - 0.5) + 0.5, math.floor(x + 0.5) + 0.5

    precision, x_hat = 0.8, torch.tensor([[0.4 * count]], dtype=torch.float64)
    cdf = torch.distributions.Normal(x_hat, precision**-0.5).cdf
    for x in (0.0, 0.25, 0.5, 1.0, 1.49, 1.5, 2.5, count - 1.75, count - 1.5, count - 1.25, count - 1.0):
        if 0 <= x <= count - 1:
            left, right = (torch.tensor([[edge]], dtype=torch.float64) for edge in bounds(x))
            index = bins.indices(torch.tensor([[x]], dtype=torch.float64))
            ours = discretized_normal(bins, index, x_hat, precision)
            expected = (cdf(right) - cdf(left)).item()
            assert torch.exp(ours).item() == pytest.approx(expected, rel=1e-9), (x, bounds(x))


@pytest.mark.parametrize("x_hat", [-1.2, -0.3337, 0.5, 1.0])
@pytest.mark.parametrize("precision", [5.0, 3e3, math.exp(13.3)])
def test_vdms_decoder_is_a_softmax_over_all_centers(precision, x_hat):
    with mpmath.workdps(40):
        centers = [-1 + mpmath.mpf(2 * i) / 255 for i in range(256)]
        logits = [-mpmath.mpf(precision) / 2 * (center - mpmath.mpf(x_hat)) ** 2 for center in centers]
        peak = max(logits)
        total = peak + mpmath.log(mpmath.fsum(mpmath.exp(logit - peak) for logit in logits))
    index = torch.arange(256)[:, None]
    ours = categorical_normal(BYTE, index, torch.full((256, 1), x_hat, dtype=torch.float64), precision)
    np.testing.assert_allclose(ours.numpy(), [float(logit - total) for logit in logits], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("decoder", [discretized_normal, categorical_normal])
@pytest.mark.parametrize("x_hat", [-1e4, -30.0, -1.0, 0.0, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("precision", [1e-6, 1.0, 2e6, 1e10])
def test_likelihood_and_gradient_are_finite_at_any_prediction(decoder, x_hat, precision):
    prediction = torch.full((17, 1), x_hat, requires_grad=True)
    log_p = decoder(GREY, torch.arange(17)[:, None], prediction, precision)
    assert torch.isfinite(log_p).all()
    assert (log_p <= 0).all()
    if abs(x_hat) * math.sqrt(precision) > 1e7:
        return  # ten million deviations away torch's own derivative of log_ndtr overflows
    (gradient,) = torch.autograd.grad(log_p.sum(), prediction)
    assert torch.isfinite(gradient).all()


def test_a_low_precision_prediction_is_decoded_in_float64():
    x_hat = torch.tensor([[0.1, -0.7, 1.0]], dtype=torch.bfloat16)
    index = torch.tensor([[5, 200, 255]])
    exact = discretized_normal(BYTE, index, x_hat.double(), 2e6)
    assert discretized_normal(BYTE, index, x_hat, 2e6).item() == exact.item()
    assert exact.dtype == torch.float64


def test_continuous_data_is_decoded_by_a_plain_normal():
    generator = torch.Generator().manual_seed(0)
    x, x_hat = torch.randn(2, 4, 2, 3, generator=generator, dtype=torch.float64)
    expected = torch.distributions.Normal(x_hat, 50**-0.5).log_prob(x).flatten(1).sum(1)
    torch.testing.assert_close(normal(x, x_hat, 50.0), expected, rtol=1e-12, atol=0)


def test_a_uniform_prediction_over_256_bins_costs_eight_bits():
    assert bits_per_dim(torch.tensor([3072 * math.log(256)]), 3072).item() == pytest.approx(8)


class Shrink(torch.nn.Module):
    def forward(self, x, t):
        return 0.3 * x


@pytest.mark.parametrize("method", [bsi.BSI(), bsi.BFN(), bsi.VDM()], ids=repr)
def test_rescaling_the_data_by_ten_shifts_nats_per_dimension_by_ln_ten(method):
    data = 5 + 2 * torch.randn(16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bounds = [
        bsi.Model(Shrink(), method, shape=(4,), data=Standardize.fit(scaled)).elbo(scaled, seed=3).nats_per_dim
        for scaled in (data, 10 * data)
    ]
    assert bounds[1] - bounds[0] == pytest.approx(math.log(10), abs=1e-9)
