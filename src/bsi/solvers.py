"""Steps of the generative process, in information coordinates, for BSI, BFN and VDM alike.

With alpha the precision gained, Lambda = alpha + c and s the information, generation is ds = x_hat dLambda + dW. With
w = s / sqrt(Lambda) = psi / noise and rho = signal / noise, the same marginals follow from the probability flow
dw = x_hat d rho, and from

    dw = [-zeta w + (1 + zeta) rho x_hat] d ln rho + sqrt(2 zeta) dW                          for any churn zeta >= 0.

Given x_hat on a step these are linear, with exact solutions. `posterior` holds x_hat fixed in the first: the paper's
sampler. The others draw a straight line through the last two predictions, over a position p that rises with the
information: ln Lambda (ln rho for churn), or -Lambda^-bend / bend. With h = p' - p and D1 the divided difference of
x_hat in p, a line's integral over a step is, by parts,

    int (x_hat + D1 (p - p_0)) dLambda = dLambda x_hat + (h Lambda' - int Lambda dp) D1

and so with rho for Lambda. At c = 0 and bend = 0 `sde2` and `ode2` are DPM-Solver++(2M), stochastic and not (Lu et
al., 2022), which BFN-Solver (Xue et al., 2024) brought to BFN; c > 0 is the extension to BSI. Predictions of images
level off towards the data, and a line in ln Lambda overshoots: `sde-root` and `ode-root` draw it over the root of
sigma, bend = 1/4. The order is two for any bend; the error at few steps is not the same (docs/benchmarks/).

So a solver is a table: for each step of a grid, what to multiply the latent, the prediction, the one before it and
fresh noise by. Tables are computed in float64 (the second-order terms lose digits in float32), before the first
evaluation of the network. A step without history takes the order it can have.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bsi.errors import UsageError
from bsi.methods.base import Method

__all__ = [
    "ROOT",
    "SOLVERS",
    "Path",
    "Solver",
    "Table",
    "churn",
    "named_solver",
    "ode",
    "ode2",
    "posterior",
    "sde",
    "sde2",
]

Steps = Float[Tensor, " steps"]
Levels = Float[Tensor, " levels"]

ROOT = 0.25  # the bend at which a line is straight in sqrt(sigma)


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

    @classmethod
    def of(cls, method: Method, grid: Levels) -> Path:
        gain = method.gain(grid)
        information = gain + method.c
        # gain / root is the difference without its cancellation at the start, where BSI's rho is exactly 0
        root = torch.where(information > 0, torch.sqrt(information), 1.0)
        return cls(information, method.encoder(grid).noise, torch.where(information > 0, gain / root, 0.0))

    @property
    def empty(self) -> Bool[Tensor, " steps"]:
        """Steps that start with no information at all: BFN's first. Their latent is 0 and stays out of the step."""
        return self.information[:-1] == 0

    @property
    def scale(self) -> Levels:
        """s = scale psi: lambda for BSI and BFN, sqrt(nu (1 + nu)) for VDM; 0 where nothing is known."""
        known = self.noise > 0
        return torch.where(known, torch.sqrt(self.information) / torch.where(known, self.noise, 1.0), 0.0)

    @property
    def shrinkage(self) -> Steps:
        """noise' / noise, what w = psi / noise held fixed does to the latent; 0 on empty steps."""
        return torch.where(self.empty, 0.0, self.noise[1:] / torch.where(self.empty, 1.0, self.noise[:-1]))


def _slope(position: Levels, end: Levels, integral: Steps) -> Steps:
    """(h end' - integral) / h_before: what multiplies x_hat - x_hat_before; 0 on steps without history.

    A prediction made at a position of -inf (BFN's first, for churn BSI's too) does not count as history.
    """
    h = torch.diff(position)
    before = torch.cat([torch.full_like(h[:1], torch.inf), h[:-1]])
    usable = torch.isfinite(before)
    return torch.where(usable, h * end[1:] - integral, 0.0) / torch.where(usable, before, 1.0)


def _position(base: Levels, bend: float) -> Levels:
    return torch.log(base) if bend == 0 else -(base**-bend) / bend


def _check_bend(bend: float) -> None:
    if not 0 <= bend < 0.5:
        raise UsageError(f"the bend is a number from 0 (lines in ln Lambda) to less than 1/2: got {bend}")


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


def sde(bend: float) -> Solver:
    """Second order, stochastic: s' = s + dL x_hat + (h Lambda' - int Lambda dp) D1 + sqrt(dL) eps."""
    _check_bend(bend)

    def solver(method: Method, grid: Levels) -> Table:
        path, first = Path.of(method, grid), posterior(method, grid)
        information = path.information
        integral = torch.diff(information ** (1 - bend) / (1 - bend))
        slope = _slope(_position(information, bend), information, integral) / path.scale[1:]
        return Table(first.latent, first.x_hat + slope, -slope, first.eps)

    return solver


def ode(bend: float) -> Solver:
    """Second order, deterministic: w' = w + (rho' - rho) x_hat + (h rho' - int rho dp) D1.

    From no information at all the flow has no direction: BFN's first step is the posterior one, which is the flow's
    with w := eps.
    """
    _check_bend(bend)

    def solver(method: Method, grid: Levels) -> Table:
        path, first = Path.of(method, grid), posterior(method, grid)
        information, noise = path.information, path.noise
        integral = information ** (0.5 - bend) / (0.5 - bend)
        if method.c > 0:  # and then Lambda is, everywhere
            integral = integral + method.c * information ** (-0.5 - bend) / (0.5 + bend)
        slope = _slope(_position(information, bend), path.rho, torch.diff(integral)) * noise[1:]
        return Table(
            latent=path.shrinkage,
            x_hat=torch.diff(path.rho) * noise[1:] + slope,
            previous=-slope,
            eps=torch.where(path.empty, first.eps, 0.0),
        )

    return solver


def churn(zeta: float, bend: float = 0.0) -> Solver:
    """Between the flow (zeta = 0) and the samplers of BFN and VDM (zeta = 1), and beyond; lines are over ln rho.

    w' = q w + (rho' - q rho) x_hat + (h rho' - int rho (rho / rho')^zeta dp) D1 + sqrt(1 - q^2) eps,
    q = (rho / rho')^zeta
    """
    _check_bend(bend)
    if not 0 <= zeta < float("inf"):
        raise UsageError(f"churn is a finite number from 0 (the flow) upwards: got zeta={zeta}")

    def solver(method: Method, grid: Levels) -> Table:
        path = Path.of(method, grid)
        noise, rho = path.noise, path.rho
        q = torch.where(path.empty, 0.0, (rho[:-1] / rho[1:]) ** zeta)
        power = 1 + zeta - 2 * bend
        integral = rho[1:] ** -zeta * torch.diff(rho**power / power)
        slope = _slope(_position(rho, 2 * bend), rho, integral)
        return Table(
            latent=q * path.shrinkage,
            x_hat=noise[1:] * (rho[1:] - rho[:-1] * q + slope),
            previous=-noise[1:] * slope,
            eps=noise[1:] * torch.sqrt(1 - q.square()),
        )

    return solver


sde2, ode2 = sde(0.0), ode(0.0)

SOLVERS: dict[str, Solver] = {
    "posterior": posterior,
    "sde2": sde2,
    "ode2": ode2,
    "sde-root": sde(ROOT),
    "ode-root": ode(ROOT),
    "churn": churn(0.5),
}


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
    near = difflib.get_close_matches(name, SOLVERS, n=1, cutoff=0.0)
    raise UsageError(f"unknown solver {name!r}: did you mean {near[0]!r}? The solvers are {', '.join(SOLVERS)}.")
