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

Where recording fails, nothing is lost: kernels that are recorded do not run, so weights, moments, averages and counters
are what they were, and the gradients that the attempt left are the first thing that a step drops. Every step then runs
as it is, on the caller's stream.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
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
        self._failed = False

    @property
    def recorded(self) -> bool:
        """Whether steps are replayed from here on."""
        return self._graph is not None

    def __call__(self, step: Callable[[Batch], None], batch: Batch) -> None:
        """One step on a batch; `step` is always the same one."""
        if self._failed:
            step(batch)
            return
        if self._held is None:
            self._held = batch.clone()
        else:
            self._held.copy_(batch)
        if self._plain_steps == PLAIN_STEPS and self._graph is None and self._small():
            try:
                self._graph = self._record(step, self._held)
            except RuntimeError as error:
                self._give_up(error)
        if self._failed:  # outside the handler: the error holds all that the attempt had computed
            step(batch)
        elif self._graph is not None:
            self._graph.replay()
        else:
            self._run(step, self._held)

    def _run(self, step: Callable[[Batch], None], held: Batch) -> None:
        """A plain step, on the stream that will record."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            step(held)
        here.wait_stream(self._stream)
        self._plain_steps += 1

    def _small(self) -> bool:
        return torch.cuda.max_memory_allocated(self._device) < LARGEST_SHARE * room(self._device)

    def _record(self, step: Callable[[Batch], None], held: Batch) -> torch.cuda.CUDAGraph:
        """All kernels of a step, without running them. Other threads, which fetch data, go on meanwhile."""
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        here = torch.cuda.current_stream(self._device)
        try:
            with (
                _without_collector(),
                torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                step(held)
        except RuntimeError:
            torch.cuda.set_stream(here)  # torch leaves the recording's own in place where ending it fails
            graph.reset()
            _end_recording(self._device, pool)
            raise
        torch.cuda.empty_cache()  # of the gradients that the last plain step had left
        return graph

    def _give_up(self, error: RuntimeError) -> None:
        self._failed, self._held = True, None
        # Ending a recording that went wrong is an error of its own; and CUDA's go on with advice.
        cause = str(error.__context__ or error).partition("\n")[0]
        warnings.warn(
            f"the training step could not be recorded as a CUDA graph ({cause}). It goes on unrecorded: the same "
            "computation, slower where the network is small.",
            RuntimeWarning,
            stacklevel=3,
        )


def _end_recording(device: torch.device, pool: tuple[int, int]) -> None:
    """What torch (before 2.12) leaves undone where CUDA has declared a recording invalid."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(RuntimeError):  # it has ended by itself
        torch._C._cuda_endAllocateToPool(index, pool)  # until then, giving cached memory back is an internal error
        torch._C._cuda_releasePool(index, pool)
    generator = torch.cuda.default_generators[index]
    seed = generator.initial_seed()
    try:
        torch.rand((), device=device)
    except RuntimeError:  # it still waits for the recording's end
        generator.graphsafe_set_state(torch.Generator(device))
    generator.manual_seed(seed)  # as it was set before the step


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
