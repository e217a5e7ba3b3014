"""The numbers of the studies: estimates and their errors, claims, names of jobs, and the formulas of each study."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import bsi
from bsi.cli.training import parse
from bsi.denoiser import COEFFICIENTS
from bsi.errors import UsageError
from bsi.levels import LogUniform
from bsi.methods import BSI
from bsi.recipe import Objective
from bsi.studies import comparison, measure, outcome, runner
from bsi.studies.ablations import FACTORS, advantage, parameters
from bsi.studies.bounds import converges, estimate, proposals, relative_spread, resampled
from bsi.studies.measure import Bound, Result, Training, network_name
from bsi.studies.outcome import STUDIES, Estimate, Results
from bsi.studies.scale import SCALES

SMOKE, MINI, MEDIUM, PAPER = (SCALES[name] for name in ("smoke", "mini", "medium", "paper"))
DIGITS = bsi.recipes.digits()
UNIT = 2 * math.log(2)  # nats per bit per dimension of two


def test_an_estimate_shows_two_digits_of_its_error():
    shown = {
        "3.4481 ± 0.0051": Estimate(3.44812, 0.0051),
        "123 ± 25": Estimate(123.4, 25.0),
        "0.08178": Estimate(0.08178, 0.0),
        "-5.036e-10 ± 7.6e-12": Estimate(-5.036e-10, 7.6e-12),
        "inf": Estimate(math.inf, 1e-9),
    }
    assert [str(estimate) for estimate in shown.values()] == list(shown)


def test_errors_have_the_spread_over_seeds_and_images():
    found = outcome.mean_of_seeds([Estimate(1.0, 0.001), Estimate(2.0, 0.001)])
    assert (found.value, found.error) == pytest.approx((1.5, 0.5))
    assert outcome.mean_of_seeds([Estimate(1.0, 0.2), Estimate(1.0, 0.2)]).error == pytest.approx(0.2 / math.sqrt(2))
    assert outcome.mean_of_seeds([Estimate(4.0, 0.3)]) == Estimate(4.0, 0.3)
    assert outcome.mean_of_images(np.array([[0.5, 0.7, 0.5, 0.7]])).error == pytest.approx(0.1 * math.sqrt(4 / 3) / 2)
    found = outcome.mean_of_images(np.array([[0.5] * 4, [0.9] * 4]))
    assert (found.value, found.error) == pytest.approx((0.7, 0.2))


def test_the_error_of_a_median_is_that_of_normal_images():
    """sqrt(pi / 2n) for a unit Normal. Seeds that see the same images share their error."""
    data = np.random.default_rng(0).standard_normal((1000, 400))
    found, wanted = [outcome.median_of_images(row[None]) for row in data], math.sqrt(math.pi / 800)
    assert np.std([e.value for e in found]) == pytest.approx(wanted, rel=0.1)
    assert np.mean([e.error for e in found]) == pytest.approx(wanted, rel=0.05)
    assert outcome.median_of_images(data[:1]) == outcome.median_of_images(np.stack([data[0], data[0]]))


def stored(tmp_path, jobs, nats, sizes=(1, 1)) -> Results:
    """Bounds of four images in two replicates, n = 2."""
    store, none = Results(tmp_path, SMOKE), np.zeros(4)
    for job, values in zip(jobs, nats, strict=True):
        arrays = {
            "measurement": np.array(values, dtype=np.float64),
            "measurement_sizes": np.array(sizes),
            "prior": none,
        }
        arrays |= {
            "reconstruction": np.zeros((2, 4)),
            "reconstruction_sizes": np.array([1, 1]),
            "block": none.astype(int),
        }
        store.write(job, Result({"dimensions": 2}, arrays))
    return store


def test_differences_of_bits_are_paired_by_image(tmp_path):
    """Images differ much, the two networks by 0.5 and 0.7 nats alternately: the error has only the latter."""
    base = np.array([[1.0, 20.0, 300.0, 4000.0]] * 2)
    networks = [replace(DIGITS, seed=seed) for seed in (0, 1)]
    jobs = [measure.bound(SMOKE, network) for network in networks]
    results = stored(tmp_path, jobs, [base + np.array([0.5, 0.7, 0.5, 0.7]), base])
    found = results.bits_difference(networks[:1], networks[1:])
    assert (found.value, found.size) == (pytest.approx(0.6 / UNIT), 0.001)
    assert found.error == pytest.approx(0.1 * math.sqrt(4 / 3) / 2 / UNIT)
    results = stored(tmp_path, jobs[:1], [np.array([[1.0] * 4, [6.0] * 4])], sizes=(3, 2))
    assert results.image_bits(networks[:1]) == pytest.approx(np.full((1, 4), 3.0 / UNIT)), "weighted by size"


def test_the_noise_floor_is_that_of_the_difference(tmp_path):
    noise = np.array([[3.0, -1.0, 2.0, 0.0], [-2.0, 4.0, 1.0, -3.0]])
    jobs = [Bound(DIGITS, 4, 2, k) for k in (8, None)]
    found = stored(tmp_path, jobs, [noise + np.array([[0.25], [0.35]]), noise]).finite_gap(*jobs)
    assert (found.value, found.error) == pytest.approx((0.3 / UNIT, 0.05 / UNIT))


def test_differences_of_distances_are_paired_by_seed(tmp_path):
    """The seeds differ by far more than the networks."""
    results = Results(tmp_path, SMOKE)
    a, b = ([replace(DIGITS, steps=steps, seed=seed) for seed in (0, 1)] for steps in (10, 20))
    for networks, offset in ((a, 0.0), (b, 3.0)):
        for network in networks:
            value = Result({"distance_test": 50.0 * network.seed + offset, "error_test": 0.1})
            results.write(measure.quality(SMOKE, network), value)
    found = results.distance_difference(a, b)
    assert (found.value, found.error, found.size) == pytest.approx((-3.0, 0.1, 0.28))


@pytest.mark.parametrize(
    ("value", "error", "size", "verdict"),
    [
        (-0.21, 0.1, 0.0, "held"),
        (-0.19, 0.1, 0.0, "undecided"),
        (0.19, 0.1, 0.0, "undecided"),
        (0.21, 0.1, 0.0, "not held"),
        (-5e-10, 1e-12, 0.001, "not held"),  # significant, but of no practical size
        (-0.003, 0.0005, 0.001, "held"),
        (-0.0009, 0.0003, 0.001, "undecided"),
        (0.0, 0.0001, 0.001, "not held"),
    ],
)
def test_a_claim_holds_beyond_two_standard_errors_and_its_practical_size(value, error, size, verdict):
    exact = Estimate(3.0, 0.0)
    assert outcome.less("a < b", exact, exact, Estimate(value, error, size)).verdict == verdict


def test_independent_errors_add_in_squares_and_one_percent_of_a_distance_matters():
    assert outcome.less("a < b", Estimate(1.0, 0.3), Estimate(2.1, 0.4)).verdict == "held"
    assert outcome.less("a < b", Estimate(1.0, 0.3), Estimate(1.9, 0.4)).verdict == "undecided"
    assert (Estimate(50.0, 0.1) - Estimate(40.0, 0.1)).size == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("value", "error", "verdict"),
    [(0.001, 0.004, "held"), (0.001, 0.005, "undecided"), (-0.03, 0.005, "not held"), (0.015, 0.005, "undecided")],
)
def test_equality_needs_evidence_too(value, error, verdict):
    gaps = {"a - b": Estimate(value, error), "a - c": Estimate(0.0, 0.001)}
    assert outcome.equal("a = b = c", gaps, 0.01).verdict == verdict


def test_a_claim_of_several_parts_holds_if_all_hold():
    held, unsure, broken = (Estimate(value, 0.1) for value in (-1.0, -0.1, 1.0))
    assert outcome.all_less("x", [held, held]).verdict == "held"
    assert outcome.all_less("x", [held, unsure]).verdict == "undecided"
    assert outcome.all_less("x", [held, unsure, broken]).verdict == "not held"


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ((4.0, 1.0, 0.3), "held"),
        ((4.0, 0.0, 0.05), "held"),  # the gap is below its noise
        ((1.0, 1.0, 1.0), "undecided"),  # above, but not converging
        ((4.0, 1.0, -0.5), "not held"),
        ((1.0, 4.0, 0.3), "not held"),
    ],
)
def test_a_bound_converges_only_if_it_is_above_and_falls(gaps, verdict):
    steps = [Estimate(b - a, 0.1, 0.0) for a, b in itertools.pairwise(gaps)]
    total = Estimate(gaps[-1] - gaps[0], 0.1, 0.0)
    assert converges([Estimate(gap, 0.1, 0.0) for gap in gaps], steps, total).verdict == verdict


@pytest.mark.parametrize(
    ("distances", "bits", "verdict"),
    [
        ((-1.0, -1.0), (1.0, 1.0), "not held"),  # better at every k'
        ((-1.0, 1.0), (1.0, 0.0), "held"),
        ((-1.0, 0.0), (1.0, 1.0), "undecided"),  # worse in bits only
    ],
)
def test_an_advantage_is_refuted_for_each_quantity_alone(distances, bits, verdict):
    found = {"FID": distances, "bits/dim": bits}
    gaps = {name: [Estimate(value, 0.1, 0.0) for value in values] for name, values in found.items()}
    assert advantage(gaps).verdict == verdict


def test_tables_are_the_same_as_records_and_as_markdown():
    rows = [{"|name|": "b|c"}, {"|name|": "a", "value": Estimate(1.0, 0.1)}]
    assert outcome.records(rows)[1] == {"|name|": "a", "value": 1.0, "value error": 0.1}
    assert outcome.markdown(rows) == "| \\|name\\| | value |\n| --- | --- |\n| b\\|c | – |\n| a | 1.00 ± 0.10 |"


def test_jobs_are_named_by_what_decides_their_results():
    same = replace(DIGITS, name="other", every=replace(DIGITS.every, journal=7), keep=replace(DIGITS.keep, last=9))
    assert network_name(same) == network_name(DIGITS)
    networks = [
        DIGITS,
        replace(DIGITS, seed=1),
        replace(DIGITS, steps=DIGITS.steps + 1),
        replace(DIGITS, parametrization="epsilon"),
        replace(DIGITS, method=replace(DIGITS.method, clips=True)),
        *(replace(DIGITS, objective=Objective(weight=w, bias=b)) for w, b in (("edm", 2.0), ("sigmoid", 1.0))),
        replace(DIGITS, objective=Objective(levels="expected")),
    ]
    assert len({network_name(each) for each in networks}) == len(networks)
    assert len({Training(each).title() for each in networks}) == len(networks)
    jobs = [Training(DIGITS), Bound(DIGITS, 4, 2), Bound(DIGITS, 4, 2, 16), measure.quality(SMOKE, DIGITS)]
    jobs += [
        measure.quality(SMOKE, DIGITS, measure.paper_sampler(4)),
        replace(jobs[-1], seed=1),
        measure.quality(SMOKE, networks[1]),
    ]
    assert len({job.name for job in jobs}) == len(jobs)


def test_results_of_earlier_versions_keep_their_names():
    """If a name changed, a study would train and measure again."""
    network = MINI.comparisons[0].networks("bfn")[0]
    assert network_name(network) == "41c0592e549f"
    assert measure.bound(MINI, network).name == "bound-1e78c59d3d7b"


def test_jobs_fit_into_the_time_of_their_scale(tmp_path):
    everything = list(STUDIES.values())
    assert max(p.job.seconds(MINI) for p in runner.plan(everything, Results(tmp_path, MINI))) < 9 * 60
    assert sum(p.job.seconds(SMOKE) for p in runner.plan(everything, Results(tmp_path, SMOKE))) < 10 * 60
    for study in runner.named_studies("all", MEDIUM):
        jobs = [planned.job for planned in runner.plan([study], Results(tmp_path, MEDIUM))]
        minutes = [job.seconds(MEDIUM) / 60 for job in jobs if isinstance(job, Training)]
        assert len(minutes) == 9
        assert all(9 < each < 11 for each in minutes)
    with pytest.raises(UsageError, match="medium"):
        runner.named_studies("weighting", MEDIUM)


@pytest.mark.slow
def test_the_commands_of_the_paper_train_its_networks(tmp_path):
    store = Results(tmp_path, PAPER)
    planned = runner.plan(list(STUDIES.values()), store)
    assert "torchrun --nproc-per-node 4 -m bsi train imagenet32-dit-l2" in runner.plan_text(planned, store)
    for p in planned:
        if isinstance(p.job, Training):
            words = runner.train_command(p.job.network, store).split()
            args, _ = parse(words[words.index("train") + 1 :])
            assert network_name(args.recipe) == network_name(p.job.network)
            assert args.options.out == store.network(p.job.network)


def test_the_scales_have_their_datasets_seeds_and_budgets():
    def data(name):
        return {job.network.data.name for job in STUDIES[name].measurements(PAPER)}

    assert data("fid-convergence") == {"imagenet64"}
    assert data("importance-sampling") == {"cifar10"}
    assert data("elbo-convergence") == data("proposal") == data("initial-precision") == {"imagenet32"}
    trained = {job.network for job in STUDIES["comparison"].measurements(PAPER)}
    assert sorted(r.seed for r in trained if r.data.name == "imagenet64") == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert {r.steps for r in trained if r.data.name == "cifar10"} == {5_000_000, 10_000_000}
    for name in ("finite-k", "initial-precision", "disentangle", "weighting"):
        assert {job.network.seed for job in STUDIES[name].measurements(MINI)} == {0, 1, 2}


def test_published_values_of_other_authors_are_in_the_table(tmp_path):
    """CIFAR-10 at 10M steps: VDM's value is its authors', BSI's is measured."""
    results, group = Results(tmp_path, PAPER), PAPER.comparisons[2]
    value = Result({"bits_per_dim": 2.641, "monte_carlo_error": 0.001})
    results.write(measure.bound(PAPER, group.networks("bsi")[0]), value)
    table = comparison.comparison_table(results, group, comparison.CIFAR10[10_000_000], {"ours": measure.OURS})
    assert table == [
        {"method": "VDM", "paper's bits/dim": "2.65"},
        {"method": "BSI", "bits/dim": Estimate(2.641, 0.001), "paper's bits/dim": "2.64"},
    ]


def test_two_proposals_are_judged_on_the_same_resampled_images():
    """The difference of two equal spreads has no error."""
    generator, level = np.random.default_rng(0), np.geomspace(1e-2, 1e6, 33)
    errors, both = generator.uniform(0.5, 1.5, (33, 50)) / level[:, None], LogUniform(1e-2, 1e6)
    a = resampled(relative_spread, level, errors, both)
    b = resampled(lambda *given: relative_spread(*given) + 1.0, level, errors, both)
    assert estimate(a).error > 0
    assert estimate(b - a).value == pytest.approx(1.0)
    assert estimate(b - a).error < 1e-12


def test_proposals_that_follow_the_errors_leave_no_spread_and_the_fitted_one_has_the_least():
    level = LogUniform(1e-2, 1e6).icdf(torch.linspace(0, 1, 401, dtype=torch.float64)).numpy()

    def spreads(errors):
        return {name: relative_spread(level, errors, p) for name, p in proposals(level, errors).items()}

    flat = spreads(np.repeat(1 / level[:, None], 4, axis=1))
    assert flat["log-uniform"] == pytest.approx(0, abs=1e-3)
    assert flat["fitted"] == pytest.approx(0, abs=1e-3)
    assert flat["uniform"] > 100
    shape = np.exp(-0.5 * ((np.log(level) - 4) / 3) ** 2) + 0.1
    noisy = spreads((shape / level)[:, None] * np.random.default_rng(0).uniform(0.5, 1.5, (401, 200)))
    assert min(noisy, key=noisy.__getitem__) == "fitted"


def test_each_factor_changes_one_thing_and_all_three_make_bfn():
    for undone in itertools.chain.from_iterable(itertools.combinations(FACTORS, n) for n in range(4)):
        method = BSI(**parameters(undone))
        assert method.c == pytest.approx(0.0 if "hyper-prior" in undone else 1e-2)
        assert method.levels.low == (1.0 if "offset" in undone else 1e-2)
    first, last = (BSI(**parameters(undone)) for undone in ((), FACTORS))
    assert first == BSI()
    level = torch.logspace(0, 5, 20, dtype=torch.float64)
    for ours, theirs in zip(vars(last.encoder(level)).values(), vars(bsi.BFN().encoder(level)).values(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12)
    assert last.prior(torch.ones(1, 1)).item() == 0


def test_an_error_of_the_noise_has_no_finite_mean_square_over_levels():
    """Near t = 0 the sample's squared error grows like t^-1, with a hyper-prior like t^-2; others are bounded."""
    t = torch.tensor([1e-12, 1e-11], dtype=torch.float64)
    for name, undone in itertools.product(COEFFICIENTS, ((), ("hyper-prior",))):
        method = BSI(**parameters(undone))
        c_out = COEFFICIENTS[name](method.encoder(method.levels.icdf(t)), 1.0).c_out
        small, large = c_out.square().log10().tolist()
        power = (-1 if undone else -2) if name == "epsilon" else 0
        assert large - small == pytest.approx(power, abs=1e-3)


@pytest.mark.parametrize("name", ["noise-levels", "illustration"])
def test_claims_that_need_no_training_hold(name, tmp_path):
    pytest.importorskip("matplotlib")
    claims = STUDIES[name].report(Results(tmp_path, SMOKE)).claims
    assert {claim.verdict for claim in claims} == {"held"}
