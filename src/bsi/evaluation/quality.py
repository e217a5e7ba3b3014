"""Sample quality of a run: the Frechet distance between features of its samples and of a split of its dataset.

Sample i depends on (seed, i) alone. Rank r of w draws the samples r, r + w, r + 2w, ... and computes their features,
which are gathered in the order of the samples: the result does not depend on the number of ranks.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor

from bsi.errors import DataError, UsageError
from bsi.evaluation.runs import Run, Split
from bsi.evaluation.samples import Label, described
from bsi.metrics import KEPT, Extractor, Generation, QualityWarning, SampleQuality, collect, reference, sample_quality
from bsi.metrics.features import array_batches
from bsi.model import Model
from bsi.pictures import is_image
from bsi.progress import Progress
from bsi.runtime.distributed import World
from bsi.sampler import Sampler
from bsi.sampling import evaluations, levels_of
from bsi.values import Bins, to_uint8

SMALL = 32  # pixels: the smallest images, CIFAR-10's, with published distances by Inception


@torch.no_grad()
def measure_quality(
    model: Model,
    split: Split,
    sampler: Sampler,
    num: int,
    extractor: Extractor,
    world: World,
    seed: int = 0,
    label: Label = None,
    batch: int = 256,
    kid: bool = False,
    precision_and_recall: bool = False,
    show: bool = False,
) -> SampleQuality | None:
    """Draw `num` samples and compare them with the split. Every rank calls it; the first gets the result."""
    if num < 1 or batch < 1:
        raise UsageError(f"num and batch must be at least 1, got num={num} and batch={batch}")
    levels_of(model.method, sampler)  # raises if the sampler cannot draw
    bins = split.dataset.bins
    if bins is None:
        raise DataError(f"a distance between images needs 8-bit images, got continuous data: {split.dataset.name}")
    if len(split.rows) < 2:  # before samples are drawn, which may take hours
        raise DataError(
            f"a distance needs at least 2 images of each set: {split.dataset.name} has {len(split.rows)} in its "
            f"{split.name} split"
        )
    keep = kid or precision_and_recall
    drawn = drawn_images(model, sampler, num, world, batch, seed, label, show)
    samples = collect(drawn, extractor, keep or num <= KEPT).over_ranks()
    if not world.first:
        return None
    dataset = split.dataset
    real = (_pixels(split.rows[start : start + batch], bins) for start in range(0, len(split.rows), batch))
    known = reference(
        dataset.name,
        dataset.version,
        split.name,
        _shown(array_batches(real, batch, dataset.name), len(split.rows), show),
        extractor,
        keep,
    )
    spent = evaluations(model.method, sampler.steps, sampler.guidance != 1)
    generation = Generation(sampler.solver_for(model.method), spent, seed)
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


def check_images(model: Model) -> None:
    """Raise if the data has no features, before weights are fetched or samples drawn."""
    if model.bins is None or not is_image(model.shape):
        raise UsageError(
            f"only binned images with 1 or 3 channels have features, got data of shape {model.shape}. Use --bpd, which "
            f"evaluates any model."
        )


def drawn_images(
    model: Model,
    sampler: Sampler,
    num: int,
    world: World,
    batch: int,
    seed: int = 0,
    label: Label = None,
    show: bool = False,
) -> Iterator[UInt8[Tensor, "n 3 h w"]]:
    """This rank's samples of 0 .. num - 1 as 8-bit images."""
    check_images(model)
    assert model.bins is not None
    bins = Bins(model.bins.low, model.bins.high, model.bins.count)
    mine = range(world.rank, num, world.size)
    with Progress("samples", len(mine), "sample", stream=None if show and world.first else io.StringIO()) as progress:
        for start in range(0, len(mine), batch):
            ids = mine[start : start + batch]
            drawn = model.sample(ids, sampler, seed=seed, label=label, batch_size=batch)
            pixels = _pixels(drawn.cpu().numpy(), bins)
            yield from array_batches([pixels], batch, "the samples")
            progress.advance(len(ids))


def _pixels(index: Shaped[np.ndarray, "n *shape"], bins: Bins) -> UInt8[np.ndarray, "n *shape"]:
    """Bin indices as 8-bit images, by rounding."""
    return np.asarray(index) if bins.count == 256 else to_uint8(bins.values(index), bins.low, bins.high)


def _shown(batches: Iterator[Tensor], count: int, show: bool) -> Iterator[Tensor]:
    with Progress("reference", count, "image", stream=None if show else io.StringIO()) as progress:
        for batch in batches:
            yield batch
            progress.advance(len(batch))


def quality_record(run: Run, sampler: Sampler, seed: int, label: Label, found: SampleQuality) -> dict[str, Any]:
    """The metric's own record, the sampler and the model. `precision` is the network's, as in the record of a bound."""
    return {
        **found.record(),
        "extractor_precision": found.precision,
        "drawing": described(sampler, seed, label),
        **run.record(),
    }
