"""Steps of the generative process ds = x_hat dLambda + dW (methods/base.py), for BSI, BFN and VDM alike.

With w = s / sqrt(Lambda) = psi / noise and rho = signal / noise, the same marginals follow from the probability flow
dw = x_hat d rho, and from

    dw = [-zeta w + (1 + zeta) rho x_hat] d ln rho + sqrt(2 zeta) dW                          for any churn zeta >= 0.

With x_hat constant during a step these equations are linear and have exact solutions, which are of first order, since
predictions change during the step. `posterior` is the solution of the first equation, the paper's sampler. `midpoint`
makes each method second-order: it extrapolates the prediction to the middle of the step, in ln Lambda, by the line
through the last two predictions,

    x_mid = x_hat + h / (2 h_before) (x_hat - x_hat_before),               h = ln Lambda' - ln Lambda.

At c = 0 `sde2` and `ode2` are DPM-Solver++(2M), stochastic and not, as published (Lu et al., 2022), which BFN-Solver
(Xue et al., 2024) brought to BFN; c > 0 is the extension to BSI. Integrating the line exactly is of the same order and
worse at few steps: it extrapolates further, while predictions converge towards the data (docs/benchmarks/solvers.md).

So a solver is a table: for each step of a grid, the coefficients of the latent, the prediction, the previous prediction
and new noise, computed in float64 before the first evaluation. A step without a previous prediction is of first order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bsi.errors import UsageError, unknown
from bsi.methods.base import Method, rho_at

Steps = Float[Tensor, " steps"]
Levels = Float[Tensor, " levels"]


@dataclass(frozen=True)
class Table:
    """latent' = latent * psi + x_hat * x_hat + previous * x_hat_before + eps * noise, step by step, in float64."""

    latent: Steps
    x_hat: Steps
    previous: Steps
    eps: Steps


Solver = Callable[[Method, Levels], Table]


@dataclass(frozen=True)
class Path:
    """A grid in information coordinates."""

    information: Levels  # Lambda
    noise: Levels
    rho: Levels  # sqrt(Lambda) - c / sqrt(Lambda), and 0 where Lambda is 0

    @classmethod
    def of(cls, method: Method, grid: Levels) -> Path:
        return cls(method.gain(grid) + method.c, method.encoder(grid).noise, rho_at(method, grid))

    @property
    def empty(self) -> Bool[Tensor, " steps"]:
        """Steps that start without information: BFN's first. Their latent is 0 and has the coefficient 0."""
        return self.information[:-1] == 0

    @property
    def scale(self) -> Levels:
        """s = scale psi: lambda for BSI and BFN, sqrt(nu (1 + nu)) for VDM; 0 where the information is 0."""
        known = self.noise > 0
        return torch.where(known, torch.sqrt(self.information) / torch.where(known, self.noise, 1.0), 0.0)

    @property
    def shrinkage(self) -> Steps:
        """noise' / noise, the factor of the latent if w = psi / noise is constant; 0 on empty steps."""
        return torch.where(self.empty, 0.0, self.noise[1:] / torch.where(self.empty, 1.0, self.noise[:-1]))


def posterior(method: Method, grid: Levels) -> Table:
    """The paper's sampler: s' = s + dL x_hat + sqrt(dL) eps. Algorithm "Sampling with BSI"; BFN's and VDM's update."""
    path = Path.of(method, grid)
    gained, scale = torch.diff(path.information), path.scale
    return Table(
        latent=scale[:-1] / scale[1:],
        x_hat=gained / scale[1:],
        previous=torch.zeros_like(gained),
        eps=torch.sqrt(gained) / scale[1:],
    )


def _churned(zeta: float) -> Solver:
    """w' = q w + (rho' - q rho) x_hat + sqrt(1 - q^2) eps, q = (rho / rho')^zeta: for zeta = 0 the probability flow.

    Without information w is undefined, and q is 0: BFN's first step is that of `posterior`.
    """

    def solver(method: Method, grid: Levels) -> Table:
        path = Path.of(method, grid)
        noise, rho = path.noise[1:], path.rho
        q = torch.where(path.empty, 0.0, (rho[:-1] / rho[1:]) ** zeta)
        return Table(
            latent=q * path.shrinkage,
            x_hat=noise * (rho[1:] - q * rho[:-1]),
            previous=torch.zeros_like(q),
            eps=noise * torch.sqrt(1 - q.square()),
        )

    return solver


def midpoint(step: Solver) -> Solver:
    """The same step with the prediction extrapolated to its middle in ln Lambda, which makes it second-order.

    A prediction made without any information, at ln Lambda = -inf (BFN's first), does not count as history.
    """

    def solver(method: Method, grid: Levels) -> Table:
        first = step(method, grid)
        h = torch.diff(torch.log(Path.of(method, grid).information))
        before = torch.cat([torch.full_like(h[:1], torch.inf), h[:-1]])
        usable = torch.isfinite(before)
        slope = first.x_hat * torch.where(usable, h, 0.0) / torch.where(usable, 2 * before, 1.0)
        return Table(first.latent, first.x_hat + slope, -slope, first.eps)

    return solver


def churn(zeta: float) -> Solver:
    """From the flow (zeta = 0) to the samplers of BFN and VDM (zeta = 1), and beyond; of second order."""
    if not 0 <= zeta < float("inf"):
        raise UsageError(f"churn is a finite number from 0 (the flow) upwards: got zeta={zeta}")
    return midpoint(_churned(zeta))


sde2, ode2 = midpoint(posterior), churn(0.0)

SOLVERS: dict[str, Solver] = {"posterior": posterior, "sde2": sde2, "ode2": ode2, "churn": churn(0.5)}


def named_solver(name: str) -> Solver:
    """The solver called `name`, or `churn:ZETA`; an unknown one is an error that suggests the nearest."""
    if name in SOLVERS:
        return SOLVERS[name]
    kind, _, zeta = name.partition(":")
    if kind == "churn":
        try:
            return churn(float(zeta))
        except ValueError:
            raise UsageError(f"churn takes a number from 0 upwards, as in churn:0.3: got {name!r}") from None
    raise unknown("solver", name, SOLVERS)
