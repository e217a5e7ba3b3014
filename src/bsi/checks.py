"""Checks of what a user passes to `Model`: the method, its data, and whether the two suit each other."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bsi.errors import DataError, UsageError
from bsi.methods import BFN, BSI, VDM
from bsi.methods.base import Method, level_at, rho_at
from bsi.values import Bins, DataKind, Symbols

SOME = 4096  # number of values that are searched for repetitions
ROWS = 1024  # the same of each column of a table
SYMBOL_NOISE = 20**-0.5  # the distance of two symbols is then 12.6 standard deviations
LEAST_SYMBOL_NOISE = 0.03
PAPERS_RATIO = 1e-3 / (2 / 255)  # noise of the last level / width of a bin, for 8-bit images and alpha_M = 1e6


def as_tensor(data: object) -> Tensor:
    """A tensor of the data: itself, or that of a NumPy array."""
    if isinstance(data, Tensor):
        return data
    if not isinstance(data, np.ndarray):
        raise UsageError(f"data must be a torch.Tensor, got a {type(data).__name__}. Pass torch.as_tensor(data).")
    wide = data.dtype.kind == "u" and data.dtype.itemsize > 1  # torch hardly computes with these types
    return torch.from_numpy(np.array(data, np.int64 if wide else data.dtype.newbyteorder("=")))


def check_finite(data: Float[Tensor, "batch *data"]) -> None:
    if not bool(torch.isfinite(data).all()):
        bad = int((~torch.isfinite(data)).flatten(1).any(1).sum())
        raise DataError(f"data holds NaN or infinity in {bad} of {len(data)} samples. Remove or repair them.")


def check_repeated(data: Float[Tensor, "batch *data"]) -> None:
    """Warn if values of continuous data are repeated: in one column of a table, or anywhere in other data."""
    table = data.ndim == 2
    some = data[:: max(1, len(data) // ROWS)] if table else data.flatten()[:: max(1, data.numel() // SOME), None]
    repeated = (some.sort(dim=0).values.diff(dim=0) == 0).sum(dim=0)
    bad = (repeated > max(2, 0.01 * len(some))).nonzero()[:, 0].tolist()
    if bad:
        where = f" in {'column' if len(bad) == 1 else 'columns'} {', '.join(map(str, bad[:10]))}" if table else ""
        warnings.warn(
            f"{int(repeated.max()) / len(some):.0%} of the values{where} are repeated, so the data has no density, and "
            f"a bound in nats can fall without limit. Describe discrete data with bsi.Bins or bsi.Symbols, leave such "
            f"columns out, or add noise of the width of one unit.",
            stacklevel=4,
        )


def check_resolution(method: Method, resolution: float) -> None:
    """Raise if the noise of the last level is below the `resolution`, the distance between neighboring values of x.

    The latent then rounds to x itself, and the prediction error vanishes. The result grows with the last precision and
    is not a bound on -ln p(x).
    """
    last = 1 / float(rho_at(method, torch.tensor(method.levels.high, dtype=torch.float64)))
    if last < resolution:
        raise UsageError(
            f"the noise of the last level is {last:.2g}, below the resolution of the data, {resolution:.2g}: the bound "
            f"would not be one. Got {method}. Use {_setting(method, resolution, at_most=True)}."
        )


def check_last_level(method: Method, kind: DataKind) -> None:
    """Raise if the last level does not suit the data.

    If its noise is above the width of a bin, most of the bound would be reconstruction; the value that the message
    proposes has the paper's ratio of the two, that of alpha_M = 1e6 for 8-bit images. If its noise is far below that at
    which symbols are certain, most levels would be wasted.
    """
    last = 1 / float(rho_at(method, torch.tensor(method.levels.high, dtype=torch.float64)))
    if isinstance(kind, Bins) and last > kind.width:
        fix = _setting(method, PAPERS_RATIO * kind.width, at_most=False)
        raise UsageError(
            f"the noise of the last level is {last:.2g}, above the width of the {kind.count} bins, {kind.width:.2g}: "
            f"the bound would be mostly reconstruction. Got {method}. Use {fix}."
        )
    if isinstance(kind, Symbols) and last < LEAST_SYMBOL_NOISE:
        fix = _setting(method, SYMBOL_NOISE, at_most=True)
        raise UsageError(
            f"the noise of the last level is {last:.2g}, and symbols are certain long before it: most levels would be "
            f"wasted. Got {method}. Use {fix}."
        )


def _setting(method: Method, noise: float, at_most: bool) -> str:
    """The parameter of a method for which the last level has this noise."""
    level = float(level_at(method, torch.tensor(1 / noise, dtype=torch.float64)))
    down, sign = (math.floor, "<=") if at_most else (math.ceil, ">=")
    match method:
        case BSI(lambda_0=lambda_0):
            return f"alpha_M {sign} {_rounded(level - lambda_0, down)}"
        case BFN():
            opposite, up = (">=", math.ceil) if at_most else ("<=", math.floor)
            return f"sigma_1 {opposite} {_rounded(level**-0.5, up)}"
        case VDM():
            return f"nu_max {sign} {_rounded(level, down)}"
        case _:
            return f"a last level {sign} {_rounded(level, down)}"


def _rounded(value: float, towards: Callable[[float], int]) -> str:
    """Round to two significant digits."""
    digit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{towards(value / digit) * digit:.2g}"


def check_method(method: object) -> None:
    if isinstance(method, type):
        raise UsageError(f"a method must be an object, not its class: got {method.__name__}. Pass {method.__name__}().")
    if not isinstance(method, Method):
        raise UsageError(f"a method must be bsi.BSI(), bsi.BFN(), bsi.VDM() or like them, got {method!r}")
