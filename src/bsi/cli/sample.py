"""`bsi sample RUN`: draw samples from a trained model, as a picture, an array, an animation."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from bsi.cli.labels import all_labels, label_of
from bsi.errors import UsageError
from bsi.io import atomic, check_writable
from bsi.progress import Progress, readable_bytes
from bsi.sampler import Sampler

if TYPE_CHECKING:
    import numpy as np

    from bsi.model import Model
    from bsi.runtime.distributed import World

__all__ = ["Sample", "run", "write_samples"]

SHOWN = 400  # images that a picture shows at most
ANIMATED = 16
COMPILED = 1000  # samples from which on it pays to wait for a compiler
TIMEOUT_S = 86400.0  # ranks wait so long for one that has a part more to draw


@dataclass(frozen=True)
class Sample:
    """Draw samples from a trained model. Sample i depends on (seed, i) alone, whatever the batch or their number, up to
    rounding, of which a large network makes a bin or two of 256.

    With --npz a large number is drawn part by part: interrupted, the same command goes on, and ranks share the parts
    (`torchrun -m -- bsi sample ...`; its -- keeps torchrun from reading --num as an option of its own). A sample of k
    steps costs k + 1 evaluations of the network with BSI and BFN, where it is a last prediction, and k with VDM; twice
    as many with guidance.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, a file that `bsi export` wrote, or the name of a bundled network: digits."""
    num: int = 64
    """How many samples."""
    sampler: Annotated[Sampler, tyro.conf.arg(name="")] = field(default_factory=Sampler)
    seed: int = 0
    """Another seed, other samples."""
    label: str | None = None
    """Samples of this class, by its name or number, for a network with labels; by default of none in particular."""
    labels: bool = False
    """Samples of all classes in turn; of at most 20, each has a column of the picture."""
    out: Path | None = None
    """The picture, a grid of the first 400; samples.png unless --npz or --animate is given."""
    npz: Path | None = None
    """All samples as one array, arr_0: bin indices (uint8 for 8-bit images) or values; and their classes, labels, if
    they have any."""
    animate: Path | None = None
    """A .gif or .webp of the first 16 beliefs as they sharpen: belief mean, prediction, measurement, precision."""
    batch_size: int = 256
    """Samples at a time."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to compute."""
    precision: Literal["auto", "bf16", "float16", "float32"] = "auto"
    """Inside the network; everything around it is float32."""
    weights: bool = False
    """The weights themselves rather than their moving average."""
    json: bool = False
    """Print the record as one JSON object."""


def run(args: Sample) -> int:
    for name, value in (("num", args.num), ("batch-size", args.batch_size)):
        if value < 1:
            raise UsageError(f"--{name} must be at least 1: got {value}")
    from bsi.runtime.distributed import join
    from bsi.runtime.export import model_of, read_trained
    from bsi.runtime.out_of_memory import enough_for_batch

    with join(None if args.device == "auto" else args.device, TIMEOUT_S) as world:
        trained = read_trained(args.run, not args.weights)
        if world.first and trained.step < trained.recipe.steps:
            unfinished = f"{args.run} is not trained to its end: step {trained.step} of {trained.recipe.steps}"
            print(f"bsi sample: {unfinished}", file=sys.stderr)
        model = prepared(model_of(trained, str(args.run)).to(world.device), args)
        with enough_for_batch(args.batch_size, "--batch-size", world.device):
            record = write_samples(model, args, world)
    if record is not None:
        print(json.dumps(record) if args.json else text(record))
    return 0


def prepared(model: Model, args: Sample) -> Model:
    """In its precision, and compiled where that pays."""
    from bsi.backbones import Backbone, accelerate, compute_dtype

    network = model.denoiser.backbone
    if isinstance(network, Backbone):
        network.compute_dtype = compute_dtype(args.precision, model.device)
        if args.num >= COMPILED:
            accelerate(network, model.device)
    return model


def write_samples(model: Model, args: Sample, world: World | None = None) -> dict[str, Any] | None:
    """Everything that was asked for, and a record of it. All that can be wrong is found before the first evaluation.

    Every rank calls it: they share the parts of --npz, the first does all else, and it alone gets the record.
    """
    from bsi.evaluation.samples import SampleFile, animate_beliefs, described, draw_into
    from bsi.runtime.distributed import Place, World
    from bsi.sampling import evaluations, levels_of

    world = world or World(Place(), model.device)
    if args.label is not None and args.labels:
        raise UsageError(f"samples of one class (--label {args.label}) or of all in turn (--labels): leave one out")
    sampler = args.sampler.named(model.method)
    if sampler.guidance != 1 and args.label is None and not args.labels:
        raise UsageError(f"--guidance needs a --label or --labels to follow: got --guidance {sampler.guidance} alone")
    label = range(all_labels(model, args.run)) if args.labels else label_of(model, args.label)
    levels_of(model.method, sampler)  # raises what cannot be drawn
    picture = args.out or (Path("samples.png") if args.npz is None and args.animate is None else None)
    check_files(model, args, picture)
    file = None if args.npz is None else SampleFile.of(model, sampler, args.seed, label, args.npz, args.num)
    missing = [] if file is None else file.missing()
    world.barrier()  # every rank has seen what is there, and what is missing, before one of them writes
    num = fresh = min(args.num, ANIMATED)  # if nothing but an animation is asked for
    samples, started = None, time.perf_counter()
    if world.first and args.animate is not None:
        with atomic(args.animate, "--animate") as temporary:
            animate_beliefs(model, sampler, args.seed, label, num, temporary)
    if file is not None:
        started, num, fresh = time.perf_counter(), args.num, sum(map(len, missing))
        samples = draw_into(file, missing, model, sampler, args.seed, label, args.batch_size, world)
    elif picture is not None and world.first:
        started, num, fresh = time.perf_counter(), args.num, args.num
        with Progress("sample", num * (sampler.steps + 1), "step") as progress:
            samples = model.sample(
                num, sampler, seed=args.seed, label=label, batch_size=args.batch_size, progress=progress.advance
            ).cpu().numpy()  # fmt: skip
    seconds = time.perf_counter() - started
    if not world.first:
        return None
    if picture is not None and samples is not None:
        from bsi import pictures

        low, high = picture_range(model, samples)
        with atomic(picture, "--out") as temporary:
            columns = pictures.class_columns(len(label) if isinstance(label, range) else 0)
            pictures.grid(samples[:SHOWN], columns, low, high).save(temporary)
    return {
        "run": str(args.run),
        "num": num,
        "drawn": fresh,  # the others were in --npz already
        "evaluations": evaluations(model.method, sampler.steps, sampler.guidance != 1),
        **described(sampler, args.seed, label),
        "class": model.class_names[label] if isinstance(label, int) and model.class_names else None,
        "seconds": round(seconds, 3),
        "files": [str(path) for path in (picture, args.npz, args.animate) if path is not None],
    }


def text(record: dict[str, Any]) -> str:
    """The record for people."""
    num, fresh = record["num"], record["drawn"]
    kind = "" if record["label"] is None else f" of class {record['class'] or record['label']}"
    kind = f" of {min(num, record['classes'])} classes in turn" if record["classes"] else kind
    rate = f"{record['seconds']:.1f} s, {fresh / max(record['seconds'], 1e-3):.3g}/s"
    took = "all were there" if fresh == 0 else rate if fresh == num else f"{num - fresh} were there, {fresh} in {rate}"
    first = (
        f"{num} sample{'s' if num > 1 else ''}{kind}, {record['evaluations']} evaluations each "
        f"({record['solver']}, {record['grid']}), seed {record['seed']}: {took}"
    )
    return "\n".join([first, *record["files"]])


def check_files(model: Model, args: Sample, picture: Path | None) -> None:
    from bsi.pictures import ANIMATIONS, animation_bytes, is_image
    from bsi.runtime.out_of_memory import host_memory

    if not is_image(model.shape) and (picture or args.animate):
        raise UsageError(f"data of shape {model.shape} has no picture: save it with --npz FILE")
    for option, path, suffixes in (
        ("--out", picture, (".png",)),
        ("--npz", args.npz, (".npz",)),
        ("--animate", args.animate, ANIMATIONS),
    ):
        if path is not None and path.suffix.lower() not in suffixes:
            raise UsageError(
                f"{option} {path} should end in {' or '.join(suffixes)}: --out is a picture, --npz an array, --animate "
                f"an animation"
            )
        if path is not None:
            check_writable(path, option)
    there, narrow = host_memory(), model.bins is not None and model.bins.count <= 256
    kept = 2 * args.num * math.prod(model.shape) * (1 if narrow else 4)  # batches or parts, and the array made of them
    shown = animation_bytes(model.shape, min(args.num, ANIMATED), args.sampler.steps + 1) if args.animate else 0
    for what, needed, fix in (
        (f"{args.num} samples", kept, "take fewer, and others with another --seed"),
        (f"an animation of {args.sampler.steps} steps", shown, "take fewer steps"),
    ):
        if needed > there:
            free = readable_bytes(there)
            raise UsageError(f"{what} take {readable_bytes(needed)} of memory, and {free} are free: {fix}")


def picture_range(model: Model, samples: np.ndarray) -> tuple[float, float]:
    """What is black and what is white: the first and the last bin, or the samples' own extremes."""
    if model.bins is not None:
        return 0.0, float(model.bins.count - 1)
    low, high = float(samples.min()), float(samples.max())
    return low, high if high > low else low + 1
