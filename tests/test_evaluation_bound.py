"""The bound of a set of samples: right, unbiased, and honest about its error, whoever computes which part of it."""

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
from bsi.data.batches import as_source
from bsi.elbo import Elbo, elbo
from bsi.errors import NonFinite, UsageError
from bsi.evaluation.bound import Procedure, evaluate
from bsi.evaluation.control import fit_proposal
from bsi.evaluation.paired import difference
from bsi.evaluation.plan import Plan, make_plan, shared_plans
from bsi.evaluation.points import Design, noise
from bsi.evaluation.subject import Subject
from bsi.gaussian import over
from bsi.levels import Fitted
from bsi.methods import BFN, BSI, VDM, Method
from bsi.oracle import Mixture
from bsi.runtime.distributed import Place, World, join
from bsi.values import Bins
from repetitions import repeat

ALONE = World(Place(), torch.device("cpu"))
METHODS = [BSI(), BFN(), VDM()]
BINS = Bins(-1.0, 1.0, 9)
LEARNED = Procedure(proposal="fitted")


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


def measurements(subject, procedure, seeds) -> torch.Tensor:
    found = repeat(lambda seed: evaluate(subject, replace(procedure, seed=seed), ALONE), seeds)
    return torch.stack([each.measurement.spread.mean for each in found])


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("procedure", [Procedure(), Procedure(proposal="exact"), LEARNED], ids=lambda p: p.proposal)
def test_every_proposal_is_unbiased_for_every_sample(method, procedure):
    x, predict = rough(24), squash(method)
    true = exact_measurement(method, predict, x)
    seeds = 12 if procedure.proposal == "fitted" else 30  # few levels without a control are far from Normal
    found = measurements(Subject.plain(method, predict, x, BINS), procedure, range(seeds))
    error = found.std(0) / math.sqrt(seeds)
    assert float(((found.mean(0) - true) / error).abs().max()) < 6
    total = found.mean(1)
    assert abs(float(total.mean() - true.mean())) < 4.5 * float(total.std()) / math.sqrt(seeds)


def test_the_control_variate_pays():
    """The same number of evaluations, less variance: of the mean and of one sample."""
    method, x = BSI(), rough(48)
    predict = squash(method)
    true = exact_measurement(method, predict, x)
    subject = Subject.plain(method, predict, x, BINS)
    plain, learned = (measurements(subject, p, range(8)) - true for p in (Procedure(), LEARNED))
    assert float(learned.square().mean()) < float(plain.square().mean()) / 8
    assert float(learned.mean(1).square().mean()) < float(plain.mean(1).square().mean()) / 4


@pytest.mark.parametrize("procedure", [Procedure(), LEARNED], ids=lambda p: p.proposal)
def test_student_intervals_cover_as_often_as_they_say(procedure):
    """Of 80 intervals of 90 per cent, 72 +- 2.7 should hold the true value: the error is honest."""
    method, x = BSI(), rough(40, 4)
    predict = squash(method)
    true = float(exact_measurement(method, predict, x).sum())
    subject = Subject.plain(method, predict, x, BINS)
    plan = make_plan(procedure.proposal, subject, 5, 999, 256, ALONE)
    covered = 0
    for found in repeat(lambda seed: evaluate(subject, replace(procedure, seed=seed), ALONE, plan), range(80)):
        spread = found.measurement.spread
        reach = stats.t.ppf(0.95, found.degrees_of_freedom) * math.sqrt(spread.sum_variance)
        covered += abs(float(spread.mean.sum()) - true) <= reach
    assert 72 - 3 * 2.7 <= covered <= 79


@pytest.mark.parametrize("measure", [3, 5])
def test_the_error_of_the_data_set_is_that_of_the_exact_bounds(measure):
    """Known for every sample; estimates scatter more than the samples do, and replicates of 3 and 2 levels are unequal.
    The variance between samples comes out right on average, in `bsi eval` and in `Model.elbo` alike."""
    method, x = BSI(), rough(60)
    predict = shrink(method)
    true = exact_measurement(method, predict, x).var().item()
    subject = Subject.plain(method, predict, x, BINS)
    found = repeat(lambda seed: evaluate(subject, Procedure(measure=measure, seed=seed), ALONE).elbo, range(60))
    assert np.mean([float(each.nats.var()) for each in found]) > 1.2 * true
    for between in ([each.between for each in found], repeat(lambda seed: _dealt(subject, measure, seed), range(60))):
        error = np.std(between) / math.sqrt(len(between))
        assert abs(np.mean(between) - true) < 4 * error
        assert error < 0.15 * true


def _dealt(subject: Subject, measure: int, seed: int) -> float:
    """The same by `bsi.elbo.elbo`, in two batches, with levels stratified over each."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for x in subject.x(torch.arange(60)).split(32):
        rows = [torch.randperm(len(x), generator=generator) for _ in range(measure)]
        shift = torch.rand(measure, 1, generator=generator, dtype=torch.float64)
        t = (torch.stack(rows) + shift) / len(x)
        noise = lambda x=x: torch.randn(x.shape, generator=generator, dtype=x.dtype)  # noqa: E731
        parts.append(elbo(subject.method, subject.predict(torch.arange(1)), x, subject.bins, t % 1, noise))
    return Elbo.join(parts).between


def test_the_formula_for_independent_draws_would_be_wrong():
    """What the replicates know and the naive formula does not: stratified errors cancel."""
    method, x = BSI(), rough(64)
    found = evaluate(Subject.plain(method, squash(method), x, BINS), Procedure(measure=8), ALONE)
    spread = found.measurement.spread
    assert spread.sum_variance < 0.5 * float(spread.sample_variance.sum())


@pytest.mark.parametrize(
    ("method", "nats"),
    [(BSI(), 6.912594), (BSI(lambda_0=1.0), 7.210055), (BFN(), 6.907755), (VDM(), 6.646643)],
    ids=str,
)
def test_the_bound_of_unit_gaussian_data_is_the_known_one(method, nats):
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x / x.square().mean().sqrt()  # the bound is linear in |x|^2
    predict = Mixture.gaussian(torch.zeros(8).double(), torch.eye(8).double()).predictor(method)
    found = evaluate(Subject.plain(method, predict, x), Procedure(measure=16, proposal="fitted"), ALONE)
    spread, unit = found.measurement.spread, 256 * 8
    assert float(spread.mean.sum()) / unit == pytest.approx(nats, abs=4 * math.sqrt(spread.sum_variance) / unit + 2e-6)
    assert math.sqrt(spread.sum_variance) / unit < 0.01


@pytest.mark.parametrize(("k", "nats"), [(16, 12.44657), (64, 7.92753), (1024, 6.97065)])
@pytest.mark.parametrize("proposal", ["loguniform", "fitted"])
def test_the_bound_of_k_rounds_is_the_known_one(k, nats, proposal):
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x / x.square().mean().sqrt()
    predict = Mixture.gaussian(torch.zeros(8).double(), torch.eye(8).double()).predictor(BSI())
    found = evaluate(Subject.plain(BSI(), predict, x), Procedure(finite_k=k, proposal=proposal, measure=8), ALONE)
    spread, unit = found.measurement.spread, 128 * 8
    assert float(spread.mean.sum()) / unit == pytest.approx(nats, abs=4 * math.sqrt(spread.sum_variance) / unit + 1e-5)


def model(seed: int = 0, method: Method | None = None) -> bsi.Model:
    class Small(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(16, 16)

        def forward(self, x, t):
            return torch.tanh(self.linear(x.flatten(1))).view_as(x) * t[:, None, None, None]

    torch.manual_seed(seed)
    return bsi.Model(Small(), method or bsi.BSI(), (1, 4, 4), bsi.Bins(-1.0, 1.0, 17)).eval()


def pixels(count: int = 50) -> torch.Tensor:
    return torch.randint(0, 17, (count, 1, 4, 4), generator=torch.Generator().manual_seed(1)).to(torch.uint8)


def test_a_model_is_evaluated_on_stored_samples_and_their_cost_is_counted():
    found = evaluate(Subject.of(model(), as_source(pixels()), limit=40), LEARNED, ALONE)
    assert len(found.elbo.nats) == 40
    assert found.plan.pilot == 256 // 2 // 40 * 80 + 80
    assert found.evaluations == found.plan.pilot + 40 * (5 + 2)
    bound = model().bits_per_dim(pixels()[:40], measure=50)
    assert found.elbo.bits_per_dim == pytest.approx(bound.bits_per_dim, abs=5 * bound.monte_carlo_error)
    assert 0 < found.elbo.data_error < 1


def test_continuous_data_is_evaluated_in_its_own_units():
    network, x = model().denoiser.backbone, torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(2))
    plain = bsi.Model(network, bsi.BSI(), (1, 4, 4)).eval()
    wide = bsi.Model(network, bsi.BSI(), (1, 4, 4), standardize=bsi.Standardize(1.0, 10.0)).eval()
    bounds = [
        evaluate(Subject.of(m, as_source(data)), Procedure(), ALONE).elbo
        for m, data in ((plain, x), (wide, 1 + 10 * x))
    ]
    assert bounds[1].nats_per_dim - bounds[0].nats_per_dim == pytest.approx(math.log(10), abs=1e-3)


def test_what_describes_a_set_is_spread_over_all_of_it():
    x = torch.arange(10.0)[:, None]
    subject = Subject.plain(BSI(), shrink(BSI()), x)
    assert subject.spread_out(4).flatten().tolist() == [0, 2, 5, 7]
    assert torch.equal(subject.spread_out(20), x)


def test_vdm_decodes_without_the_network():
    method = VDM()
    found = evaluate(Subject.plain(method, squash(method), rough(), BINS), Procedure(), ALONE)
    assert found.evaluations == 40 * 5
    assert float(found.prior.min()) > 0


def test_the_result_does_not_depend_on_the_batch_size():
    subject = Subject.of(model(), as_source(pixels()))
    first, second = (evaluate(subject, replace(LEARNED, batch=size), ALONE) for size in (7, 64))
    torch.testing.assert_close(first.elbo.nats, second.elbo.nats, rtol=1e-5, atol=1e-4)
    assert first.elbo.monte_carlo_error == pytest.approx(second.elbo.monte_carlo_error, rel=1e-4)


def test_a_target_error_is_met_with_more_rounds():
    subject = Subject.of(model(), as_source(pixels()))
    once = evaluate(subject, LEARNED, ALONE)
    target = once.elbo.monte_carlo_error / 2
    found = evaluate(subject, replace(LEARNED, target_error=target), ALONE)
    assert found.elbo.monte_carlo_error <= target
    assert found.rounds > 1
    assert found.evaluations > once.evaluations
    assert found.measurement.values.shape == (2 * found.rounds, 50)
    error = math.hypot(once.elbo.monte_carlo_error, target)
    assert found.elbo.bits_per_dim == pytest.approx(once.elbo.bits_per_dim, abs=4 * error)


def test_every_evaluation_of_every_round_has_noise_of_its_own(monkeypatch):
    drawn = []

    def noted(seed, ids, kind, draw, shape, dtype):
        drawn.extend((kind, draw, i) for i in ids.tolist())
        return noise(seed, ids, kind, draw, shape, dtype)

    monkeypatch.setattr("bsi.evaluation.bound.noise", noted)
    method = BSI(0.1, alpha_M=30.0)  # whose last belief is wider than a bin: both terms have noise
    subject = Subject.plain(method, squash(method), rough(), BINS)
    plain = evaluate(subject, Procedure(), ALONE)
    drawn.clear()
    found = evaluate(subject, Procedure(target_error=plain.elbo.monte_carlo_error / 3), ALONE)
    assert found.rounds > 1
    assert len(found.reconstruction.values) > 2
    assert len(drawn) == len(set(drawn)) == found.evaluations


def test_a_pilot_never_enters_the_estimate():
    """The plan made with one seed, the estimate with another: the pilot's own noise cannot reappear in it."""
    seen: list[torch.Tensor] = []
    method = BSI()

    def predict(latent, level):
        seen.append(latent)
        return squash(method)(latent, level)

    subject = Subject.plain(method, predict, rough(20), BINS)
    plan = make_plan("fitted", subject, 5, 0, 256, ALONE)
    pilot = torch.cat(seen).flatten(1)
    assert len(pilot) == plan.pilot
    seen.clear()
    evaluate(subject, LEARNED, ALONE, plan)
    main = torch.cat(seen).flatten(1)
    assert float(torch.cdist(pilot, main).min()) > 0


def test_a_part_learns_from_the_parts_before_and_from_none_after():
    """The network changes for some samples: their own estimates change, and those of later stages, and no others."""
    method, x = BSI(), rough(200)
    plan = make_plan("fitted", Subject.plain(method, squash(method), x, BINS), 5, 0, 256, ALONE)
    stages = Design(200, 5).stages(plan.pilot)
    assert len(stages) > 4
    changed = stages[2]

    def predict(ids):
        scale = 1 - 0.1 * torch.isin(ids, changed).double()[:, None, None]
        return lambda latent, level: scale * squash(method)(latent, level)

    subject = Subject.plain(method, squash(method), x, BINS)
    before, after = (
        evaluate(each, LEARNED, ALONE, plan).measurement.values for each in (subject, replace(subject, predict=predict))
    )
    same = (before == after).all(0)
    assert bool(same[torch.cat(stages[:2])].all())
    assert not bool(same[torch.cat(stages[2:])].any())
    again = evaluate(subject, LEARNED, ALONE, plan).measurement.values
    assert torch.equal(again, before)  # the plan itself has learned nothing


def test_what_was_learned_lowers_the_variance():
    """The same pilot, with and without learning on the way."""
    method, x = BSI(), rough(400)
    subject = Subject.plain(method, squash(method), x, BINS)
    true = exact_measurement(method, squash(method), x)
    plan = make_plan("fitted", subject, 2, 0, 256, ALONE)
    found = torch.stack(
        [evaluate(subject, replace(LEARNED, measure=4, seed=s), ALONE, plan).elbo.measurement for s in range(6)]
    )
    stages = Design(400, 4).stages(plan.pilot)
    first, last = ((found[:, part] - true[part]).square().mean() for part in (stages[0], torch.cat(stages[-2:])))
    assert float(last) < float(first)


def test_common_random_numbers_make_a_difference_sharper():
    x = as_source(pixels())
    a, b = model(0), model(0)
    with torch.no_grad():
        b.denoiser.backbone.linear.weight += 0.01
    found = [evaluate(Subject.of(each, x), Procedure(), ALONE) for each in (a, b)]
    paired = difference(*found)
    assert paired.bits_per_dim == pytest.approx(found[0].elbo.bits_per_dim - found[1].elbo.bits_per_dim, abs=1e-12)
    assert paired.monte_carlo_error < paired.unpaired_error / 5
    same = difference(found[0], found[0])
    assert (same.bits_per_dim, same.monte_carlo_error, same.data_error) == (0, 0, 0)


def test_a_difference_has_all_terms_the_prior_s_too():
    near, far = (model(0, bsi.VDM(nu_min=nu)) for nu in (math.exp(-5), math.exp(-3)))
    found = [evaluate(Subject.of(each, as_source(pixels())), Procedure(), ALONE) for each in (near, far)]
    assert float((found[0].prior - found[1].prior).abs().min()) > 1e-3
    apart = found[0].elbo.bits_per_dim - found[1].elbo.bits_per_dim
    assert difference(*found).bits_per_dim == pytest.approx(apart, abs=1e-12)


def test_a_difference_is_in_the_data_s_units_and_says_what_pairing_is_worth():
    found = evaluate(Subject.of(model(), as_source(pixels())), Procedure(), ALONE)
    apart = difference(replace(found, log_determinant=0.3), replace(found, log_determinant=0.1))
    assert apart.bits_per_dim == pytest.approx(0.2 / math.log(2))
    assert apart.monte_carlo_error == 0
    assert apart.unpaired_error == pytest.approx(math.sqrt(2) * found.elbo.monte_carlo_error)
    with pytest.raises(UsageError, match="one procedure"):
        difference(found, replace(found, rounds=2))


def test_two_learned_plans_share_their_levels():
    subjects = [Subject.of(model(seed), as_source(pixels())) for seed in (0, 1)]
    with torch.no_grad():
        plans = shared_plans(*(make_plan("fitted", subject, 5, 0, 256, ALONE) for subject in subjects))
    assert plans[0].proposal == plans[1].proposal
    assert plans[0].control is not plans[1].control


def test_levels_that_are_shared_serve_both_alike_and_only_where_both_have_them():
    first, second = Fitted(1.0, 100.0, (1.0, 3.0)), Fitted(1.0, 100.0, (700.0, 200.0))
    both = shared_plans(Plan(first), Plan(second))[0].proposal
    level = torch.linspace(1, 100, 7, dtype=torch.float64)
    torch.testing.assert_close(both.density(level), (first.density(level) + second.density(level)) / 2)
    further = Plan(Fitted(1.0, 200.0, (1.0, 3.0)))
    assert shared_plans(Plan(first), further) == (Plan(first), further)


def test_a_plan_learns_from_pairs_at_one_level_and_proposes_by_what_its_control_leaves():
    method, seen = BSI(), []

    def predict(latent, level):
        seen.append(level)
        return squash(method)(latent, level)

    plan = make_plan("fitted", Subject.plain(method, predict, rough(), BINS), 5, 0, 256, ALONE)
    assert all(torch.equal(a, b) for a, b in zip(seen[::2], seen[1::2], strict=True))
    assert not torch.equal(seen[0], seen[2])
    assert plan.control is not None
    pairs = plan.control.pairs
    left_over = pairs.g - plan.control.predict(pairs)
    assert plan.proposal == fit_proposal(method.levels, plan.control.basis.knots, pairs.u, left_over)


def test_a_difference_needs_one_procedure():
    subject = Subject.of(model(), as_source(pixels()))
    found = [evaluate(subject, Procedure(seed=seed), ALONE) for seed in (0, 1)]
    with pytest.raises(UsageError, match="one procedure"):
        difference(*found)


@pytest.mark.parametrize(
    "wrong", [{"measure": 1}, {"recon": 1}, {"finite_k": 0}, {"target_error": 0.0}, {"batch": 0}], ids=str
)
def test_procedures_that_cannot_work_are_refused(wrong):
    with pytest.raises(UsageError):
        Procedure(**wrong)


def test_predictions_that_are_not_finite_are_named():
    subject = Subject.plain(BSI(), lambda latent, level: latent * math.nan, rough(), BINS)
    with pytest.raises(NonFinite, match="40 of 40"):
        evaluate(subject, Procedure(), ALONE)


def test_a_pilot_that_is_not_finite_is_told_before_the_rest_is_evaluated():
    method = BSI()

    def predict(ids):
        scale = torch.where(ids == 1, math.nan, 1.0)[:, None, None]
        return lambda latent, level: scale * squash(method)(latent, level)

    subject = replace(Subject.plain(method, squash(method), rough(), BINS), predict=predict)
    with pytest.raises(NonFinite, match=r"8 of the pilot's 320 evaluations"):
        evaluate(subject, LEARNED, ALONE)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_smallest_sets_have_a_bound_whatever_the_seed(count):
    """Also without noise in the answer: a sample of one value, predicted exactly."""
    method, x = BSI(), rough(count, 4)
    true = exact_measurement(method, squash(method), x)
    subject = Subject.plain(method, squash(method), x, BINS)
    found = measurements(subject, LEARNED, range(12))
    assert abs(float((found - true).mean())) < 4.5 * float(found.mean(1).std()) / math.sqrt(12)
    constant = Subject.plain(method, lambda latent, level: torch.zeros_like(latent), torch.zeros_like(x), BINS)
    assert float(evaluate(constant, LEARNED, ALONE).elbo.measurement.abs().max()) < 1e-9


def test_a_sample_that_is_not_finite_spoils_no_other():
    method, x = BSI(), rough()
    subject = Subject.plain(method, squash(method), x, BINS)
    plan = make_plan("fitted", subject, 5, 0, 256, ALONE)

    def predict(ids):
        scale = torch.where(ids == 1, math.nan, 1.0)[:, None, None]
        return lambda latent, level: scale * squash(method)(latent, level)

    with pytest.raises(NonFinite, match="1 of 40"):
        evaluate(replace(subject, predict=predict), LEARNED, ALONE, plan)


def summary(world: World) -> dict[str, float]:
    """Of a set that two ranks cannot share evenly, and of one sample, which leaves one rank with nothing to do."""
    found = evaluate(Subject.of(model(), as_source(pixels(31))), LEARNED, world)
    single = evaluate(Subject.of(model(), as_source(pixels(1))), LEARNED, world)
    return {
        "bits": found.elbo.bits_per_dim,
        "monte_carlo": found.elbo.monte_carlo_error,
        "data": found.elbo.data_error,
        "evaluations": found.evaluations,
        "single": single.elbo.bits_per_dim,
    }


@pytest.mark.parametrize("count", [1, 3, 13, 16])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_share_all_samples_and_each_has_its_own(count, size):
    subject = Subject.plain(BSI(), shrink(BSI()), rough(count))
    parts = [list(subject.batches(count, 4, World(Place(rank, size), torch.device("cpu")))) for rank in range(size)]
    assert [int(i) for part in parts for ids in part for i in ids] == list(range(count))
    assert all(0 < len(ids) <= 4 for part in parts for ids in part), "a rank without samples has no batch"


def test_two_ranks_give_the_numbers_of_one(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(bsi.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    subprocess.run([*torchrun, __file__, str(tmp_path)], check=True, timeout=120, env=environment)
    alone = summary(ALONE)
    for rank in (0, 1):
        together = json.loads((tmp_path / f"{rank}.json").read_text())
        assert together["evaluations"] == alone["evaluations"]
        for name in ("bits", "monte_carlo", "data", "single"):
            assert together[name] == pytest.approx(alone[name], rel=1e-6)


if __name__ == "__main__":
    with join("cpu", 60.0) as ranks:
        result = summary(ranks)
        (Path(sys.argv[1]) / f"{ranks.rank}.json").write_text(json.dumps(result))
