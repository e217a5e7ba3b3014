"""`bsi train RECIPE --key value ...`: train a recipe, or resume a run; `--list` shows the recipes.

The options depend on the recipe: tyro parses the fields of the recipe, with the recipe as their default. Every option
is typed, `bsi train RECIPE --help` shows its value, and the error for a typo suggests the nearest name. `--method` and
`--backbone` take names and determine the other options, so they are parsed first.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from bsi.backbones.config import MLPConfig, resolve
from bsi.cli.options import check_numbers, fill, paragraphs, readable_width, show_set_defaults
from bsi.errors import DataError, UsageError
from bsi.methods import METHODS
from bsi.progress import log
from bsi.recipe import Recipe
from bsi.recipes import RECIPES, evidence, named_recipe
from bsi.runtime.serialization import changes, to_plain

if TYPE_CHECKING:
    from bsi.data.store import Dataset

USAGE = """usage: bsi train RECIPE [--method bsi|bfn|vdm] [--backbone NAME] [--out FOLDER]
                 [--key value ...]
       bsi train --list

The same --out resumes an interrupted run. `bsi train --list` shows what each
recipe trains, `bsi train RECIPE --help` every key with its value.

recipes:
{recipes}"""

CHOICES = (
    "--method bsi|bfn|vdm and --backbone NAME (dit-s/2, unet-128x32, unet-128-256-256x2, mlp-256x4, ...) choose "
    "another method or network, whose keys are then shown here."
)

LONG_H = 12.0  # hours of training on a CPU above which a warning is printed
CORE_TFLOPS = 0.03  # per second of one CPU core, roughly


@dataclass(frozen=True)
class Options:
    """How to run. Except for the initial weights, nothing here changes the result."""

    out: Path | None = None
    """The run folder, by default runs/RECIPE; an existing run is resumed."""
    init_from: Path | None = None
    """Initialize with the weights of this run or export."""
    allow: tuple[str, ...] = ()
    """Settings that may differ from those of the interrupted run, by name; data.version for another dataset."""
    device: Literal["cuda", "cpu"] | None = None
    """By default a GPU if there is one."""
    hang_after_s: float = 600.0
    """End the run, naming the rank, if a rank makes no progress for this many seconds."""
    track: tuple[str, ...] = ()
    """Send the journal to these as well: tensorboard, wandb, trackio, mlflow."""
    dry_run: bool = False
    """Print what would be trained, and stop."""
    json: bool = False
    """Print the result as JSON on stdout."""


@dataclass(frozen=True)
class Train:
    """A recipe as edited on the command line, and how to run it."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    options: Annotated[Options, tyro.conf.arg(name=""), tyro.conf.FlagCreatePairsOff]


def run(words: Sequence[str]) -> int:
    if "--list" in words:
        return _list("--json" in words)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE.format(recipes=fill(", ".join(RECIPES), "  ")))
        return 0 if words else 2
    args, named = parse(words)
    if args.options.dry_run:
        return _dry_run(args, named)
    recipe, options = args.recipe, args.options
    out = options.out or Path("runs") / recipe.name
    dataset = opened(recipe, out)  # before torch is imported: a missing dataset is the most frequent mistake
    from bsi.pictures import is_image
    from bsi.runtime.distributed import find_place, pick_device
    from bsi.training.train import run_training

    place = find_place(os.environ)
    recipe.check(place.size)
    device, first = pick_device(options.device, place.local_rank), place.rank == 0
    run_training(
        recipe,
        out=out,
        init_from=options.init_from,
        allow=options.allow,
        track=options.track,
        device=options.device,
        hang_after_s=options.hang_after_s,
        named=named,
        begin=functools.partial(_announce, recipe, dataset, out, device.type) if first else None,
    )
    if first:
        status = json.loads((out / "status.json").read_text("utf-8"))
        print(json.dumps({"run": str(out), **status}) if options.json else out)
        folder = shlex.quote(str(out))
        sound = len(dataset.shape) == 2 and dataset.bins is not None and dataset.bins.count == 65536
        target = "" if is_image(dataset.shape) else " --out samples.wav" if sound else " --npz samples.npz"
        sample = f"bsi sample {folder}{target}" + (" --labels" if recipe.data.labels else "")
        log(f"next: {sample} · bsi eval {folder} --bpd · bsi report {folder}")
    return 0


def parse(words: Sequence[str]) -> tuple[Train, Recipe]:
    """The edited recipe with the options, and the unedited recipe."""
    name, *rest = words
    method, rest = _take(rest, "--method")
    backbone, rest = _take(rest, "--backbone")
    default = default_of(name, method, backbone)
    steps, _ = _take(rest, "--steps")
    if steps is not None and steps.isascii() and steps.isdigit():
        default = replace(default, recipe=default.recipe.shortened(int(steps)))
    with method_options(default), readable_width():
        args = tyro.cli(
            tyro.conf.AvoidSubcommands[Train],
            args=rest,
            prog=f"bsi train {name}",
            description=paragraphs(f"{evidence(name).summary}\n\n{CHOICES}"),
            default=default,
            config=(tyro.conf.DisallowNone,),
        )
    check_numbers(args)
    return args, named_recipe(name, method or "bsi")


def default_of(name: str, method: str | None = None, backbone: str | None = None) -> Train:
    """What a recipe trains if no key is given."""
    if method is not None and method not in METHODS:
        raise UsageError(f"--method must be one of {', '.join(METHODS)}, got {method!r}.")
    recipe = named_recipe(name, method or "bsi")
    if backbone is not None:
        recipe = replace(recipe, backbone=resolve(backbone))
    return Train(recipe, Options())


@contextmanager
def method_options(train: Train) -> Iterator[None]:
    """Declare the type of the recipe's method inside this block, so that its fields are options."""
    declared = Recipe.__annotations__["method"]
    Recipe.__annotations__["method"] = type(train.recipe.method)
    show_set_defaults(Train)
    try:
        yield
    finally:
        Recipe.__annotations__["method"] = declared


def _take(words: list[str], option: str) -> tuple[str | None, list[str]]:
    """The value of an option, the last one if it is given several times, and the words without it."""
    value, rest, i = None, [], 0
    while i < len(words):
        if words[i] == option:
            if i + 1 == len(words):
                raise UsageError(f"{option} needs a value.")
            value, i = words[i + 1], i + 2
        elif words[i].startswith(f"{option}="):
            value, i = words[i].partition("=")[2], i + 1
        else:
            rest.append(words[i])
            i += 1
    return value, rest


def opened(recipe: Recipe, out: Path) -> Dataset:
    """The dataset of a recipe that is trained into `out`. If it is missing, the error lists the prepared ones."""
    from bsi.data.store import open_for_run, prepared

    try:
        return open_for_run(recipe.data.name, out)
    except DataError as error:
        names = ", ".join(repr(name) for name in ("digits", *(folder.name for folder in prepared())))
        raise DataError(f"{error} --data.name NAME trains on another: {names}.") from error


@dataclass(frozen=True)
class Size:
    """The amount of data, parameters and arithmetic of a training run, known before it starts. Needs no torch."""

    dataset: str
    samples: int
    shape: tuple[int, ...]
    epochs: float
    parameters: int
    tflops_per_step: float

    @classmethod
    def of(cls, recipe: Recipe, dataset: Dataset) -> Size:
        from bsi.backbones.config import cost

        bins, count = None if dataset.bins is None else dataset.bins.count, len(dataset.split("train"))
        assert recipe.backbone is not None  # a recipe on the command line names one
        classes = dataset.labels.classes if recipe.data.labels and dataset.labels is not None else 0
        found = cost(recipe.backbone, dataset.kind.latent_shape(dataset.shape), bins, classes)
        epochs, flops = recipe.steps * recipe.batch / count, 3 * found.flops * recipe.batch
        return cls(dataset.name, count, dataset.shape, epochs, found.parameters, 1e-12 * flops)

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape)) or "1"
        return (
            f"{self.parameters:,} parameters on {self.dataset}: {self.samples:,} samples of {shape}, "
            f"{self.epochs:,.3g} epochs"
        )

    def cpu_hours(self, steps: int) -> float:
        """The rough duration of this many steps on the cores that this process may use."""
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        return steps * self.tflops_per_step / (CORE_TFLOPS * cores) / 3600


def _announce(recipe: Recipe, dataset: Dataset, out: Path, device: str) -> None:
    """Print what is trained, and a warning if it does not suit the network or the machine."""
    from bsi.pictures import is_image

    size = Size.of(recipe, dataset)
    log(f"bsi train: {size}, into {out}")
    if is_image(dataset.shape) and isinstance(recipe.backbone, MLPConfig):
        log(
            "bsi train: warning: an MLP treats images as vectors. Use `bsi train folder`, or folder-mini on a CPU, "
            "for images."
        )
    hours = size.cpu_hours(recipe.steps)
    if device == "cpu" and hours > LONG_H:
        suggestion = "Use a smaller --backbone, --batch and --steps."
        if is_image(dataset.shape) and not recipe.name.startswith("folder-mini"):
            suggestion = f"`bsi train folder-mini` is made for images on a CPU. {suggestion}"
        log(
            f"bsi train: warning: {recipe.steps} steps of {size.tflops_per_step:.2g} TFLOP take about {hours:,.0f} "
            f"hours on this CPU. {suggestion}"
        )


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
    """Print the recipe, how it differs from the unedited one, and the size of the network and of the run."""
    recipe = args.recipe
    recipe.check(world=1)
    size: dict[str, Any] = {"images": recipe.steps * recipe.batch}
    try:
        size |= asdict(Size.of(recipe, opened(recipe, args.options.out or Path("runs") / recipe.name)))
    except DataError as error:
        log(f"bsi train: {error}")
    changed = [str(change) for change in changes(named, recipe)]
    if args.options.json:
        print(json.dumps({"recipe": to_plain(recipe), "changed": changed, **size}))
        return 0
    print(json.dumps(to_plain(recipe), indent=2))
    print(f"changed from {named.name}: {'; '.join(changed) or 'nothing'}")
    for name, value in size.items():
        print(f"{name}: {value:,.4g}" if isinstance(value, float) else f"{name}: {value}")
    return 0
