"""What is trained on: a prepared dataset by name, or a tensor or Dataset that a script brings along, described alike.

The description goes into every checkpoint and export: a model can be built from it without the data, and a run that
goes on compares its `version`, a hash of the content. (Of a Dataset, which can only be asked, the hash is of its length
and of 64 samples: a spot check.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from bsi.backbones.base import Backbone, build
from bsi.backbones.config import BackboneConfig
from bsi.backbones.dit import DiT
from bsi.backbones.mlp import MLP
from bsi.backbones.unet import UNet
from bsi.data.batches import BatchSource, as_source
from bsi.data.store import check_classes, open_dataset
from bsi.errors import DataError, UsageError
from bsi.io import digest, fingerprint
from bsi.model import Model
from bsi.recipe import Recipe
from bsi.refusals import check_finite
from bsi.rng import sample_ids
from bsi.values import Bins, Standardize

Labels = Int64[np.ndarray, " count"]

__all__ = [
    "DataSpec", "TrainingData", "build_model", "config_of", "open_training_data",
]  # fmt: skip

SPOT_CHECK = 64  # samples of a Dataset whose content is hashed
FIT_SAMPLES = 4096  # samples of a Dataset that its mean and standard deviation, or its largest value, are taken from
DARKEST = 64  # 8-bit images reach at least this value somewhere; what never does has fewer levels


@dataclass(frozen=True)
class DataSpec:
    """All that a model and a resumed run need to know of the data."""

    name: str
    version: str
    count: int
    shape: tuple[int, ...]
    bins: Bins | None
    standardize: Standardize | None
    classes: int = 0
    """Labels 0 .. classes - 1 are learned; 0: none are."""
    class_names: tuple[str, ...] = ()
    """Of the labels that are learned, where the data names them."""

    def __post_init__(self) -> None:
        check_classes(self.class_names)  # they may come from a file


@dataclass(frozen=True)
class TrainingData:
    """Batches by index, for training and, if there are any, for evaluation; the training samples' labels."""

    train: BatchSource
    test: BatchSource | None
    spec: DataSpec
    labels: Labels | None = None
    note: str = ""
    """What was assumed of the data and should be told."""


@dataclass(frozen=True)
class InFloat32:
    """The samples of another source, of whatever floats (NumPy makes float64), as networks compute in."""

    source: BatchSource

    def __len__(self) -> int:
        return len(self.source)

    def take(self, ids: Int64[np.ndarray, " batch"]) -> Float32[Tensor, "batch *data"]:
        return self.source.take(ids).float()


def open_training_data(
    recipe: Recipe,
    device: torch.device,
    data: object = None,
    test: object = None,
    bins: Bins | None = None,
    labels: object = None,
) -> TrainingData:
    """The recipe's prepared dataset, or the data that was given; `labels` are those of given training data."""
    if data is None:
        for name, given in (("test", test), ("bins", bins), ("labels", labels)):
            if given is not None:
                raise UsageError(f"{name} belongs to data of your own, and none was given: pass data, or no {name}")
        return _prepared(recipe, device)
    if labels is not None and not recipe.data.labels:
        raise UsageError("labels were given to a recipe that does not learn any: set data.labels=True in it")
    train = as_source(data, device, recipe.data.workers)
    first = train.take(np.zeros(1, np.int64))
    shape = tuple(first.shape[1:])
    standard, note = None, ""
    if first.is_floating_point():
        standard = None if bins is not None else _fit(data, train)
    elif bins is None:
        if first.dtype != torch.uint8:
            raise UsageError(f"integer data other than uint8 needs bins: got {first.dtype}. Pass bins=bsi.Bins(...).")
        note = _as_images(_largest(data, train))
        bins = Bins.uint8()
    known = _labels(labels, len(train), "the data") if recipe.data.labels else None
    version = _version(data, train)
    spec = DataSpec(
        name=recipe.data.name,
        version=version if known is None else fingerprint([version, digest([known.tobytes()])]),
        count=len(train),
        shape=shape,
        bins=bins,
        standardize=standard,
        classes=_classes(known),
    )
    tested = None if test is None else as_source(test, device, recipe.data.workers)
    if first.is_floating_point():
        train = InFloat32(train)
    if tested is not None:
        example = tested.take(np.zeros(1, np.int64))
        if tuple(example.shape[1:]) != shape or (bins is None and not example.is_floating_point()):
            raise UsageError(
                f"test samples are like those of training, of shape {shape} and {first.dtype}: got "
                f"{tuple(example.shape[1:])} and {example.dtype}. Pass test=None to train without."
            )
        if example.is_floating_point():
            tested = InFloat32(tested)
    return TrainingData(train, tested, spec, known, note)


def _prepared(recipe: Recipe, device: torch.device) -> TrainingData:
    dataset = open_dataset(recipe.data.name)
    bins, standard = dataset.bins, dataset.standardize
    given = None if dataset.labels is None else dataset.labels.train
    known = _labels(given, len(dataset.train), dataset.name) if recipe.data.labels else None
    names = () if known is None or dataset.labels is None else dataset.labels.names
    if names and _classes(known) > len(names):
        raise DataError(f"{dataset.name} has {_classes(known)} classes and names for {len(names)}: prepare it again")
    spec = DataSpec(
        name=dataset.name,
        version=dataset.version,
        count=len(dataset.train),
        shape=dataset.shape,
        bins=bins,
        standardize=standard,
        classes=len(names) or _classes(known),
        class_names=names,
    )
    test = as_source(dataset.test) if len(dataset.test) else None
    return TrainingData(as_source(dataset.split("train"), device), test, spec, known)


def _labels(given: object, count: int, name: str) -> Labels:
    """Whole numbers from 0 on, one for each sample."""
    if given is None:
        raise DataError(
            f"{name} has no labels to learn: leave data.labels out, or give them with the data (of a folder's images: "
            f"`bsi data folder --labels`)"
        )
    labels = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    if labels.shape != (count,) or not np.issubdtype(labels.dtype, np.integer) or int(labels.min(initial=0)) < 0:
        raise DataError(
            f"labels are whole numbers from 0 on, one for each of the {count} samples of {name}: got {labels.dtype} of "
            f"shape {labels.shape}, the smallest {labels.min(initial=0)}"
        )
    return labels.astype(np.int64)


def _classes(labels: Labels | None) -> int:
    return 0 if labels is None else int(labels.max(initial=-1)) + 1


def _fit(data: object, source: BatchSource) -> Standardize:
    """Mean and standard deviation over all of a tensor, or over samples spread through anything else."""
    x = data.double() if isinstance(data, Tensor) else source.take(_spread(source, FIT_SAMPLES)).double()
    check_finite(x)
    mean, std = float(x.mean()), float(x.std(correction=0))
    if not (np.isfinite(mean) and np.isfinite(std) and std > 0):
        raise DataError(f"data has mean {mean} and standard deviation {std}: constant data cannot be standardized")
    return Standardize(mean, std)


def _largest(data: object, source: BatchSource) -> int:
    """The largest value in all of a tensor or array, or in samples spread through anything else."""
    values = data if isinstance(data, Tensor | np.ndarray) else source.take(_spread(source, FIT_SAMPLES))
    return int(values.max())


def _as_images(largest: int) -> str:
    """What to tell of uint8 data that came without bins: nothing where it has all the values of 8-bit images."""
    if largest < DARKEST:
        raise UsageError(
            f"uint8 data without bins is taken as 8-bit images, 0 to 255, but no value exceeds {largest}: pass "
            f"bins=bsi.Bins(-1.0, 1.0, {max(largest, 1) + 1}) for values 0 to {max(largest, 1)}, or "
            f"bins=bsi.Bins.uint8() if they are 8-bit images"
        )
    if largest == 255:
        return ""
    return (
        f"the data is taken as 8-bit images with 256 levels, though no value exceeds {largest}: pass "
        f"bins=bsi.Bins(low, high, count) if it has fewer levels, bins=bsi.Bins.uint8() if not"
    )


def _version(data: object, source: BatchSource) -> str:
    """A hash of the content: all of a tensor or array, a spot check of anything else."""
    if isinstance(data, Tensor | np.ndarray):
        array = data.detach().cpu().numpy() if isinstance(data, Tensor) else data
        return fingerprint([str(array.dtype), list(array.shape), digest([np.ascontiguousarray(array).tobytes()])])
    sample = source.take(_spread(source, SPOT_CHECK)).cpu().numpy()
    return fingerprint([len(source), str(sample.dtype), list(sample.shape), digest([sample.tobytes()])])


def _spread(source: BatchSource, count: int) -> Int64[np.ndarray, " count"]:
    """Some samples from all over a set, always the same ones; not those that a run with seed 0 begins with."""
    return np.sort(sample_ids(2**63, len(source), 0, min(count, len(source))))


def config_of(backbone: torch.nn.Module, data: DataSpec) -> BackboneConfig | None:
    """The config that `build_model` would make this network of for this data; None for any other network."""
    if type(backbone) not in (DiT, UNet, MLP):  # a subclass may compute anything
        return None
    ours = cast(DiT | UNet | MLP, backbone)
    with torch.device("meta"):
        again = build(ours.config, ours.shape, None if data.bins is None else data.bins.count, data.classes)
    alike = ours.shape == data.shape and again.fourier.exponents == ours.fourier.exponents
    return ours.config if alike and _described(again) == _described(ours) else None


def _described(network: torch.nn.Module) -> tuple[str, dict[str, torch.Size]]:
    """Its parts, and the shapes of its weights."""
    return repr(network), {name: tensor.shape for name, tensor in network.state_dict().items()}


def build_model(recipe: Recipe, data: DataSpec, backbone: torch.nn.Module | None = None) -> Model:
    """The model of a recipe for data of this description; `backbone` is the caller's network, if it is not ours."""
    if backbone is None:
        if recipe.backbone is None:
            raise UsageError("this recipe has no network of its own: pass backbone=...")
        backbone = build(recipe.backbone, data.shape, None if data.bins is None else data.bins.count, data.classes)
    elif isinstance(backbone, Backbone) and backbone.shape != data.shape:
        raise UsageError(
            f"the network was built for data of shape {backbone.shape}, and this data has shape {data.shape}: build it "
            f"for that one"
        )
    return Model(
        backbone,
        recipe.method,
        data.shape,
        bins=data.bins,
        standardize=data.standardize,
        parametrization=recipe.parametrization,
        sigma_data=recipe.sigma_data,
        class_names=data.class_names,
    )
