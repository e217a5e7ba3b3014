"""The plan of a study as text: its jobs with estimated minutes, or with what they measured where they are done, and the
commands that train its networks elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from bsi.methods import METHODS
from bsi.recipe import Recipe
from bsi.recipes import named_recipe
from bsi.runtime.serialization import changes
from bsi.studies.job import Train, title
from bsi.studies.outcome import line
from bsi.studies.runner import Planned
from bsi.studies.scale import Scale
from bsi.studies.store import Store

__all__ = ["plan_text", "train_command"]


def plan_text(planned: Sequence[Planned], scale: Scale, store: Store) -> str:
    """One line for each job; at the paper's scale, below each network the command that trains it on many GPUs."""
    lines = [f"{scale.name}: {scale.summary}"]
    for p in planned:
        found = f" = {line(p.job, store.read(p.job))}" if p.done and not isinstance(p.job, Train) else ""
        lines += [f"{'done' if p.done else _duration(p.seconds):>12}  {p.study:<19} {title(p.job)}{found}"]
        if scale.name == "paper" and isinstance(p.job, Train) and not p.done:
            lines += [f"{'':12}  {'':19} {train_command(p.job.network, store)}"]
    if not planned:
        return f"{lines[0]}\nnothing to train or measure: the figure is drawn at once"
    left = [p for p in planned if not p.done]
    trained, whole = sum(isinstance(p.job, Train) for p in left), _duration(sum(p.seconds for p in left))
    begun = "not yet run: " if len(left) == len(planned) else ""
    lines.append(f"{begun}{len(left)} of {len(planned)} jobs left, {trained} of them networks to train: {whole}")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.2f} min" if seconds < 300 * 60 else f"{seconds / 3600:.0f} h"


def train_command(recipe: Recipe, store: Store) -> str:
    """`bsi train` with every setting in which the recipe differs from the one of its name."""
    method = next(name for name, spec in METHODS.items() if isinstance(recipe.method, spec))
    words = ["torchrun --nproc-per-node 4 -m bsi train", recipe.name, "--method", method]
    for change in changes(named_recipe(recipe.name, method), recipe):
        words += [f"--{change.name.replace('_', '-')}", str(change.after)]
    return " ".join([*words, "--out", str(store.network(recipe))])
