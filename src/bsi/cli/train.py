"""`bsi train RECIPE --key value ...`: train a recipe, or go on with it; `--list` shows the recipes.

The options depend on the recipe: its fields are read by tyro with the recipe as their default, so that every key is
typed, shown with its value by `bsi train RECIPE --help`, and a typo is answered with the nearest name. `--method` and
`--backbone` take names and decide which fields there are; they are read first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from bsi.backbones.config import resolve
from bsi.backbones.cost import cost
from bsi.data.store import open_dataset
from bsi.errors import DataError, UsageError
from bsi.recipes import RECIPES, evidence, named_recipe
from bsi.training.plain import changes, to_plain
from bsi.training.recipe import MethodName, Recipe

__all__ = ["Options", "Train", "parse", "run"]

USAGE = """usage: bsi train RECIPE [--method bsi|bfn|vdm] [--backbone NAME] [--out FOLDER] [--key value ...]
       bsi train --list

The same --out goes on with an interrupted run. `bsi train RECIPE --help` shows every key with its value.

recipes: {recipes}"""


@dataclass(frozen=True)
class Options:
    """How to run, rather than what: nothing here changes the result."""

    out: Path | None = None
    """The run folder, by default runs/RECIPE; one that exists goes on."""
    init_from: Path | None = None
    """Begin with the weights of this run or export."""
    allow: tuple[str, ...] = ()
    """Settings that may differ from those of the interrupted run, by name; data.version for another dataset."""
    device: Literal["cuda", "cpu"] | None = None
    """By default a GPU if there is one."""
    hang_after_s: float = 600.0
    """A rank without progress for so many seconds is named, and the run ends."""
    tensorboard: bool = False
    """Write the journal for TensorBoard as well."""
    dry_run: bool = False
    """Show what would be trained, and stop."""
    json: bool = False
    """Write what is shown as JSON on stdout."""


@dataclass(frozen=True)
class Train:
    """A recipe as edited on the command line, beside the one that was named."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    options: Annotated[Options, tyro.conf.arg(name="")]


def run(words: Sequence[str]) -> int:
    """Read the command line's words after `bsi train`, and do what they say."""
    if "--list" in words:
        return _list("--json" in words)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE.format(recipes=", ".join(RECIPES)))
        return 0 if words else 2
    args, named = parse(words)
    if args.options.dry_run:
        return _dry_run(args, named)
    from bsi.training.journal import Sink, tensorboard
    from bsi.training.train import train

    options = args.options
    out = options.out or Path("runs") / args.recipe.name
    sinks: list[Sink] = [tensorboard(out / "tensorboard")] if options.tensorboard else []
    train(
        args.recipe,
        out=out,
        init_from=options.init_from,
        allow=options.allow,
        sinks=sinks,
        device=options.device,
        hang_after_s=options.hang_after_s,
        named=named,
    )
    if options.json:
        print(json.dumps({"run": str(out), **json.loads((out / "status.json").read_text("utf-8"))}))
    return 0


def parse(words: Sequence[str]) -> tuple[Train, Recipe]:
    """The edited recipe with the options, and the recipe that was named."""
    name, *rest = words
    method, rest = _take(rest, "--method")
    backbone, rest = _take(rest, "--backbone")
    if method is not None and method not in get_args(MethodName):
        raise UsageError(f"--method is one of {', '.join(get_args(MethodName))}: got {method!r}")
    chosen: MethodName = next((known for known in get_args(MethodName) if known == method), "bsi")
    named = named_recipe(name, chosen)
    start = named if backbone is None else replace(named, backbone=resolve(backbone))
    args = tyro.cli(
        tyro.conf.AvoidSubcommands[Train],
        args=rest,
        prog=f"bsi train {name}",
        description=evidence(name).summary,
        default=Train(start, Options()),
    )
    return args, named


def _take(words: list[str], option: str) -> tuple[str | None, list[str]]:
    """The value of an option, and the words without it; the last one given counts."""
    value, rest, i = None, [], 0
    while i < len(words):
        if words[i] == option:
            if i + 1 == len(words):
                raise UsageError(f"{option} needs a value")
            value, i = words[i + 1], i + 2
        elif words[i].startswith(f"{option}="):
            value, i = words[i].partition("=")[2], i + 1
        else:
            rest.append(words[i])
            i += 1
    return value, rest


def _list(as_json: bool) -> int:
    found = {name: evidence(name) for name in RECIPES}
    if as_json:
        print(json.dumps({name: asdict(record) for name, record in found.items()}))
        return 0
    for name, record in found.items():
        print(f"{name}\n  {record.summary}\n  {record.command}")
        print(f"  {record.hardware}, {record.time}")
        print(f"  expected: {record.expected}\n  paper:    {record.paper}")
    return 0


def _dry_run(args: Train, named: Recipe) -> int:
    """What would be trained: the recipe, its differences, the size of the network and of the run."""
    recipe = args.recipe
    recipe.check(world=1)
    size: dict[str, Any] = {"images": recipe.steps * recipe.batch}
    try:
        dataset = open_dataset(recipe.data.name)
        size["dataset"], size["epochs"] = str(dataset.manifest.name), size["images"] / len(dataset.split("train"))
        if recipe.backbone is not None:
            bins = None if dataset.bins is None else dataset.bins.count
            found = cost(recipe.backbone, dataset.shape, bins)
            size["parameters"], size["tflops_per_step"] = found.parameters, 3e-12 * found.flops * recipe.batch
    except DataError as error:
        print(f"bsi train: {error}", file=sys.stderr)
    changed = [str(change) for change in changes(named, recipe)]
    if args.options.json:
        print(json.dumps({"recipe": to_plain(recipe), "changed": changed, **size}))
        return 0
    print(json.dumps(to_plain(recipe), indent=2))
    print(f"changed from {named.name}: {'; '.join(changed) or 'nothing'}")
    print(
        "\n".join(
            f"{name}: {value:,.4g}" if isinstance(value, float) else f"{name}: {value}" for name, value in size.items()
        )
    )
    return 0
