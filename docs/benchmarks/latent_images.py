"""Pictures of 128 x 128 pixels in latent space: an autoencoder, a model of its latents, distances and the bound.

    python docs/benchmarks/latent_images.py prepare --photos .gpu/photos.zip       # needs apt-get and dpkg-deb
    python docs/benchmarks/latent_images.py autoencoder latents evaluate --photos .gpu/photos.zip --out results

The photographs are wallpapers of Debian packages with free licenses (their copyright files are in the archive). Each is
cut at random places and at three scales; the strip on its right is for testing. Phases that are complete in --work are
skipped, and training resumes. With `--minutes` the number of steps of both trainings follows from a probe. `--tiny`
runs everything in a minute on a CPU, with generated pictures unless --photos exists.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import tempfile
import time
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import bsi
from bsi.backbones import resolve
from bsi.data.arrays import Arrays
from bsi.data.prepare import prepare
from bsi.data.store import Dataset, open_dataset
from bsi.evaluation.runs import Split, open_run, speed_up
from bsi.evaluation.samples import image_batches, measure_quality
from bsi.io import data_folder
from bsi.metrics import Inception, Reference, collect, sample_quality
from bsi.pictures import grid
from bsi.recipe import Recipe
from bsi.rng import subset
from bsi.runtime.autoencoders import open_autoencoder, plan_latents
from bsi.runtime.distributed import World, find_place, pick_device

PACKAGES = (
    "lomiri-wallpapers-16.04", "lomiri-wallpapers-20.04", "mate-backgrounds", "plasma-workspace-wallpapers",
    "ukui-wallpapers",
)  # fmt: skip
LONGEST, QUALITY = 2560, 90  # pixels of a side, and the quality of WebP
DRAWN = "Ubuntu-Mate"  # logos
LEAST_BYTES = 200_000  # of a picture in a package: smaller ones are drawings
SCALES = (1.0, 0.5, 0.3)
STRIP = 0.2  # the share of each picture on its right that is for testing
FLAT = 6.0  # the standard deviation of a crop below which it shows nothing
PROBE = 150  # steps
SEED = 0


def photos(path: Path) -> None:
    """Download the packages and write their largest version of each picture as WebP, with the copyright files."""
    found: dict[str, tuple[int, Path]] = {}
    Image.MAX_IMAGE_PIXELS = None
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(path, "w") as archive:
        folder = Path(name)
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
        for package in sorted(folder.glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(package), str(folder / package.stem)], check=True)
        for file in sorted(folder.rglob("*")):
            if file.name == "copyright":
                archive.write(file, f"{file.parent.name}.copyright")
            if file.suffix not in (".jpg", ".png") or file.is_symlink() or file.stat().st_size < LEAST_BYTES:
                continue
            with Image.open(file) as image:
                pixels, opaque = image.width * image.height, image.mode == "RGB"
            shown = file.parent.parent.parent.name if file.parent.name.startswith("images") else file.stem.split("_")[0]
            if opaque and not shown.startswith(DRAWN) and pixels > found.get(shown, (0, file))[0]:
                found[shown] = (pixels, file)
        for shown, (_, file) in sorted(found.items()):
            with Image.open(file) as opened:
                image = opened.convert("RGB")
            image.thumbnail((LONGEST, LONGEST), Image.Resampling.LANCZOS)
            data = io.BytesIO()
            image.save(data, "WEBP", quality=QUALITY)
            archive.writestr(f"{shown}.webp", data.getvalue())
            print(f"{shown}: {image.width} x {image.height}, {len(data.getvalue()):,} bytes")
    print(f"{path}: {len(found)} pictures, {path.stat().st_size:,} bytes")


def pictures(path: Path) -> list[Image.Image]:
    if path.exists():
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".webp")]
            return [Image.open(io.BytesIO(archive.read(name))).convert("RGB") for name in names]
    noise = np.random.default_rng(SEED).normal(size=(4, 24, 48, 3)) * 60 + 128
    small = [Image.fromarray(np.clip(each, 0, 255).astype(np.uint8)) for each in noise]
    return [image.resize((480, 240), Image.Resampling.BICUBIC) for image in small]


def crops(images: list[Image.Image], size: int, count: int, testing: bool) -> np.ndarray:
    """Random squares at random scales, from the test strips or from the rest."""
    generator, found = np.random.default_rng([SEED, testing]), list[np.ndarray]()
    scaled = [
        image.resize((round(s * image.width), round(s * image.height)), Image.Resampling.LANCZOS)
        for image in images
        for s in SCALES
    ]
    arrays = [np.asarray(image).transpose(2, 0, 1) for image in scaled]
    while len(found) < count:
        array = arrays[generator.integers(len(arrays))]
        _, height, width = array.shape
        cut = round((1 - STRIP) * width)
        left, right = (cut, width - size) if testing else (0, cut - size)
        if right < left or height < size:
            continue
        x, y = int(generator.integers(left, right + 1)), int(generator.integers(0, height - size + 1))
        crop = array[:, y : y + size, x : x + size]
        if crop.std(axis=(1, 2)).max() > FLAT:
            found.append(crop)
    return np.stack(found)


class Trial:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.monotonic()
        self.work, self.out = Path(args.work), Path(args.out)
        for folder in (self.work, self.out):
            folder.mkdir(parents=True, exist_ok=True)
        self.device = pick_device(None, 0)
        self.world = World(find_place({}), self.device)

    def say(self, **figures: object) -> None:
        """Print figures at once, and keep them."""
        line = json.dumps({"seconds": round(time.monotonic() - self.began, 1), **figures})
        print(line, flush=True)
        with (self.out / "figures.jsonl").open("a") as file:
            file.write(line + "\n")

    def images(self) -> Dataset:
        if not (self.work / "crops" / "manifest.json").exists():
            opened, args = pictures(Path(self.args.photos)), self.args
            train, test = (crops(opened, args.size, n, t) for n, t in ((args.train, False), (args.test, True)))
            np.savez(self.work / "crops.npz", train=train, test=test)
            prepare(Arrays(self.work / "crops.npz", bins=(-1.0, 1.0, 256)).plan(), self.work / "crops")
            self.say(phase="crops", pictures=len(opened), train=len(train), test=len(test), size=args.size)
        return open_dataset(self.work / "crops")

    def trained(self, recipe: Recipe, name: str, dataset: Path, steps: int, minutes: float) -> bsi.Run:
        recipe = replace(recipe, data=replace(recipe.data, name=str(dataset)))
        chosen = self.work / f"{name}.json"  # so that a resumed run has the same steps
        if not chosen.exists():
            if minutes:
                every = replace(recipe.every, journal=PROBE // 3, evaluate=0, sample=0)
                probe = replace(recipe.shortened(PROBE), steps=PROBE, every=every)
                done = bsi.train(probe, out=self.work / f"{name}-probe", device=self.device.type)
                steps = int(60 * minutes * float(done.journal()[-1]["images_per_s"]) / recipe.batch)
            chosen.write_text(json.dumps(steps))
        steps = json.loads(chosen.read_text())
        self.say(phase=name, steps=steps, batch=recipe.batch)
        run = bsi.train(replace(recipe.shortened(steps), steps=steps), out=self.work / name, device=self.device.type)
        last = [record for record in run.journal() if record["event"] == "train"][-1]
        self.say(phase=name, **{key: last[key] for key in ("step", "loss", "bits_per_dim", "images_per_s")})
        return run

    def lengths(self, prefix: str) -> tuple[int, float]:
        return getattr(self.args, f"{prefix}steps"), getattr(self.args, f"{prefix}minutes")

    def autoencoder(self) -> None:
        self.images()
        recipe = bsi.recipes.autoencoder_mini() if self.args.tiny else bsi.recipes.autoencoder_f4()
        self.trained(recipe, "autoencoder", self.work / "crops", *self.lengths("autoencoder_"))
        self.reconstructed()

    def reconstructed(self) -> None:
        """Reconstructions of test crops: errors, rFID and pictures."""
        dataset, coder = self.images(), open_autoencoder(self.work / "autoencoder")
        assert dataset.bins is not None
        index = torch.from_numpy(np.array(dataset.test))
        shown, squares = list[Tensor](), 0.0
        for part in index.split(64):
            x = dataset.bins.values(part).to(self.device)
            mean, std = coder.encode(x)
            x_hat = coder.decode(mean + std * torch.randn_like(mean))
            squares += float((x_hat - x).double().square().mean((1, 2, 3)).sum())
            shown.append(dataset.bins.indices(x_hat).cpu())
        found = torch.cat(shown).numpy()
        mse = squares / len(index)
        self.say(phase="reconstructions", n=len(index), mse=mse, psnr=10 * np.log10(4 / mse))
        pairs = np.stack([dataset.test[:32], found[:32]], 1).reshape(-1, *dataset.shape)
        grid(pairs, 8).save(self.out / "reconstructions.webp", quality=90)
        if extractor := self.extractor():
            real, fake = (collect(image_batches(rows, dataset.bins, 64), extractor) for rows in (dataset.test, found))
            quality = sample_quality(fake, Reference("crops", "test", dataset.version, real), extractor)
            self.say(phase="reconstructions", rfid=quality.record()["value"], n=len(found), metric=quality.metric)

    def latents(self) -> None:
        self.images()
        prepare(
            plan_latents(str(self.work / "crops"), str(self.work / "autoencoder"), self.device), self.work / "latents"
        )
        recipe, args = bsi.recipes.latents_mini() if self.args.tiny else bsi.recipes.latents(), self.args
        if args.backbone:
            recipe = replace(recipe, backbone=resolve(args.backbone))
        recipe = replace(recipe, batch=args.batch, every=replace(recipe.every, evaluate=args.every, sample=args.every))
        run = self.trained(recipe, "model", self.work / "latents", *self.lengths(""))
        for record in run.evaluations():
            self.say(phase="model", step=record["step"], latents_nats_per_dim=record["nats_per_dim"])

    def evaluate(self) -> None:
        """The bound of test crops, pictures of samples, and their distance to training crops."""
        dataset, args = self.images(), self.args
        run = open_run(self.work / "model", self.world)
        speed_up(run, args.num * 32)
        model = run.model
        ids = subset(len(dataset.test), args.bound)
        found = model.elbo(torch.from_numpy(np.array(dataset.test[ids])), batch_size=args.batch)
        self.say(phase="evaluate", bound=str(found), images=len(ids), **found.record())
        grid(model.sample(64, steps=64, seed=1).cpu().numpy(), 8).save(self.out / "samples.webp", quality=90)
        grid(dataset.train[subset(len(dataset.train), 64)], 8).save(self.out / "crops.webp", quality=90)
        if extractor := self.extractor():
            for split, steps in (("train", 32), ("train", 128), ("test", 32)):
                sampler = model.named(bsi.Sampler(steps=steps))
                quality = measure_quality(
                    model, Split(dataset, split), sampler, args.num, extractor, self.world, batch=args.batch
                )
                assert quality is not None
                record = quality.record()
                self.say(phase="evaluate", fid=record["value"], error=record["error"], split=split, steps=steps,
                         n=record["n"], reference_n=record["reference_n"], metric=record["metric"])  # fmt: skip

    def extractor(self) -> Inception | None:
        if not (data_folder() / "inception-2015-12-05.safetensors").exists():
            self.say(note="no FID: the weights of the Inception network are not in the data folder")
            return None
        return Inception(None, self.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phases", nargs="+", choices=("prepare", "autoencoder", "latents", "evaluate"))
    parser.add_argument("--photos", default=".gpu/photos.zip")
    parser.add_argument("--work", default=".gpu/latent-images", help="datasets and runs, tens of GB")
    parser.add_argument("--out", default=".gpu/latent-images/out", help="figures and pictures")
    parser.add_argument("--tiny", action="store_true")
    numbers = {
        "size": (128, 32), "train": (30_000, 400), "test": (4000, 40), "autoencoder-steps": (12_000, 60),
        "steps": (20_000, 60), "batch": (256, 16), "every": (5000, 30), "bound": (512, 16), "num": (10_000, 16),
    }  # fmt: skip
    for name in numbers:
        parser.add_argument(f"--{name}", type=int)
    for name in ("autoencoder-minutes", "minutes"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("--backbone", default="")
    args = parser.parse_args()
    for name, (full, tiny) in numbers.items():
        key = name.replace("-", "_")
        if getattr(args, key) is None:
            setattr(args, key, tiny if args.tiny else full)
    warnings.simplefilter("ignore")
    if "prepare" in args.phases:
        photos(Path(args.photos))
        args.phases.remove("prepare")
    trial = Trial(args) if args.phases else None
    for phase in args.phases:
        getattr(trial, phase)()


if __name__ == "__main__":
    main()
