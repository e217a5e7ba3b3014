"""Arrays of any shape from a `.npy` or `.npz` file: the way in for data that is not images.

With bins, integers are bin indices and floats are values that are stored as the nearest bin's index. Without bins the
data is continuous: it is stored as float32 in its own units, and the manifest carries mean and std of the training
part, with which a model standardizes it. An archive with arrays named `train` and `test` is split as it says; any other
single array is split by a hash of the row's number. Labels may be given as `train_labels` and `test_labels`; those of
a single array also as `labels` or `y`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import Integer, Shaped

from bsi.data.npy import ArrayFile, NpzFile
from bsi.data.plan import BLOCK_BYTES, MOST_CLASSES, Block, Plan
from bsi.errors import DataError, UsageError
from bsi.io import digest_file
from bsi.rng import uniforms
from bsi.values import Bins

__all__ = ["Arrays"]

SPLIT_SEED = 0
LABELS = ("labels", "y")  # what the labels of a single array may be called


@dataclass(frozen=True)
class Arrays:
    """The rows of an array; `bins` describes integers (LOW HIGH COUNT), none says that the data is continuous."""

    summary: ClassVar[str] = (
        "arrays of any shape from a .npy or .npz file; --bins LOW HIGH COUNT, or none for continuous data"
    )

    path: Path
    bins: tuple[float, float, int] | None = None
    test_fraction: float = 0.1

    def plan(self) -> Plan:
        if not 0 <= self.test_fraction < 1:
            raise UsageError(f"test_fraction lies in [0, 1): got {self.test_fraction}")
        path = self.path.expanduser()
        bins = Bins(*self.bins) if self.bins else None
        with ExitStack() as stack:
            arrays = _opened(path, stack)
            labeled = "train_labels" in arrays
            data = {name: array for name, array in arrays.items() if not name.endswith("_labels")}
            first = next(iter(data.values()))
            for array in data.values():
                _check(array, first, bins)
            for name, array in arrays.items():
                if name.endswith("_labels"):
                    _check_labels(array, data, name.removesuffix("_labels"))
            total = sum(len(array) for array in data.values())
            shape = first.header.shape[1:]
            split = "by name" if "test" in data else f"row i is for testing if hash(i) < {self.test_fraction}"
        return Plan(
            name=path.stem,
            source=f"arrays of {path.name}",
            shape=shape,
            dtype=bins.dtype if bins else np.dtype("<f4"),
            bins=bins,
            options={"split": split, "bins": asdict(bins) if bins else None},
            input=digest_file(path),
            total=total,
            rows=total,
            unit="row",
            blocks=lambda start: _blocks(path, bins, self.test_fraction, start),
            label_dtype=np.dtype("<i4") if labeled else None,
        )


def _opened(path: Path, stack: ExitStack) -> dict[str, ArrayFile]:
    """The arrays by name: `train`, and what else there is of `test`, `train_labels`, `test_labels`."""
    if not path.is_file():
        raise DataError(f"{path} does not exist or is not a file. Give a .npy or .npz file with --from.")
    if path.suffix == ".npy":
        return {"train": stack.enter_context(ArrayFile.at(path))}
    if path.suffix != ".npz":
        raise DataError(f"{path} is neither .npy nor .npz. Save arrays with numpy.save or numpy.savez.")
    archive = stack.enter_context(NpzFile.at(path))
    return {name: stack.enter_context(archive.array(theirs)) for name, theirs in _named(path, archive.names).items()}


def _named(path: Path, names: Sequence[str]) -> dict[str, str]:
    """Our names of the arrays in an archive, and theirs."""
    known = {name: name for name in ("train", "test", "train_labels", "test_labels") if name in names}
    labels = [name for name in LABELS if name in names]
    if "train" not in known:
        data = [name for name in names if name not in labels] or labels
        if len(data) != 1 or len(labels) > 1:
            raise DataError(
                f"{path} holds the arrays {', '.join(names) or 'none'}: name one of them `train`, or keep only one, "
                f"with its labels as `labels`."
            )
        known, labels = {"train": data[0]}, [name for name in labels if name != data[0]]
    if labels and ("test" in known or "train_labels" in known or len(labels) > 1):
        raise DataError(
            f"{path} holds {', '.join([*known, *labels])}, and it is not clear what {labels[-1]} labels: name labels "
            f"train_labels and test_labels."
        )
    if ("train_labels" in known) != ("test_labels" in known) and "test" in known:
        raise DataError(f"{path} has labels for one split only: give both train_labels and test_labels, or neither.")
    return {**known, **({"train_labels": labels[0]} if labels else {})}


def _check(array: ArrayFile, first: ArrayFile, bins: Bins | None) -> None:
    if array.header.shape[1:] != first.header.shape[1:]:
        raise DataError(
            f"{array.name} has samples of shape {array.header.shape[1:]}, {first.name} of {first.header.shape[1:]}."
        )
    if not array.header.row_bytes:
        raise DataError(f"{array.name} has shape {array.header.shape}: its samples are empty.")
    if bins is None and array.header.dtype.kind != "f":
        raise UsageError(
            f"{array.name} holds {array.header.dtype}: say what the integers stand for with --bins LOW HIGH COUNT "
            f"(8-bit images: --bins -1 1 256), or convert continuous data to float."
        )


def _check_labels(array: ArrayFile, data: dict[str, ArrayFile], split: str) -> None:
    if split not in data or array.header.shape != (len(data[split]),) or array.header.dtype.kind not in "iu":
        raise DataError(
            f"{array.name} has shape {array.header.shape} of {array.header.dtype}; expected one integer per {split} "
            f"sample."
        )
    _numbers(array)


def _blocks(path: Path, bins: Bins | None, test_fraction: float, start: int) -> Iterator[Block]:
    with ExitStack() as stack:
        arrays = _opened(path, stack)
        first = 0  # the number of the first row of this array among all rows
        for split in ("train", "test"):
            if split not in arrays:
                continue
            array, labels = arrays[split], arrays.get(f"{split}_labels")
            row = min(max(0, start - first), len(array))
            numbers = None if labels is None else _numbers(labels)
            for rows in array.blocks(row, BLOCK_BYTES):
                stored = _stored(rows, bins, array.name, row)
                is_test = np.full(len(rows), split == "test")
                if "test" not in arrays:
                    is_test = uniforms(SPLIT_SEED, row, len(rows)) < test_fraction
                masks = {"train": ~is_test, "test": is_test}
                here = None if numbers is None else numbers[row : row + len(rows)]
                yield Block(
                    items=len(rows),
                    rows={name: stored[mask] for name, mask in masks.items()},
                    labels={} if here is None else {name: here[mask] for name, mask in masks.items()},
                )
                row += len(rows)
            first += len(array)


def _numbers(labels: ArrayFile) -> Integer[np.ndarray, " rows"]:
    """Labels take one number per sample: they are read whole."""
    numbers = np.concatenate([np.empty(0, labels.header.dtype), *labels.blocks(0, BLOCK_BYTES)])
    bad = np.flatnonzero((numbers < 0) | (numbers >= MOST_CLASSES))
    if len(bad):
        raise DataError(f"{labels.name}: row {bad[0]} is {numbers[bad[0]]}. Labels count from 0, below {MOST_CLASSES}.")
    return numbers


def _stored(
    rows: Shaped[np.ndarray, "rows *shape"], bins: Bins | None, name: str, first: int
) -> Shaped[np.ndarray, "rows *shape"]:
    """Rows as they are stored, refused with the number of the first bad one."""
    if rows.dtype.kind == "f":
        with np.errstate(over="ignore"):
            values = rows.astype("<f4")
        low, high = (bins.low, bins.high) if bins else (-np.inf, np.inf)
        bad = ~(np.isfinite(values) & (rows >= low) & (rows <= high))
        problem = f"values outside [{low}, {high}]" if bins else "values that are NaN, infinite or beyond float32"
        stored = values if bins is None else bins.indices(np.where(bad, low, rows).astype(np.float64))
    else:
        assert bins is not None, "integers without bins were refused by the plan"
        bad = (rows < 0) | (rows >= bins.count) if rows.dtype.kind != "b" else np.zeros_like(rows)
        problem = f"integers outside 0 .. {bins.count - 1}"
        stored = rows.astype(bins.dtype)
    if bad.any():
        row = first + int(np.flatnonzero(bad.reshape(len(rows), -1).any(1))[0])
        fix = "Remove such rows" + (", or describe the data with other --bins." if bins else ", or repair them.")
        raise DataError(f"{name}: row {row} has {problem}. {fix}")
    return stored
