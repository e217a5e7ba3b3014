"""`bsi sample RUN`: draw samples from a trained model, as a picture, an array, an animation."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from bsi.defaults import GRID, SOLVER, STEPS
from bsi.errors import NonFinite, UsageError
from bsi.progress import Progress

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from bsi.evaluation.drawing import Drawing
    from bsi.model import Model

__all__ = ["Sample", "run", "write_samples"]

SHOWN = 400  # images that a picture shows at most
ANIMATED = 16
SHOWN_NAMES = 12  # of classes, in a message
COMPILED = 1000  # samples from which on it pays to wait for a compiler


@dataclass(frozen=True)
class Sample:
    """Draw samples from a trained model. Sample i depends on (seed, i) alone, whatever the batch or their number.

    With --npz a large number is drawn part by part: interrupted, the same command goes on. A sample of k steps costs
    k + 1 evaluations of the network with BSI and BFN, where it is a last prediction, and k with VDM.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, a file that `bsi export` wrote, or the name of a bundled network: digits."""
    num: int = 64
    """How many samples."""
    steps: int = STEPS
    """Steps k of the solver."""
    solver: str = SOLVER
    """posterior (the paper's), sde2, ode2, churn or churn:ZETA."""
    grid: str = GRID
    """Where the steps lie: paper, edm or geometric."""
    noise: Literal["path", "independent"] = "path"
    """path: with one seed, more steps converge to one image; independent: fresh noise for each step."""
    seed: int = 0
    """Another seed, other samples."""
    label: str | None = None
    """Samples of this class, by its name or number, for a network with labels; by default of none in particular."""
    guidance: float = 1.0
    """How strongly to follow the label: 1 is what was learned, 2 exaggerates."""
    out: Path | None = None
    """The picture, a grid of the first 400; samples.png unless --npz or --animate is given."""
    npz: Path | None = None
    """All samples as one array, arr_0: bin indices (uint8 for 8-bit images) or values."""
    animate: Path | None = None
    """A .gif or .webp of the first 16 beliefs as they sharpen."""
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
    import bsi
    from bsi.training.room import enough_for_batch

    model = prepared(bsi.load(args.run, ema=not args.weights), args)
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

    how = Drawing(args.steps, args.seed, args.solver, args.grid, args.noise, args.guidance)
    how.check(model.method)
    label = label_of(model, args)
    picture = args.out or (Path("samples.png") if args.npz is None and args.animate is None else None)
    check_files(model, args, picture)
    started = time.perf_counter()
    with torch.no_grad():
        samples = drawn(model, args, how, label)
        seconds = time.perf_counter() - started
        if picture is not None:
            from bsi import pictures

            low, high = picture_range(model, samples)
            pictures.grid(samples[:SHOWN], low=low, high=high).save(picture)
        if args.animate is not None:
            animation(model, args, how, label, args.animate)
    return {
        "run": str(args.run),
        "num": args.num,
        "evaluations": evaluations(model.method, args.steps),
        **asdict(how),
        "label": label,
        "class": model.class_names[label] if label is not None and model.class_names else None,
        "seconds": round(seconds, 3),
        "files": [str(path) for path in (picture, args.npz, args.animate) if path is not None],
    }


def text(record: dict[str, Any]) -> str:
    """The record for people."""
    rate = record["num"] / max(record["seconds"], 1e-9)
    kind = "" if record["label"] is None else f" of class {record['class'] or record['label']}"
    first = (
        f"{record['num']} samples{kind}, {record['evaluations']} evaluations each "
        f"({record['solver']}, {record['grid']}), seed {record['seed']}: {record['seconds']:.1f} s, {rate:.3g}/s"
    )
    return "\n".join([first, *record["files"]])


def drawn(model: Model, args: Sample, how: Drawing, label: int | None) -> np.ndarray:
    """The samples as bin indices or values: from memory, or part by part into --npz."""
    import numpy as np

    from bsi.evaluation.parts import Parts

    each = args.steps + 1
    if args.npz is None:
        with Progress("sample", args.num * each, "evaluation") as progress:
            return np.concatenate(list(batches(model, args, how, label, range(args.num), progress)))
    about = {**asdict(how), "label": label, "precision": args.precision, "weights": digest(model)}
    parts = Parts(args.npz, args.num, about)
    missing = parts.missing()
    done = args.num - sum(map(len, missing))
    with Progress("sample", args.num * each, "evaluation", done * each) as progress:
        for ids in missing:
            parts.write(ids, np.concatenate(list(batches(model, args, how, label, ids, progress))))
    return parts.join()


def batches(
    model: Model, args: Sample, how: Drawing, label: int | None, ids: range, progress: Progress
) -> Iterator[np.ndarray]:
    """The samples `ids`, a batch at a time."""
    import torch

    from bsi.evaluation.drawing import draw

    for part in torch.arange(ids.start, ids.stop, device=model.device).split(args.batch_size):
        x_hat = torch.empty(0)
        for step in draw(model.denoiser, model.shape, part, how, condition(label, part)):
            x_hat = step.x_hat
            progress.advance(len(part))
        if not bool(torch.isfinite(x_hat).all()):
            raise NonFinite(f"samples {int(part[0])} to {int(part[-1])} hold NaN or infinity: so do the predictions")
        yield model.data(x_hat).cpu().numpy()


def condition(label: int | None, ids: Tensor) -> Tensor | None:
    import torch

    return None if label is None else torch.full_like(ids, label)


def label_of(model: Model, args: Sample) -> int | None:
    """The number of the class that is asked for. A name comes first: classes may be called 1, 2, 3."""
    if args.label is None:
        if args.guidance != 1:
            raise UsageError(f"--guidance needs a --label to follow: got --guidance {args.guidance} alone")
        return None
    if model.classes == 0:
        raise UsageError(f"this network has no label {args.label!r}: it was trained without labels")
    names = model.class_names
    if args.label in names:
        return names.index(args.label)
    try:
        number = int(args.label)
    except ValueError:
        raise UsageError(f"this network has no label {args.label!r}: {_near(args.label, names)}") from None
    if number < 0 or (model.classes is not None and number >= model.classes):
        known = "from 0 on" if model.classes is None else f"0 to {model.classes - 1}"
        raise UsageError(f"this network has no label {number}: its labels are {known}")
    return number


def _near(label: str, names: tuple[str, ...]) -> str:
    """What may have been meant by a name that is none."""
    if not names:
        return "its labels are numbers, they have no names"
    folded = {name.casefold(): name for name in names}
    near = difflib.get_close_matches(label.casefold(), folded, 1)
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"did you mean {folded[near[0]]!r}?" if near else f"there are {', '.join(names[:SHOWN_NAMES])}{more}"


def check_files(model: Model, args: Sample, picture: Path | None) -> None:
    from bsi.pictures import ANIMATIONS, animation_bytes

    is_image = len(model.shape) == 3 and model.shape[0] in (1, 3)
    if not is_image and (picture or args.animate):
        raise UsageError(f"data of shape {model.shape} has no picture: save it with --npz FILE")
    for path, suffixes in ((picture, (".png",)), (args.npz, (".npz",)), (args.animate, ANIMATIONS)):
        if path is not None and path.suffix.lower() not in suffixes:
            raise UsageError(f"{path} should end in {' or '.join(suffixes)}")
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"there is no folder {path.parent} to write {path.name} into")
    if args.animate is not None:
        needed, there = animation_bytes(model.shape, min(args.num, ANIMATED), args.steps + 1), available_memory()
        if needed > there:
            raise UsageError(
                f"an animation of {args.steps} steps needs {needed / 2**30:.1f} GiB of memory, and {there / 2**30:.1f} "
                f"are free: take fewer steps"
            )


def available_memory() -> int:
    """Bytes of memory that are free; 2 GiB where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 2 << 30


def picture_range(model: Model, samples: np.ndarray) -> tuple[float, float]:
    """What is black and what is white: the first and the last bin, or the samples' own extremes."""
    if model.bins is not None:
        return 0.0, float(model.bins.count - 1)
    low, high = float(samples.min()), float(samples.max())
    return low, high if high > low else low + 1


def animation(model: Model, args: Sample, how: Drawing, label: int | None, path: Path) -> None:
    """The first beliefs, step by step, as values; drawn anew, since a picture needs none of the others."""
    import torch

    from bsi.evaluation.drawing import draw
    from bsi.pictures import SMALLEST, Moment, animate, belief_frames
    from bsi.sampling import measurement

    ids = torch.arange(min(args.num, ANIMATED), device=model.device)
    steps = list(draw(model.denoiser, model.shape, ids, how, condition(label, ids)))
    measured = [measurement(model.method, a, b).cpu().numpy() for a, b in itertools.pairwise(steps)]
    moments = [
        Moment(step.latent.cpu().numpy(), step.x_hat.cpu().numpy(), y, float(step.level))
        for step, y in zip(steps, [*measured, None], strict=True)
    ]
    final, bins = moments[-1].prediction, model.bins
    low, high = (bins.low, bins.high) if bins is not None else (float(final.min()), float(final.max()))
    animate(belief_frames(moments, low, high), path, lossless=min(model.shape[1:]) < SMALLEST)


def digest(model: Model) -> str:
    """Which weights these are, so that parts of two models are never joined."""
    import torch

    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
