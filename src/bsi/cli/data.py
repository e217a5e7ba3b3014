"""`bsi data`: prepare a dataset, or list the prepared ones."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from bsi.errors import DataError, UsageError
from bsi.progress import log

if TYPE_CHECKING:
    from bsi.data.store import Dataset

__all__ = ["Data", "run"]


def _shown(metavar: str, name: str | None = None) -> Any:
    """The help of an option whose default depends on the source and is given in the text."""
    return tyro.conf.arg(name=name, metavar=metavar, help_behavior_hint="")


@tyro.conf.configure(tyro.conf.FlagCreatePairsOff)
@dataclass(frozen=True)
class Data:
    """Prepare a dataset as memory-mapped arrays with a manifest, or list the prepared datasets.

    The same command resumes an interrupted preparation; a dataset appears only when it is complete.

    Sources: digits (embedded), cifar10, imagenet32, imagenet64, folder (images), arrays (.npy, .npz), wav, huggingface.
    """

    name: tyro.conf.Positional[Annotated[str | None, _shown("NAME")]] = None
    """The source, see above; or a prepared dataset to show or verify."""
    from_: Annotated[str | None, _shown("PATH", "from")] = None
    """The data: a folder, an archive, a file, or the name of a Hugging Face dataset."""
    to: Annotated[Path | None, _shown("FOLDER")] = None
    """The folder to write; by default the dataset's name in the data folder ($BSI_DATA, ~/.cache/bsi-data)."""
    list_: Annotated[bool, tyro.conf.arg(name="list")] = False
    """Show the sources and the prepared datasets."""
    verify: bool = False
    """Check every file of the dataset against its hash."""
    json: bool = False
    """Print the result as JSON on stdout."""
    labels: Annotated[bool | None, _shown("")] = None
    """folder: use the folders directly below PATH as classes. Other sources keep the labels they have."""
    size: Annotated[int | None, _shown("INT")] = None
    """folder, huggingface: height and width in pixels (of the images, if all have the same up to 64; otherwise 64)."""
    channels: Annotated[Literal["auto", 1, 3] | None, _shown("auto|1|3")] = None
    """folder, huggingface: 3 for color, 1 for gray, auto for gray if all images are (auto)."""
    resampling: Annotated[Literal["lanczos", "bicubic", "bilinear", "box"] | None, _shown("NAME")] = None
    """folder, huggingface: the filter for resizing: lanczos, bicubic, bilinear or box (lanczos)."""
    test_fraction: Annotated[float | None, _shown("FLOAT")] = None
    """folder, arrays, wav, huggingface: the fraction used as test set, chosen by hash (0.1)."""
    skip: Annotated[int | None, _shown("INT")] = None
    """folder, huggingface: how many unreadable images to skip at most (0)."""
    bins: Annotated[tuple[float, float, int] | None, _shown("LOW HIGH COUNT")] = None
    """arrays: the values of the integers 0 to COUNT - 1, or the range and number of bins for floats; without it the
    data is continuous."""
    length: Annotated[int | None, _shown("INT")] = None
    """wav: audio samples per example (16384)."""
    column: Annotated[str | None, _shown("NAME")] = None
    """huggingface: the column of images (image)."""
    revision: Annotated[str | None, _shown("NAME")] = None
    """huggingface: the dataset's revision (main)."""


# The command that trains on the data of a source; NAME is the dataset's.
TRAINS = {
    "digits": "bsi train digits",
    "cifar10": "bsi train cifar10-dit-s",
    "imagenet32": "bsi train imagenet32-dit-l2",
    "imagenet64": "bsi train imagenet64-dit-l4",
    "folder": "bsi train folder --data.name NAME, or folder-mini on a CPU",
    "huggingface": "bsi train folder --data.name NAME, or folder-mini on a CPU",
    "arrays": "bsi train arrays --data.name NAME",
    "wav": "bsi train arrays --data.name NAME --backbone unet-32-64-64x1 --batch 64 --steps 2000 --optimizer.lr 2e-3"
    " --method.alpha-M 6.7e10, or --backbone dit-s/4 on a GPU",
}

OPTIONS = ("labels", "size", "channels", "resampling", "test_fraction", "skip", "bins", "length", "column", "revision")
SHOWN = 10  # class names in a line


def run(args: Data) -> int:
    from bsi.data.sources import SOURCES, prepare_named
    from bsi.data.store import open_dataset, prepared, verify

    if args.skip is not None and args.skip < 0:
        raise UsageError(f"--skip must be at least 0, got {args.skip}.")
    if args.list_:
        return _list(args)
    if args.name is None:
        raise UsageError("no data was named. Use `bsi data NAME`; `bsi data --list` shows the names.")
    if args.name not in SOURCES and args.from_ is None and args.name in {folder.name for folder in prepared()}:
        _show(open_dataset(args.name, check_hashes=args.verify), args)
        return 0
    given = {f.name: getattr(args, f.name) for f in fields(args) if f.name in OPTIONS}
    dataset = prepare_named(args.name, args.from_, args.to, {k: v for k, v in given.items() if v is not None})
    if args.verify and dataset.folder is not None:
        verify(dataset.folder, dataset.manifest)
    _show(dataset, args)
    if not len(dataset.test):
        log("bsi data: warning: there are no test samples, which `bsi eval` needs. Use a larger --test-fraction.")
    log(f"next: {_next(args, dataset)}")
    return 0


def _show(dataset: Dataset, args: Data) -> None:
    print(json.dumps(_record(dataset)) if args.json else _line(dataset))
    for note in dataset.manifest.notes:
        log(f"bsi data: {note}.")


def _next(args: Data, dataset: Dataset) -> str:
    """The command that trains on it: with larger patches for large images, and with labels if they were requested."""
    command = TRAINS[str(args.name)].replace("NAME", shlex.quote(_called(dataset)))
    if args.labels:
        command = command.replace(" --data.name ", " --data.labels --data.name ", 1)
    large = command.startswith("bsi train folder") and dataset.shape[-1] >= 64
    return command.replace("bsi train folder", "bsi train folder --backbone dit-s/4", 1) if large else command


def _called(dataset: Dataset) -> str:
    """The name to open it by: that of its folder in the data folder, otherwise its path."""
    from bsi.io import data_folder

    outside = dataset.folder is not None and dataset.folder.parent.resolve() != data_folder().resolve()
    return str(dataset.folder) if outside else dataset.name


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
        log(f"bsi data: {message}")
    return 0


def _line(dataset: Dataset) -> str:
    manifest = dataset.manifest
    counts = f"{manifest.counts['train']} train, {manifest.counts['test']} test"
    kind = f"{manifest.bins.count} bins" if manifest.bins else "continuous"
    where = "embedded" if dataset.folder is None else str(dataset.folder)
    shape = " x ".join(map(str, manifest.shape)) or "scalar"
    skipped = f", {len(manifest.skipped)} skipped" if manifest.skipped else ""
    classes = _classes(dataset)
    return f"{dataset.name}: {counts}{skipped}, {shape}, {kind}{classes}, version {manifest.version[:12]}, {where}"


def _classes(dataset: Dataset) -> str:
    """The number of classes and their first names."""
    labels = dataset.labels
    if labels is None:
        return ""
    names = ", ".join([*labels.names[:SHOWN], *(["..."] if len(labels.names) > SHOWN else [])])
    return f", {labels.classes} classes" + (f" ({names})" if names else "")


def _record(dataset: Dataset) -> dict[str, Any]:
    manifest = dataset.manifest
    folder = None if dataset.folder is None else str(dataset.folder)
    return {"folder": folder, **json.loads(manifest.to_json()), "name": dataset.name}
