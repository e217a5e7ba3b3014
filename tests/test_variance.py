"""Variance-aware transitions: closed forms for Gaussian data."""

import math
from dataclasses import dataclass, replace

import pytest
import scipy.fft
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

import bsi
from bsi import BFN, BSI, VDM, Bins
from bsi.bound import EvaluatedModel, estimate
from bsi.data import open_dataset
from bsi.elbo import Elbo, Estimator
from bsi.errors import UsageError
from bsi.grids import paper_grid
from bsi.methods import Method, Predictor
from bsi.oracle import Mixture
from bsi.rng import SeededNoise
from bsi.sampler import Sampler
from bsi.sampling import sample
from bsi.variance import (
    SHARES,
    Ending,
    OrthonormalBasis,
    Variance,
    decoding_loss,
    fit_variance,
    mass_beyond,
    named_variance,
    predictions,
    transition_kl,
)
from repetitions import unchecked

METHODS = [BSI(alpha_M=1e4), BFN(sigma_1=1e-2), VDM(nu_max=1e4)]
by_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)


def normals(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SCALES = torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)  # variances of the data along its axes
AXES = torch.linalg.qr(normals(0, 3, 3))[0]
BASIS = OrthonormalBasis((3,), (AXES.T,), torch.arange(3))
GAUSSIAN = Mixture.gaussian(torch.zeros(3, dtype=torch.float64), AXES @ torch.diag(SCALES) @ AXES.T)


def exact_variance(method: Method, knots: int = 400) -> Variance:
    """Of x given the latent, for GAUSSIAN."""
    low, high = method.levels.low, method.levels.high
    level = torch.logspace(math.log10(low), math.log10(high), knots, dtype=torch.float64)
    gain = method.gain(level).clamp(min=0)
    known = gain.square() / (gain + method.c).clamp(min=1e-300)
    return Variance(BASIS, method, 1 / (1 / SCALES + known[:, None]))


def basis_of(name: str, x: Tensor) -> OrthonormalBasis:
    return named_variance(name, METHODS[0], lambda latent, level: latent, x).basis


@pytest.mark.parametrize("shape", [(3,), (3, 8), (3, 4, 6)])
def test_bases_are_orthonormal_and_invertible(shape: tuple[int, ...]) -> None:
    x = normals(0, 200, *shape)
    for name in ["pixels", "pca"] + (["dct"] if len(shape) > 1 else []):
        basis = basis_of(name, x)
        coordinates = basis.coordinates(x)
        assert torch.allclose(coordinates.square().sum(1), x.square().flatten(1).sum(1))
        assert torch.allclose(basis.values(coordinates, x), x)


def test_the_cosine_transform_is_scipys() -> None:
    x = normals(0, 5, 1, 7, 4)
    ours = basis_of("dct", x).coordinates(x).reshape(5, 7, 4)
    theirs = scipy.fft.dctn(x[:, 0].numpy(), axes=(1, 2), norm="ortho")
    assert torch.allclose(ours.abs(), torch.from_numpy(theirs).abs())


def test_pca_diagonalizes_the_covariance() -> None:
    x = normals(0, 5000, 3) * SCALES.sqrt() @ AXES.T
    covariance = torch.cov(basis_of("pca", x).coordinates(x).T)
    assert torch.allclose(covariance, torch.diag(covariance.diagonal()), atol=1e-10)


@pytest.mark.parametrize("scale", [0.0, 1.0], ids=["the paper's", "with a variance"])
def test_the_divergence_is_that_of_the_two_gaussians(scale: float) -> None:
    s, x, x_hat = normals(0, 3, 6, 3).unbind()
    d, v = torch.logspace(-2, 2, 6, dtype=torch.float64), scale * torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64)
    variance = Variance(BASIS, METHODS[0], v.expand(2, 3))
    found = transition_kl(variance, x, x, x_hat, torch.ones(6, dtype=torch.float64), d)
    for i in range(6):
        noise = d[i] * torch.eye(3, dtype=torch.float64)
        q = MultivariateNormal(s[i] + d[i] * x[i], noise)
        p = MultivariateNormal(s[i] + d[i] * x_hat[i], noise + d[i] ** 2 * AXES @ torch.diag(v) @ AXES.T)
        assert float(found[i]) == pytest.approx(float(kl_divergence(q, p)), rel=1e-7)


@by_method
def test_the_best_variance_costs_half_the_logarithm(method: Method) -> None:
    """E KL = 1/2 sum ln(1 + D v) for Gaussian data and its exact predictor, for any start."""
    variance, predict = exact_variance(method), GAUSSIAN.predictor(method)
    for level, gained in ((method.levels.low * 3, 1.0), (5.0, 20.0)):
        z, eps = normals(1, 2, 40_000, 3)
        x = z * SCALES.sqrt() @ AXES.T
        levels = torch.full((len(x),), level, dtype=torch.float64)
        latent = method.encoder(levels).encode(x, eps)
        kl = transition_kl(variance, x, latent, predict(latent, levels), levels, torch.full_like(levels, gained))
        expected = 0.5 * torch.log1p(gained * variance.of_level(levels[:1])).sum()
        assert abs(float(kl.mean() - expected)) < 4 * float(kl.std()) / math.sqrt(len(x)) + 1e-4


@by_method
def test_a_fit_finds_the_variance_of_a_gaussian(method: Method) -> None:
    x, predict = normals(2, 8000, 3) * SCALES.sqrt() @ AXES.T, GAUSSIAN.predictor(method)
    level = torch.logspace(math.log10(method.levels.low) + 0.2, math.log10(method.levels.high) - 0.2, 9)
    found = predictions(method, predict, x)
    fitted = fit_variance(method, found, BASIS).of_level(level)
    assert torch.allclose(fitted, exact_variance(method).of_level(level), rtol=0.2)
    together = replace(BASIS, groups=torch.zeros(3, dtype=torch.long))
    average = fit_variance(method, found, together).of_level(level)
    assert torch.allclose(average, fitted.mean(1, keepdim=True).expand(9, 3), rtol=0.2)


@pytest.mark.parametrize("method", [BFN(sigma_1=1e-3), VDM(nu_max=1e6)], ids=["BFN", "VDM"])
def test_few_variance_aware_steps_draw_a_gaussian_exactly(method: Method) -> None:
    """The paper's sampler loses variance in large steps; the missing part is exactly D^2 v."""
    predict, grid, ids = GAUSSIAN.predictor(method), paper_grid(method, 4), torch.arange(40_000)
    aware, plain = (
        torch.var(sample(method, predict, SeededNoise(0, ids, (3,), torch.float64), grid, variance=v) @ AXES, 0)
        for v in (exact_variance(method), None)
    )
    assert float((aware / SCALES - 1).abs().max()) < 0.05
    assert float((plain / SCALES - 1).abs().max()) > 0.2


def test_variances_are_selected_by_name() -> None:
    x, method, predict = torch.randn(64, 1, 4, 4), BSI(alpha_M=1e3), lambda latent, level: latent
    groups = {"level": 1, "pixels": 16, "dct": 5, "pca": 16, "learned": 16}
    assert {name: named_variance(name, method, predict, x).values.shape[1] for name in groups} == groups
    with pytest.raises(UsageError, match="dct"):
        named_variance("cosine", method, predict, x)
    with pytest.raises(UsageError, match="pca"):
        named_variance("dct", method, predict, x.flatten(1))


@pytest.mark.parametrize(("shape", "count"), [((2,), 3000), ((1, 4, 4), 1500)])
def test_a_learned_variance_depends_on_the_prediction(shape: tuple[int, ...], count: int) -> None:
    """Values of -1 or 1: a prediction of 0 is uncertain and one of 1 is not, at the same level."""
    method = BSI(alpha_M=1e3)
    train, fresh = (normals(seed, count, *shape).sign() for seed in (0, 1))

    def predict(latent: Tensor, level: Tensor) -> Tensor:
        encoder = method.encoder(level)
        ratio = (encoder.signal / encoder.noise.square()).reshape(-1, *[1] * len(shape))
        return torch.tanh(ratio * latent)

    level = torch.full((len(fresh),), 2.0, dtype=torch.float64)
    latent = method.encoder(level).encode(fresh, normals(2, *fresh.shape))
    x_hat = predict(latent, level)
    exact, gained = (1 - x_hat.square()).flatten(1), 20 * torch.ones_like(level)
    off, kl = {}, {}
    for name in ("pixels", "learned"):
        variance = named_variance(name, method, predict, train)
        found = torch.log1p(20 * variance.at(level, latent, x_hat)) - torch.log1p(20 * exact)
        basis = variance.basis
        of_one_level = variance.of_coordinates(level[:1], basis.coordinates(latent), basis.coordinates(x_hat))
        assert torch.allclose(of_one_level.expand_as(found), variance.at(level, latent, x_hat))
        off[name], kl[name] = float(found.square().mean()), transition_kl(variance, fresh, latent, x_hat, level, gained)
    assert off["learned"] < 0.7 * off["pixels"]
    gain = kl["pixels"] - kl["learned"]
    assert float(gain.mean()) > 4 * float(gain.std()) / math.sqrt(len(gain))


def bound(k: int | None, variance: Variance | None, predict: Predictor, method: Method, x: Tensor) -> Elbo:
    model = replace(EvaluatedModel.of(method, predict, x), variance=variance)
    return estimate(model, Estimator(measure=20, finite_k=k))


@by_method
def test_the_finite_bound_is_tighter_and_stays_a_bound(method: Method) -> None:
    """Between the exact negative log-likelihood of a mixture and the paper's transition; close to the infinite one."""
    data = Mixture.isotropic(torch.tensor([[-1.0, 0.0], [1.0, 0.5]], dtype=torch.float64), 0.2)
    x = data.sample(torch.rand(600, generator=torch.Generator().manual_seed(3)), normals(3, 600, 2))
    predict = data.predictor(method)
    fitted = named_variance("level", method, predict, x)
    paper, aware, infinite = (bound(k, v, predict, method, x) for k, v in ((8, None), (8, fitted), (None, None)))
    error = 4 * aware.monte_carlo_error * 2 * math.log(2)
    lowest = max(float(-data.log_density(x).mean()), float(infinite.nats.mean()))
    assert lowest - error < float(aware.nats.mean()) < float(paper.nats.mean()) - error
    many = [float(bound(2000, v, predict, method, x).nats.mean()) for v in (None, fitted)]
    assert many[0] == pytest.approx(many[1], abs=0.05)


@dataclass(frozen=True)
class OnPapersGrid(Variance):
    def grid(self, k: int) -> Tensor:
        return paper_grid(self.method, k)


@by_method
def test_the_fitted_grid_costs_less_than_the_papers(method: Method) -> None:
    """For Gaussian data, whose costs are known exactly, with one variance for directions that differ."""
    scales = torch.tensor([1e-3, 0.1, 2.0], dtype=torch.float64)

    def exact(level: Tensor) -> Tensor:
        gain = method.gain(level)
        return 1 / (1 / scales + gain.square()[:, None] / (gain + method.c).clamp(min=1e-300)[:, None])

    knots = paper_grid(method, 400)
    together = replace(BASIS, groups=torch.zeros(3, dtype=torch.long))
    variance = Variance(together, method, exact(knots).mean(1, keepdim=True))

    def excess(grid: Tensor) -> float:
        """The KL of all steps less that of the best variances."""
        d, v, e = torch.diff(method.gain(grid))[:, None], variance.of_level(grid[:-1]), exact(grid[:-1])
        return float(0.5 * (torch.log1p(d * v) + d * (e - v) / (1 + d * v) - torch.log1p(d * e)).sum())

    for k in (4, 16, 64, 300):
        fitted, paper = variance.grid(k), paper_grid(method, k)
        assert (len(fitted), float(fitted[0]), float(fitted[-1])) == (k + 1, method.levels.low, method.levels.high)
        assert bool((torch.diff(fitted) > 0).all())
        assert 0 < excess(fitted) < 0.9 * excess(paper)


@by_method
def test_steps_may_end_before_the_bins_are_resolved(method: Method) -> None:
    """Uniform data on bins: the last decoder knows the variance, and the bound stays above the entropy."""
    bins = Bins(-1.0, 1.0, 9)
    x = bins.values(torch.randint(0, 9, (600, 2), generator=torch.Generator().manual_seed(0))).double()
    points = torch.cartesian_prod(*[bins.values(torch.arange(9)).double()] * 2)
    predict = Mixture.isotropic(points, 0.0).predictor(method)
    variance = named_variance("level", method, predict, x, kind=bins)
    assert float(variance.grid(8)[-1]) < method.levels.high / 4

    def nats(variance: Variance) -> tuple[float, float]:
        model = replace(EvaluatedModel.of(method, predict, x, bins), variance=variance)
        found = estimate(model, Estimator(measure=20, recon=8, finite_k=8))
        return float(found.nats.mean()), 3 * found.monte_carlo_error * 2 * math.log(2)

    (fitted, error), (paper, other) = nats(variance), nats(OnPapersGrid(**vars(variance)))
    assert 2 * math.log(9) - error < fitted < paper - error - other


def test_the_decoder_has_the_mean_of_the_prediction() -> None:
    """Without noise it is one of the two nearest bins; much noise has its own variance and that of rounding."""
    f, bin_ = torch.rand(50, generator=torch.Generator().manual_seed(0)).double(), torch.arange(60).double()
    place = (20 + f)[:, None].expand(50, 60)
    for tau, variance in ((0.02, f * (1 - f)), (2.0, torch.full_like(f, 4 + 1 / 6))):
        mass = -torch.diff(
            mass_beyond(bin_.expand(50, 60), place, torch.full_like(place, tau), torch.ones(()).double())
        )  # of bins 1 to 59
        mean, squared = mass @ bin_[1:], mass @ bin_[1:].square()
        assert torch.allclose(mass.sum(1), torch.ones_like(f))
        assert torch.allclose(mean, 20 + f)
        assert torch.allclose(squared - mean.square(), variance, atol=0.02)


def test_a_sharp_decoder_moves_to_the_nearest_bin() -> None:
    """The odds of two bins are raised to the power a, and the probabilities of all bins still sum to 1."""
    bin_, place = torch.arange(-1, 4).double(), torch.full((5,), 1.2).double()
    for a, odds in ((1.0, 0.25), (2.0, 0.25**2), (3.0, 0.25**3)):
        mass = -torch.diff(mass_beyond(bin_, place, torch.full_like(place, 1e-3), torch.tensor(a).double()))
        assert torch.allclose(mass, torch.tensor([0.0, 1.0, odds, 0.0]).double() / (1 + odds), atol=1e-9)


def test_the_decoder_learns_how_precise_predictions_are() -> None:
    """Predictions are off by up to a tenth of a bin from the right one: the nearest bin is more probable than 1 - f."""
    bins, method = Bins(-1.0, 1.0, 101), BSI()
    x = bins.values(torch.randint(10, 90, (400, 50), generator=torch.Generator().manual_seed(0))).double()

    def predict(latent: Tensor, level: Tensor) -> Tensor:
        return bins.values(bins.indices(latent)) + 0.1 * bins.width * torch.sin(1e5 * latent)

    variance = named_variance("level", method, predict, x, kind=bins)
    assert variance.ending is not None
    assert float(variance.ending.sharpness[-1]) > 2
    level = torch.full((400,), method.levels.high).double()
    latent = x + normals(1, 400, 50) / level[0].sqrt()
    x_hat = predict(latent, level)
    off = (x - x_hat).abs() / bins.width
    cost = float(decoding_loss(variance, bins, x, latent, x_hat, level).mean()) / 50
    assert cost < 0.2 * float(-torch.log(1 - off).mean())


@pytest.mark.parametrize("std", [0.3, 1.0, 4.0])
def test_the_decoder_costs_the_entropy_of_normals_on_bins(std: float) -> None:
    """Also where the Normals are narrower than a bin."""
    bins, at, generator = Bins(-1.0, 1.0, 101), torch.arange(101).double(), torch.Generator().manual_seed(0)
    place = 20 + 60 * torch.rand(400, 50, 1, generator=generator).double()
    p = torch.softmax(-0.5 * ((at - place) / std).square(), -1)
    index = torch.multinomial(p.flatten(0, 1), 1, generator=generator).reshape(400, 50)
    mean = p @ at
    x_hat = bins.low + bins.width * mean
    v = (p @ at.square() - mean.square()).mean() * bins.width**2
    variance = Variance(basis_of("level", x_hat), BSI(), v.expand(2, 1))
    level, x = torch.ones(400).double(), bins.values(index).double()
    one = torch.ones(2).double()
    shares = (replace(variance, ending=Ending(share * one, one, one)) for share in SHARES)
    found = min(float(decoding_loss(each, bins, x, x_hat, x_hat, level).mean()) / 50 for each in shares)
    assert found == pytest.approx(float(-torch.xlogy(p, p).sum(-1).mean()), abs=0.02)


@pytest.fixture(scope="module")
def digits() -> bsi.Model:
    model = bsi.load("digits")
    model.fit_variance(open_dataset("digits").train[:256], "level")
    return model


def test_a_model_uses_the_variance_that_was_fitted(digits: bsi.Model) -> None:
    plain, aware = (digits.sample(8, steps=4, solver="posterior", variance=kind) for kind in ("none", "level"))
    assert torch.equal(plain, digits.sample(8, steps=4, solver="posterior"))
    assert not torch.equal(plain, aware)
    assert torch.equal(aware, digits.sample(8, Sampler(steps=4, variance="level"))), "posterior is implied"
    fitted = digits.sample(8, Sampler(steps=4, grid="fitted", variance="level"))
    assert not torch.equal(aware, fitted)
    x = digits.values(open_dataset("digits").test[:16])
    by_name = digits.elbo(x, finite_k=4, variance="level")
    assert torch.equal(by_name.nats, digits.elbo(x, finite_k=4, variance=digits.variance("level")).nats)


def test_unusable_variances_are_rejected(digits: bsi.Model) -> None:
    with pytest.raises(UsageError, match="finite_k"):
        digits.elbo(open_dataset("digits").test[:4], variance="level")
    with pytest.raises(UsageError, match="fit_variance"):
        digits.sample(2, steps=4, variance="pca")
    with pytest.raises(UsageError, match="posterior"):
        digits.sample(2, steps=4, solver="ode2", variance="level")
    with unchecked(), pytest.raises(UsageError, match="variance"):
        Sampler(variance="cosine")
    with pytest.raises(UsageError, match="variance"):
        Sampler(grid="fitted")
    noise, grid = SeededNoise(0, torch.arange(2), digits.shape), paper_grid(digits.method, 3)
    with pytest.raises(UsageError, match="posterior"):
        sample(digits.method, digits.denoiser, noise, grid, "sde2", variance=digits.variance("level"))
