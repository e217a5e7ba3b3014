"""`bsi train RECIPE --key value ...`: train a recipe, or go on with it; `--list` shows the recipes.

The options depend on the recipe: its fields are read by tyro with the recipe as their default, so that every key is
typed, shown with its value by `bsi train RECIPE --help`, and a typo is answered with the nearest name. `--method` and
`--backbone` take names and decide which fields there are; they are read first.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from bsi.backbones.config import MLPConfig, resolve
from bsi.cli.options import lines, quiet, quiet_parts, wrapped
from bsi.errors import DataError, UsageError
from bsi.methods import METHODS
from bsi.recipe import Recipe
from bsi.recipes import RECIPES, evidence, named_recipe
from bsi.runtime.serialization import changes, to_plain

if TYPE_CHECKING:
    from bsi.data.store import Dataset

__all__ = ["Options", "Train", "parse", "run"]

USAGE = """usage: bsi train RECIPE [--method bsi|bfn|vdm] [--backbone NAME] [--out FOLDER]
                 [--key value ...]
       bsi train --list

The same --out goes on with an interrupted run. `bsi train --list` shows what
each recipe trains, `bsi train RECIPE --help` every key with its value.

recipes:
{recipes}"""

CHOICES = (
    "--method bsi|bfn|vdm and --backbone NAME (dit-s/2, unet-128x32, unet-128-256-256x2, mlp-256x4, ...) choose "
    "another method or network, whose keys are then shown here."
)

PATIENCE_H = 12.0  # of training on a CPU without a word of caution


@quiet
@dataclass(frozen=True)
class Options:
    """How to run, rather than what: but for the weights to begin with, nothing here changes the result."""

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
        print(USAGE.format(recipes=lines(", ".join(RECIPES), "  ")))
        return 0 if words else 2
    args, named = parse(words)
    if args.options.dry_run:
        return _dry_run(args, named)
    from bsi.pictures import is_image
    from bsi.runtime.distributed import find_place, pick_device
    from bsi.runtime.run_folder import Sink, tensorboard
    from bsi.training.train import train

    options = args.options
    out = options.out or Path("runs") / args.recipe.name
    place = find_place(os.environ)
    args.recipe.check(place.size)
    device = pick_device(options.device, place.local_rank)
    dataset, first = opened(args.recipe), place.rank == 0
    sinks: list[Sink] = [_tell] if first else []
    if options.tensorboard:
        sinks.append(tensorboard(out / "tensorboard"))
    train(
        args.recipe,
        out=out,
        init_from=options.init_from,
        allow=options.allow,
        sinks=sinks,
        device=options.device,
        hang_after_s=options.hang_after_s,
        named=named,
        begin=functools.partial(_announce, args.recipe, dataset, out, device.type) if first else None,
    )
    if first:
        status = json.loads((out / "status.json").read_text("utf-8"))
        print(json.dumps({"run": str(out), **status}) if options.json else out)
        run = shlex.quote(str(out))
        sample = f"bsi sample {run}" if is_image(dataset.shape) else f"bsi sample {run} --npz samples.npz"
        sample += " --labels" if args.recipe.data.labels else ""
        print(f"go on with  {sample} · bsi eval {run} --bpd · bsi report {run}", file=sys.stderr)
    return 0


def opened(recipe: Recipe) -> Dataset:
    """The dataset that is trained on; where it is not there, the ones that are."""
    from bsi.data.store import open_dataset, prepared

    try:
        return open_dataset(recipe.data.name)
    except DataError as error:
        there = ", ".join(repr(name) for name in ("digits", *(folder.name for folder in prepared())))
        raise DataError(f"{error} --data.name NAME trains on another: {there}.") from error


def _announce(recipe: Recipe, dataset: Dataset, out: Path, device: str) -> None:
    """What is trained on what and where, and a word of caution where it is too much for a CPU."""
    from bsi.cli.size import Size, cpu_hours
    from bsi.pictures import is_image

    size = Size.of(recipe, dataset)
    print(f"bsi train: {size}, into {out}", file=sys.stderr, flush=True)
    if is_image(dataset.shape) and isinstance(recipe.backbone, MLPConfig):
        told = "an MLP sees images as vectors. `bsi train folder`, or folder-mini on a CPU, is made for them."
        print(f"bsi train: caution: {told}", file=sys.stderr, flush=True)
    hours = cpu_hours(size, recipe.steps)
    if device == "cpu" and hours > PATIENCE_H:
        smaller = "take a smaller --backbone, --batch and --steps."
        mini = "`bsi train folder-mini` is made for images on a CPU; or "
        fits = is_image(dataset.shape) and not recipe.name.startswith("folder-mini")  # what is asked for is no advice
        print(
            f"bsi train: caution: {recipe.steps} steps of {size.tflops_per_step:.2g} TFLOP take about {hours:,.0f} "
            f"hours on this CPU. {mini + smaller if fits else smaller.capitalize()}",
            file=sys.stderr,
            flush=True,
        )


def _tell(record: Mapping[str, Any]) -> None:
    """The bound on the test set, whenever it was evaluated, on a line of its own above the progress."""
    if record["event"] == "evaluate":
        clear = "\r\x1b[2K" if sys.stderr.isatty() else ""
        bound = f"{record['bits_per_dim']:.3f} ± {record['error']:.3f} bits/dim on the test set"
        print(f"{clear}step {record['step']}: {bound}", file=sys.stderr, flush=True)


def parse(words: Sequence[str]) -> tuple[Train, Recipe]:
    """The edited recipe with the options, and the recipe that was named."""
    name, *rest = words
    method, rest = _take(rest, "--method")
    backbone, rest = _take(rest, "--backbone")
    if method is not None and method not in METHODS:
        raise UsageError(f"--method is one of {', '.join(METHODS)}: got {method!r}")
    named = named_recipe(name, method or "bsi")
    start = named if backbone is None else replace(named, backbone=resolve(backbone))
    quiet_parts(Recipe)
    declared = Recipe.__annotations__["method"]
    Recipe.__annotations__["method"] = type(start.method)  # its fields are options
    try:
        args = tyro.cli(
            tyro.conf.AvoidSubcommands[Train],
            args=rest,
            prog=f"bsi train {name}",
            description=wrapped(f"{evidence(name).summary}\n\n{CHOICES}"),
            default=Train(start, Options()),
            config=(tyro.conf.DisallowNone,),
        )
    finally:
        Recipe.__annotations__["method"] = declared
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
    from bsi.cli.size import Size

    recipe = args.recipe
    recipe.check(world=1)
    size: dict[str, Any] = {"images": recipe.steps * recipe.batch}
    try:
        size |= asdict(Size.of(recipe, opened(recipe)))
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
