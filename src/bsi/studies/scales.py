"""The three scales. Imports no torch.

smoke   8x8 digits on a CPU: do all studies run? Networks take half a minute at most, and prove nothing.
mini    CIFAR-10 on one GPU, networks of 10M parameters that train for one or two minutes: do the claims show?
paper   the paper's datasets, networks, budgets and seeds. Not yet run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from bsi.backbones.config import DiTConfig, UNetConfig
from bsi.recipe import Ema, Every, Keep, Optimizer, Recipe
from bsi.recipes import (
    cifar10_dit_mini,
    cifar10_unet,
    digits,
    imagenet32_dit_l2,
    imagenet32_unet,
    imagenet64_dit_l4,
)
from bsi.studies.scale import Comparison, Drawn, Measured, Scale, ScaleName, Speed, Varied

__all__ = ["MINI", "PAPER", "SCALES", "SMOKE"]


def _plain(recipe: Recipe, steps: int, checkpoint: int = 1000) -> Recipe:
    """A recipe as studies train it: of another length, without evaluations on the way."""
    every = Every(journal=min(50, steps), evaluate=0, sample=0, checkpoint=checkpoint)
    return replace(recipe, steps=steps, every=every, keep=Keep(last=1))


def _smoke(method: str) -> Recipe:
    """750 steps of a DiT of 95k parameters: about 25 s on two cores."""
    return replace(
        _plain(digits(method), steps=750, checkpoint=250),
        backbone=DiTConfig(width=48, depth=2, heads=4, patch=2, dropout=0.0),
        optimizer=Optimizer(lr=4e-3, beta_2=0.99, weight_decay=1e-2, warmup=50, schedule="cosine", final_lr=1e-5),
        ema=Ema(beta=0.98, start=50),
    )


def _smoke_unet(method: str) -> Recipe:
    """400 steps of a U-Net of 57k parameters: about 15 s on two cores."""
    return replace(
        _smoke(method), backbone=UNetConfig(width=16, levels=2, dropout=0.0), steps=400, batch=32, virtual_shards=8
    )


def _mini(method: str) -> Recipe:
    """4000 steps of 512, 41 epochs: about 100 s on an H200 at 22,400 images/s."""
    return _plain(cifar10_dit_mini(method), steps=4000)


def _mini_parameter(method: str) -> Recipe:
    """Half of that, as the paper shortens training for its parameter studies: warm-up and averages in proportion."""
    recipe = _plain(cifar10_dit_mini(method), steps=2000)
    return replace(recipe, optimizer=replace(recipe.optimizer, warmup=250), ema=Ema(beta=0.998, start=500))


def _mini_unet(method: str) -> Recipe:
    """A U-Net of 2.2M parameters, without attention but the one in the middle."""
    return replace(_mini(method), backbone=UNetConfig(width=64, levels=8, heads=1, dropout=0.1), steps=4000, batch=256)


def _paper_cifar10(steps: int) -> Callable[[str], Recipe]:
    return lambda method: replace(cifar10_unet(method), steps=steps)


def _paper_parameter(method: str) -> Recipe:
    """ "We reduced the training steps to 100k for our parameter studies." """
    recipe = imagenet32_dit_l2(method)
    warmup = replace(recipe.optimizer, warmup=2000)  # ours
    return replace(recipe, steps=100_000, optimizer=warmup, keep=Keep(last=2, every=20_000))


SMOKE = Scale(
    name="smoke",
    summary="8x8 digits, a CPU with two cores",
    comparisons=(Comparison(_smoke, seeds=(0, 1)),),
    architecture=Comparison(_smoke_unet, seeds=(0,)),
    convergence=Comparison(_smoke, seeds=(0,)),
    profiled=_smoke,
    parameter_recipe=_smoke,
    parameter_seeds=(0,),
    metric="fd-digits",
    drawn=Drawn(num=512, batch=256, steps=(8, 32), long=64, convergence=(4, 8, 16, 32)),
    measured=Measured(
        levels=16, recon=4, finite_levels=100, ks=(8, 32, 128, 512), profile_levels=33, profile_images=64, batch=299
    ),
    varied=Varied(
        lambda_0=(1e-4, 1e-2, 1.0),
        steps=(8, 32),
        gamma_0=(1e-2, 1.0, math.inf),
        trained_k=(16, 256),
        evaluated_k=(8, 32, 128),
        bias=(2.0,),
    ),
    speed=Speed(training=18e9, evaluation=20e9, unet=0.8, metric=20_000.0, startup_s=1.0),
    kept="float32",
)

MINI = Scale(
    name="mini",
    summary="CIFAR-10, one H200",
    comparisons=(Comparison(_mini, seeds=(0, 1)),),
    architecture=Comparison(_mini_unet, seeds=(0,)),
    convergence=Comparison(_mini, seeds=(0,)),
    profiled=_mini,
    parameter_recipe=_mini_parameter,
    parameter_seeds=(0,),
    metric="FID",
    drawn=Drawn(num=10_000, batch=1024, steps=(16, 64, 256), long=1024, convergence=(8, 16, 32, 64, 128, 256)),
    measured=Measured(
        levels=20,
        recon=4,
        finite_levels=100,
        ks=(8, 16, 32, 64, 128, 256, 512, 1024),
        profile_levels=129,
        profile_images=1000,
        batch=2500,
    ),
    varied=Varied(
        lambda_0=(1e-4, 1e-3, 1e-2, 1e-1, 1.0),
        steps=(16, 64, 256),
        gamma_0=(1e-2, 1e-1, 1.0, math.inf),
        trained_k=(16, 64, 256),
        evaluated_k=(16, 64, 256),
        bias=(2.0, 6.0),
    ),
    # 21,600 images/s in training and 3 s beside it, 34 s for 256 steps of 10,000 samples, and 5250 images/s through the
    # Inception network were measured; the rest is estimated
    speed=Speed(training=245e12, evaluation=300e12, unet=0.6, metric=5000.0, startup_s=4.0),
    kept="bfloat16",
)

PAPER = Scale(
    name="paper",
    summary="ImageNet32, ImageNet64 and CIFAR-10, 4 x H100 for training",
    comparisons=(
        Comparison(imagenet32_dit_l2, seeds=(0, 1, 2)),
        Comparison(imagenet64_dit_l4, seeds=(0, 1, 2)),
        Comparison(_paper_cifar10(10_000_000), seeds=(0,), methods=("bsi",), samples=False),
        Comparison(cifar10_unet, seeds=(0,), methods=("bsi",), samples=False),
    ),
    architecture=Comparison(imagenet32_unet, seeds=(0, 1, 2)),
    convergence=Comparison(imagenet64_dit_l4, seeds=(0,)),
    profiled=cifar10_unet,
    parameter_recipe=_paper_parameter,
    parameter_seeds=(0,),
    metric="FID",
    drawn=Drawn(num=50_000, batch=1000, steps=(1024,), long=1024, convergence=(8, 16, 32, 64, 128, 256, 512, 1024)),
    measured=Measured(
        levels=5,
        recon=2,
        finite_levels=100,
        ks=(8, 16, 32, 64, 128, 256, 512, 1024, 4096),
        profile_levels=257,
        profile_images=1000,
        batch=500,
    ),
    varied=Varied(
        lambda_0=(1e-4, 1e-3, 1e-2, 1e-1, 1.0),
        steps=(16, 64, 256, 1024),
        gamma_0=(1e-2, 1e-1, 1.0, math.inf),
        trained_k=(16, 64, 256, 1024),
        evaluated_k=(16, 64, 256, 1024),
        bias=(2.0, 6.0),
    ),
    # 4 GPUs at the paper's 217 images/s train; one evaluates
    speed=Speed(training=4 * 105e12, evaluation=300e12, unet=0.9, metric=2500.0, startup_s=60.0),
    kept="float32",
)

SCALES: dict[ScaleName, Scale] = {"smoke": SMOKE, "mini": MINI, "paper": PAPER}
