"""The training loss, Algorithm "Estimating the BSI training loss": 2 L_M / n for all three methods.

The reconstruction term is left out, as in the paper, because the last level almost determines the sample. A weight
over the level trades likelihood for sample quality; the default, 1, is the ELBO's. Weights are functions of

    l = ln SNR = ln (signal / noise)^2,        SNR = alpha^2 / (alpha + c),

so that a weight has the same meaning for all three methods (Kingma and Gao, 2023):

    sigmoid(b - l)                              small at levels where only invisible details remain to be learned
    N(l; 2.4, 2.4^2) (e^-l + 1/4)               the combined effect of EDM's noise levels and loss weights

Levels can be drawn in proportion to the expected loss, w / (e^l + 4): the weighted loss of the best linear predictor of
data with standard deviation 1/2. For EDM's weight, and c small compared with alpha, that is the normal distribution
that EDM draws from. The loss has the same expectation and less variance.

An autoencoder is trained on the error of its reconstruction, in twice the nats per dimension of a Laplace decoder whose
scale is the mean error b of the image, 2 (1 + ln(2 b / width)) for bins of this width: images that are hard to
reconstruct do not outweigh the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from bsi.consistency import consistency_loss
from bsi.elbo import finite_measurement_loss, measurement_loss
from bsi.gaussian import Data, PerSample
from bsi.grids import paper_grid
from bsi.levels import Fitted, Proposal
from bsi.methods.base import Method, Predictor

# A factor on the loss at each level (float64 in, float64 out).
Weight = Callable[[PerSample], PerSample]

SIGMA_DATA = 0.5  # EDM's, of images in [-1, 1]
POINTS = 513  # number of points of the tabulated density of levels
PIXEL = 2 / 255  # the width of a bin of 8-bit images; errors far below it make no difference
EVEN = 0.05  # fraction of draws that is log-uniform for any weight, since sampling visits all levels


def _log_snr(method: Method, level: PerSample) -> PerSample:
    gain = method.gain(level).clamp(min=1e-30)  # at gain 0, ln SNR is -inf
    return 2 * torch.log(gain) - torch.log(gain + method.c)


def sigmoid_weight(method: Method, bias: float) -> Weight:
    """sigmoid(bias - ln SNR): 1 for noisy levels, falling as 1 / SNR above SNR = e^bias."""
    return lambda level: torch.sigmoid(bias - _log_snr(method, level))


def edm_weight(method: Method, mean: float = 2.4, std: float = 2.4) -> Weight:
    """EDM's training (Karras et al., 2022), written as a factor on the ELBO's weight."""

    def weight(level: PerSample) -> PerSample:
        l = _log_snr(method, level)
        scale = torch.logaddexp(-l, torch.full_like(l, 2 * math.log(SIGMA_DATA)))
        return torch.exp(scale - 0.5 * ((l - mean) / std).square()) / (std * math.sqrt(2 * math.pi))

    return weight


def expected_levels(method: Method, weight: Weight | None = None) -> Fitted:
    """A density of levels: 95 % proportional to the weighted loss of the best linear predictor, 5 % log-uniform."""
    levels = method.levels
    u = torch.linspace(math.log(levels.low), math.log(levels.high), POINTS, dtype=torch.float64)
    level = torch.exp(u).clamp(levels.low, levels.high)
    error = 1 / (torch.exp(_log_snr(method, level)) + SIGMA_DATA**-2)
    mass = error * level * (1.0 if weight is None else weight(level))  # of d ln(level)
    density = (1 - EVEN) * mass / mass.mean() + EVEN
    return Fitted(levels.low, levels.high, tuple(density.tolist()))


def training_loss(
    method: Method,
    predict: Predictor,
    x: Data,
    t: PerSample,
    eps: Data,
    weight: Weight | None = None,
    proposal: Proposal | None = None,
) -> PerSample:
    """2 L_M^inf / n per sample at level = F^-1(t): log-uniform, or drawn from a proposal and divided by its density."""
    loss = 2 / x[0].numel() * measurement_loss(method, predict, x, t, eps, proposal)
    if weight is None:
        return loss
    proposal = method.levels if proposal is None else proposal
    return loss * weight(proposal.icdf(t)).to(loss.dtype)


def reconstruction_error(x: Data, x_hat: Data) -> PerSample:
    """The loss of an autoencoder for each image: see above."""
    error = (x - x_hat).abs().flatten(1).mean(1)
    return 2 * (1 + torch.log(2 * error / PIXEL + 0.5))


def finite_training_loss(
    method: Method, predict: Predictor, x: Data, grid: Float[Tensor, " levels"], i: Integer[Tensor, " batch"], eps: Data
) -> PerSample:
    """2 L_M^k / n per sample, for training on the bound of k steps (Figure "train finite k")."""
    return 2 / x[0].numel() * finite_measurement_loss(method, predict, x, grid, i, eps)


class Loss:
    """The loss of a batch in training, with its tables on the device: L_M^inf, L_M^k, or that of another objective."""

    def __init__(
        self,
        method: Method,
        device: torch.device,
        weight: str = "elbo",
        bias: float = 2.0,
        expected: bool = False,
        finite_k: int | None = None,
        consistency: bool = False,
    ) -> None:
        weights = {"sigmoid": sigmoid_weight(method, bias), "edm": edm_weight(method)}
        self.method, self.weight, self.consistency = method, weights.get(weight), consistency
        self.reconstruction = weight == "reconstruction"
        self.levels: Proposal = expected_levels(method, self.weight).to(device) if expected else method.levels
        self.grid = None if finite_k is None else paper_grid(method, finite_k).to(device)
        self.gap = torch.zeros((), device=device)  # of consistency tuning, set by the trainer
        self.terms = 1 if self.weight is None else 2  # the length of `sums`

    def __call__(self, predict: Predictor, x: Data, t: PerSample, eps: Data) -> PerSample:
        """The loss of each sample at t, which is in [0, 1) and stratified over the batch."""
        if self.consistency:
            return consistency_loss(self.method, predict, x, t, eps, self.gap)
        if self.reconstruction:
            return reconstruction_error(x, predict(x, self.level(t)))
        if self.grid is None:
            return training_loss(self.method, predict, x, t, eps, self.weight, self.levels)
        return finite_training_loss(self.method, predict, x, self.grid, _measurement(self.grid, t), eps)

    def level(self, t: PerSample) -> PerSample:
        """The level of each t of a batch."""
        return self.levels.icdf(t) if self.grid is None else self.grid[_measurement(self.grid, t)]

    def sums(self, losses: PerSample, t: PerSample) -> Float[Tensor, " terms"]:
        """The sum of a batch's losses; if the loss is weighted, also the sum of the losses without the weight."""
        losses = losses.detach()
        if self.weight is None:
            return losses.sum().reshape(1)
        weight = self.weight(self.level(t)).clamp(min=1e-300)  # EDM's is zero at level 0
        return torch.stack([losses.sum(), (losses / weight).sum().to(losses.dtype)])


def _measurement(grid: Float[Tensor, " levels"], t: PerSample) -> Integer[Tensor, " batch"]:
    """The index of a measurement on the grid for each t."""
    k = len(grid) - 1
    return (t * k).long().clamp(max=k - 1)
