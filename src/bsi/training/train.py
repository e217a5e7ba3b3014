"""`bsi.train`: a recipe, from its first step or from where it was interrupted, on any number of ranks.

    run = bsi.train(bsi.recipes.digits(), out="runs/digits")                       # a prepared dataset, our network
    run = bsi.train(recipe, data=tensor_or_dataset, backbone=MyNet(), out="runs/mine")

The same `out` goes on where it was; a finished run is returned as it is. The command line calls this function.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from bsi.backbones.acceleration import accelerate, check_fp8
from bsi.backbones.base import Backbone
from bsi.devices import compiles, compute_dtype
from bsi.errors import BsiError, Preempted, UsageError
from bsi.model import Model
from bsi.progress import Progress
from bsi.recipe import Recipe
from bsi.rng import derive
from bsi.runtime.dataset import TrainingData, build_model, config_of, open_training_data
from bsi.runtime.distributed import World, find_place, join
from bsi.runtime.export import class_name, read_trained, set_weights
from bsi.runtime.run_folder import RunFolder, RunRecord, State
from bsi.runtime.serialization import to_plain
from bsi.runtime.watchdog import watching
from bsi.sampling import levels_of
from bsi.training.audit import numerics
from bsi.training.journal import JsonLines, Sink
from bsi.training.lease import Lease, hold
from bsi.training.loop import Job, run
from bsi.training.resumed import find_checkpoint, restore
from bsi.training.room import check_host, enough_to_train
from bsi.training.saver import Saver
from bsi.training.step import Engine
from bsi.training.stop import listening
from bsi.training.stream import Stream
from bsi.values import Bins

__all__ = ["train"]

LONGEST_S = 1e8  # three years: the longest wait for another rank


def train(
    recipe: Recipe,
    data: object = None,
    backbone: nn.Module | None = None,
    out: str | Path | None = None,
    *,
    test: object = None,
    bins: Bins | None = None,
    labels: object = None,
    init_from: str | Path | None = None,
    allow: Sequence[str] = (),
    sinks: Sequence[Sink] = (),
    device: str | None = None,
    hang_after_s: float = 600.0,
    named: Recipe | None = None,
    begin: Callable[[], None] | None = None,
) -> Path:
    """Train a recipe and return its run folder, by default `runs/NAME`.

    `data` and `test` are tensors, arrays or map-style Datasets (uint8, or integers with `bins`, or floats); without
    them the recipe's prepared dataset is opened. `labels` are the data's, for a recipe with `data.labels`. `backbone`
    is your own network. `init_from` takes the weights of another run or export; `allow` names settings that may differ
    from the interrupted run's; `sinks` get every journal record. `named` is the recipe that this one was edited from,
    for the record. `begin` is called when there is something to train and nothing was refused.
    """
    _check_recipe(recipe)
    if not hang_after_s > 0:
        raise UsageError(f"hang_after_s is a time in seconds, positive: got {hang_after_s}. inf waits for ever.")
    recipe.check(find_place(os.environ).size)
    folder = RunFolder(Path(out) if out is not None else Path("runs") / recipe.name)
    with (
        listening() as stop,
        join(device, timeout_s=min(hang_after_s, LONGEST_S) + 60) as world,
        numerics(recipe),
        _own_random_numbers(world),
        _alone_in(folder, world) as lease,
        watching(world.place, hang_after_s, world.meeting) as watchdog,
    ):
        training_data = open_training_data(recipe, world.device, data, test, bins, labels)
        if training_data.note:
            _say(world, training_data.note)
        if backbone is not None:
            recipe = replace(recipe, backbone=config_of(backbone, training_data.spec))
        record = RunRecord(recipe, class_name(backbone) if backbone is not None else "")
        resumed = find_checkpoint(folder, record, training_data.spec, world, allow, _warn)
        if resumed.finished:
            more = ", or more --steps" if recipe.optimizer.schedule == "constant" else ""
            _say(world, f"{folder.path} is finished: {recipe.steps} steps. Use another --out{more}.")
            if world.first and folder.read_status().get("state") != "finished":  # killed after its last save
                folder.write_status("finished", recipe.steps)
            return folder.path
        check_host(recipe, training_data.spec, world, functools.partial(_say, world))
        with enough_to_train(recipe, training_data.spec, world, watchdog):
            model = _model(recipe, training_data, backbone, init_from if resumed.checkpoint is None else None, world)
            engine = Engine(recipe, model, world, _half(recipe, world))
        if begin is not None:
            begin()
        restore(engine, resumed.checkpoint, world, _warn)
        engine.share()
        spec, done = training_data.spec, engine.steps_done
        stream = Stream(recipe, training_data.train, spec.shape, world, done, training_data.labels, spec.classes)
        saver = Saver(folder.checkpoints, recipe.keep, lease.check if lease is not None else _nothing)
        journal: list[Sink] = []
        if world.first:
            folder.write_record(record, named, world)
            again = _due(recipe, training_data, done) if resumed.evaluation_pending else []
            journal.append(JsonLines(folder.journal, done, again))
        with (
            _progress(recipe, engine, world) as progress,
            _status(folder, engine, lease),
            contextlib.closing(saver),  # while the lease is held: nothing is written without
            contextlib.closing(engine),
            contextlib.closing(stream),
            enough_to_train(recipe, training_data.spec, world, watchdog),
        ):
            engine.begin(stream)
            about = {"recipe": to_plain(recipe), "data": to_plain(training_data.spec), "network": record.network}
            run(
                Job(
                    recipe=recipe,
                    data=training_data,
                    engine=engine,
                    stream=stream,
                    world=world,
                    folder=folder,
                    saver=saver,
                    sinks=[*journal, *sinks],
                    progress=progress,
                    watchdog=watchdog,
                    stop=stop,
                    about={**about, "ranks": world.size},
                    evaluation_pending=resumed.evaluation_pending,
                )
            )
    return folder.path


def _check_recipe(recipe: object) -> None:
    """What a newcomer passes instead: a recipe's name, or its function."""
    if isinstance(recipe, Recipe):
        return
    name = recipe if isinstance(recipe, str) else getattr(recipe, "__name__", "")
    call = name.replace("-", "_") if name.replace("-", "_").isidentifier() else "digits"
    raise UsageError(f"bsi.train takes a bsi.Recipe: got {recipe!r}. Pass one, as bsi.recipes.{call}() returns it.")


def _say(world: World, line: str) -> None:
    if world.first:
        print(f"bsi train: {line}", file=sys.stderr, flush=True)


def _warn(line: str) -> None:
    print(f"bsi train: {line}", file=sys.stderr, flush=True)


def _nothing() -> None:
    """Only the first rank holds the lease, and only it saves."""


@contextlib.contextmanager
def _own_random_numbers(world: World) -> Iterator[None]:
    """Training sets the seeds of torch's generators; the caller's go on afterwards as if it had not."""
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        yield


@contextlib.contextmanager
def _alone_in(folder: RunFolder, world: World) -> Iterator[Lease | None]:
    """The run folder's lease, held by the first rank; all ranks refuse together."""
    with contextlib.ExitStack() as stack:
        lease, error = None, None
        if world.first:
            try:
                stack.enter_context(folder.made())
                lease = stack.enter_context(hold(folder.path, _warn))
            except BsiError as refused:
                error = refused
        world.agree(error)
        yield lease


def _model(
    recipe: Recipe, data: TrainingData, backbone: nn.Module | None, init_from: str | Path | None, world: World
) -> Model:
    """The model on its device, its weights a function of the seed, of the caller's network, or of another run."""
    torch.manual_seed(derive(recipe.seed, "init"))
    model = build_model(recipe, data.spec, backbone)
    for name, parameter in model.denoiser.backbone.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise UsageError(
                f"training keeps weights in float32, and {name} of the network is {parameter.dtype}: pass "
                f"backbone.float(). What is computed in less is --precision's."
            )
    levels_of(model.method, recipe.samples.sampler)  # raises what cannot be drawn now, not at the first samples
    if recipe.precision == "fp8":
        check_fp8(recipe.backbone, data.spec.shape)
    if init_from is not None:
        set_weights(model, read_trained(Path(init_from)), str(init_from))
    return _fast(recipe, model.to(world.device).train(), world)


def _half(recipe: Recipe, world: World) -> torch.dtype | None:
    return compute_dtype("float32" if recipe.audit else recipe.precision, world.device)


def _fast(recipe: Recipe, model: Model, world: World) -> Model:
    """The fastest form of the network that this device runs; in place, before the optimizer sees its weights."""
    network = model.denoiser.backbone
    wanted = recipe.compile and not recipe.audit
    if isinstance(network, Backbone):
        network.compute_dtype = _half(recipe, world)
        if wanted:
            accelerate(network, world.device, recipe.lean, fp8=recipe.precision == "fp8")
    elif wanted and compiles(world.device):
        network.compile()
    return model


def _due(recipe: Recipe, data: TrainingData, step: int) -> list[str]:
    """The journal's events of looking at the model after a step, of those that the recipe asks for now."""
    due = recipe.every.due(step, recipe.steps)
    return ["evaluate"] * (due.evaluate and data.test is not None) + ["sample"] * due.sample


@contextlib.contextmanager
def _progress(recipe: Recipe, engine: Engine, world: World) -> Iterator[Progress]:
    """One rank shows how far it is; the others count silently."""
    with contextlib.ExitStack() as stack:
        silent = None if world.first else stack.enter_context(open(os.devnull, "w"))
        yield stack.enter_context(Progress("train", recipe.steps, "step", engine.steps_done, silent))


@contextlib.contextmanager
def _status(folder: RunFolder, engine: Engine, lease: Lease | None) -> Iterator[None]:
    """The status file says how it ended, however it ends; but not in a folder that is no longer ours, or gone."""

    def write(state: State, note: str = "") -> None:
        if lease is not None:
            folder.write_status(state, engine.steps_done, note)

    write("running")
    try:
        yield
    except BaseException as error:
        state: State = "preempted" if isinstance(error, Preempted) else "failed"
        if lease is not None:
            lease.check()  # whose error says what happened to the folder, and comes first
        with contextlib.suppress(OSError):  # of a full disk, `error` tells
            write(state, str(error) or type(error).__name__)
        raise
    write("finished")
