"""One rule to resume: the same folder goes on. Settings that changed are listed, and refused unless that is safe.

Safe is what cannot change the result (intervals, what is kept, workers) or changes it by rounding alone (how a batch is
cut into pieces, what is computed again). Anything else must be allowed by its name, `--allow optimizer.lr`; what
decides which tensors there are (the network, the kind of optimizer, the averages) never fits, and can only start anew
(`--init-from` takes the weights). The length of the schedule is part of the recipe: a constant schedule may be
extended, a cosine may not, since every step so far would have had another rate.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from bsi.errors import UsageError
from bsi.recipe import Recipe
from bsi.runtime.serialization import Change, changes, flat

__all__ = ["DATA_VERSION", "check_changes"]

SAFE = ("name", "accumulation", "lean", "data.workers", "every", "evaluation", "samples", "keep")
NEVER = ("backbone", "network", "data.labels", "optimizer.kind", "objective.weight", "ema.powers")
DATA_VERSION = "data.version"
SHOWN = 7  # changes in a message of at most ten lines


def check_changes(
    before: Recipe, now: Recipe, networks: tuple[str, str], versions: tuple[str, str], step: int, allow: Sequence[str]
) -> list[Change]:
    """The changes that a run goes on with after `step`; refuses those that are neither safe nor allowed by name.

    `networks` and `versions` are the network's class and the dataset's hash, then and now.
    """
    _check_names(now, allow)
    found = [change for change in changes(before, now) if change.name != "data.name"]
    if networks[0] != networks[1]:
        found.append(Change("network", *networks))
    if versions[0] != versions[1]:
        found.append(Change(DATA_VERSION, versions[0][:12], versions[1][:12]))
    refused = [change for change in found if not _safe(change, now, step) and change.name not in allow]
    refused += [change for change in found if _within(change.name, NEVER) and change not in refused]
    if refused:
        raise UsageError(_refusal(refused, now, step))
    return found


def _within(name: str, groups: Sequence[str]) -> bool:
    return any(name == group or name.startswith(f"{group}.") for group in groups)


def _safe(change: Change, now: Recipe, step: int) -> bool:
    if change.name == "steps":
        return now.optimizer.schedule == "constant" and now.steps >= step
    return _within(change.name, SAFE)


def _refusal(refused: Sequence[Change], now: Recipe, step: int) -> str:
    lines = [f"this run was begun with other settings, and stands at step {step}:"]
    lines += [f"  {change}" for change in refused[:SHOWN]]
    if len(refused) > SHOWN:
        lines.append(f"  and {len(refused) - SHOWN} more")
    names = [change.name for change in refused]
    if any(_within(name, NEVER) for name in names):
        lines.append(
            "a checkpoint cannot be read into another network, optimizer or objective: use another --out; --init-from "
            "takes the weights of a network of the same shape"
        )
    elif names == ["steps"] and now.optimizer.schedule == "cosine":
        lines.append(
            "a cosine schedule's length decides every rate so far: extending it gives no run that ever was. Use "
            "another --out with --init-from, or --allow steps if you mean it"
        )
    elif names == ["steps"]:
        lines.append(f"a run cannot end before the step it has reached: use --steps {step} or more")
    else:
        lines.append(f"go on with the old values, use another --out, or say --allow {' '.join(names)}")
    return "\n".join(lines)


def _check_names(recipe: Recipe, allow: Sequence[str]) -> None:
    known = [*flat(recipe), DATA_VERSION]
    for name in allow:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Some names: {', '.join(known[:8])}."
            raise UsageError(f"--allow names a setting; {name!r} is none. {hint}")
