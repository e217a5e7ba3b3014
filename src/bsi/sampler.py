"""`Sampler`: how samples are drawn. Imports no torch.

`Model.sample`, recipes, commands, studies, the page and the report use this record. Its defaults were chosen by the
FIDs in docs/benchmarks/solvers.md, measured with one CIFAR-10 network; with another, 16 evaluations gave 0.981 +- 0.007
times the FID of the paper's sampler with 1024 steps.

Sample i depends on (seed, i) alone: not on the batch it is computed in, the number of samples, the ranks or the order,
up to rounding. Its noise is bit-identical on one type of device. But a network rounds differently in batches of another
size, and Fourier features of the input, such as the paper's, amplify rounding errors: a perturbation of 1e-6 becomes
0.004. With 16 evaluations in float32 on a CPU, small and large batches of CIFAR-10 differ in one pixel in twenty to
three in five, by one or two bins of 256 and none by more than 8. Keep the batch size fixed for bit-identical results.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from bsi.errors import UsageError

if TYPE_CHECKING:
    from bsi.methods import Method

# One Brownian path for each sample, so that more steps converge to one image, or independent noise for each step.
NoiseKind = Literal["path", "independent"]

# Of the predictive variance in each step: see `bsi.variance.named_variance`.
VarianceKind = Literal["none", "level", "pixels", "dct", "pca", "learned"]

MOST_STEPS = 1_000_000  # limited because levels and coefficients of all steps are stored in memory

FITTED = "fitted"  # the grid of a variance: see `bsi.variance.Variance.grid`

FLOW_SOLVER = "ode2"

# The posterior's steps towards symbols that are drawn from the predicted probabilities, not towards their mean.
MIXTURE = "mixture"

# The steps of a network tuned by `bsi distill`, on levels of its own: see `bsi.consistency`.
CONSISTENCY = "consistency"

# For uses that need noise in each step: a start that is only approximately correct, or one from a given measurement. It
# has the best FID with 16 evaluations of the solvers with noise.
NOISY_SOLVER = "sde2"


def default_solver(method: Method) -> str:
    """The flow if the distribution of the first latent is exact (c > 0: BSI), otherwise a solver with noise.

    Under the flow an error of the first latent persists; noise in each step reduces it. VDM's first latent contains 8 %
    of the signal while its prior contains none, and BFN starts without any information.
    """
    return FLOW_SOLVER if method.c > 0 else NOISY_SOLVER


@dataclass(frozen=True)
class Sampler:
    """Steps, solver, grid, noise and guidance."""

    steps: int = 15
    """Number of steps k. The network is evaluated k + 1 times with BSI and BFN, k times with VDM."""
    solver: str | None = None
    """posterior (the paper's), sde2, ode2, churn or churn:ZETA; for symbols also mixture. Default: ode2 with BSI (sde2
    if its gamma_0 is inf), sde2 with BFN and VDM."""
    grid: str = "edm"
    """Where the steps lie: paper, edm or geometric; with a variance also fitted, where they cost the fewest bits."""
    noise: NoiseKind = "path"
    """path: with one seed, more steps converge to one image; independent: fresh noise for each step."""
    guidance: float = 1.0
    """How strongly to follow the label: 1 is the learned model, 2 exaggerates. Values other than 1 double the cost."""
    variance: VarianceKind = "none"
    """Add the uncertainty of predictions to each step of the solver posterior, which needs fewer steps then. It is
    fitted to training samples."""

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MOST_STEPS:
            raise UsageError(f"sampling needs at least one step and at most {MOST_STEPS}, got steps={self.steps}.")
        for name, kind in (("noise", NoiseKind), ("variance", VarianceKind)):
            if getattr(self, name) not in get_args(kind):
                raise UsageError(f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}")
        check_guidance(self.guidance)
        if self.grid == FITTED and self.variance == "none":
            raise UsageError("the grid fitted belongs to a variance: pass variance too, or another grid.")
        if self.variance != "none" and self.solver not in (None, "posterior"):
            raise UsageError(
                f"a variance belongs to the steps of the solver posterior, got variance={self.variance!r} and "
                f"solver={self.solver!r}. Choose the solver posterior, or no variance."
            )

    def record(self) -> dict[str, Any]:
        """The settings that samples depend on, for records. Without a variance it is left out, as before 0.2."""
        return {key: value for key, value in asdict(self).items() if (key, value) != ("variance", "none")}

    def named(self, method: Method) -> Sampler:
        """The same sampler with an explicit solver, in place of None for the method's default."""
        return replace(self, solver=self.solver_for(method))

    def with_variance(self, variance: VarianceKind) -> Sampler:
        """The same sampler for steps with this variance, which need the solver posterior."""
        return replace(self, variance=variance, solver=self.solver if variance == "none" else None)

    def solver_for(self, method: Method) -> str:
        return "posterior" if self.variance != "none" else self.solver or default_solver(method)


def check_guidance(guidance: float) -> None:
    if not 0 <= guidance < math.inf:
        raise UsageError(
            f"guidance must be a finite number >= 0, got {guidance:g}. 1 follows the condition as learned, more "
            f"exaggerates it."
        )
