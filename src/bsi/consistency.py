"""Consistency tuning (Geng et al., 2024): a trained denoiser is tuned until few evaluations draw a sample.

The flow maps each latent to the sample at its end. A consistency function f(psi, level) is that map, so it takes the
same value along a trajectory, and at the last level it is the identity in units of the data, psi / signal. A denoiser
predicts the mean instead. With sigma = noise / signal and rho = 1 / sigma the identity is built in by

    f = x_hat + m (psi / signal - x_hat),        m = (rho / rho_last)^2,

and the rest is trained: at two levels of one path, psi = signal x + noise eps for the same x and eps,

    loss = sqrt(|f(psi, level) - stop_gradient f(psi', level')|^2 + c^2 n) / (sigma - sigma'),        sigma' < sigma.

During training sigma' approaches sigma, from sigma' = 0, where f is x: sigma' = sigma (1 - g (1 + 8 / (1 + e^sigma)))
with a gap g that is halved eight times. A sample is f at a level without signal. Further evaluations add noise to it
again and repeat. A tuned network is no longer a denoiser: it has no bound and no likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from bsi.gaussian import Data, PerSample, over, squared_norm
from bsi.methods.base import Method, Predictor, level_at, rho_at
from bsi.rng import Noise
from bsi.sampling import Step

FIRST_SIGMA, LAST_SIGMA = 80.0, 0.8  # the levels at which samples are drawn, in units of the data's deviation
LOG_SIGMA = (-1.1, 2.0)  # mean and deviation of ln(sigma) in training
SMOOTH = 1e-3  # c, which bounds the gradient where the two agree
HALVINGS = 8  # of the gap during training


def gap_at(progress: float) -> float:
    """The gap g after a share `progress` of the training: 1/2, 1/4, ... in stages of equal length."""
    return 0.5 ** (1 + math.floor(min(progress, 1 - 1e-9) * HALVINGS))


def consistency_loss(
    method: Method, predict: Predictor, x: Data, t: PerSample, eps: Data, gap: float | Float[Tensor, ""]
) -> PerSample:
    """The loss of each sample, at the quantile t of the levels. `predict` is the consistency function."""
    mean, deviation = LOG_SIGMA
    sigma = torch.exp(mean + deviation * torch.special.ndtri(t.double().clamp(1e-6, 1 - 1e-6)))
    last = 1 / rho_at(method, torch.tensor(method.levels.high, dtype=torch.float64, device=x.device))
    sigma = torch.maximum(sigma, 2 * last).clamp(max=FIRST_SIGMA)
    later = sigma * (1 - gap * (1 + 8 / (1 + sigma.exp())))
    with torch.no_grad():
        target = _at(method, predict, x, eps, torch.maximum(later, last))
        target = torch.lerp(x, target, over((later > last).double(), x))  # x where sigma' = 0
    distance = squared_norm(_at(method, predict, x, eps, sigma) - target)
    n = x[0].numel()
    weight = 1 / ((sigma - later.clamp(min=0)) * math.sqrt(n))
    return torch.sqrt(distance + SMOOTH**2 * n) * weight.to(distance.dtype)


def _at(method: Method, predict: Predictor, x: Data, eps: Data, sigma: PerSample) -> Data:
    level = level_at(method, 1 / sigma).clamp(method.levels.low, method.levels.high)
    return predict(method.encoder(level).encode(x, eps), level)


def sigmas(steps: int) -> list[float]:
    """The noise levels of the evaluations: sigma^(1/7) evenly spaced, as in EDM's grid."""
    if steps == 1:
        return [FIRST_SIGMA]
    first, last = FIRST_SIGMA ** (1 / 7), LAST_SIGMA ** (1 / 7)
    return [(first + i / (steps - 1) * (last - first)) ** 7 for i in range(steps)]


def few_steps(method: Method, predict: Predictor, noise: Noise, steps: int) -> Iterator[Step]:
    """Draw samples in `steps` evaluations of a consistency function. The x_hat of the last step is the sample."""
    levels = level_at(method, 1 / torch.tensor(sigmas(steps), dtype=torch.float64))
    levels = levels.clamp(method.levels.low, method.levels.high)
    x_hat: Data | None = None
    for i, level in enumerate(levels):
        with torch.no_grad():
            eps = noise(float(i), float(i + 1))
            each = level.to(eps.device).expand(len(eps))
            psi = method.encoder(each).encode(torch.zeros_like(eps) if x_hat is None else x_hat, eps)
            x_hat = predict(psi, each)
        yield Step(psi, level.to(eps.device), x_hat)
