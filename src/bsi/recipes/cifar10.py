"""CIFAR-10: the paper's U-Net (Tables "model-params" and "unet-cifar10-params"), and small networks of ours."""

from __future__ import annotations

from dataclasses import replace

from bsi.backbones.config import DIT_SIZES, UNetConfig
from bsi.methods import METHODS
from bsi.recipe import Data, Ema, Evaluation, Every, Keep, Objective, Optimizer, Recipe


def cifar10_unet(method: str = "bsi") -> Recipe:
    """The paper's CIFAR-10 model: VDM's U-Net, 5M steps (BFN's budget), or 10M (VDM's) with --steps 10000000.

    Command: torchrun --nproc-per-node 4 -m bsi train cifar10-unet
    Hardware: 4 x H100 in the paper
    Time: 190 hours for 5M steps, 380 for 10M (26300 steps per hour in the paper)
    Expected: not yet run
    Paper: BSI 2.65 bits/dim after 5M steps (BFN 2.66), 2.64 after 10M (VDM 2.65)
    """
    return Recipe(
        name="cifar10-unet",
        method=METHODS[method](),
        backbone=UNetConfig(width=128, levels=32, heads=1, dropout=0.1),
        data=Data("cifar10"),
        steps=5_000_000,
        batch=128,
        optimizer=Optimizer(
            lr=2e-4,
            beta_2=0.99,  # the authors' code
            weight_decay=1e-2,
            schedule="constant",
            warmup=0,  # "LR Scheduler: None"
            clip=1.0,  # the authors' code
        ),
        ema=Ema(beta=0.9999, start=1000),
        # Ours; they do not change the result:
        every=Every(journal=100, evaluate=50_000, sample=50_000, checkpoint=5000),
        keep=Keep(last=2, every=500_000),
    )


def cifar10_dit_s(method: str = "bsi") -> Recipe:
    """DiT-S/2 on CIFAR-10, for short experiments on one GPU. All values are ours.

    Command: bsi train cifar10-dit-s
    Hardware: 1 x H200
    Time: 7 minutes
    Expected: 3.282 ± 0.007 bits/dim (0.002 of it Monte Carlo); FID 52.7 ± 0.3 at 16 evaluations (10k samples, test set)
    Paper: none
    """
    return Recipe(
        name="cifar10-dit-s",
        method=METHODS[method](),
        backbone=replace(DIT_SIZES["s"], patch=2, dropout=0.0),
        data=Data("cifar10"),
        steps=7000,
        batch=512,
        optimizer=Optimizer(lr=1e-3, beta_2=0.99, weight_decay=1e-2, warmup=500, schedule="cosine", final_lr=1e-5),
        ema=Ema(beta=0.999, start=1000),
        every=Every(journal=50, evaluate=1000, sample=1000, checkpoint=1000),
        evaluation=Evaluation(images=2048, measure=2, recon=2, batch=512),
    )


def cifar10_dit_mini(method: str = "bsi") -> Recipe:
    """A DiT of 10M parameters on CIFAR-10, for studies that need many runs. All values are ours.

    Command: bsi train cifar10-dit-mini
    Hardware: 1 x H200
    Time: 3 minutes (22,400 images/s)
    Expected: not yet run
    Paper: none
    """
    return replace(
        cifar10_dit_s(method),
        name="cifar10-dit-mini",
        backbone=replace(DIT_SIZES["mini"], patch=2, dropout=0.05),
    )


def cifar10_20min_bpd(method: str = "bsi") -> Recipe:
    """The best likelihood in twenty minutes of one GPU: VDM's U-Net with a quarter of its levels, and Muon.

    Command: bsi train cifar10-20min-bpd
    Hardware: 1 x H200
    Time: 15 minutes (50.9 steps/s)
    Expected: 2.885 ± 0.007 bits/dim on the whole test set (0.0004 of it Monte Carlo), trained with flips
    Paper: none
    """
    return Recipe(
        name="cifar10-20min-bpd",
        method=METHODS[method](),
        backbone=UNetConfig(width=128, levels=8, heads=1, dropout=0.0),
        data=Data("cifar10", flips=True),
        objective=Objective(levels="expected"),
        steps=45_000,
        batch=128,
        optimizer=Optimizer(lr=3e-3, kind="muon", beta_2=0.99, warmup=300, schedule="cosine"),
        ema=Ema(beta=0.999, start=1000),
        every=Every(journal=200, evaluate=10_000, sample=10_000, checkpoint=5000),
        evaluation=Evaluation(images=2048, measure=2, recon=2, batch=512),
    )


def cifar10_20min_fid(method: str = "bsi") -> Recipe:
    """The best samples in twenty minutes of one GPU: a U-Net at three resolutions, labels, and EDM's weights.

    Command: bsi train cifar10-20min-fid, then bsi eval runs/cifar10-20min-fid --fid --num 10000 --labels --guidance 1.7
    Hardware: 1 x H200
    Time: 15 minutes (16.5 steps/s)
    Expected: FID 9.6 (10k samples, test set, 2 x 16 evaluations), guidance chosen among three, with flips
    Paper: none
    """
    return replace(
        cifar10_20min_bpd(method),
        name="cifar10-20min-fid",
        backbone=UNetConfig(width=128, levels=2, heads=4, dropout=0.0, coarser=(256, 256)),
        data=Data("cifar10", flips=True, labels=True),
        objective=Objective(weight="edm"),
        steps=14_500,
        batch=512,
        every=Every(journal=100, evaluate=5000, sample=5000, checkpoint=2500),
    )
