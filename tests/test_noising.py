"""Appendix "Diffusion Models": the noising process, and when it is a Markov chain."""

import math

import pytest
import torch

from brute_force import condition, source
from bsi.errors import UsageError
from bsi.methods import BSI
from bsi.noising import noising

BELIEFS = [BSI(0.2, alpha_M=100.0), BSI(0.2, gamma_0=1.0, alpha_M=100.0), BSI(0.2, gamma_0=math.inf, alpha_M=100.0)]
BELIEFS += [BSI(1.0, gamma_0=math.inf)]  # BFN


def at(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def chain(method: BSI, x: float, levels: tuple[float, ...]) -> list:
    """Beliefs about x at rising levels, as affine functions of the initial belief and the measurements."""
    count = len(levels) + 1
    gamma_0 = method.lambda_0 if method.gamma_0 is None else method.gamma_0
    mean, level, means = source(0, count, 0.0, gamma_0**-0.5), method.lambda_0, []
    for i, later in enumerate(levels, start=1):
        alpha = later - level
        mean = (level * mean + alpha * source(i, count, x, alpha**-0.5)) / later
        level = later
        means.append(mean)
    return means


@pytest.mark.parametrize("method", BELIEFS, ids=repr)
@pytest.mark.parametrize(("gain", "sharper"), [(0.01, 0.02), (0.5, 9.0), (20.0, 21.0)])
def test_noising_is_conditioning_on_the_sharper_belief(method, gain, sharper):
    x, value, level, sharp = 0.7, -0.4, method.lambda_0 + gain, method.lambda_0 + sharper
    broad_mean, sharp_mean = chain(method, x, (level, sharp))
    expected = condition(broad_mean, [sharp_mean], [value])
    ours = noising(method, at(value)[:, None], at(x)[:, None], at(sharp), at(level))
    assert (ours.mean.item(), ours.std.item() ** 2) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("method", BELIEFS, ids=repr)
def test_noising_is_the_equation_as_printed(method):
    level, sharp, x, value = 3.0, 11.0, 0.9, 0.2
    lambda_0, gamma_0 = method.lambda_0, method.lambda_0 if method.gamma_0 is None else method.gamma_0
    alpha, gained = level - lambda_0, sharp - level
    known = alpha + lambda_0**2 / gamma_0
    xi = level**2 * (1 / known + 1 / gained)
    mean = (level * sharp / gained * value + level * (alpha / known - 1) * x) / xi
    ours = noising(method, at(value)[:, None], at(x)[:, None], at(sharp), at(level))
    assert (ours.mean.item(), ours.std.item() ** -2) == pytest.approx((mean, xi), rel=1e-10)


def test_bsi_noising_simplifies_as_printed():
    method, level, sharp, x, value = BSI(0.2), 3.0, 11.0, 0.9, 0.2
    gained = sharp - level
    xi = level * (1 + level / gained)
    mean = (level * sharp / gained * value - method.lambda_0 * x) / xi
    ours = noising(method, at(value)[:, None], at(x)[:, None], at(sharp), at(level))
    assert (ours.mean.item(), ours.std.item() ** -2) == pytest.approx((mean, xi), rel=1e-12)


@pytest.mark.parametrize("method", BELIEFS, ids=repr)
def test_noising_forgets_the_sample_only_for_a_deterministic_initial_belief(method):
    """Markov: given mu', the broader belief does not depend on x. True exactly for gamma_0 = inf."""
    value, sharp, level = at(0.3, 0.3)[:, None], at(8.0, 8.0), at(2.5, 2.5)
    means = noising(method, value, at(-1.0, 1.0)[:, None], sharp, level).mean
    assert (means[0] == means[1]).item() == (method.gamma_0 == math.inf)


@pytest.mark.parametrize("method", BELIEFS, ids=repr)
def test_noising_inverts_the_encoder(method):
    """q(mu' | x) noised is q(mu | x): the encoder is the same at every level, whichever way one comes."""
    x, count = torch.full((100_000, 1), 0.8, dtype=torch.float64), 100_000
    sharp, level = torch.full((count,), 30.0, dtype=torch.float64), torch.full((count,), 4.0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    eps = torch.randn(2, count, 1, generator=generator, dtype=torch.float64)
    noised = noising(method, method.encoder(sharp).encode(x, eps[0]), x, sharp, level).sample(eps[1])
    encoder = method.encoder(level)
    standard = (noised[:, 0] - encoder.signal * 0.8) / encoder.noise
    assert abs(standard.mean()) < 4 / math.sqrt(count)
    assert abs(standard.var() - 1) < 4 * math.sqrt(2 / count)


@pytest.mark.parametrize(("sharp", "level"), [(3.0, 3.0), (2.0, 3.0), (3.0, 0.1)])
def test_noising_goes_from_a_sharper_belief_to_a_broader_one_alone(sharp, level):
    with pytest.raises(UsageError, match="lambda_0 <= level < sharp_level"):
        noising(BELIEFS[0], at(0.0), at(0.0), at(sharp), at(level))
