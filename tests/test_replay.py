"""A step can be recorded: it asks nothing of the host, and all that differs between two steps lies in tensors.

On a GPU (which the last test needs) the step is recorded and replayed; what that asks of a step is checked everywhere.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._dynamo
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import bsi
from bsi import recipes
from bsi.backbones import DiTConfig, MLPConfig, UNetConfig, accelerate, build, compute_dtype
from bsi.backbones.acceleration import compile_like, compile_regions
from bsi.backbones.base import Backbone
from bsi.data.batches import as_source
from bsi.recipe import Ema, Objective, Optimizer, Recipe
from bsi.runtime.distributed import Place, Watchdog, World, watching
from bsi.training.replay import PLAIN_STEPS, Replay
from bsi.training.step import Engine, replayable
from bsi.training.stream import Batch, Piece, Stream

DIT = DiTConfig(width=64, depth=2, heads=1, patch=2, dropout=0.1)
RECIPE = replace(
    recipes.digits(),
    backbone=DIT,
    compile=True,
    batch=16,
    virtual_shards=1,
    steps=40,
    ema=Ema(0.9, 3, powers=(0.05, 0.1), snapshot=10),
    optimizer=Optimizer(1e-2, warmup=4, schedule="cosine"),
)
VARIED = [
    RECIPE,
    replace(RECIPE, optimizer=replace(RECIPE.optimizer, kind="muon")),
    replace(RECIPE, objective=Objective(weight="edm")),
    replace(RECIPE, objective=Objective(finite_k=8)),
    replace(RECIPE, backbone=UNetConfig(width=32, levels=2, dropout=0.1)),
    replace(RECIPE, data=replace(RECIPE.data, labels=True)),
    replace(RECIPE, backbone=replace(DIT, checkpoint=True)),
    replace(RECIPE, backbone=UNetConfig(width=32, levels=2, dropout=0.1, checkpoint=True)),
    replace(RECIPE, backbone=MLPConfig(width=64, depth=2, dropout=0.1)),
    replace(RECIPE, precision="float16"),
    replace(RECIPE, objective=Objective(weight="sigmoid"), optimizer=replace(RECIPE.optimizer, kind="muon")),
    replace(RECIPE, objective=Objective(levels="expected")),
    replace(RECIPE, backbone=UNetConfig(width=32, levels=1, dropout=0.1, coarser=(48,))),
]
NAMES = ["adamw", "muon", "weighted", "finite-k", "unet", "labels", "checkpointed", "checkpointed-unet", "mlp"]
NAMES += ["float16", "weighted-muon", "expected-levels", "unet-coarser"]
# What reads a value on the host, makes a shape of one, or brings one from there.
ASKS = ("_local_scalar_dense", "nonzero", "lift_fresh", "_unique", "masked_select", "repeat_interleave")
ASKED = ("tolist", "numpy", "cpu", "item", "from_numpy", "tensor", "as_tensor", "pin_memory", "__bool__", "__float__")
MADE = ("arange", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "linspace", "eye", "scalar_tensor")
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own access
GENERATORS = ("get_rng_state", "set_rng_state", "manual_seed", "seed", "initial_seed")


def parts(recipe: Recipe, device: str, record: bool = True) -> tuple[Engine, Stream]:
    world = World(Place(), torch.device(device))
    data = torch.randint(0, 17, (100, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    torch.manual_seed(0)
    assert recipe.backbone is not None
    network = build(recipe.backbone, (1, 8, 8), 17, 10 if recipe.data.labels else 0)
    half = torch.float16 if recipe.precision == "float16" else compute_dtype("auto", world.device)
    network.compute_dtype = half
    for p in network.parameters():  # so that gradients flow everywhere from the first step
        torch.nn.init.normal_(p, std=0.05)
    model = bsi.Model(network, bsi.BSI(), (1, 8, 8), bsi.Bins(-1.0, 1.0, 17)).to(world.device)
    accelerate(network, world.device, fp8=recipe.precision == "fp8")
    labels = (torch.arange(100) % 10).numpy() if recipe.data.labels else None
    stream = Stream(recipe, as_source(data, world.device), (1, 8, 8), world, 0, labels, 10)
    return Engine(recipe, model.train(), world, half, record), stream


def state(engine: Engine) -> dict[str, torch.Tensor]:
    return {f"{file}/{name}": t for file, group in engine.tensors().items() for name, t in group.items()}


def assert_same(a: Engine, b: Engine) -> None:
    mine, theirs = state(a), state(b)
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    with watching(Place(), 600.0) as watchdog:
        yield watchdog


class Listening(TorchDispatchMode):
    """Which operations would have the host wait or be asked."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ASKS):
            self.heard.add(str(func))
        return func(*args, **(kwargs or {}))


class Reading(TorchFunctionMode):
    """What reaches the host without an operation, and tensors made there because nobody said where."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = getattr(func, "__name__", ""), kwargs or {}
        found = func(*args, **named)
        if name in ASKED or (name in MADE and named.get("device") is None and found.numel()):
            self.heard.add(name)
        return found


@pytest.mark.parametrize("recipe", VARIED, ids=NAMES)
def test_a_step_asks_nothing_of_the_host(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bsi.elbo._check_schedule", lambda method, grid: None)  # which a GPU is not asked for
    engine, stream = parts(recipe, "cpu")
    (batch,) = stream.step(0)
    for name in GENERATORS:  # which may not be read while a step is recorded
        monkeypatch.setattr(torch, name, lambda *_, asked=name: pytest.fail(f"{asked} inside a step"))
    with Listening() as listening, Reading() as reading:
        engine._single(batch)
    assert listening.heard | reading.heard == set()


@compiles
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["unet", "unet-coarser", "checkpointed", "mlp"])
def test_a_compiled_step_compiles_nothing_more_after_the_plain_ones(name: str, watchdog: Watchdog) -> None:
    """Not even after a look at the average, in batches of another size: a recording could not wait for a compiler."""
    engine, stream = parts(VARIED[NAMES.index(name)], "cpu")
    network = engine.model.denoiser.backbone
    assert isinstance(network, Backbone)
    compile_regions(network, backend="aot_eager")
    compile_like(engine.ema.model, engine.model, backend="aot_eager")
    for _ in range(PLAIN_STEPS):
        engine.step(stream, watchdog)
    engine.ema.model.sample(3, steps=2)
    engine.ema.model.sample(5, steps=2)
    with torch.compiler.set_stance("fail_on_recompile"):
        engine.step(stream, watchdog)


NOWHERE = torch.device("cuda", 99)


class Device:
    """What `Replay` asks of CUDA, on the host: a recording notes that it was made, and a replay that it ran."""

    def __init__(self, used: float, monkeypatch: pytest.MonkeyPatch) -> None:
        if torch.cuda.is_available():
            pytest.skip("pretends a device where there is none")
        self.events: list[str] = []
        self.breaks: Exception | None = None  # the error of ending a recording in which something went wrong
        self.left = SimpleNamespace(stream="here", pool=None, stuck=False)  # what torch has left behind
        recorded = Mock(spec=torch.cuda.CUDAGraph)
        recorded.replay.side_effect = lambda: self.events.append("replay")
        here = SimpleNamespace(wait_stream=lambda other: None, name="here")
        rand = torch.rand
        generator = SimpleNamespace(
            initial_seed=torch.initial_seed,
            manual_seed=torch.manual_seed,
            graphsafe_set_state=lambda fresh: setattr(self.left, "stuck", False),
        )

        def draw(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
            drawn = rand(shape)
            if self.left.stuck:
                raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
            return drawn

        fakes = {
            "Stream": lambda device: SimpleNamespace(wait_stream=lambda other: None, name="recording"),
            "current_stream": lambda device: here,
            "set_stream": lambda stream: setattr(self.left, "stream", stream.name),
            "stream": lambda stream: nullcontext(),
            "graph_pool_handle": lambda: (0, 1),
            "CUDAGraph": lambda: recorded,
            "graph": self.recording,
            "empty_cache": lambda: None,
            "max_memory_allocated": lambda device: used,
            "default_generators": {99: generator},
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_pool, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release_pool, raising=False)
        monkeypatch.setattr(torch, "rand", draw)
        monkeypatch.setattr(torch, "Generator", lambda device: None)
        monkeypatch.setattr("bsi.training.replay.available", lambda device: 1.0)

    def end_pool(self, index: int, pool: tuple[int, int]) -> None:
        if self.left.pool is None:
            raise RuntimeError("not currently recording to mempool_id")
        assert pool == self.left.pool
        self.left.pool = "to be released"

    def release_pool(self, index: int, pool: tuple[int, int]) -> None:
        assert self.left.pool == "to be released"
        self.left.pool = None

    @contextmanager
    def recording(self, graph: object, pool: tuple[int, int], stream: Any, capture_error_mode: str) -> Iterator[None]:
        self.events.append(f"record {'with' if gc.isenabled() else 'without'} collector")
        try:
            yield
        except RuntimeError:
            if self.breaks is not None:  # torch then leaves stream, memory pool and generator as they are
                self.left.stream, self.left.pool, self.left.stuck = stream.name, pool, True
                raise self.breaks  # noqa: B904  # as torch does: the first error is the context of the second
            raise

    def run(self, steps: int, step: Callable[[Batch], None] | None = None) -> list[str]:
        replay = Replay(NOWHERE)
        batch = Batch(Piece(0, 0, 0, 2), torch.zeros(2, 1), torch.zeros(2), torch.zeros(2, 1), None)
        for _ in range(steps):
            replay(step or (lambda batch: self.events.append("step")), batch)
        return self.events


def test_an_engine_goes_with_its_last_reference_and_not_when_the_collector_comes(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording that the collector frees while another is made would spoil that one."""
    engine, stream = parts(RECIPE, "cpu")
    Device(0.5, monkeypatch)
    engine._replay = Replay(NOWHERE)
    engine.step(stream, watchdog)
    gone = weakref.ref(engine), weakref.ref(engine._replay)
    gc.disable()
    try:
        stream.close()
        del engine
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("recipe", VARIED, ids=NAMES)
def test_all_that_differs_between_two_steps_is_in_the_held_batch_and_the_dials(
    recipe: Recipe, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain, stream), (held, again) = parts(recipe, "cpu"), parts(recipe, "cpu")
    Device(0.5, monkeypatch)  # too full to record: every step runs as it is, on the held batch
    held._replay = Replay(NOWHERE)
    pointers = {name: t.data_ptr() for group in held._state().values() for name, t in group.items()}
    for _ in range(6):
        plain.step(stream, watchdog)
        held.step(again, watchdog)
    assert_same(plain, held)
    assert pointers == {name: t.data_ptr() for group in held._state().values() for name, t in group.items()}


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (RECIPE, True),
        (replace(RECIPE, compile=False), False),
        (replace(RECIPE, audit=True), False),
        (replace(RECIPE, virtual_shards=2, accumulation=2), False),
        (replace(RECIPE, batch=3072, data=replace(RECIPE.data, labels=True)), True),
        (replace(RECIPE, batch=3073, data=replace(RECIPE.data, labels=True)), False),
    ],
)
def test_only_a_step_that_never_asks_the_host_is_recorded(recipe: Recipe, expected: bool) -> None:
    engine, _ = parts(RECIPE, "cpu")
    assert replayable(recipe, engine.model, engine.world) is expected
    foreign = bsi.Model(torch.nn.Bilinear(8, 1, 8), bsi.BSI(), (1, 8, 8))
    assert not replayable(recipe, foreign, engine.world)


def test_three_plain_steps_then_one_recording_that_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(0.3, monkeypatch)
    assert device.run(6) == [*["step"] * 3, "record without collector", "step", *["replay"] * 3]
    assert gc.isenabled()


def test_a_collector_that_was_switched_off_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(0.3, monkeypatch)
    gc.disable()
    try:
        device.run(4)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_stream_belongs_to_one_recording_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(0.3, monkeypatch)
    first, second = Replay(NOWHERE), Replay(NOWHERE)
    assert first._stream is not second._stream
    left = first._stream
    del first
    assert Replay(NOWHERE)._stream is left


def test_a_step_that_takes_much_of_the_memory_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Device(0.5, monkeypatch).run(6) == ["step"] * 6


@pytest.mark.parametrize("ends", [None, RuntimeError("ended badly")])
@pytest.mark.parametrize(
    "error", [RuntimeError("the first cause\nand more"), torch.OutOfMemoryError("the first cause")]
)
def test_where_recording_fails_the_steps_go_on_as_they_are(
    error: RuntimeError, ends: RuntimeError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(0.3, monkeypatch)
    device.breaks = ends

    def step(batch: Batch) -> None:
        if device.events[-1:] == ["record without collector"]:
            device.events.append("fail")
            raise error
        device.events.append("step")

    torch.manual_seed(17)
    seeded = torch.get_rng_state()
    with pytest.warns(RuntimeWarning, match=r"\(the first cause\).*unrecorded") as warned:
        device.run(6, step)
    assert len(warned) == 1
    assert device.events == [*["step"] * 3, "record without collector", "fail", *["step"] * 3]
    assert vars(device.left) == {"stream": "here", "pool": None, "stuck": False}
    assert torch.equal(torch.get_rng_state(), seeded)  # the step that follows draws what it would have drawn
    assert gc.isenabled()


@pytest.mark.parametrize("recipe", [RECIPE, VARIED[NAMES.index("muon")]], ids=["adamw", "muon"])
def test_a_recording_that_fails_leaves_no_trace_in_the_steps_after_it(
    recipe: Recipe, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels do not run, and what it did leave, gradients, belongs to no step."""
    (plain, stream), (failed, again) = parts(recipe, "cpu"), parts(recipe, "cpu")
    device = Device(0.3, monkeypatch)
    device.breaks = RuntimeError("ended badly")
    failed._replay = Replay(NOWHERE)
    update = failed._update

    def broken(losses: torch.Tensor) -> None:
        if device.events[-1:] == ["record without collector"]:
            device.events.append("fail")
            raise RuntimeError("asked the host")
        update(losses)

    monkeypatch.setattr(failed, "_update", broken)
    for step in range(6):
        plain.step(stream, watchdog)
        with pytest.warns(RuntimeWarning, match="asked the host") if step == PLAIN_STEPS else nullcontext():
            failed.step(again, watchdog)
    assert device.events == ["record without collector", "fail"]
    assert not failed.recorded
    assert_same(plain, failed)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="recording needs a CUDA device")


def assert_near(a: Engine, b: Engine) -> None:
    """Attention adds up in no fixed order, and an optimizer makes a whole step of a tiny gradient."""
    mine, theirs = state(a), state(b)
    for name in mine:
        distance = torch.linalg.vector_norm((theirs[name] - mine[name]).double())
        assert distance <= 2e-2 * torch.linalg.vector_norm(mine[name].double()) + 1e-6, name
    assert b.first_fault() is None


@compiles
@needs_gpu
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("recipe", [*VARIED, replace(RECIPE, precision="fp8")], ids=[*NAMES, "fp8"])
def test_a_replayed_step_is_the_step(recipe: Recipe, watchdog: Watchdog) -> None:
    if recipe.precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not compute in fp8")
    (plain, stream), (replayed, again) = parts(recipe, "cuda", record=False), parts(recipe, "cuda")
    for _ in range(9):
        plain.step(stream, watchdog)
        replayed.step(again, watchdog)
    assert replayed.recorded
    assert_near(plain, replayed)


@compiles
@needs_gpu
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("recipe", [RECIPE, VARIED[NAMES.index("unet")]], ids=["adamw", "unet"])
def test_neither_a_look_nor_a_restored_state_disturbs_a_recording(recipe: Recipe, watchdog: Watchdog) -> None:
    (plain, stream), (replayed, again) = parts(recipe, "cuda", record=False), parts(recipe, "cuda")
    for step in range(9):
        plain.step(stream, watchdog)
        replayed.step(again, watchdog)
        if step in (1, 5):  # before and after the recording
            replayed.ema.model.sample(3, steps=2)
            torch.cuda.empty_cache()
        if step == 6:
            replayed.restore(replayed.steps_done, plain.tensors())
    assert replayed.recorded
    assert_near(plain, replayed)


@compiles
@needs_gpu
@pytest.mark.usefixtures("unchecked")
def test_a_step_that_asks_the_host_after_all_goes_on_unrecorded(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain, stream), (failed, again) = parts(RECIPE, "cuda", record=False), parts(RECIPE, "cuda")
    update = failed._update

    def asks(losses: torch.Tensor) -> None:
        if torch.cuda.is_current_stream_capturing():
            losses.sum().item()
        update(losses)

    monkeypatch.setattr(failed, "_update", asks)
    for step in range(9):
        plain.step(stream, watchdog)
        with pytest.warns(RuntimeWarning, match="unrecorded") if step == PLAIN_STEPS else nullcontext():
            failed.step(again, watchdog)
    assert not failed.recorded
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert_near(plain, failed)
    (other, last), _ = parts(RECIPE, "cuda"), torch.cuda.empty_cache()  # and the next one is recorded
    for _ in range(PLAIN_STEPS + 1):
        other.step(last, watchdog)
    assert other.recorded
