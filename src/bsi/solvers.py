"""Steps of the generative process, in information coordinates, for BSI, BFN and VDM alike.

With alpha the precision gained, Lambda = alpha + c and s the information, generation is ds = x_hat dLambda + dW. With
w = s / sqrt(Lambda) = psi / noise and rho = signal / noise, the same marginals follow from the probability flow
dw = x_hat d rho, and from

    dw = [-zeta w + (1 + zeta) rho x_hat] d ln rho + sqrt(2 zeta) dW                          for any churn zeta >= 0.

Given x_hat on a step these are linear, with exact solutions. `posterior` holds x_hat fixed in the first: the paper's
sampler. The others expand x_hat linearly through the last two predictions: `sde2` and `ode2` in l = ln Lambda,
`churn` in ln rho. At c = 0 `ode2` and `sde2` are DPM-Solver++(2M) and its SDE form (Lu et al., 2022), which BFN-Solver
(Xue et al., 2024) brought to BFN; c > 0 is the extension to BSI.

So a solver is a table: for each step of a grid, what to multiply the latent, the prediction, the one before it and
fresh noise by. Tables are computed in float64 (the second-order terms lose digits in float32), before the first
evaluation of the network.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from bsi.errors import UsageError
from bsi.methods.base import Method

__all__ = ["SOLVERS", "Path", "Solver", "Table", "churn", "named_solver", "ode2", "posterior", "sde2"]

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
    rho: Levels  # sqrt(Lambda) - c / sqrt(Lambda), and 0 where Lambda is
    tau: Levels  # sqrt(Lambda) + c / sqrt(Lambda)

    @classmethod
    def of(cls, method: Method, grid: Levels) -> Path:
        gain, encoder = method.gain(grid), method.encoder(grid)
        information = gain + method.c
        root = torch.sqrt(information)
        prior = torch.where(information > 0, method.c / torch.where(information > 0, root, 1.0), 0.0)
        # gain / root is root - prior without its cancellation at the start, where BSI's rho is exactly 0
        rho = torch.where(information > 0, gain / torch.where(information > 0, root, 1.0), 0.0)
        return cls(information, encoder.noise, rho, root + prior)

    @property
    def empty(self) -> Tensor:
        """Steps that start with no information at all: BFN's first. Their latent is 0 and stays out of the step."""
        return self.information[:-1] == 0

    @property
    def scale(self) -> Levels:
        """s = scale psi: lambda for BSI and BFN, sqrt(nu (1 + nu)) for VDM; 0 where nothing is known."""
        known = self.noise > 0
        return torch.where(known, torch.sqrt(self.information) / torch.where(known, self.noise, 1.0), 0.0)


def _history(position: Levels) -> tuple[Steps, Steps]:
    """(h, 1 / h_before): each step's length, and the reciprocal of the one before, 0 where there is no history."""
    h = torch.diff(position)
    before = torch.cat([torch.full_like(h[:1], torch.inf), h[:-1]])
    return h, torch.where(torch.isfinite(before), 1 / before, 0.0)


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


def sde2(method: Method, grid: Levels) -> Table:
    """Second order, stochastic: s' = s + dL x_hat + (h Lambda' - dL) D1 + sqrt(dL) eps."""
    path, first = Path.of(method, grid), posterior(method, grid)
    h, per_before = _history(torch.log(path.information))
    gained = torch.diff(path.information)
    slope = torch.where(per_before > 0, h * path.information[1:] - gained, 0.0) * per_before / path.scale[1:]
    return Table(first.latent, first.x_hat + slope, -slope, first.eps)


def ode2(method: Method, grid: Levels) -> Table:
    """Second order, deterministic: w' = w + I0 x_hat + I1 D1, I0 = rho' - rho, I1 = h rho' - 2 (tau' - tau)."""
    path, first = Path.of(method, grid), posterior(method, grid)
    noise, rho, tau, empty = path.noise, path.rho, path.tau, path.empty
    h, per_before = _history(torch.log(path.information))
    slope = torch.where(per_before > 0, h * rho[1:] - 2 * torch.diff(tau), 0.0) * per_before * noise[1:]
    zero = torch.zeros_like(slope)
    return Table(
        # From no information at all, the flow has no direction: BFN's first step is the posterior one.
        latent=torch.where(empty, zero, noise[1:] / torch.where(empty, 1.0, noise[:-1])),
        x_hat=torch.diff(rho) * noise[1:] + slope,
        previous=-slope,
        eps=torch.where(empty, first.eps, zero),
    )


def churn(zeta: float) -> Solver:
    """Between the flow (zeta = 0) and the samplers of BFN and VDM (zeta = 1), and beyond; second order in ln rho.

    w' = q w + I0 x_hat + I1 D1 + sqrt(1 - q^2) eps,    q = (rho / rho')^zeta,    I0 = rho' - rho q,    I1 = h rho' -
    I0 / (1 + zeta)
    """
    if not 0 <= zeta < float("inf"):
        raise UsageError(f"churn is a finite number from 0 (the ODE) upwards: got zeta={zeta}")

    def solver(method: Method, grid: Levels) -> Table:
        path = Path.of(method, grid)
        noise, rho, empty = path.noise, path.rho, path.empty
        q = (rho[:-1] / rho[1:]) ** zeta
        q = torch.where(empty, torch.zeros_like(q), q)
        first = rho[1:] - rho[:-1] * q
        h, per_before = _history(torch.log(rho))
        slope = torch.where(per_before > 0, h * rho[1:] - first / (1 + zeta), 0.0) * per_before
        return Table(
            latent=torch.where(empty, 0.0, q * noise[1:] / torch.where(empty, 1.0, noise[:-1])),
            x_hat=noise[1:] * (first + slope),
            previous=-noise[1:] * slope,
            eps=noise[1:] * torch.sqrt(1 - q.square()),
        )

    return solver


SOLVERS: dict[str, Solver] = {"posterior": posterior, "sde2": sde2, "ode2": ode2, "churn": churn(0.5)}


def named_solver(name: str) -> Solver:
    """The solver called `name`; an unknown one is an error that suggests the nearest."""
    if name in SOLVERS:
        return SOLVERS[name]
    near = difflib.get_close_matches(name, SOLVERS, n=1, cutoff=0.0)
    raise UsageError(f"unknown solver {name!r}: did you mean {near[0]!r}? The solvers are {', '.join(SOLVERS)}.")
