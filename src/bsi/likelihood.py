"""The decoders: the probability of binned data, or the density of continuous data, given the last prediction.

Data that is stored as integers 0 .. count - 1 (8-bit images, 16-bit audio, 17 gray levels) has a probability, not a
density. The decoder is a discretized Normal (Appendix "ELBO in Bits per Dimension"): the mass that N(x_hat, 1 /
alpha) puts on the bin of x, where the first bin reaches to -inf and the last to +inf,

    N'(x_j | x_hat, alpha) = Phi(r_j | x_hat, alpha) - Phi(l_j | x_hat, alpha),

evaluated in log space. `categorical_normal` is the other published decoder, VDM's: a softmax over the bins' centers.
Without bins, data is continuous, the decoder a plain Normal and the unit nats; `Standardize` keeps the units of the
data.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from bsi.errors import UsageError
from bsi.gaussian import Data, PerSample, squared_norm, sum_over_data
from bsi.values import Bins

Index = Integer[Tensor, "batch *data"]

# Gauss-Legendre nodes and weights on [-1, 1]: ten points integrate exp(-m u - u^2 / 2) over |m u| <= 1/2 to rounding.
_NODES = (0.14887433898163122, 0.4333953941292472, 0.6794095682990244, 0.8650633666889845, 0.9739065285171717)
_WEIGHTS = (0.29552422471475287, 0.26926671930999635, 0.21908636251598204, 0.1494513491505806, 0.06667134430868814)


def _log_mass(a: Float[Tensor, "*shape"], width: Float[Tensor, "*#shape"]) -> Float[Tensor, "*shape"]:
    """ln (Phi(a + width) - Phi(a)) for the standard Normal and a finite interval, accurate to rounding in float64.

    A difference of CDFs loses all digits in the tails, and a difference of log-CDFs loses digits for narrow intervals.
    So wide intervals use the difference of log-CDFs, and narrow ones (relative to the scale on which the density
    changes) a quadrature around the middle.
    """
    # By symmetry the interval may be taken left of 0, where the CDF is small and its logarithm accurate.
    a = torch.where(a + 0.5 * width > 0, -(a + width), a)
    middle, half = a + 0.5 * width, 0.5 * width
    log_right, log_left = torch.special.log_ndtr(a + width), torch.special.log_ndtr(a)
    narrow = half * torch.clamp(middle.abs(), min=1.0) <= 0.5
    gap = torch.where(narrow, torch.ones_like(a), log_right - log_left)  # > 0; the other branch must stay finite
    by_difference = log_right + torch.log1p(-torch.exp(-gap))  # gap > ln 2 here: log1p keeps the digits of ln p near 0
    safe = torch.where(narrow, middle, torch.zeros_like(a))
    mean = torch.zeros_like(a)
    for node, weight in zip(_NODES, _WEIGHTS, strict=True):
        u = half * node
        mean = mean + weight * torch.exp(-0.5 * u.square()) * torch.cosh(safe * u)
    by_quadrature = torch.log(mean) + torch.log(width) - 0.5 * safe.square() - 0.5 * math.log(2 * math.pi)
    return torch.where(narrow, by_quadrature, by_difference)


def _check_decoder(x: Tensor, x_hat: Tensor, precision: float | Tensor) -> None:
    if x.shape != x_hat.shape:
        raise UsageError(f"the data and its prediction need one shape: got {tuple(x.shape)} and {tuple(x_hat.shape)}")
    if isinstance(precision, float | int) and not 0 < precision < math.inf:
        raise UsageError(f"a decoder's precision is positive and finite: got {precision}. The paper uses 2e6.")


def discretized_normal(bins: Bins, index: Index, x_hat: Data, precision: float | Data) -> PerSample:
    """ln N'(x | x_hat, precision), summed over each sample: nats, float64, memory independent of `count`.

    There is one precision, or one for each value.
    """
    _check_decoder(index, x_hat, precision)
    scale = torch.sqrt(torch.as_tensor(precision, dtype=torch.float64, device=x_hat.device))
    center = bins.low + index.double() * bins.width
    left = (center - 0.5 * bins.width - x_hat.double()) * scale
    right = (center + 0.5 * bins.width - x_hat.double()) * scale
    inner = _log_mass(left, bins.width * scale)
    log_p = torch.where(index == 0, torch.special.log_ndtr(right), inner)
    log_p = torch.where(index == bins.count - 1, torch.special.log_ndtr(-left), log_p)
    return sum_over_data(log_p)


def categorical_normal(bins: Bins, index: Index, x_hat: Data, precision: float) -> PerSample:
    """VDM's published decoder: a softmax over the bins' centers of the Normal's log density, in nats, float64.

    Bins further than `reach` from the one nearest to x_hat are below rounding, so the sum runs over a fixed window and
    memory does not grow with `count`.
    """
    _check_decoder(index, x_hat, precision)
    reach = min(bins.count - 1, math.ceil(math.sqrt(2 * 45 / precision) / bins.width) + 1)
    x_hat = x_hat.double()
    nearest = torch.round((x_hat - bins.low) / bins.width).clamp(0, bins.count - 1)
    best = -0.5 * precision * (bins.low + nearest * bins.width - x_hat).square()
    total = torch.zeros_like(x_hat)
    for offset in range(-reach, reach + 1):
        bin_ = nearest + offset
        log_weight = -0.5 * precision * (bins.low + bin_ * bins.width - x_hat).square() - best
        # Masked before exp: a bin that does not exist may be nearer, and its gradient inf * 0.
        log_weight = torch.where((bin_ >= 0) & (bin_ < bins.count), log_weight, -math.inf)
        total = total + torch.exp(log_weight)
    own = -0.5 * precision * (bins.low + index.double() * bins.width - x_hat).square()
    return sum_over_data(own - best - torch.log(total))


def normal(x: Data, x_hat: Data, precision: float) -> PerSample:
    """ln N(x | x_hat, 1 / precision): the decoder of continuous data, in nats, float64."""
    _check_decoder(x, x_hat, precision)
    n = x[0].numel()
    distance = squared_norm(x.double() - x_hat.double())
    return -0.5 * precision * distance + 0.5 * n * (math.log(precision) - math.log(2 * math.pi))


def bits_per_dim(nats: Float[Tensor, "*shape"], n: int) -> Float[Tensor, "*shape"]:
    """Nats per sample of n dimensions to bits per dimension."""
    return nats / (n * math.log(2))
