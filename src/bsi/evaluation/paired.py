"""The difference of two bounds from common random numbers: what both have of the noise cancels, and its error too."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bsi.errors import UsageError
from bsi.evaluation.bound import Evaluation, joined
from bsi.evaluation.points import Spread

__all__ = ["Difference", "difference"]


@dataclass(frozen=True)
class Difference:
    """The bound of one subject less that of another, in bits per dimension, with the error of the difference.

    `unpaired_error` is what the Monte Carlo error would be with noise of their own.
    """

    bits_per_dim: float
    monte_carlo_error: float
    degrees_of_freedom: float
    data_error: float
    data_resolved: bool
    unpaired_error: float


def difference(a: Evaluation, b: Evaluation) -> Difference:
    """a - b from common random numbers: both evaluated by one procedure, on the same samples."""
    if a.procedure != b.procedure or a.n != b.n or len(a.prior) != len(b.prior) or a.rounds != b.rounds:
        raise UsageError(
            "a paired difference needs one procedure (its seed too, and no target error) on the same samples: got "
            f"{a.procedure} on {len(a.prior)} samples and {b.procedure} on {len(b.prior)}"
        )
    measured, decoded = a.measurement.less(b.measurement), a.reconstruction.less(b.reconstruction)
    elbo = joined(measured, decoded, a.prior - b.prior, a.n, a.log_determinant - b.log_determinant)
    return Difference(
        bits_per_dim=elbo.bits_per_dim,
        monte_carlo_error=elbo.monte_carlo_error,
        degrees_of_freedom=Spread.degrees_of_freedom(measured.spread, decoded.spread),
        data_error=elbo.data_error,
        data_resolved=elbo.data_resolved,
        unpaired_error=math.hypot(a.elbo.monte_carlo_error, b.elbo.monte_carlo_error),
    )
