"""`bsi.train`: train a recipe on any number of ranks, from the first step or from the latest checkpoint.

    run = bsi.train(bsi.recipes.digits(), out="runs/digits")                       # a prepared dataset, our network
    run = bsi.train(recipe, data=tensor_or_dataset, backbone=MyNet(), out="runs/mine")
    images = run.model().sample(16)

A call with the same `out` resumes; for a finished run it returns at once. `bsi train` calls the same function.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path

import torch
from torch import nn

from bsi.backbones.acceleration import accelerate, check_fp8
from bsi.backbones.layers import Backbone
from bsi.data.store import AUTOENCODER
from bsi.devices import compiles, compute_dtype, seconds_by_threads
from bsi.errors import BsiError, Preempted, UsageError
from bsi.methods import check_last_level
from bsi.model import Model
from bsi.progress import Progress
from bsi.recipe import Ema, Every, Objective, Optimizer, Recipe, Samples, to_plain
from bsi.rng import derive
from bsi.runtime import run_folder
from bsi.runtime.checkpoint import Saver
from bsi.runtime.distributed import Watchdog, World, find_place, join
from bsi.runtime.export import build_model, class_name, config_of, load, read_trained, set_weights
from bsi.runtime.out_of_memory import check_host, enough_to_train
from bsi.runtime.run_folder import RunFolder, RunRecord, Sink, State
from bsi.sampler import Sampler
from bsi.sampling import levels_of
from bsi.training.dataset import open_training_data
from bsi.training.lock import hold
from bsi.training.loop import Loop, listening, log
from bsi.training.resume import find_checkpoint, restore
from bsi.training.step import Engine, Stream, engine_of
from bsi.values import DataKind, Symbols, unit_of_bounds

LONGEST_S = 1e8  # three years: the longest wait for another rank
WORTH_SAYING = 1.5  # speedup with one thread from which a message is logged


@dataclass(frozen=True)
class Run:
    """A run folder, as `bsi.train` returns it. It can be passed wherever a path is expected."""

    path: Path
    backbone: nn.Module | None = field(default=None, repr=False)
    """The network that was passed to `bsi.train`, for `model`."""

    def __init__(self, path: str | Path, backbone: nn.Module | None = None) -> None:
        object.__setattr__(self, "path", Path(path))
        object.__setattr__(self, "backbone", backbone)

    def model(self, ema: bool = True, step: int | None = None) -> Model:
        """The trained model, by default with the moving average of the weights at the latest checkpoint."""
        record = RunFolder(self.path).read_record()
        described = record is not None and record.recipe.backbone is not None
        return load(self.path, ema, None if described else self.backbone, step)

    def journal(self) -> list[dict[str, run_folder.Value]]:
        """The records that were written during training, such as {"event": "train", "step": 50, "loss": ...}."""
        return run_folder.read_journal(self.path)

    def evaluations(self) -> list[dict[str, run_folder.Value]]:
        """The journal's bounds of test samples, the latest last."""
        return [record for record in self.journal() if record["event"] == "evaluate"]

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        status = RunFolder(self.path).read_status()
        lines = [f"{self.path}: {status.get('state', 'not begun')}, step {status.get('step', 0)}"]
        with suppress(UsageError):  # without a journal
            for found in self.evaluations()[-1:]:
                unit, scale = unit_of_bounds(bool(found.get("binned", True)))
                bound, *errors = (scale * float(found[name]) for name in ("bits_per_dim", "error", "data_error"))
                at_most = "" if found.get("data_resolved", True) else "at most "
                per = found.get("element", "dim")
                text = f"{bound:.4f} {unit}/{per} ± {errors[0]:.4f} (Monte Carlo) ± {at_most}{errors[1]:.4f} (data set)"
                lines.append(f"test samples: {text}, step {found['step']}")
        return "\n  ".join(lines)


def train(
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
    begin: Callable[[torch.device], None] | None = None,
    command_line: bool = False,
) -> Run:
    """Train a recipe, or resume, and return its run.

    Args:
        recipe: What to train, e.g. `bsi.recipes.digits()`.
        data: A tensor, array or map-style Dataset of uint8, of integers with a `kind`, or of floats. By default the
            recipe's prepared dataset.
        backbone: Your own network. By default the recipe's.
        out: The run folder, by default `runs/NAME`. The same folder resumes.
        test: Test data like `data`, for the bound during training.
        kind: What the integers of `data` are: `bsi.Bins`, or `bsi.Symbols`, whose prior is then fitted.
        labels: The labels of `data`, for a recipe with `data.labels`.
        init_from: A run or an export whose weights are the initialization.
        allow: Names of settings that may differ from the interrupted run's.
        track: Where to send the journal as well: tensorboard, wandb, trackio, mlflow.
        sinks: Functions that are called with every record of the journal.
        device: cuda or cpu. By default a GPU, if there is one.
        hang_after_s: Seconds without progress after which the run ends, naming the rank that hangs.
        named: The recipe that this one was derived from; run.json lists the differences.
        begin: Called with the device on the first rank, after all checks, if there is something to train.
        command_line: Whether messages name options of the command line.
    """
    if not isinstance(recipe, Recipe):
        raise UsageError(f"recipe must be a bsi.Recipe, got {recipe!r}. Pass for example bsi.recipes.digits().")
    if not hang_after_s > 0:
        raise UsageError(f"hang_after_s must be positive, got {hang_after_s}. Use inf to wait for ever.")
    with ExitStack() as stack:
        enter = stack.enter_context
        if not command_line:
            enter(_python_names())
        stop = enter(listening())
        run_folder.check_trackers(track)
        recipe.check(find_place(os.environ).size)
        folder = RunFolder(Path(out) if out is not None else Path("runs") / recipe.name)
        timeout_s = min(hang_after_s, LONGEST_S) + 60
        world = enter(join(device, timeout_s, alone=recipe.sharded))
        _check_layout(recipe, world)
        enter(_numerics(recipe, world))
        with world.together():
            if world.first:
                enter(folder.made())
                folder = replace(folder, check=enter(hold(folder.path, log)).check)
        watchdog = enter(Watchdog(world.place, hang_after_s, world.token))
        log_once: Callable[[str], None] = log if world.first else lambda line: None

        # ---- The data, and the checkpoint to resume from ----
        opened = open_training_data(recipe, world.device, data, test, kind, labels, folder.path)
        if opened.note:
            log_once(opened.note)
        if backbone is not None:
            recipe = replace(recipe, backbone=config_of(backbone, opened.spec))
        record = RunRecord(recipe, class_name(backbone) if backbone is not None else "")
        resumed = find_checkpoint(folder, record, opened.spec, world, allow, log)
        opened, spec = replace(opened, spec=resumed.data), resumed.data
        if resumed.finished:
            more = ", or more steps" if recipe.optimizer.schedule == "constant" else ""
            log_once(f"{folder.path} is finished: {recipe.steps} steps. Use another folder{more}.")
            if world.first and folder.read_status().get("state") != "finished":  # killed after its last save
                folder.write_status("finished", recipe.steps)
            return Run(folder.path, backbone)

        # ---- The model, its optimizer and its state ----
        check_host(recipe, spec, world)
        with enough_to_train(recipe, spec, world, watchdog):
            half = compute_dtype("float32" if recipe.audit else recipe.precision, world.device)
            torch.manual_seed(derive(recipe.seed, "init"))
            elsewhere = recipe.sharded and not world.first  # the first rank sends its weights
            model = build_model(recipe, spec, backbone, opened.autoencoder, meta=elsewhere)
            _check_model(model, recipe)
            with world.together():
                if init_from is not None and resumed.checkpoint is None and not elsewhere:
                    set_weights(model, read_trained(Path(init_from)), str(init_from))
            model = _fastest(model if recipe.sharded else model.to(world.device), recipe, half).train()
            engine = enter(closing(engine_of(recipe, model, world, half)))
        if begin is not None and world.first:
            begin(world.device)
        _check_threads(engine, log_once)
        restore(engine, resumed.checkpoint, folder.checkpoints, log)

        # ---- The journal, the checkpoints and the loop ----
        done, journal = engine.steps_done, list[Sink]()
        if world.first:
            folder.write_record(record, named, spec.version, world)
            if opened.autoencoder is not None:
                opened.autoencoder.save(folder.path / AUTOENCODER)
            due = recipe.every.due(done, recipe.steps) if resumed.evaluation_pending else set()
            possible = ("evaluate", "sample") if opened.test is not None else ("sample",)
            journal.append(run_folder.JsonLines(folder, done, [name for name in possible if name in due]))
        progress = enter(Progress("train", recipe.steps, "step", done, None if world.first else StringIO()))
        enter(_status(folder, engine, world))
        peers = engine.peers(timeout_s)
        saver = enter(closing(Saver(folder.checkpoints, recipe.keep, folder.check, peers)))  # it needs the lock
        source, shape = opened.train, spec.latent_shape
        stream = enter(closing(Stream(recipe, source, shape, world, done, opened.labels, spec.classes)))
        trackers = enter(run_folder.tracking(track if world.first else (), folder.path, recipe))
        enter(enough_to_train(recipe, spec, world, watchdog))
        engine.begin(stream)
        about = {"recipe": to_plain(recipe), "data": to_plain(spec), "network": record.network, "ranks": world.size}
        Loop(
            opened, engine, stream, folder, saver, [*journal, *trackers, *sinks], progress, watchdog, stop, about,
            pending=resumed.evaluation_pending,
        ).run()  # fmt: skip
    return Run(folder.path, backbone)


def distill(
    source: str | Path | Run,
    steps: int = 1000,
    out: str | Path | None = None,
    *,
    lr: float = 1e-4,
    batch: int | None = None,
    data: object = None,
    labels: object = None,
    device: str | None = None,
    command_line: bool = False,
) -> Run:
    """Tune a trained network to draw samples in one to four evaluations: see `bsi.consistency`.

        fast = bsi.distill("runs/cifar10", steps=2000).model()
        images = fast.sample(16, steps=1)           # k steps are k + 1 evaluations, for VDM k

    The result only draws samples: it has no ELBO and no likelihood.

    Args:
        source: A run, an exported file, or the name of a bundled network.
        steps: Steps of training.
        out: The run folder, by default `runs/NAME-distilled`.
        lr: The first learning rate of AdamW, which falls to 0 by a cosine.
        batch: By default that of the network's own training. The other arguments are those of `train`.
    """
    trained = read_trained(Path(source))
    recipe = trained.recipe
    if not isinstance(recipe, Recipe) or recipe.backbone is None or isinstance(trained.data.kind, Symbols):
        raise UsageError(
            f"{source} cannot be distilled: that needs a network of bsi.backbones, its recipe, and numbers."
        )
    recipe = replace(
        recipe, name=f"{recipe.name}-distilled", steps=steps, batch=batch or recipe.batch,
        objective=Objective(consistency=True), ema=Ema(beta=max(0.0, 1 - 20 / steps), start=0), every=Every(),
        optimizer=Optimizer(lr, schedule="cosine", weight_decay=0.0, clip=recipe.optimizer.clip),
        samples=Samples(recipe.samples.count, Sampler(steps=1)),
    )  # fmt: skip
    return train(recipe, data, out=out, labels=labels, init_from=Path(source), device=device, command_line=command_line)


@contextmanager
def _numerics(recipe: Recipe, world: World) -> Iterator[None]:
    """The recipe's threads and kernels while the block runs; then the caller's, with its random number generators."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1 if recipe.audit else recipe.threads or threads)
    if recipe.audit:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires it
        torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


def _check_layout(recipe: Recipe, world: World) -> None:
    """Raise if the ranks of this run cannot share a network as the recipe says."""
    kind, size, local = recipe.parallel, world.size, world.place.local_size
    if kind != "ddp" and size == 1 and world.device.type == "cpu":
        raise UsageError(f"--parallel {kind} divides a network among ranks, got one CPU process. Use --parallel ddp.")
    if kind == "hsdp" and (size % local or local == 1 or local == size):
        raise UsageError(
            f"--parallel hsdp needs several hosts with an equal number of ranks, at least two on each: got {size} "
            f"rank{'s' if size > 1 else ''}, {local} on this host. Use --parallel fsdp."
        )


def _check_model(model: Model, recipe: Recipe) -> None:
    """Raise if the recipe cannot train this model, or draw samples from it."""
    for name, parameter in model.denoiser.backbone.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise UsageError(
                f"training needs weights in float32, got {parameter.dtype} for {name}. Pass backbone.float(); "
                f"--precision sets the type of the computation."
            )
    check_last_level(model.method, model.kind)
    if recipe.samples.sampler.variance != "none":
        raise UsageError("samples during training have no fitted variance. Use samples.sampler.variance=none.")
    levels_of(model.method, model.named(recipe.samples.sampler))  # raises if the sampler is invalid
    if recipe.precision == "fp8":
        check_fp8(recipe.backbone, model.latent_shape)


def _fastest(model: Model, recipe: Recipe, half: torch.dtype | None) -> Model:
    """The model with its network in the fastest form, before the optimizer refers to the weights.

    The fused forms use the weights of all blocks at once; a sharded network is compiled block by block (sharding.py).
    """
    network, fast = model.denoiser.backbone, recipe.compile and not recipe.audit and not recipe.sharded
    if isinstance(network, Backbone):
        network.compute_dtype = half
        if fast:
            accelerate(network, model.device, recipe.lean, fp8=recipe.precision == "fp8")
    elif fast and compiles(model.device):
        network.compile()
    return model


def _check_threads(engine: Engine, log: Callable[[str], None]) -> None:
    """Log a message if one thread is much faster than all threads: the machine is busy, or the network is small."""
    recipe, network, threads = engine.recipe, engine.model.denoiser.backbone, torch.get_num_threads()
    chosen = recipe.threads is not None or recipe.audit or engine.world.device.type != "cpu"
    if chosen or threads == 1 or not isinstance(network, Backbone):
        return
    count = min(16, recipe.batch // recipe.accumulation // engine.world.size)
    x, t = torch.zeros(count, *network.shape), torch.zeros(count)
    with torch.no_grad(), engine.model.evaluating():
        seconds = seconds_by_threads(lambda: network(x, t))
    if (factor := seconds[threads] / seconds[1]) > WORTH_SAYING:
        log(f"{threads} threads are {factor:.1f} times slower than one on this machine now. Set threads to 1.")


@contextmanager
def _status(folder: RunFolder, engine: Engine, world: World) -> Iterator[None]:
    """Keep the status file up to date, however the run ends, unless the lock is lost."""

    def write(state: State, note: str = "") -> None:
        if world.first:
            with suppress(OSError):  # a full disk: the status only reports
                folder.write_status(state, engine.steps_done, note)

    write("running")
    try:
        yield
    except BaseException as error:  # if the lock is lost, `write` raises the lock's error, which takes precedence
        write("preempted" if isinstance(error, Preempted) else "failed", str(error) or type(error).__name__)
        raise
    write("finished")


@contextmanager
def _python_names() -> Iterator[None]:
    """For callers in Python, errors name `steps=9` in place of `--steps 9`, and Ctrl-C does not end a session."""

    def named(option: re.Match[str]) -> str:
        return option[1].replace("-", "_") + (f"={option[2]}" if option[2] else "")

    try:
        yield
    except BsiError as error:
        error.args = (re.sub(r"--([a-z][\w.-]*)(?: (\d+))?", named, str(error)),)
        if isinstance(error, Preempted) and hasattr(sys, "ps1"):
            raise KeyboardInterrupt(str(error)) from None
        raise
