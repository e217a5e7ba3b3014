"""BSI as a diffusion model and as a stochastic interpolant: two appendices of the paper.

**Diffusion.** The noising process goes from high to low precision. Given the belief mean mu' at lambda' = lambda +
alpha' and the sample x, the mean mu at lambda = lambda_0 + alpha has the distribution

    p(mu | mu', x) = N_P( xi^-1 [ lambda lambda' / alpha' mu' + lambda (alpha / (alpha + c) - 1) x ],  xi ),
    xi = lambda^2 ( 1 / (alpha + c) + 1 / alpha' ),        c = lambda_0^2 / gamma_0.

It depends on x, so the process is not a Markov chain, except for gamma_0 = inf, where c = 0, as in BFN.

**Interpolant** (Albergo et al., 2025). The belief mean interpolates between the belief prior and the data:

    mu_lambda = a(lambda) z + b(lambda) x,        a = lambda^-1/2,        b = (lambda - lambda_0) / lambda.

(For any gamma_0, a is the encoder's noise sqrt(alpha + c) / lambda, and nothing else changes.) With eta(lambda, mu) =
E[x | mu] (our x_hat), its law follows the velocity field a'/a mu + (b' - a'/a b) eta, has the score
-(mu - b eta) / a^2, and solves for any noise level eps(lambda) >= 0 the SDE

    d mu = [velocity + eps score] d lambda + sqrt(2 eps) dW.

At eps = 1 / (2 lambda^2) that is d mu = (eta - mu) / lambda d lambda + dW / lambda, whose Euler-Maruyama step differs
from BSI's only in using lambda where the exact update has lambda'.
"""

from __future__ import annotations

import torch

from bsi.errors import UsageError
from bsi.gaussian import Data, Normal, PerSample, over, sum_over_data
from bsi.methods.bsi import BSI


def noising(method: BSI, sharp: Data, x: Data, sharp_level: PerSample, level: PerSample) -> Normal:
    """Equation "diffusion BSI forward": the belief mean at `level`, given that at the higher `sharp_level`, and x."""
    alpha, gained = method.gain(level), sharp_level.double() - level.double()
    if bool((alpha < 0).any()) or bool((gained <= 0).any()):
        raise UsageError("noising goes from a sharper belief to a broader one: lambda_0 <= level < sharp_level")
    level, sharp_level, known = level.double(), sharp_level.double(), alpha + method.c
    # All terms are multiplied by (alpha + c) alpha': a deterministic initial belief (alpha + c = 0) needs no branch.
    xi = level.square() * (gained + known)
    mean = over(level * sharp_level * known / xi, x) * sharp - over(level * method.c * gained / xi, x) * x
    return Normal(mean, torch.sqrt(known * gained / xi))


def velocity(method: BSI, level: PerSample, mu: Data, eta: Data) -> Data:
    """The velocity field of the transport equation."""
    level = level.double()
    a_rate = 1 / (2 * (method.gain(level) + method.c)) - 1 / level  # a' / a: -1 / (2 lambda) for BSI
    b_rate = method.lambda_0 / level.square()  # b'
    return over(a_rate, mu) * mu + over(b_rate - a_rate * method.encoder(level).signal, mu) * eta


def score(method: BSI, level: PerSample, mu: Data, eta: Data) -> Data:
    """grad ln rho(lambda, mu)."""
    encoder = method.encoder(level)
    return -(mu - over(encoder.signal, mu) * eta) / over(encoder.noise.square(), mu)


def posterior_noise_level(level: PerSample) -> PerSample:
    """eps = 1 / (2 lambda^2), for which the SDE is that of BSI."""
    return 1 / (2 * level.double().square())


def drift(method: BSI, level: PerSample, mu: Data, eta: Data, noise_level: PerSample) -> Data:
    """The forward drift of the SDE at any noise level eps(lambda)."""
    return velocity(method, level, mu, eta) + over(noise_level, mu) * score(method, level, mu, eta)


def euler_maruyama_step(
    method: BSI, level: PerSample, mu: Data, eta: Data, alpha: PerSample, noise_level: PerSample, eps: Data
) -> Data:
    """Equation "si-step": a step of length alpha in lambda."""
    if bool((alpha <= 0).any()) or bool((noise_level < 0).any()):
        got = f"got alpha={alpha.tolist()}, noise_level={noise_level.tolist()}"
        raise UsageError(f"a step has a positive length and a noise level of at least 0: {got}")
    moved = mu + over(alpha, mu) * drift(method, level, mu, eta, noise_level)
    return moved + over(torch.sqrt(2 * noise_level * alpha), mu) * eps


def interpolant_loss(eta: Data, x: Data) -> PerSample:
    """1/2 |eta|^2 - x . eta, the integrand that interpolants learn from: 1/2 |x - eta|^2 less 1/2 |x|^2."""
    return sum_over_data(0.5 * eta.square() - x * eta)
