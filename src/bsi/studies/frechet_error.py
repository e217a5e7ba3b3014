"""The standard error of a Fréchet distance from having drawn these samples and not others.

For fixed real moments the distance is a smooth function of the samples' mean m_1 and covariance S_1,

    d^2 = |m_1 - m_2|^2 + tr (S_1 + S_2) - 2 tr (S_2^1/2 S_1 S_2^1/2)^1/2,

and so, to first order in 1 / n, an average over the samples of their influence (the delta method):

    psi(x) = 2 (m_1 - m_2) . (x - m_1) + (x - m_1)^T G (x - m_1) - tr (G S_1),
    G      = I - S_2^1/2 (S_2^1/2 S_1 S_2^1/2)^-1/2 S_2^1/2.

Its variance over n is that of the distance. The bias of a finite number of samples, of second order, is not in it:
distances are compared at equal numbers.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from bsi.metrics import Moments

__all__ = ["frechet_error"]


def frechet_error(samples: Float[Tensor, "n dim"], real: Moments) -> float:
    """The standard error of frechet_distance(Moments.of(samples), real)."""
    x = samples.double()
    mean = x.mean(0)
    centred = x - mean
    covariance = centred.T @ centred / (len(x) - 1)
    gradient = torch.eye(len(mean), dtype=x.dtype, device=x.device) - _transport(covariance, real.covariance)
    influence = 2 * centred @ (mean - real.mean) + (centred @ gradient * centred).sum(1)
    return float(influence.std()) / math.sqrt(len(x))


def _transport(a: Float64[Tensor, "dim dim"], b: Float64[Tensor, "dim dim"]) -> Float64[Tensor, "dim dim"]:
    """b^1/2 (b^1/2 a b^1/2)^-1/2 b^1/2: the linear map that takes N(0, a) to N(0, b)."""
    values, vectors = torch.linalg.eigh(b)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    product = root @ a @ root
    values, vectors = torch.linalg.eigh((product + product.T) / 2)
    present = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
    inner = vectors[:, present] / values[present].sqrt().sqrt()
    half = root @ inner
    return half @ half.T
