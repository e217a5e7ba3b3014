"""`bsi sample RUN`: draw samples from a trained model, as a picture, sound, text, an array, an animation."""

from __future__ import annotations

import difflib
import math
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

from bsi import pictures
from bsi.cli.options import BatchSize, Count, Device, Json, Precision, RunPath, Within, answer
from bsi.errors import DataError, UsageError
from bsi.io import atomic, check_writable
from bsi.progress import log, readable_bytes
from bsi.sampler import Sampler
from bsi.values import Bins, DataKind, Symbols

if TYPE_CHECKING:
    from bsi.model import Model
    from bsi.runtime.distributed import World

PICTURE, SOUND, TEXT, NOTHING = ".png", ".wav", ".txt", ""  # the form of --out, by its ending
SHOWN, SHOWN_TEXTS = 400, 16  # images in a picture, and texts on the terminal, at most
BETWEEN = "\n----\n"  # two samples of text
SHOWN_NAMES = 12  # of classes, in a message
HIGHEST_RATE = 10**6
RATE = 16_000  # of sound if its dataset is not on this machine
ANIMATED = 16  # samples in an animation
COMPILED = 1000  # number of samples above which compiling the network saves time
TIMEOUT_S = 86400.0  # how long ranks wait for one that draws an additional part


@dataclass(frozen=True)
class Sample:
    """Draw samples from a trained model, by default with the solver and the steps that its recipe chose. Sample i
    depends on (seed, i) alone, not on the batch or the number of samples, up to rounding: with a large network some
    pixels may differ by a bin or two of 256.

    With --npz samples are drawn in parts: the same command resumes an interrupted one, and ranks share the parts with
    `torchrun -m -- bsi sample ...`. A sample of k steps costs k + 1 evaluations of the network with BSI and BFN, k with
    VDM, and twice as many with guidance.
    """

    run: RunPath
    num: Count = 64  # Number of samples.
    sampler: Annotated[Sampler, tyro.conf.arg(name="")] = field(default_factory=Sampler)
    seed: int = 0  # Seed of the noise.
    label: str | None = None  # Draw samples of this class, given by name or number, from a network with labels.
    labels: bool = False
    """Draw samples of all classes in turn; with at most 20 classes, each column of the picture is of one."""
    out: Path | None = None
    """A .png of the first 400 samples, for 16-bit sound a .wav and for text a .txt of all samples. By default samples
    with this ending, unless --npz or --animate is given."""
    rate: Annotated[int | None, Within(1, HIGHEST_RATE)] = None
    """Sound samples per second in the .wav. By default the rate of the dataset."""
    npz: Path | None = None
    """Write all samples as one array, arr_0: bin indices (uint8 for 8-bit images) or values. Classes are in labels."""
    animate: Path | None = None
    """A .gif or .webp of the first 16 samples: belief mean, prediction, measurement and precision at every step."""
    batch_size: BatchSize = 256
    device: Device = None
    precision: Precision = "auto"
    weights: bool = False  # Use the weights instead of their moving average.
    json: Json = False

    def defaults(self) -> Sample:
        from bsi.runtime.export import sampler_of

        return Sample(self.run, sampler=sampler_of(self.run).with_variance(self.sampler.variance))

    def execute(self) -> int:
        from bsi.backbones import Backbone, accelerate, compute_dtype
        from bsi.devices import enough_for_batch
        from bsi.evaluation.runs import fitted_variance
        from bsi.runtime import export
        from bsi.runtime.distributed import join

        with join(self.device, TIMEOUT_S) as world:
            trained = export.read_trained(self.run, not self.weights)
            if world.first and trained.unfinished:
                log(f"bsi sample: training of {self.run} is unfinished: {trained.unfinished}")
            model = export.model_of(trained, str(self.run)).to(world.device)
            network = model.denoiser.backbone
            if isinstance(network, Backbone):
                network.compute_dtype = compute_dtype(self.precision, model.device)
                if self.num >= COMPILED:
                    accelerate(network, model.device)
            fitted_variance(model, trained.data.name, self.sampler.variance, self.batch_size)
            rate = self.rate
            if rate is None and form_of(model.shape, model.kind) == SOUND:
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
    sampler, label, out = model.named(args.sampler), _labels(model, args), args.out
    levels_of(model.method, sampler)  # raises for an invalid sampler
    form = form_of(model.shape, model.kind)
    if out is None and args.npz is None and args.animate is None:
        out = Path(f"samples{form}")
    _check_files(model, args, out)
    file = None if args.npz is None else SampleFile.of(model, sampler, args.seed, label, args.npz, args.num)
    missing = [] if file is None else file.missing()
    world.barrier()  # every rank has read what is missing before one of them writes
    num = args.num if file or out else min(args.num, ANIMATED)
    fresh = sum(map(len, missing)) if file else num
    samples, started = None, time.perf_counter()
    if file is not None:
        samples = draw_into(file, missing, model, sampler, args.seed, label, args.batch_size, world)
    elif out is not None and world.first:
        drawn = model.sample(num, sampler, seed=args.seed, label=label, batch_size=args.batch_size, progress=True)
        samples = drawn.cpu().numpy()
    seconds = time.perf_counter() - started
    if not world.first:
        return None
    if args.animate is not None:
        with atomic(args.animate, "--animate") as temporary:
            animate_beliefs(model, sampler, args.seed, label, min(args.num, ANIMATED), temporary)
        seconds = seconds if file or out else time.perf_counter() - started
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
        if form == TEXT and model.symbols is not None:
            record["text"] = [model.symbols.text(row) for row in samples]
            with atomic(out, "--out") as temporary:
                temporary.write_text(BETWEEN.join(record["text"]) + "\n", "utf-8")
        elif form == SOUND:
            _write_sound(out, samples, args.rate or RATE)
        else:
            _write_picture(out, model, samples, record["classes"])
    return record


def form_of(shape: tuple[int, ...], kind: DataKind) -> str:
    """What the samples are shown as: a picture, sound (as `bsi data wav` prepares it), text, or nothing."""
    if pictures.is_image(shape):
        return PICTURE
    if len(shape) == 2 and isinstance(kind, Bins) and kind.count == 65536:
        return SOUND
    return TEXT if len(shape) == 1 and isinstance(kind, Symbols) else NOTHING


def _write_sound(out: Path, samples: np.ndarray, rate: int) -> None:
    """All samples one after another, with a short silence between them."""
    from bsi.data.arrays import write_wav

    silence = np.full((*samples.shape[:2], samples.shape[2] // 8), 32768, samples.dtype)
    write_wav(out, np.concatenate(list(np.concatenate([samples, silence], axis=2)), axis=1), rate, "--out")


def _write_picture(out: Path, model: Model, samples: np.ndarray, classes: int) -> None:
    """A grid: the first and last bin or symbol, or the extremes of continuous samples, are black and white."""
    stored = model.bins or model.symbols
    low, high = (0.0, stored.count - 1.0) if stored else (float(samples.min()), float(samples.max()))
    shown = samples[:SHOWN]
    sheet = pictures.grid(shown, pictures.class_columns(classes, len(shown)), low, high if high > low else low + 1)
    with atomic(out, "--out") as temporary:
        sheet.save(temporary)


def _dataset_rate(name: str, version: str) -> int:
    """The rate of the sound that a run was trained on, in samples per second."""
    from bsi.data.store import open_dataset

    with suppress(DataError, KeyError, TypeError, ValueError):
        rate = int(open_dataset(name, version=version).manifest.options["rate"])
        if 1 <= rate <= HIGHEST_RATE:
            return rate
    log(f"bsi sample: the rate of {name} is unknown here: the sound is written with {RATE} Hz. Set it with --rate.")
    return RATE


def summary(record: dict[str, Any]) -> str:
    """The record as text for people."""
    num, fresh, kind = record["num"], record["drawn"], ""
    if record["classes"]:
        kind = f" of {min(num, record['classes'])} classes in turn"
    elif record["label"] is not None:
        kind = f" of class {record['class'] or record['label']}"
    rate = f"{record['seconds']:.1f} s, {fresh / max(record['seconds'], 1e-3):.3g}/s"
    took = "all existed" if fresh == 0 else rate if fresh == num else f"{num - fresh} existed, {fresh} in {rate}"
    first = (
        f"{num} sample{'s' if num > 1 else ''}{kind}, {record['evaluations']} evaluations each "
        f"({record['solver']}, {record['grid']}), seed {record['seed']}: {took}"
    )
    texts = BETWEEN.join(record["text"][:SHOWN_TEXTS]) + "\n\n" if "text" in record else ""
    return texts + "\n".join([first, *record["files"]])


def _check_files(model: Model, args: Sample, out: Path | None) -> None:
    """Raise for output files that do not suit the data, cannot be written, or take too much memory."""
    from bsi.devices import host_memory

    form, stored, drawn = form_of(model.shape, model.kind), model.bins or model.symbols, f"{args.num} samples"
    if (args.animate and form != PICTURE) or (out and form == NOTHING):
        raise UsageError(f"data of shape {model.shape} has no picture: save it with --npz FILE")
    if args.rate is not None and form != SOUND:
        raise UsageError("--rate is for 16-bit sound: leave it out")
    suffixes = {"--out": (form,), "--npz": (".npz",), "--animate": pictures.ANIMATIONS}
    for (option, endings), path in zip(suffixes.items(), (out, args.npz, args.animate), strict=True):
        if path is not None and path.suffix.lower() not in endings:
            raise UsageError(f"{option} {path} should end in {' or '.join(endings)}. --npz FILE writes an array.")
        if path is not None:
            check_writable(path, option)
    # The parts, and the array made of them.
    needs = {drawn: 2 * args.num * math.prod(model.shape) * (1 if stored is not None and stored.count <= 256 else 4)}
    if args.animate:
        steps, num = args.sampler.steps, min(args.num, ANIMATED)
        needs[f"an animation of {steps} steps"] = pictures.animation_bytes(model.shape, num, steps + 1)
    for what, needed in needs.items():
        if needed > (free := host_memory()):
            fix = "draw fewer, and others with another --seed" if what == drawn else "use fewer steps"
            sizes = f"{readable_bytes(needed)} of memory, and {readable_bytes(free)} are free"
            raise UsageError(f"{what} take {sizes}: {fix}")


def _labels(model: Model, args: Sample) -> int | range | None:
    """The number of the requested class, or the range of all classes."""
    label, names, count = args.label, model.class_names, model.classes or 0
    if label is not None and args.labels:
        raise UsageError(f"--label {label} and --labels exclude each other: leave one out")
    if args.labels:
        return range(all_labels(model, args.run))
    if label is None:
        if args.sampler.guidance != 1:
            raise UsageError(f"--guidance {args.sampler.guidance} needs --label or --labels: add one of them")
        return None
    if label in names:  # names take precedence over numbers: classes may be called 1, 2, 3
        return names.index(label)
    if re.fullmatch(r"\d{1,9}", label) and int(label) < count:
        return int(label)
    known = "it was trained without labels. Leave it out, or train with bsi train RECIPE --data.labels"
    if count:
        more = [f"and {len(names) - SHOWN_NAMES} more"] if len(names) > SHOWN_NAMES else []
        listed = ", ".join([*names[:SHOWN_NAMES], *more])
        known = f"its labels are {listed + ', or ' if names else ''}0 to {count - 1}"
    folded = {name.casefold(): name for name in names}
    near = difflib.get_close_matches(label.casefold(), folded, 1)
    hint = f". Did you mean {folded[near[0]]!r}?" if near else ""
    raise UsageError(f"this network has no label {label!r}: {known}{hint}")


def all_labels(model: Model, run: object) -> int:
    """The number of classes of a network with labels."""
    if not model.classes:
        raise UsageError(f"{run} was trained without labels: leave --labels out, or train it with --data.labels")
    return model.classes
