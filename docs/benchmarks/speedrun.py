"""The speedrun: settings chosen on held-out training images, then records. docs/speedrun.md has the rules.

    python docs/benchmarks/speedrun.py search bpd --seconds 60 --out FOLDER
    python docs/benchmarks/speedrun.py tune fid --choice "weight=sigmoid" --guidance 1.4 2.0 --seconds 60 --out FOLDER
    python docs/benchmarks/speedrun.py record bpd --choice "batch=64 lr=2e-3" --width 0.1 --seed 0 --out FOLDER

search     trains candidates on the first 45,000 training images, all for --seconds, and evaluates the last 5000 under
           several averages of the weights: bits per dimension, or FID (also against the 45,000)
tune       evaluates one of these networks again, with other averages, guidances and steps of the sampler
record     trains a choice on all training images for --seconds, and evaluates the test set once

A candidate is a list of changes of the base setting, "" for none: see `Setting`. The candidates of a search are those
of the table, or --only. Every number of steps follows from --seconds and the rate of the network, which a probe of 60
steps measures once, so that candidates are compared at equal time.

Prints JSON lines; `s` is the time in seconds. `search` adds each result to FOLDER/GOAL.json and skips what is there.
After --stop seconds the program saves and exits with code 75, and the same command resumes, also on another machine
if FOLDER is taken there: for a record with --save FOLDER, which writes its state in bfloat16 (carry.py), or in the end
the network, and --start FOLDER. With $OUT set, results are copied there. --tiny is for a CPU.
"""

import argparse
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from carry import half, pack, pack_run, unpack
from cifar10_images import cifar10, cifar10_labels

import bsi
from bsi.backbones import accelerate, compute_dtype, freeze
from bsi.backbones.config import UNetConfig, resolve
from bsi.backbones.costs import cost
from bsi.elbo import Elbo
from bsi.errors import Preempted
from bsi.evaluation.samples import drawn_images, image_batches
from bsi.metrics import Features, Inception, collect, frechet_distance, frechet_error
from bsi.pictures import grid
from bsi.recipe import Ema, Every, Objective, Optimizer, Recipe
from bsi.runtime.distributed import Place, World
from bsi.runtime.ema import reconstruct
from bsi.runtime.export import export, read_trained, write_export
from bsi.sampler import Sampler

BEGAN = time.monotonic()
HELD_OUT = 5000
PROBE = 60  # steps that measure the rate
OVERHEAD_S = 80  # of a candidate: starting, compiling and evaluating
POWERS = (0.05, 0.15)  # relative widths of stored averages; those between and near them are mixes of these
CLASSES = 10
BATCH = 1000  # images of an evaluation
BINS = bsi.Bins.uint8()
NETWORK = "network.safetensors"


@dataclass(frozen=True)
class Setting:
    """What candidates change."""

    network: str = "unet-128x8"
    dropout: float = 0.0
    batch: int = 128
    lr: float = 3e-3
    momentum: float = 0.95
    decay: float = 1e-2
    clip: float = 1.0
    flat: float = 0.0  # share of the steps before the rate falls, linearly then; 0: a cosine
    parametrization: str = "blend"
    clips: int = 1  # whether x_hat is clipped to the data's range
    weight: str = "elbo"
    flips: int = 1

    def changed(self, words: str) -> "Setting":
        """The setting with changes such as "batch=64 lr=2e-3"."""
        known = {f.name: type(getattr(self, f.name)) for f in fields(self)}
        pairs = [word.partition("=")[::2] for word in words.split()]
        if wrong := [name for name, _ in pairs if name not in known]:
            raise SystemExit(f"unknown settings {', '.join(wrong)}. Use {', '.join(known)}.")
        return replace(self, **{name: known[name](value) for name, value in pairs})

    def recipe(self, goal: str, steps: int, seed: int = 0, tiny: bool = False) -> Recipe:
        base = bsi.recipes.cifar10_20min_bpd() if goal == "bpd" else bsi.recipes.cifar10_20min_fid()
        network = resolve(self.network)
        network = replace(network, heads=4 if network.coarser else 1, dropout=self.dropout)
        schedule = Optimizer if self.flat == 0 else type("Trapezoid", (Trapezoid,), {"flat": self.flat})
        optimizer = schedule(
            lr=self.lr, kind="muon", momentum=self.momentum, beta_2=0.99, weight_decay=self.decay, clip=self.clip,
            warmup=min(300, steps // 50), schedule="cosine",
        )  # fmt: skip
        recipe = replace(
            base, name=f"cifar10-speedrun-{goal}", steps=steps, batch=self.batch, seed=seed, optimizer=optimizer,
            method=bsi.BSI(clips=bool(self.clips)), parametrization=self.parametrization,
            backbone=network, data=replace(base.data, flips=bool(self.flips)),
            objective=Objective(weight=self.weight, levels="expected"),
            ema=Ema(max(0.5, 1 - 45 / steps), min(1000, steps // 4), POWERS, snapshot=max(1, math.ceil(steps / 4))),
            every=Every(journal=max(1, min(100, steps // 5)), evaluate=0, sample=0, checkpoint=max(1, steps // 3)),
        )  # fmt: skip
        if tiny:
            coarser = (16,) if network.coarser else ()
            recipe = replace(recipe, backbone=UNetConfig(8, 1, heads=1, dropout=0.0, coarser=coarser), batch=16)
        return recipe


class Trapezoid(Optimizer):
    """A constant rate after the warm-up, which then falls linearly to 0."""

    flat = 0.5

    def rate(self, step: int, steps: int) -> float:
        if step < self.warmup:
            return super().rate(step, steps)
        return self.lr * min(1.0, (steps - step) / max(1.0, (1 - self.flat) * steps))


# ---- The candidates --------------------------------------------------------------------------------------------------

# One change at a time, what may bring most first. Images/s of the networks in training: 128x8 6900 (measured);
# 128-256-256x2 8460 at batch 512 (measured); others by `bsi.backbones.costs.cost` at 320 TFLOP/s: 128-256x3 7100,
# 128x12 4900, 192x4 5250, 128-256-256x3 6650, 192-256-256x2 6070.
#
# bpd: a quarter of VDM's levels reached 2.885 in 885 s without overfitting: the loss on training images was 2.88. So
# capacity and speed of learning decide. Coarser resolutions give three times the parameters for the same operations;
# their one trial had batches of 512 and an average that was too long, and its loss was 0.03 worse after 795 steps than
# that of the flat network after 2037. Muon takes large rates, and small batches more of them.
# fid: sigmoid weights had the lowest FID of all in the study `weighting` (72.0, EDM's 77.5), with another network and
# without labels. FID depends more than bits on the length of the average: every candidate is evaluated at several.
BASES = {
    "bpd": Setting(),
    "fid": Setting("unet-128-256-256x2", batch=512, parametrization="edm", clips=0, weight="edm"),
}
CANDIDATES = {
    "bpd": [
        "", "network=unet-128-256-256x2", "network=unet-128-256x3", "batch=64 lr=2e-3", "lr=6e-3", "flat=0.5",
        "network=unet-128x12", "network=unet-192x4", "batch=256 lr=4e-3", "lr=1.5e-3", "clip=inf", "decay=0.1",
        "momentum=0.98",
    ],
    "fid": [
        "", "weight=sigmoid", "batch=256 lr=2e-3", "parametrization=blend clips=1", "network=unet-128-256-256x3",
        "lr=6e-3", "flat=0.5", "network=unet-192-256-256x2", "dropout=0.1",
    ],
}  # fmt: skip
WIDTHS = {"bpd": (0.0, 0.05, 0.1, 0.15, 0.2), "fid": (0.0, 0.05, 0.1)}  # of averages; 0: the trainer's own


# ---- Training --------------------------------------------------------------------------------------------------------


def say(**record: object) -> None:
    print(json.dumps({"s": round(time.monotonic() - BEGAN, 1), **record}), flush=True)


@dataclass(frozen=True)
class Images:
    """Training images with their labels, and those that results are judged by."""

    train: torch.Tensor
    labels: np.ndarray
    judge: torch.Tensor
    part: str  # which images judge: held_out or test

    @classmethod
    def read(cls, held_out: bool, tiny: bool) -> "Images":
        train, labels = cifar10("train"), cifar10_labels("train")
        if held_out:
            train, labels, judge = train[:-HELD_OUT], labels[:-HELD_OUT], train[-HELD_OUT:]
        else:
            judge = cifar10("test")
        part = "held_out" if held_out else "test"
        return cls(train[:256], labels[:256], judge[:32], part) if tiny else cls(train, labels, judge, part)


def train(recipe: Recipe, images: Images, run: Path, stop: float = math.inf) -> None:
    """Train, or resume. Raises Preempted `stop` seconds after the start of the program."""

    def sink(record: dict[str, Any]) -> None:
        tenth = recipe.steps / 10
        if record["event"] == "train" and record["step"] % tenth < recipe.every.journal:
            figures = {name: round(record[name], 5) for name in ("loss", "bits_per_dim", "images_per_s")}
            say(step=record["step"], of=recipe.steps, **figures)
        if time.monotonic() - BEGAN > stop and record["step"] < recipe.steps:
            signal.raise_signal(signal.SIGTERM)

    labels = images.labels if recipe.data.labels else None
    bsi.train(recipe, images.train, out=run, kind=BINS, labels=labels, sinks=[sink])


def rate(setting: Setting, goal: str, images: Images, args: argparse.Namespace) -> float:
    """Images per second in training, measured once for each network and batch."""
    path, key = args.out / "rates.json", f"{goal} {setting.network} {setting.batch} {setting.dropout}"
    known = json.loads(path.read_text()) if path.exists() else {}
    if key not in known:
        probe = setting.recipe(goal, 6 if args.tiny else PROBE, tiny=args.tiny)
        probe = replace(probe, every=replace(probe.every, journal=max(1, probe.steps // 3), checkpoint=0))
        run = args.out / "probe"
        shutil.rmtree(run, ignore_errors=True)
        train(probe, images, run)
        known[key] = [line["images_per_s"] for line in journal(run) if line["event"] == "train"][-1]
        path.write_text(json.dumps(known))
        config, classes = probe.backbone, CLASSES if probe.data.labels else 0
        flops = cost(config, (3, 32, 32), 256, classes).flops
        say(network=setting.network, batch=probe.batch, images_per_s=known[key], tflops=3e-12 * flops * known[key])
    return known[key]


def timing(run: Path) -> dict[str, float]:
    """Seconds from the first step to the last, without starting, compiling and the time between two stretches."""
    lines = [line for line in journal(run) if line["event"] == "train"]
    batch = json.loads((run / "run.json").read_text())["recipe"]["batch"]
    median = float(np.median([line["images_per_s"] for line in lines]))
    total = lines[0]["step"] * batch / median
    for before, after in itertools.pairwise(lines):
        expected, spent = (after["step"] - before["step"]) * batch / median, after["time"] - before["time"]
        total += expected if spent > 3 * expected + 8 else spent
    return {"seconds": round(total, 1), "images_per_s": round(median, 1)}


def journal(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def network_of(run: Path, width: float, args: argparse.Namespace) -> bsi.Model:
    """The model with the trainer's average of the weights (0), or with one of a relative width, in its fastest form.

    The network of a record is the file that `network_file` wrote, with its average.
    """
    file = run / NETWORK
    model = bsi.load(file if file.exists() else run)
    network = model.denoiser.backbone
    if width and not file.exists():
        network.load_state_dict({**network.state_dict(), **reconstruct(run, width)[1]})
    model.to(args.device)
    network.compute_dtype = compute_dtype("auto", args.device)
    accelerate(network, args.device)
    freeze(network)
    return model


def bits(model: bsi.Model, images: torch.Tensor, args: argparse.Namespace) -> Elbo:
    return model.elbo(images.to(args.device), measure=args.measure, recon=args.recon, batch_size=BATCH)


def figures(elbo: Elbo) -> dict[str, float]:
    found = {"bits_per_dim": elbo.bits_per_dim, "error": elbo.monte_carlo_error, "data_error": elbo.data_error}
    return {name: round(value, 5) for name, value in found.items()}


def distances(
    model: bsi.Model, guidance: float, num: int, steps: int, inception: Inception, references: dict[str, Features],
    args: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """FID of samples of all classes in turn against each reference, with the error from drawing these samples."""
    began, sampler = time.monotonic(), model.named(Sampler(steps=steps, guidance=guidance))
    world, classes = World(Place(), args.device), range(CLASSES)
    drawn = collect(drawn_images(model, sampler, num, world, BATCH, 0, classes), inception, keep=True)
    assert drawn.vectors is not None
    found: dict[str, Any] = {"samples": num, "guidance": guidance, "steps": steps, "solver": sampler.solver}
    for name, real in references.items():
        found[f"fid_{name}"] = round(frechet_distance(drawn.moments, real.moments), 4)
        if args.phase != "search":
            found[f"error_{name}"] = round(frechet_error(drawn.vectors, real.moments), 4)
    return found | {"seconds": round(time.monotonic() - began, 1)}


def reference_features(images: dict[str, torch.Tensor], inception: Inception) -> dict[str, Features]:
    return {name: collect(image_batches(part.numpy(), BINS, BATCH), inception) for name, part in images.items()}


def evaluations(
    goal: str, run: Path, images: Images, widths: tuple[float, ...], args: argparse.Namespace, tools: list[Any]
) -> Iterator[tuple[dict[str, Any], Elbo | None]]:
    """Figures of a network under each average of its weights, and with each guidance and number of steps."""
    for width in widths:
        model = network_of(run, width, args)
        if goal == "bpd":
            elbo = bits(model, images.judge, args)
            yield {"width": width, **figures(elbo)}, elbo
            continue
        if not tools:  # kept for the next network
            inception = Inception(device=args.device)
            known = {images.part: images.judge, "train": images.train[: 64 if args.tiny else None]}
            tools += [inception, reference_features(known, inception)]
        for steps in args.steps:
            for guidance in args.guidance:
                found = distances(model, guidance, args.num, steps, tools[0], tools[1], args)
                yield {"width": width, **found}, None


# ---- The phases ------------------------------------------------------------------------------------------------------


def folder_of(words: str) -> str:
    return words.replace(" ", "-").replace("=", "-") or "base"


def search(goal: str, args: argparse.Namespace) -> None:
    images, path, tools = Images.read(held_out=True, tiny=args.tiny), args.out / f"{goal}.json", list[Any]()
    results = json.loads(path.read_text()) if path.exists() else {}
    for words in CANDIDATES[goal] if args.only is None else args.only:
        key = f"{words or 'base'}, {args.seconds:g} s, seed {args.seed}"
        if key in results:
            continue
        if time.monotonic() - BEGAN + args.seconds + OVERHEAD_S > args.stop:
            raise Preempted(f"no time for {key}; the same command resumes")
        setting = BASES[goal].changed(words)
        steps = max(8, int(args.seconds * rate(setting, goal, images, args) / (16 if args.tiny else setting.batch)))
        run = args.out / goal / f"{folder_of(words)}-{args.seconds:g}-{args.seed}"
        train(setting.recipe(goal, steps, args.seed, args.tiny), images, run)
        tried = list[dict[str, Any]]()
        nats: list[float] = []
        quality = "bits_per_dim" if goal == "bpd" else "fid_held_out"
        for found, elbo in evaluations(goal, run, images, WIDTHS[goal], args, tools):
            say(candidate=words, **found)
            tried.append(found)
            if elbo is not None and found[quality] == min(each[quality] for each in tried):
                nats = [round(value, 1) for value in elbo.nats.tolist()]
        best = min(tried, key=lambda each: each[quality])
        results[key] = {**timing(run), "steps": steps, "best": best, "all": tried, "nats": nats}
        path.write_text(json.dumps(results))
        keep(path)
        say(candidate=words, **timing(run), trained_steps=steps, **best)
    table(results, goal)


def table(results: dict[str, Any], goal: str) -> None:
    """All results, the best first, with paired differences to the first one."""
    quality, base = ("bits_per_dim" if goal == "bpd" else "fid_held_out"), next(iter(results.values()), None)
    for key, each in sorted(results.items(), key=lambda item: item[1]["best"][quality]):
        line = {"candidate": key, quality: each["best"][quality], "width": each["best"]["width"]}
        if each["nats"] and len(each["nats"]) == len(base["nats"]):
            gap = (np.array(each["nats"]) - np.array(base["nats"])) / (3072 * math.log(2))
            line |= {"less_base": round(gap.mean(), 5), "paired_error": round(gap.std(ddof=1) / len(gap) ** 0.5, 5)}
        say(**line)


def tune(goal: str, args: argparse.Namespace) -> None:
    images = Images.read(held_out=True, tiny=args.tiny)
    run = args.out / goal / f"{folder_of(args.choice)}-{args.seconds:g}-{args.seed}"
    for found, _ in evaluations(goal, run, images, args.widths or WIDTHS[goal], args, []):
        say(candidate=args.choice, **found)


def record(goal: str, args: argparse.Namespace) -> None:
    images, setting = Images.read(held_out=False, tiny=args.tiny), BASES[goal].changed(args.choice)
    run = args.out / f"record-{goal}-{folder_of(args.choice)}-{args.seed}"
    plan = run / "plan.json"
    if args.start is not None and not run.exists():
        unpack(args.start, args.out)
        if not plan.exists():
            raise SystemExit(f"{args.start} is not of {run.name}.")
    if not plan.exists():
        batch = 16 if args.tiny else setting.batch
        steps = args.train_steps or int(args.seconds * rate(setting, goal, images, args) / batch)
        run.mkdir(parents=True)
        plan.write_text(json.dumps({"goal": goal, "choice": args.choice, "seed": args.seed, "steps": steps}))
    steps = json.loads(plan.read_text())["steps"]
    if not (run / NETWORK).exists():
        try:
            train(setting.recipe(goal, steps, args.seed, args.tiny), images, run, args.stop)
        except BaseException:
            if args.save is not None and (run / "checkpoints").exists():
                say(saved_state=pack_run(run, args.save, args.carry))
            raise
        finally:
            keep(run / "journal.jsonl", f"{run.name}.jsonl")
        network_file(run, args.width)
    if args.save is not None:  # a machine that is lost from here on loses the evaluation alone
        files = [run / name for name in (NETWORK, "plan.json", "journal.jsonl", "run.json")]
        say(saved_network=pack(files, args.save, run.parent))
    if (run / "record.json").exists():
        raise SystemExit(f"{run} is evaluated already: the test set is used once.")
    found = {"goal": goal, "choice": args.choice, "seed": args.seed, "steps": steps, "setting": vars(setting)}
    found |= {"training": timing(run), "torch": torch.__version__, "device": device_name(args)}
    say(**found)
    found["evaluations"] = []
    for each, elbo in evaluations(goal, run, images, (args.width,), args, []):
        say(test=True, **each)
        found["evaluations"].append(each if elbo is None else {**each, **elbo.record()})
    (run / "record.json").write_text(json.dumps(found, indent=2))
    model = network_of(run, args.width, args)
    label = range(CLASSES) if goal == "fid" else None
    shown = model.sample(20 if args.tiny else 100, guidance=args.guidance[0] if goal == "fid" else 1.0, label=label)
    grid(shown.cpu().numpy(), CLASSES).save(run / "samples.png")
    keep(run / "record.json", f"{run.name}.json")
    keep(run / "samples.png", f"{run.name}.png")


def network_file(run: Path, width: float) -> Path:
    """The network in bfloat16 as one file, for `bsi eval` and `bsi sample`."""
    trained = read_trained(export(run, run / NETWORK, sigma_rel=width or None))
    weights = {name: half(tensor) for name, tensor in trained.weights.items()}
    return write_export(run / NETWORK, replace(trained, weights=weights))


def device_name(args: argparse.Namespace) -> str:
    return torch.cuda.get_device_name() if args.device.type == "cuda" else "CPU"


def keep(path: Path, name: str | None = None) -> None:
    if "OUT" in os.environ and path.exists():
        shutil.copy(path, Path(os.environ["OUT"]) / (name or path.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=["search", "tune", "record"])
    parser.add_argument("goal", choices=["bpd", "fid"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training; 880 for a record")
    parser.add_argument("--stop", type=float, default=math.inf, help="seconds after the start of the program")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", help="search: candidates in place of the table's")
    parser.add_argument("--choice", default="", help="tune, record: a candidate")
    parser.add_argument("--train-steps", type=int, help="record: steps, in place of --seconds and a probe")
    parser.add_argument("--width", type=float, default=0.0, help="record: the average of the weights")
    parser.add_argument("--widths", type=float, nargs="+", help="tune: averages of the weights")
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.7])
    parser.add_argument("--steps", type=int, nargs="+", default=[15], help="of the sampler")
    parser.add_argument("--num", type=int, help="samples of a FID; default: 5000, for a record 50,000")
    parser.add_argument("--measure", type=int, help="levels of each image; default: 6, for a record 20")
    parser.add_argument("--save", type=Path, help="record: a folder for the state, in bfloat16")
    parser.add_argument("--carry", nargs="+", default=[], help="groups of the state: model, ema, optimizer, powers")
    parser.add_argument("--start", type=Path, help="record: such a folder to resume from")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    official = args.phase == "record"
    args.num = args.num or (32 if args.tiny else 50_000 if official else 5000)
    args.measure = args.measure or (2 if args.tiny else 20 if official else 6)
    args.recon = 4 if official else 2
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        globals()[args.phase](args.goal, args)
    except Preempted as stopped:
        say(stopped=str(stopped))
        sys.exit(75)


if __name__ == "__main__":
    main()
