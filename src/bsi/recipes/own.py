"""Your own data: images in a folder, or arrays. All values are ours: starting points, not tuned for anything."""

from __future__ import annotations

from dataclasses import replace

from bsi.backbones.config import DIT_SIZES, MLPConfig, UNetConfig
from bsi.methods import METHODS
from bsi.recipe import Data, Ema, Evaluation, Every, Optimizer, Recipe, Samples

__all__ = ["arrays", "folder", "folder_mini"]


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
        backbone=UNetConfig(width=32, levels=1, heads=4, dropout=0.0, coarser=(64, 64)),
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
    """Your own vectors, prepared with `bsi data`: a residual MLP. For sound and time series see below.

    For sequences and fields choose a network that uses their axes: on a CPU a U-Net, --backbone unet-32-64-64x1
    --batch 64 --steps 2000 --optimizer.lr 2e-3, on a GPU --backbone dit-s/4. Noisy sine waves of 128 steps, standard
    deviation of the noise 0.1: -0.74 nats/dim with the U-Net and --steps 1000 (5 minutes on one core), -0.67 with the
    MLP (entropy of the noise: -0.88).

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
