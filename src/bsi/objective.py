"""What training minimises, Algorithm "Estimating the BSI training loss": 2 L_M / n for all three methods.

The reconstruction term is left out, as in the paper: by the last level the sample is all but determined. A weight
over the level trades likelihood for sample quality; the default, 1, is the ELBO's. Weights are functions of

    l = ln SNR = ln (signal / noise)^2,        SNR = alpha^2 / (alpha + c),

so that they mean the same for all three methods (Kingma and Gao, 2023):

    sigmoid(b - l)                              less for levels where only invisible digits are left to learn
    N(l; 2.4, 2.4^2) (e^-l + 1/4)               what EDM's choices of noise levels and loss amount to
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from bsi.elbo import finite_measurement_loss, measurement_loss
from bsi.methods.base import Method, Predictor

__all__ = ["Weight", "edm_weight", "finite_training_loss", "sigmoid_weight", "training_loss"]

# A factor on the loss at each level (float64 in, float64 out).
Weight = Callable[[Float[Tensor, " batch"]], Float[Tensor, " batch"]]


def _log_snr(method: Method, level: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    gain = method.gain(level).clamp(min=1e-30)  # where nothing has been measured, ln SNR is -inf
    return 2 * torch.log(gain) - torch.log(gain + method.c)


def sigmoid_weight(method: Method, bias: float) -> Weight:
    """sigmoid(bias - ln SNR): 1 for noisy levels, falling as 1 / SNR above SNR = e^bias."""
    return lambda level: torch.sigmoid(bias - _log_snr(method, level))


def edm_weight(method: Method, mean: float = 2.4, std: float = 2.4, sigma_data: float = 0.5) -> Weight:
    """EDM's training (Karras et al., 2022), written as a factor on the ELBO's weight."""

    def weight(level: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        l = _log_snr(method, level)
        scale = torch.logaddexp(-l, torch.full_like(l, 2 * math.log(sigma_data)))
        return torch.exp(scale - 0.5 * ((l - mean) / std).square()) / (std * math.sqrt(2 * math.pi))

    return weight


def training_loss(
    method: Method,
    predict: Predictor,
    x: Float[Tensor, "batch *data"],
    t: Float[Tensor, " batch"],
    eps: Float[Tensor, "batch *data"],
    weight: Weight | None = None,
) -> Float[Tensor, " batch"]:
    """2 L_M^inf / n per sample, levels drawn log-uniformly: level = F^-1(t)."""
    loss = 2 / x[0].numel() * measurement_loss(method, predict, x, t, eps)
    return loss if weight is None else loss * weight(method.levels.icdf(t)).to(loss.dtype)


def finite_training_loss(
    method: Method,
    predict: Predictor,
    x: Float[Tensor, "batch *data"],
    grid: Float[Tensor, " levels"],
    i: Integer[Tensor, " batch"],
    eps: Float[Tensor, "batch *data"],
) -> Float[Tensor, " batch"]:
    """2 L_M^k / n per sample, for training on the bound of k steps (Figure "train finite k")."""
    return 2 / x[0].numel() * finite_measurement_loss(method, predict, x, grid, i, eps)
