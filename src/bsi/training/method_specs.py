"""The three methods by their parameters: plain values that a recipe holds and a run folder stores, free of torch.

The defaults are the paper's; a recipe may have others, as that of the digits does.

`bsi.runtime.dataset.build_method` makes the method of one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["METHODS", "BFNSpec", "BSISpec", "MethodName", "MethodSpec", "VDMSpec"]

MethodName = Literal["bsi", "bfn", "vdm"]


@dataclass(frozen=True)
class BSISpec:
    """`bsi.BSI` by its parameters."""

    lambda_0: float = 1e-2
    gamma_0: float | None = None
    """lambda_0 if left out, as in the paper; inf for a belief that begins at 0."""
    alpha_M: float = 1e6
    alpha_R: float | None = None
    """2 alpha_M if left out, as in the paper; alpha_M for data without bins."""


@dataclass(frozen=True)
class BFNSpec:
    """`bsi.BFN` by its parameters."""

    sigma_1: float = 1e-3
    clips: bool = True


@dataclass(frozen=True)
class VDMSpec:
    """`bsi.VDM` by its parameters."""

    nu_min: float = math.exp(-5)
    nu_max: float = math.exp(13.3)
    decoder: Literal["cdf", "softmax"] = "softmax"


MethodSpec = BSISpec | BFNSpec | VDMSpec

METHODS: dict[MethodName, type[BSISpec] | type[BFNSpec] | type[VDMSpec]] = {
    "bsi": BSISpec,
    "bfn": BFNSpec,
    "vdm": VDMSpec,
}
