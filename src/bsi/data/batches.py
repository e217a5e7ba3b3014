"""Batches by index, from tensors, arrays, memory maps and torch Datasets. The only file of data/ that imports torch.

    source = as_source(dataset.train, device="cuda")          # or a tensor, or any map-style torch Dataset
    x = source.take(sample_ids(seed, len(source), start, count))

A set that fits is kept on the device; a larger one is gathered from its memory map. The result of `take` depends on the
ids alone, not on where the samples are stored or how many workers fetch them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from bsi.errors import DataError, UsageError
from bsi.rng import coins

RESIDENT_PART = 0.25  # of the free memory of the device: a set that takes at most this is kept there
CHUNK_BYTES = 64 << 20
AHEAD = 2  # batches


@runtime_checkable
class BatchSource(Protocol):
    """Samples by index."""

    def __len__(self) -> int: ...

    def take(self, ids: Int64[np.ndarray, " batch"]) -> Shaped[Tensor, "batch *data"]: ...


def as_source(data: object, device: torch.device | str = "cpu", workers: int = 0) -> BatchSource:
    """Batches on `device` from a tensor, an array, a memory map or a map-style Dataset; a BatchSource is returned."""
    device = torch.device(device)
    kind = type(data).__name__
    if isinstance(data, BatchSource) and not isinstance(data, Tensor | np.ndarray):  # both have a `take` of their own
        return data
    if isinstance(data, Sequence | dict) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        instead = "a tensor, an array, a map-style Dataset (__getitem__, __len__) or an object with __len__ and take"
        raise UsageError(f"cannot take samples from a {kind}. Give {instead}.")
    if getattr(data, "ndim", 1) == 0 or not len(data):
        raise DataError(f"a set of samples needs at least one: got an empty {kind} or a single number.")
    if isinstance(data, Tensor):
        return ResidentSource(data.detach().to(device))
    if not isinstance(data, np.ndarray):
        return MapSource(data, device, workers)
    if device.type == "cuda" and data.nbytes <= RESIDENT_PART * torch.cuda.mem_get_info(device)[0]:
        return ResidentSource(_upload(data, device))
    return MappedSource(data, device)


@dataclass(frozen=True)
class ResidentSource:
    """A set on the device: a batch is one indexing operation."""

    data: Shaped[Tensor, "n *data"]

    def __len__(self) -> int:
        return len(self.data)

    def take(self, ids: Int64[np.ndarray, " batch"]) -> Shaped[Tensor, "batch *data"]:
        return self.data[_to_device(torch.from_numpy(ids), self.data.device)]


@dataclass(frozen=True)
class MappedSource:
    """A memory map or array on the host: a batch is gathered and copied to the device."""

    array: Shaped[np.ndarray, "n *data"]
    device: torch.device

    def __len__(self) -> int:
        return len(self.array)

    def take(self, ids: Int64[np.ndarray, " batch"]) -> Shaped[Tensor, "batch *data"]:
        # Ascending reads of a memory map follow the disk; the requested order is restored afterwards.
        order = np.argsort(ids, kind="stable")
        rows = np.empty((len(ids), *self.array.shape[1:]), self.array.dtype)
        rows[order] = np.asarray(self.array)[ids[order]]
        return _to_device(_tensor(rows), self.device)


class MapSource:
    """A map-style torch Dataset: a sample is `dataset[i]`, or its first element. Fetched by `workers` threads."""

    def __init__(self, dataset: Any, device: torch.device, workers: int = 0) -> None:
        self.dataset, self.device, self.name = dataset, device, type(dataset).__name__
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="bsi-data") if workers else None

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, ids: Int64[np.ndarray, " batch"]) -> Shaped[Tensor, "batch *data"]:
        samples = list((self.pool.map if self.pool else map)(self._sample, ids.tolist()))
        forms = [f"{sample.dtype} of shape {tuple(sample.shape)}" for sample in samples]
        for index, form in zip(ids, forms, strict=True):
            if form != forms[0]:
                found = f"{ids[0]} is {forms[0]}, {index} is {form}"
                raise DataError(f"samples of {self.name} differ: {found}. Give all one form in its __getitem__.")
        return _to_device(torch.stack(samples), self.device)

    def _sample(self, index: int) -> Tensor:
        item = self.dataset[index]
        if isinstance(item, tuple | list):
            item = item[0]
        if isinstance(item, np.ndarray):
            return _tensor(np.array(item))
        if not isinstance(item, Tensor):
            found = f"sample {index} of {self.name} is a {type(item).__name__}"
            raise DataError(f"{found}, expected a tensor or an array, alone or first in a tuple. Convert it.")
        return item


def windows(source: BatchSource) -> BatchSource:
    """Every piece of one series, at any offset, from a source of consecutive pieces of shape (length,). No copy."""
    if isinstance(source, ResidentSource) and source.data.ndim == 2:
        return ResidentSource(source.data.reshape(-1).unfold(0, source.data.shape[1], 1))
    if isinstance(source, MappedSource) and source.array.ndim == 2:
        series, length = source.array.reshape(-1), source.array.shape[1]
        return MappedSource(np.lib.stride_tricks.sliding_window_view(series, length), source.device)
    got = f"{type(source).__name__} of {tuple(source.take(np.zeros(1, np.int64)).shape[1:])}"
    raise UsageError(f"windows need an array of samples of shape (length,), got {got}. Set data.windows to False.")


def _tensor(rows: Shaped[np.ndarray, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """A tensor of writable rows; unsigned 16-bit integers, with which torch computes little, become 32-bit ones."""
    return torch.from_numpy(rows.astype(np.int32) if rows.dtype == np.uint16 else rows)


def _upload(array: Shaped[np.ndarray, "n *data"], device: torch.device) -> Shaped[Tensor, "n *data"]:
    """Copy a memory map to the device in pieces, without holding all of it on the host."""
    each = max(1, CHUNK_BYTES // max(1, array[:1].nbytes))
    out = torch.empty(array.shape, dtype=_tensor(np.array(array[:1])).dtype, device=device)
    for start in range(0, len(array), each):
        out[start : start + each] = _tensor(np.array(array[start : start + each])).to(device)
    return out


def _to_device(x: Shaped[Tensor, "*shape"], device: torch.device) -> Shaped[Tensor, "*shape"]:
    """Copy through pinned memory, so that the copy overlaps with computation and the host does not wait."""
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def flip(x: Shaped[Tensor, "batch *data width"], seed: int, start: int) -> Shaped[Tensor, "batch *data width"]:
    """Mirror each image with probability one half, decided by the random number of position start + i of the stream."""
    heads = _to_device(torch.from_numpy(coins(seed, start, len(x))), x.device)
    return torch.where(heads.view(-1, *[1] * (x.ndim - 1)), x.flip(-1), x)


def ahead(source: BatchSource, ids: Iterable[Int64[np.ndarray, " batch"]]) -> Iterator[Tensor]:
    """The batches of `ids`, in order, with the next two of them fetched in the background."""
    waiting = []
    with ThreadPoolExecutor(1, thread_name_prefix="bsi-ahead") as pool:
        for batch in ids:
            waiting.append(pool.submit(source.take, batch))
            if len(waiting) > AHEAD:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()
