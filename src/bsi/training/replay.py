"""A step recorded once and then replayed: one launch in place of hundreds (CUDA graphs).

A small network's step is over on the device before the host has launched it: 717 kernels of `dit-mini` take 22 ms on an
H200, and launching them 38 ms. A recording holds every kernel of a step with its arguments. So it needs what all steps
share: inputs that lie in one place (`held`), and nothing that the host decides on the way (dials.py). Random numbers
that the network draws come from torch's generator, whose seed a replay reads anew.

The first steps run as they are, on the stream that will record: they choose algorithms, compile, and make the work
space of matrix products, which belongs to a stream. No two recordings share one: when a recording goes, torch frees the
work space of its stream, whoever else uses it. The next one may have the stream, and few work spaces are made.

The memory of a recording is its own for good, and beside it evaluations need theirs: a step that takes much of what
this process can have is not recorded. It would gain nothing, since the device is then the slower one. Nor is a step
that might ask the host, nor one of several ranks or pieces (`replayable` in step.py).
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from bsi.training.room import room
from bsi.training.stream import Batch

__all__ = ["Replay"]

PLAIN_STEPS = 3
LARGEST_SHARE = 0.4  # of the memory that this process has or could have


class Replay:
    """`step(batch)` for batches of one shape. Beside the batch it may use tensors that are changed in place."""

    def __init__(self, device: torch.device) -> None:
        idle = _idle(device)
        self._device, self._stream = device, idle.pop() if idle else torch.cuda.Stream(device)
        weakref.finalize(self, idle.append, self._stream)
        self._held: Batch | None = None
        self._plain_steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, step: Callable[[Batch], None], batch: Batch) -> None:
        """One step on a batch; `step` is always the same one."""
        if self._held is None:
            self._held = batch.clone()
        else:
            self._held.copy_(batch)
        if self._plain_steps == PLAIN_STEPS and self._graph is None and self._small():
            self._graph = self._record(step, self._held)
        if self._graph is not None:
            self._graph.replay()
            return
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            step(self._held)
        here.wait_stream(self._stream)
        self._plain_steps += 1

    def _small(self) -> bool:
        return torch.cuda.max_memory_allocated(self._device) < LARGEST_SHARE * room(self._device)

    def _record(self, step: Callable[[Batch], None], held: Batch) -> torch.cuda.CUDAGraph:
        """All kernels of a step, without running them. Other threads, which fetch data, go on meanwhile."""
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                _without_collector(),
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                step(held)
        except RuntimeError as error:
            first = error.__context__ or error  # ending a recording that went wrong is an error of its own
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            raise RuntimeError(
                f"the training step could not be recorded as a CUDA graph ({first}). Run it again with --accumulation "
                "2, whose steps are not recorded: the same --out goes on."
            ) from error
        torch.cuda.empty_cache()  # of the gradients that the last plain step had left
        return graph


@functools.cache
def _idle(device: torch.device) -> list[torch.cuda.Stream]:
    """Streams whose `Replay` is gone."""
    return []


@contextmanager
def _without_collector() -> Iterator[None]:
    """Python's collector may free another recording, or a kernel; while one is made, that would spoil it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
