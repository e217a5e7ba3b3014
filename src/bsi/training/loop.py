"""The training loop, top to bottom: steps and the actions due after them, until the last step or a request to stop.

The host only queues work for the device. It reads the device's counters every few steps, and when an action is due. The
order after a step is journal, stored averages, evaluation and samples, checkpoint, so that a checkpoint is always
written after the other actions of its step. A checkpoint that is written early, because of a signal or an error,
records whether an evaluation is still pending.

SIGTERM, SIGINT (Ctrl-C), SIGHUP, SIGUSR1 (Slurm's warning) and all others that end a process set a flag, which is read
between steps and between the batches of an evaluation. All ranks then save the same step and exit with code 75; a
second Ctrl-C exits at once. After any other error the last complete step is saved before the error is raised.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from bsi import progress
from bsi.bound import estimate
from bsi.data.baselines import MOST_TRAIN, baselines, baselines_text
from bsi.data.batches import BatchSource
from bsi.elbo import Elbo, Estimator
from bsi.errors import NonFinite, Preempted, UsageError
from bsi.model import Model
from bsi.pictures import class_columns, grid, is_image
from bsi.progress import Progress, Shown, readable_seconds
from bsi.recipe import Recipe
from bsi.rng import derive, subset
from bsi.runtime.checkpoint import Saver, Snapshot
from bsi.runtime.distributed import FailedTogether, Watchdog, World
from bsi.runtime.ema import store_averages
from bsi.runtime.run_folder import RunFolder, Sink, read_journal
from bsi.training.dataset import TrainingData
from bsi.training.step import Engine, Piece, Stream, piece_ids, piece_levels
from bsi.values import Standardize, unit_of_bounds

# Steps between two readings of the device's counters. A CPU never runs ahead of the host.
READ_EVERY = {"cpu": 1, "cuda": 10}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# All others that end a process are handled unless the program has a handler of its own: Ctrl-\, limits of time, and the
# warnings of other batch systems. After an error of the program itself nothing is saved, and some do not end it.
ERRORS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
HARMLESS = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH}
PAUSES = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
RARE_SIGNALS = signal.valid_signals() - {*SIGNALS, signal.SIGKILL, signal.SIGSTOP} - ERRORS - HARMLESS - PAUSES
STDERR = 2
LEFT_AT_ONCE = 130  # the exit code that shells report for a process ended by Ctrl-C


class Stopped(Preempted, SystemExit):  # type: ignore[misc]  # both define `code`
    """Training was asked to stop. If it is not caught, the program exits with its code and without a traceback."""


@dataclass
class Loop:
    """A training run. `about` is stored in every checkpoint."""

    data: TrainingData
    engine: Engine
    stream: Stream
    folder: RunFolder
    saver: Saver
    sinks: Sequence[Sink]
    progress: Progress
    watchdog: Watchdog
    stop: StopFlag
    about: Mapping[str, Any]
    pending: bool
    """Whether the evaluation and the samples of the current step are pending."""

    def run(self) -> None:
        """Train to the last step. Raises Preempted after a signal, and NonFinite after a loss that is not finite."""
        self.recipe, self.world = self.engine.recipe, self.engine.world
        try:
            self._train()
        except (Preempted, NonFinite):
            raise
        except BaseException as error:
            where = self.watchdog.where
            self._rescue(where[1], isinstance(error, FailedTogether))
            self.watchdog.at(*where)  # the phase in which the error occurred, for out_of_memory.py
            if isinstance(error, FailedTogether):
                self.world.barrier()  # the launcher ends all ranks once one exits: wait until the first has saved
                raise error.error from None
            raise

    def _train(self) -> None:
        recipe, engine = self.recipe, self.engine
        if self.pending:
            self._observe()
            if engine.steps_done == recipe.steps:  # there is no later checkpoint to record that it is done
                self._save()
        lap_step, lap_began = engine.steps_done, time.perf_counter()
        while engine.steps_done < recipe.steps:
            engine.step(self.stream, self.watchdog)
            self.progress.advance()
            step = engine.steps_done
            due, stored = recipe.every.due(step, recipe.steps), recipe.ema.stores(step, recipe.steps)
            self.pending = "evaluate" in due or "sample" in due
            if step % READ_EVERY[self.world.device.type] and not due and not stored:
                continue
            if (fault := engine.first_fault()) is not None:
                raise self._non_finite(fault)
            steps_ended = time.perf_counter()
            if "journal" in due:
                self._journal((step - lap_step) * recipe.batch / max(steps_ended - lap_began, 1e-9))
                lap_step, lap_began = step, steps_ended
            if stored:
                averages = engine.averages()
                if self.world.first:
                    self.folder.check()
                    store_averages(self.folder.path, step, averages)
            if self.world.any(bool(self.stop)) and (step < recipe.steps or self.pending):
                raise self._preempted()
            self._observe()
            if "checkpoint" in due:
                self._save()
            lap_began += time.perf_counter() - steps_ended  # the rate is that of the steps alone
        self._finish_saves()

    def _record(self, event: str, values: Mapping[str, Any]) -> None:
        """Pass a record of the current step to the sinks, on the first rank."""
        step = self.engine.steps_done
        self.watchdog.at(step, "journal")
        record = {"event": event, "step": step, **values, "time": time.time()}
        for sink in self.sinks if self.world.first else ():
            sink(record)

    def _journal(self, rate: float) -> None:
        """Record the steps since the last record, and show them next to the progress."""
        means, step, k = self.engine.means(), self.engine.steps_done, self.recipe.objective.finite_k
        kind, lr, age_s = self.data.spec.kind, self.recipe.rate(step - 1), self.saver.age_s
        bits = kind.channels * means.measured / 2 / math.log(2)  # 2 L_M / n in nats: L_M in bits per dimension
        self._record("train", {
            "loss": means.loss, "bits_per_dim" if k is None else "bits_per_dim_finite_k": bits, "lr": lr,
            "grad_norm": means.grad_norm, "images_per_s": rate, "checkpoint_age_s": age_s,
        })  # fmt: skip
        # For discrete data the loss is most of the bound; for continuous data the two are not comparable.
        shown = f"loss {bits:.3f} bits/{kind.element}"
        if isinstance(kind, Standardize):
            shown = f"measurement term {bits * math.log(2):.3f} nats/{kind.element}"
        rounds = "" if k is None else f" in {k} rounds"
        each = "images" if len(self.data.spec.shape) == 3 else "samples"
        saved = self.saver.has_saved and step < self.recipe.steps
        age = f" · saved {readable_seconds(age_s)} ago" if saved else ""
        self.progress.note = f"{shown}{rounds} · {rate:.4g} {each}/s · lr {lr:.1e}{age}"

    def _observe(self) -> None:
        """Evaluate and draw samples if they are due."""
        step, note = self.engine.steps_done, self.progress.note
        due = self.recipe.every.due(step, self.recipe.steps)

        def report(*counted: float | int) -> None:
            self.watchdog.at(step, "evaluate")
            self.progress.advance(0, f"{note} · evaluating" if note else "evaluating")

        if {"evaluate", "sample"} & due:
            report()
            with self.engine.ema.evaluating() as model:
                if "evaluate" in due and self.data.test is not None:
                    self._evaluate(model, self.data.test, report)
                    report()
                if "sample" in due and self.world.first:
                    self.folder.check()
                    path = draw_samples(model, self.recipe, self.folder.path / "samples" / f"step-{step:08d}", report)
                    self._record("sample", {"file": f"samples/{path.name}"})
            self.progress.note = note
        self.pending = False

    def _evaluate(self, model: Model, test: BatchSource, report: Callable[[], None]) -> None:
        recipe, step = self.recipe, self.engine.steps_done

        def poll() -> None:
            report()
            if self.stop:
                raise Preempted

        try:
            found = bound(model, test, recipe, self.world, poll)
        except FailedTogether:
            if self.world.any(bool(self.stop)):  # a signal; any other error occurs again in the resumed run
                raise self._preempted() from None
            raise
        self._record("evaluate", {**found.record(), "error": found.monte_carlo_error})
        if self.world.first:
            progress.log(f"step {step}: test {found}")
            if step == recipe.steps and (text := self._baselines(test, found)):
                progress.log(f"for comparison, the same samples: {text}")
            if step == recipe.steps and (text := _overfitted(self.folder.path, found)):
                progress.log(text)

    def _baselines(self, test: BatchSource, found: Elbo) -> str:
        """The baselines of the random subset of test samples that was evaluated."""
        train, spec = self.data.train, self.data.spec
        apart = spec.shape[0] if self.recipe.data.windows else 1  # of samples that do not overlap
        known = train.take(apart * subset(len(train) // apart, MOST_TRAIN))
        tested = test.take(subset(len(test), len(found.nats)))
        compared = baselines(known.cpu().numpy(), tested.cpu().numpy(), spec.kind)
        return baselines_text(compared, found.binned, found.element)

    def _save(self) -> None:
        """Pass the state to the saver, on the ranks that write it."""
        step = self.engine.steps_done
        self.watchdog.at(step, "save")
        if self.engine.writes:
            self.saver.save(Snapshot(step, self.engine.tensors(), {**self.about, "evaluation_pending": self.pending}))

    def _finish_saves(self) -> None:
        """Wait on all ranks until the save is on the disk: the launcher ends all ranks once one exits."""
        self.saver.wait()
        self.world.barrier()

    def _preempted(self) -> Preempted:
        self._save()
        self._finish_saves()
        reason, done = self.stop.reason or "another rank's signal", self.engine.steps_done
        message = f"{reason}: saved step {done} of {self.recipe.steps}; the same command or call resumes"
        log(message)
        return Stopped(message)

    def _rescue(self, phase: str, together: bool) -> None:
        """Save the last complete step before an error is raised, without other ranks, which may have failed.

        A sharded state can be saved only by all ranks, that is, after an error that all have raised.
        """
        engine = self.engine
        alone = self.world.first and (self.world.size == 1 or not engine.sharded)
        possible = alone or (together and engine.writes)
        if not possible or engine.updating or phase == "save":
            return
        with suppress(Exception):  # the first error is the one to raise
            if (fault := engine.first_fault()) is not None:
                engine.steps_done, self.pending = fault, False
            self._save()
            self.saver.wait()
            what = {"journal": "a sink", "evaluate": "the evaluation or the samples"}.get(phase, "training")
            without = " Set every.evaluate and every.sample to 0 to run without them." if phase == "evaluate" else ""
            log(
                f"{what} failed at step {engine.steps_done}, as follows. The state of this step is saved, and the same "
                f"command or call resumes from it.{without}"
            )

    def _non_finite(self, step: int) -> NonFinite:
        """Save the inputs of a non-finite step and the state before it, so that a resumed run repeats the step."""
        recipe, name = self.recipe, f"replay-{step:08d}.json"
        if self.world.first:
            batch = Piece(step, 0, 0, recipe.batch)
            ids, t = piece_ids(recipe, self.data.spec.count, batch), piece_levels(recipe, batch)
            levels = self.engine.loss.level(t.to(self.world.device))
            self.folder.write(name, {
                "step": step, "seed": recipe.seed, "ids": ids.tolist(), "t": t.tolist(), "levels": levels.tolist(),
                "recipe": self.about["recipe"],
            })  # fmt: skip
        self.engine.steps_done, self.pending = step, False
        self._save()
        self._finish_saves()
        return NonFinite(
            f"the loss or the gradient of step {step} was not finite. The step was not applied, the state before it is "
            f"saved, and {self.folder.path / name} lists its samples, levels and seed. Lower --optimizer.lr, or check "
            f"the data."
        )


def _overfitted(run: Path, found: Elbo) -> str:
    """A message if the bound of the same samples, with the same noise, was clearly lower at an earlier step."""
    with suppress(UsageError, OSError):  # the journal could not be written
        evaluated = [record for record in read_journal(run) if record.get("event") == "evaluate"]
        past = {record["step"]: float(record["bits_per_dim"]) for record in evaluated}
        step = min(past, key=past.__getitem__, default=None)
        if step is not None and (more := found.bits_per_dim - past[step]) > 2 * found.monte_carlo_error:
            unit, scale = unit_of_bounds(found.binned)
            past_bound = f"the bound was {scale * more:.4f} {unit}/{found.element} lower at step {step}"
            return f"{past_bound}: the network overfits. Train for fewer steps, on more data, or with dropout."
    return ""


def bound(
    model: Model, test: BatchSource, recipe: Recipe, world: World, poll: Callable[[], None] = lambda: None
) -> Elbo:
    """The bound of a random subset of the test set, which is the same at every step and for any number of ranks.

    Every rank must call this function, and all get the same result. All raise FailedTogether if one rank fails. `poll`
    is called before each batch, and may raise.
    """
    wanted = recipe.evaluation
    ids = subset(len(test), wanted.images)
    more = wanted.images // len(ids)  # a smaller test set has the same number of evaluations
    measure, recon = more * wanted.measure, more * wanted.recon
    estimator = Estimator(measure, recon, seed=derive(recipe.seed, "evaluate"), batch_size=wanted.batch)
    with model.evaluating():
        return estimate(model.on(test, ids=ids), estimator, world, poll=poll)


def draw_samples(model: Model, recipe: Recipe, path: Path, progress: Shown = False) -> Path:
    """Draw samples as a picture, text, or an array (.npy) of other data, with the same seeds at every step.

    A model with labels takes the classes in turn. If there are few classes, each column of the grid is of one.
    """
    wanted, label = recipe.samples, range(model.classes) if model.classes else None
    seed = derive(recipe.seed, "samples") >> 32
    x = model.sample(wanted.count, wanted.sampler, seed=seed, label=label, progress=progress).cpu().numpy()
    path.parent.mkdir(exist_ok=True)
    if is_image(model.shape):
        path = path.with_suffix(".png")
        low, high = (0.0, float(model.bins.count - 1)) if model.bins is not None else (float(x.min()), float(x.max()))
        grid(x, class_columns(model.classes, len(x)), low, max(high, low + 1e-6)).save(path)
    elif model.symbols is not None:
        path = path.with_suffix(".txt")
        path.write_text("\n\n".join(map(model.symbols.text, x)) + "\n", "utf-8")
    else:
        path = path.with_suffix(".npy")
        np.save(path, x, allow_pickle=False)
    return path


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
            self.reason = next((each.name for each in signal.Signals if each == number), f"signal {number}")
            again = "; Ctrl-C again exits at once" if number == signal.SIGINT else ""
            _write(f"{self.reason}: saving, then exiting{again}")
        elif number == signal.SIGINT:
            self.reason = "SIGINT"


@contextmanager
def listening() -> Iterator[StopFlag]:
    """Handle the signals while the block runs, except ignored ones (nohup). Does nothing outside the main thread."""
    flag = StopFlag()
    main = threading.current_thread() is threading.main_thread()
    wanted = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    wanted += [number for number in RARE_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    before = {number: signal.signal(number, flag) for number in wanted} if main else {}
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
    if sys.__stderr__ is None:  # closed when Python started: its number may now be that of another file
        return
    try:
        os.write(STDERR, f"\nbsi train: {words}\n".encode())
    except OSError:
        progress.silence(STDERR)
