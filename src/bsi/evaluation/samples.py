"""Samples of a trained model: drawn part by part into a file, compared with a dataset, or animated.

    samples.npz.parts/          while samples are drawn: one .npy for each part, written atomically
      about.json                which samples these are; parts of other samples are never joined with them
      000000000.npy ...
    samples.npz                 when all parts exist: arr_0, `about` as JSON, and `labels` if the samples have any

Sample i depends on (seed, i) alone, so it does not matter which process draws a part. Rank r of w draws the parts r,
r + w, r + 2w, ... of those that are missing. Finished parts are kept if the process is interrupted, and the same
command draws the missing ones.

The Fréchet distance needs features only: rank r of w draws the samples r, r + w, r + 2w, ... and computes their
features, which are gathered in the order of the samples. The result does not depend on the number of ranks.
"""

from __future__ import annotations

import io
import itertools
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from jaxtyping import Int64, Shaped, UInt8
from torch import Tensor

from bsi.errors import BsiError, DataError, UsageError
from bsi.evaluation.runs import EvaluatedRun, Split, inner_precision, weights_hash
from bsi.io import atomic, make_folder, open_untrusted, parse_json, read_json
from bsi.metrics import KEPT, Extractor, Generation, QualityWarning, SampleQuality, collect, reference, sample_quality
from bsi.metrics.quality import array_batches
from bsi.model import Model
from bsi.pictures import SMALLEST, Moment, animate, belief_frames, is_image
from bsi.progress import Progress, shown
from bsi.recipe import changes
from bsi.runtime.distributed import World
from bsi.sampler import Sampler
from bsi.sampling import Step, belief, evaluations, levels_of, measurement
from bsi.symbols import beliefs, shades
from bsi.values import Bins, to_uint8

PART = 1024  # samples
SMALL = 32  # pixels: the smallest images, CIFAR-10's, with published distances by Inception

Label = int | Sequence[int] | None


def described(sampler: Sampler, seed: int, label: Label) -> dict[str, Any]:
    """Everything that samples depend on besides the network, for records."""
    one, classes = (label, 0) if label is None or isinstance(label, int) else (None, len(label))
    return {**sampler.record(), "seed": seed, "label": one, "classes": classes}


# ---- A file of samples -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleFile:
    """`num` samples that are described by `about`, with labels if they have any, and their output file `path`."""

    path: Path
    num: int
    about: dict[str, Any]
    labels: Int64[np.ndarray, " num"] | None = None

    @classmethod
    def of(cls, model: Model, sampler: Sampler, seed: int, label: Label, path: Path, num: int) -> SampleFile:
        """The file for these samples of a model.

        `about` has the precision that was used, not `auto`: parts from a GPU and from a CPU are different samples.
        """
        network = {"precision": inner_precision(model), "weights": weights_hash(model)}
        labels = model.labels(range(num), label)
        return cls(path, num, described(sampler, seed, label) | network, None if labels is None else labels.numpy())

    @property
    def folder(self) -> Path:
        return self.path.with_name(self.path.name + ".parts")

    def missing(self) -> list[range]:
        """The samples that are still to be drawn, part by part; none if the file is complete.

        Raises:
            UsageError: if the file or its parts hold other samples.
            DataError: if they are damaged, or were not written here.
        """
        about = self.folder / "about.json"
        if self.path.exists():
            try:
                with open_untrusted(self.path) as file, np.load(file, allow_pickle=False) as arrays:
                    found = dict(parse_json(str(arrays["about"]).encode(), self.path))
            except (DataError, BadZipFile, KeyError, ValueError, OSError, TypeError, EOFError) as error:
                raise DataError(f"{self.path} exists, but was not written by bsi sample. Use another name.") from error
            if found.pop("num", None) != self.num:
                raise UsageError(f"{self.path} holds another number of samples. Remove it, or use another name.")
            self._check(found, self.path)
            return []
        if about.exists():
            try:
                found = dict(read_json(about))
            except (DataError, ValueError, TypeError) as error:
                raise DataError(
                    f"{about} is damaged, so it is unknown which samples the parts are. Remove {self.folder}."
                ) from error
            self._check(found, self.folder)
        else:
            make_folder(self.folder, "--npz")
            try:
                with atomic(about, "--npz") as temporary:
                    temporary.write_text(json.dumps(self.about, indent=2), "utf-8")
            except BsiError:
                self.folder.rmdir()  # it is still empty
                raise
        return [ids for ids in self._parts() if not self._exists(ids)]

    def _check(self, found: dict[str, Any], where: Path) -> None:
        differing = [f"{c.name} {c.before!r} there, {c.after!r} here" for c in changes(found, self.about)]
        if differing:
            raise UsageError(f"{where} holds other samples ({'; '.join(differing)}). Remove it, or use another name.")

    def write(self, ids: range, rows: Shaped[np.ndarray, "rows ..."]) -> None:
        """Write a part atomically."""
        with atomic(self._part(ids), "--npz") as temporary:
            np.save(temporary, rows, allow_pickle=False)

    def join(self) -> Shaped[np.ndarray, "num ..."]:
        """All samples; the parts are replaced by the file."""
        if self.path.exists():
            with np.load(self.path, allow_pickle=False) as arrays:
                return arrays["arr_0"]
        rows = np.concatenate([np.load(self._part(ids), allow_pickle=False) for ids in self._parts()])
        labels = {} if self.labels is None else {"labels": self.labels}
        about = np.array(json.dumps({**self.about, "num": self.num}))
        with atomic(self.path, "--npz") as temporary, temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, arr_0=rows, about=about, **labels)
        shutil.rmtree(self.folder)
        return rows

    def _parts(self) -> list[range]:
        return [range(start, min(start + PART, self.num)) for start in range(0, self.num, PART)]

    def _part(self, ids: range) -> Path:
        return self.folder / f"{ids.start:09d}.npy"

    def _exists(self, ids: range) -> bool:
        """Whether a part is complete. The last part of an earlier, smaller number of samples is drawn again."""
        try:
            return len(np.load(self._part(ids), mmap_mode="r", allow_pickle=False)) == len(ids)
        except (OSError, ValueError, EOFError):
            return False


def draw_into(
    file: SampleFile, missing: list[range], model: Model, sampler: Sampler, seed: int, label: Label, batch_size: int,
    world: World, before_part: Callable[[range], None] = lambda ids: None,
) -> Shaped[np.ndarray, "num ..."] | None:  # fmt: skip
    """Draw the missing parts. Every rank calls it; the first rank gets all samples, the others None."""
    mine, done, each = missing[world.rank :: world.size], file.num - sum(map(len, missing)), sampler.steps + 1
    total, stream = done + sum(map(len, mine)), None if world.first else io.StringIO()
    try:
        with Progress("sample", total * each, "step", done * each, stream) as progress:
            for ids in mine:
                before_part(ids)
                drawn = model.sample(
                    ids, sampler, seed=seed, label=label, batch_size=batch_size, progress=progress.advance
                )
                file.write(ids, drawn.cpu().numpy())
        world.barrier()
        return file.join() if world.first else None
    except KeyboardInterrupt:
        kept = file.num - sum(map(len, file.missing()))
        message = f"{kept} of {file.num} samples are kept, in parts of {PART}. Run the same command to continue."
        raise KeyboardInterrupt(message) from None


# ---- The quality of samples ------------------------------------------------------------------------------------------


def image_batches(rows: Shaped[np.ndarray, "n *shape"], bins: Bins, batch: int) -> Iterator[UInt8[Tensor, "n 3 h w"]]:
    """Bin indices as batches of 8-bit images."""
    for start in range(0, len(rows), batch):
        index = np.asarray(rows[start : start + batch])
        pixels = index if bins.count == 256 else to_uint8(bins.values(index), bins.low, bins.high)
        yield from array_batches([pixels], batch, "images")


def check_images(model: Model) -> Bins:
    """The bins of a model of images; raises if its data has no features, before weights are fetched or images drawn."""
    if model.bins is None or not is_image(model.shape):
        raise UsageError(
            f"only binned images with 1 or 3 channels have features, got data of shape {model.shape}. Use --bpd, which "
            f"evaluates any model."
        )
    return model.bins


def drawn_images(
    model: Model, sampler: Sampler, num: int, world: World, batch: int, seed: int = 0, label: Label = None
) -> Iterator[UInt8[Tensor, "n 3 h w"]]:
    """This rank's samples of 0 .. num - 1 as 8-bit images."""
    bins, mine = check_images(model), range(world.rank, num, world.size)
    for start in range(0, len(mine), batch):
        drawn = model.sample(mine[start : start + batch], sampler, seed=seed, label=label, batch_size=batch)
        yield from image_batches(drawn.cpu().numpy(), bins, batch)


def _counted(batches: Iterator[Tensor], what: str, count: int, show: bool) -> Iterator[Tensor]:
    with shown(show, what, count, "image") as advance:
        for batch in batches:
            yield batch
            advance(len(batch))


@torch.no_grad()
def measure_quality(
    model: Model, split: Split, sampler: Sampler, num: int, extractor: Extractor, world: World, seed: int = 0,
    label: Label = None, batch: int = 256, kid: bool = False, precision_and_recall: bool = False, show: bool = False,
) -> SampleQuality | None:  # fmt: skip
    """Draw `num` samples and compare them with the split. Every rank calls it; the first gets the result."""
    bins, dataset = check_images(model), split.dataset
    sampler = model.named(sampler)
    levels_of(model.method, sampler)  # raises if the sampler cannot draw
    if len(split.rows) < 2:  # before samples are drawn, which may take hours
        raise DataError(
            f"a distance needs at least 2 images of each set: {dataset.name} has {len(split.rows)} in its "
            f"{split.name} split"
        )
    keep = kid or precision_and_recall
    images = drawn_images(model, sampler, num, world, batch, seed, label)
    images = _counted(images, "samples", len(range(world.rank, num, world.size)), show and world.first)
    samples = collect(images, extractor, keep or num <= KEPT).over_ranks()
    if not world.first:
        return None
    images = _counted(image_batches(split.rows, bins, batch), "reference", len(split.rows), show)
    known = reference(dataset.name, dataset.version, split.name, images, extractor, keep)
    spent = evaluations(model.method, sampler.steps, sampler.guidance != 1)
    generation = Generation(str(sampler.solver), spent, seed)
    found = sample_quality(samples, known, extractor, kid, precision_and_recall, generation)
    height, width = model.shape[1:]
    if extractor.resize == "none" or min(height, width) >= SMALL:
        return found
    caution = (
        f"images of {height} x {width} pixels are enlarged by {extractor.resize}, unlike what {extractor.name} was "
        f"trained on: compare {found.metric} only between models of this data. --bpd evaluates the model itself."
    )
    warnings.warn(caution, QualityWarning, stacklevel=2)
    return replace(found, cautions=(*found.cautions, caution))


def quality_record(
    run: EvaluatedRun, sampler: Sampler, seed: int, label: Label, found: SampleQuality
) -> dict[str, Any]:
    """The metric's own record, the sampler and the model. `precision` is the network's, as in the record of a bound."""
    drawing = described(sampler, seed, label)
    return {**found.record(), "extractor_precision": found.precision, "drawing": drawing, **run.record()}


# ---- Animations ------------------------------------------------------------------------------------------------------


def animate_beliefs(model: Model, sampler: Sampler, seed: int, label: Label, num: int, path: Path) -> None:
    """The first `num` samples as an animation: belief mean, prediction and measurement at every step, as values.

    Of images of symbols, it shows the probability of symbol 1 given each pixel's own latent, and as predicted. A VDM's
    latent is not a belief mean; `belief` rescales it to the mean of the sample given its measurements.
    """

    def moment(step: Step, y: Tensor | None) -> Moment:
        if model.symbols is None:
            mean, x_hat = model.decoded(belief(model.method, step).mean), model.decoded(step.x_hat)
            y = None if y is None else model.decoded(y)
        else:
            encoder = model.method.encoder(step.level[None])
            mean, x_hat = map(shades, beliefs(model.symbols, encoder, step.latent, step.x_hat))
            y = None
        return Moment(mean.cpu().numpy(), x_hat.cpu().numpy(), y if y is None else y.cpu().numpy(), float(step.level))

    steps = model.trajectory(range(num), sampler, seed=seed, cond=model.labels(range(num), label))
    moments = []
    for step, after in itertools.pairwise(steps):  # one by one: a GPU holds two steps, not all
        moments.append(moment(step, measurement(model.method, step, after)))
    moments.append(moment(after, None))
    if model.bins is not None or model.symbols is not None:
        low, high = (model.bins.low, model.bins.high) if model.bins else (0.0, 1.0)
    else:
        low, high = float(moments[-1].prediction.min()), float(moments[-1].prediction.max())
    frames = belief_frames(moments, low, high if high > low else low + 1)
    animate(frames, path, lossless=min(model.shape[1:]) < SMALLEST)
