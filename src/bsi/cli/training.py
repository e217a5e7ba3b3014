"""`bsi train RECIPE --key value ...`: train a recipe, or resume a run; `--list` shows the recipes.

The options depend on the recipe: tyro parses the fields of the recipe, with the recipe as their default. Every option
is typed, `bsi train RECIPE --help` shows its value, and the error for a typo suggests the nearest name. `--method` and
`--backbone` take names and determine the other options, so they are parsed first.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from bsi.backbones.config import AutoencoderConfig, MLPConfig, resolve
from bsi.backbones.costs import Cluster, cost, predict
from bsi.cli.options import Count, Device, Json, RunPath, answer, fill
from bsi.cli.options import parse as parse_options
from bsi.cli.sample import NOTHING, SOUND, TEXT, form_of
from bsi.data import store
from bsi.errors import DataError, UsageError
from bsi.methods import METHODS
from bsi.pictures import is_image
from bsi.progress import log
from bsi.recipe import Recipe, changes, to_plain
from bsi.recipes import RECIPES, evidence, named_recipe
from bsi.values import Latents

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
FOR_A_CPU = "`bsi train folder-mini` is made for images on a CPU. "
IMAGE_BINS = 256
CORE_TFLOPS = 0.03  # per second of one CPU core, roughly

Sizes = tuple[tuple[int, ...], int | None, int]  # what a network is built for: a shape, numbers of bins and of classes


@dataclass(frozen=True)
class Options:
    """How to run. Except for the initial weights, nothing here changes the result."""

    out: Path | None = None  # The run folder, by default runs/RECIPE; an existing run is resumed.
    init_from: Path | None = None  # Initialize with the weights of this run or export.
    allow: tuple[str, ...] = ()
    """Settings that may differ from those of the interrupted run, by name; data.version for another dataset."""
    device: Device = None
    hang_after_s: float = 600.0  # End the run, naming the rank, if a rank makes no progress for this many seconds.
    track: tuple[str, ...] = ()  # Send the journal to these as well: tensorboard, wandb, trackio, mlflow.
    dry_run: bool = False  # Print what would be trained, and stop.
    ranks: Count | None = None  # With --dry-run, calculate memory, communication and time for this number of GPUs.
    shape: tuple[int, ...] = ()  # With --dry-run, the shape of 8-bit images, for data that is not prepared.
    local_ranks: Count = Cluster.local  # With --ranks, GPUs in a host.
    tflops: float = Cluster.tflops  # With --ranks, TFLOP/s that a GPU reaches.
    host_gb_per_s: float = Cluster.host_gb_per_s  # With --ranks, bus bandwidth between the GPUs of a host.
    network_gb_per_s: float = Cluster.network_gb_per_s  # With --ranks, bus bandwidth between hosts.
    json: Json = False


@dataclass(frozen=True)
class Train:
    """A recipe as edited on the command line, and how to run it."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    options: Annotated[Options, tyro.conf.arg(name=""), tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True)
class Distill:
    """Tune a trained network to draw samples in few evaluations of the network, on the data that it was trained on. The
    result only draws samples: it has no ELBO and no likelihood. The same command resumes an interrupted run.
    """

    run: RunPath
    steps: Count = 1000  # Steps of training.
    out: Path | None = None  # The run folder, by default runs/NAME-distilled.
    lr: float = 1e-4  # The first learning rate of AdamW.
    batch: Count | None = None  # By default that of the network's own training.
    device: Device = None
    json: Json = False

    def execute(self) -> int:
        from bsi.training.train import distill

        done = distill(
            self.run, self.steps, self.out, lr=self.lr, batch=self.batch, device=self.device, command_line=True
        )
        log(f"next: bsi sample {shlex.quote(str(done.path))} (two evaluations; --steps 2 or 4 may be better)")
        status = json.loads((done.path / "status.json").read_text("utf-8"))
        return answer(self.json, {"run": str(done.path), **status}, done.path)


def run(words: Sequence[str]) -> int:
    if "--list" in words:
        return _list("--json" in words)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE.format(recipes=fill(", ".join(RECIPES))))
        return 0 if words else 2
    args, named = parse(words)
    recipe, options = args.recipe, args.options
    out = options.out or Path("runs") / recipe.name
    if options.dry_run:
        return _dry_run(recipe, named, out, options)
    dataset = _opened(recipe, out)  # before torch is imported: a missing dataset is the most frequent mistake
    from bsi.runtime.distributed import find_place
    from bsi.training.train import train

    train(
        recipe,
        out=out,
        init_from=options.init_from,
        allow=options.allow,
        track=options.track,
        device=options.device,
        hang_after_s=options.hang_after_s,
        named=named,
        begin=lambda device: _announce(recipe, dataset, out, device.type),
        command_line=True,
    )
    if find_place(os.environ).rank == 0:
        answer(options.json, {"run": str(out), **json.loads((out / "status.json").read_text("utf-8"))}, out)
        folder, kind = shlex.quote(str(out)), dataset.kind
        form = form_of(kind.shape if isinstance(kind, Latents) else dataset.shape, kind)
        outputs = {SOUND: " --out samples.wav", TEXT: " --num 4", NOTHING: f" --npz {folder}/samples.npz"}
        labels = " --labels" if recipe.data.labels else ""
        if isinstance(recipe.backbone, AutoencoderConfig):
            log(f"next: bsi data latents --from {shlex.quote(recipe.data.name)} --autoencoder {folder}")
            return 0
        sample = f"bsi sample {folder}{outputs.get(form, '')}{labels}"
        log(f"next: {sample} · bsi eval {folder} --bpd · bsi report {folder}")
    return 0


def parse(words: Sequence[str]) -> tuple[Train, Recipe]:
    """The edited recipe with the options, and the unedited recipe."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS, exit_on_error=False)
    for option in ("--method", "--backbone", "--steps"):
        first.add_argument(option)
    try:
        chosen, rest = first.parse_known_args(words[1:])
    except argparse.ArgumentError as error:
        raise UsageError(f"{error.argument_name} needs a value.") from error
    name, default = words[0], default_of(words[0], chosen.method, chosen.backbone)
    if chosen.steps is not None:
        rest += ["--steps", chosen.steps]
        if chosen.steps.isascii() and chosen.steps.isdigit() and 0 < int(chosen.steps[:20]) < default.recipe.steps:
            default = replace(default, recipe=default.recipe.shortened(int(chosen.steps)))
    text = f"{evidence(name).summary}\n\n{CHOICES}"
    with method_options(default):
        args = parse_options(Train, rest, f"bsi train {name}", text, tyro.conf.AvoidSubcommands, default=default)
    return args, named_recipe(name, chosen.method or "bsi")


def default_of(name: str, method: str | None = None, backbone: str | None = None) -> Train:
    """What a recipe trains if no key is given."""
    if method is not None and method not in METHODS:
        raise UsageError(f"--method must be one of {', '.join(METHODS)}, got {method!r}.")
    recipe = named_recipe(name, method or "bsi")
    return Train(recipe if backbone is None else replace(recipe, backbone=resolve(backbone)), Options())


@contextmanager
def method_options(train: Train) -> Iterator[None]:
    """Declare the type of the recipe's method inside this block, so that its fields are options."""
    declared = Recipe.__annotations__["method"]
    Recipe.__annotations__["method"] = type(train.recipe.method)
    try:
        yield
    finally:
        Recipe.__annotations__["method"] = declared


def _opened(recipe: Recipe, out: Path) -> store.Dataset:
    """The dataset of a recipe that is trained into `out`. If it is missing, the error lists the prepared ones."""
    try:
        return store.open_for_run(recipe.data.name, out)
    except DataError as error:
        names = ", ".join(repr(name) for name in ("digits", *(folder.name for folder in store.prepared())))
        raise DataError(f"{error} --data.name NAME trains on another: {names}.") from error


def _size(recipe: Recipe, sizes: Sizes) -> dict[str, Any]:
    """The parameters and the arithmetic of a network."""
    assert recipe.backbone is not None  # a recipe on the command line names one
    found = cost(recipe.backbone, *sizes)
    return {"parameters": found.parameters, "tflops_per_step": 1e-12 * 3 * found.flops * recipe.batch}


def _size_on(recipe: Recipe, dataset: store.Dataset) -> tuple[dict[str, Any], Sizes]:
    """The amount of data, parameters and arithmetic of a run, known before it starts, and what its network is for."""
    count, shape = len(dataset.split("train")), dataset.shape
    bins = None if dataset.bins is None else dataset.bins.count
    classes = dataset.labels.classes if recipe.data.labels and dataset.labels is not None else 0
    sizes = dataset.kind.latent_shape(shape), bins, classes
    epochs = recipe.steps * recipe.batch / count
    data = {"dataset": dataset.name, "samples": count, "shape": shape, "epochs": epochs}
    return data | _size(recipe, sizes), sizes


def _announce(recipe: Recipe, dataset: store.Dataset, out: Path, device: str) -> None:
    """Print what is trained, and a warning if it does not suit the network or the machine."""
    size, images = _size_on(recipe, dataset)[0], is_image(dataset.shape)
    shape = " x ".join(map(str, dataset.shape)) or "1"
    log(
        f"bsi train: {size['parameters']:,} parameters on {dataset.name}: {size['samples']:,} samples of {shape}, "
        f"{size['epochs']:,.3g} epochs, into {out}"
    )
    if images and isinstance(recipe.backbone, MLPConfig):
        better = "Use `bsi train folder`, or folder-mini on a CPU, for images."
        log(f"bsi train: warning: an MLP treats images as vectors. {better}")
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    hours = recipe.steps * size["tflops_per_step"] / (CORE_TFLOPS * cores) / 3600
    if device == "cpu" and hours > LONG_H:
        better = "" if not images or recipe.name.startswith("folder-mini") else FOR_A_CPU
        log(
            f"bsi train: warning: {recipe.steps} steps of {size['tflops_per_step']:.2g} TFLOP take about {hours:,.0f} "
            f"hours on this CPU. {better}Use a smaller --backbone, --batch and --steps."
        )


def _list(as_json: bool) -> int:
    found = {name: evidence(name) for name in RECIPES}
    text = "\n".join(
        f"{name}\n  {record.summary}\n  {record.command}\n  {record.hardware}, {record.time}\n"
        f"  expected: {record.expected}\n  paper:    {record.paper}"
        for name, record in found.items()
    )
    return answer(as_json, {name: asdict(record) for name, record in found.items()}, text)


def _dry_run(recipe: Recipe, named: Recipe, out: Path, options: Options) -> int:
    """Print the recipe, how it differs from the unedited one, the size of the network and of the run, and a prediction
    for the given ranks.
    """
    recipe.check(options.ranks or 1)
    size: dict[str, Any] = {"images": recipe.steps * recipe.batch}
    try:
        if options.shape:
            sizes: Sizes = (options.shape, IMAGE_BINS, 0)
            size |= {"shape": options.shape, **_size(recipe, sizes)}
        else:
            found, sizes = _size_on(recipe, _opened(recipe, out))
            size |= found
        size |= {} if options.ranks is None else _prediction(recipe, sizes, options.ranks, options)
    except DataError as error:
        log(f"bsi train: {error} --shape 3 32 32 calculates without data.")
    changed = [str(change) for change in changes(named, recipe)]
    lines = [json.dumps(to_plain(recipe), indent=2), f"changed from {named.name}: {'; '.join(changed) or 'nothing'}"]
    lines += [
        f"{name}: {value:,.4g}" if isinstance(value, float) else f"{name}: {value}" for name, value in size.items()
    ]
    return answer(options.json, {"recipe": to_plain(recipe), "changed": changed, **size}, "\n".join(lines))


def _prediction(recipe: Recipe, sizes: Sizes, ranks: int, options: Options) -> dict[str, Any]:
    """A step on the cluster that the options describe."""
    assert recipe.backbone is not None
    shape, bins, classes = sizes
    cluster = Cluster(ranks, options.local_ranks, options.tflops, options.host_gb_per_s, options.network_gb_per_s)
    if recipe.parallel == "hsdp" and ranks % options.local_ranks:
        got = f"got {ranks} with {options.local_ranks} in a host"
        raise UsageError(f"--parallel hsdp needs hosts with an equal number of ranks, {got}. Use --parallel fsdp.")
    found = predict(
        recipe.backbone, shape, cluster, recipe.batch, recipe.parallel, recipe.accumulation, bins, classes,
        1 + len(recipe.ema.powers), recipe.optimizer.kind,
    )  # fmt: skip
    return {"ranks": ranks, "parallel": recipe.parallel, **asdict(found)}
