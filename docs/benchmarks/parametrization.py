"""Does a blend of the parametrizations, or clipping x_hat to the data's range, improve the bound? On a CPU, paired.

    python docs/benchmarks/parametrization.py crops --out parametrization-crops --seeds 1 2 3
    python docs/benchmarks/parametrization.py digits --out parametrization-digits --seeds 1 2 3

Each network is a DiT with 98k parameters that trains for 1000 steps of 64 images: 8x8 crops of CIFAR-10 (200,000 from
the training set, 2500 from the test set), or the digits. Networks of one seed share their initialization, the order of
the data, levels and noise. Every network is evaluated as trained, and once more with clipping. Noise prediction of BSI
and BFN is trained with clipping alone, since its bound is infinite without. A difference is paired by image and seed,
and its error has the spread over both.

Finished networks are not trained again: the same command resumes.
"""

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from cifar10_images import cifar10

import bsi
from bsi.backbones.config import DiTConfig
from bsi.bound import estimate
from bsi.data.store import open_dataset
from bsi.elbo import Estimator
from bsi.methods import Method, Parametrization
from bsi.recipe import Ema, Every, Optimizer, Recipe
from bsi.studies.outcome import mean_of_images

CROPPED = {"bsi": bsi.BSI(), "bfn": bsi.BFN(), "vdm": bsi.VDM()}


@dataclass(frozen=True)
class Candidate:
    """A method with a parametrization, trained with or without clipping."""

    method: str
    parametrization: Parametrization
    clips: bool

    @property
    def name(self) -> str:
        return f"{self.method} {self.parametrization}{', clipped' if self.clips else ''}"

    def recipe(self, method: Method, seed: int) -> Recipe:
        return replace(
            bsi.recipes.digits(self.method),
            method=replace(method, clips=self.clips),
            parametrization=self.parametrization,
            backbone=DiTConfig(width=64, depth=2, heads=4, patch=2, dropout=0.0),
            steps=1000,
            optimizer=Optimizer(
                kind="muon", lr=5e-3, beta_2=0.99, weight_decay=1e-2, warmup=100, schedule="cosine", final_lr=1e-5
            ),
            ema=Ema(beta=0.995, start=100),
            every=Every(journal=100, evaluate=0, sample=0, checkpoint=500),
            seed=seed,
        )


CANDIDATES = (
    Candidate("bsi", "edm", False),
    Candidate("bsi", "edm", True),
    Candidate("bsi", "blend", False),
    Candidate("bsi", "blend", True),
    Candidate("bsi", "epsilon", True),
    Candidate("vdm", "epsilon", False),
    Candidate("vdm", "epsilon", True),
    Candidate("vdm", "blend", True),
    Candidate("bfn", "epsilon", True),
)
BASE = CANDIDATES[0]


def crops(part: str) -> torch.Tensor:
    """Four 8x8 crops from the middle of each image; of the test set every sixteenth."""
    x = cifar10(part).numpy()
    found = np.concatenate([x[:, :, 4 * i : 4 * i + 8, 4 * j : 4 * j + 8] for i in (1, 5) for j in (1, 5)])
    return torch.from_numpy(found[::16] if part == "test" else found)


def bounds(model: bsi.Model, test: torch.Tensor) -> dict[str, np.ndarray]:
    """Bits per dimension of each image, as trained and with clipping at evaluation."""
    found, bins = {}, model.kind
    for name in ("as trained", "clipped at evaluation"):
        if name != "as trained":
            model.denoiser.clip = (bins.low, bins.high)
        with torch.no_grad():
            nats = estimate(model.on(test), Estimator(8, 2, batch_size=512)).nats
        found[name] = (nats / (math.prod(test.shape[1:]) * math.log(2))).numpy()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=["crops", "digits"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", default=[c.name for c in CANDIDATES], metavar="NAME")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.data == "crops":
        train, test, bins, methods = crops("train"), crops("test"), bsi.Bins.uint8(), CROPPED
    else:
        digits = open_dataset("digits")
        train, test, bins = (
            torch.from_numpy(digits.train[:].copy()),
            torch.from_numpy(digits.test[:].copy()),
            digits.bins,
        )
        methods = {name: bsi.recipes.digits(name).method for name in CROPPED}
    found: dict[str, dict[str, list[np.ndarray]]] = {}
    for seed in args.seeds:
        for candidate in (c for c in CANDIDATES if c.name in args.only):
            run = args.out / f"{candidate.name.replace(', ', '-').replace(' ', '-')}-{seed}"
            if not (run / "bits.npz").exists():
                bsi.train(candidate.recipe(methods[candidate.method], seed), data=train, kind=bins, out=run)
                np.savez(run / "bits.npz", **bounds(bsi.load(run).eval(), test))
            with np.load(run / "bits.npz") as stored:
                bits = {name: stored[name] for name in stored}
            print(candidate.name, seed, {name: round(float(each.mean()), 4) for name, each in bits.items()}, flush=True)
            for name, each in bits.items():
                found.setdefault(candidate.name, {}).setdefault(name, []).append(each)
    base = np.stack(found[BASE.name]["as trained"]) if BASE.name in found else None
    print("\n| network | as trained | less BSI edm | clipped at evaluation | less BSI edm |\n|---|---|---|---|---|")
    for name, kinds in found.items():
        cells = []
        for bits in map(np.stack, kinds.values()):
            cells += [str(mean_of_images(bits)), "" if base is None else str(mean_of_images(bits - base))]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
