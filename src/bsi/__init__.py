"""Bayesian Sample Inference: generative models with likelihoods and their errors.

A sample x is unknown. A belief about it, a Gaussian with mean mu and precision lambda, is updated with noisy
measurements of a network's prediction. `bsi.Model` is the object that most users hold; the functions that it calls
take `(method, predict, ...)` and live in modules named after what they do.

Importing this package imports no torch: names and modules are loaded when first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bsi import backbones as backbones
    from bsi import conditioning as conditioning
    from bsi import data as data
    from bsi import methods as methods
    from bsi import metrics as metrics
    from bsi import recipes as recipes
    from bsi import sampling as sampling
    from bsi import solvers as solvers
    from bsi.methods import BFN as BFN
    from bsi.methods import BSI as BSI
    from bsi.methods import VDM as VDM
    from bsi.model import Model as Model
    from bsi.recipe import Recipe as Recipe
    from bsi.runtime.export import load as load
    from bsi.sampler import Sampler as Sampler
    from bsi.training.train import Run as Run
    from bsi.training.train import distill as distill
    from bsi.training.train import train as train
    from bsi.values import Bins as Bins
    from bsi.values import Standardize as Standardize
    from bsi.values import Symbols as Symbols

__version__ = "0.1.0"

_HOME = {
    "BSI": "bsi.methods",
    "BFN": "bsi.methods",
    "VDM": "bsi.methods",
    "Bins": "bsi.values",
    "Standardize": "bsi.values",
    "Symbols": "bsi.values",
    "Model": "bsi.model",
    "Recipe": "bsi.recipe",
    "Run": "bsi.training.train",
    "Sampler": "bsi.sampler",
    "distill": "bsi.training.train",
    "load": "bsi.runtime.export",
    "train": "bsi.training.train",
}

_MODULES = ("backbones", "conditioning", "data", "methods", "metrics", "recipes", "sampling", "solvers")

__all__ = [*sorted(_HOME), *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _MODULES:
        return import_module(f"bsi.{name}")
    raise AttributeError(f"module 'bsi' has no attribute {name!r}. It has {', '.join(__all__)}.")


def __dir__() -> list[str]:
    return sorted(__all__)
