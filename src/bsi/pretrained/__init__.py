"""Trained networks that come with the package: their names, and the files they stand for. Imports no torch.

    bsi.load("digits")        # what `bsi sample digits` and `bsi view digits` open, seconds after installation

A file is an export like any other: safetensors with its recipe in the metadata. What it was trained on, how, and what
it scores is in the text beside it.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

__all__ = ["BUNDLED", "find"]

BUNDLED: dict[str, str] = {"digits": "digits.safetensors"}


def find(name_or_path: str | Path) -> Path:
    """The file of a bundled network, or the path as it is; `./digits` is a folder of yours, whatever is bundled."""
    # A bare name must not depend on the working directory: the bundled network comes first.
    file = BUNDLED.get(str(name_or_path))
    if file is None or isinstance(name_or_path, Path):
        return Path(name_or_path).expanduser()
    return Path(str(resources.files(__name__) / file))
