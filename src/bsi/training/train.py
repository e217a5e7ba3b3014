"""Train a recipe on any number of ranks, from the first step or from the latest checkpoint.

`bsi.train` (run.py) and the command `bsi train` call `run_training`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from bsi.backbones.acceleration import accelerate, check_fp8
from bsi.backbones.layers import Backbone
from bsi.devices import compiles, compute_dtype, seconds_by_threads
from bsi.errors import BsiError, Preempted, UsageError
from bsi.methods import check_last_level
from bsi.model import Model
from bsi.progress import Progress
from bsi.recipe import Recipe
from bsi.rng import derive
from bsi.runtime.checkpoint import Saver
from bsi.runtime.data_spec import build_model, config_of
from bsi.runtime.distributed import World, find_place, join, watching
from bsi.runtime.export import class_name, read_trained, set_weights
from bsi.runtime.out_of_memory import check_host, enough_to_train
from bsi.runtime.run_folder import JsonLines, RunFolder, RunRecord, Sink, State
from bsi.runtime.serialization import to_plain
from bsi.runtime.trackers import check_trackers, tracking
from bsi.sampling import levels_of
from bsi.training.dataset import TrainingData, open_training_data
from bsi.training.lock import hold
from bsi.training.loop import Job, listening, log, run
from bsi.training.parallel import numerics
from bsi.training.resume import find_checkpoint, restore
from bsi.training.step import Engine
from bsi.training.stream import Stream
from bsi.values import DataKind

LONGEST_S = 1e8  # three years: the longest wait for another rank
MEASURED_IMAGES = 16  # batch size for comparing one thread with all threads
WORTH_SAYING = 1.5  # speedup with one thread from which a message is logged


def run_training(
    recipe: Recipe,
    data: object = None,
    backbone: nn.Module | None = None,
    out: str | Path | None = None,
    *,
    test: object = None,
    kind: DataKind | None = None,
    labels: object = None,
    init_from: str | Path | None = None,
    allow: Sequence[str] = (),
    track: Sequence[str] = (),
    sinks: Sequence[Sink] = (),
    device: str | None = None,
    hang_after_s: float = 600.0,
    named: Recipe | None = None,
    begin: Callable[[], None] | None = None,
) -> Path:
    """Train a recipe and return its run folder. The arguments are those of `bsi.train`, and two of the command line:

    Args:
        named: The recipe that this one was derived from; run.json lists the differences.
        begin: Called after all checks, if there is something to train.
    """
    if not isinstance(recipe, Recipe):
        name = (recipe if isinstance(recipe, str) else getattr(recipe, "__name__", "")).replace("-", "_")
        call = name if name.isidentifier() else "digits"
        raise UsageError(f"recipe must be a bsi.Recipe, got {recipe!r}. Pass bsi.recipes.{call}().")
    if not hang_after_s > 0:
        raise UsageError(f"hang_after_s must be positive, got {hang_after_s}. Use inf to wait for ever.")
    check_trackers(track)
    recipe.check(find_place(os.environ).size)
    folder = RunFolder(Path(out) if out is not None else Path("runs") / recipe.name)
    with (
        listening() as stop,
        join(device, timeout_s=min(hang_after_s, LONGEST_S) + 60) as world,
        numerics(recipe),
        _own_random_numbers(world),
        _locked(folder, world) as folder,
        watching(world.place, hang_after_s, world.meeting) as watchdog,
    ):
        log_once: Callable[[str], None] = log if world.first else _silent
        training_data = open_training_data(recipe, world.device, data, test, kind, labels, folder.path)
        if training_data.note:
            log_once(training_data.note)
        if backbone is not None:
            recipe = replace(recipe, backbone=config_of(backbone, training_data.spec))
        record = RunRecord(recipe, class_name(backbone) if backbone is not None else "")
        resumed = find_checkpoint(folder, record, training_data.spec, world, allow, log)
        training_data = replace(training_data, spec=resumed.data)
        if resumed.finished:
            more = ", or more --steps" if recipe.optimizer.schedule == "constant" else ""
            log_once(f"{folder.path} is finished: {recipe.steps} steps. Use another --out{more}.")
            if world.first and folder.read_status().get("state") != "finished":  # killed after its last save
                folder.write_status("finished", recipe.steps)
            return folder.path
        check_host(recipe, training_data.spec, world)
        with enough_to_train(recipe, training_data.spec, world, watchdog):
            model = _model(recipe, training_data, backbone, init_from if resumed.checkpoint is None else None, world)
            engine = Engine(recipe, model, world, _half(recipe, world))
        if begin is not None:
            begin()
        if world.device.type == "cpu" and recipe.threads is None and not recipe.audit:
            _check_threads(model, recipe.batch // recipe.accumulation // world.size, log_once)
        restore(engine, resumed.checkpoint, world, log)
        engine.share()
        spec, done = training_data.spec, engine.steps_done
        stream = Stream(recipe, training_data.train, spec.latent_shape, world, done, training_data.labels, spec.classes)
        saver = Saver(folder.checkpoints, recipe.keep, folder.check)
        journal: list[Sink] = []
        if world.first:
            folder.write_record(record, named, spec.version, world)
            due = recipe.every.due(done, recipe.steps)
            repeated = ["evaluate"] * (due.evaluate and training_data.test is not None) + ["sample"] * due.sample
            journal.append(JsonLines(folder, done, repeated if resumed.evaluation_pending else []))
        with (
            _progress(recipe, engine, world) as progress,
            _status(folder, engine, world),
            contextlib.closing(saver),  # inside the lock: nothing is written without it
            contextlib.closing(engine),
            contextlib.closing(stream),
            tracking(track if world.first else (), folder.path, recipe) as trackers,
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
                    sinks=[*journal, *trackers, *sinks],
                    progress=progress,
                    watchdog=watchdog,
                    stop=stop,
                    about={**about, "ranks": world.size},
                    pending=resumed.evaluation_pending,
                )
            )
    return folder.path


def _silent(line: str) -> None:
    """Discard the message, on ranks other than the first."""


@contextlib.contextmanager
def _own_random_numbers(world: World) -> Iterator[None]:
    """Restore the caller's random number generators at the end: training seeds torch's."""
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        yield


@contextlib.contextmanager
def _locked(folder: RunFolder, world: World) -> Iterator[RunFolder]:
    """The run folder, made and locked by the first rank. All ranks raise together."""
    with contextlib.ExitStack() as stack:
        error = None
        if world.first:
            try:
                stack.enter_context(folder.made())
                folder = replace(folder, check=stack.enter_context(hold(folder.path, log)).check)
            except BsiError as raised:
                error = raised
        world.agree(error)
        yield folder


def _model(
    recipe: Recipe, data: TrainingData, backbone: nn.Module | None, init_from: str | Path | None, world: World
) -> Model:
    """The model on its device, with weights from the seed, the caller's network or another run."""
    torch.manual_seed(derive(recipe.seed, "init"))
    model = build_model(recipe, data.spec, backbone)
    for name, parameter in model.denoiser.backbone.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise UsageError(
                f"training needs weights in float32, got {parameter.dtype} for {name}. Pass backbone.float(); "
                f"--precision sets the type of the computation."
            )
    check_last_level(model.method, model.kind)
    if recipe.samples.sampler.variance != "none":
        raise UsageError("samples during training have no fitted variance. Use samples.sampler.variance=none.")
    levels_of(model.method, recipe.samples.sampler)  # raises now if the sampler is invalid, not at the first samples
    if recipe.precision == "fp8":
        check_fp8(recipe.backbone, data.spec.latent_shape)
    if init_from is not None:
        set_weights(model, read_trained(Path(init_from)), str(init_from))
    model = model.to(world.device).train()
    network = model.denoiser.backbone
    wanted = recipe.compile and not recipe.audit
    if isinstance(network, Backbone):  # chooses the fastest form before the optimizer refers to the weights
        network.compute_dtype = _half(recipe, world)
        if wanted:
            accelerate(network, world.device, recipe.lean, fp8=recipe.precision == "fp8")
    elif wanted and compiles(world.device):
        network.compile()
    return model


def _check_threads(model: Model, images: int, log: Callable[[str], None]) -> None:
    """Log a message if one thread is much faster than all threads: the machine is busy, or the network is small.

    The number of threads is not changed here, since sums would be rounded differently when the run is resumed.
    """
    network, threads = model.denoiser.backbone, torch.get_num_threads()
    if not isinstance(network, Backbone) or threads == 1:
        return
    x, t = torch.zeros(min(images, MEASURED_IMAGES), *network.shape), torch.zeros(min(images, MEASURED_IMAGES))
    with torch.no_grad():
        network.eval()
        seconds = seconds_by_threads(lambda: network(x, t))
        network.train()
    if (factor := seconds[threads] / seconds[1]) > WORTH_SAYING:
        log(f"{threads} threads are {factor:.1f} times slower than one on this machine now. Start with --threads 1.")


def _half(recipe: Recipe, world: World) -> torch.dtype | None:
    return compute_dtype("float32" if recipe.audit else recipe.precision, world.device)


@contextlib.contextmanager
def _progress(recipe: Recipe, engine: Engine, world: World) -> Iterator[Progress]:
    """Progress that is shown by the first rank only."""
    with contextlib.ExitStack() as stack:
        silent = None if world.first else stack.enter_context(open(os.devnull, "w"))
        yield stack.enter_context(Progress("train", recipe.steps, "step", engine.steps_done, silent))


@contextlib.contextmanager
def _status(folder: RunFolder, engine: Engine, world: World) -> Iterator[None]:
    """Keep the status file up to date, however the run ends, unless the lock is lost."""

    def write(state: State, note: str = "") -> None:
        if world.first:
            with contextlib.suppress(OSError):  # a full disk: the status only reports
                folder.write_status(state, engine.steps_done, note)

    write("running")
    try:
        yield
    except BaseException as error:
        # If the lock is lost, this raises the lock's error, which takes precedence.
        write("preempted" if isinstance(error, Preempted) else "failed", str(error) or type(error).__name__)
        raise
    write("finished")
