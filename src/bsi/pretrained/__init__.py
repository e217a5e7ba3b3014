"""Trained networks that are part of the package, by name. Imports no torch.

    bsi.load("digits")        # what `bsi sample digits` and `bsi view digits` open, seconds after installation

A file is an export like any other: safetensors with its recipe in the metadata. The text file next to it describes its
data, its training and its results.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

__all__ = ["BUNDLED", "find"]

BUNDLED: dict[str, str] = {"digits": "digits.safetensors"}


def find(name_or_path: str | Path) -> Path:
    """The file of a bundled network by its name, or the path as it is. A file or folder of that name comes first."""
    path = Path(name_or_path).expanduser()
    file = BUNDLED.get(str(name_or_path))
    if file is None or path.exists():
        return path
    return Path(str(resources.files(__name__) / file))
