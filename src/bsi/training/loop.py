"""The loop, top to bottom: a step, a look now and then, a save, until the last step or until someone asks to stop.

Between looks the host only queues work: every few steps, and whenever something is due, it reads what the device has
counted. After one step the order is journal, stored averages, evaluation and samples, checkpoint: a checkpoint never
lacks what was due before it. One that is written in a hurry, because of a signal or because the evaluation failed,
notes that the evaluation is still to be made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bsi.errors import NonFinite, Preempted
from bsi.io import write_json
from bsi.progress import Progress, readable_seconds
from bsi.recipe import Recipe
from bsi.runtime.averages import write_snapshot
from bsi.runtime.checkpoint import Snapshot
from bsi.runtime.dataset import TrainingData
from bsi.runtime.distributed import FailedTogether, World
from bsi.runtime.run_folder import RunFolder
from bsi.runtime.watchdog import Watchdog
from bsi.training.evaluate import bound, draw_samples
from bsi.training.journal import Sink, Value
from bsi.training.saver import Saver
from bsi.training.step import Engine
from bsi.training.stop import StopFlag, tell
from bsi.training.stream import Piece, Stream, piece_ids, piece_levels

__all__ = ["Job", "run"]

# Steps between two looks. On a CPU nothing runs ahead, and a look costs nothing.
LOOK_EVERY = {"cpu": 1, "cuda": 10}


class Clock:
    """Time spent in steps: evaluations and saves are left out."""

    def __init__(self) -> None:
        self._since, self._away = time.perf_counter(), 0.0

    def leave_out(self, seconds: float) -> None:
        self._away += seconds

    def lap(self) -> float:
        """Seconds of steps since the last lap."""
        now = time.perf_counter()
        spent = now - self._since - self._away
        self._since, self._away = now, 0.0
        return max(spent, 1e-9)


@dataclass(frozen=True)
class Job:
    """All that the loop works with. `about` is what every checkpoint says beside its tensors."""

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
    evaluation_pending: bool


def run(job: Job) -> None:
    """Train to the last step. Raises Preempted after a signal and NonFinite after a bad step; either has saved."""
    recipe, engine = job.recipe, job.engine
    clock, lap_began = Clock(), engine.steps_done
    if job.evaluation_pending:
        clock.leave_out(_look(job))
        if engine.steps_done == recipe.steps:  # no later checkpoint will tell that it was made
            _save(job)
    while engine.steps_done < recipe.steps:
        engine.step(job.stream, job.watchdog)
        job.progress.advance()
        step = engine.steps_done
        due, stored = recipe.every.due(step, recipe.steps), recipe.ema.stores(step, recipe.steps)
        if step % LOOK_EVERY[job.world.device.type] and not due and not stored:
            continue

        fault = engine.first_fault()
        if fault is not None:
            raise _replayable(job, fault)
        unseen = due.evaluate or due.sample
        if due.journal:
            _journal(job, step - lap_began, clock.lap(), unseen)
            lap_began = step
        if stored and job.world.first:
            write_snapshot(job.folder.path, step, engine.powers.state())
        if job.world.any(bool(job.stop)) and (step < recipe.steps or unseen):
            raise _preempted(job, evaluation_pending=unseen)
        clock.leave_out(_look(job))
        if due.checkpoint:
            clock.leave_out(_save(job))
    _finish_saves(job)


def _journal(job: Job, steps: int, seconds: float, unseen: bool) -> None:
    """One record of the steps since the last, to the journal and onto the progress line. If a sink fails, which may be
    anyone's, the steps until here are saved."""
    means, step = job.engine.means(), job.engine.steps_done
    bits = means.measured / 2 / math.log(2)  # 2 L_M / n in nats: L_M in bits per dimension
    k = job.recipe.objective.finite_k
    rate = steps * job.recipe.batch / seconds
    lr = job.recipe.rate(step - 1)
    record: dict[str, Value] = {
        "event": "train", "step": step, "loss": means.loss,
        "bits_per_dim" if k is None else "bits_per_dim_finite_k": bits, "lr": lr,
        "grad_norm": means.grad_norm, "images_per_s": rate, "checkpoint_age_s": job.saver.age_s, "time": time.time(),
    }  # fmt: skip
    try:
        _tell(job, record)
    except Exception:
        _save_alone(job, evaluation_pending=unseen)
        tell(f"a sink failed at step {step}, as follows; what was trained is saved, the same command goes on")
        raise
    saved = (
        f" · saved {readable_seconds(job.saver.age_s)} ago" if job.saver.has_saved and step < job.recipe.steps else ""
    )
    rounds = "" if k is None else f" in {k} rounds"
    spec = job.data.spec
    # Of binned data the loss is nearly all of the bound; of continuous data the two are not to be compared.
    what = "loss" if spec.bins is not None else "measurement term"
    each = "images" if len(spec.shape) == 3 else "samples"
    job.progress.note = f"{what} {bits:.3f} bits/dim{rounds} · {rate:.4g} {each}/s · lr {lr:.1e}{saved}"


def _tell(job: Job, record: Mapping[str, Value]) -> None:
    if job.world.first:
        for sink in job.sinks:
            sink(record)


def _look(job: Job) -> float:
    """Evaluate and draw samples where that is due; the seconds it took. If it fails, or is interrupted, the steps until
    here are saved."""
    started = time.perf_counter()
    try:
        _observe(job)
    except FailedTogether as failed:
        if job.world.any(bool(job.stop)):  # that is why; or it fails again when the run goes on
            raise _preempted(job, evaluation_pending=True) from None
        error = failed.error
        _save_alone(job, evaluation_pending=True)
        job.world.barrier()  # a rank that leaves before the first has saved would have it killed
    except Exception as failed:
        error = failed
        _save_alone(job, evaluation_pending=True)  # the others may never come
    else:
        return time.perf_counter() - started
    step = job.engine.steps_done
    job.watchdog.at(step, "evaluate")  # the save went well: whose error this is, room.py asks
    if job.world.first:
        tell(
            f"the evaluation or the samples of step {step} failed, as follows; what was trained is saved. The same "
            f"command tries them again; with --every.evaluate 0 --every.sample 0 it goes on without"
        )
    raise error


def _save_alone(job: Job, evaluation_pending: bool) -> None:
    """What was trained, before an error is raised; on this rank until it is on the disk."""
    _save(job, evaluation_pending)
    job.saver.wait()


def _observe(job: Job) -> None:
    recipe, step = job.recipe, job.engine.steps_done
    due = recipe.every.due(step, recipe.steps)
    job.watchdog.at(step, "evaluate")
    if due.evaluate and job.data.test is not None:
        found = bound(job.engine.ema.model, job.data.test, recipe, job.world, job.stop)
        unit = found.n * math.log(2)
        _tell(job, {
            "event": "evaluate", "step": step, "bits_per_dim": found.bits_per_dim, "error": found.monte_carlo_error,
            "data_error": found.data_error, "data_resolved": found.data_resolved,
            "reconstruction": float(found.reconstruction.mean()) / unit,
            "measurement": float(found.measurement.mean()) / unit, "prior": float(found.prior.mean()) / unit,
            "change_of_units": found.log_determinant / math.log(2), "time": time.time(),
        })  # fmt: skip
    if due.sample and job.world.first:
        path = draw_samples(job.engine.ema.model, recipe, job.folder.path / "samples" / f"step-{step:08d}")
        _tell(job, {"event": "sample", "step": step, "file": f"samples/{path.name}", "time": time.time()})


def _save(job: Job, evaluation_pending: bool = False) -> float:
    """Hand the state to the saver, on the first rank; the seconds it took."""
    started, step = time.perf_counter(), job.engine.steps_done
    job.watchdog.at(step, "save")
    if job.world.first:
        state = {**job.about, "evaluation_pending": evaluation_pending}
        job.saver.save(Snapshot(step, job.engine.tensors(), state))
    return time.perf_counter() - started


def _finish_saves(job: Job) -> None:
    """Until what was saved is on the disk, on every rank: a rank that leaves early would have the others killed."""
    job.saver.wait()
    job.world.barrier()


def _preempted(job: Job, evaluation_pending: bool) -> Preempted:
    """Save on all ranks, to go on later."""
    _save(job, evaluation_pending)
    _finish_saves(job)
    reason, step = job.stop.reason or "another rank's signal", job.engine.steps_done
    return Preempted(f"{reason}: saved step {step} of {job.recipe.steps}; run the same command to go on")


def _replayable(job: Job, fault: int) -> NonFinite:
    """Keep what a bad step saw, and the state before it: running on from there meets it again at once."""
    recipe, step = job.recipe, fault
    whole = Piece(step, 0, 0, recipe.batch)
    t = piece_levels(recipe, whole)
    path = job.folder.path / f"replay-{step:08d}.json"
    if job.world.first:
        write_json(path, {
            "step": step, "seed": recipe.seed, "ids": piece_ids(recipe, job.data.spec.count, whole).tolist(),
            "t": t.tolist(), "levels": job.engine.loss.level(t.to(job.world.device)).tolist(),
            "recipe": job.about["recipe"],
        })  # fmt: skip
    job.engine.steps_done = step
    _save(job)
    _finish_saves(job)
    return NonFinite(
        f"the loss or the gradient of step {step} was not finite. Nothing was updated from it: the state before it is "
        f"saved, and {path} lists the samples, levels and seed it saw. Lower --optimizer.lr, or look at the data."
    )
