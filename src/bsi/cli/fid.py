"""`bsi fid A B`: the Fréchet distance between two sets of images, with KID, precision and recall on request."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from bsi.cli.options import Within
from bsi.errors import DataError
from bsi.progress import Progress, log

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from bsi.data.files import ArrayFile
    from bsi.metrics import Extractor, SampleQuality

BLOCK_BYTES = 1 << 24


@dataclass(frozen=True)
class Fid:
    """Fréchet inception distance between the images A and the reference images B.

    A and B are each a folder of images, an .npy or .npz file of uint8 images, or a prepared dataset (its name or
    folder; NAME:train for the training part, the test part otherwise). The statistics of a
    complete prepared dataset are stored and reused.
    """

    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """The images to evaluate."""
    b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """The images to compare with."""
    num: Annotated[int | None, Within(1)] = None
    """Take the first this many images of each, instead of all."""
    kid: bool = False
    """Also the kernel inception distance, with its standard error."""
    precision_recall: bool = False
    """Also precision and recall, with 3 nearest neighbors."""
    weights: Path | None = None
    """The network's weights as safetensors; by default inception-2015-12-05.safetensors in the data cache."""
    device: Literal["cuda", "cpu"] | None = None
    """By default a GPU if there is one."""
    precision: Literal["float32", "tf32", "float16"] | None = None
    """The precision of convolutions: by default tf32 on a GPU, float32 on the CPU."""
    batch: Annotated[int, Within(1)] = 64
    """Images at a time."""
    json: bool = False
    """Print the record as one JSON object."""


@dataclass(frozen=True)
class Images:
    """A set of images that is read once, in batches, and the split and version of a prepared dataset."""

    name: str
    n: int
    batches: Iterator[Tensor]
    split: str | None = None
    version: str | None = None


def run(args: Fid) -> int:
    with logged_warnings("bsi fid"):
        quality = measure(args)
    print(json.dumps({"samples": args.a, **quality.record()}) if args.json else text(args.a, quality))
    return 0


@contextmanager
def logged_warnings(command: str, show: bool = True) -> Iterator[None]:
    """Print each warning of the block once, as one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            for message in dict.fromkeys(str(warning.message) for warning in caught) if show else ():
                log(f"{command}: warning: {message}")


def measure(args: Fid) -> SampleQuality:
    """Open both sets before the network is loaded, so that a typo is reported at once."""
    a, b = (images(where, args.batch, args.num) for where in (args.a, args.b))
    import torch

    from bsi.metrics import KEPT, Inception, Reference, collect, reference, sample_quality

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    extractor: Extractor = Inception(args.weights, device, args.precision, args.batch)
    keep = args.kid or args.precision_recall
    if b.version is not None and b.split is not None and args.num is None:
        real = reference(b.name, b.version, b.split, shown(b), extractor, keep)
    else:
        real = Reference(b.name, b.split, b.version, collect(shown(b), extractor, keep))
    samples = collect(shown(a), extractor, keep or a.n <= KEPT)
    return sample_quality(samples, real, extractor, args.kid, args.precision_recall)


def images(where: str, batch: int, num: int | None) -> Images:
    """The images of a file of arrays, a folder of images or a prepared dataset."""
    path = Path(where).expanduser()
    if path.suffix in (".npy", ".npz"):
        return array_images(path, batch, num)
    if os.path.isdir(path) and not (path / "manifest.json").exists():
        from bsi.metrics.features import file_batches, image_files

        files = image_files(path)[:num]
        return Images(where, len(files), file_batches(files, batch))
    return dataset_images(where, batch, num)


def array_images(path: Path, batch: int, num: int | None) -> Images:
    from bsi.metrics.features import array_batches

    with opened(path) as array:
        n = min(len(array), num or len(array))

    def blocks() -> Iterator[np.ndarray]:
        with opened(path) as array:
            yield from array.blocks(0, BLOCK_BYTES)

    return Images(path.name, n, first(array_batches(blocks(), batch, str(path)), n))


@contextmanager
def opened(path: Path) -> Iterator[ArrayFile]:
    """The array of an .npy file; of an .npz file its only one, or arr_0."""
    from bsi.data.files import ArrayFile, NpzFile

    if path.suffix == ".npy":
        with ArrayFile.at(path) as array:
            yield array
        return
    with NpzFile.at(path) as archive:
        if len(archive.names) != 1 and "arr_0" not in archive.names:
            held = ", ".join(archive.names) or "no arrays"
            raise DataError(f"{path} holds {held}. Save only the images, or name them arr_0.")
        with archive.array("arr_0" if "arr_0" in archive.names else archive.names[0]) as array:
            yield array


def dataset_images(where: str, batch: int, num: int | None) -> Images:
    from bsi.data.store import open_dataset
    from bsi.metrics.features import array_batches
    from bsi.values import to_uint8

    name, split = where, "test"
    if where.endswith((":train", ":test")):
        name, _, split = where.rpartition(":")
    dataset = open_dataset(name)
    rows, bins = dataset.split(split), dataset.bins
    if bins is None:
        raise DataError(f"{name} is continuous data; FID is for 8-bit images.")
    pieces = (rows[start : start + batch] for start in range(0, len(rows), batch))
    pixels = (piece if bins.count == 256 else to_uint8(bins.values(piece), bins.low, bins.high) for piece in pieces)
    n = min(len(rows), num or len(rows))
    return Images(dataset.name, n, first(array_batches(pixels, batch, name), n), split, dataset.version)


def first(batches: Iterator[Tensor], n: int) -> Iterator[Tensor]:
    """The first n images."""
    for batch in batches:
        yield batch[:n]
        n -= len(batch)
        if n <= 0:
            return


def shown(source: Images) -> Iterator[Tensor]:
    """The batches, with progress while they are read. A stored reference is not read."""
    with Progress(source.name, source.n, "image") as progress:
        for batch in source.batches:
            yield batch
            progress.advance(len(batch))


def text(a: str, quality: SampleQuality) -> str:
    """The record as text for people."""
    split = f" ({quality.reference_split})" if quality.reference_split else ""
    lines = [
        f"{quality.metric} {quality.value:.4f}{'' if quality.error is None else f' ± {quality.error:.4f}'}",
        f"  {quality.n} images of {a} against {quality.reference_n} of {quality.reference}{split}",
        f"  {quality.extractor} {quality.extractor_hash[:12]}, {quality.resize}, {quality.precision}",
    ]
    if quality.kid:
        error = f" ± {quality.kid.standard_error:.6f}" if quality.kid.standard_error is not None else ""
        lines.append(f"KID {quality.kid.value:.6f}{error} ({quality.kid.blocks} x {quality.kid.block_size} images)")
    if quality.precision_recall:
        both = quality.precision_recall
        lines.append(f"precision {both.precision:.4f}, recall {both.recall:.4f} (k = {both.k})")
    return "\n".join(lines)
