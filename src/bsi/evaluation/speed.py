"""How fast a network trains, samples and evaluates the bound.

The training step is the trainer's own (`Engine.step`): noise, levels, loss, backward, clipping, AdamW, EMA. Sampling
and the bound count images times network evaluations. Times are the median of repeats after a warm-up, from an idle
device to an idle device, and are compared with large matrix products on the same machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from bsi.backbones import Backbone, BackboneConfig, Precision, build, compute_dtype, cost
from bsi.backbones.acceleration import accelerate, freeze
from bsi.backbones.costs import Parallel
from bsi.elbo import measurement_loss
from bsi.grids import paper_grid
from bsi.levels import low_discrepancy
from bsi.methods import METHODS
from bsi.model import Model
from bsi.recipe import Data, Optimizer, Recipe
from bsi.rng import SeededNoise
from bsi.runtime.distributed import Place, Watchdog, World, join
from bsi.runtime.export import build_model
from bsi.sampling import evaluations, sample
from bsi.training.dataset import open_training_data
from bsi.training.replay import PLAIN_STEPS
from bsi.training.step import Engine, Stream, engine_of
from bsi.values import Bins

Work = Literal["train", "sample", "elbo"]
Action = Callable[[], object]

BINS = Bins.uint8()
SAMPLING_STEPS = 8
WARM_STEPS = {"cpu": 1, "cuda": PLAIN_STEPS + 1}  # steps until a training step has been recorded and replayed once
TRAINING_COST = 3  # forward passes that a forward and a backward pass cost


@dataclass(frozen=True)
class Case:
    """What is measured."""

    work: Work
    backbone: BackboneConfig
    shape: tuple[int, ...]
    batch: int
    method: str
    precision: Precision
    lean: bool
    device: torch.device
    parallel: Parallel = "ddp"  # with fsdp, a single rank that gathers from itself


@dataclass(frozen=True)
class Speed:
    """The result. `fraction` is relative to plain matrix products, measured in the same process.

    `first_step_s` is from the start of the process to the end of the first step, and `first_step_parts_s` its parts.
    `recorded`: a step is a CUDA graph.
    """

    images_per_s: float
    milliseconds: float
    spread: float
    tflops: float
    matmul_tflops: float
    fraction: float
    peak_gib: float
    first_step_s: float
    first_step_parts_s: dict[str, float]
    recorded: bool
    parameters: int
    repeats: int


class Start:
    """The parts of the time from the start of the process to the first step, in seconds."""

    def __init__(self) -> None:
        self._last, self.parts_s = 0.0, dict[str, float]()

    def lap(self, part: str) -> None:
        """End a part that began with the last lap."""
        now = since_process_start()
        self.parts_s[part], self._last = now - self._last, now


def since_process_start() -> float:
    """Seconds since the start of this process, imports included; NaN where the system does not provide them."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return math.nan


def measure(case: Case, repeats: int = 5, start: Start | None = None) -> Speed:
    """Time one case: the median of `repeats` measurements.

    Args:
        start: The parts of the time to the first step before this call.
    """
    if start is None:
        start = Start()
        start.lap("imports")
    torch.manual_seed(0)
    cuda = case.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(case.device)
    with contextlib.ExitStack() as stack:
        engine, parts = None, list[tuple[str, Action]]()
        if case.work == "train":
            engine, stream, step = _training(case, stack)
            parts.append(("noise", lambda: stream.first(0)))  # compiles the function that draws a step's noise
        else:
            step = _sampling(case) if case.work == "sample" else _bound(case)
        for part, work in [("build", lambda: None), *parts, ("step", step)]:
            work()
            _wait(case.device)
            start.lap(part)
        times = _times(step, case.device, repeats)
        recorded = engine is not None and engine.recorded
    # A step of training counts one evaluation of the network for each image.
    evaluated = evaluations(METHODS[case.method](), SAMPLING_STEPS) if case.work == "sample" else 1
    seconds, images = statistics.median(times), case.batch * evaluated
    costs = cost(case.backbone, case.shape, BINS.count)
    tflops = images * costs.flops * (TRAINING_COST if case.work == "train" else 1) / seconds / 1e12
    peak = torch.cuda.max_memory_allocated(case.device) / 2**30 if cuda else math.nan
    reachable = measure_matmul(case.device, case.precision)
    return Speed(
        images_per_s=images / seconds, milliseconds=1e3 * seconds, spread=(max(times) - min(times)) / seconds,
        tflops=tflops, matmul_tflops=reachable, fraction=tflops / reachable, peak_gib=peak,
        first_step_s=sum(start.parts_s.values()), first_step_parts_s=dict(start.parts_s), recorded=recorded,
        parameters=costs.parameters, repeats=repeats,
    )  # fmt: skip


def measure_matmul(device: torch.device, precision: Precision) -> float:
    """TFLOP/s of a large square matrix product in the type that is used inside the network; for fp8, in bfloat16."""
    n = 8192 if device.type == "cuda" else 1024
    dtype = compute_dtype(precision, device) or torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / statistics.median(_times(lambda: a @ b, device, 5)) / 1e12


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _times(step: Action, device: torch.device, repeats: int) -> list[float]:
    """Seconds of a step, `repeats` times: each the mean over as many steps as fill about a third of a second."""

    def seconds(steps: int) -> float:
        _wait(device)
        began = time.perf_counter()
        for _ in range(steps):
            step()
        _wait(device)
        return (time.perf_counter() - began) / steps

    for _ in range(WARM_STEPS[device.type]):
        step()
    inner = max(1, min(100, round(0.3 / max(seconds(1), 1e-6))))
    return [seconds(inner) for _ in range(repeats)]


def _training(case: Case, stack: contextlib.ExitStack) -> tuple[Engine, Stream, Action]:
    """The trainer, its batches of random images that lie on the device, and its step."""
    recipe = Recipe(
        "bench", METHODS[case.method](), case.backbone, Data("bench"), steps=10**9, batch=case.batch,
        optimizer=Optimizer(lr=1e-4), virtual_shards=1, precision=case.precision, parallel=case.parallel,
    )  # fmt: skip
    sharded = case.parallel != "ddp"
    world = stack.enter_context(join(case.device.type, 600.0, alone=True)) if sharded else World(Place(), case.device)
    images = torch.randint(BINS.count, (4 * case.batch, *case.shape), dtype=torch.uint8)
    data = open_training_data(recipe, case.device, images)
    with torch.device("cpu") if sharded else case.device:
        model = build_model(recipe, data.spec, None).train()
    network = (model if sharded else model.to(case.device)).denoiser.backbone
    assert isinstance(network, Backbone)
    network.compute_dtype = compute_dtype(case.precision, case.device)
    if not sharded:
        _accelerate(network, case)
    engine = engine_of(recipe, model, world, compute_dtype(case.precision, case.device))
    stream = stack.enter_context(contextlib.closing(Stream(recipe, data.train, data.spec.latent_shape, world, 0)))
    watchdog = stack.enter_context(Watchdog(world.place, limit_s=600.0))
    return engine, stream, lambda: engine.step(stream, watchdog)


def _sampling(case: Case) -> Action:
    """A few steps of the paper's sampler, from the noise to the sample."""
    model = _trained(case)
    grid, ids = paper_grid(model.method, SAMPLING_STEPS), torch.arange(case.batch, device=case.device)

    @torch.no_grad()
    def step() -> None:
        sample(model.method, model.denoiser, SeededNoise(0, ids, case.shape), grid)

    return step


def _bound(case: Case) -> Action:
    """One level of the bound for each image."""
    model = _trained(case)
    x = BINS.values(torch.randint(BINS.count, (case.batch, *case.shape), dtype=torch.uint8, device=case.device))
    t = low_discrepancy(case.batch, 0.5).to(case.device)

    @torch.no_grad()
    def step() -> None:
        measurement_loss(model.method, model.denoiser, x, t, torch.randn_like(x))

    return step


def _trained(case: Case) -> Model:
    """A model as it is used after training, with its weights in the type of the computation."""
    with case.device:
        network = build(case.backbone, case.shape, BINS.count)
    model = Model(network, METHODS[case.method](), case.shape, BINS).to(case.device).eval()
    _accelerate(network, case)
    freeze(network)
    return model


def _accelerate(network: nn.Module, case: Case) -> None:
    assert isinstance(network, Backbone)
    network.compute_dtype = compute_dtype(case.precision, case.device)
    accelerate(network, case.device, case.lean, fp8=case.precision == "fp8")
