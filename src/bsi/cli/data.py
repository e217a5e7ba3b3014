"""`bsi data`: prepare a dataset once, or list what is there."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from bsi.errors import DataError, UsageError

if TYPE_CHECKING:
    from bsi.data.store import Dataset

__all__ = ["Data", "run"]


def _shown(metavar: str, name: str | None = None) -> Any:
    """How an option appears in the help: its defaults are in the text, since they belong to the sources."""
    return tyro.conf.arg(name=name, metavar=metavar, help_behavior_hint="")


@tyro.conf.configure(tyro.conf.FlagCreatePairsOff)
@dataclass(frozen=True)
class Data:
    """Prepare a dataset once into memory-mapped arrays with a manifest, or list what is there.

    An interrupted preparation goes on when the same command is run again; there is never half a dataset.

    Sources: digits (embedded), cifar10, imagenet32, imagenet64, folder (images), arrays (.npy, .npz), wav, huggingface.
    """

    name: tyro.conf.Positional[Annotated[str | None, _shown("NAME")]] = None
    """The source: see above; or a prepared dataset, to be shown or verified."""
    from_: Annotated[str | None, _shown("PATH", "from")] = None
    """Where the data is: a folder, an archive, a file, or the name of a Hugging Face dataset."""
    to: Annotated[Path | None, _shown("FOLDER")] = None
    """The folder of the dataset; by default its name in the data folder ($BSI_DATA, ~/.cache/bsi-data)."""
    list_: Annotated[bool, tyro.conf.arg(name="list")] = False
    """Show the sources and the prepared datasets."""
    verify: bool = False
    """Compare every file of the dataset with its hash."""
    json: bool = False
    """Write the result as JSON on stdout."""
    labels: Annotated[bool | None, _shown("")] = None
    """folder: the folder directly below PATH that an image lies in is its class. Other sources keep what they have."""
    size: Annotated[int | None, _shown("INT")] = None
    """folder, huggingface: the side of the images in pixels (64)."""
    channels: Annotated[int | None, _shown("INT")] = None
    """folder, huggingface: 3 for color, 1 for gray (3)."""
    resampling: Annotated[Literal["lanczos", "bicubic", "bilinear", "box"] | None, _shown("NAME")] = None
    """folder, huggingface: how images are shrunk: lanczos, bicubic, bilinear or box (lanczos)."""
    test_fraction: Annotated[float | None, _shown("FLOAT")] = None
    """folder, arrays, wav, huggingface: the part kept for testing, chosen by hash (0.1)."""
    skip: Annotated[int | None, _shown("INT")] = None
    """folder, huggingface: how many unreadable images may be passed over (0)."""
    bins: Annotated[tuple[float, float, int] | None, _shown("LOW HIGH COUNT")] = None
    """arrays: what the integers 0 .. COUNT - 1 stand for, or the range and number of bins that floats are put into;
    without it the data is continuous."""
    length: Annotated[int | None, _shown("INT")] = None
    """wav: samples per piece (16384)."""
    column: Annotated[str | None, _shown("NAME")] = None
    """huggingface: the column of images (image)."""
    revision: Annotated[str | None, _shown("NAME")] = None
    """huggingface: the dataset's revision (main)."""


# How to train on what a source prepared; NAME is the dataset's.
TRAINS = {
    "digits": "bsi train digits",
    "cifar10": "bsi train cifar10-dit-s",
    "imagenet32": "bsi train imagenet32-dit-l2",
    "imagenet64": "bsi train imagenet64-dit-l4",
    "folder": "bsi train folder --data.name NAME, or folder-mini on a CPU",
    "huggingface": "bsi train folder --data.name NAME, or folder-mini on a CPU",
    "arrays": "bsi train arrays --data.name NAME",
    "wav": "bsi train arrays --data.name NAME",
}

OPTIONS = ("labels", "size", "channels", "resampling", "test_fraction", "skip", "bins", "length", "column", "revision")
SHOWN = 10  # names of classes in a line


def run(args: Data) -> int:
    from bsi.data.sources import SOURCES, prepare_named
    from bsi.data.store import open_dataset, prepared, verify

    if args.list_:
        return _list(args)
    if args.name is None:
        raise UsageError("say which data: `bsi data NAME`, or `bsi data --list` for the names.")
    if args.name not in SOURCES and args.from_ is None and args.name in {folder.name for folder in prepared()}:
        _show(open_dataset(args.name, check_hashes=args.verify), args)
        return 0
    given = {f.name: getattr(args, f.name) for f in fields(args) if f.name in OPTIONS}
    dataset = prepare_named(args.name, args.from_, args.to, {k: v for k, v in given.items() if v is not None})
    if args.verify and dataset.folder is not None:
        verify(dataset.folder, dataset.manifest)
    _show(dataset, args)
    if not len(dataset.test):
        told = "no test samples, by chance: `bsi eval` needs some. Take a larger --test-fraction."
        print(f"bsi data: caution: {told}", file=sys.stderr)
    print(f"go on with  {_next(args, dataset)}", file=sys.stderr)
    return 0


def _show(dataset: Dataset, args: Data) -> None:
    print(json.dumps(_record(dataset)) if args.json else _line(dataset))


def _next(args: Data, dataset: Dataset) -> str:
    """How to train on it; with large images the network looks at larger patches, and labels asked for are learned."""
    command = TRAINS[str(args.name)].replace("NAME", shlex.quote(str(args.to or dataset.name)))
    if args.labels:
        command = command.replace(" --data.name ", " --data.labels --data.name ", 1)
    large = command.startswith("bsi train folder") and dataset.shape[-1] >= 64
    return command.replace("bsi train folder", "bsi train folder --backbone dit-s/4", 1) if large else command


def _list(args: Data) -> int:
    from bsi.data.sources import SOURCES
    from bsi.data.store import open_dataset, prepared
    from bsi.io import data_folder

    datasets, damaged = [open_dataset("digits")], []
    for folder in prepared():
        try:
            datasets.append(open_dataset(folder, check_hashes=args.verify))
        except DataError as error:
            damaged.append(str(error))
    if args.json:
        sources = {name: source.summary for name, source in SOURCES.items()}
        found = {"folder": str(data_folder()), "sources": sources, "damaged": damaged}
        print(json.dumps({**found, "datasets": [_record(dataset) for dataset in datasets]}))
        return 0
    print("sources:")
    print("\n".join(f"  {name:<12} {source.summary}" for name, source in SOURCES.items()))
    print(f"prepared in {data_folder()}:")
    print("\n".join(f"  {_line(dataset)}" for dataset in datasets))
    for message in damaged:
        print(f"bsi data: {message}", file=sys.stderr)
    return 0


def _line(dataset: Dataset) -> str:
    manifest = dataset.manifest
    counts = f"{manifest.counts['train']} train, {manifest.counts['test']} test"
    kind = f"{manifest.bins.count} bins" if manifest.bins else "continuous"
    where = "embedded" if dataset.folder is None else str(dataset.folder)
    shape = " x ".join(map(str, manifest.shape)) or "scalar"
    skipped = f", {len(manifest.skipped)} skipped" if manifest.skipped else ""
    classes = _classes(dataset)
    return f"{manifest.name}: {counts}{skipped}, {shape}, {kind}{classes}, version {manifest.version[:12]}, {where}"


def _classes(dataset: Dataset) -> str:
    """How many there are and the first names, in a few words."""
    labels = dataset.labels
    if labels is None:
        return ""
    names = ", ".join([*labels.names[:SHOWN], *(["..."] if len(labels.names) > SHOWN else [])])
    return f", {labels.classes} classes" + (f" ({names})" if names else "")


def _record(dataset: Dataset) -> dict[str, Any]:
    manifest = dataset.manifest
    return {"folder": None if dataset.folder is None else str(dataset.folder), **json.loads(manifest.to_json())}
