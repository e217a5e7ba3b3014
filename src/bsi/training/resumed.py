"""Where a run goes on: the checkpoint that is found, compared with what is asked for now, and taken in.

The first rank looks and reads, and alone has anything to say; all ranks refuse together. What may have changed since is
resume.py's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bsi.errors import BsiError, UsageError
from bsi.recipe import Recipe
from bsi.runtime import checkpoint
from bsi.runtime.checkpoint import Checkpoint
from bsi.runtime.dataset import DataSpec
from bsi.runtime.distributed import World
from bsi.runtime.run_folder import RunFolder, RunRecord
from bsi.runtime.serialization import from_plain
from bsi.training.resume import check_changes
from bsi.training.step import Engine

__all__ = ["Resumed", "find_checkpoint", "restore"]

Say = Callable[[str], None]


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on. Only the first rank has the checkpoint itself; it shares what it reads."""

    checkpoint: Checkpoint | None
    finished: bool
    evaluation_pending: bool


def find_checkpoint(
    folder: RunFolder, record: RunRecord, data: DataSpec, world: World, allow: Sequence[str], say: Say
) -> Resumed:
    """The checkpoint to go on from, compared with what is asked for now."""
    found, error = None, None
    if world.first:
        try:
            found = checkpoint.find(folder.checkpoints, say)
            if found is not None:
                _compare(folder, found, record, data, world, allow, say)
        except BsiError as refused:
            error = refused
    world.agree(error)
    pending = found is not None and bool(found.state["evaluation_pending"])
    done = found is not None and found.step >= record.recipe.steps and not pending
    return Resumed(found, world.any(done), world.any(pending))


def _compare(
    folder: RunFolder,
    found: Checkpoint,
    record: RunRecord,
    data: DataSpec,
    world: World,
    allow: Sequence[str],
    say: Say,
) -> None:
    state = found.state
    before = folder.read_record() or RunRecord(from_plain(Recipe, state["recipe"]), str(state["network"]))
    if before.recipe.backbone is None and before.network == record.network:  # a network of ours, not described then
        before = replace(before, recipe=replace(before.recipe, backbone=record.recipe.backbone))
    changed = check_changes(
        before.recipe, record.recipe, (before.network, record.network),
        (state["data"]["version"], data.version), found.step, allow,
    )  # fmt: skip
    for change in changed:
        say(f"changed since the run began: {change}")
    pieces = (state["ranks"] * before.recipe.accumulation, world.size * record.recipe.accumulation)
    if pieces[0] != pieces[1] and not record.recipe.audit:
        say(
            f"ranks x accumulation was {pieces[0]} and is {pieces[1]}: samples, levels and noise stay the same, "
            f"dropout draws other masks, and sums are rounded differently"
        )


def restore(engine: Engine, found: Checkpoint | None, world: World, say: Say) -> None:
    """Take a checkpoint's state in, on the rank that has found it."""
    error = None
    if found is not None:
        try:
            engine.restore(found.step, {name: checkpoint.read_tensors(found, name) for name in engine.files})
            say(f"going on from {found.folder}")
        except UsageError as refused:
            error = refused
    world.agree(error)
