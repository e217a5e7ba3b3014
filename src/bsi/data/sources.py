"""The sources of data by name. Only names in this table are valid: no module is imported by a name from outside."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path

from bsi.data.arrays import Arrays
from bsi.data.cifar10 import Cifar10
from bsi.data.digits import EmbeddedDigits
from bsi.data.huggingface import HuggingFace
from bsi.data.imagenet import ImageNet32, ImageNet64
from bsi.data.images import Folder
from bsi.data.prepare import Source, prepare
from bsi.data.store import Dataset, open_dataset, prepared
from bsi.data.wav import Wav
from bsi.errors import UsageError
from bsi.io import data_folder

__all__ = ["SOURCES", "make_source", "prepare_named"]

SOURCES: dict[str, type[Source]] = {
    "digits": EmbeddedDigits,
    "cifar10": Cifar10,
    "imagenet32": ImageNet32,
    "imagenet64": ImageNet64,
    "folder": Folder,
    "arrays": Arrays,
    "wav": Wav,
    "huggingface": HuggingFace,
}


def make_source(name: str, path: str | None, options: Mapping[str, object]) -> Source:
    """The source of that name with its options. Raises an error for an unknown name or option."""
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES, 1)
        hint = f"Did you mean {near[0]!r}?" if near else f"The sources are {', '.join(SOURCES)}."
        raise UsageError(f"unknown source of data {name!r}. {hint}")
    kind = SOURCES[name]
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = [option for option in options if option not in known]
    if unknown:
        takes = ", ".join(_flag(option) for option in known if option != "path") or "no options"
        kept = " Labels in the data are kept without it." if "labels" in unknown and kind is not Wav else ""
        raise UsageError(f"{name} has no {', '.join(map(_flag, unknown))}; it takes {takes}.{kept}")
    if path is None:
        if "path" in known and known["path"].default is MISSING:
            raise UsageError(f"{name} needs the place of the data: bsi data {name} --from PATH")
        return kind(**options)
    if "path" not in known:
        raise UsageError(f"{name} takes no --from: it is inside the package.")
    return kind(**{**options, "path": path if kind is HuggingFace else Path(path)})


def prepare_named(name: str, path: str | None, to: Path | None, options: Mapping[str, object]) -> Dataset:
    """Prepare the dataset `name` in `to`, by default in the data folder under its own name."""
    source = make_source(name, path, options)
    if to is None and path is None:
        if name == "digits":
            return open_dataset(name)
        if data_folder() / name in prepared():
            return open_dataset(name)
    plan = source.plan()
    if to is None and plan.name != name and plan.name in SOURCES:
        raise UsageError(
            f"a dataset made from {path} would be named {plan.name!r}, like a source. Choose a folder with --to FOLDER."
        )
    return prepare(plan, data_folder() / plan.name if to is None else to)


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
