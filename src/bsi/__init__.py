"""Bayesian Sample Inference: generative models with honest likelihoods.

A sample x is an unknown. A belief about it, a Gaussian with mean mu and precision lambda, is sharpened by noisy
measurements of what a network predicts. `bsi.Model` is the object most users hold; the functions it delegates to take
`(method, predict, ...)` and are importable from the modules named after what they do.

Importing this package imports no torch: names are resolved when first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bsi.methods import BFN as BFN
    from bsi.methods import BSI as BSI
    from bsi.methods import VDM as VDM
    from bsi.model import Model as Model
    from bsi.recipe import Recipe as Recipe
    from bsi.runtime.export import load as load
    from bsi.sampler import Sampler as Sampler
    from bsi.training.train import train as train
    from bsi.values import Bins as Bins
    from bsi.values import Standardize as Standardize

__version__ = "0.1.0"

_HOME = {
    "BSI": "bsi.methods",
    "BFN": "bsi.methods",
    "VDM": "bsi.methods",
    "Bins": "bsi.values",
    "Standardize": "bsi.values",
    "Model": "bsi.model",
    "Recipe": "bsi.recipe",
    "Sampler": "bsi.sampler",
    "load": "bsi.runtime.export",
    "train": "bsi.training.train",
}

_MODULES = ("recipes",)

__all__ = [*sorted(_HOME), *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _MODULES:
        return import_module(f"bsi.{name}")
    raise AttributeError(f"module 'bsi' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
