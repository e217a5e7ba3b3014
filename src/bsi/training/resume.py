"""Resuming: find the checkpoint of a run folder, compare it with the current recipe, and load it into the engine.

A setting that has changed must be safe or allowed by name. Safe settings cannot change the result (intervals, workers)
or change it only by rounding (accumulation, recomputation). Others need `--allow`, as in `--allow optimizer.lr`.
Settings that determine which tensors exist or what they are trained for (the network, the labels, the kind of
optimizer, the objective's weight, the averages) need a new run; `--init-from` copies the weights. A run with a constant
schedule can be extended; one with a cosine schedule cannot, since all its learning rates depend on the number of steps.

The first rank reads and prints; all ranks raise together.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bsi.errors import UsageError
from bsi.recipe import Change, Recipe, changes, flat, from_plain
from bsi.runtime import checkpoint
from bsi.runtime.checkpoint import Checkpoint
from bsi.runtime.distributed import World
from bsi.runtime.export import DataSpec
from bsi.runtime.run_folder import RunFolder, RunRecord
from bsi.training.step import Engine
from bsi.values import Standardize

SAFE = ("name", "accumulation", "lean", "data.workers", "every", "evaluation", "samples", "keep")
NEVER = ("backbone", "network", "data.labels", "optimizer.kind", "objective.weight", "ema.powers")
DATA_VERSION = "data.version"
SHOWN = 7  # changes in a message of at most ten lines

Log = Callable[[str], None]


@dataclass(frozen=True)
class Resumed:
    """The point from which a run resumes. Only the first rank has the checkpoint; `Engine.share` sends its state."""

    checkpoint: Checkpoint | None
    data: DataSpec
    finished: bool
    evaluation_pending: bool


def find_checkpoint(
    folder: RunFolder, record: RunRecord, data: DataSpec, world: World, allow: Sequence[str], log: Log
) -> Resumed:
    """Find the checkpoint to resume from, and raise if the current settings do not fit it."""
    found = None
    with world.together():
        if world.first and (found := checkpoint.find(folder.checkpoints, log)) is not None:
            state = found.state
            before = folder.read_record() or RunRecord(from_plain(Recipe, state["recipe"]), str(state["network"]))
            versions = state["data"]["version"], data.version
            for change in check_changes(before, record, versions, found.step, allow):
                log(f"changed since the run began: {change}")
            pieces = state["ranks"] * before.recipe.accumulation, world.size * record.recipe.accumulation
            if pieces[0] != pieces[1] and not record.recipe.audit:
                log(
                    f"ranks x accumulation was {pieces[0]} and is {pieces[1]}: samples, levels and noise stay the "
                    f"same, dropout masks differ, and sums are rounded differently"
                )
    pending = found is not None and bool(found.state["evaluation_pending"])
    done = found is not None and found.step >= record.recipe.steps and not pending
    return Resumed(found, _in_units_of(found, data, world), world.any(done), world.any(pending))


def _in_units_of(found: Checkpoint | None, data: DataSpec, world: World) -> DataSpec:
    """The description of the data with the checkpoint's standardization, which in version 0.1.0 is a single number."""
    if not isinstance(data.kind, Standardize):
        return data
    kind = data.kind if found is None else from_plain(DataSpec, found.state["data"]).kind
    numbers = len(data.kind.mean) if isinstance(data.kind.mean, tuple) else 1
    moments = torch.empty(2, numbers, dtype=torch.float64, device=world.device)
    for row, name in zip(moments, ("mean", "std"), strict=True):
        row[:] = row.new_tensor(getattr(kind, name))
    world.broadcast(moments)
    mean, std = moments.tolist()
    single = len({*mean}) == len({*std}) == 1
    units = (mean[0], std[0]) if single else (tuple(mean), tuple(std))
    return replace(data, kind=replace(data.kind, mean=units[0], std=units[1]))


@torch.no_grad()
def restore(engine: Engine, found: Checkpoint | None, root: Path, log: Log) -> None:
    """Load a checkpoint's state into the engine of each rank, and share the state of the first rank.

    The first rank has found the checkpoint, in the folder `root`. Ranks read their rows of sharded tensors themselves.
    """
    world = engine.world
    if engine.sharded:
        step = torch.tensor(-1 if found is None else found.step, device=world.device)
        world.broadcast(step)
        if found is None and step >= 0:
            found = Checkpoint(root / f"step-{int(step):08d}", int(step), {})
    with world.together():
        if found is not None:
            if not found.folder.is_dir():
                raise UsageError(
                    f"rank {world.rank} does not see {found.folder}, from which it must read its part. Use an --out on "
                    f"a file system that all hosts share."
                )
            engine.restore(found.step, {name: checkpoint.open_tensors(found, name) for name in engine.state()})
            if world.first:
                log(f"resuming from {found.folder}")
    step = torch.tensor(engine.steps_done, device=world.device)
    whole = (t for group in engine.state().values() for t in group.values() if engine.place(t)[1] is ...)
    for tensor in (step, *whole):
        world.broadcast(tensor)
    engine.steps_done = int(step)


def check_changes(
    before: RunRecord, now: RunRecord, versions: tuple[str, str], step: int, allow: Sequence[str]
) -> list[Change]:
    """The changes since a run began; raises if one is neither safe nor allowed by name.

    `versions` are the hashes of the data, then and now; `step` is the step that the run has reached.
    """
    known = [*flat(now.recipe), DATA_VERSION]
    for name in [name for name in allow if name not in known]:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Some names: {', '.join(known[:8])}."
        raise UsageError(f"--allow must name a setting, got {name!r}. {hint}")
    if before.recipe.backbone is None and before.network == now.network:  # not described by earlier versions
        before = replace(before, recipe=replace(before.recipe, backbone=now.recipe.backbone))
    found = [change for change in changes(before.recipe, now.recipe) if change.name != "data.name"]
    if before.network != now.network:
        found.append(Change("network", before.network, now.network))
    if versions[0] != versions[1]:
        found.append(Change(DATA_VERSION, versions[0][:12], versions[1][:12]))

    constant = now.recipe.optimizer.schedule == "constant"
    safe = (*SAFE, *allow, *(["steps"] if constant and now.recipe.steps >= step else []))
    names = [c.name for c in found if _within(c.name, NEVER) or not _within(c.name, safe)]
    if not names:
        return found
    lines = [f"the run in this folder began with other settings, and has reached step {step}:"]
    lines += [f"  {change}" for change in found if change.name in names][:SHOWN]
    if len(names) > SHOWN:
        lines.append(f"  and {len(names) - SHOWN} more")
    if any(_within(name, NEVER) for name in names):
        advice = (
            "A checkpoint cannot be read into another network, optimizer or objective. Use another --out; --init-from "
            "takes over the weights of a network of the same shape."
        )
    elif names == ["steps"] and constant:
        advice = f"A run cannot end before the step it has reached. Use --steps {step} or more."
    elif "steps" in names:
        advice = (
            "The length of a cosine schedule decides all its rates: an extended run would differ from a new one. Use "
            f"another --out with --init-from, or --allow {' '.join(names)} to extend it nevertheless."
        )
    else:
        advice = f"Use the old values, another --out, or --allow {' '.join(names)}."
    raise UsageError("\n".join([*lines, advice]))


def _within(name: str, groups: Sequence[str]) -> bool:
    return any(name == group or name.startswith(f"{group}.") for group in groups)
