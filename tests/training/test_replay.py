"""A step can be recorded: it does not synchronize with the host, and everything that changes between steps is in
tensors.

The last test needs a GPU, where the step is recorded and replayed; the requirements are checked everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import bsi
from bsi import recipes
from bsi.backbones import DiTConfig, MLPConfig, UNetConfig, accelerate, build, compute_dtype
from bsi.backbones.acceleration import compile_like, compile_regions
from bsi.backbones.layers import Backbone
from bsi.data.batches import as_source
from bsi.recipe import Ema, Objective, Optimizer, Recipe
from bsi.runtime.distributed import Place, Watchdog, World
from bsi.training.replay import PLAIN_STEPS, replayable
from bsi.training.step import Engine, Stream

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
# Operations that read a value on the host, use one as a shape, or copy one from the host.
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
    with Watchdog(Place(), 600.0) as watchdog:
        yield watchdog


class Listening(TorchDispatchMode):
    """Collects operations that synchronize with the host."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ASKS):
            self.heard.add(str(func))
        return func(*args, **(kwargs or {}))


class Reading(TorchFunctionMode):
    """Fails on accesses to the host that are not operations, and on tensors created there by default."""

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
def test_a_step_does_not_synchronize_with_the_host(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bsi.elbo.check_grid", lambda method, grid: [method.levels.high])  # not on a GPU
    engine, stream = parts(recipe, "cpu")
    (batch,) = stream.step(0)
    for name in GENERATORS:  # which must not be read while a step is recorded
        monkeypatch.setattr(torch, name, lambda *_, requested=name: pytest.fail(f"{requested} inside a step"))
    with Listening() as listening, Reading() as reading:
        engine._train([batch])
    assert listening.heard | reading.heard == set()


@compiles
@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["unet", "unet-coarser", "checkpointed", "mlp"])
def test_a_compiled_step_is_not_recompiled(name: str, watchdog: Watchdog) -> None:
    """Also after an evaluation of the average in batches of another size: a recording must not compile."""
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


@pytest.mark.parametrize("recipe", VARIED, ids=NAMES)
def test_steps_differ_only_in_the_batch_and_the_scalars(recipe: Recipe, watchdog: Watchdog) -> None:
    """The same step function on the same memory equals ordinary steps, and changes only contents."""
    (plain, stream), (held, again) = parts(recipe, "cpu"), parts(recipe, "cpu")
    place: list[torch.Tensor] = []

    def step(function: Callable[[list[torch.Tensor]], None], inputs: list[torch.Tensor]) -> None:
        place.extend(tensor.clone() for tensor in inputs[len(place) :])
        for held, tensor in zip(place, inputs, strict=True):
            held.copy_(tensor)
        function(place)

    held._replay = step  # type: ignore[assignment]
    pointers = {name: t.data_ptr() for group in held.state().values() for name, t in group.items()}
    for _ in range(6):
        plain.step(stream, watchdog)
        held.step(again, watchdog)
    assert_same(plain, held)
    assert pointers == {name: t.data_ptr() for group in held.state().values() for name, t in group.items()}


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
def test_only_steps_without_host_synchronization_are_recorded(recipe: Recipe, expected: bool) -> None:
    engine, _ = parts(RECIPE, "cpu")
    assert replayable(recipe, engine.model, engine.world) is expected
    foreign = bsi.Model(torch.nn.Bilinear(8, 1, 8), bsi.BSI(), (1, 8, 8))
    assert not replayable(recipe, foreign, engine.world)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="recording needs a CUDA device")


def assert_near(a: Engine, b: Engine) -> None:
    """Attention sums in no fixed order, and an optimizer amplifies tiny gradients."""
    mine, theirs = state(a), state(b)
    for name in mine:
        distance = torch.linalg.vector_norm((theirs[name] - mine[name]).double())
        assert distance <= 2e-2 * torch.linalg.vector_norm(mine[name].double()) + 1e-6, name
    assert b.first_fault() is None


@compiles
@needs_gpu
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("recipe", [*VARIED, replace(RECIPE, precision="fp8")], ids=[*NAMES, "fp8"])
def test_a_replayed_step_equals_a_plain_step(recipe: Recipe, watchdog: Watchdog) -> None:
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
def test_evaluations_and_restored_states_keep_a_recording_valid(recipe: Recipe, watchdog: Watchdog) -> None:
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
def test_a_step_that_synchronizes_with_the_host_runs_unrecorded(
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
        with pytest.warns(RuntimeWarning, match="continues without") if step == PLAIN_STEPS else nullcontext():
            failed.step(again, watchdog)
    assert not failed.recorded
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert_near(plain, failed)
    (other, last), _ = parts(RECIPE, "cuda"), torch.cuda.empty_cache()  # the next step is recorded
    for _ in range(PLAIN_STEPS + 1):
        other.step(last, watchdog)
    assert other.recorded
