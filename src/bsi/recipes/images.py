"""Images: the paper's recipes for CIFAR-10 and ImageNet, smaller ones of ours, and starting points for your own images.

The paper's settings are those of its Tables "model-params", "unet-cifar10-params", "dit-imagenet32-params",
"dit-imagenet64-params" and "unet-imagenet32-params". The tables give neither AdamW's betas, nor ImageNet's warm-up, nor
whether gradients are clipped: those settings are from the authors' code (docs/authors-code.md). How often these runs
are evaluated and saved is ours and does not change the result. The commands are for one node with four GPUs, like the
paper's; docs/many-gpus.md has commands for others. All settings of the other recipes are ours.
"""

from __future__ import annotations

from dataclasses import replace

from bsi.backbones.config import DIT_SIZES, UNetConfig
from bsi.methods import METHODS
from bsi.recipe import Data, Ema, Evaluation, Every, Keep, Objective, Optimizer, Recipe, Samples


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
        optimizer=Optimizer(lr=2e-4, beta_2=0.99, weight_decay=1e-2, schedule="constant", warmup=0, clip=1.0),
        ema=Ema(beta=0.9999, start=1000),
        every=Every(journal=100, evaluate=50_000, sample=50_000, checkpoint=5000),
        keep=Keep(last=2, every=500_000),
    )


def imagenet32_dit_l2(method: str = "bsi") -> Recipe:
    """The paper's main model on ImageNet32: DiT-L/2, 2M steps.

    Command: torchrun --nproc-per-node 4 -m bsi train imagenet32-dit-l2
    Hardware: 4 x H100 in the paper
    Time: 330 hours (6100 steps per hour in the paper)
    Expected: not yet run
    Paper: BSI 3.448 ± 0.006 bits/dim, FID 8.9 ± 0.1; BFN 3.448 ± 0.005, 11.0 ± 0.1; VDM 3.452 ± 0.006, 9.9 ± 0.5
    """
    return replace(
        cifar10_unet(method),
        name="imagenet32-dit-l2",
        backbone=replace(DIT_SIZES["l"], patch=2, dropout=0.05),
        data=Data("imagenet32"),
        steps=2_000_000,
        batch=512,
        optimizer=Optimizer(
            lr=5e-4, beta_2=0.99, weight_decay=1e-2, schedule="cosine", final_lr=5e-5, warmup=1000, clip=1.0
        ),
        every=Every(journal=100, evaluate=20_000, sample=20_000, checkpoint=2000),
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
        every=Every(journal=100, evaluate=5000, sample=5000, checkpoint=2000),
        keep=Keep(last=2, every=20_000),
    )


# ---- Ours ------------------------------------------------------------------------------------------------------------


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
        optimizer=Optimizer(lr=1e-3, beta_2=0.99, warmup=500, schedule="cosine", final_lr=1e-5),
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
    backbone = replace(DIT_SIZES["mini"], patch=2, dropout=0.05)
    return replace(cifar10_dit_s(method), name="cifar10-dit-mini", backbone=backbone)


def cifar10_20min_bpd(method: str = "bsi") -> Recipe:
    """The best likelihood in twenty minutes of one GPU: VDM's U-Net with a quarter of its levels, and Muon.

    Command: bsi train cifar10-20min-bpd
    Hardware: 1 x H200
    Time: 15 minutes (50.9 steps/s)
    Expected: 2.885 ± 0.007 bits/dim on the whole test set (0.0004 of it Monte Carlo), trained with flips
    Paper: none
    """
    return replace(
        cifar10_dit_s(method),
        name="cifar10-20min-bpd",
        backbone=UNetConfig(width=128, levels=8, heads=1, dropout=0.0),
        data=Data("cifar10", flips=True),
        objective=Objective(levels="expected"),
        steps=45_000,
        batch=128,
        optimizer=Optimizer(lr=3e-3, kind="muon", beta_2=0.99, warmup=300, schedule="cosine"),
        every=Every(journal=200, evaluate=10_000, sample=10_000, checkpoint=5000),
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
        optimizer=Optimizer(lr=5e-4, warmup=1000, schedule="cosine", final_lr=5e-5),
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
    return replace(
        folder(method),
        name="folder-mini",
        backbone=UNetConfig(width=32, levels=1, heads=4, dropout=0.0, coarser=(64, 64)),
        steps=1800,
        batch=32,
        optimizer=Optimizer(lr=2e-3, warmup=50, schedule="cosine", final_lr=1e-5),
        ema=Ema(beta=0.995, start=100),
        every=Every(journal=20, evaluate=600, sample=600, checkpoint=300),
        evaluation=Evaluation(images=256),
        samples=Samples(count=36),
        compile=False,
    )
