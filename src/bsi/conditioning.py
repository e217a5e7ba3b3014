"""Conditioning: on real measurements of the unknown sample, which is what a belief is for, and on labels.

**Denoising is exact.** A measurement y ~ N(x, 1 / a) is a belief that generation can simply go on from: the latent
psi = signal y at the level whose signal-to-noise ratio is a, that is at the gain alpha with alpha^2 / (alpha + c) = a,

    alpha = (a + sqrt(a^2 + 4 c a)) / 2.

Since x | psi is all that the measurements so far say, the samples are draws from p(x | y). This holds for steps that
measure the prediction, no other: the flow and other churns share the marginals of psi but not the law of x given psi.

**Linear measurements** y = A x + N(0, 1 / a) are what a predictor can be told. In place of E[x | psi] it returns an
approximation of E[x | psi, y], the Gaussian one with the moments of p(x | psi),

    x_hat + V A^T (A V A^T + 1 / a)^-1 (y - A x_hat),        V = Cov[x | psi] = (d x_hat / d psi) noise^2 / signal,

exact for Gaussian data. That is the idea of Tweedie Moment Projected Diffusions (Boys et al., 2023) in the form of
Moment Matching Posterior Sampling (Rozet et al., 2024): V is never formed, only multiplied with by vector-Jacobian
products, and the system solved by a few conjugate-gradient iterations. Any solver takes the result.

**Guidance** mixes two predictors, with and without a condition (Ho and Salimans, 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from bsi.defaults import MEASURING_SOLVER, STEPS
from bsi.errors import UsageError
from bsi.gaussian import over
from bsi.grids import FIRST_SIGMA, onward_grid
from bsi.methods.base import Method, Predictor
from bsi.noise import Noise
from bsi.sampling import sample
from bsi.solvers import Solver, named_solver, posterior

__all__ = ["denoise", "guided", "inpainted", "measured", "replaced", "start_of"]

Data = Float[Tensor, "batch *data"]
Measured = Float[Tensor, "batch *measured"]
PerSample = Float[Tensor, " batch"]


def start_of(method: Method, precision: float) -> float:
    """The level at which a latent knows as much as a measurement of this precision says."""
    gain = 0.5 * (precision + math.sqrt(precision**2 + 4 * method.c * precision))
    level = float(method.level(torch.tensor(gain, dtype=torch.float64)))
    low, high = method.levels.low, method.levels.high
    if not (0 < precision < math.inf and low < level < high):
        gains = method.gain(torch.tensor([low, high], dtype=torch.float64))
        first, last = (gains * gains / torch.clamp(gains + method.c, min=1e-300)).tolist()
        raise UsageError(
            f"a measurement's precision, 1 / noise^2, must lie in the model's range, {first:.3g} to {last:.3g}: "
            f"got {precision:g}"
        )
    return level


def denoise(
    method: Method,
    predict: Predictor,
    noise: Noise,
    y: Data,
    precision: float,
    k: int = STEPS,
    solver: Solver | str = MEASURING_SOLVER,
) -> Data:
    """A draw from p(x | y) for each row of y ~ N(x, 1 / precision): generation, gone on with from y."""
    level = start_of(method, precision)
    grid = onward_grid(method, level, k)
    solve = named_solver(solver) if isinstance(solver, str) else solver
    if not torch.allclose(solve(method, grid).eps, posterior(method, grid).eps):
        raise UsageError(
            "denoising draws from p(x | y) only with the noise of real measurements: use posterior, sde2 or sde-root. "
            "The flow and churn turn the prior into samples of the data, but not y into samples of x given y."
        )
    start = over(method.encoder(grid[:1]).signal.to(y.device), y) * y
    return sample(method, predict, noise, grid, solve, start)


def measured(
    method: Method,
    predict: Predictor,
    operator: Callable[[Data], Measured],
    y: Measured,
    precision: float,
    iterations: int = 5,
) -> Predictor:
    """A predictor that knows y = A x + N(0, 1 / precision); `operator` is A, linear, for a batch.

    Costs one evaluation and about `iterations` + 1 backward passes each time.
    """
    if not precision > 0 or iterations < 1:
        raise UsageError(
            f"a measurement has a positive precision and needs at least one iteration: got precision={precision}, "
            f"iterations={iterations}"
        )

    def predictor(latent: Data, level: PerSample) -> Data:
        latent, level = _informed(method, latent, level)
        encoder = method.encoder(level)
        scale = over(encoder.noise.square() / encoder.signal, latent)
        with torch.enable_grad():
            psi = latent.detach().requires_grad_()
            x_hat = predict(psi, level)
            transposed = torch.func.vjp(operator, torch.zeros_like(psi))[1]

        def spread(u: Measured) -> Data:
            """V A^T u."""
            (product,) = torch.autograd.grad(x_hat, psi, transposed(u)[0], retain_graph=True)
            return scale * product

        guess = x_hat.detach()
        u = _conjugate_gradients(lambda u: operator(spread(u)) + u / precision, y - operator(guess), iterations)
        return guess + spread(u)

    return predictor


def inpainted(
    method: Method,
    predict: Predictor,
    y: Data,
    mask: Data,
    precision: float = math.inf,
    iterations: int = 5,
) -> Predictor:
    """A predictor that knows x where the mask is 1, up to noise of this precision."""
    return measured(method, predict, lambda x: mask * x, mask * y, precision, iterations)


def replaced(predict: Predictor, y: Data, mask: Data) -> Predictor:
    """The plain method: measure y itself where the mask is 1, and predict the rest as if nothing were known of it.

    The known part is then what it would be in a trajectory towards y, but what it says about the rest comes late.
    """
    return lambda latent, level: torch.where(mask.bool(), y, predict(latent, level))


def guided(conditional: Predictor, unconditional: Predictor, scale: float) -> Predictor:
    """x_hat = unconditional + scale (conditional - unconditional): 1 is the conditional model, more exaggerates it."""

    def predictor(latent: Data, level: PerSample) -> Data:
        without = unconditional(latent, level)
        return without + scale * (conditional(latent, level) - without)

    return predictor


def _informed(method: Method, latent: Data, level: PerSample) -> tuple[Data, PerSample]:
    """Where a latent says nothing yet, d x_hat / d psi is 0 and V = 0 / 0: look a little later, at sigma = 80.

    w = psi / noise is kept, as the flow would; at no information it is 0, its mean.
    """
    c, rho = method.c, 1 / FIRST_SIGMA
    gain = torch.tensor(0.5 * rho * (rho + math.sqrt(rho**2 + 4 * c)), dtype=torch.float64, device=level.device)
    later = torch.maximum(level.double(), method.level(gain))
    noise, wanted = method.encoder(level).noise, method.encoder(later).noise
    factor = torch.where(later > level, wanted / torch.where(noise > 0, noise, 1.0), 1.0)
    return over(factor, latent) * latent, later


def _conjugate_gradients(matrix: Callable[[Measured], Measured], b: Measured, iterations: int) -> Measured:
    """matrix^-1 b for a symmetric positive matrix, each sample by itself; where it has converged, nothing moves."""

    def dot(u: Measured, v: Measured) -> PerSample:
        return (u * v).flatten(1).sum(1)

    def ratio(above: PerSample, below: PerSample) -> PerSample:
        return torch.where(below > 0, above / torch.where(below > 0, below, 1.0), 0.0)

    solution, residual = torch.zeros_like(b), b
    direction, norm = residual, dot(residual, residual)
    for _ in range(iterations):
        product = matrix(direction)
        step = over(ratio(norm, dot(direction, product)), b)
        solution, residual = solution + step * direction, residual - step * product
        before, norm = norm, dot(residual, residual)
        direction = residual + over(ratio(norm, before), b) * direction
    return solution
