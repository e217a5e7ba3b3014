"""Consistency tuning (Geng et al., 2024): a trained denoiser is tuned until few evaluations draw a sample.

The flow maps each latent to the sample at its end. A consistency function f(psi, level) is that map, so it takes the
same value along a trajectory, and at the last level it is the identity in units of the data, psi / signal. A denoiser
predicts the mean instead. With sigma = noise / signal and rho = 1 / sigma the identity is built in by

    f = x_hat + m (psi / signal - x_hat),        m = (rho / rho_last)^2,

and the rest is trained: at two levels of one path, psi = signal x + noise eps for the same x and eps,

    loss = sqrt(|f(psi, level) - stop_gradient f(psi', level')|^2 + c^2 n) / (sigma - sigma'),        sigma' < sigma.

During training sigma' approaches sigma, from sigma' = 0, where f is x: sigma' = sigma (1 - g (1 + 8 / (1 + e^sigma)))
with a gap g that is halved eight times. A sample is f at the first level. Further evaluations add noise to it again and
repeat: psi' = signal' f + noise' eps. A tuned network is no longer a denoiser: it has no bound and no likelihood.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from bsi.gaussian import Data, PerSample, over, squared_norm
from bsi.methods.base import Method, Predictor, level_at, rho_at
from bsi.solvers import Table

FIRST_SIGMA, LAST_SIGMA = 80.0, 0.8  # the noise of the first and of the last evaluation
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


def consistency_grid(method: Method, k: int, predicted: bool) -> Float[Tensor, " levels"]:
    """The levels of k steps: sigma^(1/7) evenly spaced, as in EDM's grid, from the prior's level to sigma = 0.8.

    If the sample is the last latent (VDM), and not `predicted` from it, the last step ends at the last level.
    """
    ends = torch.tensor([method.levels.low, method.levels.high], dtype=torch.float64)
    first = 1 / max(float(rho_at(method, ends)[0]), 1 / FIRST_SIGMA)
    roots = torch.linspace(first ** (1 / 7), LAST_SIGMA ** (1 / 7), k + predicted, dtype=torch.float64)
    return torch.cat([ends[:1], level_at(method, roots[1:] ** -7), ends[1 + predicted :]])


def consistency(method: Method, grid: Float[Tensor, " levels"]) -> Table:
    """The solver psi' = signal' f + noise' eps, without noise where the step ends at the method's last level."""
    encoder, nothing = method.encoder(grid[1:]), torch.zeros(len(grid) - 1, dtype=torch.float64)
    noise = torch.where(grid[1:] < method.levels.high, encoder.noise, 0.0)
    return Table(latent=nothing, x_hat=encoder.signal, previous=nothing, eps=noise)
