"""Theorems "ELBO" and "infinite ELBO", Lemma "tighter", importance sampling, and the record with its two errors."""

import itertools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brute_force import mean_and_variance, source
from bsi.bound import Design, EvaluatedModel, estimate, noise
from bsi.denoiser import Denoiser
from bsi.elbo import Elbo, Estimator, Replicates, finite_measurement_loss, measurement_loss, reconstruction_loss
from bsi.errors import UsageError
from bsi.grids import paper_grid
from bsi.levels import ExpectedError, Fitted, LogUniform, Uniform
from bsi.likelihood import categorical_normal, discretized_normal, normal
from bsi.methods import BFN, BSI, VDM, Method, Predictor
from bsi.oracle import Mixture
from bsi.solvers import posterior
from bsi.values import CONTINUOUS, Bins
from repetitions import repeat, unchecked

GOLDEN = json.loads((Path(__file__).parent / "golden" / "measurement.json").read_text())
METHODS = [BSI(), BFN(), VDM()]
MAKE = {"BSI": BSI, "BFN": BFN, "VDM": VDM}


class Zero(torch.nn.Module):
    def forward(self, x, t):
        return torch.zeros_like(x)


def gaussian_posterior(method: Method) -> Predictor:
    """The posterior mean of unit-Gaussian data: edm coefficients with a network that returns 0."""
    return Denoiser(Zero(), method, "edm")


def draws(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_estimates(estimates: torch.Tensor, value: float, standard_errors: float = 4.0) -> None:
    error = estimates.std().item() / math.sqrt(len(estimates))
    assert abs(estimates.mean().item() - value) < standard_errors * error


def mean_squared_error(method: Method, level: torch.Tensor) -> torch.Tensor:
    """h for unit-Gaussian data and its posterior mean, per dimension: the posterior variance."""
    encoder = method.encoder(level)
    return encoder.noise.square() / (encoder.signal.square() + encoder.noise.square())


def golden_methods() -> list:
    rows = [dict(row) for row in GOLDEN["infinite"]]
    return [pytest.param(MAKE[row.pop("method")], row.pop("value"), row, id=f"{i}") for i, row in enumerate(rows)]


# Golden values


@pytest.mark.parametrize(("make", "value", "settings"), golden_methods())
def test_golden_infinite_bound_by_quadrature(make, value, settings):
    method = make(**settings)

    def integrand(log_level: float) -> float:
        level = torch.tensor([math.exp(log_level)], dtype=torch.float64).clamp(method.levels.low, method.levels.high)
        encoder = method.encoder(level)
        if encoder.signal.item() == encoder.noise.item() == 0:
            return 0.5  # BFN's first level: no information, unit variance, at level 1
        return 0.5 * mean_squared_error(method, level).item() * level.item()

    ends = math.log(method.levels.low), math.log(method.levels.high)
    integral, _ = scipy.integrate.quad(integrand, *ends, epsabs=1e-9, epsrel=1e-10, limit=400)
    assert integral == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("row", GOLDEN["finite"], ids=lambda row: f"k={row['k']}")
def test_golden_finite_bound_by_its_sum(row):
    method = BSI()
    grid = paper_grid(method, row["k"])
    bound = 0.5 * (torch.diff(grid) * mean_squared_error(method, grid[:-1])).sum()
    assert bound.item() == pytest.approx(row["value"], abs=1e-5)


@pytest.mark.parametrize(("make", "value", "settings"), golden_methods())
def test_golden_infinite_bound_through_the_estimator(make, value, settings):
    method, n = make(**settings), 4
    x, eps, t = draws(0, 20_000, n), draws(1, 20_000, n), uniform(2, 20_000)
    assert_estimates(measurement_loss(method, gaussian_posterior(method), x, t, eps) / n, value)


# The bound is a bound: a model whose density is known


@pytest.mark.parametrize(
    "method",
    [
        BSI(0.1, alpha_M=20.0, alpha_R=30.0),
        BSI(0.1, gamma_0=2.0, alpha_M=20.0, alpha_R=30.0),
        BSI(1.0, gamma_0=math.inf, alpha_M=20.0, alpha_R=30.0),
        BFN(sigma_1=0.2),
        VDM(nu_min=0.05, nu_max=30.0),
    ],
    ids=repr,
)
@pytest.mark.parametrize("k", [1, 3, 10])
def test_bound_is_never_below_the_exact_negative_log_likelihood(method, k):
    """With a linear predictor every variable of the generative process is Gaussian and has a closed form.

    The measurement and prior terms are together KL(q(psi_0 .. psi_k | x) || p(psi_0 .. psi_k)), a KL of two joint
    Gaussians. All terms are quadratic in the noise, so that eps = +-1 averages them exactly.
    """
    predict, grid = gaussian_posterior(method), paper_grid(method, k)
    table, one = posterior(method, grid), torch.ones(1, 1, dtype=torch.float64)
    slopes = [predict(one, level[None]).item() for level in grid[:-1]]
    decode = method.decode(one, grid[-1:], predict).item()
    first = method.encoder(grid[:1])

    def chain(start: np.ndarray, x: float | None) -> list[np.ndarray]:
        """The latents when x is measured, or, without an x, what the model predicts."""
        latents = [start]
        for i, slope in enumerate(slopes):
            measured = slope * latents[-1] if x is None else source(0, k + 1, x, 0.0)
            noise = source(i + 1, k + 1, 0.0, table.eps[i].item())
            latents.append(table.latent[i].item() * latents[-1] + table.x_hat[i].item() * measured + noise)
        return latents if start[1:].any() else latents[1:]  # BFN's first is known, and no variable

    values, signs = [0.0, 0.4, -1.0, 2.5], [torch.full((4, 1), sign, dtype=torch.float64) for sign in (-1.0, 1.0)]
    x = torch.tensor(values, dtype=torch.float64)[:, None]
    steps = [torch.full((4,), i) for i in range(k)]
    measured = torch.stack([finite_measurement_loss(method, predict, x, grid, i, e) for i in steps for e in signs])
    decoded = torch.stack([reconstruction_loss(method, predict, x, eps, CONTINUOUS) for eps in signs])
    divergence, bound = measured.mean(0) + method.prior_kl(x), decoded.mean(0) + measured.mean(0) + method.prior_kl(x)

    generated = chain(source(0, k + 1, 0.0, method.prior(one).item()), None)
    variance = decode**2 * mean_and_variance(generated[-1])[1] + 1 / method.density_precision
    exact = -torch.distributions.Normal(0.0, math.sqrt(variance)).log_prob(x[:, 0])
    for i, value in enumerate(values):
        encoded = chain(source(0, k + 1, first.signal.item() * value, first.noise.item()), value)
        assert divergence[i].item() == pytest.approx(joint_kl(encoded, generated), rel=1e-6, abs=1e-8)
        assert bound[i] > exact[i]


def joint_kl(p: list[np.ndarray], q: list[np.ndarray]) -> float:
    """KL(p || q) of two jointly Gaussian vectors."""
    (mean_p, cov_p), (mean_q, cov_q) = ((rows[:, 0], rows[:, 1:] @ rows[:, 1:].T) for rows in map(np.stack, (p, q)))
    gap, ratio = mean_q - mean_p, np.linalg.solve(cov_q, cov_p)
    return 0.5 * (np.trace(ratio) - len(p) - np.linalg.slogdet(ratio)[1] + gap @ np.linalg.solve(cov_q, gap))


# Lemma "tighter"


def quadrature(points: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Samples of a two-component mixture, noise, and weights: Gauss and Hermite in both."""
    roots, weights = scipy.special.roots_hermitenorm(points)
    nodes, weights = torch.from_numpy(roots), torch.from_numpy(weights / weights.sum())
    x = torch.cat([-1.0 + 0.3 * nodes, 1.0 + 0.3 * nodes])
    x_weight = torch.cat([weights, weights]) / 2
    return (
        x[:, None].expand(-1, points).reshape(-1, 1),
        nodes.repeat(2 * points)[:, None],
        (x_weight[:, None] * weights).reshape(-1),
    )


BIMODAL = Mixture.isotropic(torch.tensor([[-1.0], [1.0]], dtype=torch.float64), 0.3)


def finite_bound(method: Method, grid: torch.Tensor) -> float:
    """L_M^k on the mixture, with the oracle, averaged exactly over samples, noise and steps."""
    x, eps, weight = quadrature()
    k = len(grid) - 1
    i = torch.arange(k).repeat_interleave(len(x))
    loss = finite_measurement_loss(method, BIMODAL.predictor(method), x.repeat(k, 1), grid, i, eps.repeat(k, 1))
    return float((loss.reshape(k, -1) @ weight).mean())


def infinite_bound(method: Method) -> float:
    x, eps, weight = quadrature()
    predict = BIMODAL.predictor(method)
    t = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    losses = [measurement_loss(method, predict, x, value.expand(len(x)), eps) @ weight for value in t]
    return float(torch.stack(losses).mean())


@dataclass(frozen=True)
class Case:
    method: Method
    bound: float


CASES = [Case(m, infinite_bound(m)) for m in (BSI(0.1, alpha_M=50.0), BFN(0.14), VDM(0.1, 50.0))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case.method).__name__)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    ts=st.lists(st.floats(0.02, 0.98), max_size=5, unique=True),
    extra=st.lists(st.floats(0.03, 0.97), min_size=1, max_size=5),
)
def test_lemma_tighter_bound_decreases_under_refinement(case, ts, extra):
    def grid(points: list[float]) -> torch.Tensor:
        t = torch.tensor(sorted({0.0, *(round(p, 4) for p in points), 1.0}), dtype=torch.float64)
        return case.method.levels.icdf(t)

    coarse, fine = grid(ts), grid(ts + extra)
    bounds = finite_bound(case.method, coarse), finite_bound(case.method, fine)
    assert case.bound < bounds[1]
    assert bounds[1] < bounds[0] or len(fine) == len(coarse)


@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case.method).__name__)
def test_finite_bound_converges_to_the_infinite_one_from_above(case):
    gaps = [finite_bound(case.method, paper_grid(case.method, k)) - case.bound for k in (1, 4, 16, 64, 256)]
    assert all(later < earlier for earlier, later in itertools.pairwise(gaps))
    assert 0 < gaps[-1] < 0.03 * case.bound
    assert gaps[-1] == pytest.approx(gaps[-2] / 4, rel=0.1)  # a left Riemann sum: the error falls as 1 / k


# Importance sampling


@pytest.mark.parametrize("method", [BSI(0.1, alpha_M=300.0), BFN(0.06), VDM(0.05, 300.0)], ids=repr)
def test_estimates_agree_for_all_proposals(method):
    """Corollary "Importance Sampling": one integral, four proposals, none of them biased."""
    ends = method.levels.low, method.levels.high
    proposals = [
        None,
        LogUniform(*ends),
        Uniform(*ends),
        ExpectedError(*ends, offset=0.01),
        Fitted(*ends, weights=(1.0, 3.0, 2.0, 0.5)),
    ]
    predict, n, count = gaussian_posterior(method), 2, 40_000
    x, eps = draws(6, count, n), draws(7, count, n)
    t = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    level = method.levels.icdf(t)
    exact = n * 0.5 * (mean_squared_error(method, level) / method.levels.density(level)).mean().item()
    for seed, proposal in enumerate(proposals):
        assert_estimates(measurement_loss(method, predict, x, uniform(seed, count), eps, proposal), exact)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_variance_of_the_importance_sampled_bound_does_not_grow_with_the_dimension(method):
    """Section "Sequential Monte Carlo": the importance weights are over the level, a scalar."""
    count, spread = 4000, []
    for n in (1, 16, 256):
        x, eps = draws(6, count, n), draws(7, count, n)
        loss = measurement_loss(method, gaussian_posterior(method), x, uniform(8, count), eps)
        spread.append((loss.std() / loss.mean()).item())
    assert spread[0] > spread[1] > spread[2]


def test_expected_error_of_the_identity_has_the_papers_closed_form():
    """Equation "expected-h" through the estimator: f(mu, lambda) = mu, standardized data that is not Gaussian."""
    method, n, count = BSI(), 3, 40_000
    x = torch.where(uniform(8, count, n) < 0.5, -1.0, 1.0).double()  # mean 0, variance 1
    for level in (method.lambda_0, 0.03, 1.0, 300.0):
        t = method.levels.cdf(torch.tensor([level], dtype=torch.float64)).expand(count)
        loss = measurement_loss(method, lambda latent, _: latent, x, t, draws(9, count, n))
        h = 2 * loss * method.levels.density(torch.tensor(level))
        assert_estimates(h / n, method.lambda_0**2 / level**2 + 1 / level)


def test_the_expected_error_proposal_has_the_least_variance_for_the_identity():
    method, count = BSI(), 20_000
    ends = method.levels.low, method.levels.high
    x, eps, t = draws(10, count, 16), draws(11, count, 16), uniform(12, count)
    spreads = [
        measurement_loss(method, lambda latent, _: latent, x, t, eps, proposal).std().item()
        for proposal in (ExpectedError(*ends, method.lambda_0**2), LogUniform(*ends), Uniform(*ends))
    ]
    assert spreads[0] <= spreads[1] * 1.01
    assert spreads[1] < spreads[2] / 10


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_measurement_loss_is_half_the_squared_error_over_the_density(method):
    x, eps, t = draws(13, 5, 2, 3), draws(14, 5, 2, 3), uniform(15, 5)
    level = method.levels.low * (method.levels.high / method.levels.low) ** t
    encoder = method.encoder(level)
    psi = encoder.signal[:, None, None] * x + encoder.noise[:, None, None] * eps
    error = (x - torch.tanh(psi)).square().sum((1, 2))
    log_range = math.log(method.levels.high / method.levels.low)
    loss = measurement_loss(method, lambda latent, _: torch.tanh(latent), x, t, eps)
    torch.testing.assert_close(loss, 0.5 * log_range * level * error, rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_finite_loss_is_half_k_alpha_times_the_squared_error_for_any_schedule(method):
    grid = method.levels.icdf(torch.tensor([0.0, 0.1, 0.15, 0.6, 1.0], dtype=torch.float64))
    x, eps, i = draws(16, 4, 3), draws(17, 4, 3), torch.tensor([0, 1, 2, 3])
    encoder = method.encoder(grid[:-1])
    psi = encoder.signal[:, None] * x + encoder.noise[:, None] * eps
    error = (x - torch.tanh(psi)).square().sum(1)
    loss = finite_measurement_loss(method, lambda latent, _: torch.tanh(latent), x, grid, i, eps)
    torch.testing.assert_close(loss, 4 / 2 * torch.diff(grid) * error, rtol=1e-9, atol=0)


# Reconstruction


# At alpha_M = 100 a bin is as wide as the decoder's Normal, so that its probability depends on the precision.
@pytest.mark.parametrize("method", [*METHODS, VDM(decoder="cdf"), BSI(alpha_M=100.0), BFN(sigma_1=0.1)], ids=repr)
@pytest.mark.parametrize("kind", [Bins(-1.0, 1.0, 17), CONTINUOUS], ids=repr)
def test_reconstruction_decodes_the_sharpest_latent(method, kind):
    index = torch.tensor([[0, 5, 16], [3, 8, 8]])
    x, eps = Bins(-1.0, 1.0, 17).values(index, torch.float64), draws(18, 2, 3)
    level = torch.full((2,), method.levels.high, dtype=torch.float64)
    encoder = method.encoder(level)
    psi = encoder.signal[:, None] * x + encoder.noise[:, None] * eps
    x_hat = psi / encoder.signal[:, None] if isinstance(method, VDM) else 0.999 * psi
    loss = reconstruction_loss(method, lambda latent, _: 0.999 * latent, x, eps, kind)
    if kind is CONTINUOUS:
        expected = normal(x, x_hat, method.density_precision)
    else:
        decoder = categorical_normal if method.decoder == "softmax" else discretized_normal
        expected = decoder(kind, index, x_hat, method.recon_precision)
    torch.testing.assert_close(loss, -expected, rtol=1e-9, atol=1e-12)


def test_reconstruction_is_negligible_when_the_last_belief_fits_a_bin():
    """Section "Hyperparameters": alpha_M = 1e6 identifies an 8-bit color."""
    bins = Bins.uint8()
    x = bins.values(torch.randint(256, (500, 8), generator=torch.Generator().manual_seed(0)), torch.float64)
    for method in (BSI(), BFN()):
        loss = reconstruction_loss(method, gaussian_posterior(method), x, draws(19, 500, 8), bins)
        assert loss.mean() / 8 < 0.01


# The record


def replicates(values: torch.Tensor, sizes: tuple[int, ...] | None = None, blocks: int = 1) -> Replicates:
    weight = torch.tensor(sizes or (1,) * len(values))
    return Replicates(values, weight, torch.arange(values.shape[1]) % blocks)


def record(measured: torch.Tensor, decoded: torch.Tensor | None = None, n: int = 1, **fields) -> Elbo:
    """A bound whose terms have these replicates; without `decoded` one exact term and one of 0."""
    decoded = torch.zeros_like(measured[:2]) if decoded is None else decoded
    prior = fields.pop("prior", torch.zeros_like(measured[0]))
    return Elbo(replicates(measured), replicates(decoded), prior, n, **fields)


@pytest.mark.parametrize(("power", "ratio"), [(1, 1.0), (3, 81 / 70)])
def test_the_variance_of_unequal_replicates_is_never_too_small(power, ratio):
    """Replicates of 3 and 2 levels: Var = 1 / m for noise; 1 / m^3 for strata, where the estimate is larger."""
    sizes, generator = torch.tensor([3, 2]), torch.Generator().manual_seed(0)
    error = torch.randn(2, 40_000, generator=generator, dtype=torch.float64) * (sizes[:, None] ** (-power / 2))
    found = Replicates(error, sizes, torch.arange(40_000) // 8)
    true = 0.36 / 3**power + 0.16 / 2**power
    for claimed, variances in ((float(found.sample_variance.mean()), 40_000), (found.sum_variance / 40_000, 5000)):
        assert claimed / true == pytest.approx(ratio, abs=4 * ratio * math.sqrt(2 / variances))


def test_block_sums_include_errors_that_cancel():
    found = replicates(torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64))
    assert found.sample_variance.tolist() == [1.0, 1.0]
    assert found.sum_variance == 0


@pytest.mark.parametrize("shared", [False, True], ids=["own errors", "shared errors"])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 2), (1, 1, 1, 1, 1)], ids=str)
def test_the_variance_between_samples_is_unbiased(sizes, shared):
    """Known samples; noise three times as large, in replicates of unequal precision, with and without errors that all
    samples of a replicate share: the average over many estimates is the true value."""
    generator = torch.Generator().manual_seed(2)
    true = torch.randn(50, generator=generator, dtype=torch.float64)
    scale = 3 * torch.tensor(sizes).double() ** -1.5  # as strata shrink it: faster than 1 / sqrt(m)
    exact, found = replicates(torch.zeros(2, 50, dtype=torch.float64)), []

    def between(_: int) -> float:
        noise = torch.randn(len(sizes), 50, generator=generator, dtype=torch.float64)
        if shared:
            noise = 0.5 * noise + torch.randn(len(sizes), 1, generator=generator, dtype=torch.float64)
        measured = replicates(true + scale[:, None] * noise, sizes)
        return Elbo(measured, exact, torch.zeros_like(true), 1).between

    found = repeat(between, range(2000))
    assert_estimates(torch.tensor(found), true.var().item())


@pytest.mark.parametrize(("spread", "least", "most"), [(0.0, 0.0, 0.06), (0.3, 0.0, 0.1), (2.0, 0.8, 1.0), (5.0, 1, 1)])
def test_a_data_error_is_right_or_marked_as_an_upper_limit(spread, least, most):
    """400 sets of 40 samples that differ by `spread` under Monte Carlo noise of 2 in each of two replicates.

    Differences below the noise are called resolved about as rarely as two standard errors imply. The error is rarely
    below three quarters of the true one, and never 0.
    """
    generator = torch.Generator().manual_seed(5)

    def one(_: int) -> tuple[bool, bool]:
        true = spread * torch.randn(40, generator=generator, dtype=torch.float64)
        bound = record(true + 2 * torch.randn(2, 40, generator=generator, dtype=torch.float64))
        expected = true.std().item() / math.sqrt(40) / math.log(2)
        assert bound.data_error > 0
        raw = bound.nats.std().item() / math.sqrt(40) / math.log(2)
        assert bound.data_resolved or bound.data_error < raw * (1 + 1e-9), "noise does not reduce the spread"
        assert ("at most" in str(bound)) != bound.data_resolved
        return bound.data_resolved, bound.data_error < 0.75 * expected

    resolved, too_small = np.mean(repeat(one, range(400)), axis=0)
    assert least <= resolved <= most
    assert too_small < 0.04


def test_a_record_adds_its_terms_and_converts_its_units():
    ones = torch.ones(2, 4, dtype=torch.float64)
    bound = record(2 * ones, 1 * ones, n=5, prior=3 * ones[0], log_determinant=0.1)
    assert bound.nats.tolist() == [6.5] * 4
    assert bound.nats_per_dim == pytest.approx(1.3)
    assert bound.bits_per_dim == pytest.approx(1.3 / math.log(2))
    assert (bound.monte_carlo_error, bound.data_error) == (0, 0)
    shaken = record(2 * ones + torch.tensor([[4.0], [-4.0]]), n=5)
    assert shaken.monte_carlo_error == pytest.approx(4 * 4 / (4 * 5 * math.log(2)))


def test_the_difference_of_two_bounds_has_all_terms_and_the_units_of_both():
    generator = torch.Generator().manual_seed(3)
    common = torch.randn(2, 30, generator=generator, dtype=torch.float64)
    a = record(common, prior=torch.full((30,), 0.5, dtype=torch.float64), log_determinant=0.3)
    b = record(common, log_determinant=0.1)
    assert (a - b).bits_per_dim == pytest.approx((0.5 + 0.2) / math.log(2))
    assert (a - b).monte_carlo_error == 0
    assert (a - a).data_error == 0
    with pytest.raises(UsageError, match="same estimator"):
        a - replace(b, rounds=2)
    with pytest.raises(UsageError, match="same estimator"):
        replace(a, estimator=Estimator(seed=1)) - replace(b, estimator=Estimator())


def test_a_bound_is_a_number_and_can_be_formatted():
    values = math.log(2) * torch.tensor([[1.5, 2.5], [2.0, 2.0]], dtype=torch.float64)
    bound = record(values)
    assert float(bound) == bound.bits_per_dim == pytest.approx(2.0)
    assert f"{bound:.3f}" == "2.000"
    assert f"{bound}" == str(bound)
    assert str(bound).startswith("2.0000 bits/dim ± 0.0000 (Monte Carlo) ±")
    continuous = replace(bound, binned=False)
    assert str(continuous).startswith("1.3863 nats/dim ± ")
    assert str(continuous).endswith("; 2.0000 bits/dim")


@pytest.mark.parametrize(
    "wrong",
    [{"measure": 1}, {"recon": 1}, {"finite_k": 0}, {"target_error": 0.0}, {"batch_size": 0}, {"proposal": "best"}],
    ids=str,
)
def test_invalid_settings_of_the_estimator_are_rejected(wrong):
    with unchecked(), pytest.raises(UsageError, match=next(iter(wrong))):
        Estimator(**wrong)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_record_holds_the_three_terms_of_the_bound(method):
    """Each replicate is the average of the terms' own functions at the design's levels, with the estimator's noise."""
    bins = Bins.uint8()
    x = bins.values(torch.randint(256, (6, 4), generator=torch.Generator().manual_seed(1)))
    predict, ids = gaussian_posterior(method), torch.arange(6)
    bound = estimate(EvaluatedModel.of(method, predict, x, bins), Estimator(measure=4, seed=7))
    design = Design(6, 4, seed=7)
    assert design.sizes == (2, 2)
    for replicate in (0, 1):
        rows = [
            measurement_loss(method, predict, x, t, noise(7, ids, "measure", 2 * replicate + i, (4,), x.dtype))
            for i, t in enumerate(design.t(ids, replicate))
        ]
        torch.testing.assert_close(bound.measurements.values[replicate], torch.stack(rows).double().mean(0))
        decoded = reconstruction_loss(method, predict, x, noise(7, ids, "recon", replicate, (4,), x.dtype), bins)
        torch.testing.assert_close(bound.reconstructions.values[replicate], decoded.double())
    torch.testing.assert_close(bound.prior, method.prior_kl(x).double())
    assert bound.n == 4
