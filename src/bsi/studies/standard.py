"""The measurements that most studies ask for, at the settings of their scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bsi.methods import BSI
from bsi.recipe import Recipe
from bsi.sampler import Sampler, default_solver
from bsi.studies.job import Bound, Quality
from bsi.studies.scale import Scale

__all__ = [
    "OURS",
    "bound",
    "bounds",
    "bsi_of",
    "default_quality",
    "our_solver",
    "qualities",
    "quality",
    "seeded",
    "solvers_said",
]


# Our default sampler; `solvers_said` has the solver's name.
OURS = f"our solver on {Sampler.grid} in {Sampler.steps}"


def seeded(recipe: Callable[[str], Recipe], method: str, seeds: Sequence[int]) -> list[Recipe]:
    """The same recipe from several seeds: of the weights, the order of images, the levels and the noise."""
    return [replace(recipe(method), seed=seed) for seed in seeds]


def bsi_of(recipe: Recipe) -> BSI:
    """The method of a recipe for BSI, to be varied."""
    assert isinstance(recipe.method, BSI), recipe.name
    return recipe.method


def bound(scale: Scale, network: Recipe, finite_k: int | None = None) -> Bound:
    return Bound(network, scale.measured.levels, scale.measured.recon, finite_k)


def bounds(scale: Scale, networks: Sequence[Recipe]) -> list[Bound]:
    return [bound(scale, network) for network in networks]


def quality(scale: Scale, network: Recipe, steps: int, solver: str = "posterior", grid: str = "paper") -> Quality:
    """By default with the paper's sampler."""
    return Quality(network, scale.metric, scale.drawn.num, steps, solver, grid)


def qualities(scale: Scale, networks: Sequence[Recipe], steps: int) -> list[Quality]:
    return [quality(scale, network, steps) for network in networks]


def default_quality(scale: Scale, network: Recipe) -> Quality:
    """With our default sampler."""
    return quality(scale, network, Sampler.steps, our_solver(network), Sampler.grid)


def our_solver(network: Recipe) -> str:
    """That of its method."""
    return default_solver(network.method)


def solvers_said(recipe: Callable[[str], Recipe], methods: Sequence[str]) -> str:
    """Our solvers by name, below a table: they may be others when it is read."""
    return f"Our solver is {', '.join(f'{our_solver(recipe(method))} for {method.upper()}' for method in methods)}."
