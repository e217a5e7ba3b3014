"""Your own data: images in a folder, or arrays. All values are ours: starting points, not tuned for anything."""

from __future__ import annotations

from dataclasses import replace

from bsi.backbones.config import DIT_SIZES, DiTConfig, MLPConfig
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
    """Your own small images on a CPU: a DiT of 1.3M parameters, 8x8 patches of 4x4 for 32x32. See `folder` for a GPU.

    Command: bsi train folder-mini --data.name NAME
    Hardware: two CPU cores
    Time: 15 minutes for 32x32
    Expected: not yet run
    Paper: none
    """
    return Recipe(
        name="folder-mini",
        method=METHODS[method](),
        backbone=DiTConfig(width=128, depth=4, heads=4, patch=4, dropout=0.05),
        data=Data("folder", flips=True),
        steps=3000,
        batch=64,
        optimizer=Optimizer(lr=1e-3, weight_decay=1e-2, warmup=100, schedule="cosine", final_lr=1e-5),
        ema=Ema(beta=0.995, start=100),
        every=Every(journal=20, evaluate=500, sample=500, checkpoint=500),
        evaluation=Evaluation(images=256),
        samples=Samples(count=36),
        compile=False,
    )


def arrays(method: str = "bsi") -> Recipe:
    """Your own vectors, prepared with `bsi data`: a residual MLP. With space or time in them, add --backbone dit-s/4.

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
