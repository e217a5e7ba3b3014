"""Recipes: functions that return a complete `Recipe`, each with its evidence in its docstring. Imports no torch.

    recipe = bsi.recipes.cifar10_unet(method="bsi")
    recipe = dataclasses.replace(recipe, seed=1)

A docstring has a summary line and the fields `Command`, `Hardware`, `Time`, `Expected` and `Paper`, the last two in
bits per dimension and FID. "Not yet run" means that the command was not run to its end, and no value of ours exists.
Settings from the paper's tables have no comment in these files; ours are marked "ours".
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from bsi.errors import UsageError
from bsi.recipe import Recipe
from bsi.recipes.cifar10 import (
    cifar10_20min_bpd,
    cifar10_20min_fid,
    cifar10_dit_mini,
    cifar10_dit_s,
    cifar10_unet,
)
from bsi.recipes.digits import digits
from bsi.recipes.discrete import binary_digits, mnist_binary, text8, text_mini
from bsi.recipes.imagenet import imagenet32_dit_l2, imagenet32_unet, imagenet64_dit_l4
from bsi.recipes.own import arrays, audio_mini, folder, folder_mini, series_mini, table_mini

__all__ = [
    "RECIPES",
    "Evidence",
    "arrays",
    "audio_mini",
    "binary_digits",
    "cifar10_20min_bpd",
    "cifar10_20min_fid",
    "cifar10_dit_mini",
    "cifar10_dit_s",
    "cifar10_unet",
    "digits",
    "evidence",
    "folder",
    "folder_mini",
    "imagenet32_dit_l2",
    "imagenet32_unet",
    "imagenet64_dit_l4",
    "mnist_binary",
    "named_recipe",
    "series_mini",
    "table_mini",
    "text8",
    "text_mini",
]

RECIPES: dict[str, Callable[[str], Recipe]] = {
    "digits": digits,
    "binary-digits": binary_digits,
    "text-mini": text_mini,
    "cifar10-unet": cifar10_unet,
    "cifar10-dit-s": cifar10_dit_s,
    "cifar10-dit-mini": cifar10_dit_mini,
    "cifar10-20min-bpd": cifar10_20min_bpd,
    "cifar10-20min-fid": cifar10_20min_fid,
    "imagenet32-dit-l2": imagenet32_dit_l2,
    "imagenet64-dit-l4": imagenet64_dit_l4,
    "imagenet32-unet": imagenet32_unet,
    "mnist-binary": mnist_binary,
    "text8": text8,
    "folder": folder,
    "folder-mini": folder_mini,
    "arrays": arrays,
    "table-mini": table_mini,
    "series-mini": series_mini,
    "audio-mini": audio_mini,
}


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
