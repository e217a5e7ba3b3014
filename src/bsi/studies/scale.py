"""How large a study is: everything that a study asks of its scale, as a record. Imports no torch.

The three that there are stand in scales.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from bsi.recipe import Recipe

__all__ = [
    "DATASETS",
    "METHOD_NAMES",
    "Comparison",
    "Drawn",
    "Known",
    "Measured",
    "MetricName",
    "Scale",
    "ScaleName",
    "Speed",
    "Varied",
]

ScaleName = Literal["smoke", "mini", "paper"]
MetricName = Literal["fd-digits", "FID"]
METHOD_NAMES: tuple[str, ...] = ("bsi", "bfn", "vdm")


@dataclass(frozen=True)
class Known:
    """A dataset as an estimate needs it, whether or not it is here."""

    title: str
    shape: tuple[int, ...]
    bins: int
    test_images: int


DATASETS: dict[str, Known] = {
    "digits": Known("digits", (1, 8, 8), 17, 299),
    "cifar10": Known("CIFAR-10", (3, 32, 32), 256, 10_000),
    "imagenet32": Known("ImageNet32", (3, 32, 32), 256, 50_000),
    "imagenet64": Known("ImageNet64", (3, 64, 64), 256, 50_000),
}


@dataclass(frozen=True)
class Speed:
    """What the hardware does, for estimates of time alone."""

    training: float
    """FLOP/s of a DiT's training steps."""
    evaluation: float
    """FLOP/s of its evaluations."""
    unet: float
    """A U-Net's FLOP/s relative to a DiT's."""
    metric: float
    """Images per second through the network of the Fréchet distance."""
    startup_s: float
    """Compiling and loading, once for each job."""


@dataclass(frozen=True)
class Comparison:
    """Networks of one backbone, dataset and budget, for each of the methods and seeds."""

    recipe: Callable[[str], Recipe]
    seeds: tuple[int, ...]
    methods: tuple[str, ...] = METHOD_NAMES
    samples: bool = True
    """Whether the quality of samples is compared, or the likelihood alone."""


@dataclass(frozen=True)
class Drawn:
    """How many samples a Fréchet distance takes, and in how many steps they are drawn."""

    num: int
    batch: int
    steps: tuple[int, ...]
    """Of the paper's sampler, for every network of a comparison; the largest is the one that is quoted."""
    long: int
    """For one seed of each method alone."""
    convergence: tuple[int, ...]
    """Along the curves of Figure "FID convergence"."""


@dataclass(frozen=True)
class Measured:
    """How closely a bound is estimated."""

    levels: int
    """For each image and L_M^inf; the paper takes 5."""
    recon: int
    """For each image and L_R; the paper takes 2."""
    finite_levels: int
    """For L_M^k - L_M^inf: the paper takes 100."""
    ks: tuple[int, ...]
    profile_levels: int
    """Levels at which the error of the prediction is looked at."""
    profile_images: int
    batch: int


@dataclass(frozen=True)
class Varied:
    """The values that parameter studies vary over."""

    lambda_0: tuple[float, ...]
    steps: tuple[int, ...]
    """Of the paper's sampler, for each lambda_0: few to many."""
    gamma_0: tuple[float, ...]
    trained_k: tuple[int, ...]
    evaluated_k: tuple[int, ...]
    bias: tuple[float, ...]
    """ln SNR at which a sigmoid weight is one half."""


@dataclass(frozen=True)
class Scale:
    """One of the three, complete."""

    name: ScaleName
    summary: str
    comparisons: tuple[Comparison, ...]
    """The first is the one that figures show."""
    architecture: Comparison
    """The same with the U-Net."""
    convergence: Comparison
    """Whose samples are drawn in few and many steps: on ImageNet64 in the paper."""
    profiled: Callable[[str], Recipe]
    """The network whose range of h/p is looked at: on CIFAR-10 in the paper."""
    parameter_recipe: Callable[[str], Recipe]
    """The networks of parameter studies: at the paper's scale, of a shorter training."""
    parameter_seeds: tuple[int, ...]
    metric: MetricName
    drawn: Drawn
    measured: Measured
    varied: Varied
    speed: Speed
    kept: Literal["float32", "bfloat16"]
    """Type of the weights that are kept."""
    asked_seeds: int | None = None
    """How many seeds were asked for, instead of the scale's own."""

    def with_seeds(self, number: int) -> Scale:
        """Every network that is compared with others from so many seeds; the first are those of the scale, and what was
        measured of them stays. One that is compared with what others reported stays alone."""
        seeds = tuple(range(number))
        return replace(
            self,
            comparisons=tuple(replace(c, seeds=seeds) if len(c.methods) > 1 else c for c in self.comparisons),
            architecture=replace(self.architecture, seeds=seeds),
            parameter_seeds=seeds,
            asked_seeds=number,
        )
