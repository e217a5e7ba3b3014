"""What training minimises, Algorithm "Estimating the BSI training loss": 2 L_M / n for all three methods.

The reconstruction term is left out, as in the paper: by the last level the sample is all but determined. A weight
over the level trades likelihood for sample quality; the default, 1, is the ELBO's.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float, Integer
from torch import Tensor

from bsi.elbo import finite_measurement_loss, measurement_loss
from bsi.methods.base import Method, Predictor

__all__ = ["Weight", "finite_training_loss", "training_loss"]

# A factor on the loss at each level (float64 in, float64 out).
Weight = Callable[[Float[Tensor, " batch"]], Float[Tensor, " batch"]]


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
