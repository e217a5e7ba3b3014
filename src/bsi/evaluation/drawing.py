"""Which samples, and how they are drawn: all that a sample depends on besides the network.

Sample i of a drawing depends on (seed, i) alone: not on the batch it is computed in, the number of samples, the ranks
or the order, up to rounding. Its noise is the same to the last bit on one kind of device. A network rounds differently
in another batch, and one with Fourier features of its input, as the paper's, looks at the last digits: a perturbation
of 1e-6 comes out as 0.004. So with 16 evaluations in float32 on a CPU, a few at a time against many,

    digits (17 bins)            values move by 4e-6 (root mean square), no pixel by a bin
    CIFAR-10, dit-mini/2        by 0.001 to 0.003 with ode2, 0.004 to 0.008 with sde2, of values from -1 to 1: one pixel
                                in twenty to three in five by a bin or two of 256, none by more than 8

It is the same image to the eye. Where every bit counts, keep the batch size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bsi.brownian import BrownianPath, check_resolved
from bsi.defaults import GRID, STEPS
from bsi.denoiser import Condition, Denoiser, check_guidance
from bsi.errors import UsageError
from bsi.grids import named_grid
from bsi.methods.base import Method
from bsi.rng import Noise, SeededNoise
from bsi.sampling import Step, default_solver, noisy_steps, trajectory

__all__ = ["Drawing", "NoiseKind", "draw"]

# One Brownian path for each sample, along which more steps converge to one image; or fresh noise for each step.
NoiseKind = Literal["path", "independent"]


@dataclass(frozen=True)
class Drawing:
    """The defaults are the package's, and those of `Model.sample`."""

    steps: int = STEPS
    seed: int = 0
    solver: str | None = None
    """By its name, or the method's default one."""
    grid: str = GRID
    noise: NoiseKind = "path"
    guidance: float = 1.0
    label: int | None = None
    """The class of all samples."""
    classes: int = 0
    """Sample i is of class i modulo this many; 0: of the one above, or of none in particular."""

    def by(self, method: Method) -> Drawing:
        """The same with its solver's name, which records want."""
        return replace(self, solver=self.solver_for(method))

    def solver_for(self, method: Method) -> str:
        return self.solver or default_solver(method)

    def labels(self, samples: Int[Tensor, " batch"]) -> Int[Tensor, " batch"] | None:
        """The class of each of these samples."""
        if self.classes:
            return samples % self.classes
        return None if self.label is None else torch.full_like(samples, self.label)

    def levels(self, method: Method) -> Float[Tensor, " levels"]:
        return named_grid(self.grid)(method, self.steps)

    def check(self, method: Method) -> None:
        """Raise what drawing would raise, before anything is computed."""
        drawn = noisy_steps(method, self.levels(method), self.solver_for(method))
        if self.noise not in ("path", "independent"):
            raise UsageError(f"noise is either path or independent: got {self.noise!r}")
        if self.noise == "path":
            check_resolved(drawn)
        check_guidance(self.guidance)

    def noise_of(self, samples: Int[Tensor, " batch"], shape: tuple[int, ...]) -> Noise:
        kind = BrownianPath if self.noise == "path" else SeededNoise
        return kind(self.seed, samples, shape)


def draw(
    denoiser: Denoiser,
    shape: tuple[int, ...],
    samples: Int[Tensor, " batch"],
    how: Drawing,
    cond: Condition | None = None,
) -> Iterator[Step]:
    """The trajectories of these samples, on their device; the last step's x_hat is what was drawn, as values.

    A condition of your own takes the place of their labels.
    """
    how.check(denoiser.method)
    cond = how.labels(samples) if cond is None else cond
    predict = denoiser.given(cond, how.guidance)
    method = denoiser.method
    return trajectory(method, predict, how.noise_of(samples, shape), how.levels(method), how.solver_for(method))
