"""Text and binarized MNIST on one GPU: settings chosen on validation data, one evaluation on test data.

    python docs/benchmarks/discrete.py text --data tinyshakespeare.txt --phase baselines search --seconds 45
    python docs/benchmarks/discrete.py text --data tinyshakespeare.txt --phase final --choice NAME --seconds 150
    bsi data mnist --from FOLDER; bsi data binary --from mnist --stochastic
    python docs/benchmarks/discrete.py prepare-mnist --data mnist.npz
    python docs/benchmarks/discrete.py mnist --data mnist.npz --phase search --seconds 60
    python docs/benchmarks/discrete.py mnist --data mnist.npz --phase final --choice NAME --seconds 1080 --stop 540
    python docs/benchmarks/discrete.py mnist --data mnist.npz --phase compare --choice NAME --seconds 60

Prints JSON lines; `s` is the time in seconds. With --tiny the networks are small enough for a CPU.

Text: the first 90 % of the characters are for training, the last 10 % for testing. `search` trains the candidates on
the first 90 % of the training part and evaluates them on the rest of it. `final` trains one of them on the whole
training part and evaluates the test part once. Training samples begin at any character; test samples are consecutive
blocks, each predicted by itself. The unit is bits per character.

MNIST: a pixel of gray value g is 1 with probability g / 255, drawn once (`bsi data binary --stochastic`).
The literature, including Graves et al. (2023), uses another draw from the same distribution, that of Larochelle and
Murray (2011), whose files are not available offline. So the figures here are for other images than theirs, and
comparable up to what the choice of the draw changes. The last 10,000 training images are for validation; `final` trains
on all 60,000. The unit is nats per image.

`--seconds` is the time of one training run: the steps follow from the measured rate, unless --steps is given. `final`
interrupts itself after `--stop` seconds, and the same command resumes; or another run starts with its weights (--save,
--start). `compare` trains with c > 0 (BSI) and with c = 0 (gamma_0 = inf, the first belief of BFN), three seeds
each. The two runs of a seed differ in nothing else: they share the levels, the initial weights, the order of the data
and the noise. The difference has the error of the seeds.
"""

import argparse
import json
import math
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from safetensors.torch import save as to_bytes

import bsi
from bsi.backbones import Backbone, accelerate, build, compute_dtype
from bsi.backbones.config import BackboneConfig, DiTConfig, UNetConfig
from bsi.data.baselines import baselines
from bsi.data.store import SPLITS, open_dataset
from bsi.elbo import Elbo
from bsi.errors import Preempted
from bsi.recipe import Data, Ema, Evaluation, Every, Optimizer, Recipe

BEGAN = time.perf_counter()
PROBE = 60  # steps that measure the rate
PIECE = 15 << 20  # bytes of a file


def report(**values: Any) -> None:
    print(json.dumps({"s": round(time.perf_counter() - BEGAN, 1), **values}), flush=True)


# Methods: levels are drawn log-uniformly in lambda_0 + alpha, and what is learned lies at alpha < 3 for text and at
# alpha < 1 for images of digits, whose neighbors predict a pixel. So lambda_0 is of that order, and gamma_0 makes the
# information c = lambda_0^2 / gamma_0 of the random first belief small: 1e-3 and 1e-4.


@dataclass(frozen=True)
class Task:
    """A data set, and the recipe that the candidates change."""

    kind: bsi.Symbols
    train: np.ndarray
    validation: np.ndarray  # a part of the training data
    rest: np.ndarray  # the other part
    test: np.ndarray
    recipe: Recipe
    candidates: dict[str, BackboneConfig]

    def figures(self, elbo: Elbo) -> dict[str, float]:
        """In nats for images, in bits for each symbol of a text, with the Monte Carlo error and that of the set."""
        unit = elbo.n * math.log(2) if self.test.ndim > 2 else 1.0
        name = "nats_per_image" if self.test.ndim > 2 else "bits_per_char"
        values = {name: elbo.bits_per_dim, "monte_carlo": elbo.monte_carlo_error, "data_set": elbo.data_error}
        return {key: round(unit * value, 5) for key, value in values.items()}


def text(path: Path, length: int, tiny: bool) -> Task:
    written = path.read_text("utf-8")
    letters = tuple(sorted(set(written)))
    kind = bsi.Symbols(len(letters), letters)
    index = kind.index(written)
    first, second = int(0.81 * len(index)), int(0.9 * len(index))

    def rows(part: np.ndarray) -> np.ndarray:
        return part[: len(part) // length * length].reshape(-1, length)

    candidates: dict[str, BackboneConfig] = {
        "dit": DiTConfig(width=384, depth=8, heads=6, patch=1, dropout=0.2, kernel=5),
        "unet": UNetConfig(width=256, levels=3, heads=8, dropout=0.3, coarser=(384, 384)),
        "narrow": UNetConfig(width=192, levels=3, heads=6, dropout=0.2, coarser=(288, 288)),
        "published": DiTConfig(width=384, depth=8, heads=6, patch=1, dropout=0.25),
    }
    if tiny:
        candidates = {
            "dit": DiTConfig(width=96, depth=3, heads=4, patch=1, dropout=0.0, kernel=5),
            "published": DiTConfig(width=96, depth=3, heads=4, patch=1, dropout=0.0),
            "unet": UNetConfig(width=48, levels=1, heads=4, dropout=0.0, coarser=(72,)),
        }
    recipe = Recipe(
        name="text",
        method=bsi.BSI(lambda_0=0.5, gamma_0=250.0, alpha_M=12.0),
        backbone=next(iter(candidates.values())), data=Data("text", windows=True), steps=1,
        batch=32 if tiny else 128,
        optimizer=Optimizer(kind="muon", lr=1e-2 if tiny else 3e-3, beta_2=0.99, weight_decay=0.1, schedule="cosine"),
        evaluation=Evaluation(images=64 if tiny else 1024, measure=8, batch=64 if tiny else 512), virtual_shards=1,
        threads=1 if tiny else None,
    )  # fmt: skip
    return Task(
        kind, *map(rows, (index[:second], index[first:second], index[:first], index[second:])), recipe, candidates
    )


def mnist(path: Path, tiny: bool) -> Task:
    with np.load(path) as stored:
        train, test = (
            np.unpackbits(stored[name], axis=1, count=784).reshape(-1, 1, 28, 28) for name in ("train", "test")
        )
    candidates: dict[str, BackboneConfig] = {
        "deep": UNetConfig(width=128, levels=2, heads=4, dropout=0.3, coarser=(256, 256)),
        "deep-0.1": UNetConfig(width=128, levels=2, heads=4, dropout=0.1, coarser=(256, 256)),
        "flat": UNetConfig(width=128, levels=8, heads=1, dropout=0.2),
    }
    if tiny:
        candidates = {"deep": UNetConfig(width=16, levels=1, heads=2, dropout=0.1, coarser=(32,))}
    recipe = Recipe(
        name="mnist",
        method=bsi.BSI(lambda_0=0.1, gamma_0=100.0, alpha_M=12.0),
        backbone=next(iter(candidates.values())), data=Data("mnist"), steps=1, batch=32 if tiny else 256,
        optimizer=Optimizer(kind="muon", lr=3e-3, beta_2=0.99, weight_decay=0.01, schedule="cosine"),
        evaluation=Evaluation(images=64 if tiny else 10_000, measure=4, batch=64 if tiny else 1000), virtual_shards=1,
        threads=1 if tiny else None,
    )  # fmt: skip
    return Task(bsi.Symbols(2), train, train[50_000:], train[:50_000], test, recipe, candidates)


def prepare_mnist(out: Path) -> None:
    dataset = open_dataset("mnist-binary")
    rows = {split: np.asarray(dataset.split(split)) for split in SPLITS}
    np.savez_compressed(
        out, **{split: np.packbits(ones.reshape(len(ones), -1), axis=1) for split, ones in rows.items()}
    )
    report(version=dataset.version, options=dict(dataset.manifest.options), mean=float(rows["train"].mean()))


def train(
    task: Task, recipe: Recipe, out: Path, data: np.ndarray, test: np.ndarray | None = None, stop: float = math.inf,
    start: Path | None = None,
) -> bsi.Run:  # fmt: skip
    """Train, or resume, and report the journal. Raises Preempted `stop` seconds after the start of the program.

    `start` holds weights that `save` wrote, of the same network.
    """
    network = None
    if start is not None:
        network = build(recipe.backbone, task.kind.latent_shape(data.shape[1:]))
        pieces = b"".join(piece.read_bytes() for piece in sorted(start.glob("weights.*")))
        network.load_state_dict({name: value.float() for name, value in load(pieces).items()})

    def sink(record: dict[str, Any]) -> None:
        figures = {key: round(record[key], 4) for key in ("bits_per_dim", "error", "images_per_s") if key in record}
        if record["event"] != "train" or record["step"] % max(1, recipe.steps // 20) < recipe.every.journal:
            report(run=out.name, event=record["event"], step=record["step"], **figures)
        if time.perf_counter() - BEGAN > stop and record["step"] < recipe.steps:
            signal.raise_signal(signal.SIGTERM)

    return bsi.train(recipe, data, network, out, test=test, kind=task.kind, sinks=[sink])


def save(run: bsi.Run, folder: Path) -> None:
    """The average of the weights in bfloat16, in pieces of at most 15 MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    state = run.model().denoiser.backbone.state_dict()
    content = to_bytes({name: value.bfloat16().contiguous() for name, value in state.items()})
    for i in range(0, len(content), PIECE):
        (folder / f"weights.{i // PIECE:02d}").write_bytes(content[i : i + PIECE])
    report(saved=str(folder), bytes=len(content))


def candidate(task: Task, name: str, out: Path, args: argparse.Namespace) -> Recipe:
    """A candidate's recipe for --steps steps, or for as many as take --seconds."""
    recipe = replace(task.recipe, backbone=task.candidates[name])
    steps, stored = args.steps, out / f"{task.recipe.name}-{name}-rate.json"
    if steps is None:
        if not stored.exists():
            probe = replace(recipe, steps=PROBE, every=Every(journal=PROBE // 3, evaluate=0, sample=0, checkpoint=0))
            run = bsi.train(probe, task.rest, out=out / f"{stored.stem}-probe", kind=task.kind)
            stored.write_text(json.dumps([line["images_per_s"] for line in run.journal()][-1]))
        steps = max(20, int(args.seconds * json.loads(stored.read_text()) / recipe.batch))
    report(candidate=name, backbone=str(recipe.backbone), steps=steps)
    warmup = min(300, steps // 10)
    return replace(
        recipe, steps=steps, optimizer=replace(recipe.optimizer, warmup=warmup),
        ema=Ema(beta=min(0.9995, max(0.0, 1 - 20 / steps)), start=warmup),
        every=Every(journal=max(1, steps // 100), evaluate=max(1, steps // 5), sample=0, checkpoint=max(1, steps // 4)),
    )  # fmt: skip


def evaluated(run: bsi.Run, rows: np.ndarray, measure: int) -> tuple[bsi.Model, Elbo]:
    """The bound of all rows, with the average of the weights."""
    model = run.model()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = model.to(device).denoiser.backbone
    assert isinstance(network, Backbone)
    network.compute_dtype = compute_dtype("auto", device)
    accelerate(network, device)
    x = torch.from_numpy(rows).to(device)
    return model, model.elbo(x, measure=measure, recon=2, batch_size=512 if device.type == "cuda" else 64)


def search(task: Task, args: argparse.Namespace) -> None:
    found = {}
    for name in args.only or task.candidates:
        recipe = candidate(task, name, args.out, args)
        run = train(task, recipe, args.out / f"{recipe.name}-search-{name}", task.rest, task.validation)
        _, elbo = evaluated(run, task.validation[: args.most], args.measure)
        _, seen = evaluated(run, task.rest[: len(task.validation)][: args.most], args.measure)
        found[name] = elbo.bits_per_dim
        report(candidate=name, part="validation", **task.figures(elbo))
        report(candidate=name, part="training", **task.figures(seen))
    report(best=min(found, key=found.__getitem__))


def final(task: Task, args: argparse.Namespace) -> None:
    recipe = candidate(task, args.choice or next(iter(task.candidates)), args.out, args)
    recipe = replace(recipe, seed=args.seed, every=replace(recipe.every, evaluate=0))
    if args.lr is not None:
        recipe = replace(recipe, optimizer=replace(recipe.optimizer, lr=args.lr))
    out = args.out / f"{recipe.name}-final"
    try:
        run = train(task, recipe, out, task.train, stop=args.stop, start=args.start)
    finally:
        if args.save is not None and out.exists():
            save(bsi.Run(out), args.save)
    model, elbo = evaluated(run, task.test[: args.most], args.measure)
    report(part="test", candidate=args.choice, **task.figures(elbo), terms=elbo.record())
    _, seen = evaluated(run, task.train[: len(task.test)][: args.most], args.measure)
    report(part="training", **task.figures(seen))
    if len(task.test.shape) == 2:
        print(*map(task.kind.text, model.sample(2, steps=args.sampling).cpu()), sep="\n---\n", flush=True)


def compare(task: Task, args: argparse.Namespace) -> None:
    recipe = candidate(task, args.choice or next(iter(task.candidates)), args.out, args)
    recipe, differences = replace(recipe, every=replace(recipe.every, evaluate=0)), []
    for seed in range(3):
        nats = {}
        for name, gamma_0 in (("c > 0", recipe.method.gamma_0), ("c = 0", math.inf)):
            own = replace(recipe, method=replace(recipe.method, gamma_0=gamma_0), seed=seed)
            run = train(task, own, args.out / f"{recipe.name}-gamma-{gamma_0:g}-{seed}", task.train)
            _, elbo = evaluated(run, task.test[: args.most], args.measure)
            nats[name] = float(elbo.nats.mean()) / (1 if task.test.ndim > 2 else elbo.n * math.log(2))
            report(method=name, seed=seed, **task.figures(elbo))
        differences.append(nats["c > 0"] - nats["c = 0"])
    error = float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    report(difference=float(np.mean(differences)), standard_error=error, seeds=len(differences))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["text", "mnist", "prepare-mnist"])
    parser.add_argument("--data", type=Path, required=True, help="the text, or the file of prepare-mnist")
    parser.add_argument("--phase", nargs="+", choices=["baselines", "search", "final", "compare"], default=["search"])
    parser.add_argument("--out", type=Path, default=Path("runs/discrete"))
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--stop", type=float, default=math.inf)
    parser.add_argument("--choice", help="the candidate of final and compare; default: the first")
    parser.add_argument("--lr", type=float, help="final: another learning rate")
    parser.add_argument("--save", type=Path, help="final: a folder for the weights, in pieces")
    parser.add_argument("--start", type=Path, help="final: such a folder, whose weights are the initialization")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", type=int, default=32)
    parser.add_argument("--sampling", type=int, default=128)
    parser.add_argument("--most", type=int, help="evaluated samples; default: all")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.task == "prepare-mnist":
        return prepare_mnist(args.data)
    args.out.mkdir(parents=True, exist_ok=True)
    task = text(args.data, args.length, args.tiny) if args.task == "text" else mnist(args.data, args.tiny)
    report(torch=torch.__version__, train=task.train.shape, test=task.test.shape, symbols=task.kind.count)
    try:
        for phase in args.phase:
            if phase == "baselines":
                report(baselines=baselines(task.train, task.test, task.kind))
            else:
                {"search": search, "final": final, "compare": compare}[phase](task, args)
    except Preempted as stopped:
        report(stopped=str(stopped))
        sys.exit(75)


if __name__ == "__main__":
    main()
