"""Bayesian Sample Inference: generative models with likelihoods and their errors.

A sample x is unknown. A belief about it, a Gaussian with mean mu and precision lambda, is updated with noisy
measurements of a network's prediction. `bsi.Model` is the object that most users hold; the functions that it calls
take `(method, predict, ...)` and live in modules named after what they do.

Importing this package imports no torch: names and modules are loaded when first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bsi import backbones, conditioning, data, methods, metrics, recipes, sampling, solvers
    from bsi.methods import BFN, BSI, VDM
    from bsi.model import Model
    from bsi.recipe import Recipe
    from bsi.runtime.export import load
    from bsi.sampler import Sampler
    from bsi.training.train import Run, distill, train
    from bsi.values import Bins, Standardize, Symbols

__version__ = "0.1.0"

__all__ = [
    "BFN", "BSI", "VDM", "Bins", "Model", "Recipe", "Run", "Sampler", "Standardize", "Symbols", "__version__",
    "backbones", "conditioning", "data", "distill", "load", "methods", "metrics", "recipes", "sampling", "solvers",
    "train",
]  # fmt: skip

_HOMES = {
    "BFN": "methods", "BSI": "methods", "VDM": "methods", "Model": "model", "Recipe": "recipe", "Sampler": "sampler",
    "Bins": "values", "Standardize": "values", "Symbols": "values", "load": "runtime.export",
    "Run": "training.train", "distill": "training.train", "train": "training.train",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'bsi' has no attribute {name!r}. It has {', '.join(__all__)}.")
    return getattr(import_module(f"bsi.{_HOMES[name]}"), name) if name in _HOMES else import_module(f"bsi.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
