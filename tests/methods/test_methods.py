"""The paper's table "Central structures", its encoders for every belief prior, its remarks and its samplers."""

import math

import mpmath
import pytest
import torch

from brute_force import condition, mean_and_variance, source
from bsi.gaussian import Belief
from bsi.grids import paper_grid
from bsi.methods import BFN, BSI, VDM
from bsi.rng import SeededNoise
from bsi.sampling import sample, trajectory
from bsi.solvers import posterior

METHODS = [BSI(), BFN(), VDM()]
BELIEFS = [
    BSI(),
    BSI(gamma_0=0.3),
    BSI(gamma_0=1e4),
    BSI(gamma_0=math.inf),
    BSI(lambda_0=2.0, alpha_M=50.0, gamma_0=5.0),
]


def at(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Encoders and belief priors


@pytest.mark.parametrize("method", BELIEFS, ids=repr)
def test_encoder_is_the_marginal_of_the_belief_after_measurements_of_x(method):
    """Lemma "ELBO encoder": integrate the initial belief and four measurements out, for any gamma_0."""
    x, count = 0.8, 5
    gamma_0 = method.lambda_0 if method.gamma_0 is None else method.gamma_0
    mean, level = source(0, count, 0.0, gamma_0**-0.5), method.lambda_0
    for i, alpha in enumerate((0.003, 0.4, 2.0, 17.0), start=1):
        y = source(i, count, x, alpha**-0.5)
        mean, level = (level * mean + alpha * y) / (level + alpha), level + alpha
        expected = mean_and_variance(mean)
        encoder = method.encoder(at(level))
        assert (encoder.signal.item() * x, encoder.noise.item() ** 2) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("method", BELIEFS, ids=repr)
def test_encoder_is_the_lemma_as_printed(method):
    lambda_0 = method.lambda_0
    gamma_0 = lambda_0 if method.gamma_0 is None else method.gamma_0
    for level in (lambda_0, 1.3 * lambda_0, 3.0, method.levels.high):
        encoder = method.encoder(at(level))
        variance = (level - lambda_0 + lambda_0**2 / gamma_0) / level**2
        assert encoder.signal.item() == pytest.approx((level - lambda_0) / level, abs=1e-15)
        assert encoder.noise.item() ** 2 == pytest.approx(variance, rel=1e-12)


@pytest.mark.parametrize("lambda_0", [1e-4, 1e-2, 1.0])
def test_bsi_encoder_precision_is_the_belief_precision(lambda_0):
    """Corollary: at gamma_0 = lambda_0 the encoder precision grows in lockstep with lambda."""
    for method in (BSI(lambda_0), BSI(lambda_0, gamma_0=lambda_0)):
        level = paper_grid(method, 30)
        torch.testing.assert_close(method.encoder(level).noise ** -2, level, rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", [*BELIEFS, BFN()], ids=repr)
def test_encoder_at_the_first_level_is_the_belief_prior(method):
    first = method.encoder(at(method.levels.low))
    assert first.signal.item() == 0
    assert first.noise.item() == pytest.approx(method.prior(torch.ones(1, 1, dtype=torch.float64)).item(), rel=1e-12)
    assert method.prior_kl(torch.randn(3, 2)).tolist() == [0, 0, 0]


def test_bfn_is_bsi_with_infinite_gamma_0():
    bfn, end = BFN(), BSI(lambda_0=1.0, gamma_0=math.inf, alpha_M=1e6 - 1)
    level = paper_grid(end, 40)
    torch.testing.assert_close(bfn.encoder(level).signal, end.encoder(level).signal, rtol=0, atol=0)
    torch.testing.assert_close(bfn.encoder(level).noise, end.encoder(level).noise, rtol=0, atol=0)
    assert (bfn.levels.low, bfn.c) == (1.0, 0.0) == (end.levels.low, end.c)
    assert bfn.levels.high == pytest.approx(1e6)
    assert bfn.recon_precision == pytest.approx(1e6)


@pytest.mark.parametrize("sigma_1", [1e-3, 0.02])
def test_bfn_encoder_is_the_flow_distribution(sigma_1):
    """In the notation of BFN: gamma(t) = 1 - sigma_1^2t, and the flow distribution is N(gamma x, gamma (1 - gamma))."""
    method = BFN(sigma_1)
    t = torch.linspace(0, 1, 21, dtype=torch.float64)
    level = method.levels.icdf(t)
    gamma = 1 - sigma_1 ** (2 * t)
    encoder, alpha = method.encoder(level), method.gain(level)
    torch.testing.assert_close(encoder.signal, gamma, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(encoder.noise.square(), gamma * (1 - gamma), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(encoder.noise.square(), alpha / (1 + alpha).square(), rtol=1e-12, atol=0)  # as printed


def test_posterior_mean_matching_is_the_same_limit():
    """PMM tracks E[x | y_1 .. y_k] under the prior N(0, 1/lambda_0); for a given x its law is our encoder's."""
    lambda_0, alphas, ys = 0.5, (0.2, 1.0, 4.0), (0.3, -1.1, 0.7)
    unknown = source(0, 4, 0.0, lambda_0**-0.5)
    given = [unknown + source(i, 4, 0.0, alpha**-0.5) for i, alpha in enumerate(alphas, start=1)]
    expected, _ = condition(unknown, given, list(ys))
    belief = Belief(at(0.0), at(lambda_0))
    for y, alpha in zip(ys, alphas, strict=True):
        belief = belief.update(at(y), at(alpha))
    assert belief.mean.item() == pytest.approx(expected, rel=1e-12)

    x = 1.7
    weights = [alpha / (lambda_0 + sum(alphas)) for alpha in alphas]
    tracked = sum(w * source(i, 4, x, a**-0.5) for i, (w, a) in enumerate(zip(weights, alphas, strict=True)))
    encoder = BSI(lambda_0, gamma_0=math.inf).encoder(at(lambda_0 + sum(alphas)))
    assert (encoder.signal.item() * x, encoder.noise.item() ** 2) == pytest.approx(mean_and_variance(tracked))


def test_vdm_encoder_is_the_tables_row():
    method = VDM()
    for nu in (math.exp(-5), 0.3, 1.0, math.exp(13.3)):
        encoder = method.encoder(at(nu))
        assert encoder.signal.item() == pytest.approx(math.sqrt(nu / (1 + nu)), rel=1e-14)
        assert encoder.noise.item() ** -2 == pytest.approx(1 + nu, rel=1e-14)
        assert encoder.signal.item() ** 2 + encoder.noise.item() ** 2 == pytest.approx(1)  # variance preserving


def test_vdm_log_snr_is_linear_in_t_from_minus_5_to_13_3():
    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    torch.testing.assert_close(torch.log(VDM().levels.icdf(t)), -5 + 18.3 * t, rtol=1e-13, atol=1e-13)


# The paper's remarks


def test_remark_encoder_variance_at_a_tenth_of_the_way():
    t = at(0.1)
    bsi, vdm = BSI(), VDM()
    assert bsi.encoder(bsi.levels.icdf(t)).noise.item() ** 2 == pytest.approx(15.85, abs=0.005)
    assert vdm.encoder(vdm.levels.icdf(t)).noise.item() ** 2 == pytest.approx(0.96, abs=0.005)


def test_remark_vdm_keeps_a_twelfth_of_the_signal_at_its_noisiest():
    encoder = VDM().encoder(at(VDM().levels.low))
    assert encoder.signal.item() == pytest.approx(0.08, abs=0.005)
    assert encoder.noise.item() == pytest.approx(1, abs=0.005)


def test_remark_bfn_encoder_precision_falls_and_then_rises():
    method = BFN()
    level = torch.linspace(1.01, 40.0, 400, dtype=torch.float64)
    alpha, precision = method.gain(level), method.encoder(level).noise ** -2
    torch.testing.assert_close(precision, (1 + alpha).square() / alpha, rtol=1e-10, atol=0)
    rising = torch.diff(precision) > 0
    turn = int(rising.int().argmax())
    assert turn > 0
    assert not rising[:turn].any()
    assert rising[turn:].all()
    assert alpha[turn].item() == pytest.approx(1, abs=0.1)
    bsi = BSI().encoder(torch.linspace(0.02, 40.0, 400, dtype=torch.float64)).noise ** -2
    assert (torch.diff(bsi) > 0).all()


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_remark_only_bfns_first_step_is_equal_for_all_samples(method):
    noise = SeededNoise(0, torch.arange(6), (3,), torch.float64)
    first = next(trajectory(method, lambda latent, level: torch.tanh(latent), noise, paper_grid(method, 4)))
    assert (first.x_hat.std(0) == 0).all().item() == isinstance(method, BFN)


@pytest.mark.parametrize(("method", "variance"), [(BSI(), 100.0), (BFN(), 0.0), (VDM(), 1.0)], ids=repr)
def test_remark_initial_variances_order_the_methods(method, variance):
    assert method.prior(torch.ones(1, 1, dtype=torch.float64)).item() ** 2 == pytest.approx(variance)


def test_paper_hyperparameters_are_the_defaults():
    bsi = BSI()
    assert (bsi.lambda_0, bsi.alpha_M, bsi.recon_precision, bsi.c) == (1e-2, 1e6, 2e6, 1e-2)
    assert (bsi.levels.low, bsi.levels.high) == (1e-2, 1e-2 + 1e6)
    assert bsi.density_precision == 1e6
    assert BFN().recon_precision == BFN().density_precision == pytest.approx(1e6)
    assert VDM().recon_precision == VDM().levels.high == math.exp(13.3)
    assert [m.parametrization for m in METHODS] == ["edm", "epsilon", "epsilon"]
    assert [m.decoder for m in METHODS] == ["cdf", "cdf", "softmax"]
    assert [m.clips for m in METHODS] == [False, True, False]


# VDM: prior term, decoders, update


def test_vdm_prior_kl_agrees_with_another_implementation():
    x = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    method = VDM()
    nu = method.levels.low
    encoded = torch.distributions.Normal(math.sqrt(nu / (1 + nu)) * x, math.sqrt(1 / (1 + nu)))
    expected = torch.distributions.kl_divergence(encoded, torch.distributions.Normal(0.0, 1.0)).flatten(1).sum(1)
    torch.testing.assert_close(method.prior_kl(x), expected, rtol=1e-9, atol=0)
    assert (expected > 0).all()


def test_vdm_decodes_by_rescaling_and_the_others_by_predicting_once_more():
    latent, calls = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64), []

    def predict(psi, level):
        calls.append(level)
        return 0.5 * psi

    for method in METHODS:
        calls.clear()
        level = at(method.levels.high).expand(3)
        decoded = method.decode(latent, level, predict)
        rescales = isinstance(method, VDM)
        expected = latent / method.encoder(level).signal[:, None] if rescales else 0.5 * latent
        torch.testing.assert_close(decoded, expected)
        assert len(calls) == (0 if rescales else 1)


@pytest.mark.parametrize(
    ("nu", "later"),
    [(1e-12, 2e-12), (1e-12, 1e12), (math.exp(-5), math.exp(13.3)), (1.0, 1.0 + 1e-9), (1e11, 1e11 * (1 + 1e-10))],
)
def test_vdm_update_is_the_printed_formula_at_extreme_snrs(nu, later):
    """Numerically stable without log space: every coefficient to 13 digits against mpmath."""
    table = posterior(VDM(nu_min=nu, nu_max=later), at(nu, later))
    with mpmath.workdps(60):
        a, b = mpmath.mpf(nu), mpmath.mpf(later)
        below = mpmath.sqrt(b * (1 + b))
        printed = (mpmath.sqrt(a * (1 + a)) / below, (b - a) / below, mpmath.sqrt(b - a) / below)
    ours = (table.latent.item(), table.x_hat.item(), table.eps.item())
    assert ours == pytest.approx([float(value) for value in printed], rel=1e-13)
    assert table.previous.item() == 0


@pytest.mark.parametrize("method", [*BELIEFS, BFN()], ids=repr)
def test_belief_update_for_sampling_is_the_tables_row(method):
    """mu' = (lambda mu + alpha (x_hat + eps / sqrt(alpha))) / (lambda + alpha), the same for every gamma_0."""
    grid = paper_grid(method, 12)
    table = posterior(method, grid)
    level, alpha = grid[:-1], torch.diff(grid)
    known = method.gain(level) + method.c > 0  # a latent without information is 0, for any coefficient
    torch.testing.assert_close(table.latent[known], (level / (level + alpha))[known], rtol=1e-9, atol=0)
    torch.testing.assert_close(table.x_hat, alpha / (level + alpha), rtol=1e-9, atol=0)
    torch.testing.assert_close(table.eps, torch.sqrt(alpha) / (level + alpha), rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_update_with_the_true_sample_keeps_the_encoders_law(method):
    """Measured at x itself, one step leads from q(. | x, level) to q(. | x, level'): the Bayesian update is exact."""
    grid, x = paper_grid(method, 9), 0.6
    table, encoder = posterior(method, grid), method.encoder(grid)
    for i in range(9):
        latent = source(0, 2, encoder.signal[i].item() * x, encoder.noise[i].item())
        stepped = table.latent[i].item() * latent + source(1, 2, table.x_hat[i].item() * x, table.eps[i].item())
        expected = (encoder.signal[i + 1].item() * x, encoder.noise[i + 1].item() ** 2)
        assert mean_and_variance(stepped) == pytest.approx(expected, rel=1e-9)


# Algorithms "Sampling with posterior inference" and "Sampling with BSI"


def network(mu: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    return torch.tanh(mu + torch.log1p(level)[:, None])


def replay(seed: int) -> SeededNoise:
    return SeededNoise(seed, torch.arange(4), (3,), torch.float64)


@pytest.mark.parametrize("method", BELIEFS, ids=repr)
def test_algorithm_sampling_with_posterior_inference(method):
    grid, noise = paper_grid(method, 7), replay(5)
    gamma_0 = method.lambda_0 if method.gamma_0 is None else method.gamma_0
    belief = Belief(gamma_0**-0.5 * noise(0.0, 1.0), grid[:1])
    for alpha in torch.diff(grid):
        x_hat = network(belief.mean, belief.precision.expand(4))
        y = x_hat + alpha**-0.5 * noise(0.0, 1.0)
        belief = belief.update(y, alpha[None])
    expected = network(belief.mean, belief.precision.expand(4))
    torch.testing.assert_close(sample(method, network, replay(5), grid, "posterior"), expected, rtol=1e-9, atol=1e-9)


def test_algorithm_sampling_with_bsi_line_by_line():
    method, k = BSI(), 9
    grid, noise = paper_grid(method, k), replay(6)
    alpha = [0.0, *torch.diff(grid).tolist()]
    eps = [noise(0.0, 1.0) for _ in range(k + 1)]
    mu, level = math.sqrt(1 / method.lambda_0) * eps[0], method.lambda_0
    for i in range(1, k + 1):
        x_hat = network(mu, at(level).expand(4))
        previous, level = level, level + alpha[i]
        mu = (previous * mu + alpha[i] * (x_hat + math.sqrt(1 / alpha[i]) * eps[i])) / level
    expected = network(mu, at(level).expand(4))
    torch.testing.assert_close(sample(method, network, replay(6), grid, "posterior"), expected, rtol=1e-9, atol=1e-9)
