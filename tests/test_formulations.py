"""The appendices "Diffusion Models" and "Stochastic Interpolants" against exact laws of the belief mean."""

import math

import pytest
import torch

from brute_force import condition, source
from bsi.elbo import measurement_loss
from bsi.errors import UsageError
from bsi.formulations import (
    drift,
    euler_maruyama_step,
    interpolant_loss,
    noising,
    posterior_noise_level,
    score,
    velocity,
)  # fmt: skip
from bsi.methods import BSI
from bsi.oracle import Mixture

BELIEFS = [BSI(0.1, alpha_M=60.0), BSI(0.1, gamma_0=0.7, alpha_M=60.0), BSI(0.1, gamma_0=math.inf, alpha_M=60.0)]
WEIGHTS, MEANS, VARIANCES = (torch.tensor(v, dtype=torch.float64) for v in ([0.3, 0.7], [-1.0, 0.8], [0.2, 0.05]))
DATA = Mixture(WEIGHTS, MEANS[:, None], VARIANCES[:, None])
LEVELS = [0.2, 1.0, 7.0, 40.0]


def at(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def log_law(method: BSI, level: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
    """ln rho(lambda, mu) for the mixture: written out, with no part of the library but the encoder's formula."""
    signal = (level - method.lambda_0) / level
    variance = signal**2 * VARIANCES + (level - method.lambda_0 + method.c) / level**2
    terms = torch.log(WEIGHTS) - 0.5 * (mu - signal * MEANS) ** 2 / variance - 0.5 * torch.log(2 * math.pi * variance)
    return torch.logsumexp(terms, -1)


def denoised(method: BSI, level: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
    return DATA.predictor(method)(mu, level.expand(len(mu)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("method", BELIEFS, ids=repr)
def test_score_is_the_gradient_of_the_log_density(method, level):
    for value in (-1.2, -0.1, 0.6):
        mu = at(value).requires_grad_()
        (expected,) = torch.autograd.grad(log_law(method, at(level), mu[:, None]).sum(), mu)
        ours = score(method, at(level), at(value)[:, None], denoised(method, at(level), at(value)[:, None]))
        assert ours.item() == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("method", BELIEFS, ids=repr)
def test_velocity_solves_the_transport_equation(method, level):
    """d rho / d lambda + d (b rho) / d mu = 0, the derivatives taken by automatic differentiation."""
    for value in (-1.2, -0.1, 0.6):
        lam, mu = at(level).requires_grad_(), at(value).requires_grad_()
        density = torch.exp(log_law(method, lam, mu[:, None]))
        b = velocity(method, lam, mu[:, None], denoised(method, lam, mu[:, None]))[:, 0]
        (rate,) = torch.autograd.grad(density.sum(), lam, retain_graph=True)
        (flux,) = torch.autograd.grad((b * density).sum(), mu)
        assert flux.item() == pytest.approx(-rate.item(), rel=1e-7, abs=1e-12)


@pytest.mark.parametrize("noise_level", [0.0, 0.3, 2.0])
def test_drift_is_the_printed_sde_for_any_noise_level(noise_level):
    method = BSI(0.1)
    for level in LEVELS:
        mu, eta, e = 0.7, -0.3, noise_level
        signal = (level - method.lambda_0) / level
        inner = e * level + 1 / (2 * level) + method.lambda_0 / (level * (level - method.lambda_0))
        printed = -(1 / (2 * level) + e * level) * mu + inner * signal * eta
        ours = drift(method, at(level), at(mu)[:, None], at(eta)[:, None], at(noise_level))
        assert ours.item() == pytest.approx(printed, rel=1e-10)


@pytest.mark.parametrize("method", BELIEFS, ids=repr)
def test_drift_at_the_posterior_noise_level_pulls_towards_the_prediction(method):
    """Equation "si-forward": (eta - mu) / lambda, for every gamma_0."""
    for level in LEVELS:
        ours = drift(method, at(level), at(0.7)[:, None], at(-0.3)[:, None], posterior_noise_level(at(level)))
        assert ours.item() == pytest.approx((-0.3 - 0.7) / level, rel=1e-10)


@pytest.mark.parametrize("noise_level", [0.0, 0.01, 0.08])
@pytest.mark.parametrize("method", BELIEFS, ids=repr)
def test_sde_keeps_the_law_of_the_belief_mean(method, noise_level):
    """The Fokker-Planck equation: d rho/d lambda = -d(drift rho)/d mu + eps d^2 rho/d mu^2, at any noise level."""
    level, value = 5.0, 0.35
    lam, mu = at(level).requires_grad_(), at(value).requires_grad_()
    density = torch.exp(log_law(method, lam, mu[:, None]))
    forward = drift(method, lam, mu[:, None], denoised(method, lam, mu[:, None]), at(noise_level))[:, 0]
    (rate,) = torch.autograd.grad(density.sum(), lam, retain_graph=True)
    (slope,) = torch.autograd.grad(density.sum(), mu, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), mu, retain_graph=True)
    (flux,) = torch.autograd.grad((forward * density).sum(), mu)
    assert rate.item() == pytest.approx(-flux.item() + noise_level * curvature.item(), rel=1e-7)


def test_euler_maruyama_step_is_the_printed_one():
    method, level, alpha, mu, eta, eps = BSI(0.1), 4.0, 0.5, 0.7, -0.3, 1.3
    printed = (level - alpha) / level * mu + alpha / level * eta + math.sqrt(alpha) / level * eps
    arguments = (
        at(level),
        at(mu)[:, None],
        at(eta)[:, None],
        at(alpha),
        posterior_noise_level(at(level)),
        at(eps)[:, None],
    )
    assert euler_maruyama_step(method, *arguments).item() == pytest.approx(printed, rel=1e-12)


@pytest.mark.parametrize("method", BELIEFS, ids=repr)
def test_euler_maruyama_step_tends_to_the_bsi_step(method):
    """They differ in lambda against lambda + alpha: by O(alpha) relative to the step."""
    level, mu, eta, eps = 4.0, 0.7, -0.3, 1.3
    gaps = []
    for alpha in (1e-2, 1e-4, 1e-6):
        arguments = (at(mu)[:, None], at(eta)[:, None], at(alpha), posterior_noise_level(at(level)), at(eps)[:, None])
        euler = euler_maruyama_step(method, at(level), *arguments).item()
        exact = (level * mu + alpha * (eta + eps / math.sqrt(alpha))) / (level + alpha)
        gaps.append(abs(euler - exact) / math.sqrt(alpha))
    assert gaps[1] == pytest.approx(gaps[0] / 100, rel=0.15)
    assert gaps[2] == pytest.approx(gaps[1] / 100, rel=0.15)


def test_interpolant_loss_is_the_measurement_loss_up_to_an_offset():
    """Integrated over lambda it is L_M less alpha_M |x|^2 / 2, which does not depend on the prediction."""
    method, count = BELIEFS[0], 4000
    generator = torch.Generator().manual_seed(0)
    x, eps = torch.randn(2, count, 3, generator=generator, dtype=torch.float64)
    t = torch.rand(count, generator=generator, dtype=torch.float64)
    level = method.levels.icdf(t)
    mu, density = method.encoder(level).encode(x, eps), method.levels.density(level)
    for predict in (lambda latent, _: 0.9 * latent, lambda latent, _: torch.tanh(latent)):
        ours = interpolant_loss(predict(mu, level), x) / density
        offset = 0.5 * x.square().sum(1) / density
        torch.testing.assert_close(ours + offset, measurement_loss(method, predict, x, t, eps), rtol=1e-9, atol=1e-9)
    # E[1 / density] is the length alpha_M of the range for every proposal: the offset is alpha_M |x|^2 / 2.
    reciprocal = 1 / density
    assert abs(reciprocal.mean() - method.alpha_M) < 4 * reciprocal.std() / math.sqrt(count)


# The noising process, and when it is a Markov chain

NOISED = [BSI(0.2, alpha_M=100.0), BSI(0.2, gamma_0=1.0, alpha_M=100.0), BSI(0.2, gamma_0=math.inf, alpha_M=100.0)]
NOISED += [BSI(1.0, gamma_0=math.inf)]  # BFN


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


@pytest.mark.parametrize("method", NOISED, ids=repr)
@pytest.mark.parametrize(("gain", "sharper"), [(0.01, 0.02), (0.5, 9.0), (20.0, 21.0)])
def test_noising_is_conditioning_on_the_sharper_belief(method, gain, sharper):
    x, value, level, sharp = 0.7, -0.4, method.lambda_0 + gain, method.lambda_0 + sharper
    broad_mean, sharp_mean = chain(method, x, (level, sharp))
    expected = condition(broad_mean, [sharp_mean], [value])
    ours = noising(method, at(value)[:, None], at(x)[:, None], at(sharp), at(level))
    assert (ours.mean.item(), ours.std.item() ** 2) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("method", NOISED, ids=repr)
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


@pytest.mark.parametrize("method", NOISED, ids=repr)
def test_noising_forgets_the_sample_only_for_a_deterministic_initial_belief(method):
    """Markov: given mu', the broader belief does not depend on x. True exactly for gamma_0 = inf."""
    value, sharp, level = at(0.3, 0.3)[:, None], at(8.0, 8.0), at(2.5, 2.5)
    means = noising(method, value, at(-1.0, 1.0)[:, None], sharp, level).mean
    assert (means[0] == means[1]).item() == (method.gamma_0 == math.inf)


@pytest.mark.parametrize("method", NOISED, ids=repr)
def test_noising_inverts_the_encoder(method):
    """q(mu' | x) noised is q(mu | x): the encoder at a level is the same from either direction."""
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
def test_noising_only_broadens_beliefs(sharp, level):
    with pytest.raises(UsageError, match="lambda_0 <= level < sharp_level"):
        noising(NOISED[0], at(0.0), at(0.0), at(sharp), at(level))
