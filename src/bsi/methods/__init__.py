"""The methods: one row of the paper's table "Central structures" per file, and their registry. Imports no torch.

Recipes, run folders and exports hold a method by its key in `METHODS` and its fields. A new method is a frozen
dataclass with the attributes of `Method`, and a call of `register`.
"""

import math

from bsi.errors import UsageError
from bsi.methods.base import Decoder, Method, Parametrization, Predictor, level_at, rho_at
from bsi.methods.bfn import BFN
from bsi.methods.bsi import BSI
from bsi.methods.vdm import VDM
from bsi.values import Bins, DataKind, Symbols

__all__ = [
    "BFN",
    "BSI",
    "METHODS",
    "VDM",
    "Decoder",
    "Method",
    "Parametrization",
    "Predictor",
    "check_last_level",
    "check_resolution",
    "register",
]

METHODS: dict[str, type] = {"bsi": BSI, "bfn": BFN, "vdm": VDM}

SYMBOL_NOISE = 20**-0.5  # the distance of two symbols is then 12.6 standard deviations
LEAST_SYMBOL_NOISE = 0.03
PAPERS_RATIO = 1e-3 / (2 / 255)  # noise of the last level / width of a bin, for 8-bit images and alpha_M = 1e6


def register(name: str, method: type) -> None:
    """Register a method under a name, so that recipes, run folders and exports can store it."""
    if METHODS.setdefault(name, method) is not method:
        raise UsageError(f"the method name {name!r} is taken by {METHODS[name].__name__}. Choose another name.")


def check_resolution(method: Method, resolution: float) -> None:
    """Raise if the noise of the last level is below the `resolution`, the distance between neighboring values of x.

    The latent then rounds to x itself, and the prediction error vanishes. The result grows with the last precision and
    is not a bound on -ln p(x).
    """
    if last_noise(method) < resolution:
        problem = f"below the resolution of the data, {resolution:.2g}: the bound would not be one"
        raise UsageError(_message(method, problem, resolution, at_most=True))


def check_last_level(method: Method, kind: DataKind) -> None:
    """Raise if the last level does not suit the data.

    If its noise is above the width of a bin, most of the bound would be reconstruction; the value that the message
    proposes has the paper's ratio of the two, that of alpha_M = 1e6 for 8-bit images. If its noise is far below that at
    which symbols are certain, most levels would be wasted.
    """
    if isinstance(kind, Bins) and last_noise(method) > kind.width:
        problem = (
            f"above the width of the {kind.count} bins, {kind.width:.2g}: the bound would be mostly reconstruction"
        )
        raise UsageError(_message(method, problem, PAPERS_RATIO * kind.width, at_most=False))
    if isinstance(kind, Symbols) and last_noise(method) < LEAST_SYMBOL_NOISE:
        problem = "and symbols are certain long before it: most levels would be wasted"
        raise UsageError(_message(method, problem, SYMBOL_NOISE, at_most=True))


def last_noise(method: Method) -> float:
    """1 / rho: the noise of the last latent in units of x."""
    import torch

    return 1 / float(rho_at(method, torch.tensor(method.levels.high, dtype=torch.float64)))


def _message(method: Method, problem: str, noise: float, at_most: bool) -> str:
    """The message of an error, with the parameter for which the last level has this noise, to two digits."""
    import torch

    level = float(level_at(method, torch.tensor(1 / noise, dtype=torch.float64)))
    name, value = "a last level", level
    match method:
        case BSI():
            name, value = "alpha_M", level - method.lambda_0
        case BFN():
            name, value, at_most = "sigma_1", level**-0.5, not at_most
        case VDM():
            name = "nu_max"
    if not 0 < value < math.inf:
        return f"the noise of the last level is {last_noise(method):.2g}, {problem}. Got {method}. Scale the data."
    digit = 10.0 ** (math.floor(math.log10(value)) - 1)
    rounded = (math.floor if at_most else math.ceil)(value / digit) * digit
    return (
        f"the noise of the last level is {last_noise(method):.2g}, {problem}. Got {method}. "
        f"Use {name} {'<=' if at_most else '>='} {rounded:.2g}."
    )
