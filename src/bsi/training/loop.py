"""The training loop, top to bottom: steps and the actions due after them, until the last step or a request to stop.

The host only queues work for the device. It reads the device's counters every few steps, and when an action is due. The
order after a step is journal, stored averages, evaluation and samples, checkpoint, so that a checkpoint is always
written after the other actions of its step. A checkpoint that is written early, because of a signal or an error,
records whether an evaluation is still pending.

SIGTERM, SIGINT (Ctrl-C), SIGHUP and SIGUSR1 (Slurm's warning) set a flag, which is read between steps and between the
batches of an evaluation. All ranks then save the same step and exit with code 75; a second Ctrl-C exits at once. After
any other error the last complete step is saved before the error is raised.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from bsi import progress
from bsi.bound import estimate
from bsi.data.batches import BatchSource
from bsi.elbo import Elbo, Estimator
from bsi.errors import NonFinite, Preempted
from bsi.model import Model
from bsi.pictures import class_columns, grid, is_image
from bsi.progress import Progress, readable_seconds
from bsi.recipe import Recipe
from bsi.rng import derive, subset
from bsi.runtime.baselines import MOST_TRAIN, baselines, baselines_text
from bsi.runtime.checkpoint import Saver, Snapshot
from bsi.runtime.distributed import FailedTogether, Watchdog, World
from bsi.runtime.ema import store_averages
from bsi.runtime.run_folder import RunFolder, Sink, Value
from bsi.training.dataset import TrainingData
from bsi.training.step import Engine
from bsi.training.stream import Piece, Stream, piece_ids, piece_levels
from bsi.values import Standardize

# Steps between two readings of the device's counters. A CPU never runs ahead of the host.
READ_EVERY = {"cpu": 1, "cuda": 10}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
STDERR = 2
LEFT_AT_ONCE = 130  # the exit code that shells report for a process ended by Ctrl-C


class Stopped(Preempted, SystemExit):  # type: ignore[misc]  # both define `code`
    """Training was asked to stop. If it is not caught, the program exits with its code and without a traceback."""


class Clock:
    """Time spent in steps, without evaluations and saves."""

    def __init__(self) -> None:
        self._since, self._excluded = time.perf_counter(), 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._excluded += time.perf_counter() - started

    def lap(self) -> float:
        """Seconds of steps since the last lap."""
        now = time.perf_counter()
        spent = now - self._since - self._excluded
        self._since, self._excluded = now, 0.0
        return max(spent, 1e-9)


@dataclass
class Job:
    """The state of a training run. `about` is stored in every checkpoint."""

    recipe: Recipe
    data: TrainingData
    engine: Engine
    stream: Stream
    world: World
    folder: RunFolder
    saver: Saver
    sinks: Sequence[Sink]
    progress: Progress
    watchdog: Watchdog
    stop: StopFlag
    about: Mapping[str, Any]
    pending: bool
    """Whether the evaluation and the samples of the current step are pending."""


def run(job: Job) -> None:
    """Train to the last step.

    Raises:
        Preempted: A signal asked to stop. The state is saved.
        NonFinite: A loss or gradient was not finite. The state before it is saved.
    """
    try:
        _train(job)
    except (Preempted, NonFinite):
        raise
    except BaseException as error:
        where = job.watchdog.where
        _rescue(job, where[1])
        job.watchdog.at(*where)  # the phase in which the error occurred, for out_of_memory.py
        if isinstance(error, FailedTogether):
            job.world.barrier()  # the launcher ends all ranks once one exits: wait until the first has saved
            raise error.error from None
        raise


def _train(job: Job) -> None:
    recipe, engine = job.recipe, job.engine
    clock, lap_began = Clock(), engine.steps_done
    if job.pending:
        with clock.paused():
            _observe(job)
        if engine.steps_done == recipe.steps:  # there is no later checkpoint to record that it is done
            _save(job)
    while engine.steps_done < recipe.steps:
        engine.step(job.stream, job.watchdog)
        job.progress.advance()
        step = engine.steps_done
        due, stored = recipe.every.due(step, recipe.steps), recipe.ema.stores(step, recipe.steps)
        job.pending = due.evaluate or due.sample
        if step % READ_EVERY[job.world.device.type] and not due and not stored:
            continue
        fault = engine.first_fault()
        if fault is not None:
            raise _non_finite(job, fault)
        if due.journal:
            _journal(job, step - lap_began, clock.lap())
            lap_began = step
        with clock.paused():
            if stored and job.world.first:
                job.folder.check()
                store_averages(job.folder.path, step, engine.powers.state())
            if job.world.any(bool(job.stop)) and (step < recipe.steps or job.pending):
                raise _preempted(job)
            _observe(job)
            if due.checkpoint:
                _save(job)
    _finish_saves(job)


# ---- Actions after a step --------------------------------------------------------------------------------------------


def _journal(job: Job, steps: int, seconds: float) -> None:
    """Write one record of the steps since the last one, and show it next to the progress."""
    means, step = job.engine.means(), job.engine.steps_done
    spec = job.data.spec
    bits = spec.kind.channels * means.measured / 2 / math.log(2)  # 2 L_M / n in nats: L_M in bits per dimension
    k = job.recipe.objective.finite_k
    rate = steps * job.recipe.batch / seconds
    lr = job.recipe.rate(step - 1)
    _record(job, {
        "event": "train", "step": step, "loss": means.loss,
        "bits_per_dim" if k is None else "bits_per_dim_finite_k": bits, "lr": lr,
        "grad_norm": means.grad_norm, "images_per_s": rate, "checkpoint_age_s": job.saver.age_s, "time": time.time(),
    })  # fmt: skip
    saved = (
        f" · saved {readable_seconds(job.saver.age_s)} ago" if job.saver.has_saved and step < job.recipe.steps else ""
    )
    rounds = "" if k is None else f" in {k} rounds"
    # For discrete data the loss is most of the bound; for continuous data the two are not comparable.
    what = "measurement term" if isinstance(spec.kind, Standardize) else "loss"
    each = "images" if len(spec.shape) == 3 else "samples"
    job.progress.note = f"{what} {bits:.3f} bits/{spec.kind.element}{rounds} · {rate:.4g} {each}/s · lr {lr:.1e}{saved}"


def _record(job: Job, record: Mapping[str, Value]) -> None:
    """Pass a record to the sinks, on the first rank."""
    job.watchdog.at(job.engine.steps_done, "journal")
    if job.world.first:
        for sink in job.sinks:
            sink(record)


def _observe(job: Job) -> None:
    """Evaluate and draw samples if they are due."""
    recipe, step = job.recipe, job.engine.steps_done
    due = recipe.every.due(step, recipe.steps)
    job.watchdog.at(step, "evaluate")
    if due.evaluate and job.data.test is not None:
        try:
            found = bound(job.engine.ema.model, job.data.test, recipe, job.world, job.stop)
        except FailedTogether:
            if job.world.any(bool(job.stop)):  # a signal was the cause; any other error occurs again in the resumed run
                raise _preempted(job) from None
            raise
        unit = found.n * math.log(2)
        _record(job, {
            "event": "evaluate", "step": step, "bits_per_dim": found.bits_per_dim, "error": found.monte_carlo_error,
            "data_error": found.data_error, "data_resolved": found.data_resolved,
            "reconstruction": float(found.reconstruction.mean()) / unit,
            "measurement": float(found.measurement.mean()) / unit, "prior": float(found.prior.mean()) / unit,
            "change_of_units": found.log_determinant / math.log(2), "time": time.time(),
        })  # fmt: skip
        if job.world.first:
            progress.log(f"step {step}: test {found}")
            if step == recipe.steps and (text := baselines_text(_baselines(job.data, len(found.nats)), found.binned)):
                progress.log(f"for comparison, the same samples: {text}")
    job.watchdog.at(step, "evaluate")
    if due.sample and job.world.first:
        job.folder.check()
        path = draw_samples(job.engine.ema.model, recipe, job.folder.path / "samples" / f"step-{step:08d}")
        _record(job, {"event": "sample", "step": step, "file": f"samples/{path.name}", "time": time.time()})
    job.pending = False


def _baselines(data: TrainingData, count: int) -> dict[str, float]:
    """The baselines for the random subset of test samples that is evaluated."""
    assert data.test is not None
    chosen = (data.train.take(subset(len(data.train), MOST_TRAIN)), data.test.take(subset(len(data.test), count)))
    train, test = (images.cpu().numpy() for images in chosen)
    return baselines(train, test, data.spec.bins)


class Interrupted(Exception):
    """A signal arrived during an evaluation."""


def bound(model: Model, test: BatchSource, recipe: Recipe, world: World, stop: StopFlag) -> Elbo:
    """The bound of a random subset of the test set, which is the same at every step and for any number of ranks.

    Every rank must call this function, and all get the same result. All raise FailedTogether if one rank fails or is
    asked to `stop`.
    """

    def poll() -> None:
        if stop:
            raise Interrupted

    wanted = recipe.evaluation
    ids = subset(len(test), wanted.images)
    estimator = Estimator(wanted.measure, wanted.recon, seed=derive(recipe.seed, "evaluate"), batch_size=wanted.batch)
    with model.evaluating():
        return estimate(model.on(test, ids=ids), estimator, world, poll=poll)


def draw_samples(model: Model, recipe: Recipe, path: Path) -> Path:
    """Draw samples as a picture, or as an array (.npy) if they are not images, with the same seeds at every step.

    A model with labels takes the classes in turn. If there are few classes, each has a column of the grid.
    """
    wanted = recipe.samples
    seed = derive(recipe.seed, "samples") >> 32
    label = range(model.classes) if model.classes else None
    x = model.sample(wanted.count, wanted.sampler, seed=seed, label=label).cpu().numpy()
    path.parent.mkdir(exist_ok=True)
    if is_image(model.shape):
        low, high = (0.0, float(model.bins.count - 1)) if model.bins is not None else (float(x.min()), float(x.max()))
        path = path.with_suffix(".png")
        grid(x, class_columns(model.classes), low, max(high, low + 1e-6)).save(path)
        return path
    if model.symbols is not None:
        path = path.with_suffix(".txt")
        path.write_text("\n\n".join(map(model.symbols.text, x)) + "\n", "utf-8")
        return path
    path = path.with_suffix(".npy")
    np.save(path, x, allow_pickle=False)
    return path


# ---- Saving ----------------------------------------------------------------------------------------------------------


def _save(job: Job) -> None:
    """Pass the state to the saver, on the first rank."""
    step = job.engine.steps_done
    job.watchdog.at(step, "save")
    if job.world.first:
        job.saver.save(Snapshot(step, job.engine.tensors(), {**job.about, "evaluation_pending": job.pending}))


def _finish_saves(job: Job) -> None:
    """Wait on all ranks until the save is on the disk: the launcher ends all ranks once one exits."""
    job.saver.wait()
    job.world.barrier()


def _preempted(job: Job) -> Preempted:
    _save(job)
    _finish_saves(job)
    reason, step = job.stop.reason or "another rank's signal", job.engine.steps_done
    message = f"{reason}: saved step {step} of {job.recipe.steps}; run the same command to resume"
    log(message)
    return Stopped(message)


def _rescue(job: Job, phase: str) -> None:
    """Save the last complete step before an error is raised, without waiting for other ranks, which may have failed."""
    engine = job.engine
    if not job.world.first or engine.updating or phase == "save":
        return
    with suppress(Exception):  # the first error is the one to raise
        if (fault := engine.first_fault()) is not None:
            engine.steps_done, job.pending = fault, False
        _save(job)
        job.saver.wait()
        what = {"journal": "a sink", "evaluate": "the evaluation or the samples"}.get(phase, "training")
        without = " With --every.evaluate 0 --every.sample 0 it runs without them." if phase == "evaluate" else ""
        log(
            f"{what} failed at step {engine.steps_done}, as follows. The state of this step is saved, and the same "
            f"command resumes from it.{without}"
        )


def _non_finite(job: Job, step: int) -> NonFinite:
    """Save the inputs of a non-finite step and the state before it, so that a resumed run repeats the step first."""
    recipe = job.recipe
    batch = Piece(step, 0, 0, recipe.batch)
    t = piece_levels(recipe, batch)
    name = f"replay-{step:08d}.json"
    if job.world.first:
        job.folder.write(name, {
            "step": step, "seed": recipe.seed, "ids": piece_ids(recipe, job.data.spec.count, batch).tolist(),
            "t": t.tolist(), "levels": job.engine.loss.level(t.to(job.world.device)).tolist(),
            "recipe": job.about["recipe"],
        })  # fmt: skip
    job.engine.steps_done, job.pending = step, False
    _save(job)
    _finish_saves(job)
    return NonFinite(
        f"the loss or the gradient of step {step} was not finite. The step was not applied, the state before it is "
        f"saved, and {job.folder.path / name} lists its samples, levels and seed. Lower --optimizer.lr, or check the "
        f"data."
    )


# ---- Signals ---------------------------------------------------------------------------------------------------------


class StopFlag:
    """Set once a signal has arrived; `reason` is its name."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def __bool__(self) -> bool:
        return self.reason is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.reason == "SIGINT" and number == signal.SIGINT:
            _write("second Ctrl-C: exiting without saving")
            os._exit(LEFT_AT_ONCE)
        if not self:
            self.reason = signal.Signals(number).name
            again = "; Ctrl-C again exits at once" if number == signal.SIGINT else ""
            _write(f"{self.reason}: saving, then exiting{again}")
        elif number == signal.SIGINT:
            self.reason = "SIGINT"


@contextmanager
def listening() -> Iterator[StopFlag]:
    """Handle the signals while the block runs, except ignored ones (nohup). Does nothing outside the main thread."""
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    wanted = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, flag) for number in wanted}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def log(line: str) -> None:
    """Print a line on stderr. Errors in writing it are ignored."""
    progress.log(f"bsi train: {line}")


def _write(words: str) -> None:
    """Print a line from a signal handler, bypassing Python's stderr, which may be in the middle of a write."""
    try:
        os.write(STDERR, f"\nbsi train: {words}\n".encode())
    except OSError:
        progress.silence(STDERR)
