"""`bsi sample RUN`: draw samples from a trained model, as a picture, sound, text, an array, an animation."""

from __future__ import annotations

import difflib
import math
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from bsi.cli.options import Count, Json, Run, Within, answer
from bsi.errors import DataError, UsageError
from bsi.io import atomic, check_writable
from bsi.progress import Progress, log, readable_bytes
from bsi.sampler import Sampler

if TYPE_CHECKING:
    import numpy as np

    from bsi.model import Model
    from bsi.runtime.distributed import World

SHOWN, SHOWN_TEXTS = 400, 16  # images in a picture, and texts on the terminal, at most
ENDINGS = {"picture": ".png", "sound": ".wav", "text": ".txt"}  # of --out
BETWEEN = "\n----\n"  # two samples of text
SHOWN_NAMES = 12  # of classes, in a message
RATE = 16_000  # of sound if its dataset is not on this machine
ANIMATED = 16  # samples in an animation
COMPILED = 1000  # number of samples above which compiling the network saves time
TIMEOUT_S = 86400.0  # how long ranks wait for one that draws an additional part


@dataclass(frozen=True)
class Sample:
    """Draw samples from a trained model. Sample i depends on (seed, i) alone, not on the batch or the number of
    samples, up to rounding: with a large network some pixels may differ by a bin or two of 256.

    With --npz samples are drawn in parts: the same command resumes an interrupted one, and ranks share the parts with
    `torchrun -m -- bsi sample ...`. A sample of k steps costs k + 1 evaluations of the network with BSI and BFN, k with
    VDM, and twice as many with guidance.
    """

    run: Run
    num: Count = 64  # Number of samples.
    sampler: Annotated[Sampler, tyro.conf.arg(name="")] = field(default_factory=Sampler)
    seed: int = 0  # Seed of the noise.
    label: str | None = None  # Draw samples of this class, given by name or number, from a network with labels.
    labels: bool = False
    """Draw samples of all classes in turn; with at most 20 classes, each has a column of the picture."""
    out: Path | None = None
    """A .png of the first 400 samples, for 16-bit sound a .wav and for text a .txt of all samples. By default samples
    with this ending, unless --npz or --animate is given."""
    rate: Annotated[int | None, Within(1, 10**6)] = None
    """Sound samples per second in the .wav. By default the rate of the dataset."""
    npz: Path | None = None
    """Write all samples as one array, arr_0: bin indices (uint8 for 8-bit images) or values. Classes are in labels."""
    animate: Path | None = None
    """A .gif or .webp of the first 16 samples: belief mean, prediction, measurement and precision at every step."""
    batch_size: Count = 256  # Samples per batch.
    device: Literal["auto", "cuda", "cpu"] = "auto"  # By default a GPU if there is one.
    precision: Literal["auto", "bf16", "float16", "float32"] = "auto"
    """Precision inside the network; everything around it is float32."""
    weights: bool = False  # Use the weights instead of their moving average.
    json: Json = False

    def execute(self) -> int:
        from bsi.backbones import Backbone, accelerate, compute_dtype
        from bsi.devices import enough_for_batch
        from bsi.runtime.distributed import join
        from bsi.runtime.export import model_of, read_trained

        with join(None if self.device == "auto" else self.device, TIMEOUT_S) as world:
            trained = read_trained(self.run, not self.weights)
            if world.first and trained.unfinished:
                log(f"bsi sample: training of {self.run} is unfinished: {trained.unfinished}")
            model = model_of(trained, str(self.run)).to(world.device)
            network = model.denoiser.backbone
            if isinstance(network, Backbone):
                network.compute_dtype = compute_dtype(self.precision, model.device)
                if self.num >= COMPILED:
                    accelerate(network, model.device)
            if self.sampler.variance != "none":
                from bsi.evaluation.runs import fitted_variance

                fitted_variance(model, trained.data.name, self.sampler.variance, self.batch_size)
            rate = self.rate
            if rate is None and form_of(model) == "sound":
                rate = _dataset_rate(trained.data.name, trained.data.version)
            with enough_for_batch(self.batch_size, "--batch-size", world.device):
                record = write_samples(model, replace(self, rate=rate), world)
        return 0 if record is None else answer(self.json, record, summary(record))


def write_samples(model: Model, args: Sample, world: World | None = None) -> dict[str, Any] | None:
    """Write the requested files. Everything is validated before the first evaluation of the network.

    Every rank calls it: they share the parts of --npz, and the first rank does everything else.

    Returns:
        A record of the samples on the first rank, None on the others.
    """
    from bsi.evaluation.samples import SampleFile, animate_beliefs, described, draw_into
    from bsi.runtime.distributed import Place, World
    from bsi.sampling import evaluations, levels_of

    world = world or World(Place(), model.device)
    sampler, label = args.sampler.named(model.method), _labels(model, args)
    levels_of(model.method, sampler)  # raises for an invalid sampler
    form, out = form_of(model), args.out
    if out is None and args.npz is None and args.animate is None:
        out = Path(f"samples{ENDINGS.get(form, '')}")
    check_files(model, args, form, out)
    file = None if args.npz is None else SampleFile.of(model, sampler, args.seed, label, args.npz, args.num)
    missing = [] if file is None else file.missing()
    world.barrier()  # every rank has read what is missing before one of them writes
    num = fresh = min(args.num, ANIMATED)  # if only an animation is requested
    samples, started = None, time.perf_counter()
    if world.first and args.animate is not None:
        with atomic(args.animate, "--animate") as temporary:
            animate_beliefs(model, sampler, args.seed, label, num, temporary)
    if file is not None:
        started, num, fresh = time.perf_counter(), args.num, sum(map(len, missing))
        samples = draw_into(file, missing, model, sampler, args.seed, label, args.batch_size, world)
    elif out is not None and world.first:
        started, num, fresh = time.perf_counter(), args.num, args.num
        with Progress("sample", num * (sampler.steps + 1), "step") as progress:
            samples = model.sample(
                num, sampler, seed=args.seed, label=label, batch_size=args.batch_size, progress=progress.advance
            ).cpu().numpy()  # fmt: skip
    seconds = time.perf_counter() - started
    if not world.first:
        return None
    record: dict[str, Any] = {
        "run": str(args.run),
        "num": num,
        "drawn": fresh,  # the others were in --npz already
        "evaluations": evaluations(model.method, sampler.steps, sampler.guidance != 1),
        **described(sampler, args.seed, label),
        "class": model.class_names[label] if isinstance(label, int) and model.class_names else None,
        "seconds": round(seconds, 3),
        "files": [str(path) for path in (out, args.npz, args.animate) if path is not None],
    }
    if out is not None and samples is not None:
        if form == "text" and model.symbols is not None:
            record["text"] = [model.symbols.text(row) for row in samples]
            with atomic(out, "--out") as temporary:
                temporary.write_text(BETWEEN.join(record["text"]) + "\n", "utf-8")
        elif form == "sound":
            _write_sound(out, samples, args.rate or RATE)
        else:
            _write_picture(out, model, samples, record["classes"])
    return record


def form_of(model: Model) -> str:
    """What the samples are shown as: a picture, sound (as `bsi data wav` prepares it), text, or "" for other data."""
    from bsi.pictures import is_image

    if is_image(model.shape):
        return "picture"
    if len(model.shape) == 2 and model.bins is not None and model.bins.count == 65536:
        return "sound"
    return "text" if len(model.shape) == 1 and model.symbols is not None else ""


def _write_sound(out: Path, samples: np.ndarray, rate: int) -> None:
    """All samples one after another, with a short silence between them."""
    import numpy as np

    from bsi.data.sequences import write_wav

    silence = np.full((*samples.shape[:2], samples.shape[2] // 8), 32768, samples.dtype)
    write_wav(out, np.concatenate(list(np.concatenate([samples, silence], axis=2)), axis=1), rate, "--out")


def _write_picture(out: Path, model: Model, samples: np.ndarray, classes: int) -> None:
    """A grid: the first and last bin or symbol, or the extremes of continuous samples, are black and white."""
    from bsi.pictures import class_columns, grid

    stored = model.bins or model.symbols
    low, high = (0.0, stored.count - 1.0) if stored else (float(samples.min()), float(samples.max()))
    with atomic(out, "--out") as temporary:
        grid(samples[:SHOWN], class_columns(classes), low, high if high > low else low + 1).save(temporary)


def _dataset_rate(name: str, version: str) -> int:
    """The rate of the sound that a run was trained on, in samples per second."""
    from bsi.data.store import open_dataset

    try:
        return int(open_dataset(name, version=version).manifest.options["rate"])
    except (DataError, KeyError, TypeError, ValueError):
        log(f"bsi sample: the rate of {name} is unknown here: the sound is written with {RATE} Hz. Set it with --rate.")
        return RATE


def summary(record: dict[str, Any]) -> str:
    """The record as text for people, without characters that control a terminal."""
    num, fresh = record["num"], record["drawn"]
    kind = "" if record["label"] is None else f" of class {record['class'] or record['label']}"
    kind = f" of {min(num, record['classes'])} classes in turn" if record["classes"] else kind
    rate = f"{record['seconds']:.1f} s, {fresh / max(record['seconds'], 1e-3):.3g}/s"
    took = "all existed" if fresh == 0 else rate if fresh == num else f"{num - fresh} existed, {fresh} in {rate}"
    first = (
        f"{num} sample{'s' if num > 1 else ''}{kind}, {record['evaluations']} evaluations each "
        f"({record['solver']}, {record['grid']}), seed {record['seed']}: {took}"
    )
    texts = BETWEEN.join(record.get("text", [])[:SHOWN_TEXTS]) + "\n\n" if "text" in record else ""
    printable = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in texts)
    return printable + "\n".join([first, *record["files"]])


def check_files(model: Model, args: Sample, form: str, out: Path | None) -> None:
    """Raise for output files that do not suit the data, cannot be written, or take too much memory."""
    from bsi.devices import host_memory
    from bsi.pictures import ANIMATIONS, animation_bytes

    if (args.animate and form != "picture") or (out and not form):
        raise UsageError(f"data of shape {model.shape} has no picture: save it with --npz FILE")
    if args.rate is not None and form != "sound":
        raise UsageError("--rate is for 16-bit sound: leave it out")
    endings = {"--out": (ENDINGS.get(form, ""),), "--npz": (".npz",), "--animate": ANIMATIONS}
    for (option, suffixes), path in zip(endings.items(), (out, args.npz, args.animate), strict=True):
        if path is not None and path.suffix.lower() not in suffixes:
            raise UsageError(
                f"{option} {path} should end in {' or '.join(suffixes)}: --out is a picture, sound or text, --npz an "
                f"array, --animate an animation"
            )
        if path is not None:
            check_writable(path, option)
    free, stored = host_memory(), model.bins or model.symbols
    narrow = stored is not None and stored.count <= 256
    arrays = 2 * args.num * math.prod(model.shape) * (1 if narrow else 4)  # the parts and the array made of them
    frames = animation_bytes(model.shape, min(args.num, ANIMATED), args.sampler.steps + 1) if args.animate else 0
    for what, needed, fix in (
        (f"{args.num} samples", arrays, "draw fewer, and others with another --seed"),
        (f"an animation of {args.sampler.steps} steps", frames, "use fewer steps"),
    ):
        if needed > free:
            raise UsageError(
                f"{what} take {readable_bytes(needed)} of memory, and {readable_bytes(free)} are free: {fix}"
            )


def _labels(model: Model, args: Sample) -> int | range | None:
    """The requested label, or the range of all labels."""
    if args.label is not None and args.labels:
        raise UsageError(f"--label {args.label} and --labels exclude each other: leave one out")
    if args.sampler.guidance != 1 and args.label is None and not args.labels:
        raise UsageError(f"--guidance {args.sampler.guidance} needs --label or --labels: add one of them")
    if args.labels:
        return range(all_labels(model, args.run))
    return None if args.label is None else _label(model, args.label)


def all_labels(model: Model, run: object) -> int:
    """The number of classes of a network with labels."""
    if not model.classes:
        raise UsageError(f"{run} was trained without labels: leave --labels out, or train it with --data.labels")
    return model.classes


def _label(model: Model, label: str) -> int:
    """The number of a class, given by name or number. Names take precedence: classes may be called 1, 2, 3."""
    names, count = model.class_names, model.classes
    if count == 0:
        raise UsageError(
            f"this network has no label {label!r}: it was trained without labels. Leave --label out, or train one "
            f"that has them: bsi train RECIPE --data.labels"
        )
    if label in names:
        return names.index(label)
    if re.fullmatch(r"\d{1,9}", label) and (count is None or int(label) < count):
        return int(label)
    numbers = "numbers >= 0" if count is None else f"0 to {count - 1}"
    folded = {name.casefold(): name for name in names}
    near = difflib.get_close_matches(label.casefold(), folded, 1)
    hint = f". Did you mean {folded[near[0]]!r}?" if near else ""
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    known = f"{', '.join(names[:SHOWN_NAMES])}{more}, or {numbers}" if names else numbers
    raise UsageError(f"this network has no label {label!r}: its labels are {known}{hint}")
