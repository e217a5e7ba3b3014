"""CUDA graphs: a training step is recorded once and then replayed, with one launch instead of hundreds.

A small network's step takes the device less time than the host needs to launch it: 717 kernels of `dit-mini` run in
22 ms on an H200, and launching them takes 38 ms. A recording holds every kernel of a step with its arguments. So the
inputs of all steps must be at the same address (`held`), and values that change between steps must be in tensors. The
network's random numbers come from torch's generator, whose seed each replay reads.

The first steps run normally, on the stream that will record: they choose algorithms, compile, and allocate the
workspace of matrix products, which belongs to a stream. A recording never releases its memory, and evaluations need
memory too, so a step that takes a large share of it is not recorded. It would gain nothing, since the device is then
slower than the host. `replayable` lists the other steps that are not recorded.

If recording fails, the state is unchanged: kernels do not run while they are recorded, and every step begins by
clearing the gradients that the attempt left. All steps then run normally, on the caller's stream.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from bsi.backbones.layers import Backbone
from bsi.devices import available
from bsi.model import Model
from bsi.recipe import Recipe
from bsi.runtime.distributed import World

PLAIN_STEPS = 3
LARGEST_SHARE = 0.4  # largest fraction of the available memory that a recorded step may take
MOST_LABELS = 3072  # for larger batches the gradient of torch's embedding sorts the labels and synchronizes


def replayable(recipe: Recipe, model: Model, world: World) -> bool:
    """Whether a step is a single batch that never waits for the host.

    A network passed by the caller might, and the gradient of an embedding of many labels does.
    """
    single = world.size == 1 and not recipe.sharded and recipe.accumulation == 1 and not recipe.audit
    few = not recipe.data.labels or recipe.batch <= MOST_LABELS
    return recipe.compile and single and few and isinstance(model.denoiser.backbone, Backbone)


class Replay:
    """Calls `step(inputs)` for inputs of the same shapes. It may also use tensors that are changed in place."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._held: list[Tensor] | None = None
        self._plain_steps, self._failed = 0, False
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def recorded(self) -> bool:
        """Whether a step has been recorded and is replayed from now on."""
        return self._graph is not None

    def __call__(self, step: Callable[[list[Tensor]], None], inputs: list[Tensor]) -> None:
        """One step on these inputs; `step` must do the same in every call."""
        if not self._failed:
            if self._held is None:
                self._held = [tensor.clone() for tensor in inputs]
            for held, tensor in zip(self._held, inputs, strict=True):
                held.copy_(tensor)
            if self._plain_steps == PLAIN_STEPS and self._graph is None and self._small():
                self._record(step, self._held)
        if self._graph is not None:
            self._graph.replay()
        elif self._held is None:  # recording has failed
            step(inputs)
        else:
            here = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                step(self._held)
            here.wait_stream(self._stream)
            self._plain_steps += 1

    def _small(self) -> bool:
        return torch.cuda.max_memory_allocated(self._device) < LARGEST_SHARE * available(self._device)

    def _record(self, step: Callable[[list[Tensor]], None], held: list[Tensor]) -> None:
        """Record all kernels of a step, without running them. Other threads may use the device (to fetch data)."""
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        here, collects = torch.cuda.current_stream(self._device), gc.isenabled()
        gc.collect()
        gc.disable()  # freeing another recording, or a kernel, would invalidate this one
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                step(held)
        except RuntimeError as error:
            torch.cuda.set_stream(here)  # torch does not restore the stream if ending the recording fails
            graph.reset()
            _end_recording(self._device, pool)
            self._failed, self._held = True, None
            # Ending a failed recording raises another error; CUDA's messages continue with general advice.
            cause = str(error.__context__ or error).partition("\n")[0]
            warnings.warn(
                f"the training step could not be recorded as a CUDA graph ({cause}). Training continues without: the "
                "same computation, slower if the network is small.",
                RuntimeWarning,
                stacklevel=3,
            )
        else:
            self._graph = graph
            torch.cuda.empty_cache()  # release the gradients of the last normal step
        finally:
            if collects:
                gc.enable()


def _end_recording(device: torch.device, pool: tuple[int, int]) -> None:
    """Clean up after CUDA has invalidated a recording, which torch before 2.12 does not do."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):  # it has already ended
        torch._C._cuda_endAllocateToPool(index, pool)  # until then, freeing cached memory is an internal error
        torch._C._cuda_releasePool(index, pool)
    generator = torch.cuda.default_generators[index]
    seed = generator.initial_seed()
    try:
        torch.rand((), device=device)
    except RuntimeError:  # the generator is still in the recording's state
        generator.graphsafe_set_state(torch.Generator(device))
    generator.manual_seed(seed)  # as before the step
