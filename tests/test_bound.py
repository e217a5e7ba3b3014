"""The bound of a set of samples: unbiased, with correct errors, on any number of ranks."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import bsi
from bsi.bound import FEWEST, Design, EvaluatedModel, Integral, estimate, estimate_pair, expected_error, make_plan
from bsi.control_variate import KNOTS
from bsi.data.batches import as_source
from bsi.elbo import Estimator
from bsi.errors import NonFinite
from bsi.gaussian import over
from bsi.grids import paper_grid
from bsi.levels import Fitted
from bsi.methods import BFN, BSI, VDM
from bsi.oracle import Mixture
from bsi.recipe import Evaluation
from bsi.runtime.distributed import FailedTogether, Place, World, join
from bsi.training.loop import bound
from bsi.values import Bins
from repetitions import repeat

METHODS = [BSI(), BFN(), VDM()]
BINS = Bins(-1.0, 1.0, 9)
PLAIN, LEARNED = Estimator(), Estimator(proposal="fitted")


def rough(count: int = 40, n: int = 6, seed: int = 0) -> torch.Tensor:
    """Values on the bins of BINS; some samples rougher than others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, n, generator=generator, dtype=torch.float64).cumsum(-1)
    size = 0.1 + torch.rand(count, 1, 1, generator=generator, dtype=torch.float64)
    return BINS.values(BINS.indices(size * x), torch.float64)


def squash(method):
    """A predictor of each value by itself, not linear: 1.2 tanh of the posterior mean under N(0, 0.3)."""

    def predict(latent, level):
        encoder = method.encoder(level)
        gain = 0.3 * encoder.signal / (0.3 * encoder.signal**2 + encoder.noise**2).clamp(min=1e-12)
        return 1.2 * torch.tanh(over(gain, latent) * latent)

    return predict


def shrink(method):
    """The posterior mean under N(0, 0.02): too narrow, so that large values cost more."""

    def predict(latent, level):
        encoder = method.encoder(level)
        gain = 0.02 * encoder.signal / (0.02 * encoder.signal**2 + encoder.noise**2).clamp(min=1e-12)
        return over(gain, latent) * latent

    return predict


def exact_measurement(method, predict, x, levels=4001, nodes=48) -> torch.Tensor:
    """L_M^inf of each sample for such a predictor, by quadrature in level and noise."""
    u = torch.linspace(math.log(method.levels.low), math.log(method.levels.high), levels, dtype=torch.float64)
    eps, weight = (torch.tensor(v) for v in np.polynomial.hermite_e.hermegauss(nodes))
    values, where = torch.unique(x, return_inverse=True)
    grid = values[:, None, None].expand(-1, nodes, levels).reshape(-1, levels).T
    noise = eps[None, :, None].expand(len(values), -1, levels).reshape(-1, levels).T
    level = torch.exp(u).clamp(method.levels.low, method.levels.high)
    x_hat = predict(method.encoder(level).encode(grid, noise), level)
    g = 0.5 * level[:, None] * (grid - x_hat).square()
    expected = (g.view(levels, len(values), nodes) * (weight / weight.sum())).sum(-1)
    return torch.trapezoid(expected, u, dim=0)[where].flatten(1).sum(1)


def measurements(model: EvaluatedModel, estimator: Estimator, seeds) -> torch.Tensor:
    found = repeat(lambda seed: estimate(model, replace(estimator, seed=seed)), seeds)
    return torch.stack([each.measurement for each in found])


# Levels


def proposals(method):
    low, high = method.levels.low, method.levels.high
    return [method.levels, expected_error(method), Fitted(low, high, (1.0, 4.0, 0.5, 2.0))]


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("k", [None, 1, 100])
def test_points_integrate_over_ln_level_under_any_proposal(method, k):
    """The midpoint rule in t: int u^2 du, or the sum of omega_i u_i^2 over the steps."""
    t = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    grid = paper_grid(method, k or 1)
    low, high = math.log(method.levels.low), math.log(method.levels.high)
    exact = (high**3 - low**3) / 3
    if k is not None:
        exact = float((torch.diff(method.gain(grid)) / grid[:-1] * torch.log(grid[:-1]) ** 2).sum())
    for proposal in proposals(method):
        points = Integral.of(method, proposal, grid if k else None).at(t)
        found = float((points.weight * torch.log(points.level) ** 2).mean())
        assert found == pytest.approx(exact, rel=1e-6 if k is None else 1e-3)
        assert bool(Integral.of(method, proposal, grid if k else None).at(torch.ones(1)).level <= method.levels.high)


def test_the_exact_proposal_is_the_papers_for_bsi_and_log_uniform_otherwise():
    assert expected_error(BSI(lambda_0=1e-2)).offset == pytest.approx(1e-4)
    assert expected_error(BFN()).offset == expected_error(VDM()).offset == 0


@pytest.mark.parametrize(
    ("count", "measure", "sizes"),
    [(10_000, 5, (3, 2)), (10_000, 2, (1, 1)), (10_000, 20, (10, 10)), (1, 5, (3, 2)), (1, 100, (4,) * 25)],
)
def test_levels_belong_to_at_least_two_replicates(count, measure, sizes):
    assert Design(count, measure).sizes == sizes


def test_levels_are_equally_spaced_within_each_sample_and_over_each_block():
    design, ids = Design(61, 5, seed=3), torch.arange(61)
    block = design.block(ids)
    assert set(torch.bincount(block).tolist()) <= {4, 5}
    for replicate, m in enumerate(design.sizes):
        t = design.t(ids, replicate)
        torch.testing.assert_close(torch.diff(t, dim=0), torch.full((m - 1, 61), 1 / m, dtype=torch.float64))
        assert bool(((t >= 0) & (t < 1)).all())
        for b in range(design.blocks):
            inside = torch.sort(t[:, block == b].flatten()).values
            torch.testing.assert_close(torch.diff(inside), torch.full_like(inside[1:], 1 / len(inside)))


def noted(method, count: int = 20) -> tuple[EvaluatedModel, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A model that records the latents and the levels that it is evaluated at."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def predict(latent, level):
        seen.append((latent, level))
        return squash(method)(latent, level)

    return EvaluatedModel.of(method, predict, rough(count), BINS), seen


@pytest.mark.parametrize("count", [1, 31, 1000])
def test_a_pilot_has_evaluations_between_all_knots(count):
    """The regression needs an average at each knot."""
    model, seen = noted(BSI(), count)
    plan = make_plan(model, replace(LEARNED, measure=2))
    t = model.method.levels.cdf(torch.cat([level for _, level in seen]))
    assert plan.pilot == len(t) >= FEWEST
    assert len((t * (KNOTS - 1)).long().unique()) == KNOTS - 1


# The estimate


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("estimator", [PLAIN, Estimator(proposal="exact"), LEARNED], ids=lambda e: e.proposal)
def test_every_proposal_is_unbiased_for_every_sample(method, estimator):
    x, predict = rough(24), squash(method)
    true = exact_measurement(method, predict, x)
    seeds = 12 if estimator.proposal == "fitted" else 30  # few levels without a control are far from Normal
    found = measurements(EvaluatedModel.of(method, predict, x, BINS), estimator, range(seeds))
    error = found.std(0) / math.sqrt(seeds)
    assert float(((found.mean(0) - true) / error).abs().max()) < 6
    total = found.mean(1)
    assert abs(float(total.mean() - true.mean())) < 4.5 * float(total.std()) / math.sqrt(seeds)


def test_the_control_variate_reduces_the_error():
    """The same number of evaluations, less variance: of the mean and of one sample."""
    method, x = BSI(), rough(48)
    model = EvaluatedModel.of(method, squash(method), x, BINS)
    true = exact_measurement(method, squash(method), x)
    plain, learned = (measurements(model, e, range(8)) - true for e in (PLAIN, LEARNED))
    assert float(learned.square().mean()) < float(plain.square().mean()) / 8
    assert float(learned.mean(1).square().mean()) < float(plain.mean(1).square().mean()) / 4


@pytest.mark.parametrize("estimator", [PLAIN, LEARNED], ids=lambda e: e.proposal)
@pytest.mark.slow
def test_student_intervals_have_their_nominal_coverage(estimator):
    """Of 80 intervals of 90 per cent, 72 +- 2.7 should hold the true value."""
    method, x = BSI(), rough(40, 4)
    true = float(exact_measurement(method, squash(method), x).sum())
    model = EvaluatedModel.of(method, squash(method), x, BINS)
    plan, covered = make_plan(model, replace(estimator, seed=999)), 0
    for found in repeat(lambda seed: estimate(model, replace(estimator, seed=seed), plan=plan), range(80)):
        reach = stats.t.ppf(0.95, found.degrees_of_freedom) * math.sqrt(found.measurements.sum_variance)
        covered += abs(float(found.measurement.sum()) - true) <= reach
    assert 72 - 3 * 2.7 <= covered <= 79


@pytest.mark.parametrize("measure", [3, 5])
def test_the_error_of_the_data_set_is_that_of_the_exact_bounds(measure):
    """The bounds are known; estimates scatter more than the samples do, and replicates have unequal sizes."""
    method, x = BSI(), rough(60)
    true = exact_measurement(method, shrink(method), x).var().item()
    model = EvaluatedModel.of(method, shrink(method), x, BINS)
    found = repeat(lambda seed: estimate(model, Estimator(measure=measure, seed=seed)), range(60))
    assert np.mean([float(each.nats.var()) for each in found]) > 1.2 * true
    between = [each.between for each in found]
    error = np.std(between) / math.sqrt(len(between))
    assert abs(np.mean(between) - true) < 4 * error
    assert error < 0.15 * true


def unit_gaussian(method, count: int) -> EvaluatedModel:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    predict = Mixture.gaussian(torch.zeros(8).double(), torch.eye(8).double()).predictor(method)
    return EvaluatedModel.of(method, predict, x / x.square().mean().sqrt())  # the bound is linear in |x|^2


@pytest.mark.parametrize(
    ("method", "k", "nats"),
    [
        (BSI(), None, 6.912594),
        (BSI(lambda_0=1.0), None, 7.210055),
        (BFN(), None, 6.907755),
        (VDM(), None, 6.646643),
        (BSI(), 16, 12.44657),
        (BSI(), 1024, 6.97065),
    ],
    ids=str,
)
@pytest.mark.parametrize("proposal", ["loguniform", "fitted"])
def test_the_bound_of_unit_gaussian_data_is_the_known_one(method, k, nats, proposal):
    found = estimate(unit_gaussian(method, 128), Estimator(finite_k=k, proposal=proposal, measure=8)).measurements
    error = math.sqrt(found.sum_variance) / (128 * 8)
    assert float(found.mean.mean()) / 8 == pytest.approx(nats, abs=4 * error + 1e-5)
    assert proposal == "loguniform" or error < 0.02


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x, t):
        return torch.tanh(self.linear(x.flatten(1))).view_as(x) * t[:, None, None, None]


def small_model(seed: int = 0, method=None) -> bsi.Model:
    torch.manual_seed(seed)
    return bsi.Model(Small(), method or bsi.BSI(), (1, 4, 4), bsi.Bins(-1.0, 1.0, 17)).eval()


def pixels(count: int = 50) -> torch.Tensor:
    return torch.randint(0, 17, (count, 1, 4, 4), generator=torch.Generator().manual_seed(1)).to(torch.uint8)


def test_the_model_passes_every_option_to_the_estimator():
    model, x = small_model(), pixels(40)
    plain = model.bits_per_dim(x, measure=50)
    found = model.elbo(x, proposal="fitted")
    assert found.pilot_evaluations == 40 * math.ceil(FEWEST / 40)
    assert found.evaluations == found.pilot_evaluations + 40 * (5 + 2)
    assert float(found) == pytest.approx(float(plain), abs=5 * plain.monte_carlo_error)
    assert float(model.elbo(x, finite_k=4)) > float(plain) + 5 * plain.monte_carlo_error
    assert small_model(method=VDM()).elbo(x).evaluations == 40 * 5, "VDM decodes without the network"
    assert model.elbo(x, proposal="fitted", control=False).pilot_evaluations == found.pilot_evaluations
    sharper = model.elbo(x, proposal="fitted", target_error=found.monte_carlo_error / 2)
    assert sharper.monte_carlo_error <= found.monte_carlo_error / 2
    assert sharper.rounds > 1
    assert sharper.evaluations > found.evaluations
    assert sharper.measurements.values.shape == (2 * sharper.rounds, 40)


def test_the_result_does_not_depend_on_the_batch_size():
    first, second = (small_model().elbo(pixels(), proposal="fitted", batch_size=size) for size in (7, 64))
    torch.testing.assert_close(first.nats, second.nats, rtol=1e-5, atol=1e-4)
    assert first.monte_carlo_error == pytest.approx(second.monte_carlo_error, rel=1e-4)


@pytest.mark.parametrize("estimator", [PLAIN, LEARNED], ids=lambda e: e.proposal)
def test_every_evaluation_has_independent_noise(estimator):
    method = BSI(0.1, alpha_M=30.0)  # whose last belief is wider than a bin: both terms have noise
    model, seen = noted(method)
    target = estimate(model, estimator).monte_carlo_error / 4
    seen.clear()
    found = estimate(model, replace(estimator, target_error=target))
    assert found.rounds > 1
    latents = torch.cat([latent for latent, _ in seen]).flatten(1)
    assert len(latents) == len(latents.unique(dim=0)) == found.evaluations, "the pilot is not in the estimate"


@pytest.mark.parametrize("estimator", [PLAIN, LEARNED], ids=lambda e: e.proposal)
def test_common_random_numbers_reduce_the_error_of_a_difference(estimator):
    a, b = small_model(0), small_model(0)
    with torch.no_grad():
        b.denoiser.backbone.linear.weight += 0.01
    first, second = estimate_pair(a.on(pixels()), b.on(pixels()), estimator)
    paired = first - second
    assert paired.bits_per_dim == pytest.approx(float(first) - float(second), abs=1e-12)
    assert paired.monte_carlo_error < math.hypot(first.monte_carlo_error, second.monte_carlo_error) / 5
    assert paired.evaluations == first.evaluations + second.evaluations


@pytest.mark.parametrize("estimator", [PLAIN, LEARNED], ids=lambda e: e.proposal)
def test_predictions_that_are_not_finite_are_reported(estimator):
    method = BSI()

    def predict(ids):
        scale = torch.where(ids == 1, math.nan, 1.0)[:, None, None]
        return lambda latent, level: scale * squash(method)(latent, level)

    model = EvaluatedModel.of(method, squash(method), rough(), BINS)
    broken = replace(model, predict=predict)
    with pytest.raises(NonFinite, match="7 of the pilot's 280" if estimator is LEARNED else "1 of 40"):
        estimate(broken, estimator)
    with pytest.raises(NonFinite, match="1 of 40"):
        estimate(broken, estimator, plan=make_plan(model, estimator))


@pytest.mark.parametrize("count", [1, 3])
def test_the_smallest_sets_have_a_bound(count):
    method, x = BSI(), rough(count, 4)
    model = EvaluatedModel.of(method, squash(method), x, BINS)
    found = measurements(model, LEARNED, range(6)) - exact_measurement(method, squash(method), x)
    assert abs(float(found.mean())) < 5 * float(found.mean(1).std()) / math.sqrt(6)
    constant = EvaluatedModel.of(method, lambda latent, level: torch.zeros_like(latent), torch.zeros_like(x), BINS)
    assert float(estimate(constant, LEARNED).measurement.abs().max()) < 1e-9


# During training


def test_the_bound_during_training_is_of_a_random_subset():
    """Issue: class folders are stored in order, and the first test samples are not like the others."""
    noisy = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
    data = torch.cat([0.1 * noisy.flip(0), 2 * noisy])  # stored by class, the easier one first
    model = bsi.Model(Scale(), bsi.BSI(1.0, alpha_M=100.0), (4,))
    recipe = replace(bsi.recipes.digits(), evaluation=Evaluation(images=256))
    found = bound(model, as_source(data), recipe, World(Place(), torch.device("cpu")))
    exact = model.elbo(data, measure=20)
    error = math.hypot(found.monte_carlo_error, found.data_error, exact.monte_carlo_error)
    assert len(found.nats) == 256
    assert abs(float(found) - float(exact)) < 4 * error
    first = model.elbo(data[:256])
    error = math.hypot(first.monte_carlo_error, first.data_error, exact.monte_carlo_error)
    assert float(first) < float(exact) - 4 * error, "the first samples are no random subset"


class Scale(torch.nn.Module):
    def forward(self, x, t):
        return 0.1 * x


# Ranks


@pytest.mark.parametrize("count", [1, 3, 13, 16])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_evaluate_the_batches_of_one(count, size):
    model = EvaluatedModel.of(BSI(), shrink(BSI()), rough(count))
    worlds = [World(Place(rank, size), torch.device("cpu")) for rank in range(size)]
    shared = [ids.tolist() for world in worlds for ids in model.batches(count, 4, world)]
    assert shared == [ids.tolist() for ids in torch.arange(count).split(4)]


def test_a_failure_on_one_rank_fails_all_of_them():
    """Otherwise the other ranks would wait for it."""

    def fail() -> None:
        raise KeyError("interrupted")

    with pytest.raises(FailedTogether):
        estimate(small_model().on(pixels()), PLAIN, World(Place(), torch.device("cpu")), poll=fail)


def summary(world: World) -> dict[str, float]:
    """For a set that two ranks cannot divide evenly, and for one sample, where one rank has no work."""
    estimator = replace(LEARNED, batch_size=4)
    found, single = (estimate(small_model().on(pixels(count)), estimator, world) for count in (31, 1))
    numbers = {name: value for name, value in found.record().items() if not isinstance(value, str)}
    return {**numbers, "evaluations": found.evaluations, "single": float(single)}


@pytest.mark.slow
def test_two_ranks_give_the_numbers_of_one(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(bsi.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    subprocess.run([*torchrun, __file__, str(tmp_path)], check=True, timeout=120, env=environment)
    alone = summary(World(Place(), torch.device("cpu")))
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == pytest.approx(alone, rel=1e-6)


if __name__ == "__main__":
    with join("cpu", 60.0) as ranks:
        result = summary(ranks)
        (Path(sys.argv[1]) / f"{ranks.rank}.json").write_text(json.dumps(result))
