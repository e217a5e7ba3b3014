"""Discrete data: exact bounds and laws on sequences that can be enumerated, and the equality with discrete BFN."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import bsi
from bsi.backbones import build
from bsi.bound import EvaluatedModel, estimate
from bsi.elbo import Estimator
from bsi.errors import BsiError, DataError, UsageError
from bsi.grids import geometric_grid, paper_grid
from bsi.oracle import Sequences
from bsi.recipe import Data, Optimizer, Recipe, from_plain, to_plain
from bsi.rng import SeededNoise
from bsi.runtime.export import DataSpec, read_trained
from bsi.sampling import drawing, end_of, trajectory
from bsi.symbols import SymbolPredictor, drawn, expected, log_posterior, log_prob, mixture_kl

K, N = 3, 4
LAST = 20.0
METHODS = [bsi.BSI(lambda_0=1e-3, alpha_M=LAST), bsi.BFN(sigma_1=(1 + LAST) ** -0.5), bsi.VDM(nu_min=1e-3, nu_max=LAST)]


def normals(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chain() -> Sequences:
    """A Markov chain of four steps: each symbol usually follows its predecessor in the alphabet."""
    first, step = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.softmax(2 * normals(0, K, K), 1)
    return Sequences(torch.einsum("a,ab,bc,cd->abcd", first, step, step, step))


CHAIN, LETTERS = chain(), bsi.Symbols(K)


class Zero(nn.Module):
    def forward(self, x, t, cond=None):
        return torch.zeros_like(x)


class Exact(nn.Module):
    """The network of the chain's exact posterior: it reads the probabilities given each element alone."""

    def forward(self, x, t, cond=None):
        p = ((x * math.sqrt(K - 1) + 1) / K).clamp(min=1e-16)
        return CHAIN.logits(p.log()) - p.log()  # the prior is uniform: the probabilities are likelihoods


class Bend(nn.Module):
    """A random network whose outputs depend on all inputs."""

    def __init__(self, n: int = K * N) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * normals(1, n, n))

    def forward(self, x, t):
        return torch.tanh(x.flatten(1) @ self.weight + t[:, None]).view_as(x)


def bound(method, predict, kind=LETTERS, k=None, measure=32, data=CHAIN.all):
    x = kind.values(data, torch.float64)
    return estimate(EvaluatedModel.of(method, predict, x, kind), Estimator(measure=measure, recon=4, finite_k=k))


def nats(elbo) -> tuple[float, float]:
    """The average bound in nats per sample, and its Monte Carlo error."""
    return float(elbo.nats.mean()), elbo.monte_carlo_error * elbo.n * math.log(2)


def mean_nats(elbo) -> float:
    """The average over the law of the chain, for a bound of all sequences."""
    return float((elbo.nats * CHAIN.table.flatten()).sum())


EXACT_NATS = -float(CHAIN.log_prob.mean())  # every sequence once
ENTROPY = -float((CHAIN.log_prob * CHAIN.table.flatten()).sum())


@pytest.mark.parametrize("shape", [(1,), (7,), (1, 5, 4), (3, 5, 4), (2, 3, 2, 2)])
@pytest.mark.parametrize("count", [2, 3, 256])
def test_symbols_are_embedded_at_equal_distances_and_recovered(shape, count):
    kind = bsi.Symbols(count)
    data = torch.randint(count, (6, *shape), generator=torch.Generator().manual_seed(0))
    model = bsi.Model(Zero(), METHODS[0], shape, data=kind)
    x = model.values(data)
    assert x.shape[1:] == model.latent_shape == kind.latent_shape(shape)
    assert torch.equal(model.data(x).long(), data)
    letters = kind.values(torch.arange(count)[:, None], torch.float64).flatten(1)
    distances = torch.cdist(letters, letters).square()
    torch.testing.assert_close(distances, 8 - 8 * torch.eye(count, dtype=torch.float64), atol=1e-5, rtol=0)
    assert letters.sum(0).abs().max() < 1e-12


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_bound_of_the_exact_predictor_is_the_likelihood(method):
    value, error = nats(bound(method, CHAIN.predictor(method), measure=128, data=CHAIN.all.repeat(6, 1)))
    assert value == pytest.approx(EXACT_NATS, abs=4 * error + 8e-3)
    assert error < 0.01 * EXACT_NATS
    general = bsi.BSI(lambda_0=0.5, gamma_0=2.0, alpha_M=LAST)
    value, error = nats(bound(general, CHAIN.predictor(general)))
    excess = 0.5 * general.c * N * 8 * (K - 1) / (2 * K)  # c / 2 times the largest variance of the embedded sample
    assert EXACT_NATS - 4 * error < value < EXACT_NATS + excess + 4 * error
    worse = bound(method, bsi.Model(Bend(), method, (N,), data=LETTERS).denoiser)
    assert mean_nats(worse) > ENTROPY + 0.3


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("k", [None, 5])
def test_a_network_of_zeros_is_exact_for_independent_symbols(method, k):
    """For one element the mixture over symbols is the exact transition of any length."""
    prior = (0.6, 0.3, 0.1)
    model = bsi.Model(Zero(), method, (1,), data=bsi.Symbols(K, prior=prior)).double()
    elbo = bound(method, model.denoiser, model.kind, k, measure=16, data=torch.arange(K).repeat(200)[:, None])
    value, error = nats(elbo)
    exact = -sum(map(math.log, prior)) / K
    assert value == pytest.approx(exact, abs=4 * error + 3e-3)


def test_finitely_many_steps_are_a_bound_that_the_mixture_tightens():
    method = METHODS[0]
    predict = CHAIN.predictor(method)
    x = LETTERS.values(CHAIN.all, torch.float64)
    found = {k: bound(method, predict, k=k, measure=64) for k in (1, 4, 16, 64)}
    for k, (value, error) in {k: nats(elbo) for k, elbo in found.items()}.items():
        assert value > EXACT_NATS - 4 * error
        grid = paper_grid(method, k)
        gained, i = torch.diff(method.gain(grid)), torch.arange(k).repeat_interleave(len(x))
        every = x.repeat(k, 1, 1)
        x_hat = predict(method.encoder(grid[i]).encode(every, normals(k, *every.shape)), grid[i])
        normal = 0.5 * (gained[i] * (every - x_hat).square().flatten(1).sum(1)).sum() / len(x)
        assert value < float(normal) + 4 * error
    means = [mean_nats(elbo) for elbo in found.values()]
    single = -sum(float(p @ p.log()) for p in (CHAIN.table.sum([j for j in range(N) if j != i]) for i in range(N)))
    assert means[0] == pytest.approx(single, abs=0.05), "a single step predicts each symbol independently"
    assert means[0] > means[2] > means[3]
    assert means[3] == pytest.approx(ENTROPY, abs=0.05)


def test_the_divergence_of_a_step_is_that_of_a_mixture():
    """Against a numerical integral for two symbols, whose mixture varies along one direction only."""
    kind, p, d = bsi.Symbols(2), 0.2, 0.7
    x = kind.values(torch.zeros(1, 1, dtype=torch.long), torch.float64)
    logits = torch.tensor([p, 1 - p], dtype=torch.float64).log().view(1, 2, 1)
    u = torch.linspace(-12, 12, 20_001, dtype=torch.float64)
    distance = math.sqrt(8 * d)
    log_ratio = -torch.log(p + (1 - p) * torch.exp(-distance * u - 0.5 * distance**2))
    exact = torch.trapezoid(torch.exp(-0.5 * u**2) / math.sqrt(2 * math.pi) * log_ratio, u)
    eps = normals(0, 200_000, 2, 1)
    ones = torch.ones(len(eps), dtype=torch.float64)
    found = mixture_kl(kind, x.expand_as(eps), logits.expand_as(eps), d * ones, eps)
    assert float(found.max()) <= -math.log(p)
    assert float(found.mean()) == pytest.approx(float(exact), abs=4 * float(found.std()) / math.sqrt(len(found)))


# The law of samples


def flow_probability(prior: float, method, k: int, solver: str) -> float:
    """P(symbol 0) of one binary symbol under a deterministic solver, from where the flow splits the prior."""
    kind = bsi.Symbols(2, prior=(prior, 1 - prior))
    predict = SymbolPredictor(kind, lambda latent, level: log_posterior(kind, method.encoder(level), latent))
    low, high = torch.tensor([-4.0], dtype=torch.float64), torch.tensor([4.0], dtype=torch.float64)
    for _ in range(28):
        middle = 0.5 * (low + high)
        noise = torch.stack([middle, -middle], 1)[:, :, None] / math.sqrt(2)
        x = end_of(
            trajectory(method, predict, lambda start, end, noise=noise: noise, geometric_grid(method, k), solver)
        )
        up = x[:, 0, 0] > 0
        low, high = torch.where(up, low, middle), torch.where(up, middle, high)
    return 0.5 * math.erfc(float(low) / math.sqrt(2))


@pytest.mark.parametrize("solver", ["churn:0", "ode2"])
def test_the_probability_of_a_symbol_converges_at_the_order_of_the_solver(solver):
    method = bsi.BSI(alpha_M=LAST)
    errors = [abs(flow_probability(0.3, method, k, solver) - 0.3) for k in (16, 32, 64)]
    assert errors[-1] < 2e-3
    for coarse, fine in itertools.pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(2, abs=0.5)


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("solver", ["posterior", "mixture", "sde2", "ode2"])
def test_samples_converge_in_total_variation(method, solver):
    num = 4000
    exact, noise_level = CHAIN.table.flatten(), 0.5 * math.sqrt(2 / math.pi / num) * float(CHAIN.table.sqrt().sum())

    def variation(k: int) -> float:
        sampler = bsi.Sampler(steps=k, solver=solver, noise="independent", grid="geometric")
        steps = drawing(method, CHAIN.predictor(method), sampler, torch.arange(num), (K, N), 0, torch.float64)
        index = LETTERS.data(end_of(steps)).view(num, N).long()
        place = (index * K ** torch.arange(N - 1, -1, -1)).sum(1)
        return 0.5 * float((torch.bincount(place, minlength=K**N) / num - exact).abs().sum())

    assert variation(2) > 2 * noise_level
    assert variation(64) < 1.8 * noise_level


def test_inpainting_follows_the_conditional_distribution():
    method, num = bsi.BSI(alpha_M=LAST), 2000
    model = bsi.Model(Exact(), method, (N,), data=LETTERS).eval()
    given, mask = torch.tensor([0, 2, 1, 1]), torch.tensor([0, 1, 0, 1])
    found = model.inpaint(given.expand(num, N), mask, steps=48, solver="posterior", grid="geometric").long()
    assert torch.equal(found[:, [1, 3]], given[[1, 3]].expand(num, 2))
    conditional = CHAIN.table[:, 2, :, 1] / CHAIN.table[:, 2, :, 1].sum()
    counts = torch.bincount(found[:, 0] * K + found[:, 2], minlength=K * K).double() / num
    error = (conditional * (1 - conditional) / num).sqrt().flatten()
    assert ((counts - conditional.flatten()).abs() < 4 * error + 0.01).all()
    without = CHAIN.table.sum((1, 3)).flatten()
    assert ((counts - without).abs() > 4 * error + 0.01).any(), "the known symbols change the distribution"
    complete = model.inpaint(CHAIN.all, torch.ones(N), steps=2)
    assert torch.equal(complete.long(), CHAIN.all)
    with pytest.raises(UsageError, match="precision"):
        model.inpaint(given[None], mask, precision=3.0)


# The discrete Bayesian flow network of Graves et al. (2023): y ~ N(beta (K e_x - 1), beta K), theta = softmax(y)


def test_the_loss_of_a_bayesian_flow_network_is_the_published_one():
    """L_inf = K beta_1 E t |e_x - e_hat|^2 with beta = beta_1 t^2, at the same parameters theta."""
    beta_1, method = 4 * LAST / K, METHODS[1]
    model, index = bsi.Model(Bend(), method, (N,), data=LETTERS).double(), CHAIN.all
    t, eps = torch.special.ndtr(normals(3, K**N)), normals(4, K**N, K, N)
    one_hot = nn.functional.one_hot(index, K).mT.double()
    beta = (beta_1 * t**2)[:, None, None]
    theta = torch.softmax(beta * (K * one_hot - 1) + (beta * K).sqrt() * eps, 1)
    level = 1 + K * beta_1 * t**2 / 4
    scaled, time = (K * theta - 1) / math.sqrt(K - 1), method.levels.cdf(level)
    e_hat = torch.softmax(theta.log() + model.denoiser.backbone(scaled, time), 1)
    published = K * beta_1 * t * (one_hot - e_hat).square().flatten(1).sum(1)
    x = LETTERS.values(index, torch.float64)
    x_hat = model.denoiser(method.encoder(level).encode(x, eps), level)
    ours = 0.5 * (x - x_hat).square().flatten(1).sum(1) * K * beta_1 * t / 2  # 1/2 |x - x_hat|^2 d alpha / d t
    torch.testing.assert_close(ours, published, rtol=1e-9, atol=1e-12)


def test_the_sampler_of_a_bayesian_flow_network_is_the_published_one():
    """k ~ p(theta), y ~ N(alpha (K e_k - 1), alpha K), theta' ~ e^y theta, with alpha_i = beta_1 (2 i - 1) / n^2."""
    n, beta_1, method, num = 10, 4 * LAST / K, METHODS[1], 50
    model = bsi.Model(Bend(), method, (N,), data=LETTERS).double()
    grid = 1 + K * beta_1 * (torch.arange(n + 1, dtype=torch.float64) / n) ** 2 / 4
    noise = SeededNoise(0, torch.arange(num), (K, N), torch.float64)
    predict = drawn(model.denoiser.given(None), SeededNoise(1, torch.arange(num), (K, N), torch.float64))
    same = SeededNoise(0, torch.arange(num), (K, N), torch.float64)
    same(0.0, 0.0)  # the prior's, which BFN does not use
    theta = torch.full((num, K, N), 1 / K, dtype=torch.float64)
    with torch.no_grad():
        steps = list(trajectory(method, predict, noise, grid, "posterior"))
    for i, step in enumerate(steps):
        found = log_posterior(model.kind, method.encoder(step.level.expand(num)), step.latent).exp()
        torch.testing.assert_close(found, theta, rtol=1e-6, atol=1e-12)
        if i < n:
            alpha = beta_1 * (2 * i + 1) / n**2
            e_k = (step.x_hat > 0).double()
            y = alpha * (K * e_k - 1) + math.sqrt(alpha * K) * same(0.0, 0.0)
            theta = torch.softmax(theta.log() + y, 1)


def test_drawn_symbols_follow_the_predicted_probabilities():
    num, p = 20_000, torch.tensor([0.7, 0.25, 0.05], dtype=torch.float64)
    predict = SymbolPredictor(LETTERS, lambda latent, level: p.log().view(1, K, 1).expand_as(latent))
    once = drawn(predict, SeededNoise(0, torch.arange(num), (K, 1), torch.float64))
    x_hat = once(torch.zeros(num, K, 1, dtype=torch.float64), torch.zeros(num))
    share = torch.bincount(LETTERS.data(x_hat).flatten().long(), minlength=K) / num
    assert ((share - p).abs() < 4 * (p * (1 - p) / num).sqrt()).all()
    assert ((x_hat > 0).sum(1) == 1).all()


# Models


def test_the_gradient_of_the_loss_is_right():
    model = bsi.Model(Bend(), bsi.BSI(alpha_M=LAST), (N,), data=LETTERS).double()
    level = torch.tensor([0.02, 0.5, 3.0], dtype=torch.float64)
    latent, eps = normals(5, 3, K, N).requires_grad_(), normals(6, 3, K, N)
    gained, x = torch.ones(3, dtype=torch.float64), model.values(CHAIN.all[:3])

    def losses(latent, weight):
        logits = torch.func.functional_call(
            model.denoiser.backbone, {"weight": weight}, (latent, torch.linspace(0, 1, 3, dtype=torch.float64))
        ) + log_posterior(model.kind, model.method.encoder(level), latent)
        return (
            expected(model.kind, logits),
            log_prob(model.kind, CHAIN.all[:3], logits),
            mixture_kl(model.kind, x, logits, gained, eps),
        )

    assert torch.autograd.gradcheck(losses, (latent, model.denoiser.backbone.weight))
    model(CHAIN.all).sum().backward()
    assert model.denoiser.backbone.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(("count", "length", "method"), [(2, 5, METHODS[0]), (256, 3, METHODS[1]), (5, 1, METHODS[2])])
def test_new_networks_are_the_best_predictor_of_independent_symbols(count, length, method):
    data = torch.randint(count, (64, length), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    kind = bsi.Symbols.fit(data, count)
    entropy = -float(torch.tensor(kind.prior).log2()[data.long()].mean())
    for name in ("mlp-16x1", "dit-mini/1", "unet-8x1"):
        network = build(name, kind.latent_shape((length,)))
        model = bsi.Model(network, method, (length,), data=kind).eval()
        found = model.elbo(data, measure=4)
        assert float(found) == pytest.approx(entropy, abs=4 * found.monte_carlo_error + 2e-3)
        assert "bits/symbol" in str(found)
        drawn_ = model.sample(3, steps=4)
        assert drawn_.shape == (3, length)
        assert drawn_.dtype == torch.uint8
        if (count, length) != (2, 5):
            break


def test_guidance_labels_and_the_mixture_work_on_symbols():
    model = bsi.Model(build("mlp-16x1", (K, N), num_classes=2), METHODS[0], (N,), data=LETTERS).eval()
    for changes in ({"guidance": 2.0}, {"solver": "mixture"}, {"grid": "paper", "solver": "sde2"}):
        assert model.sample(4, label=[0, 1], steps=3, **changes).max() < K
    filled = model.inpaint(CHAIN.all[5:7], torch.tensor([1, 0, 0, 1]), label=1, guidance=2.0, steps=3)
    assert torch.equal(filled[:, [0, 3]].long(), CHAIN.all[5:7][:, [0, 3]])
    numbers = bsi.Model(Zero(), bsi.BSI(), (2,), data=bsi.Bins.uint8())
    with pytest.raises(UsageError, match="mixture"):
        numbers.sample(1, solver="mixture")


def test_text_round_trips():
    kind = bsi.Symbols(3, names=("a", "b", "\n"))
    assert kind.text(kind.index("ab\nba")) == "ab\nba"
    assert bsi.Symbols.bytes().text(bsi.Symbols.bytes().index("Grüße")) == "Grüße"
    assert bsi.Symbols(4).text([3, 0, 1]) == "3 0 1"
    with pytest.raises(DataError, match="'z'"):
        kind.index("abz")


def test_training_fits_the_prior_and_files_store_it(tmp_path):
    optimizer, method = Optimizer(lr=1e-3), bsi.BSI(alpha_M=LAST)
    recipe = Recipe("letters", method, None, Data("letters"), steps=2, batch=8, optimizer=optimizer)
    data, kind = CHAIN.all.to(torch.uint8), bsi.Symbols(K, names=("a", "b", "c"))
    run = bsi.train(
        recipe, data=data, kind=kind, backbone=build("mlp-16x1", (K, N)), out=tmp_path / "run", device="cpu"
    )
    loaded = bsi.load(run)
    assert loaded.kind == bsi.Symbols.fit(data, K, kind.names)
    spec = DataSpec("letters", "0", 81, (N,), loaded.kind)
    assert from_plain(DataSpec, to_plain(spec)) == spec
    overlapping = replace(recipe, data=Data("letters", windows=True))
    run = bsi.train(
        overlapping, data=data, test=data, kind=kind, backbone=build("mlp-16x1", (K, N)), out=tmp_path / "windows"
    )
    assert read_trained(run.path).data.count == data.numel() - N + 1
    with pytest.raises(UsageError, match="labels"):
        Data("letters", windows=True, labels=True)
    with pytest.raises(UsageError, match="alpha_M"):
        bsi.train(replace(recipe, method=bsi.BSI()), data=data, kind=kind, backbone=Zero(), out=tmp_path / "bad")


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda: bsi.Symbols(1), "2"),
        (lambda: bsi.Symbols(50_000).latent_shape((1024,)), "bytes"),
        (lambda: bsi.Symbols(2, names=("a",)), "names"),
        (lambda: bsi.Symbols(2, names=("a", "a")), "names"),
        (lambda: bsi.Symbols(2, prior=(0.5, 0.6)), "prior"),
        (lambda: bsi.Symbols(2, prior=(1.0, 0.0)), "prior"),
        (lambda: bsi.Symbols(2).latent_shape(()), "axis"),
        (lambda: bsi.Model(Zero(), METHODS[0], (N,), data=LETTERS)(torch.full((2, N), 3)), "expected 0 to 2"),
        (lambda: bsi.Model(Zero(), METHODS[0], (N,), data=LETTERS)(torch.full((2, N), -1)), "expected 0 to 2"),
        (lambda: bsi.Model(Zero(), METHODS[0], (N,), data=LETTERS)(torch.zeros(2, N)), "integers"),
        (lambda: bsi.Model(Zero(), METHODS[0], (N,), data=LETTERS)(torch.zeros(2, N + 1, dtype=torch.long)), "shape"),
        (lambda: bsi.Model(Zero(), METHODS[0], (N,), data=LETTERS).log_likelihood(CHAIN.all), "elbo"),
        (lambda: bsi.Model(Zero(), METHODS[0], (N,), data=LETTERS).fit_variance(CHAIN.all), "variance"),
        (lambda: bsi.Model(Zero(), bsi.BSI(), (2,))(torch.zeros(2, 2, dtype=torch.long)), "bsi.Symbols"),
    ],
)
def test_impossible_symbols_are_rejected(wrong, match):
    with pytest.raises(BsiError, match=match):
        wrong()
