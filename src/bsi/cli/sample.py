"""`bsi sample RUN`: draw samples from a trained model, as a picture, an array, an animation."""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from bsi.cli.labels import all_labels, label_of
from bsi.defaults import GRID, STEPS
from bsi.errors import UsageError
from bsi.io import atomic, check_writable
from bsi.progress import readable_bytes

if TYPE_CHECKING:
    import numpy as np

    from bsi.evaluation.series import Series
    from bsi.model import Model
    from bsi.runtime.distributed import World
    from bsi.sampling import Step

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
    steps: int = STEPS
    """Steps k of the solver."""
    solver: str | None = None
    """posterior (the paper's), sde2, ode2, churn or churn:ZETA. By default ode2 with BSI (sde2 where its gamma_0 is
    inf), sde2 with BFN and VDM."""
    grid: str = GRID
    """Where the steps lie: paper, edm or geometric."""
    noise: Literal["path", "independent"] = "path"
    """path: with one seed, more steps converge to one image; independent: fresh noise for each step."""
    seed: int = 0
    """Another seed, other samples."""
    label: str | None = None
    """Samples of this class, by its name or number, for a network with labels; by default of none in particular."""
    labels: bool = False
    """Samples of all classes in turn; of at most 20, each has a column of the picture."""
    guidance: float = 1.0
    """How strongly to follow the label: 1 is what was learned, 2 exaggerates, at twice the evaluations."""
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
    for name, value in (("num", args.num), ("steps", args.steps), ("batch-size", args.batch_size)):
        if value < 1:
            raise UsageError(f"--{name} must be at least 1: got {value}")
    from bsi.runtime.distributed import join
    from bsi.runtime.export import model_of, read_trained
    from bsi.training.room import enough_for_batch

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
    import torch

    from bsi.evaluation.drawing import Drawing
    from bsi.evaluation.series import Series, Stored
    from bsi.runtime.distributed import Place, World

    world = world or World(Place(), model.device)
    if args.label is not None and args.labels:
        raise UsageError(f"samples of one class (--label {args.label}) or of all in turn (--labels): leave one out")
    if args.guidance != 1 and args.label is None and not args.labels:
        raise UsageError(f"--guidance needs a --label or --labels to follow: got --guidance {args.guidance} alone")
    label, classes = label_of(model, args.label), all_labels(model, args.run) if args.labels else 0
    how = Drawing(args.steps, args.seed, args.solver, args.grid, args.noise, args.guidance, label, classes)
    how = how.by(model.method)
    how.check(model.method)
    series = Series(model, how, args.batch_size)
    picture = args.out or (Path("samples.png") if args.npz is None and args.animate is None else None)
    check_files(model, args, picture)
    stored = None if args.npz is None else Stored.of(series, args.npz, args.num)
    world.barrier()  # every rank has seen what is there, and what is missing, before one of them writes
    num = fresh = min(args.num, ANIMATED)  # if nothing but an animation is asked for
    samples, started = None, time.perf_counter()
    with torch.no_grad():
        if world.first and args.animate is not None:
            animation(series, num, args.animate)
        if stored is not None:
            started, num, fresh = time.perf_counter(), args.num, stored.fresh
            samples = stored.drawn(world)
        elif picture is not None and world.first:
            started, num, fresh = time.perf_counter(), args.num, args.num
            samples = series.first(num)
    seconds = time.perf_counter() - started
    if not world.first:
        return None
    if picture is not None and samples is not None:
        from bsi import pictures

        low, high = picture_range(model, samples)
        with atomic(picture, "--out") as temporary:
            pictures.grid(samples[:SHOWN], pictures.class_columns(how.classes), low, high).save(temporary)
    return {
        "run": str(args.run),
        "num": num,
        "drawn": fresh,  # the others were in --npz already
        "evaluations": sum(series.evaluations),
        **asdict(how),
        "class": model.class_names[label] if label is not None and model.class_names else None,
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
    from bsi.training.host import host_memory

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
    shown = animation_bytes(model.shape, min(args.num, ANIMATED), args.steps + 1) if args.animate else 0
    for what, needed, fix in (
        (f"{args.num} samples", kept, "take fewer, and others with another --seed"),
        (f"an animation of {args.steps} steps", shown, "take fewer steps"),
    ):
        if needed > there:
            free = readable_bytes(there)
            raise UsageError(f"{what} take {readable_bytes(needed)} of memory, and {free} are free: {fix}")


def picture_range(model: Model, samples: np.ndarray) -> tuple[float, float]:
    """What is black and what is white: the first and the last bin, or the samples' own extremes."""
    if model.bins is not None:
        return 0.0, float(model.bins.count - 1)
    return extremes(samples)


def extremes(values: np.ndarray) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    return low, high if high > low else low + 1


def animation(series: Series, num: int, path: Path) -> None:
    """The first `num` beliefs, step by step, as values; drawn by themselves, since samples in --npz have no history."""
    import torch

    from bsi.evaluation.series import check_finite
    from bsi.pictures import SMALLEST, Moment, animate, belief_frames
    from bsi.sampling import belief, measurement

    model, ids = series.model, torch.arange(num, device=series.model.device)

    def moment(step: Step, y: np.ndarray | None) -> Moment:
        mean = belief(model.method, step).mean
        return Moment(mean.cpu().numpy(), step.x_hat.cpu().numpy(), y, float(step.level))

    moments = []
    for step, after in itertools.pairwise(series.steps(ids)):  # as they come: a GPU holds two steps, not all
        moments.append(moment(step, measurement(model.method, step, after).cpu().numpy()))
    check_finite(after.x_hat, ids)
    moments.append(moment(after, None))
    bins = model.bins
    low, high = (bins.low, bins.high) if bins is not None else extremes(moments[-1].prediction)
    with atomic(path, "--animate") as temporary:
        animate(belief_frames(moments, low, high), temporary, lossless=min(model.shape[1:]) < SMALLEST)
