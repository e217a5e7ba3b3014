"""The scales: all settings that determine the size of a study, one record per scale. Imports no torch.

The scales medium and paper have not been run yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from bsi import recipes
from bsi.backbones.config import DiTConfig, UNetConfig
from bsi.recipe import Ema, Every, Keep, Optimizer, Recipe

MetricName = Literal["fd-digits", "FID"]
METHOD_NAMES = ("bfn", "vdm", "bsi")  # in the order of the paper's tables
RecipeOf = Callable[[str], Recipe]  # the recipe for a method


class DatasetSize(NamedTuple):
    """What a time estimate needs of a dataset, which need not be on this machine."""

    title: str
    shape: tuple[int, ...]
    bins: int
    test_images: int


DATASETS = {
    "digits": DatasetSize("digits", (1, 8, 8), 17, 299),
    "cifar10": DatasetSize("CIFAR-10", (3, 32, 32), 256, 10_000),
    "imagenet32": DatasetSize("ImageNet32", (3, 32, 32), 256, 50_000),
    "imagenet64": DatasetSize("ImageNet64", (3, 64, 64), 256, 50_000),
}


class Throughput(NamedTuple):
    """The speed of a scale's hardware, for time estimates."""

    training: float  # FLOP/s of a DiT
    evaluation: float  # FLOP/s of a DiT
    unet: float  # FLOP/s of a U-Net relative to a DiT
    metric: float  # images per second through the feature network of the Fréchet distance
    startup_s: float  # loading and compiling, once for each job


@dataclass(frozen=True)
class Comparison:
    """Networks of one backbone, dataset and budget, for several methods and seeds."""

    recipe: RecipeOf
    seeds: tuple[int, ...]
    methods: tuple[str, ...] = METHOD_NAMES
    samples: bool = True  # whether sample quality is compared too, or the likelihood alone

    def networks(self, method: str, **parameters: Any) -> list[Recipe]:
        """The networks of one method with these parameters, one for each seed of weights, data, levels and noise."""
        recipe = self.recipe(method)
        changed = type(recipe.method)(**{**vars(recipe.method), **parameters})
        return [replace(recipe, seed=seed, method=changed) for seed in self.seeds]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Every setting of the studies that depends on their scale."""

    name: str
    summary: str
    studies: tuple[str, ...] | None = None  # the studies that this scale is for; None for all of them
    requested_seeds: int | None = None  # by --seeds, in place of the scale's own
    throughput: Throughput

    # Networks
    comparisons: tuple[Comparison, ...]  # the first one is shown in figures
    architecture: Comparison  # the comparison with the other backbone
    parameters: Comparison  # of the parameter studies; the paper trains them for fewer steps
    convergence: RecipeOf  # its samples are drawn in few and many steps; the paper takes ImageNet64
    profiled: RecipeOf  # its range of h / p is measured; the paper takes CIFAR-10
    transitions: RecipeOf  # its bound for finitely many steps is tightened by variances

    # Samples
    metric: MetricName
    samples: int  # of a Fréchet distance
    references: tuple[str, ...] = ("test",)  # parts of the dataset to compare with: the paper takes the test set
    steps: tuple[int, ...]  # of the paper's sampler, for each network of a comparison

    # Evaluations of each image
    levels: int  # for L_M^inf; the paper takes 5
    recon: int  # for L_R; the paper takes 2
    finite_levels: int = 100  # for L_M^k - L_M^inf, as in the paper
    ks: tuple[int, ...]  # of L_M^k; up to most_steps also of the samplers in Figure "fid-convergence"
    profile_levels: int
    profile_images: int
    batch: int  # also of samples

    # Parameter studies
    lambda_0: tuple[float, ...]
    parameter_steps: tuple[int, ...]  # of the paper's sampler, and k' of L_M^k', from few to many
    gamma_0: tuple[float, ...]  # between lambda_0, which is BSI, and infinity, which is its BFN
    trained_k: tuple[int, ...]
    bias: tuple[float, ...]  # values of ln SNR at which a sigmoid weight is one half

    @property
    def most_steps(self) -> int:
        """The number of steps of the paper's sampler at which methods are compared."""
        return max(self.steps)

    def with_seeds(self, number: int) -> Scale:
        """The same with this many seeds for all networks that are compared with each other."""
        seeds = tuple(range(number))
        comparisons = tuple(replace(c, seeds=seeds) if len(c.methods) > 1 else c for c in self.comparisons)
        architecture, parameters = (replace(c, seeds=seeds) for c in (self.architecture, self.parameters))
        changed = replace(self, comparisons=comparisons, architecture=architecture, parameters=parameters)
        return replace(changed, requested_seeds=number)


def _short(recipe: Recipe, steps: int, checkpoint: int = 1000) -> Recipe:
    """A recipe of another length, without evaluations during training."""
    every = Every(journal=min(50, steps), evaluate=0, sample=0, checkpoint=checkpoint)
    return replace(recipe, steps=steps, every=every, keep=Keep(last=1))


def _smoke(method: str) -> Recipe:
    """300 steps of a DiT with 22k parameters: about 5 s on one core."""
    return replace(
        _short(recipes.digits(method), steps=300),
        backbone=DiTConfig(width=32, depth=1, heads=2, patch=2, dropout=0.0),
        optimizer=Optimizer(lr=1e-2, beta_2=0.99, weight_decay=1e-2, warmup=30, schedule="cosine", final_lr=1e-5),
        ema=Ema(beta=0.97, start=30),
    )


def _mini(method: str) -> Recipe:
    """4000 steps of 512 images, 41 epochs: about 100 s on an H200 at 22,400 images/s."""
    return _short(recipes.cifar10_dit_mini(method), steps=4000)


def _mini_parameter(method: str) -> Recipe:
    """Half as many steps, as the paper does in its parameter studies; warm-up and averaging in proportion."""
    recipe = _short(recipes.cifar10_dit_mini(method), steps=2000)
    return replace(recipe, optimizer=replace(recipe.optimizer, warmup=250), ema=Ema(beta=0.998, start=500))


def _mini_transitions(method: str) -> Recipe:
    """The network `cifar10`. If the package bsi-networks is not installed, it is trained, in 15 minutes."""
    averages = Ema(beta=1 - 45 / 45_828, start=1000, powers=(0.05, 0.15), snapshot=11_457)
    return replace(recipes.cifar10_speedrun_bpd(method), ema=averages)


def _medium(method: str) -> Recipe:
    """The U-Net of cifar10-20min-bpd for 30,000 steps of 128 images: 9.8 minutes on an H200 at 50.9 steps/s."""
    return _short(recipes.cifar10_20min_bpd(method), steps=30_000, checkpoint=5000)


def _medium_dit(method: str) -> Recipe:
    """DiT-S/2 for 10,000 steps of 512 images, with the flips and levels of the U-Net: about 10 minutes on an H200."""
    unet = _medium(method)
    return replace(_short(recipes.cifar10_dit_s(method), steps=10_000), data=unet.data, objective=unet.objective)


def _paper_parameter(method: str) -> Recipe:
    """ "We reduced the training steps to 100k for our parameter studies." """
    return replace(recipes.imagenet32_dit_l2(method), steps=100_000, keep=Keep(last=2, every=20_000))


MINI = Scale(
    name="mini",
    summary="CIFAR-10, one H200; DiTs of 10M parameters and U-Nets of 2M train for one or two minutes",
    # Measured: 21,600 images/s in training, 34 s for 256 steps of 10,000 samples, 5250 images/s for the FID features.
    throughput=Throughput(training=245e12, evaluation=300e12, unet=0.6, metric=5000.0, startup_s=4.0),
    comparisons=(Comparison(_mini, seeds=(0, 1)),),
    # A U-Net with 2.2M parameters, with attention in the middle only.
    architecture=Comparison(
        lambda method: replace(_mini(method), backbone=UNetConfig(64, levels=8, dropout=0.1), batch=256), seeds=(0,)
    ),
    parameters=Comparison(_mini_parameter, seeds=(0, 1, 2)),
    convergence=_mini,
    profiled=_mini,
    transitions=_mini_transitions,
    metric="FID",
    samples=10_000,
    steps=(16, 64, 256),
    levels=20,
    recon=4,
    ks=(8, 16, 32, 64, 128, 256, 512, 1024),
    profile_levels=129,
    profile_images=1000,
    batch=1024,
    # Few values, and three seeds each: one seed leaves most verdicts open.
    lambda_0=(1e-4, 1e-2, 1.0),
    gamma_0=(1.0,),
    trained_k=(16, 64),
    parameter_steps=(16, 64, 256),
    bias=(2.0,),
)

SMOKE = replace(
    MINI,
    name="smoke",
    summary="8x8 digits, a CPU with two cores; networks train for seconds",
    throughput=Throughput(training=9e9, evaluation=10e9, unet=0.8, metric=10_000.0, startup_s=1.0),
    comparisons=(Comparison(_smoke, seeds=(0,)),),
    architecture=Comparison(
        lambda method: replace(_smoke(method), backbone=UNetConfig(16, levels=1, dropout=0.0), batch=32), seeds=(0,)
    ),
    parameters=Comparison(_smoke, seeds=(0,)),
    convergence=_smoke,
    profiled=_smoke,
    transitions=_smoke,
    metric="fd-digits",
    samples=512,
    steps=(8, 32),
    levels=8,
    finite_levels=20,
    ks=(4, 16, 32, 128),
    profile_levels=33,
    profile_images=64,
    batch=256,
    trained_k=(16,),
    parameter_steps=(8, 32),
)

MEDIUM = replace(
    MINI,
    name="medium",
    summary="CIFAR-10, one H200; U-Nets and DiTs of 30M parameters train for ten minutes",
    studies=("comparison", "architecture"),
    # From 50.9 steps/s of the U-Net and 8956 images/s of DiT-S/2 in training; the rest is estimated.
    throughput=Throughput(training=325e12, evaluation=400e12, unet=0.94, metric=5000.0, startup_s=4.0),
    comparisons=(Comparison(_medium, seeds=(0, 1, 2)),),
    architecture=Comparison(_medium_dit, seeds=(0, 1, 2)),
    samples=50_000,
    references=("test", "train"),
    steps=(16, 64, 256),  # 50,000 samples in 1024 steps would take 35 minutes for each network
    batch=1000,
)

PAPER = replace(
    MINI,
    name="paper",
    summary="ImageNet32, ImageNet64 and CIFAR-10, 4 x H100 for training; the paper's networks, budgets and seeds",
    throughput=Throughput(training=4 * 105e12, evaluation=300e12, unet=0.9, metric=2500.0, startup_s=60.0),
    comparisons=(
        Comparison(recipes.imagenet32_dit_l2, seeds=(0, 1, 2)),
        Comparison(recipes.imagenet64_dit_l4, seeds=(0, 1, 2)),
        Comparison(lambda m: replace(recipes.cifar10_unet(m), steps=10_000_000), (0,), methods=("bsi",), samples=False),
        Comparison(recipes.cifar10_unet, (0,), methods=("bsi",), samples=False),
    ),
    architecture=Comparison(recipes.imagenet32_unet, seeds=(0, 1, 2)),
    parameters=Comparison(_paper_parameter, seeds=(0,)),
    convergence=recipes.imagenet64_dit_l4,
    profiled=recipes.cifar10_unet,
    transitions=recipes.cifar10_unet,
    samples=50_000,
    steps=(1024,),
    levels=5,
    recon=2,
    ks=(8, 16, 32, 64, 128, 256, 512, 1024, 4096),
    profile_levels=257,
    batch=500,
    lambda_0=(1e-4, 1e-3, 1e-2, 1e-1, 1.0),
    gamma_0=(1e-1, 1.0),
    trained_k=(16, 64, 256, 1024),
    parameter_steps=(16, 64, 256, 1024),
    bias=(2.0, 6.0),
)

SCALES: dict[str, Scale] = {scale.name: scale for scale in (SMOKE, MINI, MEDIUM, PAPER)}
