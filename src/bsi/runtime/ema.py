"""Averages of the weights: the exponential moving average, and power-function averages of any length.

The exponential moving average is updated at every step that counts,

    ema <- ema + w (weights - ema),        w = 1 up to the first update, then 1 - beta.

Power-function averages (Karras et al., 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models") have
a profile whose width sigma_rel = sqrt(gamma + 1) / ((gamma + 2) sqrt(gamma + 3)), its standard deviation over t, grows
with the training:

    theta_gamma(t) = (gamma + 1) / t^(gamma + 1)  int_0^t  tau^gamma theta(tau) d tau
                   = beta theta_gamma(t - 1) + (1 - beta) theta(t),        beta = (1 - 1/t)^(gamma + 1)

The profiles of stored averages, of two widths and many steps, nearly span all other profiles. The linear combination
that is closest to a given profile in least squares has coefficients A^-1 b with the inner products

    <p_a, p_b> = (g_a + 1) (g_b + 1) / ((g_a + g_b + 1) max(t_a, t_b)) (t_min / t_max)^(gamma of the later one).

A run stores such averages if its recipe names widths (`--ema.powers 0.05 0.1 --ema.snapshot 1000`), in
`averages/step-*.safetensors`; `bsi export RUN --sigma-rel 0.08` exports a model of any width between them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from bsi.backbones.acceleration import compile_like
from bsi.errors import UsageError
from bsi.io import atomic, read_tensors, write_tensors
from bsi.model import Model

LARGE = 2**20  # elements: a pass over such a tensor takes longer than a kernel launch


def lerp_(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: Float[Tensor, ""]) -> None:
    """Move each tensor towards its end by a weight on the device: tensor <- tensor + weight (end - tensor).

    The result is exactly the tensor at weight 0 and, up to rounding, the end at weight 1. `torch._foreach_lerp_`
    launches one kernel per tensor if the weight is a tensor, so small tensors are moved together, in three passes.
    (Factors 1 - weight and weight would not sum to 1 once rounded: over 10,000 steps, 1e-8 in each becomes 1e-4.)
    """
    pairs = list(zip(tensors, ends, strict=True))
    for tensor, end in pairs:
        if tensor.numel() >= LARGE:
            tensor.lerp_(end, weight.to(tensor.dtype))
    if small := [(tensor, end) for tensor, end in pairs if tensor.numel() < LARGE]:
        moved, towards = zip(*small, strict=True)
        differences = torch._foreach_sub(towards, moved)
        torch._foreach_mul_(differences, weight)
        torch._foreach_add_(moved, differences)


@runtime_checkable
class Average(Protocol):
    """The moving average of a model's weights."""

    def update(self, weight: Float[Tensor, ""]) -> None:
        """Update the average with the current weights."""

    def evaluating(self) -> AbstractContextManager[Model]:
        """The model with the average, in evaluation mode; all ranks must enter and leave together."""

    def state(self) -> dict[str, Tensor]:
        """The tensors of the network with the average, by name."""


class EmaModel:
    """A copy of a model with the moving average of its parameters. Evaluation and sampling use `model`."""

    def __init__(self, original: Model) -> None:
        self.model = copy.deepcopy(original).requires_grad_(False).eval()
        compile_like(self.model, original)
        self._averages, self._weights = ([p.detach() for p in m.parameters()] for m in (self.model, original))
        self._buffers = list(zip(self.model.buffers(), original.buffers(), strict=True))

    @torch.no_grad()
    def update(self, weight: Float[Tensor, ""]) -> None:
        """Update the average with the current weights. Buffers are copied: running statistics are averages already."""
        lerp_(self._averages, self._weights, weight)
        for mine, theirs in self._buffers:
            mine.copy_(theirs)

    def evaluating(self) -> AbstractContextManager[Model]:
        return nullcontext(self.model)

    def state(self) -> dict[str, Tensor]:
        return self.model.denoiser.backbone.state_dict()


@functools.cache
def exponent(sigma_rel: float) -> float:
    """gamma of a width: the largest root of gamma^3 + 7 gamma^2 + (16 - s) gamma + 12 - s, s = sigma_rel^-2."""
    if not 0 < sigma_rel < 12**-0.5:
        raise UsageError(f"sigma_rel must be between 0 and 0.288, got {sigma_rel}. Use for example 0.05 or 0.1.")
    s = sigma_rel**-2
    return float(np.roots([1, 7, 16 - s, 12 - s]).real.max())


@dataclass(frozen=True)
class Profile:
    """The weights that a power-function average gives to each of the first `step` steps."""

    step: int
    sigma_rel: float

    @property
    def gamma(self) -> float:
        return exponent(self.sigma_rel)

    @property
    def beta(self) -> float:
        """The weight of the previous average in the update of this step."""
        return (1 - 1 / self.step) ** (self.gamma + 1)

    def dot(self, other: Profile) -> float:
        """The inner product of two profiles."""
        early, late = sorted((self, other), key=lambda profile: profile.step)
        a, b = early.gamma, late.gamma
        return (a + 1) * (b + 1) / ((a + b + 1) * late.step) * (early.step / late.step) ** b


def coefficients(stored: Sequence[Profile], wanted: Profile) -> Float64[np.ndarray, " stored"]:
    """The coefficients of the closest combination of stored averages."""
    a = np.array([[p.dot(q) for q in stored] for p in stored])
    b = np.array([p.dot(wanted) for p in stored])
    return np.linalg.lstsq(a, b, rcond=1e-12)[0]


class PowerAverages:
    """Averages of parameters, or of a rank's parts of them, one for each width."""

    def __init__(self, named: Mapping[str, Tensor], widths: Sequence[float]) -> None:
        self._named = dict(named)
        self._averages = {width: {n: p.detach().clone() for n, p in self._named.items()} for width in widths}

    @torch.no_grad()
    def update(self, counts: Bool[Tensor, ""], weights: Sequence[Float[Tensor, ""]]) -> None:
        """Update the averages, with weight `1 - Profile.beta` for each width, if the step counts."""
        parameters = [p.detach() for p in self._named.values()]
        for averages, weight in zip(self._averages.values(), weights, strict=True):
            lerp_(list(averages.values()), parameters, counts * weight)

    def state(self) -> dict[str, Tensor]:
        """The averages by width and name."""
        return {f"{width}/{n}": t for width, averages in self._averages.items() for n, t in averages.items()}


def store_averages(run: Path, step: int, state: Mapping[str, Tensor]) -> None:
    """Store the power-function averages of a step, on the host, in a run folder."""
    folder = run / "averages"
    folder.mkdir(exist_ok=True)
    with atomic(folder / f"step-{step:08d}.safetensors") as temporary:
        write_tensors(temporary, {name: tensor.contiguous() for name, tensor in state.items()})


def reconstruct(run: Path, sigma_rel: float, step: int | None = None) -> tuple[int, dict[str, Tensor]]:
    """The average of any width at a stored step (by default the last), from the averages stored up to that step."""
    files = {int(path.stem[5:]): path for path in sorted((run / "averages").glob("step-*.safetensors"))}
    if not files:
        raise UsageError(
            f"{run} has no power-function averages. Train with --ema.powers 0.05 0.1 --ema.snapshot 1000 to store some."
        )
    end = max(files) if step is None else step
    if end not in files:
        raise UsageError(f"{run} has no averages of step {end}. Use one of {', '.join(map(str, files))}.")
    used = {at: path for at, path in files.items() if at <= end}
    widths = {at: {key.partition("/")[0] for key in read_tensors(path)[1]} for at, path in used.items()}
    profiles = [Profile(at, float(width)) for at in used for width in sorted(widths[at])]
    shares = dict(zip(profiles, coefficients(profiles, Profile(end, sigma_rel)).tolist(), strict=True))
    found: dict[str, Tensor] = {}
    for at, path in used.items():
        for key, tensor in read_tensors(path)[1].items():
            width, _, name = key.partition("/")
            found[name] = found.get(name, 0.0) + shares[Profile(at, float(width))] * tensor.double()
    return end, {name: tensor.float() for name, tensor in found.items()}
