"""Conditioning on real measurements of the unknown sample, and on labels.

**Denoising is exact.** A measurement y ~ N(x, 1 / a) is a belief from which generation can continue: the latent
psi = signal y at the level whose signal-to-noise ratio is a. The samples are draws from p(x | y), since psi contains
all information of the measurements so far. This holds only for steps that measure the prediction: the flow and other
churns share the marginals of psi but not the law of x given psi.

**Linear measurements** y = A x + N(0, 1 / a) are built into a predictor. In place of E[x | psi] it returns an
approximation of E[x | psi, y], the Gaussian one with the moments of p(x | psi),

    x_hat + V A^T (A V A^T + 1 / a)^-1 (y - A x_hat),        V = Cov[x | psi] = (d x_hat / d psi) noise^2 / signal,

exact for Gaussian data: Tweedie Moment Projected Diffusions (Boys et al., 2023) in the form of Moment Matching
Posterior Sampling (Rozet et al., 2024). V is never formed, only multiplied with by vector-Jacobian products, and the
system is solved in a Krylov space of a few dimensions. Any solver takes the result.

The Jacobian of a trained network is no covariance: neither symmetric nor positive, and worst at high noise. Conjugate
gradients then diverge. So the matrix is projected onto the Krylov space, only the positive eigenvalues of its symmetric
part are used, and theta = eigenvalue + 1 / a is inverted as theta / (theta^2 + delta^2), where delta is the estimated
error of the symmetric part: as large as the antisymmetric part. An exact predictor has none, and the result is that of
conjugate gradients. The part of y - A x_hat that remains unexplained is treated as an error of which only the size is
known, with a multiple of the identity as V.

**Guidance** mixes two predictors, with and without a condition (Ho and Salimans, 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Num, Shaped
from torch import Tensor

from bsi.errors import DataError, NonFinite, UsageError
from bsi.gaussian import Data, PerSample, over
from bsi.grids import EDM_SIGMA, geometric_grid
from bsi.methods.base import Method, Predictor, level_at, rho_at
from bsi.rng import Noise
from bsi.sampler import NOISY_SOLVER, Sampler
from bsi.sampling import Step, end_of, trajectory
from bsi.solvers import SOLVERS, Solver, named_solver, posterior

Given = Num[Tensor, "batch *given"]
Mask = Shaped[Tensor, "batch *data"]  # of numbers or of truth values
Measured = Float[Tensor, "batch *measured"]


def start_of(method: Method, precision: float) -> float:
    """The level at which a latent has as much information as a measurement of this precision."""
    low, high = method.levels.low, method.levels.high
    level = float(level_at(method, torch.tensor(precision, dtype=torch.float64).sqrt()))
    if not low < level < high:  # also rejects NaN, the square root of a negative precision
        first, last = rho_at(method, torch.tensor([low, high], dtype=torch.float64)).square().tolist()
        limits = f"in the model's range, {first:.3g} to {last:.3g}"
        raise UsageError(f"a measurement's precision, 1 / noise^2, must lie {limits}: got {precision:g}")
    return level


def measuring_solvers(method: Method) -> tuple[str, ...]:
    """Solvers whose steps add the noise of measurements, as draws from p(x | y) need it."""
    grid = geometric_grid(method, 8)
    return tuple(name for name, solver in SOLVERS.items() if _measures(solver, method, grid))


def _measures(solver: Solver, method: Method, grid: Float[Tensor, " levels"]) -> bool:
    return torch.allclose(solver(method, grid).eps, posterior(method, grid).eps)


def denoise(
    method: Method,
    predict: Predictor,
    noise: Noise,
    y: Given,
    precision: float,
    k: int = Sampler.steps,
    solver: Solver | str = NOISY_SOLVER,
    differentiable: bool = False,
) -> Data:
    """A draw from p(x | y) for each row of y ~ N(x, 1 / precision): generation that starts from y."""
    return end_of(denoising(method, predict, noise, y, precision, k, solver, differentiable))


def denoising(
    method: Method,
    predict: Predictor,
    noise: Noise,
    y: Given,
    precision: float,
    k: int = Sampler.steps,
    solver: Solver | str = NOISY_SOLVER,
    differentiable: bool = False,
) -> Iterator[Step]:
    """Every step from y to the result of `denoise`."""
    _check_values(y)
    level = start_of(method, precision)
    grid = geometric_grid(method, k, level)
    solve = named_solver(solver) if isinstance(solver, str) else solver
    if not _measures(solve, method, grid):
        allowed = " or ".join(measuring_solvers(method))
        raise UsageError(f"denoising draws from p(x | y) only with the noise of real measurements: use {allowed}.")
    start = over(method.encoder(grid[:1]).signal.to(y.device), y) * y
    return trajectory(method, predict, noise, grid, solve, start, differentiable)


def measured(
    method: Method,
    predict: Predictor,
    operator: Callable[[Data], Measured],
    y: Given,
    precision: float,
    iterations: int = 5,
) -> Predictor:
    """A predictor conditioned on y = A x + N(0, 1 / precision); `operator` applies the linear map A to a batch.

    Each call costs one evaluation and `iterations` backward passes.
    """
    _check_values(y)
    if not precision > 0 or iterations < 2:
        got = f"got precision={precision}, iterations={iterations}"  # one shows no asymmetry of a Jacobian
        raise UsageError(f"a measurement has a positive precision and needs at least two iterations, {got}")

    @torch.inference_mode(False)  # derivatives are needed, also under the caller's inference mode
    @torch.no_grad()
    def predictor(latent: Data, level: PerSample) -> Data:
        latent, level = _informed(method, latent.clone(), level.clone())
        encoder = method.encoder(level)
        scale = over(encoder.noise.square() / encoder.signal, latent)
        with torch.enable_grad():
            psi = latent.detach().requires_grad_()
            made, transposed = torch.func.vjp(operator, torch.zeros_like(psi))[:2]
            if made.shape != y.shape:
                shapes = f"got y of {tuple(y.shape)}, and {tuple(made.shape)} from samples of {tuple(psi.shape)}"
                raise UsageError(f"y is what the operator makes of the samples, one row for each: {shapes}")
            x_hat = predict(psi, level)

        def spread(u: Measured) -> Data:
            """V A^T u."""
            (product,) = torch.autograd.grad(x_hat, psi, transposed(u)[0], retain_graph=True)
            return scale * product

        guess = x_hat.detach()
        if not bool(torch.isfinite(guess).all()):
            raise NonFinite("the network's predictions are not finite")
        correction, rest = _solve(spread, operator, precision, y - operator(guess), iterations)
        scaled = over(_variance(rest, transposed(rest)[0], precision), latent)
        unexplained, _ = _solve(lambda u: scaled * transposed(u)[0], operator, precision, rest, iterations)
        return guess + correction + unexplained

    return predictor


def inpainted(
    method: Method,
    predict: Predictor,
    y: Num[Tensor, "batch *data"],
    mask: Mask,
    precision: float = math.inf,
    iterations: int = 5,
) -> Predictor:
    """A predictor conditioned on x where the mask is 1, up to noise of this precision; y is ignored where it is 0."""
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise UsageError("a mask is 1 where x is known and 0 where it is not: got values between or beyond")
    known = torch.where(mask.bool(), y, torch.zeros_like(y))  # not mask * y: missing values may be NaN
    informed = measured(method, predict, lambda x: mask * x, known, precision, iterations)
    return replaced(informed, y, mask) if precision == math.inf else informed  # exact values stay exact


def replaced(predict: Predictor, y: Data, mask: Mask) -> Predictor:
    """The simple method: predict y itself where the mask is 1. It affects the rest only through the latent, late."""
    return lambda latent, level: torch.where(mask.bool(), y, predict(latent, level))


def guided(conditional: Predictor, unconditional: Predictor, scale: float) -> Predictor:
    """x_hat = unconditional + scale (conditional - unconditional). With scale = 1 this is the conditional model."""

    def predictor(latent: Data, level: PerSample) -> Data:
        without = unconditional(latent, level)
        return without + scale * (conditional(latent, level) - without)

    return predictor


def _check_values(y: Given) -> None:
    if not y.is_floating_point():  # the signal, cast to an integer, would be 0
        raise UsageError(f"a measurement is of values, not of bins: got {y.dtype}. Pass bins.values(y), or floats.")
    if not bool(torch.isfinite(y).all()):
        raise DataError("a measurement holds NaN or infinity: repair it, or leave that part out with a mask")


def _informed(method: Method, latent: Data, level: PerSample) -> tuple[Data, PerSample]:
    """Move latents with little or no information to sigma = 80, since V is 0 / 0 where d x_hat / d psi is 0.

    w = psi / noise is kept, as under the probability flow; without any information it is set to its mean, 0.
    """
    enough = level_at(method, torch.tensor(1 / EDM_SIGMA, dtype=torch.float64, device=level.device))
    later = torch.maximum(level.double(), enough)
    noise, wanted = method.encoder(level).noise, method.encoder(later).noise
    factor = torch.where(later > level, wanted / torch.where(noise > 0, noise, 1.0), 1.0)
    return over(factor, latent) * latent, later


def _solve(
    spread: Callable[[Measured], Data],
    operator: Callable[[Data], Measured],
    precision: float,
    residual: Measured,
    iterations: int,
) -> tuple[Data, Measured]:
    """u = (A V A^T + 1 / a)^-1 r for each sample, in the Krylov space of r, M r, M^2 r, ... with M = A V A^T.

    `spread(u)` is V A^T u. Once M r lies in the space already, further directions are 0.

    Returns:
        The correction V A^T u, and what remains of the residual, r - (M + 1 / a) u.
    """
    r, noise = residual.flatten(1), 1 / precision
    tiny = torch.finfo(r.dtype).eps ** 0.5
    directions, spreads, images = [_unit(r)], list[Data](), list[Tensor]()
    for _ in range(iterations):
        spreads.append(spread(directions[-1].view_as(residual)))
        images.append(operator(spreads[-1]).flatten(1))
        known, rest = torch.stack(directions, dim=1), images[-1]
        for _ in range(2):  # a second pass removes rounding errors of the first
            rest = rest - torch.einsum("bk,bkm->bm", torch.einsum("bkm,bm->bk", known, rest), known)
        more = rest.norm(dim=1) > tiny * images[-1].norm(dim=1)
        directions.append(torch.where(more[:, None], _unit(rest), 0.0))
    basis, products = torch.stack(directions[:-1], dim=1), torch.stack(images, dim=1)

    projected = torch.einsum("bkm,blm->bkl", basis, products)
    k, error = iterations, 0.5 * (projected - projected.mT)
    # independent errors of this variance in the entries change the symmetric part by sqrt(2 k variance) in norm
    variance = 2 * error.square().sum((1, 2)) / max(1, k * (k - 1))
    values, vectors = torch.linalg.eigh(projected - error)
    positive = values > tiny * values[:, -1:].clamp(min=0)
    theta = values + noise
    inverse = torch.where(positive, theta / (theta.square() + 2 * k * variance[:, None]), 0.0)
    u = torch.einsum("bkl,bl->bk", vectors, inverse * torch.einsum("bkl,bkm,bm->bl", vectors, basis, r))
    rest = r - torch.einsum("bk,bkm->bm", u, products + noise * basis)
    return torch.einsum("bk,bk...->b...", u, torch.stack(spreads, dim=1)), rest.view(residual.shape)


def _variance(rest: Measured, back: Data, precision: float) -> PerSample:
    """The v for which V = v I explains the size of `rest` beyond the noise.

    `back` is A^T rest, so |back|^2 / |rest|^2 is A A^T along `rest`. Entries that A does not measure are 0 in `rest`.
    """
    r, measured = rest.flatten(1), (rest != 0).flatten(1).sum(1).clamp(min=1)
    norm, gained = r.square().sum(1), back.flatten(1).square().sum(1)
    gain = torch.where(gained > 0, norm / torch.where(gained > 0, gained, 1.0), 0.0)
    return gain * (norm / measured - 1 / precision).clamp(min=0)


def _unit(rows: Float[Tensor, "batch m"]) -> Float[Tensor, "batch m"]:
    return torch.nn.functional.normalize(rows, dim=1, eps=torch.finfo(rows.dtype).tiny)
