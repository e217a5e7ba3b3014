"""`bsi eval`, `bsi audit` and `bsi fid`: likelihoods and the quality of images, with standard errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import tyro

from bsi.cli.options import (
    BatchSize,
    Count,
    Device,
    Json,
    Precision,
    RunPath,
    Within,
    answer,
    logged_warnings,
    plus_minus,
)
from bsi.cli.sample import all_labels
from bsi.errors import BsiError, DataError, UsageError
from bsi.io import check_writable
from bsi.progress import Progress, log
from bsi.sampler import Sampler, VarianceKind
from bsi.values import unit_of_bounds

if TYPE_CHECKING:
    from torch import Tensor

    from bsi.elbo import Elbo
    from bsi.evaluation.runs import EvaluatedRun
    from bsi.runtime.distributed import World

# The evaluations that an option applies to; the other options apply to all of them.
APPLIES = {
    **dict.fromkeys(("split", "measure", "recon", "finite_k", "proposal", "limit"), ("bpd", "paired")),
    **dict.fromkeys(("target_se", "per_sample"), ("bpd",)),
    **dict.fromkeys(("num", "reference", "steps", "solver", "grid", "labels", "guidance"), ("fid",)),
    **dict.fromkeys(("kid", "precision_recall", "inception"), ("fid",)),
}
BLOCK_BYTES = 1 << 24

Number = Annotated[int, Within(1, 1_000_000)]


@dataclass(frozen=True)
class Eval:
    """Evaluate bits per dimension and sample quality of trained models, and store the results in the run folder.

    By default --bpd follows the paper: 5 levels and 2 reconstructions of every test sample. There are two standard
    errors: of the Monte Carlo estimate, and of the finite test set. --proposal fitted reaches the same error with
    several times fewer evaluations. `torchrun -m -- bsi eval ...` distributes the work and gives the same numbers. If
    the run folder cannot be written, the result is printed, with a warning.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...", help_behavior_hint="")]
    """A run folder, a file that `bsi export` wrote, or a bundled network (digits); two of them with --paired."""
    bpd: bool = False  # Evaluate the bits per dimension.
    fid: bool = False  # Evaluate the sample quality: the Fréchet inception distance.
    paired: bool = False  # Evaluate the difference in bits per dimension of two runs, with common random numbers.
    split: Literal["test", "train"] = "test"  # The samples to evaluate the bound of.
    measure: Number = 5  # Levels per sample and round.
    recon: Number = 2  # Reconstructions per sample and round.
    finite_k: Number | None = None  # The bound for this many measurement rounds instead of infinitely many.
    variance: VarianceKind = "none"
    """The predictive variance of each transition, fitted to training samples, with --finite-k or for --fid; the paper
    has none."""
    proposal: Literal["loguniform", "exact", "fitted"] = "loguniform"
    """The distribution of the levels; fitted learns it from a few extra evaluations, and adds a control variate."""
    target_se: float | None = None
    """Evaluate more rounds until the Monte Carlo standard error is below this value, in bits per dimension."""
    per_sample: Path | None = None  # Write the bound of every sample to this .npz file.
    limit: Count | None = None  # Evaluate only this many random samples, the same ones every time.
    num: Count = 50_000  # Number of samples for --fid.
    reference: Literal["test", "train"] = "test"  # The samples that --fid compares with; the paper uses the test set.
    steps: Number = Sampler.steps  # Steps of the solver for --fid; the paper takes 1024 with --solver posterior.
    solver: str | None = None
    """posterior (the paper's), sde2, ode2, churn or churn:ZETA. By default ode2 with BSI, sde2 with BFN and VDM."""
    grid: str = Sampler.grid  # Where the steps lie: paper, edm, geometric or, with --variance, fitted.
    labels: bool = False  # With --fid, draw samples of all classes in turn from a network with labels.
    guidance: tuple[float, ...] = (1.0,)
    """With --labels, how strongly to follow them: 1 is what was learned, 2 exaggerates. Several run in turn."""
    kid: bool = False  # With --fid, also evaluate the kernel inception distance.
    precision_recall: bool = False  # With --fid, also evaluate precision and recall.
    inception: Path | None = None  # The weights of the FID network; by default those in the data folder.
    data: str | None = None  # Evaluate on this prepared dataset, by name or folder, instead of the one of the run.
    seed: int = 0  # Seed of the noise and the levels, or of the samples.
    batch_size: BatchSize = 256
    step: int | None = None  # An earlier checkpoint, by its step.
    weights: bool = False  # Use the weights instead of their moving average.
    precision: Precision = "auto"
    device: Device = None
    json: bool = False  # Print the result as a JSON object on stdout, or several as a list.

    def execute(self) -> int:
        self.check()
        from bsi.devices import enough_for_batch
        from bsi.evaluation import runs
        from bsi.runtime.distributed import join

        with join(self.device, 3600.0) as world, enough_for_batch(self.batch_size, "--batch-size", world.device):
            done: list[Found] = []
            try:
                for found in evaluations(self, world):
                    if not world.first:
                        continue
                    done.append(found)
                    try:
                        runs.store(found.run, found.what, found.record)
                    except BsiError as error:
                        log(f"bsi eval: warning: the result is printed and not stored: {error}")
                    if self.per_sample is not None and found.bound is not None:
                        runs.save_samples(self.per_sample, found.bound)
            finally:  # print the results also if one cannot be stored or the next evaluation fails
                if done:
                    records = [found.record for found in done]
                    answer(self.json, records if len(done) > 1 else records[0], "\n".join(map(eval_text, done)))
        return 0

    def check(self) -> None:
        """Raise for invalid combinations of options, before torch is imported."""
        if not (self.bpd or self.fid or self.paired):
            raise UsageError("nothing to evaluate: add --bpd, --fid, both, or --paired for two runs")
        if len(self.runs) != (2 if self.paired else 1) or (self.paired and (self.bpd or self.fid)):
            raise UsageError(
                f"--bpd and --fid take one run, --paired two and nothing else: got {len(self.runs)} runs. "
                f"Evaluate several runs one after the other."
            )
        for option, needed in APPLIES.items():
            changed = getattr(self, option) != type(self).__dataclass_fields__[option].default
            if changed and not any(getattr(self, each) for each in needed):
                name, flags = option.replace("_", "-"), " or ".join(f"--{each}" for each in needed)
                raise UsageError(f"--{name} applies only with {flags}: leave it out, or add {flags}")
        if self.variance != "none" and self.finite_k is None and not self.fid:
            raise UsageError(f"--variance {self.variance} applies only with --finite-k or --fid: add one of them")
        if not self.guidance:
            raise UsageError("--guidance needs at least one number")
        if self.guidance != (1.0,) and not self.labels:
            raise UsageError(f"--guidance {' '.join(f'{each:g}' for each in self.guidance)} needs --labels: add it")
        if self.target_se is not None and not self.target_se > 0:
            raise UsageError(f"--target-se must be positive, got {self.target_se}.")
        if self.per_sample is not None:
            check_writable(self.per_sample, "--per-sample")


class Found(NamedTuple):
    """The record of one evaluation, the run and the name to store it under, and its bound or difference of bounds."""

    record: Mapping[str, Any]
    run: EvaluatedRun
    what: str
    bound: Elbo | None = None


def evaluations(args: Eval, world: World) -> Iterator[Found]:
    """The requested evaluations in turn. Every rank iterates over it; only the first rank gets distances."""
    if args.paired or args.bpd:
        yield bound(args, world)
    if args.fid:
        yield from quality(args, world)


def bound(args: Eval, world: World) -> Found:
    """The bound of one run, or the difference of two with common random numbers."""
    from bsi.bound import estimate, estimate_pair
    from bsi.elbo import Estimator
    from bsi.evaluation import runs

    estimator = Estimator(
        args.measure, args.recon, args.finite_k, args.proposal,
        target_error=args.target_se, seed=args.seed, batch_size=args.batch_size,
    )  # fmt: skip
    opened = [runs.open_run(path, world, not args.weights, args.step, args.precision) for path in args.runs]
    splits = [runs.open_split(run, args.split, args.data) for run in opened]
    run, split = opened[0], splits[0]
    if splits[-1].dataset.version != split.dataset.version:
        raise UsageError(
            f"{run.path.name} and {opened[1].path.name} were trained on different data, and have no samples in common: "
            f"name one dataset with --data"
        )
    models = [runs.evaluated(each, split, args.limit) for each in opened]
    if args.variance != "none" and args.finite_k is not None:
        fit = (runs.fitted_variance(each.model, split.dataset, args.variance, args.batch_size) for each in opened)
        models = [replace(each, variance=variance) for each, variance in zip(models, fit, strict=True)]
    with runs.own_error():
        if args.paired:
            first, second = estimate_pair(models[0], models[1], estimator, world, progress=True)
            record = runs.difference_record(run, opened[1], split, first, second)
            return Found(record, run, f"paired-{args.split}", first - second)
        runs.speed_up(run, models[0].count * (args.measure + args.recon) // world.size)
        found = estimate(models[0], estimator, world, progress=True)
    return Found({**runs.bound_record(run, split, found), "variance": args.variance}, run, f"bpd-{args.split}", found)


def quality(args: Eval, world: World) -> Iterator[Found]:
    """One result for each guidance, on the first rank."""
    from bsi.evaluation import runs, samples
    from bsi.metrics import Inception
    from bsi.sampling import levels_of

    run = runs.open_run(args.runs[0], world, not args.weights, args.step, args.precision)
    samples.check_images(run.model)
    label = range(all_labels(run.model, run.path)) if args.labels else None
    sampler = run.model.named(Sampler(args.steps, args.solver, args.grid, variance=args.variance))
    levels_of(run.model.method, sampler)  # raises for an invalid sampler
    guided = [replace(sampler, guidance=each) for each in args.guidance]
    split = runs.open_split(run, args.reference, args.data)
    runs.fitted_variance(run.model, split.dataset, args.variance, args.batch_size)
    runs.speed_up(run, len(guided) * args.num * args.steps // world.size)
    with logged_warnings("bsi eval", world.first):
        extractor = Inception(args.inception, world.device)
    for sampler in guided:
        with logged_warnings("bsi eval", world.first):
            found = samples.measure_quality(
                run.model, split, sampler, args.num, extractor, world, args.seed, label, args.batch_size, args.kid,
                args.precision_recall, show=True,
            )  # fmt: skip
        if found is not None:
            record = samples.quality_record(run, sampler, args.seed, label, found)
            yield Found(record, run, f"fid-{args.reference}")


def eval_text(found: Found) -> str:
    """One result as text."""
    from bsi.data.baselines import baselines_text

    r = found.record
    if found.bound is None:
        made, drawing = r["generation"], r["drawing"]
        classes = f" of {min(r['n'], drawing['classes'])} classes in turn" if drawing["classes"] else ""
        guidance = "" if drawing["guidance"] == 1 else f", guidance {drawing['guidance']:g}"
        how = f"{made['solver']}, {made['evaluations']} evaluations{guidance}, seed {made['seed']}"
        return quality_text(r, f"samples{classes} ({how})")
    if "difference" in r:
        without = f"without pairing the first error would be {r['unpaired_error']:.5f}"
        return f"{found.bound}\n  {r['a']['run']} less {r['b']['run']}; {without}"
    names = ["measurement", "reconstruction", "prior"] + ["change_of_units"] * bool(r["change_of_units"])
    _, scale = unit_of_bounds(r["binned"])
    terms = ", ".join(f"{name.replace('_', ' ')} {scale * r[name]:.5f}" for name in names)
    compared = baselines_text(r["baselines"], r["binned"], found.bound.element)
    return (
        f"{found.bound}\n  {terms}; {r['finite_k'] or 'infinitely many'} rounds of measurement\n"
        f"  {r['images']} {r['split']} samples of {r['dataset']} ({r['dataset_version'][:12]}), {r['evaluations']} "
        f"evaluations, {r['proposal']} levels\n"
        f"  weights {r['weights_sha256'][:12]} at step {r['step']}, {r['precision']}"
        + (f"\n  for comparison: {compared}" if compared else "")
    )


# ---- bsi audit -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Audit:
    """Evaluate the likelihood of the same samples in every way, with standard errors, and check the order.

    The coded size cannot be smaller than the bound for the same steps, and the bound for the paper's steps cannot be
    smaller than that for infinitely many. The likelihood of the probability flow belongs to another model. The exit
    code is 1 if the order is wrong by more than three standard errors.
    """

    run: RunPath
    split: Literal["test", "train"] = "test"  # The samples to evaluate.
    limit: Count = 100  # The number of random samples.
    steps: Annotated[int, Within(1, 100_000)] = 64  # Steps of the finite bound and of the code.
    variance: VarianceKind = "level"  # The predictive variance of each step, fitted to training samples.
    draws: Annotated[int, Within(1, 10_000)] = 1
    """Importance-weighted draws for the flow. More than one needs exact traces, which are slow."""
    data: str | None = None  # Evaluate on this prepared dataset, by name or folder, instead of the one of the run.
    seed: int = 0  # Seed of the noise and the levels.
    device: Device = None
    json: Json = False

    def execute(self) -> int:
        from bsi.evaluation import likelihoods, runs
        from bsi.runtime.distributed import Place, World, pick_device

        run = runs.open_run(self.run, World(Place(), pick_device(self.device, 0)))
        split = runs.open_split(run, self.split, self.data)
        runs.speed_up(run, self.limit * self.steps)
        record = likelihoods.audit(run, split, self.limit, self.steps, self.variance, self.draws, self.seed)
        answer(self.json, record, audit_text(record))
        return 0 if record["ordered"] else 1


def audit_text(record: dict[str, Any]) -> str:
    """The record of an audit as a table and a sentence."""
    rows, samples = record["likelihoods"], record["samples"]
    width = max(len(row["name"]) for row in rows)
    lines = [f"{samples} {record['split']} samples of {record['dataset']}, in bits/dim ± standard error"]
    for row in rows:
        some = "" if row["samples"] == samples else f"  ({row['samples']} samples)"
        lines.append(f"  {row['name']:<{width}}  {row['bits_per_dim']:8.4f}{plus_minus(row['error'])}{some}")
    for each in record["order"]:
        verdict = "as it must be" if each["holds"] else "WRONG: it cannot be negative"
        value = f"{each['difference']:+.4f}{plus_minus(each['error'])}"
        lines.append(f"{each['larger']}, less {each['smaller']}: {value}, {verdict}")
    return "\n".join([*lines, "The flow is another model, and may lie on either side."])


# ---- bsi fid ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fid:
    """Fréchet inception distance between the images A and the reference images B.

    A and B are each a folder of images, an .npy or .npz file of uint8 images, or a prepared dataset (its name or
    folder; NAME:train for the training part, the test part otherwise). The statistics of a
    complete prepared dataset are stored and reused.
    """

    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")]  # The images to evaluate.
    b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")]  # The images to compare with.
    num: Count | None = None  # Take the first this many images of each, instead of all.
    kid: bool = False  # Also the kernel inception distance, with its standard error.
    precision_recall: bool = False  # Also precision and recall, with 3 nearest neighbors.
    weights: Path | None = None
    """The network's weights as safetensors; by default inception-2015-12-05.safetensors in the data cache."""
    device: Device = None
    precision: Literal["float32", "tf32", "float16"] | None = None
    """The precision of convolutions: by default tf32 on a GPU, float32 on the CPU."""
    batch: Count = 64  # Images at a time.
    json: Json = False

    def execute(self) -> int:
        with ExitStack() as stack:
            # Both sets are opened before the network is loaded, so that a typo is reported at once.
            a, b = (images(where, self.batch, self.num, stack) for where in (self.a, self.b))
            from bsi import metrics
            from bsi.runtime.distributed import pick_device

            stack.enter_context(logged_warnings("bsi fid"))
            extractor = metrics.Inception(self.weights, pick_device(self.device, 0), self.precision, self.batch)
            keep = self.kid or self.precision_recall
            if b.version is not None and b.split is not None and self.num is None:
                real = metrics.reference(b.name, b.version, b.split, b.shown(), extractor, keep)
            else:
                real = metrics.Reference(b.name, b.split, b.version, metrics.collect(b.shown(), extractor, keep))
            samples = metrics.collect(a.shown(), extractor, keep or a.n <= metrics.KEPT)
            found = metrics.sample_quality(samples, real, extractor, self.kid, self.precision_recall).record()
        return answer(self.json, {"samples": self.a, **found}, quality_text(found, f"images of {self.a}"))


@dataclass(frozen=True)
class ImageSet:
    """A set of images that is read once, in batches, and the split and version of a prepared dataset."""

    name: str
    n: int
    batches: Iterator[Tensor]
    split: str | None = None
    version: str | None = None

    def shown(self) -> Iterator[Tensor]:
        """The first n images, with progress while they are read. A stored reference is not read."""
        left = self.n
        with Progress(self.name, self.n, "image") as progress:
            for batch in self.batches:
                yield batch[:left]
                progress.advance(len(batch[:left]))
                left -= len(batch)
                if left <= 0:
                    return


def images(where: str, batch: int, num: int | None, stack: ExitStack) -> ImageSet:
    """The first `num` images of a file of arrays, a folder of images or a prepared dataset; `stack` closes files."""
    from bsi.data.files import open_arrays, walk
    from bsi.data.images import SUFFIXES
    from bsi.data.store import open_dataset
    from bsi.evaluation.samples import image_batches
    from bsi.metrics.quality import array_batches, file_batches

    path = Path(where).expanduser()
    if path.suffix in (".npy", ".npz"):
        arrays = stack.enter_context(open_arrays(path))
        names = ["arr_0"] if "arr_0" in arrays else list(arrays)
        if len(names) != 1:
            held = ", ".join(names) or "no arrays"
            raise DataError(f"{path} holds {held}. Save only the images, or name them arr_0.")
        array = stack.enter_context(arrays[names[0]]())
        batches = array_batches(array.blocks(block_bytes=BLOCK_BYTES), batch, str(path))
        return ImageSet(path.name, min(len(array), num or len(array)), batches)
    if path.is_dir() and not (path / "manifest.json").exists():
        files = [path / name for name in walk(path, SUFFIXES)][:num]
        if not files:
            raise DataError(f"{path} holds no images: none of its files ends in {', '.join(SUFFIXES)}.")
        return ImageSet(where, len(files), file_batches(files, batch))
    name, _, split = where.rpartition(":") if where.endswith((":train", ":test")) else (where, "", "test")
    dataset = open_dataset(name)
    rows = dataset.split(split)
    if dataset.bins is None:
        raise DataError(f"{name} is continuous data; FID is for 8-bit images.")
    batches = image_batches(rows, dataset.bins, batch)
    return ImageSet(dataset.name, min(len(rows), num or len(rows)), batches, split, dataset.version)


def quality_text(r: Mapping[str, Any], compared: str) -> str:
    """The record of a distance as text; `compared` describes the images that are not the reference."""
    split = f" ({r['reference_split']})" if r["reference_split"] else ""
    precision = r.get("extractor_precision", r["precision"])
    text = (
        f"{r['metric']} {r['value']:.3f}{plus_minus(r['error'], 3)}: {r['n']} {compared} against {r['reference_n']} of "
        f"{r['reference']}{split}; {r['extractor']} {r['extractor_hash'][:12]}, {r['resize']}, {precision}"
    )
    if kid := r["kid"]:
        value = f"{kid['value']:.6f}{plus_minus(kid['standard_error'], 6)}"
        text += f"\n  KID {value} ({kid['blocks']} x {kid['block_size']} images)"
    if both := r["precision_recall"]:
        text += f"\n  precision {both['precision']:.4f}, recall {both['recall']:.4f} (k = {both['k']})"
    return text
