"""Recipes: functions that return a complete `Recipe`, each with its evidence in its docstring. Imports no torch.

    recipe = bsi.recipes.cifar10_unet(method="bsi")
    recipe = dataclasses.replace(recipe, seed=1)

A docstring has a summary line and the fields `Command`, `Hardware`, `Time`, `Expected` and `Paper`, the last two in
bits per dimension and FID. "Not yet run" means that the command was not run to its end, and no value of ours exists.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from bsi.errors import UsageError
from bsi.recipe import Recipe
from bsi.recipes.images import (
    cifar10_20min_bpd,
    cifar10_20min_fid,
    cifar10_dit_mini,
    cifar10_dit_s,
    cifar10_unet,
    folder,
    folder_mini,
    imagenet32_dit_l2,
    imagenet32_unet,
    imagenet64_dit_l4,
)
from bsi.recipes.others import (
    arrays,
    audio_mini,
    binary_digits,
    digits,
    mnist_binary,
    series_mini,
    table_mini,
    text8,
    text_mini,
)

FUNCTIONS = (
    digits, binary_digits, text_mini, cifar10_unet, cifar10_dit_s, cifar10_dit_mini, cifar10_20min_bpd,
    cifar10_20min_fid, imagenet32_dit_l2, imagenet64_dit_l4, imagenet32_unet, mnist_binary, text8, folder, folder_mini,
    arrays, table_mini, series_mini, audio_mini,
)  # fmt: skip
RECIPES: dict[str, Callable[[str], Recipe]] = {function.__name__.replace("_", "-"): function for function in FUNCTIONS}

__all__ = [
    "RECIPES", "Evidence", "arrays", "audio_mini", "binary_digits", "cifar10_20min_bpd", "cifar10_20min_fid",
    "cifar10_dit_mini", "cifar10_dit_s", "cifar10_unet", "digits", "evidence", "folder", "folder_mini",
    "imagenet32_dit_l2", "imagenet32_unet", "imagenet64_dit_l4", "mnist_binary", "named_recipe", "series_mini",
    "table_mini", "text8", "text_mini",
]  # fmt: skip


@dataclass(frozen=True)
class Evidence:
    """The evidence in a recipe's docstring."""

    summary: str
    command: str
    hardware: str
    time: str
    expected: str
    paper: str


def named_recipe(name: str, method: str = "bsi") -> Recipe:
    """The recipe of that name, for one of the three methods."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"unknown recipe {name!r}. {hint}Known: {', '.join(RECIPES)}.")
    return RECIPES[name](method)


def evidence(name: str) -> Evidence:
    """The lines `Command: ...` to `Paper: ...` of a recipe's docstring."""
    lines = [line.strip() for line in (RECIPES[name].__doc__ or "").splitlines()]
    found: dict[str, str] = {"summary": lines[0]}
    key = ""
    for line in lines[1:]:
        head, colon, rest = line.partition(": ")
        if colon and head in ("Command", "Hardware", "Time", "Expected", "Paper"):
            key = head.lower()
            found[key] = rest
        elif key and line:
            found[key] += f" {line}"
        else:
            key = ""
    return Evidence(**found)
