"""Discrete data: text and black-and-white images. All values are ours, except those of the datasets.

The first level should carry little information: BSI's random first belief makes its bound larger by half of c for each
unit of variance, about 0.003 bits for a symbol with lambda_0 = 1e-3 and 0.03 with 1e-2. The last one need not be beyond
the level at which symbols are certain: at 20 the reconstruction term of 256 equally frequent symbols is below 1e-10.
"""

from __future__ import annotations

from bsi.backbones.config import DIT_SIZES, DiTConfig, UNetConfig
from bsi.methods import BFN, BSI, VDM, Method
from bsi.recipe import Data, Ema, Evaluation, Every, Optimizer, Recipe, Samples
from bsi.sampler import Sampler

SCHEDULES: dict[str, Method] = {
    "bsi": BSI(lambda_0=1e-3, alpha_M=20.0),
    "bfn": BFN(sigma_1=21**-0.5),
    "vdm": VDM(nu_min=1e-3, nu_max=20.0),
}


def text_mini(method: str = "bsi") -> Recipe:
    """Text on a CPU: characters in blocks of 64, a DiT of 0.6M parameters. Prepare your own with `bsi data text`.

    Command: bsi data text --from corpus.txt --length 64; bsi train text-mini --data.name corpus
    Hardware: two CPU cores
    Time: not yet run
    Expected: not yet run
    Paper: none
    """
    return Recipe(
        name="text-mini",
        method=SCHEDULES[method],
        backbone=DiTConfig(width=96, depth=3, heads=4, patch=1, dropout=0.0),
        data=Data("text"),
        steps=1500,
        batch=32,
        virtual_shards=16,
        optimizer=Optimizer(
            kind="muon", lr=1e-2, beta_2=0.99, weight_decay=1e-2, warmup=50, schedule="cosine", final_lr=1e-5
        ),
        ema=Ema(beta=0.99, start=50),
        precision="float32",
        compile=False,
        threads=1,
        every=Every(journal=25, evaluate=500, sample=500, checkpoint=250),
        evaluation=Evaluation(images=256, measure=4, recon=2),
        samples=Samples(count=4, sampler=Sampler(steps=32)),
    )


def binary_digits(method: str = "bsi") -> Recipe:
    """8x8 digits in black and white: a small DiT on a CPU.

    Command: bsi data binary --from digits; bsi train binary-digits
    Hardware: two CPU cores
    Time: not yet run
    Expected: not yet run
    Paper: none
    """
    return Recipe(
        name="binary-digits",
        method=SCHEDULES[method],
        backbone=DiTConfig(width=64, depth=3, heads=4, patch=2, dropout=0.0),
        data=Data("binary-digits"),
        steps=2000,
        batch=64,
        virtual_shards=16,
        optimizer=Optimizer(
            kind="muon", lr=1e-2, beta_2=0.99, weight_decay=1e-2, warmup=100, schedule="cosine", final_lr=1e-5
        ),
        ema=Ema(beta=0.995, start=100),
        precision="float32",
        compile=False,
        threads=1,
        every=Every(journal=50, evaluate=500, sample=500, checkpoint=500),
        evaluation=Evaluation(images=299, measure=4, recon=2),
        samples=Samples(sampler=Sampler(steps=32)),
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
        method=SCHEDULES[method],
        backbone=UNetConfig(width=128, levels=2, heads=4, dropout=0.3, coarser=(256, 256)),
        data=Data("mnist-binary"),
        steps=30_000,
        batch=512,
        optimizer=Optimizer(lr=5e-4, weight_decay=1e-2, warmup=500, schedule="cosine", final_lr=1e-6),
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
    backbone = DIT_SIZES["b"]
    return Recipe(
        name="text8",
        method=SCHEDULES[method],
        backbone=DiTConfig(width=backbone.width, depth=backbone.depth, heads=backbone.heads, patch=1, dropout=0.01),
        data=Data("text8"),
        steps=1_000_000,
        batch=3072,
        optimizer=Optimizer(lr=2e-4, weight_decay=1e-2, warmup=2500),
        ema=Ema(beta=0.9999, start=1000),
        every=Every(journal=50, evaluate=10_000, sample=10_000, checkpoint=5000),
        samples=Samples(count=4, sampler=Sampler(steps=256)),
    )
