"""Your own data: images, tables, series, sound. All values are ours: starting points, not tuned for anything.

The recipes named `-mini` are for a CPU and take minutes.
"""

from __future__ import annotations

from dataclasses import replace

from bsi.backbones.config import DIT_SIZES, MLPConfig, UNetConfig
from bsi.methods import METHODS, Method
from bsi.recipe import Data, Ema, Evaluation, Every, Optimizer, Recipe, Samples

SMALL_UNET = UNetConfig(width=32, levels=1, heads=4, dropout=0.0, coarser=(64, 64))
OFTEN = Every(journal=20, evaluate=500, sample=0, checkpoint=500)


def _with_last_precision(method: str, precision: float) -> Method:
    """The method with this precision of the data at the last level; others than ours keep their own."""
    ours = {"bsi": {"alpha_M": precision}, "bfn": {"sigma_1": precision**-0.5}, "vdm": {"nu_max": precision}}
    return METHODS[method](**ours.get(method, {}))


def folder(method: str = "bsi") -> Recipe:
    """Your own images, prepared with `bsi data`: DiT-S/2, mirrored at random. For 64x64 add --backbone dit-s/4.

    Command: bsi train folder --data.name NAME
    Hardware: 1 GPU
    Time: 40 minutes for 32x32 on an H200 (estimated from cifar10-dit-s)
    Expected: not yet run
    Paper: none
    """
    return Recipe(
        name="folder",
        method=METHODS[method](),
        backbone=replace(DIT_SIZES["s"], patch=2, dropout=0.05),
        data=Data("folder", flips=True),
        steps=40_000,
        batch=512,
        optimizer=Optimizer(lr=5e-4, weight_decay=1e-2, warmup=1000, schedule="cosine", final_lr=5e-5),
        ema=Ema(beta=0.9995, start=1000),
        every=Every(journal=50, evaluate=2000, sample=2000, checkpoint=1000),
    )


def folder_mini(method: str = "bsi") -> Recipe:
    """Your own small images on a CPU: a U-Net of 1.2M parameters at three resolutions. See `folder` for a GPU.

    Command: bsi train folder-mini --data.name NAME
    Hardware: two CPU cores
    Time: 10 minutes for 28x28 (estimated from 0.5 seconds per step on one core)
    Expected: 5.61 +- 0.03 bits/dim after 500 steps of 32 images (--steps 500) on CIFAR-10 in gray, cropped to 28x28;
        PNG takes 6.97 bits, lossless WebP 6.35. All 1800 steps: not yet run
    Paper: none
    """
    return Recipe(
        name="folder-mini",
        method=METHODS[method](),
        backbone=SMALL_UNET,
        data=Data("folder", flips=True),
        steps=1800,
        batch=32,
        optimizer=Optimizer(lr=2e-3, weight_decay=1e-2, warmup=50, schedule="cosine", final_lr=1e-5),
        ema=Ema(beta=0.995, start=100),
        every=Every(journal=20, evaluate=600, sample=600, checkpoint=300),
        evaluation=Evaluation(images=256),
        samples=Samples(count=36),
        compile=False,
    )


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
        optimizer=Optimizer(lr=1e-3, weight_decay=1e-2, warmup=500, schedule="cosine", final_lr=1e-5),
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
        optimizer=Optimizer(lr=1e-3, weight_decay=1e-2, warmup=100, schedule="cosine", final_lr=1e-5),
        ema=Ema(beta=0.995, start=200),
        every=OFTEN,
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
        backbone=SMALL_UNET,
        data=Data("series"),
        steps=2000,
        batch=32,
        optimizer=Optimizer(lr=2e-3, weight_decay=1e-2, warmup=50, schedule="cosine", final_lr=1e-5),
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
