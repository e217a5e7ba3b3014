"""`bsi fid A B`: the Fréchet distance between two sets of images, with KID, precision and recall on request."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from bsi.cli.options import Count, Device, Json, answer
from bsi.errors import DataError
from bsi.progress import Progress, log

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from bsi.data.files import ArrayFile
    from bsi.metrics import SampleQuality

BLOCK_BYTES = 1 << 24


@dataclass(frozen=True)
class Fid:
    """Fréchet inception distance between the images A and the reference images B.

    A and B are each a folder of images, an .npy or .npz file of uint8 images, or a prepared dataset (its name or
    folder; NAME:train for the training part, the test part otherwise). The statistics of a
    complete prepared dataset are stored and reused.
    """

    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")]  # The images to evaluate.
    b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")]  # The images to compare with.
    num: Count | None = None  # Take the first this many images of each, instead of all.
    kid: bool = False  # Also the kernel inception distance, with its standard error.
    precision_recall: bool = False  # Also precision and recall, with 3 nearest neighbors.
    weights: Path | None = None
    """The network's weights as safetensors; by default inception-2015-12-05.safetensors in the data cache."""
    device: Device = None
    precision: Literal["float32", "tf32", "float16"] | None = None
    """The precision of convolutions: by default tf32 on a GPU, float32 on the CPU."""
    batch: Count = 64  # Images at a time.
    json: Json = False

    def execute(self) -> int:
        # Both sets are opened before the network is loaded, so that a typo is reported at once.
        a, b = (images(where, self.batch, self.num) for where in (self.a, self.b))
        from bsi import metrics
        from bsi.runtime.distributed import pick_device

        with logged_warnings("bsi fid"):
            extractor = metrics.Inception(self.weights, pick_device(self.device, 0), self.precision, self.batch)
            keep = self.kid or self.precision_recall
            if b.version is not None and b.split is not None and self.num is None:
                real = metrics.reference(b.name, b.version, b.split, b.shown(), extractor, keep)
            else:
                real = metrics.Reference(b.name, b.split, b.version, metrics.collect(b.shown(), extractor, keep))
            samples = metrics.collect(a.shown(), extractor, keep or a.n <= metrics.KEPT)
            quality = metrics.sample_quality(samples, real, extractor, self.kid, self.precision_recall)
        return answer(self.json, {"samples": self.a, **quality.record()}, text(self.a, quality))


@dataclass(frozen=True)
class Images:
    """A set of images that is read once, in batches, and the split and version of a prepared dataset."""

    name: str
    n: int
    batches: Iterator[Tensor]
    split: str | None = None
    version: str | None = None

    def shown(self) -> Iterator[Tensor]:
        """The first n images, with progress while they are read. A stored reference is not read."""
        left = self.n
        with Progress(self.name, self.n, "image") as progress:
            for batch in self.batches:
                yield batch[:left]
                progress.advance(len(batch[:left]))
                left -= len(batch)
                if left <= 0:
                    return


def images(where: str, batch: int, num: int | None) -> Images:
    """The first `num` images of a file of arrays, a folder of images or a prepared dataset."""
    from bsi.data.files import walk
    from bsi.data.images import SUFFIXES
    from bsi.data.store import open_dataset
    from bsi.evaluation.samples import image_batches
    from bsi.metrics.quality import array_batches, file_batches

    path = Path(where).expanduser()
    if path.suffix in (".npy", ".npz"):
        with _opened(path) as array:
            count = len(array)
        return Images(path.name, min(count, num or count), array_batches(_blocks(path), batch, str(path)))
    if path.is_dir() and not (path / "manifest.json").exists():
        files = [path / name for name in walk(path, SUFFIXES)][:num]
        if not files:
            raise DataError(f"{path} holds no images: none of its files ends in {', '.join(SUFFIXES)}.")
        return Images(where, len(files), file_batches(files, batch))
    name, _, split = where.rpartition(":") if where.endswith((":train", ":test")) else (where, "", "test")
    dataset = open_dataset(name)
    rows = dataset.split(split)
    if dataset.bins is None:
        raise DataError(f"{name} is continuous data; FID is for 8-bit images.")
    batches = image_batches(rows, dataset.bins, batch)
    return Images(dataset.name, min(len(rows), num or len(rows)), batches, split, dataset.version)


@contextmanager
def _opened(path: Path) -> Iterator[ArrayFile]:
    """The array of an .npy file; of an .npz file its only one, or arr_0."""
    from bsi.data.files import open_arrays

    with open_arrays(path) as arrays:
        names = ["arr_0"] if "arr_0" in arrays else list(arrays)
        if len(names) != 1:
            raise DataError(
                f"{path} holds {', '.join(names) or 'no arrays'}. Save only the images, or name them arr_0."
            )
        with arrays[names[0]]() as array:
            yield array


def _blocks(path: Path) -> Iterator[np.ndarray]:
    with _opened(path) as array:
        yield from array.blocks(0, BLOCK_BYTES)


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


def text(a: str, quality: SampleQuality) -> str:
    """The record as text for people."""
    split = f" ({quality.reference_split})" if quality.reference_split else ""
    lines = [
        f"{quality.metric} {quality.value:.4f}{plus_minus(quality.error)}",
        f"  {quality.n} images of {a} against {quality.reference_n} of {quality.reference}{split}",
        f"  {quality.extractor} {quality.extractor_hash[:12]}, {quality.resize}, {quality.precision}",
    ]
    if quality.kid:
        kid = quality.kid
        value = f"{kid.value:.6f}{plus_minus(kid.standard_error, 6)}"
        lines.append(f"KID {value} ({kid.blocks} x {kid.block_size} images)")
    if quality.precision_recall:
        both = quality.precision_recall
        lines.append(f"precision {both.precision:.4f}, recall {both.recall:.4f} (k = {both.k})")
    return "\n".join(lines)


def plus_minus(error: float | None, digits: int = 4) -> str:
    """A standard error as text; nothing if it is unknown."""
    return "" if error is None else f" ± {error:.{digits}f}"
