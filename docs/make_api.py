"""Write docs/api.md: every public name with the first sentence of its docstring.

python docs/make_api.py
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

API = Path(__file__).with_name("api.md")

SECTIONS = {
    "Model": ["bsi.model"],
    "Methods": ["bsi.methods.base", "bsi.methods.bsi", "bsi.methods.bfn", "bsi.methods.vdm"],
    "Data as numbers": ["bsi.values", "bsi.likelihood"],
    "Training and bounds": [
        "bsi.denoiser", "bsi.objective", "bsi.elbo", "bsi.bound", "bsi.latents", "bsi.levels", "bsi.gaussian",
    ],
    "Sampling": [
        "bsi.sampler", "bsi.sampling", "bsi.solvers", "bsi.grids",
        "bsi.conditioning", "bsi.flow", "bsi.rng", "bsi.brownian",
    ],
    "Exact predictors and other formulations": ["bsi.adapters", "bsi.oracle", "bsi.formulations"],
    "Trainer": ["bsi.recipe", "bsi.training.train", "bsi.runtime.export", "bsi.runtime.autoencoders"],
    "Recipes": ["bsi.recipes"],
    "Backbones": ["bsi.backbones"],
    "Data and metrics": ["bsi.data.store", "bsi.metrics.quality", "bsi.metrics.frechet"],
    "Reports and errors": ["bsi.report", "bsi.errors"],
}  # fmt: skip
HEAD = """# API

The public names with the first sentence of their documentation. Most programs need `bsi.Model` and a method. The
mathematical functions take `(method, predict, ...)`, and their noise as an argument. The [reference](reference.md)
on the documentation site has signatures and complete docstrings.

<!-- Written by `python docs/make_api.py`. -->
"""


def api() -> str:
    """The page."""
    parts, seen = [HEAD], set()
    for title, modules in SECTIONS.items():
        rows = []
        for name in modules:
            module = importlib.import_module(name)
            for public in getattr(module, "__all__", None) or _defined(module):
                value = getattr(module, public)
                if id(value) not in seen and (summary := _summary(value)):
                    seen.add(id(value))
                    rows.append(f"| `{_shortest(name, public, value)}` | {summary} |")
                    if name == "bsi.model":
                        rows += _methods(value, public)
        parts.append("\n".join([f"## {title}\n", "| name | |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def _defined(module: ModuleType) -> list[str]:
    """The public classes and functions that a module defines, in the order of its file."""
    here = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return [name for name in here if not name.startswith("_")]


def _shortest(module: str, name: str, value: object) -> str:
    """`bsi.Model` rather than `bsi.model.Model`, for names that the package itself has."""
    import bsi

    return f"bsi.{name}" if name in bsi.__all__ and getattr(bsi, name) is value else f"{module}.{name}"


def _methods(cls: object, name: str) -> list[str]:
    """The public methods of a class and of its base classes in this package."""
    ours = [base for base in inspect.getmro(cls) if base.__module__.startswith("bsi.")] if inspect.isclass(cls) else []
    members = {key: value for base in reversed(ours) for key, value in vars(base).items()}
    members = {key: getattr(value, "__func__", value) for key, value in members.items()}
    public = {key: value for key, value in members.items() if not key.startswith("_") and callable(value)}
    return [f"| `bsi.{name}.{key}` | {_summary(value)} |" for key, value in public.items() if _summary(value)]


def _summary(value: object) -> str:
    """The first sentence of the docstring of one of our classes or functions, in one line."""
    ours = (inspect.isclass(value) or inspect.isroutine(value)) and value.__module__.startswith("bsi.")
    if not ours or value.__name__.startswith("_"):
        return ""
    text = inspect.cleandoc(value.__doc__ or "")
    if text.startswith(f"{value.__name__}("):  # written by dataclass: the module describes the class
        text = inspect.cleandoc(importlib.import_module(value.__module__).__doc__ or "")
    text = text.split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=\w|[)\]`*])\. (?=[A-Z`])", text)[0].rstrip(".:").replace("|", "\\|")


if __name__ == "__main__":
    API.write_text(api(), encoding="utf-8")
