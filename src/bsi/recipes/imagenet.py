"""ImageNet at 32x32 and 64x64 (Tables "model-params", "dit-imagenet32-params", "dit-imagenet64-params" and
"unet-imagenet32-params"): the paper's main results.

The paper gives neither AdamW's betas, nor the length of the warm-up, nor whether gradients are clipped: those settings
are from the authors' published code (docs/authors-code.md). The commands are for one node with four GPUs, like the
paper's; docs/many-gpus.md has commands for others.
"""

from __future__ import annotations

from dataclasses import replace

from bsi.backbones.config import DIT_SIZES, UNetConfig
from bsi.methods import METHODS
from bsi.recipe import Data, Ema, Every, Keep, Optimizer, Recipe

COSINE = Optimizer(
    lr=5e-4,
    beta_2=0.99,  # the authors' code
    weight_decay=1e-2,
    schedule="cosine",
    final_lr=5e-5,
    warmup=1000,  # the authors' code
    clip=1.0,  # the authors' code
)

# Ours; they do not change the result.
LONG = Every(journal=100, evaluate=20_000, sample=20_000, checkpoint=2000)


def imagenet32_dit_l2(method: str = "bsi") -> Recipe:
    """The paper's main model on ImageNet32: DiT-L/2, 2M steps.

    Command: torchrun --nproc-per-node 4 -m bsi train imagenet32-dit-l2
    Hardware: 4 x H100 in the paper
    Time: 330 hours (6100 steps per hour in the paper)
    Expected: not yet run
    Paper: BSI 3.448 ± 0.006 bits/dim, FID 8.9 ± 0.1; BFN 3.448 ± 0.005, 11.0 ± 0.1; VDM 3.452 ± 0.006, 9.9 ± 0.5
    """
    return Recipe(
        name="imagenet32-dit-l2",
        method=METHODS[method](),
        backbone=replace(DIT_SIZES["l"], patch=2, dropout=0.05),
        data=Data("imagenet32"),
        steps=2_000_000,
        batch=512,
        optimizer=COSINE,
        ema=Ema(beta=0.9999, start=1000),
        every=LONG,
        keep=Keep(last=2, every=200_000),
    )


def imagenet64_dit_l4(method: str = "bsi") -> Recipe:
    """The paper's model on ImageNet64: DiT-L/4, 1M steps.

    Command: torchrun --nproc-per-node 4 -m bsi train imagenet64-dit-l4
    Hardware: 4 x H100 in the paper
    Time: 160 hours (estimated: as many tokens per image as at 32x32 with patches of 2)
    Expected: not yet run
    Paper: BSI 3.218 ± 0.004 bits/dim, FID 30.1 ± 0.4; BFN 3.222 ± 0.006, 38.2 ± 0.8; VDM 3.228 ± 0.006, 35.2 ± 0.7
    """
    return replace(
        imagenet32_dit_l2(method),
        name="imagenet64-dit-l4",
        backbone=replace(DIT_SIZES["l"], patch=4, dropout=0.05),
        data=Data("imagenet64"),
        steps=1_000_000,
    )


def imagenet32_unet(method: str = "bsi") -> Recipe:
    """The paper's check that the architecture does not matter: VDM's U-Net on ImageNet32, 100k steps.

    Command: torchrun --nproc-per-node 4 -m bsi train imagenet32-unet
    Hardware: 4 x H100 in the paper
    Time: not given in the paper
    Expected: not yet run
    Paper: BSI 3.510 ± 0.009 bits/dim, FID 12.8 ± 0.6; BFN 3.505 ± 0.001, 14.2 ± 0.4; VDM 3.527 ± 0.009, 15.4 ± 1.5
    """
    return replace(
        imagenet32_dit_l2(method),
        name="imagenet32-unet",
        backbone=UNetConfig(width=256, levels=32, heads=1, dropout=0.1),
        steps=100_000,
        every=replace(LONG, evaluate=5000, sample=5000),
        keep=Keep(last=2, every=20_000),
    )
