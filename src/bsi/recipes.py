"""Recipes: functions that return a complete `Recipe`, each with its evidence in its docstring. Imports no torch.

    recipe = bsi.recipes.cifar10_unet(method="bsi")
    recipe = dataclasses.replace(recipe, seed=1)

A docstring has a summary line and the fields of `Evidence`; results are in bits per dimension and FID. The first four
recipes are the paper's. Their settings are those of its Tables "model-params", "unet-cifar10-params",
"dit-imagenet32-params", "dit-imagenet64-params" and "unet-imagenet32-params". The tables give neither AdamW's betas,
nor ImageNet's warm-up, nor whether gradients are clipped: those settings are from the authors' code
(docs/authors-code.md). How often these runs are evaluated and saved is ours and does not change the result. The
commands are for one node with four GPUs, like the paper's; docs/many-gpus.md has commands for others.

All settings of the other recipes are ours, unless a comment names another source. Those named `-mini` are for a CPU and
take minutes: starting points for your own data, not tuned for anything.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from bsi.backbones.config import DIT_SIZES, AutoencoderConfig, DiTConfig, MLPConfig, UNetConfig
from bsi.errors import unknown
from bsi.methods import BFN, BSI, METHODS, VDM, Method
from bsi.recipe import Data, Ema, Evaluation, Every, Keep, Objective, Optimizer, Recipe, Samples
from bsi.sampler import Sampler

# For symbols, the first level should carry little information: BSI's random first belief makes its bound larger by half
# of c for each unit of variance, about 0.003 bits for a symbol with lambda_0 = 1e-3 and 0.03 with 1e-2. The last one
# need not be beyond the level at which symbols are certain: at 20 the reconstruction term of 256 equally frequent
# symbols is 1e-7 nats.
SYMBOLS: dict[str, Method] = {
    "bsi": BSI(lambda_0=1e-3, alpha_M=20.0),
    "bfn": BFN(sigma_1=21**-0.5),
    "vdm": VDM(nu_min=1e-3, nu_max=20.0),
}


# Of a small U-Net for a few hundred steps. On gray CIFAR-10 of 28x28, 300 steps of 32 images: 5.24 bits/dim, 5.44
# with a learning rate of 4e-3, 5.58 with 2e-2, and 5.74 with AdamW and 2e-3 (500 test images, Monte Carlo error 0.01).
MUON_MINI = Optimizer(kind="muon", lr=1e-2, beta_2=0.99, warmup=50, schedule="cosine", final_lr=1e-5)


def _with_last_precision(method: str, precision: float) -> Method:
    """The method with this precision of the data at the last level; others than ours keep their own."""
    ours = {"bsi": {"alpha_M": precision}, "bfn": {"sigma_1": precision**-0.5}, "vdm": {"nu_max": precision}}
    return METHODS[method](**ours.get(method, {}))


# ---- The paper's -----------------------------------------------------------------------------------------------------


def cifar10_unet(method: str = "bsi") -> Recipe:
    """The paper's CIFAR-10 model: VDM's U-Net, 5M steps (BFN's budget), or 10M (VDM's) with --steps 10000000.

    Command: torchrun --nproc-per-node 4 -m bsi train cifar10-unet
    Hardware: 4 x H100 in the paper
    Time: 190 hours for 5M steps, 380 for 10M (26300 steps per hour in the paper)
    Paper: BSI 2.65 bits/dim after 5M steps (BFN 2.66), 2.64 after 10M (VDM 2.65)
    """
    return Recipe(
        name="cifar10-unet", method=METHODS[method](), backbone=UNetConfig(width=128, levels=32, heads=1, dropout=0.1),
        data=Data("cifar10"), steps=5_000_000, batch=128,
        optimizer=Optimizer(lr=2e-4, beta_2=0.99, weight_decay=1e-2, schedule="constant", warmup=0, clip=1.0),
        ema=Ema(beta=0.9999, start=1000), every=Every(journal=100, evaluate=50_000, sample=50_000, checkpoint=5000),
        keep=Keep(last=2, every=500_000),
    )  # fmt: skip


def imagenet32_dit_l2(method: str = "bsi") -> Recipe:
    """The paper's main model on ImageNet32: DiT-L/2, 2M steps.

    Command: torchrun --nproc-per-node 4 -m bsi train imagenet32-dit-l2
    Hardware: 4 x H100 in the paper
    Time: 330 hours (6100 steps per hour in the paper)
    Paper: BSI 3.448 ± 0.006 bits/dim, FID 8.9 ± 0.1; BFN 3.448 ± 0.005, 11.0 ± 0.1; VDM 3.452 ± 0.006, 9.9 ± 0.5
    """
    return replace(
        cifar10_unet(method), name="imagenet32-dit-l2", backbone=replace(DIT_SIZES["l"], patch=2, dropout=0.05),
        data=Data("imagenet32"), steps=2_000_000, batch=512,
        optimizer=Optimizer(
            lr=5e-4, beta_2=0.99, weight_decay=1e-2, schedule="cosine", final_lr=5e-5, warmup=1000, clip=1.0
        ),
        every=Every(journal=100, evaluate=20_000, sample=20_000, checkpoint=2000), keep=Keep(last=2, every=200_000),
    )  # fmt: skip


def imagenet64_dit_l4(method: str = "bsi") -> Recipe:
    """The paper's model on ImageNet64: DiT-L/4, 1M steps.

    Command: torchrun --nproc-per-node 4 -m bsi train imagenet64-dit-l4
    Hardware: 4 x H100 in the paper
    Time: 160 hours (estimated: as many tokens per image as at 32x32 with patches of 2)
    Paper: BSI 3.218 ± 0.004 bits/dim, FID 30.1 ± 0.4; BFN 3.222 ± 0.006, 38.2 ± 0.8; VDM 3.228 ± 0.006, 35.2 ± 0.7
    """
    return replace(
        imagenet32_dit_l2(method), name="imagenet64-dit-l4", backbone=replace(DIT_SIZES["l"], patch=4, dropout=0.05),
        data=Data("imagenet64"), steps=1_000_000,
    )  # fmt: skip


def imagenet32_unet(method: str = "bsi") -> Recipe:
    """The paper's check that the architecture does not matter: VDM's U-Net on ImageNet32, 100k steps.

    Command: torchrun --nproc-per-node 4 -m bsi train imagenet32-unet
    Hardware: 4 x H100 in the paper
    Time: not given in the paper
    Paper: BSI 3.510 ± 0.009 bits/dim, FID 12.8 ± 0.6; BFN 3.505 ± 0.001, 14.2 ± 0.4; VDM 3.527 ± 0.009, 15.4 ± 1.5
    """
    return replace(
        imagenet32_dit_l2(method), name="imagenet32-unet",
        backbone=UNetConfig(width=256, levels=32, heads=1, dropout=0.1), steps=100_000,
        every=Every(journal=100, evaluate=5000, sample=5000, checkpoint=2000), keep=Keep(last=2, every=20_000),
    )  # fmt: skip


# ---- Ours ------------------------------------------------------------------------------------------------------------


def cifar10_dit_s(method: str = "bsi") -> Recipe:
    """DiT-S/2 on CIFAR-10, for short experiments on one GPU. All values are ours.

    Command: bsi train cifar10-dit-s
    Hardware: 1 x H200
    Time: 7 minutes
    Expected: 3.282 ± 0.007 bits/dim (0.002 of it Monte Carlo); FID 52.7 ± 0.3 at 16 evaluations (10k samples, test set)
    """
    return Recipe(
        name="cifar10-dit-s", method=METHODS[method](), backbone=replace(DIT_SIZES["s"], patch=2, dropout=0.0),
        data=Data("cifar10"), steps=7000, batch=512,
        optimizer=Optimizer(lr=1e-3, beta_2=0.99, warmup=500, schedule="cosine", final_lr=1e-5),
        ema=Ema(beta=0.999, start=1000), every=Every(journal=50, evaluate=1000, sample=1000, checkpoint=1000),
        evaluation=Evaluation(images=2048, measure=2, recon=2, batch=512),
    )  # fmt: skip


def cifar10_dit_mini(method: str = "bsi") -> Recipe:
    """A DiT of 10M parameters on CIFAR-10, for studies that need many runs. All values are ours.

    Command: bsi train cifar10-dit-mini
    Hardware: 1 x H200
    Time: 3 minutes (22,400 images/s)
    """
    backbone = replace(DIT_SIZES["mini"], patch=2, dropout=0.05)
    return replace(cifar10_dit_s(method), name="cifar10-dit-mini", backbone=backbone)


def cifar10_20min_bpd(method: str = "bsi") -> Recipe:
    """The best likelihood in twenty minutes of one GPU: VDM's U-Net with a quarter of its levels, and Muon.

    Command: bsi train cifar10-20min-bpd
    Hardware: 1 x H200
    Time: 15 minutes (50.9 steps/s)
    Expected: 2.885 ± 0.007 bits/dim on the whole test set (0.0004 of it Monte Carlo), trained with flips
    """
    return replace(
        cifar10_dit_s(method), name="cifar10-20min-bpd",
        backbone=UNetConfig(width=128, levels=8, heads=1, dropout=0.0), data=Data("cifar10", flips=True),
        objective=Objective(levels="expected"), steps=45_000, batch=128,
        optimizer=Optimizer(lr=3e-3, kind="muon", beta_2=0.99, warmup=300, schedule="cosine"),
        every=Every(journal=200, evaluate=10_000, sample=10_000, checkpoint=5000),
    )  # fmt: skip


def cifar10_speedrun_bpd(method: str = "bsi") -> Recipe:
    """The record for bits per dimension in fifteen minutes of one GPU: `cifar10-20min-bpd`, blended and clipped.

    Command: bsi train cifar10-speedrun-bpd
    Hardware: 1 x H200
    Time: 15 minutes (52.5 steps/s)
    Expected: 2.879 ± 0.007 bits/dim on the whole test set (0.0004 of it Monte Carlo), trained with flips; see
        docs/speedrun.md
    """
    return replace(
        cifar10_20min_bpd(method), name="cifar10-speedrun-bpd", method=METHODS[method](clips=True),
        parametrization="blend", steps=45_828, ema=Ema(beta=1 - 45 / 45_828, start=1000),
    )  # fmt: skip


def cifar10_20min_fid(method: str = "bsi") -> Recipe:
    """The best samples in twenty minutes of one GPU: a U-Net at three resolutions, labels, and EDM's weights.

    Command: bsi train cifar10-20min-fid, then bsi eval runs/cifar10-20min-fid --fid --num 10000 --labels --guidance 1.7
    Hardware: 1 x H200
    Time: 15 minutes (16.5 steps/s)
    Expected: FID 9.6 (10k samples, test set, 2 x 16 evaluations), guidance chosen among three, with flips
    """
    return replace(
        cifar10_20min_bpd(method), name="cifar10-20min-fid",
        backbone=UNetConfig(width=128, levels=2, heads=4, dropout=0.0, coarser=(256, 256)),
        data=Data("cifar10", flips=True, labels=True), objective=Objective(weight="edm"), steps=14_500, batch=512,
        every=Every(journal=100, evaluate=5000, sample=5000, checkpoint=2500),
    )  # fmt: skip


def folder(method: str = "bsi") -> Recipe:
    """Your own images, prepared with `bsi data`: DiT-S/2, mirrored at random. For 64x64 add --backbone dit-s/4.

    Command: bsi train folder --data.name NAME
    Hardware: 1 GPU
    Time: 40 minutes for 32x32 on an H200 (estimated from cifar10-dit-s)
    """
    return Recipe(
        name="folder", method=METHODS[method](), backbone=replace(DIT_SIZES["s"], patch=2, dropout=0.05),
        data=Data("folder", flips=True), steps=40_000, batch=512,
        optimizer=Optimizer(lr=5e-4, warmup=1000, schedule="cosine", final_lr=5e-5), ema=Ema(beta=0.9995, start=1000),
        every=Every(journal=50, evaluate=2000, sample=2000, checkpoint=1000),
    )  # fmt: skip


def folder_mini(method: str = "bsi") -> Recipe:
    """Your own small images on a CPU: a U-Net of 1.2M parameters at three resolutions. See `folder` for a GPU.

    Command: bsi train folder-mini --data.name NAME
    Hardware: two CPU cores
    Time: 7 minutes for 28x28 (2.9 steps/s)
    Expected: 1.168 ± 0.009 bits/dim on MNIST as PNG files with --data.no-flips (1000 test images, Monte Carlo error
        0.003; PNG 1.75, lossless WebP 1.53). With --steps 300 on CIFAR-10 in gray, cropped to 28x28: 5.24 ± 0.03 (PNG
        5.92, WebP 5.75)
    """
    return replace(
        folder(method), name="folder-mini",
        backbone=UNetConfig(width=32, levels=1, heads=4, dropout=0.0, coarser=(64, 64)), steps=1200, batch=32,
        optimizer=MUON_MINI, ema=Ema(beta=0.995, start=100),
        every=Every(journal=20, evaluate=400, sample=400, checkpoint=200), evaluation=Evaluation(images=256),
        # After such a short training, more steps with noise, which corrects their errors, give much better samples.
        samples=Samples(count=36, sampler=Sampler(steps=50, solver="sde2")), compile=False,
    )  # fmt: skip


# ---- Latents ---------------------------------------------------------------------------------------------------------


def autoencoder_f4(method: str = "bsi") -> Recipe:
    """An autoencoder of images: latents of 4 channels, 4 times smaller along each axis. See docs/high-resolution.md.

    Command: bsi train autoencoder-f4 --data.name NAME
    Hardware: 1 GPU
    """
    return Recipe(
        name="autoencoder-f4", method=METHODS[method](), backbone=AutoencoderConfig(channels=4, widths=(128, 256)),
        data=Data("folder", flips=True), steps=20_000, batch=64, objective=Objective(weight="reconstruction"),
        parametrization="reconstruction",
        optimizer=Optimizer(lr=5e-4, beta_2=0.99, warmup=500, schedule="cosine", final_lr=1e-6),
        ema=Ema(beta=0.999, start=500), every=Every(journal=50, evaluate=0, sample=0, checkpoint=1000),
    )  # fmt: skip


def autoencoder_f8(method: str = "bsi") -> Recipe:
    """An autoencoder of large images: latents of 16 channels, 8 times smaller along each axis.

    Command: bsi train autoencoder-f8 --data.name NAME
    Hardware: 1 GPU
    """
    return replace(
        autoencoder_f4(method), name="autoencoder-f8",
        backbone=AutoencoderConfig(channels=16, widths=(128, 256, 256)),
    )  # fmt: skip


def autoencoder_mini(method: str = "bsi") -> Recipe:
    """An autoencoder of small images on a CPU: latents of 4 channels, 2 times smaller along each axis.

    Command: bsi train autoencoder-mini --data.name NAME
    Hardware: one CPU core
    """
    return replace(
        autoencoder_f4(method), name="autoencoder-mini", data=Data("digits"),
        backbone=AutoencoderConfig(channels=4, widths=(32,), blocks=1), steps=1000, batch=32, compile=False,
        optimizer=Optimizer(lr=2e-3, beta_2=0.99, warmup=50, schedule="cosine", final_lr=1e-5),
        ema=Ema(beta=0.99, start=50), every=Every(journal=50, evaluate=0, sample=0, checkpoint=500),
    )  # fmt: skip


def latents(method: str = "bsi") -> Recipe:
    """Latents of your own images, prepared with `bsi data latents`: a DiT-B/2. Details below 0.01 standard deviations
    are left to the decoder of the latents (--method.alpha-M).

    Command: bsi train latents --data.name NAME
    Hardware: 1 GPU
    """
    return replace(
        folder(method), name="latents", method=_with_last_precision(method, 1e4),
        backbone=replace(DIT_SIZES["b"], patch=2, dropout=0.05), data=Data("latents"),
    )  # fmt: skip


def latents_mini(method: str = "bsi") -> Recipe:
    """Latents of your own small images on a CPU: a small DiT.

    Command: bsi train latents-mini --data.name NAME
    Hardware: one CPU core
    """
    return replace(
        latents(method), name="latents-mini", backbone=DiTConfig(width=64, depth=3, heads=4, patch=2, dropout=0.0),
        data=Data("digits-latents"), steps=2000, batch=32, compile=False,
        optimizer=Optimizer(kind="muon", lr=1e-2, beta_2=0.99, warmup=50, schedule="cosine", final_lr=1e-5),
        ema=Ema(beta=0.99, start=50), every=Every(journal=50, evaluate=1000, sample=0, checkpoint=500),
        evaluation=Evaluation(images=256, measure=4, recon=2), samples=Samples(count=36),
    )  # fmt: skip


# ---- Digits and symbols ----------------------------------------------------------------------------------------------


def digits(method: str = "bsi") -> Recipe:
    """8x8 digits with 17 gray levels, a small DiT, float32. All values are ours.

    Command: bsi train digits
    Hardware: two CPU cores
    Time: 2.5 minutes
    Expected: 1.82 ± 0.02 bits/dim on the test set; 2.44 with a histogram for each pixel
    """
    return Recipe(
        name="digits",
        # 17 gray levels need no precision above 1e4; 256 levels do. Training on higher precisions makes the bound worse
        # (2.08 instead of 1.92 bits/dim after 3000 steps, at two learning rates).
        method=_with_last_precision(method, 1e4),
        backbone=DiTConfig(width=64, depth=3, heads=4, patch=2, dropout=0.0), data=Data("digits"), steps=4000,
        batch=64, virtual_shards=16,
        optimizer=Optimizer(kind="muon", lr=1e-2, beta_2=0.99, warmup=100, schedule="cosine", final_lr=1e-5),
        ema=Ema(beta=0.995, start=100), precision="float32", compile=False,
        threads=1,  # two threads are not faster at this size
        every=Every(journal=50, evaluate=1000, sample=1000, checkpoint=500),
        evaluation=Evaluation(images=299, measure=4, recon=2),
    )  # fmt: skip


def binary_digits(method: str = "bsi") -> Recipe:
    """8x8 digits in black and white: a small DiT on a CPU.

    Command: bsi data binary --from digits; bsi train binary-digits
    Hardware: two CPU cores
    Time: 1 minute
    Expected: 0.482 ± 0.014 bits/pixel (0.011 of it Monte Carlo); a histogram of each pixel takes 0.55
    """
    return replace(
        digits(method), name="binary-digits", method=SYMBOLS[method], data=Data("digits-binary"), steps=2000,
        every=Every(journal=50, evaluate=500, sample=500, checkpoint=500), samples=Samples(sampler=Sampler(steps=32)),
    )  # fmt: skip


def text_mini(method: str = "bsi") -> Recipe:
    """Text on a CPU: characters in blocks of 64, a U-Net of 0.5M parameters. Prepare your own with `bsi data text`.

    Command: bsi data text --length 64 (Python's manual, or --from corpus.txt); bsi train text-mini
    Hardware: two CPU cores
    Time: 2 minutes of one core (12 steps/s)
    Expected: 3.44 ± 0.02 bits/char on 1.1 MB of Shakespeare's plays (3.90 with --steps 150); single characters take
        4.83, 6-grams 2.35
    """
    return replace(
        digits(method), name="text-mini", method=SYMBOLS[method],
        # Convolutions know which characters are neighbors. With sinusoidal positions a DiT has to learn it first: after
        # 150 steps it is at the entropy of single characters (4.7 bits), the U-Net at 3.7.
        backbone=UNetConfig(width=48, levels=1, heads=4, dropout=0.0, coarser=(72,)), data=Data("text"), steps=1500,
        batch=32, optimizer=replace(digits().optimizer, lr=5e-3, warmup=50), ema=Ema(beta=0.99, start=50),
        every=Every(journal=25, evaluate=500, sample=500, checkpoint=250),
        evaluation=Evaluation(images=256, measure=4, recon=2), samples=Samples(count=4, sampler=Sampler(steps=32)),
    )  # fmt: skip


def mnist_binary(method: str = "bsi") -> Recipe:
    """Binarized MNIST, 28x28: a U-Net at three resolutions on a GPU.

    Command: bsi train mnist-binary --data.name NAME
    Hardware: 1 GPU
    Time: 30 minutes on an H200 (estimated)
    Paper: none; 77.9 nats per image, 0.143 bits per pixel, for a Bayesian flow network (Graves et al., 2023)
    """
    return Recipe(
        name="mnist-binary", method=SYMBOLS[method],
        backbone=UNetConfig(width=128, levels=2, heads=4, dropout=0.3, coarser=(256, 256)), data=Data("mnist-binary"),
        steps=30_000, batch=512, optimizer=Optimizer(lr=5e-4, warmup=500, schedule="cosine", final_lr=1e-6),
        ema=Ema(beta=0.9995, start=1000), every=Every(journal=50, evaluate=2000, sample=2000, checkpoint=1000),
        samples=Samples(sampler=Sampler(steps=64)),
    )  # fmt: skip


def text8(method: str = "bsi") -> Recipe:
    """text8, 27 characters in blocks of 256: a DiT-B with a token for each character.

    Command: bsi data text --from text8 --length 256; bsi train text8 --data.name text8
    Hardware: 8 GPUs
    Paper: none; 1.41 bits per character for a Bayesian flow network (Graves et al., 2023)
    """
    return Recipe(
        name="text8", method=SYMBOLS[method], backbone=replace(DIT_SIZES["b"], patch=1, kernel=5, dropout=0.01),
        data=Data("text8", windows=True), steps=1_000_000, batch=3072, optimizer=Optimizer(lr=2e-4, warmup=2500),
        ema=Ema(beta=0.9999, start=1000), every=Every(journal=50, evaluate=10_000, sample=10_000, checkpoint=5000),
        samples=Samples(count=4, sampler=Sampler(steps=256)),
    )  # fmt: skip


# ---- Vectors, series, sound ------------------------------------------------------------------------------------------


def arrays(method: str = "bsi") -> Recipe:
    """Your own vectors, prepared with `bsi data`: a residual MLP, trained for long. See `table-mini` for a short run.

    An MLP does not use the order of the values: see `series-mini` for series, and use --backbone dit-s/4 on a GPU.

    Command: bsi train arrays --data.name NAME
    Hardware: two CPU cores, or 1 GPU
    Time: 10 minutes for a few dozen dimensions on two cores
    """
    return Recipe(
        name="arrays", method=METHODS[method](), backbone=MLPConfig(width=256, depth=4), data=Data("arrays"),
        steps=20_000, batch=256, optimizer=Optimizer(lr=1e-3, warmup=500, schedule="cosine", final_lr=1e-5),
        ema=Ema(beta=0.999, start=1000), compile=False,
        every=Every(journal=100, evaluate=2000, sample=0, checkpoint=1000),
    )  # fmt: skip


def table_mini(method: str = "bsi") -> Recipe:
    """Your own table, one row for each sample: a small residual MLP on a CPU. Details below 0.01 standard deviations
    are left to the decoder (--method.alpha-M).

    Command: bsi train table-mini --data.name NAME
    Hardware: one CPU core
    Time: 2 minutes
    """
    return replace(
        arrays(method), name="table-mini", method=_with_last_precision(method, 1e4),
        backbone=MLPConfig(width=128, depth=2), data=Data("table"), steps=3000,
        optimizer=replace(arrays().optimizer, warmup=100), ema=Ema(beta=0.995, start=200),
        every=Every(journal=20, evaluate=500, sample=0, checkpoint=500),
    )  # fmt: skip


def series_mini(method: str = "bsi") -> Recipe:
    """Your own time series (channels, length) of continuous values: a 1-D U-Net on a CPU. Details below 0.01 standard
    deviations are left to the decoder (--method.alpha-M).

    Command: bsi train series-mini --data.name NAME
    Hardware: two CPU cores
    Time: 10 minutes for 128 steps
    """
    return replace(
        table_mini(method), name="series-mini",
        backbone=UNetConfig(width=32, levels=1, heads=4, dropout=0.0, coarser=(64, 64)), data=Data("series"),
        steps=2000, batch=32, optimizer=Optimizer(lr=2e-3, warmup=50, schedule="cosine", final_lr=1e-5),
    )  # fmt: skip


def audio_mini(method: str = "bsi") -> Recipe:
    """Your own 16-bit sound, prepared with `bsi data wav`: a 1-D U-Net on a CPU, with a last precision for 65536 bins.

    Command: bsi train audio-mini --data.name NAME
    Hardware: two CPU cores
    Time: 10 minutes for pieces of 256 values
    Expected: 9.82 ± 0.04 bits/dim (0.03 of it Monte Carlo) after 827 steps on synthetic tones of 16 bits; linear
        prediction of the same pieces takes 10.61, FLAC 10.10 with the whole files
    """
    return replace(
        series_mini(method), name="audio-mini",
        method=_with_last_precision(method, 6.7e10),  # noise of an eighth of a bin, the paper's ratio for 8-bit images
        data=Data("sounds"), batch=16, steps=1500, optimizer=MUON_MINI, evaluation=Evaluation(batch=16),
    )  # fmt: skip


# ---- All recipes -----------------------------------------------------------------------------------------------------

RECIPES: dict[str, Callable[[str], Recipe]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        digits, binary_digits, text_mini, cifar10_unet, cifar10_dit_s, cifar10_dit_mini, cifar10_20min_bpd,
        cifar10_speedrun_bpd, cifar10_20min_fid, imagenet32_dit_l2, imagenet64_dit_l4, imagenet32_unet, mnist_binary,
        text8, folder, folder_mini, autoencoder_mini, autoencoder_f4, autoencoder_f8, latents, latents_mini, arrays,
        table_mini, series_mini, audio_mini,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Evidence:
    """The evidence in a recipe's docstring. "Not yet run": the command was not run to its end, and no value exists."""

    summary: str
    command: str
    hardware: str
    time: str = "not yet run"
    expected: str = "not yet run"
    paper: str = "none"


def named_recipe(name: str, method: str = "bsi") -> Recipe:
    """The recipe of that name, for one of the methods."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name](method)


def evidence(name: str) -> Evidence:
    """The lines `Command: ...` to `Paper: ...` of a recipe's docstring; indented lines continue the one above."""
    doc = inspect.cleandoc(RECIPES[name].__doc__ or "")
    found = {
        key.lower(): " ".join(value.split()) for key, value in re.findall(r"^([A-Z]\w+): (.*(?:\n +.*)*)", doc, re.M)
    }
    return Evidence(summary=doc.splitlines()[0], **found)
