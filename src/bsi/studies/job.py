"""What a study is made of: jobs. Each is a record of plain values, from which its name, its estimated time and its
result follow. Imports no torch.

    Train            a network, by its recipe
    Bound            bits per dimension of a network on the test set, L_M^inf or L_M^k
    Reconstruction   L_R for several precisions alpha_R of the decoder
    Profile          errors of its predictions at levels from the first to the last
    Quality          the Fréchet distance of its samples to the test set

Networks are named by the hash of what decides their weights: two studies that train the same recipe share it.
"""

from __future__ import annotations

import hashlib
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from bsi.backbones.config import DiTConfig, UNetConfig
from bsi.backbones.cost import cost
from bsi.io import canonical_json
from bsi.methods import BFN, BSI, VDM
from bsi.recipe import Recipe
from bsi.runtime.serialization import changes, to_plain
from bsi.studies.scale import DATASETS, MetricName, Scale
from bsi.training.resume import SAFE

__all__ = [
    "Bound",
    "Job",
    "Measure",
    "Profile",
    "Quality",
    "Reconstruction",
    "Train",
    "describe",
    "estimate_s",
    "name_of",
    "network_name",
    "quantity",
    "same_network",
    "settings",
    "title",
]

DIGITS = 12  # of a hash, in names


@dataclass(frozen=True)
class Train:
    """Train a network and keep its moving average."""

    network: Recipe


@dataclass(frozen=True)
class Bound:
    """Bits per dimension of the whole test set: `levels` and `recon` evaluations of each image."""

    network: Recipe
    levels: int
    recon: int
    finite_k: int | None = None


@dataclass(frozen=True)
class Reconstruction:
    """L_R with alpha_R = factor alpha_M, for BSI: the same predictions for every factor."""

    network: Recipe
    factors: tuple[float, ...]
    recon: int


@dataclass(frozen=True)
class Profile:
    """|x - x_hat|^2 and |psi - x_hat| / |psi| of `images` test images at `levels` levels, evenly spaced in t."""

    network: Recipe
    levels: int
    images: int


@dataclass(frozen=True)
class Quality:
    """The Fréchet distance of `num` samples; those of one seed and one number are drawn from the same noise."""

    network: Recipe
    metric: MetricName
    num: int
    steps: int
    solver: str = "posterior"
    grid: str = "paper"
    seed: int = 0


Measure = Bound | Reconstruction | Profile | Quality
Job = Train | Measure


def network_name(recipe: Recipe) -> str:
    """A hash of what decides the weights: not of names, intervals and what is kept.

    Settings at their defaults are left out, so that a setting that is new in a later version renames nothing; whether a
    stored network is the one that is meant is told by its whole recipe (`same_network`).
    """
    return _hash(_said(recipe, ""))


def same_network(a: Recipe, b: Recipe) -> bool:
    """Whether two recipes agree in everything that decides the weights."""
    return all(_is_safe(change.name) for change in changes(a, b))


def _is_safe(name: str) -> bool:
    return any(name == safe or name.startswith(f"{safe}.") for safe in SAFE)


def _said(record: Any, prefix: str) -> dict[str, Any]:
    """The settings of a record that matter and differ from their defaults."""
    said: dict[str, Any] = {"is": type(record).__name__}
    for f in fields(record):
        value = getattr(record, f.name)
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if value != default and not _is_safe(prefix + f.name):
            said[f.name] = _said(value, f"{prefix}{f.name}.") if is_dataclass(value) else to_plain(value)
    return said


def name_of(job: Job) -> str:
    """The name of a job's result, unique to what it does."""
    network = network_name(job.network)
    if isinstance(job, Train):
        return network
    return f"{type(job).__name__.lower()}-{_hash({'network': network, **settings(job)})}"


def settings(job: Measure) -> dict[str, Any]:
    """What is measured, apart from of which network."""
    return {f.name: to_plain(getattr(job, f.name)) for f in fields(job) if f.name != "network"}


def _hash(plain: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(plain).encode()).hexdigest()[:DIGITS]


def describe(recipe: Recipe) -> str:
    """A network in a few words: what makes it different from the method's default."""
    match recipe.method:
        case BSI(lambda_0=lambda_0, gamma_0=gamma_0):
            words = ["BSI"]
            words += [f"lambda_0={lambda_0:g}"] if lambda_0 != BSI().lambda_0 else []
            words += [f"gamma_0={gamma_0:g}"] if gamma_0 is not None else []
        case BFN():
            words = ["BFN"]
        case VDM():
            words = ["VDM"]
    words += ["U-Net"] if isinstance(recipe.backbone, UNetConfig) else []
    words += [recipe.parametrization] if recipe.parametrization is not None else []
    objective = recipe.objective
    words += [f"trained on k={objective.finite_k}"] if objective.finite_k is not None else []
    words += [f"weight {objective.weight}"] if objective.weight != "elbo" else []
    words += [f"bias {objective.bias:g}"] if objective.weight == "sigmoid" else []
    words += [f"{objective.levels} levels"] if objective.levels is not None else []
    return f"{' '.join(words)}, seed {recipe.seed}"


def title(job: Job) -> str:
    """A job in a few words."""
    network = describe(job.network)
    match job:
        case Train(network=recipe):
            return f"train {network}: {recipe.steps} steps of {recipe.batch}"
        case Bound(finite_k=None, levels=levels):
            return f"bits/dim of {network}: {levels} levels"
        case Bound(finite_k=k, levels=levels):
            return f"bits/dim of {network} at k={k}: {levels} levels"
        case Reconstruction(factors=factors):
            return f"L_R of {network} for {len(factors)} values of alpha_R"
        case Profile(levels=levels, images=images):
            return f"errors of {network}: {images} images at {levels} levels"
        case Quality(metric=metric, num=num, steps=steps, solver=solver, grid=grid):
            return f"{metric} of {network}: {num} samples, {steps} steps of {solver} on {grid}"


def quantity(job: Measure) -> str:
    """What is measured, whatever the network: a column of a table."""
    match job:
        case Bound(finite_k=k):
            return "bits/dim" if k is None else f"bits/dim at k={k}"
        case Reconstruction():
            return "L_R"
        case Profile():
            return "errors"
        case Quality(metric=metric, steps=steps, solver="posterior", grid="paper"):
            return f"{metric} at {steps}"
        case Quality(metric=metric, steps=steps, solver=solver, grid=grid):
            return f"{metric} at {steps}, {solver} on {grid}"


def estimate_s(job: Job, scale: Scale) -> float:
    """Seconds that a job takes, by its floating-point operations and the speed of the scale's hardware."""
    backbone, speed, data = job.network.backbone, scale.speed, DATASETS[job.network.data.name]
    assert backbone is not None
    each = cost(backbone, data.shape, data.bins).flops / (1.0 if isinstance(backbone, DiTConfig) else speed.unet)
    match job:
        case Train(network=recipe):
            return speed.startup_s + 3 * each * recipe.batch * recipe.steps / speed.training
        case Bound(levels=levels, recon=recon):
            evaluations, images = data.test_images * (levels + recon), 0
        case Reconstruction(factors=factors, recon=recon):
            evaluations, images = data.test_images * recon * len(factors), 0
        case Profile(levels=levels, images=images):
            evaluations, images = levels * images, 0
        case Quality(num=num, steps=steps):
            evaluations, images = num * (steps + 1), num
    return 0.2 * speed.startup_s + each * evaluations / speed.evaluation + images / speed.metric
