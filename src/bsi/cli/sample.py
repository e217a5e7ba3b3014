"""`bsi sample RUN`: draw samples from a trained model, as a picture, an array, an animation."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from bsi.cli.labels import label_of
from bsi.defaults import GRID, STEPS
from bsi.errors import NonFinite, UsageError
from bsi.progress import Progress, readable_bytes
from bsi.writing import check_writable, whole

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from bsi.evaluation.drawing import Drawing
    from bsi.model import Model

__all__ = ["Sample", "run", "write_samples"]

SHOWN = 400  # images that a picture shows at most
ANIMATED = 16
COMPILED = 1000  # samples from which on it pays to wait for a compiler


@dataclass(frozen=True)
class Sample:
    """Draw samples from a trained model. Sample i depends on (seed, i) alone, whatever the batch or their number.

    With --npz a large number is drawn part by part: interrupted, the same command goes on. A sample of k steps costs
    k + 1 evaluations of the network with BSI and BFN, where it is a last prediction, and k with VDM; twice as many with
    guidance.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, a file that `bsi export` wrote, or the name of a bundled network: digits."""
    num: int = 64
    """How many samples."""
    steps: int = STEPS
    """Steps k of the solver."""
    solver: str | None = None
    """posterior (the paper's), sde2, ode2, churn or churn:ZETA. By default ode2 with BSI, sde2 with BFN and VDM."""
    grid: str = GRID
    """Where the steps lie: paper, edm or geometric."""
    noise: Literal["path", "independent"] = "path"
    """path: with one seed, more steps converge to one image; independent: fresh noise for each step."""
    seed: int = 0
    """Another seed, other samples."""
    label: str | None = None
    """Samples of this class, by its name or number, for a network with labels; by default of none in particular."""
    guidance: float = 1.0
    """How strongly to follow the label: 1 is what was learned, 2 exaggerates, at twice the evaluations."""
    out: Path | None = None
    """The picture, a grid of the first 400; samples.png unless --npz or --animate is given."""
    npz: Path | None = None
    """All samples as one array, arr_0: bin indices (uint8 for 8-bit images) or values."""
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
    from bsi.training.export import model_of, read_trained
    from bsi.training.room import enough_for_batch

    trained = read_trained(args.run, not args.weights)
    if trained.step < trained.recipe.steps:
        unfinished = f"{args.run} is not trained to its end: step {trained.step} of {trained.recipe.steps}"
        print(f"bsi sample: {unfinished}", file=sys.stderr)
    model = prepared(model_of(trained, str(args.run)), args)
    with enough_for_batch(args.batch_size, "--batch-size", model.device):
        record = write_samples(model, args)
    print(json.dumps(record) if args.json else text(record))
    return 0


def prepared(model: Model, args: Sample) -> Model:
    """On its device, in its precision, and compiled where that pays."""
    from bsi.backbones import Backbone, accelerate, compute_dtype
    from bsi.training.distributed import pick_device

    device = pick_device(None if args.device == "auto" else args.device, 0)
    network = model.to(device).denoiser.backbone
    if isinstance(network, Backbone):
        network.compute_dtype = compute_dtype(args.precision, device)
        if args.num >= COMPILED:
            accelerate(network, device)
    return model


def write_samples(model: Model, args: Sample) -> dict[str, Any]:
    """Everything that was asked for, and a record of it. All that can be wrong is found before the first evaluation."""
    import torch

    from bsi.evaluation.drawing import Drawing
    from bsi.sampling import evaluations

    how = Drawing(args.steps, args.seed, args.solver, args.grid, args.noise, args.guidance).by(model.method)
    how.check(model.method)
    label = label_of(model, args.label, args.guidance)
    picture = args.out or (Path("samples.png") if args.npz is None and args.animate is None else None)
    check_files(model, args, picture)
    num = fresh = min(args.num, ANIMATED)  # if nothing but an animation is asked for
    started = time.perf_counter()
    with torch.no_grad():
        if args.animate is not None:
            animation(model, how, label, min(args.num, ANIMATED), args.animate)
        if picture is not None or args.npz is not None:
            started = time.perf_counter()
            found = drawn(model, args, how, label)
            num, fresh = args.num, found.fresh
        seconds = time.perf_counter() - started
    if picture is not None:
        from bsi import pictures

        low, high = picture_range(model, found.samples)
        with whole(picture, "--out") as beside:
            pictures.grid(found.samples[:SHOWN], low=low, high=high).save(beside)
    return {
        "run": str(args.run),
        "num": num,
        "drawn": fresh,  # the others were in --npz already
        "evaluations": evaluations(model.method, args.steps, args.guidance != 1),
        **{name: value for name, value in asdict(how).items() if name != "classes"},  # here all are of one
        "label": label,
        "class": model.class_names[label] if label is not None and model.class_names else None,
        "seconds": round(seconds, 3),
        "files": [str(path) for path in (picture, args.npz, args.animate) if path is not None],
    }


def text(record: dict[str, Any]) -> str:
    """The record for people."""
    num, fresh = record["num"], record["drawn"]
    kind = "" if record["label"] is None else f" of class {record['class'] or record['label']}"
    rate = f"{record['seconds']:.1f} s, {fresh / max(record['seconds'], 1e-3):.3g}/s"
    took = "all were there" if fresh == 0 else rate if fresh == num else f"{num - fresh} were there, {fresh} in {rate}"
    first = (
        f"{num} samples{kind}, {record['evaluations']} evaluations each "
        f"({record['solver']}, {record['grid']}), seed {record['seed']}: {took}"
    )
    return "\n".join([first, *record["files"]])


@dataclass(frozen=True)
class Drawn:
    """Samples as bin indices or values, and how many of them were not in --npz before."""

    samples: np.ndarray
    fresh: int


def drawn(model: Model, args: Sample, how: Drawing, label: int | None) -> Drawn:
    """All samples, in memory or part by part into --npz."""
    import numpy as np

    from bsi.evaluation.parts import PART, Parts
    from bsi.evaluation.runs import inner_precision, weights_hash

    each = sum(evaluations_by_step(model, how))
    if args.npz is None:
        with Progress("sample", args.num * each, "evaluation") as progress:
            return Drawn(np.concatenate(list(batches(model, args, how, label, range(args.num), progress))), args.num)
    # The precision that `auto` came to: parts from a GPU and from a CPU are no one set of samples.
    about = {**asdict(how), "label": label, "precision": inner_precision(model), "weights": weights_hash(model)}
    parts = Parts(args.npz, args.num, about)
    missing = parts.missing()
    done = args.num - sum(map(len, missing))
    try:
        with Progress("sample", args.num * each, "evaluation", done * each) as progress:
            for ids in missing:
                parts.write(ids, np.concatenate(list(batches(model, args, how, label, ids, progress))))
        return Drawn(parts.join(), args.num - done)
    except KeyboardInterrupt:
        kept = args.num - sum(map(len, parts.missing()))
        raise KeyboardInterrupt(
            f"{kept} of {args.num} samples are kept, in parts of {PART}; the same command goes on"
        ) from None


def evaluations_by_step(model: Model, how: Drawing) -> list[int]:
    """How often a sample's network is evaluated for each step of its trajectory; VDM's last takes none."""
    from bsi.sampling import evaluations

    guided = how.guidance != 1
    last = evaluations(model.method, 0, guided)
    return [evaluations(model.method, 1, guided) - last] * how.steps + [last]


def batches(
    model: Model, args: Sample, how: Drawing, label: int | None, ids: range, progress: Progress
) -> Iterator[np.ndarray]:
    """The samples `ids`, a batch at a time."""
    import torch

    from bsi.evaluation.drawing import draw

    for part in torch.arange(ids.start, ids.stop, device=model.device).split(args.batch_size):
        x_hat, steps = torch.empty(0), draw(model.denoiser, model.shape, part, how, condition(label, part))
        for step, count in zip(steps, evaluations_by_step(model, how), strict=True):
            x_hat = step.x_hat
            progress.advance(count * len(part))
        check_finite(x_hat, part)
        yield model.data(x_hat).cpu().numpy()


def check_finite(x_hat: Tensor, ids: Tensor) -> None:
    if not bool(x_hat.isfinite().all()):
        raise NonFinite(f"samples {int(ids[0])} to {int(ids[-1])} hold NaN or infinity: so do the predictions")


def condition(label: int | None, ids: Tensor) -> Tensor | None:
    import torch

    return None if label is None else torch.full_like(ids, label)


def check_files(model: Model, args: Sample, picture: Path | None) -> None:
    from bsi.pictures import ANIMATIONS, animation_bytes
    from bsi.training.host import host_memory

    is_image = len(model.shape) == 3 and model.shape[0] in (1, 3)
    if not is_image and (picture or args.animate):
        raise UsageError(f"data of shape {model.shape} has no picture: save it with --npz FILE")
    for option, path, suffixes in (
        ("--out", picture, (".png",)),
        ("--npz", args.npz, (".npz",)),
        ("--animate", args.animate, ANIMATIONS),
    ):
        if path is not None and path.suffix.lower() not in suffixes:
            raise UsageError(f"{path} should end in {' or '.join(suffixes)}")
        if path is not None:
            check_writable(path, option)
    if args.animate is not None:
        needed, there = animation_bytes(model.shape, min(args.num, ANIMATED), args.steps + 1), host_memory()
        if needed > there:
            raise UsageError(
                f"an animation of {args.steps} steps needs {readable_bytes(needed)} of memory, and "
                f"{readable_bytes(there)} are free: take fewer steps"
            )


def picture_range(model: Model, samples: np.ndarray) -> tuple[float, float]:
    """What is black and what is white: the first and the last bin, or the samples' own extremes."""
    if model.bins is not None:
        return 0.0, float(model.bins.count - 1)
    return extremes(samples)


def extremes(values: np.ndarray) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    return low, high if high > low else low + 1


def animation(model: Model, how: Drawing, label: int | None, num: int, path: Path) -> None:
    """The first `num` beliefs, step by step, as values; drawn by themselves, since samples in --npz have no history."""
    import torch

    from bsi.evaluation.drawing import draw
    from bsi.pictures import SMALLEST, Moment, animate, belief_frames
    from bsi.sampling import belief, measurement

    ids = torch.arange(num, device=model.device)
    steps = list(draw(model.denoiser, model.shape, ids, how, condition(label, ids)))
    check_finite(steps[-1].x_hat, ids)
    measured = [measurement(model.method, a, b).cpu().numpy() for a, b in itertools.pairwise(steps)]
    moments = [
        Moment(belief(model.method, step).mean.cpu().numpy(), step.x_hat.cpu().numpy(), y, float(step.level))
        for step, y in zip(steps, [*measured, None], strict=True)
    ]
    final, bins = moments[-1].prediction, model.bins
    low, high = (bins.low, bins.high) if bins is not None else extremes(final)
    with whole(path, "--animate") as beside:
        animate(belief_frames(moments, low, high), beside, lossless=min(model.shape[1:]) < SMALLEST)
