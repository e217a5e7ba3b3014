"""Arrays of any shape from a `.npy` or `.npz` file: the source for data that is not images.

With bins, integers are bin indices, and floats are values that are stored as the index of the nearest bin. With a
number of symbols, integers are symbols. Otherwise the data is continuous and stored as float32 in its own units. An
archive with arrays named `train` and `test` keeps these splits; a single array is split by a hash of the row's number.
Labels are arrays named `train_labels` and `test_labels`; those of a single array can also be named `labels` or `y`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Integer, Shaped

from bsi.data.files import ArrayFile, open_arrays
from bsi.data.prepare import MAX_CLASSES, Block, Part, Plan, check_fraction, rows_for_testing
from bsi.errors import DataError, UsageError
from bsi.io import digest_file
from bsi.values import Bins, Symbols

Kind = Bins | Symbols | None
LABELS = ("labels", "y")  # names of the labels of a single array


@dataclass(frozen=True)
class Arrays:
    """The rows of an array, with the arguments of their `Bins`, the number of their `Symbols`, or neither."""

    summary: ClassVar[str] = "arrays of any shape from a .npy or .npz file; --bins LOW HIGH COUNT, --symbols COUNT"

    path: Path
    bins: tuple[float, float, int] | None = None
    symbols: int | None = None
    test_fraction: float = 0.1

    def plan(self) -> Plan:
        check_fraction(self.test_fraction)
        path = self.path.expanduser()
        if self.bins and self.symbols is not None:
            raise UsageError("--bins are for numbers and --symbols for integers without an order: leave one out.")
        kind: Kind = Bins(*self.bins) if self.bins else Symbols(self.symbols) if self.symbols is not None else None
        with ExitStack() as stack:
            arrays = _opened(path, stack)
            data, shape = (
                {name: arrays[name] for name in ("train", "test") if name in arrays},
                arrays["train"].shape[1:],
            )
            for split, array in data.items():
                _labels(arrays, split)
                if array.shape[1:] != shape:
                    shapes = f"{array.shape[1:]}, train of {shape}"
                    raise DataError(f"{array.name} has samples of shape {shapes}. Give both one shape.")
                if not array.row_bytes:
                    raise DataError(f"{array.name} has shape {array.shape}: its samples are empty.")
                if kind is None and array.dtype.kind != "f":
                    fix = "Give --bins LOW HIGH COUNT (8-bit images: -1 1 256), --symbols COUNT, or convert it to float"
                    raise UsageError(f"{array.name} holds {array.dtype}. {fix}.")
                if isinstance(kind, Symbols) and array.dtype.kind == "f":
                    raise UsageError(f"{array.name} holds {array.dtype}, and symbols are integers. Use .astype(int).")
        if isinstance(kind, Symbols):
            kind.latent_shape(shape)  # raises for samples that are too large when they are embedded
        return Plan(
            name=path.stem,
            source=f"arrays of {path.name}",
            shape=shape,
            kind=kind,
            options={
                "split": "by name" if "test" in data else f"row i is for testing if hash(i) < {self.test_fraction}",
                "bins": asdict(kind) if isinstance(kind, Bins) else None,
                **({"symbols": kind.count} if isinstance(kind, Symbols) else {}),
            },
            input=digest_file(path),
            parts=[Part(len(array), partial(self._blocks, path, split, kind)) for split, array in data.items()],
            label_dtype=np.dtype("<i4") if "train_labels" in arrays else None,
        )

    def _blocks(self, path: Path, split: str, kind: Kind, start: int) -> Iterator[Block]:
        with ExitStack() as stack:
            arrays = _opened(path, stack)
            array, labels = arrays[split], _labels(arrays, split)
            for rows in array.blocks(start):
                here = slice(start, start + len(rows))
                is_test: Any = split == "test"
                if "test" not in arrays:
                    is_test = rows_for_testing(start, len(rows), self.test_fraction)
                yield Block(_stored(rows, kind, array.name, start), is_test, None if labels is None else labels[here])
                start += len(rows)


def _opened(path: Path, stack: ExitStack) -> dict[str, ArrayFile]:
    """The arrays by name: `train`, and those that exist of `test`, `train_labels`, `test_labels`."""
    arrays = stack.enter_context(open_arrays(path))
    return {name: stack.enter_context(arrays[theirs]()) for name, theirs in _names(path, arrays).items()}


def _names(path: Path, names: Collection[str]) -> dict[str, str]:
    """The names of the arrays in a file, by the names used here."""
    known = {name: name for name in ("train", "test", "train_labels", "test_labels") if name in names}
    labels = [name for name in LABELS if name in names]
    if "train" not in known:
        data = [name for name in names if name not in labels]
        if len(data) != 1 or len(labels) > 1:
            held = f"{path} holds the arrays {', '.join(names) or 'none'}"
            raise DataError(f"{held}: name one of them `train`, or keep only one, with its labels as `labels`.")
        known = {"train": data[0]}
    if labels and ("test" in known or "train_labels" in known or len(labels) > 1):
        unclear = f"it is unclear what {labels[-1]} belongs to"
        raise DataError(f"{path} holds {', '.join([*known, *labels])}: {unclear}. Name it train_labels or test_labels.")
    if "test" in known and ("train_labels" in known) != ("test_labels" in known):
        raise DataError(f"{path} has labels for one split only: give both train_labels and test_labels, or neither.")
    return {**known, **({"train_labels": labels[0]} if labels else {})}


def _labels(arrays: Mapping[str, ArrayFile], split: str) -> Integer[np.ndarray, " count"] | None:
    found = arrays.get(f"{split}_labels")
    return None if found is None else found.labels(len(arrays[split]), 0, MAX_CLASSES - 1)


def _stored(
    rows: Shaped[np.ndarray, "rows *shape"], kind: Kind, name: str, first: int
) -> Shaped[np.ndarray, "rows *shape"]:
    """Rows as they are stored. Errors name the first invalid row."""
    low: Any
    high: Any
    if rows.dtype.kind != "f":
        assert kind is not None, "the plan rejects integers without bins or symbols"
        low, high, problem = 0, kind.count - 1, f"integers outside 0 .. {kind.count - 1}"
    elif isinstance(kind, Bins):
        low, high, problem = kind.low, kind.high, f"values outside [{kind.low}, {kind.high}]"
    else:
        high = np.finfo(np.float32).max
        low, problem = -high, "values that are NaN, infinite or beyond float32"
    good = (rows >= low) & (rows <= high)
    if not good.all():
        row = first + int(np.flatnonzero(~good.reshape(len(rows), -1).all(1))[0])
        fix = f"or describe the data with other --{type(kind).__name__.lower()}" if kind else "or repair them"
        raise DataError(f"{name}: row {row} has {problem}. Remove such rows, {fix}.")
    if rows.dtype.kind == "f" and isinstance(kind, Bins):
        return kind.indices(rows)
    return rows.astype(kind.dtype if kind else "<f4")
