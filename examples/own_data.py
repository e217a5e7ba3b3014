"""Four kinds of data of your own, each from raw values to a bound with its errors next to baselines.

    python examples/own_data.py                # all four, a minute or two each on one core
    python examples/own_data.py table series   # a table in different units, a time series (in Python)
    python examples/own_data.py audio images   # 16-bit WAV files, class folders of PNG files (on the command line)

The data is synthetic. Lower is better everywhere, and every ± is one standard error. Longer training improves all
bounds: `--scale 10` trains ten times as long. Runs, samples and prepared data are written to `--out`.
"""

import argparse
import lzma
import math
import os
import subprocess
import sys
import wave
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

import bsi
from bsi.data import open_dataset


def table(out: Path, scale: float) -> None:
    """Five columns in different units, two groups of people, two columns that are positive and skewed."""
    rng = np.random.default_rng(0)

    def people(n: int) -> np.ndarray:
        age = rng.gamma(6.0, 7.0, n) + 18
        athlete = rng.random(n) < 0.3
        height = rng.normal(1.72 + 0.06 * athlete, 0.08, n)
        weight = height**2 * rng.normal(np.where(athlete, 22, 27), np.where(athlete, 1.2, 4.0))
        pulse = rng.normal(np.where(athlete, 52, 72), np.where(athlete, 4, 8))
        income = np.exp(rng.normal(10.2 + 0.6 * np.log(age / 40), 0.5))
        return np.stack([age, height, weight, pulse, income], axis=1)

    train, test = people(8192), people(2048)
    run = bsi.train(quiet(bsi.recipes.table_mini(), 2000 * scale), data=train, test=test, out=out / "table")
    model = run.model()

    print(f"BSI                  {model.elbo(test, measure=20)}")
    print(f"diagonal Gaussian    {gaussian(train, test, diagonal=True)}")
    print(f"full Gaussian        {gaussian(train, test)}")
    samples = model.sample(1000, seed=0).numpy()
    print("column               age     height  weight  pulse   income")
    for name, x in (("data", test), ("samples", samples)):
        print(f"median of {name:10s} " + " ".join(f"{value:<7.5g}" for value in np.median(x, axis=0)))
    print(f"samples with a negative value in a positive column: {(samples < 0).any(axis=1).mean():.1%}")


def series(out: Path, scale: float) -> None:
    """Oscillations of random frequency, phase and decay, with noise of standard deviation 0.1."""
    rng = np.random.default_rng(0)

    def curves(n: int) -> np.ndarray:
        t = np.arange(64)
        frequency, phase = rng.uniform(0.05, 0.4, (n, 1)), rng.uniform(0, 2 * np.pi, (n, 1))
        clean = np.exp(-t * rng.uniform(0, 0.03, (n, 1))) * np.sin(frequency * t + phase)
        return (clean + 0.1 * rng.standard_normal((n, 64)))[:, None]  # (n, channels, length)

    train, test = curves(8192), curves(512)
    run = bsi.train(quiet(bsi.recipes.series_mini(), 600 * scale), data=train, test=test, out=out / "series")
    model = run.model()

    print(f"BSI                  {model.elbo(test, measure=20)}")
    print(f"diagonal Gaussian    {gaussian(train[:, 0], test[:, 0], diagonal=True)}")
    print(f"full Gaussian        {gaussian(train[:, 0], test[:, 0])}")
    print(f"entropy of the noise {math.log(0.1 * math.sqrt(2 * math.pi * math.e)):.4f} nats/dim; no model is below it")


def audio(out: Path, scale: float) -> None:
    """WAV files of two notes with overtones, in 16 bits."""
    rng = np.random.default_rng(0)
    folder = out / "tones"
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(120):
        t, sound = np.arange(8192) / 8000, np.zeros(8192)
        for pitch in rng.choice([220.0, 262.0, 330.0, 392.0, 440.0], 2, replace=False):
            for overtone in (1, 2, 3):
                sound += np.sin(2 * np.pi * overtone * pitch * t + rng.uniform(0, 2 * np.pi)) / overtone**2
        sound = 5000 * sound * rng.uniform(0.5, 1) + 60 * rng.standard_normal(len(t))
        with wave.open(str(folder / f"{i}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(sound.astype("<i2").tobytes())

    command(out, "data", "wav", "--from", folder, "--length", 256)
    steps = ["--steps", max(1, round(400 * scale)), "--every.evaluate", 0]
    command(out, "train", "audio-mini", "--data.name", "tones", *steps, "--out", out / "audio")
    command(out, "eval", out / "audio", "--bpd")
    command(out, "sample", out / "audio", "--num", 8, "--out", out / "audio.wav")

    data = open_dataset(out / "data" / "tones")
    test = np.asarray(data.test).astype(np.int64)[:, 0] - 32768
    raw = test.astype("<i2").tobytes()
    whole = test.reshape(-1, 8192)  # the pieces of a file are stored in order
    print(f"linear prediction    {linear_prediction(test):.2f} bits/dim as FLAC codes it, each piece of 256 on its own")
    print(
        f"                     {linear_prediction(whole):.2f} bits/dim with blocks of 8192, a longer past than BSI has"
    )
    print(f"lzma                 {8 * len(lzma.compress(raw)) / test.size:.2f} bits/dim, all pieces together")
    print(f"zlib                 {8 * len(zlib.compress(raw, 9)) / test.size:.2f} bits/dim")
    print(f"entropy of the noise {math.log2(60 * math.sqrt(2 * math.pi * math.e)):.2f} bits/dim; no model is below it")


def images(out: Path, scale: float) -> None:
    """Gray images of 16x16 pixels, one folder for each class."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:16, :16]
    for i in range(3000):
        kind = ("disk", "square", "stripes")[i % 3]
        (cx, cy), r = rng.uniform(5, 11, 2), rng.uniform(2.5, 5)
        distance = {
            "disk": np.hypot(x - cx, y - cy) - r,
            "square": np.maximum(abs(x - cx), abs(y - cy)) - r,
            "stripes": r * np.sin((x + y) / 2 + cx),
        }[kind]
        shape = 1 / (1 + np.exp(2 * distance))  # the edges are soft
        image = rng.uniform(20, 90) + rng.uniform(60, 140) * shape + 3 * rng.standard_normal((16, 16))
        path = out / "shapes" / kind / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.clip(0, 255).round().astype(np.uint8)).save(path)

    command(out, "data", "folder", "--from", out / "shapes", "--labels")
    steps = ["--steps", max(1, round(350 * scale)), "--every.evaluate", 0, "--every.sample", 0]
    command(out, "train", "folder-mini", "--data.name", "shapes", "--data.labels", *steps, "--out", out / "images")
    command(out, "eval", out / "images", "--bpd")  # with a histogram, PNG and WebP of the same images
    command(out, "sample", out / "images", "--num", 16, "--label", "disk", "--out", out / "disks.png")


def quiet(recipe: bsi.Recipe, steps: float) -> bsi.Recipe:
    """The recipe for this many steps, without evaluations on the way."""
    return replace(recipe.shortened(max(1, round(steps))), every=replace(recipe.every, evaluate=0))


def gaussian(train: np.ndarray, test: np.ndarray, diagonal: bool = False) -> str:
    """The negative log-likelihood of test samples under a Gaussian fitted to training samples."""
    covariance = np.cov(train.T)
    if diagonal:
        covariance = np.diag(np.diag(covariance))
    z = np.linalg.solve(np.linalg.cholesky(covariance), (test - train.mean(axis=0)).T)
    n = test.shape[1]
    nats = ((z**2).sum(axis=0) + np.linalg.slogdet(2 * np.pi * covariance)[1]) / (2 * n)
    return f"{nats.mean():.4f} nats/dim ± {nats.std() / math.sqrt(len(nats)):.4f} (data set)"


def linear_prediction(pieces: np.ndarray, order: int = 12) -> float:
    """Bits per value of a Rice code for the residuals of linear prediction, with FLAC's header for each piece."""
    bits = 0.0
    for piece in pieces.astype(np.float64):
        costs = [16.0 * len(piece)]
        for p in (2, 4, 8, order):
            past = np.lib.stride_tricks.sliding_window_view(piece[:-1], p)
            weights = np.linalg.lstsq(past, piece[p:], rcond=None)[0]
            weights = np.round(weights * 2**13) / 2**13  # FLAC stores about 14 bits of each
            residual = np.rint(piece[p:] - past @ weights).astype(np.int64)
            folded = np.where(residual >= 0, 2 * residual, -2 * residual - 1)
            rice = min(float(((folded >> k) + 1 + k).sum()) for k in range(15))
            costs.append(rice + 16 * p + 15 * p + 8)
        bits += min(costs)
    return bits / pieces.size


def command(out: Path, *words: object) -> None:
    """Run `bsi` as in a terminal, with the prepared data in `out`."""
    line = [str(word) for word in words]
    print("$ bsi", *line, flush=True)
    subprocess.run([sys.executable, "-m", "bsi", *line], check=True, env=os.environ | {"BSI_DATA": str(out / "data")})


EXAMPLES: dict[str, Callable[[Path, float], None]] = {
    "table": table,
    "series": series,
    "audio": audio,
    "images": images,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="table|series|audio|images")
    parser.add_argument("--out", type=Path, default=Path("runs/own-data"))
    parser.add_argument("--scale", type=float, default=1.0, help="a factor on the number of steps")
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.names if name not in EXAMPLES]:
        parser.error(f"unknown: {', '.join(unknown)}. Choose from {', '.join(EXAMPLES)}.")
    for name in chosen.names or EXAMPLES:
        print(f"\n== {name}: {EXAMPLES[name].__doc__}")
        EXAMPLES[name](chosen.out, chosen.scale)


if __name__ == "__main__":
    main()
