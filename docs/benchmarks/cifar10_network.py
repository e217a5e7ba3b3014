"""A CIFAR-10 network, from the choice of its parametrization to compressed test images, in phases that resume.

    python docs/benchmarks/cifar10_network.py search train evaluate code --out FOLDER

search     train candidates on the first 45,000 training images and compare their bounds of the last 5000
train      train the best candidate on all training images; stops after --seconds, and resumes
evaluate   bounds of the test set, for infinitely and finitely many steps: variances x grids
code       compress test images, and decompress them, with the time of the network and of the rest

With --network FILE the last two phases take a network that is trained already, such as one of speedrun.py.
--tiny runs everything at a size for a CPU. Weights and files are copied to $OUT if it is set.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from cifar10_images import cifar10
from safetensors.torch import save_file
from torch import Tensor

import bsi
from bsi import codec
from bsi.backbones import accelerate, compute_dtype, freeze
from bsi.backbones.config import UNetConfig
from bsi.grids import paper_grid
from bsi.recipe import Ema, Every, Recipe
from bsi.rng import subset
from bsi.variance import Variance

CANDIDATES = {
    "edm": ("edm", False),
    "edm, clipped": ("edm", True),
    "blend, clipped": ("blend", True),
    "epsilon, clipped": ("epsilon", True),
}
STARTED = time.monotonic()


def say(**record: object) -> None:
    print(json.dumps({"t": round(time.monotonic() - STARTED, 1), **record}), flush=True)


def recipe(parametrization: str, clips: bool, steps: int, tiny: bool) -> Recipe:
    base = bsi.recipes.cifar10_20min_bpd()
    if tiny:
        base = replace(base, backbone=UNetConfig(width=16, levels=1, dropout=0.0), batch=16)
    short = base.shortened(steps)
    if steps < base.steps:
        short = replace(short, ema=Ema(beta=max(0.5, 1 - 45 / steps), start=min(1000, steps // 4)))
    return replace(
        short,
        method=bsi.BSI(clips=clips),
        parametrization=parametrization,
        every=Every(journal=min(500, steps), evaluate=0, sample=0, checkpoint=10_000),
    )


def bound(model: bsi.Model, data: Tensor, **options: object) -> dict[str, object]:
    began = time.monotonic()
    found = model.elbo(data.to(model.device), batch_size=500, **options)
    return {
        "bits_per_dim": found.bits_per_dim,
        "error": found.monte_carlo_error,
        "data_error": found.data_error,
        "reconstruction": float(found.reconstruction.mean()) / found.n / np.log(2),
        "seconds": round(time.monotonic() - began, 1),
    }


def search(out: Path, args: argparse.Namespace) -> None:
    images = cifar10("train")
    train, held_out = images[:-5000], images[-5000:]
    if args.tiny:
        train, held_out = train[:256], held_out[:32]
    found = {}
    for name, (parametrization, clips) in CANDIDATES.items():
        run = out / name.replace(", ", "-")
        began = time.monotonic()
        bsi.train(recipe(parametrization, clips, args.search_steps, args.tiny), train, out=run, kind=bsi.Bins.uint8())
        model = bsi.load(run).eval().to(args.device)
        spent = time.monotonic() - began
        result = bound(model, held_out, measure=args.levels, recon=4)
        found[name] = result["bits_per_dim"]
        say(candidate=name, training=round(spent, 1), **result)
        if not clips:
            model.denoiser.clip = (-1.0, 1.0)
            say(candidate=name + ", clipped at evaluation", **bound(model, held_out, measure=args.levels, recon=4))
        del model
        torch.cuda.empty_cache()
    best = min(found, key=lambda name: found[name])
    (out / "choice.json").write_text(json.dumps({"best": best, "found": found}))
    say(best=best)


def train(out: Path, args: argparse.Namespace) -> None:
    best = json.loads((out / "choice.json").read_text())["best"]
    deadline = STARTED + args.seconds

    def stop(record: object) -> None:
        if time.monotonic() > deadline:
            signal.raise_signal(signal.SIGTERM)

    images = cifar10("train")
    chosen = recipe(*CANDIDATES[best], args.steps, args.tiny)
    try:
        bsi.train(
            chosen, images[:256] if args.tiny else images, out=out / "network", kind=bsi.Bins.uint8(), sinks=[stop]
        )
        say(trained=best)
    except SystemExit as stopped:
        say(stopped=str(stopped))
    for name in ("journal.jsonl", "run.json"):
        if "OUT" in os.environ:
            shutil.copy(out / "network" / name, Path(os.environ["OUT"]) / name)


def write_parts(weights: dict[str, Tensor], folder: Path) -> None:
    """Write weights in files of at most 15.5 MiB."""
    parts, size = [{}], 0
    for name, tensor in sorted(weights.items()):
        size += tensor.numel() * 4
        if size > 15.5 * 2**20:
            parts.append({})
            size = tensor.numel() * 4
        parts[-1][name] = tensor.detach().cpu().float().contiguous()
    for number, part in enumerate(parts):
        save_file(part, folder / f"network-{number}.safetensors")


class OnPapersGrid(Variance):
    """The same variance, with steps on the paper's grid."""

    def grid(self, k: int) -> Tensor:
        return paper_grid(self.method, k)


def evaluate(out: Path, args: argparse.Namespace) -> None:
    model = bsi.load(args.network or out / "network").eval().to(args.device)
    network = model.denoiser.backbone
    if args.network is None and "OUT" in os.environ:
        write_parts(network.state_dict(), Path(os.environ["OUT"]))
    network.compute_dtype = compute_dtype("auto", torch.device(args.device))
    accelerate(network, torch.device(args.device))
    freeze(network)
    test, training = cifar10("test"), cifar10("train")
    if args.tiny:
        test, training = test[:32], training[:64]
    say(what="infinite", **bound(model, test, measure=2 if args.tiny else 10, recon=4))
    some = test[subset(len(test), args.images)]
    say(what="infinite, subset", **bound(model, some, measure=args.levels, recon=4))
    fitting = training[subset(len(training), args.fitting)].to(model.device)
    for kind in (None, "level", "dct", "learned"):
        began = time.monotonic()
        fitted = None if kind is None else model.fit_variance(fitting, kind, batch_size=500)
        spent = round(time.monotonic() - began, 1)
        grids = {"paper": None} if fitted is None else {"fitted": fitted}
        if kind == "dct":
            grids["paper"] = OnPapersGrid(**vars(fitted))
        for (grid, variance), k in itertools.product(grids.items(), (64,) if args.tiny else (16, 64, 256)):
            say(
                what=f"finite k={k}, variance {kind}, grid {grid}",
                fit_s=spent,
                last_level=None if variance is None else float(variance.grid(k)[-1]),
                **bound(model, some, measure=args.levels, recon=4, finite_k=k, variance=variance),
            )


class Timer:
    """The time that a network takes."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.began, self.seconds = 0.0, 0.0
        network.register_forward_pre_hook(self.before)
        network.register_forward_hook(self.after)

    def now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.monotonic()

    def before(self, *_: object) -> None:
        self.began = self.now()

    def after(self, *_: object) -> None:
        self.seconds += self.now() - self.began

    def lap(self) -> float:
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return round(seconds, 1)


def code(out: Path, args: argparse.Namespace) -> None:
    model = bsi.load(args.network or out / "network").eval().to(args.device)
    training, test = cifar10("train"), cifar10("test")
    fitting = training[subset(len(training), args.fitting)].to(model.device)
    variance = model.fit_variance(fitting, args.variance, batch_size=500)
    some = test[: args.coded]
    done, network = [0, time.monotonic()], Timer(model.denoiser)

    def watch(step: int, x_hat: torch.Tensor) -> None:
        done[0] += len(x_hat)
        if time.monotonic() - done[1] > 20:
            done[1] = time.monotonic()
            say(evaluations=done[0])

    began = time.monotonic()
    packed = codec.compress(model, some, steps=args.k, variance=variance, batch_size=args.batch, watch=watch)
    encoded = time.monotonic() - began
    say(
        samples=packed.samples,
        plain=packed.plain,
        net=packed.net_bits_per_dim,
        gross=packed.gross_bits_per_dim,
        bytes=len(packed.blob),
        initial_bits=packed.initial_bits,
        batches=len(packed.batches),
        largest_batch=max(batch.samples for batch in packed.batches),
        encode_s=round(encoded, 1),
        network_s=network.lap(),
    )
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "coded.bsi").write_bytes(packed.blob)
    say(
        what="bound of the same images",
        **bound(model, some, measure=args.levels, recon=4, finite_k=args.k, variance=variance),
    )
    began, done[0], _ = time.monotonic(), 0, network.lap()
    decoded = codec.decompress(model, packed.blob, watch)
    say(equal=torch.equal(decoded, some), decode_s=round(time.monotonic() - began, 1), network_s=network.lap())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phases", nargs="+", choices=["search", "train", "evaluate", "code"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--network", type=Path, help="a run folder or an exported network")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop training this long after the start, and save")
    parser.add_argument("--search-steps", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=26_000)
    parser.add_argument("--levels", type=int, default=10)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--fitting", type=int, default=2000)
    parser.add_argument("--coded", type=int, default=1000)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--variance", default="dct", help="of the code")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    for phase in args.phases:
        say(phase=phase)
        globals()[phase](args.out, args)


if __name__ == "__main__":
    main()
