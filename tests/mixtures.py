"""Data whose posterior is known: what likelihoods and conditioning are tested against."""

import torch
from torch import Tensor

from bsi.oracle import Mixture


def at(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mixture() -> Mixture:
    """Three components in the plane, one of them not along the axes."""
    return Mixture.general(
        at(0.3, 0.4, 0.3),
        torch.stack([at(-1.0, 0.5), at(0.8, 0.9), at(0.2, -1.0)]),
        torch.stack(
            [torch.diag(at(0.05, 0.2)), torch.stack([at(0.1, 0.06), at(0.06, 0.1)]), torch.diag(at(0.04, 0.02))]
        ),
    )
