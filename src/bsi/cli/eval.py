"""`bsi eval RUN --bpd`, `bsi eval RUN --fid`, `bsi eval A B --paired`: what a trained model is worth, with errors."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from bsi.cli.eval_text import text
from bsi.cli.labels import all_labels
from bsi.errors import BsiError, UsageError
from bsi.io import check_writable
from bsi.sampler import Sampler

if TYPE_CHECKING:
    from bsi.elbo import Elbo, Estimator
    from bsi.evaluation.runs import Run, Split
    from bsi.runtime.distributed import World

__all__ = ["Eval", "run"]

TIMEOUT_S = 3600.0  # ranks wait so long for the slowest


@dataclass(frozen=True)
class Eval:
    """Bits per dimension and sample quality of trained models, each with its error; stored in the run folder.

    By default --bpd follows the paper: 5 levels and 2 reconstructions of every test sample. Two errors are told apart:
    that of the Monte Carlo estimate, and that of having these samples and not others. With --proposal fitted the
    same error takes several times fewer evaluations. `torchrun -m -- bsi eval ...` shares the work, for the same
    numbers; its -- keeps torchrun from reading --num as an option of its own. In a run folder that cannot be written,
    the result is printed all the same, with a word of caution.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...", help_behavior_hint="")]
    """A run folder, a file that `bsi export` wrote, or a bundled network (digits); two of them with --paired."""
    bpd: bool = False
    """Bits per dimension."""
    fid: bool = False
    """Sample quality: the Frechet inception distance."""
    paired: bool = False
    """The difference in bits per dimension of two runs, from common random numbers."""
    split: Literal["test", "train"] = "test"
    """Which samples to evaluate the bound of."""
    measure: int = 5
    """Levels for each sample, in a round."""
    recon: int = 2
    """Reconstructions of each sample, in a round."""
    finite_k: int | None = None
    """The bound for this many measurement rounds, rather than infinitely many."""
    proposal: Literal["loguniform", "exact", "fitted"] = "loguniform"
    """How levels are drawn; fitted learns it, with a control variate, from a few evaluations of their own."""
    control: bool = True
    """Use the control variate of --proposal fitted."""
    target_se: float | None = None
    """Evaluate more rounds until the Monte Carlo standard error, in bits per dimension, is this small."""
    per_sample: Path | None = None
    """Also write every sample's bound to this .npz."""
    limit: int | None = None
    """Only this many random samples, the same ones every time."""
    num: int = 50_000
    """Samples to draw for --fid."""
    reference: Literal["test", "train"] = "test"
    """What --fid compares with; the paper compares with the test set."""
    steps: int = Sampler.steps
    """Steps of the solver for --fid; the paper takes 1024 with --solver posterior."""
    solver: str | None = None
    """posterior (the paper's), sde2, ode2, churn or churn:ZETA. By default ode2 with BSI (sde2 where its gamma_0 is
    inf), sde2 with BFN and VDM."""
    grid: str = Sampler.grid
    """Where the steps lie: paper, edm or geometric."""
    labels: bool = False
    """With --fid, ask a network with labels for one class after the other."""
    guidance: tuple[float, ...] = (1.0,)
    """With --labels, how strongly to follow them: 1 is what was learned, 2 exaggerates; several, one after another."""
    kid: bool = False
    """With --fid, also the kernel inception distance."""
    precision_recall: bool = False
    """With --fid, also precision and recall."""
    inception: Path | None = None
    """The weights of the FID network; by default those in the data cache."""
    data: str | None = None
    """Another prepared dataset than the one the run was trained on, by name or folder."""
    seed: int = 0
    """Of the noise and the levels, or of the samples."""
    batch_size: int = 256
    """Samples at a time."""
    step: int | None = None
    """An earlier checkpoint than the last."""
    weights: bool = False
    """The weights themselves rather than their moving average."""
    precision: Literal["auto", "bf16", "float16", "float32"] = "auto"
    """Inside the network; everything around it is float32."""
    device: Literal["cuda", "cpu"] | None = None
    """By default a GPU if there is one."""
    json: bool = False
    """Print the record as one JSON object, or a list of them."""


def run(args: Eval) -> int:
    check(args)
    from bsi.evaluation.runs import save_samples
    from bsi.runtime.distributed import join
    from bsi.runtime.out_of_memory import enough_for_batch

    with join(args.device, TIMEOUT_S) as world, enough_for_batch(args.batch_size, "--batch-size", world.device):
        records: list[Mapping[str, Any]] = []
        try:
            for found in measured(args, world):
                if world.first:
                    records.append(found.record)
                    keep(found)
                    if args.per_sample is not None and found.samples is not None:
                        save_samples(args.per_sample, found.samples)
        finally:  # what was found is told, whatever befalls its file or the next evaluation
            if records:
                print(json.dumps(records[0] if len(records) == 1 else records) if args.json else text(records))
    return 0


@dataclass(frozen=True)
class Found:
    """The record of one evaluation, the run that it is kept with and the name there, and the bounds of all samples."""

    record: Mapping[str, Any]
    run: Run
    what: str
    samples: Elbo | None = None


def measured(args: Eval, world: World) -> Iterator[Found]:
    """What is asked for, one after the other. Every rank goes through it; distances are the first's alone."""
    if args.paired:
        yield paired(args, world)
    if args.bpd:
        yield bound(args, world)
    if args.fid:
        yield from quality(args, world)


def keep(found: Found) -> None:
    """Store a record with its run. Where that cannot be, as in someone else's folder, the result still counts."""
    from bsi.evaluation.runs import store

    try:
        store(found.run, found.what, found.record)
    except BsiError as error:
        print(f"bsi eval: caution: the result is printed and not stored: {error}", file=sys.stderr)


def check(args: Eval) -> None:
    """What cannot mean anything is refused before torch is loaded."""
    if not (args.bpd or args.fid or args.paired):
        raise UsageError("say what to evaluate: --bpd, --fid, both, or --paired for two runs")
    wanted = 2 if args.paired else 1
    if len(args.runs) != wanted or (args.paired and (args.bpd or args.fid)):
        raise UsageError(
            f"--bpd and --fid take one run, --paired two and nothing else: got {len(args.runs)} runs. "
            f"Evaluate several runs one after the other."
        )
    if args.paired and args.target_se is not None:
        raise UsageError("--target-se is for one run: with --paired, raise --measure instead")
    if args.per_sample is not None and not args.bpd:
        raise UsageError("--per-sample writes the bounds of --bpd, and is for nothing else")
    if (args.kid or args.precision_recall) and not args.fid:
        raise UsageError("--kid and --precision-recall come with --fid: ask for that too")
    if args.labels and not args.fid:
        raise UsageError("--labels is for the samples of --fid: the bound is the unconditional one")
    if not args.guidance:
        raise UsageError("--guidance takes one number or more")
    if args.guidance != (1.0,) and not args.labels:
        said = " ".join(f"{each:g}" for each in args.guidance)
        raise UsageError(f"--guidance needs --labels to follow: got --guidance {said} alone")
    for option in ("num", "steps", "batch_size", "limit", "finite_k"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise UsageError(f"--{option.replace('_', '-')} must be at least 1: got {value}")
    if args.target_se is not None and not args.target_se > 0:
        raise UsageError(f"--target-se is a standard error in bits per dimension, positive: got {args.target_se}")
    if args.per_sample is not None:
        check_writable(args.per_sample, "--per-sample")


def bound(args: Eval, world: World) -> Found:
    from bsi.bound import estimate
    from bsi.evaluation import runs

    estimator = _estimator(args)
    run, split = _opened(args, args.runs[0], world)
    model = runs.evaluated(run, split, args.limit)
    runs.speed_up(run, model.count * (args.measure + args.recon) // world.size)
    with runs.own_error():
        found = estimate(model, estimator, world, progress=True)
    return Found(runs.bound_record(run, split, found), run, f"bpd-{args.split}", found)


def paired(args: Eval, world: World) -> Found:
    from bsi.bound import estimate_pair
    from bsi.evaluation import runs

    estimator = _estimator(args)
    (a, split), (b, other) = (_opened(args, path, world) for path in args.runs)
    if split.dataset.version != other.dataset.version:
        raise UsageError(
            f"{a.path.name} and {b.path.name} were trained on different data, and have no samples in common: name one "
            f"dataset with --data"
        )
    first_model, second_model = (runs.evaluated(run, split, args.limit) for run in (a, b))
    with runs.own_error():
        first, second = estimate_pair(first_model, second_model, estimator, world, progress=True)
    return Found(runs.difference_record(a, b, split, first, second), a, f"paired-{args.split}")


def quality(args: Eval, world: World) -> Iterator[Found]:
    """One for each guidance, on the first rank."""
    from bsi.evaluation import runs
    from bsi.evaluation.quality import check_images, measure_quality, quality_record
    from bsi.metrics import Inception
    from bsi.sampling import levels_of

    run = runs.open_run(args.runs[0], world, not args.weights, args.step, args.precision)
    check_images(run.model)
    label = range(all_labels(run.model, run.path)) if args.labels else None
    samplers = [
        Sampler(args.steps, args.solver, args.grid, guidance=each).named(run.model.method) for each in args.guidance
    ]
    levels_of(run.model.method, samplers[0])  # raises what cannot be drawn
    split = runs.open_split(run, args.reference, args.data)
    runs.speed_up(run, len(samplers) * args.num * args.steps // world.size)
    with _cautions(world):
        extractor = Inception(args.inception, world.device)
    for sampler in samplers:
        with _cautions(world):
            found = measure_quality(
                run.model, split, sampler, args.num, extractor, world, args.seed, label, args.batch_size, args.kid,
                args.precision_recall, show=True,
            )  # fmt: skip
        if found is not None:
            yield Found(quality_record(run, sampler, args.seed, label, found), run, f"fid-{args.reference}")


@contextmanager
def _cautions(world: World) -> Iterator[None]:
    """What is warned of inside, told in one line each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            for message in dict.fromkeys(str(warning.message) for warning in caught) if world.first else ():
                print(f"bsi eval: caution: {message}", file=sys.stderr)


def _estimator(args: Eval) -> Estimator:
    from bsi.elbo import Estimator

    return Estimator(
        args.measure, args.recon, args.finite_k, args.proposal, args.control, args.target_se, args.seed, args.batch_size
    )


def _opened(args: Eval, path: Path, world: World) -> tuple[Run, Split]:
    from bsi.evaluation import runs

    run = runs.open_run(path, world, not args.weights, args.step, args.precision)
    return run, runs.open_split(run, args.split, args.data)
