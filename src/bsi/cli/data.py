"""`bsi data`: prepare a dataset, or list the prepared ones."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from bsi.cli.options import Json, answer
from bsi.data import arrays, images, published, store
from bsi.data.prepare import prepare
from bsi.errors import DataError, UsageError, unknown
from bsi.io import data_folder
from bsi.pictures import is_image
from bsi.progress import log
from bsi.values import Latents, Standardize, Symbols

if TYPE_CHECKING:
    from bsi.data.prepare import Preparation, Source

COMMON = ("name", "from_", "to", "list_", "verify", "json")  # the other options belong to sources
SHOWN = 10  # class names in a line


@dataclass(frozen=True)
class LatentsOf:
    """The images of a prepared dataset, encoded once: see `bsi.runtime.autoencoders`."""

    summary: ClassVar[str] = "latents of a dataset of images: --from DATASET, --autoencoder"

    path: str
    autoencoder: str | None = None

    def plan(self) -> Preparation:
        if self.autoencoder is None:
            fix = "Train one with `bsi train autoencoder-f4 --data.name DATASET`, or use a folder of diffusers."
            raise UsageError(f"latents need --autoencoder RUN. {fix}")
        from bsi.runtime.autoencoders import plan_latents
        from bsi.runtime.distributed import pick_device

        return plan_latents(self.path, self.autoencoder, pick_device(None, 0))


# For each source its class, and the command that trains on its data; NAME is the dataset's.
SOURCES: dict[str, tuple[type[Source], str]] = {
    "cifar10": (published.Cifar10, "bsi train cifar10-dit-s"),
    "imagenet32": (published.ImageNet32, "bsi train imagenet32-dit-l2"),
    "imagenet64": (published.ImageNet64, "bsi train imagenet64-dit-l4"),
    "mnist": (published.Mnist, "bsi train folder-mini --data.no-flips --data.name NAME"),
    "folder": (images.Folder, "bsi train folder --data.name NAME, or folder-mini on a CPU"),
    "latents": (LatentsOf, "bsi train latents --data.name NAME, or latents-mini on a CPU"),
    "binary": (published.Binary, "bsi train binary-digits --data.name NAME"),
    "text": (arrays.Text, "bsi train text-mini --data.name NAME"),
    "arrays": (arrays.Arrays, "bsi train arrays --data.name NAME"),
    "wav": (arrays.Wav, "bsi train audio-mini --data.name NAME, or --backbone dit-s/4 on a GPU"),
    "huggingface": (images.HuggingFace, "bsi train folder --data.name NAME, or folder-mini on a CPU"),
}


@dataclass(frozen=True)
class DataOptions:
    """Prepare a dataset as memory-mapped arrays with a manifest, or list the prepared datasets.

    The same command resumes an interrupted preparation; a dataset appears only when it is complete.

    Sources: cifar10, imagenet32, imagenet64, mnist, folder (images), latents (of images), binary (binary images), text,
    arrays (.npy, .npz), wav, huggingface. The handwritten digits are part of the package.
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None
    """The source, see above; or a prepared dataset to show or verify."""
    from_: Annotated[str | None, tyro.conf.arg(name="from", metavar="PATH")] = None
    """The data: a folder, an archive, a file, or the name of a Hugging Face dataset."""
    to: Path | None = None
    """The folder to write; by default the dataset's name in the data folder ($BSI_DATA, ~/.cache/bsi-data)."""
    list_: Annotated[bool, tyro.conf.arg(name="list")] = False  # Show the sources and the prepared datasets.
    verify: bool = False  # Check every file of the dataset against its hash.
    json: Json = False
    labels: bool = False
    """folder: use the folders directly below PATH as classes. Other sources keep the labels they have."""
    size: int | None = None
    """folder, huggingface: height and width in pixels (the smallest of the images if none is larger than 64, rounded
    down to a multiple of 4; otherwise 64)."""
    channels: Literal["auto", 1, 3] | None = None
    """folder, huggingface: 3 for color, 1 for gray, auto for gray if all images are (auto)."""
    test_fraction: float | None = None
    """folder, arrays, text, wav, huggingface: the fraction used as test set: chosen by hash, of text the end (0.1)."""
    skip: int | None = None
    """folder, huggingface: how many unreadable images to skip at most (0)."""
    bins: Annotated[tuple[float, float, int] | None, tyro.conf.arg(metavar="LOW HIGH COUNT")] = None
    """arrays: the values of the integers 0 to COUNT - 1, or the range and number of bins for floats; without it the
    data is continuous."""
    symbols: int | None = None
    """arrays: the integers are symbols 0 to INT - 1 without an order, such as categories."""
    length: int | None = None
    """text, wav: characters or bytes (256), or audio samples (16384), per example."""
    vocabulary: Literal["chars", "bytes"] | None = None
    """text: one symbol for each character that occurs, or the 256 bytes of UTF-8 (chars)."""
    autoencoder: str | None = None
    """latents: a run of `bsi train autoencoder-f4`, its export, or a folder of diffusers' AutoencoderKL."""
    threshold: float | None = None  # binary: the value between 0 and 1 above which a pixel is 1 (0.5).
    stochastic: bool = False  # binary: a pixel is 1 with the probability of its value, drawn once.
    column: str | None = None  # huggingface: the column of images (image).
    revision: str | None = None  # huggingface: the dataset's revision (main).

    def execute(self) -> int:
        if self.list_:
            return _list(self)
        name, path = self.name, self.from_
        if name is None:
            raise UsageError("no data was named. Use `bsi data NAME`; `bsi data --list` shows the names.")
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in COMMON}
        options = {option: value for option, value in given.items() if value is not None and value is not False}
        existing = name in {"digits", *(folder.name for folder in store.prepared())}
        if existing and path is None and self.to is None and (name not in SOURCES or not options):
            if options:
                raise UsageError(f"{name} is prepared already: leave out {_flags(options)}.")
            return self.show(store.open_dataset(name))
        if name == "digits":
            raise UsageError("the digits are part of the package: leave out --from and --to.")
        plan = make_source(name, path, options).plan()
        if self.to is None and plan.name != name and plan.name in (*SOURCES, "digits"):
            clash = f"a dataset made from {path} would be named {plan.name!r}, like a source"
            raise UsageError(f"{clash}. Choose a folder with --to FOLDER.")
        dataset = prepare(plan, data_folder() / plan.name if self.to is None else self.to)
        self.show(dataset)
        if not len(dataset.test):
            log("bsi data: warning: there are no test samples, which `bsi eval` needs. Use a larger --test-fraction.")
        # The command that trains on it: with larger patches for large images, and with labels if they were requested.
        outside = dataset.folder.parent.resolve() != data_folder().resolve()
        like = "folder" if name == "arrays" and dataset.bins is not None and is_image(dataset.shape) else name
        command = SOURCES[like][1].replace("NAME", shlex.quote(str(dataset.folder) if outside else dataset.name))
        if name == "arrays" and isinstance(dataset.kind, Symbols):
            command = command.replace("arrays", "text-mini" if len(dataset.shape) == 1 else "binary-digits", 1)
        elif name == "arrays" and dataset.bins is None and len(dataset.shape) <= 2:
            command += f", or {'table' if len(dataset.shape) == 1 else 'series'}-mini on a CPU"
        if self.labels:
            command = command.replace(" --data.name ", " --data.labels --data.name ", 1)
        if dataset.shape and dataset.shape[-1] >= 64:
            command = command.replace("bsi train folder ", "bsi train folder --backbone dit-s/4 ", 1)
        log(f"next: {command}")
        return 0

    def show(self, dataset: store.Dataset) -> int:
        if self.verify:
            dataset.verify()
        answer(self.json, _record(dataset), _line(dataset))
        for note in dataset.manifest.notes:
            log(f"bsi data: {note}.")
        return 0


def make_source(name: str, path: str | None, options: dict[str, Any]) -> Source:
    """The source of that name with its options. Raises an error for an unknown name or option."""
    if name not in SOURCES:
        raise unknown("data source", name, SOURCES)
    kind: Any = SOURCES[name][0]
    known = {field.name: field for field in fields(kind)}
    if wrong := [option for option in options if option not in known]:
        takes = _flags(option for option in known if option != "path") or "no options"
        kept = " Labels in the data are kept without it." if "labels" in wrong and name != "wav" else ""
        raise UsageError(f"{name} has no {_flags(wrong)}; it takes {takes}.{kept}")
    if path is not None:
        options = {**options, "path": path if name in ("binary", "huggingface", "latents") else Path(path)}
    elif known["path"].default is MISSING:
        raise UsageError(f"{name} needs the place of the data: bsi data {name} --from PATH")
    source: Source = kind(**options)
    return source


def _flags(options: Iterable[str]) -> str:
    return ", ".join(f"--{option.replace('_', '-')}" for option in options)


def _list(args: DataOptions) -> int:
    datasets, damaged = [store.open_dataset("digits")], []
    for folder in store.prepared():
        try:
            dataset = store.open_dataset(folder)
            if args.verify:
                dataset.verify()
            datasets.append(dataset)
        except DataError as error:
            damaged.append(str(error))
            if not args.json:
                log(f"bsi data: {error}")
    summaries = {name: kind.summary for name, (kind, _) in SOURCES.items()}
    found = {"folder": str(data_folder()), "sources": summaries, "damaged": damaged}
    lines = ["sources:", *(f"  {name:<12} {summary}" for name, summary in summaries.items())]
    lines += [f"prepared in {data_folder()}:", *(f"  {_line(dataset)}" for dataset in datasets)]
    return answer(args.json, {**found, "datasets": [_record(dataset) for dataset in datasets]}, "\n".join(lines))


def _record(dataset: store.Dataset) -> dict[str, Any]:
    return {"folder": str(dataset.folder), **json.loads(dataset.manifest.to_json()), "name": dataset.name}


def _line(dataset: store.Dataset) -> str:
    manifest, stored, labels = dataset.manifest, dataset.kind, dataset.labels
    skipped = f", {len(manifest.skipped)} skipped" if manifest.skipped else ""
    shape = " x ".join(map(str, manifest.shape)) or "scalar"
    kind = "continuous" if isinstance(stored, Standardize) else f"{stored.count} {type(stored).__name__.lower()}"
    if isinstance(stored, Latents):
        kind = f"latents of {stored.images}, {' x '.join(map(str, stored.shape))}"
    if labels is not None:
        names = ", ".join([*labels.names[:SHOWN], *(["..."] if len(labels.names) > SHOWN else [])])
        kind += f", {labels.classes} classes" + (f" ({names})" if names else "")
    return (
        f"{dataset.name}: {manifest.counts['train']} train, {manifest.counts['test']} test{skipped}, {shape}, {kind}, "
        f"version {manifest.version[:12]}, {dataset.folder}"
    )
