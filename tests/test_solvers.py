"""Solvers against theory: measured orders, published formulas, exact laws. All in float64.

For Gaussian data every solver is a linear recursion, and the law of what it generates follows from its table without
sampling: mean and covariance of (latent, last prediction) are propagated exactly. Mixtures show the rest.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bsi.formulations import euler_maruyama_step, posterior_noise_level
from bsi.grids import edm_grid, geometric_grid, paper_grid
from bsi.methods import BFN, BSI, VDM, Method
from bsi.oracle import Mixture
from bsi.sampling import sample
from bsi.solvers import SOLVERS, Path, Solver, Table, churn, named_solver, ode2, posterior, sde2
from repetitions import repeat, unchecked

METHODS = [BSI(), BFN(), VDM()]
BELIEFS = [*METHODS, BSI(gamma_0=0.1), BSI(lambda_0=1.0, gamma_0=4.0)]
STEPS = [64, 128, 256, 512]


@functools.cache
def mixture() -> Mixture:
    return Mixture.general(
        torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64),
        torch.tensor([[-1.0, 0.5], [0.8, 0.9], [0.2, -1.0]], dtype=torch.float64),
        torch.tensor([[[0.05, 0], [0, 0.2]], [[0.1, 0.05], [0.05, 0.1]], [[0.02, 0], [0, 0.02]]], dtype=torch.float64),
    )


@functools.cache
def initial_noise() -> Tensor:
    return torch.randn(48, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def fixed(start: float, end: float) -> Tensor:
    """The same initial noise for every grid; BFN's is drawn for its first step."""
    return initial_noise()


def heun(method: Method, predict: Callable[[Tensor, Tensor], Tensor], grid: Tensor) -> Tensor:
    """Heun's method for dw = x_hat d rho, a reference with two evaluations per step; BFN's first step is unchanged."""
    path, latent = Path.of(method, grid), method.prior(fixed(0, 0))
    for i, step in enumerate(torch.diff(path.rho)):
        x_hat = predict(latent, grid[i].expand(len(latent)))
        w = fixed(0, 0) if path.empty[i] else latent / path.noise[i]
        latent = path.noise[i + 1] * (w + step * x_hat)
        if not path.empty[i]:
            after = predict(latent, grid[i + 1].expand(len(latent)))
            latent = path.noise[i + 1] * (w + step * 0.5 * (x_hat + after))
    return method.decode(latent, grid[-1].expand(len(latent)), predict)


def solve(method: Method, solver: str, k: int) -> Tensor:
    predict, grid = mixture().predictor(method), geometric_grid(method, k)
    return heun(method, predict, grid) if solver == "heun" else sample(method, predict, fixed, grid, solver)


@functools.cache
def converged(method: Method) -> Tensor:
    with unchecked():
        return solve(method, "ode2", 4096)


def slope(errors: list[float], steps: list[int]) -> float:
    """The order: -d ln error / d ln k, by least squares."""
    x = torch.log(torch.tensor(steps, dtype=torch.float64))
    y = torch.log(torch.tensor(errors, dtype=torch.float64))
    return -float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


@pytest.mark.parametrize("solver", ["ode2", "heun"])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_deterministic_solvers_have_order_two(method, solver):
    found = repeat(lambda k: solve(method, solver, k), STEPS)
    errors = [float((x - converged(method)).norm(dim=1).median()) for x in found]
    assert slope(errors, STEPS) == pytest.approx(2.0, abs=0.2)
    assert errors[-1] < 1e-3


# Exact laws for Gaussian data


@dataclass(frozen=True)
class Law:
    """Independent Gaussians."""

    mean: Tensor
    variance: Tensor

    def distance(self, other: "Law") -> float:
        """Wasserstein-2."""
        spread = self.variance.sqrt() - other.variance.sqrt()
        return float(((self.mean - other.mean).square() + spread.square()).sum().sqrt())


def law_of(rows: Tensor, method: Method, grid: Tensor, data: Law) -> Law:
    """The law of the samples: rows are (latent, x_hat, previous, eps) for each step."""
    encoder, variance = method.encoder(grid), data.variance
    signal, noise = encoder.signal[:, None], encoder.noise[:, None]
    spread = signal**2 * variance + noise**2
    gains = torch.where(spread > 0, signal * variance / torch.where(spread > 0, spread, 1.0), 0.0)
    offsets = (1 - gains * signal) * data.mean  # x_hat = gain psi + offset
    start = method.prior(torch.ones(1, 1, dtype=torch.float64)).item()
    # mean of (latent, x_hat before); covariance as three numbers
    m, p = torch.zeros_like(variance), torch.zeros_like(variance)
    mm, mp, pp = start**2 * torch.ones_like(variance), torch.zeros_like(variance), torch.zeros_like(variance)
    for (latent, x_hat, previous, eps), gain, offset in zip(rows.tolist(), gains, offsets, strict=False):
        a = latent + x_hat * gain
        m, p = a * m + previous * p + x_hat * offset, gain * m + offset
        mm, mp, pp = (
            a * a * mm + 2 * a * previous * mp + previous**2 * pp + eps**2,
            gain * (a * mm + previous * mp),
            gain**2 * mm,
        )
    gain, offset = (1 / signal[-1], 0.0) if isinstance(method, VDM) else (gains[-1], offsets[-1])
    return Law(gain * m + offset, gain**2 * mm)


def solved(solver: Solver, method: Method, grid: Tensor, data: Law) -> Law:
    table = solver(method, grid)
    return law_of(torch.stack([table.latent, table.x_hat, table.previous, table.eps], dim=1), method, grid, data)


VARIANCES = torch.tensor([0.02, 0.3, 2.0], dtype=torch.float64)
DATA = Law(torch.full_like(VARIANCES, 0.5), VARIANCES)


@functools.cache
def limit(method: Method) -> Law:
    """VDM's limit is not exactly the data, since its prior is not exactly its encoder."""
    return solved(sde2, method, geometric_grid(method, 4096), DATA)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_sde2_has_weak_order_two_and_the_papers_sampler_one(method):
    for solver, order in ((sde2, 2.0), (posterior, 1.0)):
        laws = [solved(solver, method, geometric_grid(method, k), DATA) for k in STEPS]
        errors = [float((law.variance - limit(method).variance).abs().max()) for law in laws]
        assert slope(errors, STEPS) == pytest.approx(order, abs=0.2)
        errors = [float((law.mean - limit(method).mean).abs().max()) for law in laws]
        assert errors[-1] < 1e-9 or slope(errors, STEPS) > order - 0.2


def weak_errors(method: Method, seed: int) -> Tensor:
    """Errors of means of functions of x, by solver and for 16 and 32 steps, on a mixture. All solvers use the same
    Brownian paths, so that most of the noise cancels.
    """
    data = Mixture.isotropic(torch.tensor([[-0.9], [0.1], [0.8]], dtype=torch.float64), 0.12)
    first, most = (1 if isinstance(method, BFN) else 0), 256  # BFN's first step is one on every grid
    fine = geometric_grid(method, first + most)
    information = Path.of(method, fine).information
    generator = torch.Generator().manual_seed(seed)
    eps = torch.randn(len(fine), 20_000, 1, generator=generator, dtype=torch.float64)
    gained = torch.diff(information, prepend=torch.zeros_like(information[:1]))
    path = dict(zip(information.tolist(), (gained.sqrt()[:, None, None] * eps).cumsum(0), strict=True))
    path[0.0] = torch.zeros_like(eps[0])

    def noise(start: float, end: float) -> Tensor:
        return (path[end] - path[start]) / math.sqrt(max(end - start, 1e-300))

    def means(solver: str, k: int) -> Tensor:
        grid = torch.cat([fine[:first], fine[first :: most // k]])
        x = sample(method, data.predictor(method), noise, grid, solver)
        return torch.stack([f.mean() for f in (x, x**2, x**4, torch.sin(2 * x), torch.cos(3 * x))])

    limit = means("sde2", most)
    return torch.stack([means(s, k) - limit for s in ("sde2", "posterior") for k in (16, 32)]).unflatten(0, (2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_sde2_has_weak_order_two_on_a_mixture(method):
    errors = torch.stack([weak_errors(method, seed) for seed in range(4)]).mean(0).norm(dim=-1)
    orders = torch.log2(errors[:, 0] / errors[:, 1]).tolist()
    assert orders == pytest.approx([2.0, 1.0], abs=0.5)  # two standard errors and a half of sde2's


@pytest.mark.parametrize("method", [BSI(), BFN(), BSI(gamma_0=0.1)], ids=repr)
@pytest.mark.parametrize("name", SOLVERS)
def test_every_solver_converges_to_the_data(method, name):
    law = solved(named_solver(name), method, geometric_grid(method, 2048), DATA)
    torch.testing.assert_close(law.mean, DATA.mean, rtol=0, atol=2e-3)
    torch.testing.assert_close(law.variance, VARIANCES, rtol=1e-2 if name == "posterior" else 1e-3, atol=0)


@pytest.mark.parametrize("zeta", [0.0, 0.3, 1.0, 3.0])
def test_churn_keeps_the_marginals(zeta):
    for method in (BSI(), BFN()):
        law = solved(churn(zeta), method, geometric_grid(method, 1024), DATA)
        torch.testing.assert_close(law.variance, VARIANCES, rtol=3e-3, atol=0)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_sde2_is_nearer_to_gaussian_data_than_the_papers_sampler_at_every_k(method):
    first = 3 if isinstance(method, BFN) else 2  # before that both solvers are the same
    for variance in VARIANCES:
        data = Law(torch.full((1,), 0.2, dtype=torch.float64), variance[None])
        for k in range(first, 65):
            grid = geometric_grid(method, k)
            ours, paper = (solved(solver, method, grid, data).distance(data) for solver in (sde2, posterior))
            assert ours < paper, (k, variance)


def whole_line(method: Method, grid: Tensor) -> Table:
    """sde2 with the line through two predictions integrated exactly: int line dLambda instead of its middle."""
    path, first = Path.of(method, grid), posterior(method, grid)
    h = torch.diff(torch.log(path.information))
    slope = (h * path.information[1:] - torch.diff(path.information)) / path.scale[1:]
    slope = slope / torch.cat([torch.full_like(h[:1], torch.inf), h[:-1]])
    slope = torch.where(torch.isfinite(slope), slope, 0.0)
    return Table(first.latent, first.x_hat + slope, -slope, first.eps)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_midpoint_extrapolation_is_better_on_the_spectrum_of_images(method):
    """Variances that fall as a power law, as the eigenvalues of images do: relative errors of standard deviations."""
    variance = 50.0 * torch.arange(1, 1400, 10, dtype=torch.float64) ** -1.5
    data = Law(torch.zeros_like(variance), variance)
    for k in (12, 16, 24, 32):
        grid = geometric_grid(method, k)
        laws = [solved(solver, method, grid, data) for solver in (sde2, whole_line)]
        middle, whole = (float(torch.log(law.variance / variance).square().mean().sqrt()) for law in laws)
        assert middle < 0.6 * whole, (k, middle, whole)


def quantiles(data: Mixture, count: int) -> Tensor:
    """Quantiles of a mixture in one dimension, by bisection."""
    target = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    low, high = torch.full_like(target, -20.0), torch.full_like(target, 20.0)
    for _ in range(60):
        middle = 0.5 * (low + high)
        scaled = (middle[:, None] - data.means[:, 0]) / data.variances[:, 0].sqrt()
        below = (torch.special.ndtr(scaled) * data.weights).sum(1) < target
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low


@functools.cache
def wasserstein(method: Method, solver: str, k: int) -> Tensor:
    """W1 to a mixture of twelve sets of samples; the same noise for every solver."""
    means = torch.tensor([[-0.9], [0.1], [0.8]], dtype=torch.float64)
    data = Mixture.isotropic(means, 0.12, torch.tensor([0.3, 0.5, 0.2], dtype=torch.float64))
    generator = torch.Generator().manual_seed(k)

    def noise(start: float, end: float) -> Tensor:
        return torch.randn(12 * 2048, 1, generator=generator, dtype=torch.float64)

    drawn = sample(method, data.predictor(method), noise, geometric_grid(method, k), solver)
    return (drawn.reshape(12, 2048).sort(dim=1).values - quantiles(data, 2048)).abs().mean(1)


def gap(method: Method, solver: str, k: int) -> float:
    """How much closer to the data a solver is than the paper's sampler, in standard errors."""
    difference = wasserstein(method, "posterior", k) - wasserstein(method, solver, k)
    return float(difference.mean() / difference.std()) * math.sqrt(len(difference))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_sde2_is_nearer_to_a_mixture_than_the_papers_sampler_at_every_k(method):
    for k in (3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64):
        assert gap(method, "sde2", k) > 3, k


# Published formulas


def generic_grid(method: Method, k: int = 12) -> Tensor:
    """Uneven steps, so that the ratio of two steps matters."""
    t = torch.linspace(0, 1, k + 1, dtype=torch.float64)
    return method.levels.icdf(0.6 * t + 0.4 * t**3)


def run(table: Table, latent: Tensor, predictions: Tensor, eps: Tensor) -> list[Tensor]:
    before, latents = torch.zeros_like(latent), []
    for i, x_hat in enumerate(predictions):
        latent = table.latent[i] * latent + table.x_hat[i] * x_hat + table.previous[i] * before + table.eps[i] * eps[i]
        latents.append(latent)
        before = x_hat
    return latents


def test_ode2_is_dpm_solver_plus_plus_2m_and_sde2_its_stochastic_form():
    """Lu et al. (2022), Algorithm 2: x_t = sigma_t / sigma_s x_s - alpha_t (e^-h - 1) D, D = D_0 + D_1 / 2.

    That is `solver_type="midpoint"` of the common implementations, their default. Their "heun" integrates the line.
    """
    method = VDM()
    grid, generator = generic_grid(method), torch.Generator().manual_seed(0)
    encoder = method.encoder(grid)
    alpha, sigma = encoder.signal, encoder.noise
    log_snr_half = torch.log(alpha / sigma)
    predictions, eps = torch.randn(2, len(grid) - 1, 5, generator=generator, dtype=torch.float64)
    x = torch.randn(5, generator=generator, dtype=torch.float64)
    ours, ours_sde = run(ode2(method, grid), x, predictions, eps), run(sde2(method, grid), x, predictions, eps)
    theirs = theirs_sde = x
    for i in range(len(grid) - 1):
        s, t = i, i + 1
        h = log_snr_half[t] - log_snr_half[s]
        d0, d1 = predictions[i], torch.zeros(5, dtype=torch.float64)
        if i > 0:
            r0 = (log_snr_half[s] - log_snr_half[s - 1]) / h
            d1 = (predictions[i] - predictions[i - 1]) / r0
        theirs = (
            (sigma[t] / sigma[s]) * theirs
            - (alpha[t] * (torch.exp(-h) - 1.0)) * d0
            - 0.5 * (alpha[t] * (torch.exp(-h) - 1.0)) * d1
        )
        theirs_sde = (
            (sigma[t] / sigma[s] * torch.exp(-h)) * theirs_sde
            + (alpha[t] * (1 - torch.exp(-2.0 * h))) * d0
            + 0.5 * (alpha[t] * (1 - torch.exp(-2.0 * h))) * d1
            + sigma[t] * torch.sqrt(1.0 - torch.exp(-2 * h)) * eps[i]
        )
        torch.testing.assert_close(ours[i], theirs, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(ours_sde[i], theirs_sde, rtol=1e-10, atol=1e-10)


def test_the_papers_sampler_is_the_posterior_update():
    method = BSI()
    grid, table = generic_grid(method), posterior(method, generic_grid(method))
    alpha = torch.diff(grid)
    torch.testing.assert_close(table.latent, grid[:-1] / grid[1:])
    torch.testing.assert_close(table.x_hat, alpha / grid[1:])
    torch.testing.assert_close(table.eps, alpha.sqrt() / grid[1:])


def euler_maruyama_rows(method: BSI, grid: Tensor) -> Tensor:
    """The coefficients of Euler-Maruyama's steps, read off by probing them."""
    level, alpha = grid[:-1], torch.diff(grid)
    one, zero = torch.ones(len(level), 1, dtype=torch.float64), torch.zeros(len(level), 1, dtype=torch.float64)
    probes = [(one, zero, zero), (zero, one, zero), (zero, zero, zero), (zero, zero, one)]
    noise_level = posterior_noise_level(level)
    steps = [euler_maruyama_step(method, level, mu, eta, alpha, noise_level, eps) for mu, eta, eps in probes]
    return torch.cat(steps, dim=1)


def test_euler_maruyama_and_the_posterior_step_converge_to_one_law():
    """Appendix "Stochastic Interpolants": Euler-Maruyama's step uses lambda where the exact update has lambda'."""
    method, theirs, ours = BSI(), [], []
    for k in STEPS:
        grid = geometric_grid(method, k)
        theirs.append(law_of(euler_maruyama_rows(method, grid), method, grid, DATA).distance(DATA))
        ours.append(solved(posterior, method, grid, DATA).distance(DATA))
    assert slope(ours, STEPS) == pytest.approx(1.0, abs=0.2)
    assert slope(theirs, STEPS) == pytest.approx(1.0, abs=0.2)


# Churn


@pytest.mark.parametrize("method", [BFN(), VDM()], ids=repr)
def test_churn_0_is_the_flow_and_churn_1_the_posterior_step_at_c_0(method):
    grid = generic_grid(method)
    none, flow, one, paper = (solver(method, grid) for solver in (churn(0.0), ode2, churn(1.0), posterior))
    for field in ("latent", "x_hat", "previous", "eps"):
        torch.testing.assert_close(getattr(none, field), getattr(flow, field), rtol=1e-9, atol=1e-12)
    # to first order, where the two predictions are the same
    torch.testing.assert_close(one.latent, paper.latent)
    torch.testing.assert_close(one.x_hat + one.previous, paper.x_hat)
    torch.testing.assert_close(one.eps, paper.eps)
    # and beyond: it is sde2, whose line runs over the same variable
    torch.testing.assert_close(one.previous, sde2(method, grid).previous, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", [BSI(), BSI(gamma_0=0.1)], ids=repr)
def test_churn_0_is_the_flow_at_any_c(method):
    grid = generic_grid(method)
    none, flow = churn(0.0)(method, grid), ode2(method, grid)
    for field in ("latent", "x_hat", "previous", "eps"):
        torch.testing.assert_close(getattr(none, field), getattr(flow, field), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("multiple", [1.5, 10.0, 1e3, 1e6])
def test_bsis_own_churn_is_lambda_minus_lambda_0_over_their_sum(multiple):
    method = BSI()
    level = multiple * method.lambda_0
    zeta = (level - method.lambda_0) / (level + method.lambda_0)
    step = 1e-5
    grid = torch.tensor([level, level * (1 + step)], dtype=torch.float64)
    ours, paper = churn(zeta)(method, grid), posterior(method, grid)
    for field in ("latent", "x_hat", "eps"):
        assert getattr(ours, field).item() == pytest.approx(getattr(paper, field).item(), rel=10 * step)


# First steps and invalid solvers


@pytest.mark.parametrize("method", BELIEFS, ids=repr)
@pytest.mark.parametrize("grid", [paper_grid, edm_grid, geometric_grid, generic_grid])
@pytest.mark.parametrize("k", [1, 2, 3, 40])
def test_tables_are_finite_and_first_steps_are_of_first_order(method, grid, k):
    levels = grid(method, k)
    for name, solver in SOLVERS.items():
        table = solver(method, levels)
        for field in ("latent", "x_hat", "previous", "eps"):
            assert torch.isfinite(getattr(table, field)).all(), (name, field)
        assert table.previous[0] == 0
        if isinstance(method, BFN) and k > 1:
            assert table.previous[1] == 0, "BFN's first prediction has no information and is not used by the next step"


@pytest.mark.parametrize("name", SOLVERS)
def test_bfns_first_step_is_the_posterior_one_for_every_solver(name):
    method = BFN()
    for grid in (paper_grid(method, 8), geometric_grid(method, 8)):
        first, paper = named_solver(name)(method, grid), posterior(method, grid)
        for field in ("latent", "x_hat", "eps"):
            assert getattr(first, field)[0].item() == pytest.approx(getattr(paper, field)[0].item(), rel=1e-12)


@pytest.mark.parametrize("name", ["sde2", "ode2", "churn"])
def test_a_step_uses_the_prediction_at_its_middle(name):
    """With predictions that are linear in ln Lambda, what a step adds is its weight times the middle's."""
    for method in (BSI(), BFN(), VDM()):
        grid = generic_grid(method)
        position, table = torch.log(Path.of(method, grid).information), named_solver(name)(method, grid)
        i, line = 5, 0.3 + 0.8 * position
        weight = table.x_hat[i] + table.previous[i]
        added = table.x_hat[i] * line[i] + table.previous[i] * line[i - 1]
        assert added.item() == pytest.approx((weight * 0.5 * (line[i] + line[i + 1])).item(), rel=1e-9)


def test_churn_needs_an_amount():
    grid = geometric_grid(BSI(), 5)
    torch.testing.assert_close(named_solver("churn:0.3")(BSI(), grid).eps, churn(0.3)(BSI(), grid).eps)
