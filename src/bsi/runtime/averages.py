"""Averages of any length, afterwards: power-function EMAs (Karras et al., 2024, "Analyzing and Improving the Training
Dynamics of Diffusion Models").

    theta_gamma(t) = (gamma + 1) / t^(gamma + 1)  int_0^t  tau^gamma theta(tau) d tau
                   = beta theta_gamma(t - 1) + (1 - beta) theta(t),        beta = (1 - 1/t)^(gamma + 1)

The profile's width grows with the training: sigma_rel = sqrt(gamma + 1) / ((gamma + 2) sqrt(gamma + 3)) is its standard
deviation over t. Profiles of a few stored averages, of two widths and many steps, nearly span every other one: the
combination closest to a wished profile, in least squares, has coefficients x = A^-1 b with inner products

    <p_a, p_b> = (g_a + 1) (g_b + 1) / ((g_a + g_b + 1) max(t_a, t_b)) (t_min / t_max)^(gamma of the later one).

A run keeps such averages when its recipe names widths (`--ema.powers 0.05 0.1 --ema.snapshot 1000`), in
`averages/step-*.safetensors`; `bsi export RUN --sigma-rel 0.08` makes a model of any width between.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor, nn

from bsi.errors import UsageError
from bsi.io import atomic
from bsi.runtime.lerp import lerp_

__all__ = ["PowerAverages", "Profile", "coefficients", "exponent", "reconstruct", "write_snapshot"]


@functools.cache
def exponent(sigma_rel: float) -> float:
    """gamma of a width: the largest root of gamma^3 + 7 gamma^2 + (16 - s) gamma + 12 - s, s = sigma_rel^-2."""
    if not 0 < sigma_rel < 12**-0.5:
        raise UsageError(f"a power-function average has a relative width between 0 and 0.288: got {sigma_rel}")
    s = sigma_rel**-2
    return float(np.roots([1, 7, 16 - s, 12 - s]).real.max())


@dataclass(frozen=True)
class Profile:
    """The weight that an average of the first `step` steps gives to each of them."""

    step: int
    sigma_rel: float

    @property
    def gamma(self) -> float:
        return exponent(self.sigma_rel)

    @property
    def beta(self) -> float:
        """How much of the average stays when the step comes in."""
        return (1 - 1 / self.step) ** (self.gamma + 1)

    def dot(self, other: Profile) -> float:
        """The inner product of two profiles."""
        early, late = sorted((self, other), key=lambda profile: profile.step)
        a, b = early.gamma, late.gamma
        return (a + 1) * (b + 1) / ((a + b + 1) * late.step) * (early.step / late.step) ** b


def coefficients(stored: Sequence[Profile], wanted: Profile) -> Float64[np.ndarray, " stored"]:
    """How much of each stored average the closest combination takes."""
    a = np.array([[p.dot(q) for q in stored] for p in stored])
    b = np.array([p.dot(wanted) for p in stored])
    return np.linalg.lstsq(a, b, rcond=1e-12)[0]


class PowerAverages:
    """Averages of a network's parameters, one for each width."""

    def __init__(self, network: nn.Module, widths: Sequence[float]) -> None:
        self._named = dict(network.named_parameters())
        self._averages = {width: {n: p.detach().clone() for n, p in self._named.items()} for width in widths}

    @torch.no_grad()
    def update(self, counts: Bool[Tensor, ""], shares: Sequence[Float[Tensor, ""]]) -> None:
        """Take in the weights, `1 - Profile.beta` of them for each width, unless the step does not count."""
        weights = [p.detach() for p in self._named.values()]
        for averages, share in zip(self._averages.values(), shares, strict=True):
            lerp_(list(averages.values()), weights, counts * share)

    def state(self) -> dict[str, Tensor]:
        """The averages by width and name."""
        return {f"{width}/{n}": t for width, averages in self._averages.items() for n, t in averages.items()}


def write_snapshot(run: Path, step: int, state: Mapping[str, Tensor]) -> None:
    """Keep the averages of a step for good."""
    folder = run / "averages"
    folder.mkdir(exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}
    with atomic(folder / f"step-{step:08d}.safetensors") as temporary:
        safetensors.torch.save_file(tensors, temporary)


def reconstruct(run: Path, sigma_rel: float, step: int | None = None) -> tuple[int, dict[str, Tensor]]:
    """The average of a width at a step (by default the last one stored), from what the run has kept up to there."""
    files = {int(path.stem[5:]): path for path in sorted((run / "averages").glob("step-*.safetensors"))}
    if not files:
        raise UsageError(
            f"{run} has kept no power-function averages: train with --ema.powers 0.05 0.1 --ema.snapshot 1000"
        )
    end = max(files) if step is None else step
    if end not in files:
        raise UsageError(f"{run} has no averages of step {end}; there are: {', '.join(map(str, files))}")
    wanted = Profile(end, sigma_rel)
    stored: dict[Profile, Path] = {}
    for at, path in files.items():
        with safetensors.safe_open(path, framework="pt") as file:
            stored |= {Profile(at, float(key.partition("/")[0])): path for key in file.keys() if at <= end}  # noqa: SIM118
    profiles = list(stored)
    found: dict[str, Tensor] = {}
    for profile, share in zip(profiles, coefficients(profiles, wanted), strict=True):
        with safetensors.safe_open(stored[profile], framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                width, _, name = key.partition("/")
                if math.isclose(float(width), profile.sigma_rel):
                    part = float(share) * file.get_tensor(key).double()
                    found[name] = found[name] + part if name in found else part
    return end, {name: tensor.float() for name, tensor in found.items()}
