"""Digits, text, black-and-white images, tables, series and sound. All values are ours, unless a comment names another.

The recipes named `-mini` are for a CPU and take minutes: starting points for your own data, not tuned for anything.

For symbols, the first level should carry little information: BSI's random first belief makes its bound larger by half
of c for each unit of variance, about 0.003 bits for a symbol with lambda_0 = 1e-3 and 0.03 with 1e-2. The last one need
not be beyond the level at which symbols are certain: at 20 the reconstruction term of 256 equally frequent symbols is
below 1e-10.
"""

from __future__ import annotations

from dataclasses import replace

from bsi.backbones.config import DIT_SIZES, DiTConfig, MLPConfig, UNetConfig
from bsi.methods import BFN, BSI, METHODS, VDM, Method
from bsi.recipe import Data, Ema, Evaluation, Every, Optimizer, Recipe, Samples
from bsi.sampler import Sampler

SYMBOLS: dict[str, Method] = {
    "bsi": BSI(lambda_0=1e-3, alpha_M=20.0),
    "bfn": BFN(sigma_1=21**-0.5),
    "vdm": VDM(nu_min=1e-3, nu_max=20.0),
}


def _with_last_precision(method: str, precision: float) -> Method:
    """The method with this precision of the data at the last level; others than ours keep their own."""
    ours = {"bsi": {"alpha_M": precision}, "bfn": {"sigma_1": precision**-0.5}, "vdm": {"nu_max": precision}}
    return METHODS[method](**ours.get(method, {}))


# ---- Digits and symbols ----------------------------------------------------------------------------------------------


def digits(method: str = "bsi") -> Recipe:
    """8x8 digits with 17 gray levels, a small DiT, float32. All values are ours.

    Command: bsi train digits
    Hardware: two CPU cores
    Time: 2.5 minutes
    Expected: 1.82 ± 0.02 bits/dim on the test set; 2.44 with a histogram for each pixel
    Paper: none
    """
    return Recipe(
        name="digits",
        # 17 gray levels need no precision above 1e4; 256 levels do. Training on higher precisions makes the bound worse
        # (2.08 instead of 1.92 bits/dim after 3000 steps, at two learning rates).
        method=_with_last_precision(method, 1e4),
        backbone=DiTConfig(width=64, depth=3, heads=4, patch=2, dropout=0.0),
        data=Data("digits"),
        steps=4000,
        batch=64,
        virtual_shards=16,
        optimizer=Optimizer(kind="muon", lr=1e-2, beta_2=0.99, warmup=100, schedule="cosine", final_lr=1e-5),
        ema=Ema(beta=0.995, start=100),
        precision="float32",
        compile=False,
        threads=1,  # two threads are not faster at this size
        every=Every(journal=50, evaluate=1000, sample=1000, checkpoint=500),
        evaluation=Evaluation(images=299, measure=4, recon=2),
    )


def binary_digits(method: str = "bsi") -> Recipe:
    """8x8 digits in black and white: a small DiT on a CPU.

    Command: bsi data binary --from digits; bsi train binary-digits
    Hardware: two CPU cores
    Time: not yet run
    Expected: not yet run
    Paper: none
    """
    return replace(
        digits(method),
        name="binary-digits",
        method=SYMBOLS[method],
        data=Data("binary-digits"),
        steps=2000,
        every=Every(journal=50, evaluate=500, sample=500, checkpoint=500),
        samples=Samples(sampler=Sampler(steps=32)),
    )


def text_mini(method: str = "bsi") -> Recipe:
    """Text on a CPU: characters in blocks of 64, a DiT of 0.6M parameters. Prepare your own with `bsi data text`.

    Command: bsi data text --from corpus.txt --length 64; bsi train text-mini --data.name corpus
    Hardware: two CPU cores
    Time: not yet run
    Expected: not yet run
    Paper: none
    """
    return replace(
        digits(method),
        name="text-mini",
        method=SYMBOLS[method],
        backbone=DiTConfig(width=96, depth=3, heads=4, patch=1, dropout=0.0),
        data=Data("text"),
        steps=1500,
        batch=32,
        optimizer=replace(digits().optimizer, warmup=50),
        ema=Ema(beta=0.99, start=50),
        every=Every(journal=25, evaluate=500, sample=500, checkpoint=250),
        evaluation=Evaluation(images=256, measure=4, recon=2),
        samples=Samples(count=4, sampler=Sampler(steps=32)),
    )


def mnist_binary(method: str = "bsi") -> Recipe:
    """Binarized MNIST, 28x28: a U-Net at three resolutions on a GPU.

    Command: bsi train mnist-binary --data.name NAME
    Hardware: 1 GPU
    Time: 30 minutes on an H200 (estimated)
    Expected: not yet run
    Paper: none; 77.9 nats per image, 0.143 bits per pixel, for a Bayesian flow network (Graves et al., 2023)
    """
    return Recipe(
        name="mnist-binary",
        method=SYMBOLS[method],
        backbone=UNetConfig(width=128, levels=2, heads=4, dropout=0.3, coarser=(256, 256)),
        data=Data("mnist-binary"),
        steps=30_000,
        batch=512,
        optimizer=Optimizer(lr=5e-4, warmup=500, schedule="cosine", final_lr=1e-6),
        ema=Ema(beta=0.9995, start=1000),
        every=Every(journal=50, evaluate=2000, sample=2000, checkpoint=1000),
        samples=Samples(sampler=Sampler(steps=64)),
    )


def text8(method: str = "bsi") -> Recipe:
    """text8, 27 characters in blocks of 256: a DiT-B with a token for each character.

    Command: bsi data text --from text8 --length 256; bsi train text8 --data.name text8
    Hardware: 8 GPUs
    Time: not yet run
    Expected: not yet run
    Paper: none; 1.41 bits per character for a Bayesian flow network (Graves et al., 2023)
    """
    return Recipe(
        name="text8",
        method=SYMBOLS[method],
        backbone=replace(DIT_SIZES["b"], patch=1, dropout=0.01),
        data=Data("text8"),
        steps=1_000_000,
        batch=3072,
        optimizer=Optimizer(lr=2e-4, warmup=2500),
        ema=Ema(beta=0.9999, start=1000),
        every=Every(journal=50, evaluate=10_000, sample=10_000, checkpoint=5000),
        samples=Samples(count=4, sampler=Sampler(steps=256)),
    )


# ---- Vectors, series, sound ------------------------------------------------------------------------------------------


def arrays(method: str = "bsi") -> Recipe:
    """Your own vectors, prepared with `bsi data`: a residual MLP, trained for long. See `table-mini` for a short run.

    An MLP does not use the order of the values: see `series-mini` for series, and use --backbone dit-s/4 on a GPU.

    Command: bsi train arrays --data.name NAME
    Hardware: two CPU cores, or 1 GPU
    Time: 10 minutes for a few dozen dimensions on two cores
    Expected: not yet run
    Paper: none
    """
    return Recipe(
        name="arrays",
        method=METHODS[method](),
        backbone=MLPConfig(width=256, depth=4),
        data=Data("arrays"),
        steps=20_000,
        batch=256,
        optimizer=Optimizer(lr=1e-3, warmup=500, schedule="cosine", final_lr=1e-5),
        ema=Ema(beta=0.999, start=1000),
        compile=False,
        every=Every(journal=100, evaluate=2000, sample=0, checkpoint=1000),
    )


def table_mini(method: str = "bsi") -> Recipe:
    """Your own table, one row for each sample: a small residual MLP on a CPU. Details below 0.01 standard deviations
    are left to the decoder (--method.alpha-M).

    Command: bsi train table-mini --data.name NAME
    Hardware: one CPU core
    Time: 2 minutes
    Expected: not yet run
    Paper: none
    """
    return replace(
        arrays(method),
        name="table-mini",
        method=_with_last_precision(method, 1e4),
        backbone=MLPConfig(width=128, depth=2),
        data=Data("table"),
        steps=3000,
        optimizer=replace(arrays().optimizer, warmup=100),
        ema=Ema(beta=0.995, start=200),
        every=Every(journal=20, evaluate=500, sample=0, checkpoint=500),
    )


def series_mini(method: str = "bsi") -> Recipe:
    """Your own time series (channels, length) of continuous values: a 1-D U-Net on a CPU. Details below 0.01 standard
    deviations are left to the decoder (--method.alpha-M).

    Command: bsi train series-mini --data.name NAME
    Hardware: two CPU cores
    Time: 10 minutes for 128 steps
    Expected: not yet run
    Paper: none
    """
    return replace(
        table_mini(method),
        name="series-mini",
        backbone=UNetConfig(width=32, levels=1, heads=4, dropout=0.0, coarser=(64, 64)),
        data=Data("series"),
        steps=2000,
        batch=32,
        optimizer=Optimizer(lr=2e-3, warmup=50, schedule="cosine", final_lr=1e-5),
    )


def audio_mini(method: str = "bsi") -> Recipe:
    """Your own 16-bit sound, prepared with `bsi data wav`: a 1-D U-Net on a CPU, with a last precision for 65536 bins.

    Command: bsi train audio-mini --data.name NAME
    Hardware: two CPU cores
    Time: 10 minutes for pieces of 256 values
    Expected: not yet run
    Paper: none
    """
    return replace(
        series_mini(method),
        name="audio-mini",
        method=_with_last_precision(method, 6.7e10),  # noise of an eighth of a bin, the paper's ratio for 8-bit images
        data=Data("sounds"),
        batch=16,
    )
