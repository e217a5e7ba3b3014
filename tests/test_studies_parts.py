"""The pieces of the studies: features of digits, errors of distances, claims, plans, and the numbers behind figures."""

import csv
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bsi
from bsi.cli.train import parse
from bsi.data.digits import embedded_digits
from bsi.data.store import open_dataset
from bsi.denoiser import COEFFICIENTS
from bsi.elbo import reconstruction_loss
from bsi.errors import DataError, Preempted
from bsi.levels import LogUniform
from bsi.methods import BSI
from bsi.metrics import Extractor, Moments, frechet_distance, metric_name
from bsi.recipe import Objective
from bsi.rng import standard_normal
from bsi.studies import comparison, disentangle, figures, illustration, initial_precision, noise_levels, proposal
from bsi.studies.deadline import Deadline
from bsi.studies.digits_features import DigitsFeatures, fit, packaged_weights
from bsi.studies.elbo_convergence import converges, gaussian_gap
from bsi.studies.estimates import (
    Estimate,
    _median,
    bits_difference,
    finite_gap,
    median_bits,
    median_bits_difference,
    over_seeds,
)
from bsi.studies.finite_k import advantage
from bsi.studies.importance_sampling import proposals, relative_spread, resampled
from bsi.studies.job import Bound, Profile, Quality, Reconstruction, Train, name_of, network_name, title
from bsi.studies.measure import Laboratory
from bsi.studies.plan_text import plan_text, train_command
from bsi.studies.publish import page
from bsi.studies.registry import STUDIES
from bsi.studies.report import Table, all_of, as_csv, equal, less
from bsi.studies.runner import Planned, _begin, commit, plan
from bsi.studies.scales import MINI, PAPER, SCALES, SMOKE
from bsi.studies.standard import bounds, qualities
from bsi.studies.store import Result, Store
from bsi.values import to_uint8

PUBLISHED = "13c809cff5b50a068d8777d1946344f3e566c01df1caa164707bf67ad763149f"


def pictures(indices: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(to_uint8(embedded_digits().bins.values(indices))).expand(-1, 3, -1, -1)


class TestDigitsFeatures:
    def test_the_weights_are_the_published_ones_and_small(self):
        data = packaged_weights()
        assert len(data) < 100_000
        assert DigitsFeatures().hash == hashlib.sha256(data).hexdigest() == PUBLISHED

    def test_it_is_an_extractor_whose_distance_is_not_called_fid(self):
        extractor = DigitsFeatures()
        assert isinstance(extractor, Extractor)
        assert metric_name(extractor) == "fd-digits"

    def test_it_knows_the_digits(self):
        loaded, extractor = embedded_digits(), DigitsFeatures()
        assert (extractor.classify(pictures(loaded.test)).numpy() == loaded.labels.test).mean() > 0.98

    def test_the_distance_tells_digits_from_noise(self):
        loaded, extractor = embedded_digits(), DigitsFeatures()
        real = Moments.of(extractor(pictures(loaded.test)))
        noise = torch.randint(0, 256, (500, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
        near = frechet_distance(Moments.of(extractor(pictures(loaded.train))), real)
        far = frechet_distance(Moments.of(extractor(noise.expand(-1, 3, -1, -1))), real)
        assert 0 < near < 3 < 50 < far

    def test_other_sizes_are_refused(self):
        with pytest.raises(DataError, match=r"8x8 pixels: got \(32, 32\)"):
            DigitsFeatures()(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))

    def test_training_is_a_function_of_nothing(self):
        a, b = fit(steps=3, batch=8), fit(steps=3, batch=8)
        assert all(torch.equal(a[name], b[name]) for name in a)


class TestEstimates:
    @pytest.mark.parametrize(
        ("estimate", "text"),
        [
            (Estimate(3.44812, 0.0051), "3.4481 ± 0.0051"),
            (Estimate(12.345, 1.234), "12.3 ± 1.2"),
            (Estimate(123.4, 25.0), "123 ± 25"),
            (Estimate(0.08178, 0.0), "0.08178"),
            (Estimate(-5.036e-10, 7.6e-12), "(-5.036 ± 0.076)e-10"),
            (Estimate(0.0, 2.5e-9), "(0.0 ± 2.5)e-9"),
            (Estimate(math.inf, 1e-9), "inf"),
        ],
    )
    def test_an_estimate_has_two_digits_of_its_error(self, estimate, text):
        assert str(estimate) == text

    def test_over_seeds_the_larger_of_spread_and_own_error_counts(self):
        spread = over_seeds([Estimate(1.0, 0.001), Estimate(2.0, 0.001)])
        assert spread.value == 1.5
        assert spread.error == pytest.approx(0.5)
        assert over_seeds([Estimate(1.0, 0.2), Estimate(1.0, 0.2)]).error == pytest.approx(0.2 / math.sqrt(2))
        assert over_seeds([Estimate(4.0, 0.3)]) == Estimate(4.0, 0.3)

    def store(self, tmp_path, jobs, nats, sizes=(1, 1)):
        """Bounds of four images in two replicates, n = 2."""
        store = Store(tmp_path)
        for job, values in zip(jobs, nats, strict=True):
            arrays = {
                "measurement": np.array(values, dtype=np.float64),
                "measurement_sizes": np.array(sizes),
                "reconstruction": np.zeros((2, 4)),
                "reconstruction_sizes": np.array([1, 1]),
                "block": np.zeros(4, dtype=np.int64),
                "prior": np.zeros(4),
            }
            mean = float(np.average(values, axis=0, weights=sizes).mean()) / (2 * math.log(2))
            found = {"dimensions": 2, "bits_per_dim": mean, "monte_carlo_error": 0.0}
            store.write(job, Result(found, arrays), {})
        return store

    def test_differences_are_paired_by_image(self, tmp_path):
        """Images differ much, the two networks by 0.5 and 0.7 nats alternately: the error knows only the latter."""
        base = np.array([[1.0, 20.0, 300.0, 4000.0]] * 2)
        jobs = [Bound(replace(bsi.recipes.digits(), seed=seed), 4, 2) for seed in (0, 1)]
        store = self.store(tmp_path, jobs, [base + np.array([0.5, 0.7, 0.5, 0.7]), base])
        found, unit = bits_difference(store, jobs[:1], jobs[1:]), 2 * math.log(2)
        assert found.value == pytest.approx(0.6 / unit)
        assert found.error == pytest.approx(0.1 * math.sqrt(4 / 3) / 2 / unit)

    def test_how_seeds_differ_is_in_the_error_of_a_difference(self, tmp_path):
        """By 0.5 nats for one seed and by 0.9 for the other, of every image alike."""
        jobs = [Bound(replace(bsi.recipes.digits(), seed=seed), 4, 2) for seed in (0, 1, 2)]
        store = self.store(tmp_path, jobs, [np.full((2, 4), 0.5), np.full((2, 4), 0.9), np.zeros((2, 4))])
        found, unit = bits_difference(store, jobs[:2], [jobs[2]] * 2), 2 * math.log(2)
        assert found.value == pytest.approx(0.7 / unit)
        assert found.error == pytest.approx(0.2 / unit)

    def test_replicates_count_by_their_size(self, tmp_path):
        jobs = [Bound(replace(bsi.recipes.digits(), seed=seed), 4, 2) for seed in (0, 1)]
        store = self.store(tmp_path, jobs, [np.array([[1.0] * 4, [6.0] * 4]), np.zeros((2, 4))], sizes=(3, 2))
        assert bits_difference(store, jobs[:1], jobs[1:]).value == pytest.approx(3.0 / (2 * math.log(2)))

    def test_an_image_that_makes_the_mean_does_not_move_the_median(self, tmp_path):
        """Of four images one standard deviation is one place: from half way below the second to half way above it."""
        jobs = [Bound(replace(bsi.recipes.digits(), seed=seed), 4, 2) for seed in (0, 1)]
        base = np.array([[1.0, 20.0, 300.0, 4000.0]] * 2)
        store, unit = self.store(tmp_path, jobs, [base + np.array([0.5, 0.7, 0.1, 1e9]), base]), 2 * math.log(2)
        found = median_bits_difference(store, jobs[:1], jobs[1:])
        assert found.value == pytest.approx(0.6 / unit)
        assert found.error == pytest.approx((0.5 * (0.7 + 1e9) - 0.5 * (0.1 + 0.5)) / 2 / unit)
        assert median_bits(store, jobs[1:]).value == pytest.approx(160 / unit)

    def test_the_error_of_a_median_is_that_of_normal_images(self):
        """sqrt(pi / 2n) for a unit Normal; the mean over a thousand data sets is seen to 1 %."""
        data = np.random.default_rng(0).standard_normal((1000, 400))
        found = [_median(row) for row in data]
        wanted = math.sqrt(math.pi / 800)
        assert np.std([e.value for e in found]) == pytest.approx(wanted, rel=0.1)
        assert np.mean([e.error for e in found]) == pytest.approx(wanted, rel=0.05)

    def test_seeds_that_saw_the_same_images_have_their_error_in_common(self, tmp_path):
        """Twice the same network is no more than once."""
        jobs = [Bound(replace(bsi.recipes.digits(), seed=seed), 4, 2) for seed in (0, 1, 2)]
        same = np.array([[1.0, 20.0, 300.0, 4000.0]] * 2)
        store = self.store(tmp_path, jobs, [same, same, np.zeros((2, 4))])
        assert median_bits(store, jobs[:2]) == median_bits(store, jobs[:1])
        twice = median_bits_difference(store, jobs[:2], [jobs[2]] * 2)
        assert twice == median_bits_difference(store, jobs[:1], jobs[2:])

    def test_the_mean_effect_of_a_change_is_paired_by_image(self, tmp_path):
        """By 0.5 and 0.7 nats alternately, at two edges of the cube twice that: averaging four edges makes the images'
        share of the error no smaller, and how the edges differ is the other share."""
        jobs, nats = [], []
        for corner in disentangle.CORNERS:
            (network,) = disentangle.networks(SMOKE, corner)
            jobs.append(bounds(SMOKE, [network])[0])
            nats.append(np.array([[0.5, 0.7, 0.5, 0.7]] * 2) * corner.offset * (1 + corner.preconditioning))
        store, steps = self.store(tmp_path, jobs, nats), max(SMOKE.drawn.steps)
        for job, corner in zip(jobs, disentangle.CORNERS, strict=True):
            (paper,), (ours,) = qualities(SMOKE, [job.network], steps), disentangle._ours(SMOKE, [job.network])
            store.write(paper, Result({"distance": 1.0 + 2 * corner.preconditioning, "error": 0.1}), {})
            store.write(ours, Result({"distance": 5.0 - corner.offset, "error": 0.1}), {})
        effect, unit = disentangle._effect(SMOKE, store, "offset").mean, 2 * math.log(2)
        assert effect.median.value == pytest.approx(0.9 / unit)
        assert effect.median.error == pytest.approx(math.hypot(0.15, 0.3 * math.sqrt(4 / 3) / 2) / unit)
        assert (effect.paper.value, effect.ours.value) == (0.0, -1.0)
        claims = {claim.statement: claim.verdict for claim in disentangle._claims(SMOKE, store)}
        words = "BSI's {} alone improves fd-digits over BFN's"
        verdicts = [("hyper-prior", "undecided", "undecided"), ("offset", "undecided", "held")]
        verdicts += [("preconditioning", "not held", "undecided")]
        for factor, by_paper, by_ours in verdicts:
            assert claims.pop(words.format(factor)) == by_paper
            assert claims.pop(f"{words.format(factor)}, by our solver") == by_ours
        assert not claims

    def test_more_seeds_do_not_make_more_than_four_edges(self, tmp_path):
        """Twice the same network at every corner: how the four edges differ is known no better than from one."""
        store, steps, effects = Store(tmp_path), max(SMOKE.drawn.steps), []
        for scale in (SMOKE, SMOKE.with_seeds(2)):
            for i, corner in enumerate(disentangle.CORNERS):
                for network in disentangle.networks(scale, corner):
                    self.store(tmp_path, bounds(scale, [network]), [np.array([[0.5, 0.7, 0.5, 0.7]] * 2) * i**2])
                    for job in (*qualities(scale, [network], steps), *disentangle._ours(scale, [network])):
                        store.write(job, Result({"distance": float(i**2), "error": 0.1}), {})
            effects.append(disentangle._effect(scale, store, "offset").mean)
        once, twice = effects
        assert once.paper.error > 4
        for a, b in ((once.paper, twice.paper), (once.ours, twice.ours), (once.median, twice.median)):
            assert b.value == pytest.approx(a.value)
            assert b.error == pytest.approx(a.error)

    def test_the_noise_floor_is_that_of_the_difference(self, tmp_path):
        noise = np.array([[3.0, -1.0, 2.0, 0.0], [-2.0, 4.0, 1.0, -3.0]])
        jobs = [Bound(bsi.recipes.digits(), 4, 2, k) for k in (8, None)]
        gap = np.array([[0.25], [0.35]])
        store = self.store(tmp_path, jobs, [noise + gap, noise])
        found, unit = finite_gap(store, *jobs), 2 * math.log(2)
        assert found.value == pytest.approx(0.3 / unit)
        assert found.error == pytest.approx(0.05 / unit)


class TestClaims:
    def test_a_claim_holds_only_beyond_two_standard_errors(self):
        def verdict(value, error):
            return less("a < b", Estimate(0.0, 0.0), Estimate(0.0, 0.0), Estimate(value, error)).verdict

        assert verdict(-0.21, 0.1) == "held"
        assert verdict(-0.19, 0.1) == "undecided"
        assert verdict(0.19, 0.1) == "undecided"
        assert verdict(0.21, 0.1) == "not held"

    def test_errors_of_independent_estimates_add_in_squares(self):
        claim = less("a < b", Estimate(1.0, 0.3), Estimate(2.1, 0.4))
        assert claim.verdict == "held"
        assert less("a < b", Estimate(1.0, 0.3), Estimate(1.9, 0.4)).verdict == "undecided"

    def test_equality_needs_evidence_too(self):
        assert equal("a = b", [("a - b", Estimate(0.001, 0.004))], 0.01).verdict == "held"
        assert equal("a = b", [("a - b", Estimate(0.001, 0.005))], 0.01).verdict == "undecided"
        assert equal("a = b", [("a - b", Estimate(-0.03, 0.005))], 0.01).verdict == "not held"
        assert equal("a = b", [("a - b", Estimate(0.015, 0.005))], 0.01).verdict == "undecided"
        both = [("a - b", Estimate(0.0, 0.001)), ("a - c", Estimate(0.05, 0.001))]
        assert equal("all", both, 0.01).verdict == "not held"

    def test_all_of_many_hold_or_not(self):
        held, unsure = (
            less("", Estimate(0.0, 0.1), Estimate(1.0, 0.1)),
            less("", Estimate(0.0, 1.0), Estimate(1.0, 1.0)),
        )
        broken = less("", Estimate(1.0, 0.1), Estimate(0.0, 0.1))
        assert all_of("x", [held, held]).verdict == "held"
        assert all_of("x", [held, unsure]).verdict == "undecided"
        assert all_of("x", [held, unsure, broken]).verdict == "not held"

    def test_a_table_is_the_same_in_csv_and_markdown(self):
        table = Table("t", ("name", "value"), (("a", Estimate(1.0, 0.1)), ("b", None)))
        assert as_csv([table]) == "table,name,value,value error\nt,a,1.0,0.1\nt,b,,\n"
        assert table.markdown() == "| name | value |\n|---|---|\n| a | 1.00 ± 0.10 |\n| b | – |"

    def test_tables_of_other_columns_are_one_csv(self):
        tables = [Table("t", ("name", "value"), (("a", 1.0),)), Table("u", ("name", "k"), (("b", 8),))]
        rows = list(csv.DictReader(as_csv(tables).splitlines()))
        assert rows == [
            {"table": "t", "name": "a", "value": "1.0", "k": ""},
            {"table": "u", "name": "b", "value": "", "k": "8"},
        ]

    def test_a_claim_says_when_it_rests_on_few_seeds(self):
        claim = less("a < b", Estimate(0.0, 0.1), Estimate(1.0, 0.1))
        words = {0: "", 1: ", for one seed", 2: ", for two seeds", 3: ""}
        for seeds, said in words.items():
            assert claim.said(seeds).startswith(f"a < b: held{said} (")

    @pytest.mark.parametrize(
        ("gaps", "verdict"),
        [
            ((4.0, 1.0, 0.3), "held"),
            ((4.0, 0.0, 0.05), "held"),  # the noise floor is reached
            ((1.0, 1.0, 1.0), "undecided"),  # above, but not converging
            ((0.1, 0.0, 0.0), "undecided"),
            ((4.0, 1.0, -0.5), "not held"),
            ((1.0, 4.0, 0.3), "not held"),
        ],
    )
    def test_a_bound_converges_only_if_it_is_above_and_falls(self, gaps, verdict):
        error = 0.1
        steps = [Estimate(b - a, error) for a, b in itertools.pairwise(gaps)]
        claim = converges([Estimate(gap, error) for gap in gaps], steps, Estimate(gaps[-1] - gaps[0], error))
        assert claim.verdict == verdict

    @pytest.mark.parametrize(
        ("distances", "bits", "verdict"),
        [
            ((-1.0, -1.0), (1.0, 1.0), "not held"),  # better at every k'
            ((-1.0, 1.0), (1.0, 0.0), "held"),
            ((-1.0, 0.0), (1.0, 1.0), "undecided"),  # worse in bits, which says nothing of samples
            ((-1.0, 0.15), (1.0, 1.0), "undecided"),  # worse by less than two standard errors
        ],
    )
    def test_an_advantage_is_refuted_for_each_measure_alone(self, distances, bits, verdict):
        found = {16: {"FID": [Estimate(v, 0.1) for v in distances], "bits/dim": [Estimate(v, 0.1) for v in bits]}}
        assert advantage(found).verdict == verdict

    def test_bars_do_not_end_a_cell(self):
        assert Table("t", ("|mu|",), (("a|b",),)).markdown() == "| \\|mu\\| |\n|---|\n| a\\|b |"

    @pytest.mark.parametrize(
        ("distances", "verdict"),
        [
            ((5.0, 1.0, 4.0), "held"),
            ((5.0, 3.9, 4.0), "undecided"),
            ((3.9, 4.0, 5.0), "undecided"),
            ((1.0, 4.0, 5.0), "not held"),
        ],
    )
    def test_an_intermediate_precision_is_best_or_not_beyond_two_standard_errors(self, distances, verdict, tmp_path):
        store = Store(tmp_path)
        for lambda_0, distance in zip(SMOKE.varied.lambda_0, distances, strict=True):
            (job,) = qualities(SMOKE, initial_precision.networks(SMOKE, lambda_0), min(SMOKE.varied.steps))
            store.write(job, Result({"distance": distance, "error": 0.1}), {})
        assert initial_precision._intermediate(SMOKE, store).verdict == verdict

    def test_precisions_are_compared_seed_by_seed(self, tmp_path):
        """One seed is worse than the other by far more than the precisions differ."""
        store, scale = Store(tmp_path), SMOKE.with_seeds(2)
        low, *between, high = scale.varied.lambda_0
        for lambda_0 in (low, *between, high):
            jobs = qualities(scale, initial_precision.networks(scale, lambda_0), min(scale.varied.steps))
            for seed, job in enumerate(jobs):
                distance = 20.0 + 50 * seed + (0 if lambda_0 in between else 3 + seed)
                store.write(job, Result({"distance": distance, "error": 0.1}), {})
        assert between
        assert initial_precision._intermediate(scale, store).verdict == "held"


class TestJobs:
    def test_a_network_is_named_by_what_decides_its_weights(self):
        recipe = bsi.recipes.digits()
        same = replace(recipe, name="other", every=replace(recipe.every, journal=7), keep=replace(recipe.keep, last=9))
        assert network_name(same) == network_name(recipe)
        others = [
            replace(recipe, seed=1),
            replace(recipe, steps=recipe.steps + 1),
            replace(recipe, parametrization="epsilon"),
            replace(recipe, objective=Objective(weight="edm")),
            replace(recipe, objective=Objective(levels="expected")),
            replace(recipe, data=replace(recipe.data, flips=True)),
        ]
        assert len({network_name(other) for other in (recipe, *others)}) == len(others) + 1

    def test_networks_of_other_objectives_have_other_titles(self):
        objectives = [
            Objective(),
            Objective(levels="expected"),
            Objective(finite_k=4),
            Objective(weight="edm"),
            Objective(weight="sigmoid"),
            Objective(weight="sigmoid", bias=1.0),
        ]
        titles = {title(Train(replace(bsi.recipes.digits(), objective=objective))) for objective in objectives}
        assert len(titles) == len(objectives)

    def test_a_record_of_other_settings_is_refused_even_under_the_right_name(self, tmp_path):
        """A name leaves out defaults; the record does not, and tells when a default has changed since."""
        store, job = Store(tmp_path), Bound(bsi.recipes.digits(), 4, 2)
        store.write(job, Result({"bits_per_dim": 1.0}), {})
        assert store.read(job).values == {"bits_per_dim": 1.0}
        path = store.record(job)
        record = json.loads(path.read_text())
        record["job"]["recipe"]["optimizer"]["beta_2"] = 0.5
        path.write_text(json.dumps(record))
        with pytest.raises(DataError, match="another network, with other defaults"):
            store.read(job)

    def test_a_measurement_is_named_by_its_network_and_settings(self):
        recipe = bsi.recipes.digits()
        jobs = [
            Train(recipe),
            Bound(recipe, 4, 2),
            Bound(recipe, 4, 2, 16),
            Quality(recipe, "fd-digits", 10, 4),
            Quality(recipe, "fd-digits", 10, 4, seed=1),
            Quality(replace(recipe, seed=1), "fd-digits", 10, 4),
        ]
        assert len({name_of(job) for job in jobs}) == len(jobs)

    @pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)
    def test_jobs_are_planned_once_and_networks_before_their_measurements(self, scale, tmp_path):
        planned = plan(list(STUDIES.values()), scale, Store(tmp_path))
        assert len({name_of(p.job) for p in planned}) == len(planned)
        trained = set()
        for p in planned:
            if isinstance(p.job, Train):
                trained.add(network_name(p.job.network))
            assert network_name(p.job.network) in trained

    def test_nothing_is_begun_that_would_not_end_in_time_but_training_which_saves(self):
        recipe = bsi.recipes.digits()
        _begin(Planned(Bound(recipe, 4, 2), "study", 50.0, False), Deadline.after(1.0), 1)
        with pytest.raises(Preempted, match="1 jobs of study are left"):
            _begin(Planned(Bound(recipe, 4, 2), "study", 70.0, False), Deadline.after(1.0), 1)
        _begin(Planned(Train(recipe), "study", 7000.0, False), Deadline.after(2.0), 1)
        with pytest.raises(Preempted):
            _begin(Planned(Train(recipe), "study", 7000.0, False), Deadline.after(0.5), 1)

    @pytest.mark.parametrize(("status", "told"), [("", "abc"), (" M runner.py", "abc with changes")])
    def test_a_commit_is_marked_where_the_code_has_changed_since(self, status, told, monkeypatch):
        answers = {"describe": "abc\n", "status": status}
        monkeypatch.setattr(
            "bsi.studies.runner.subprocess.run", lambda words, **_: SimpleNamespace(stdout=answers[words[1]])
        )
        assert commit() == told

    def test_jobs_of_the_scale_mini_end_in_nine_minutes(self, tmp_path):
        for p in plan(list(STUDIES.values()), MINI, Store(tmp_path)):
            assert p.seconds < 9 * 60, p
            if isinstance(p.job, Train):
                assert p.seconds - MINI.speed.startup_s < 240, p

    def test_the_scale_smoke_ends_in_fifteen_minutes(self, tmp_path):
        planned = plan(list(STUDIES.values()), SMOKE, Store(tmp_path))
        assert sum(p.seconds for p in planned) < 15 * 60
        assert max(p.seconds for p in planned if isinstance(p.job, Train)) < 30

    def test_the_commands_of_the_paper_train_its_networks(self, tmp_path):
        store = Store(tmp_path)
        planned = plan(list(STUDIES.values()), PAPER, store)
        text = plan_text(planned, PAPER, store)
        assert "torchrun --nproc-per-node 4 -m bsi train imagenet32-dit-l2" in text
        assert text.splitlines()[-1].startswith("not yet run: ")
        assert text.splitlines()[1].split()[:2] == ["328", "h"]  # the paper's 6100 steps per hour
        assert "nothing to train or measure" in plan_text([], PAPER, store)
        for p in planned:
            if isinstance(p.job, Train):
                words = train_command(p.job.network, store).split()
                args, _ = parse(words[words.index("train") + 1 :])
                assert network_name(args.recipe) == network_name(p.job.network)
                assert args.options.out == store.network(p.job.network)

    def test_figures_of_the_paper_have_its_datasets_and_steps(self):
        def data(name):
            return {job.network.data.name for job in STUDIES[name].measures(PAPER)}

        assert data("fid-convergence") == {"imagenet64"}
        assert data("importance-sampling") == {"cifar10"}
        assert data("elbo-convergence") == data("proposal") == data("initial-precision") == {"imagenet32"}
        assert {job.steps for job in STUDIES["initial-precision"].measures(PAPER) if isinstance(job, Quality)} == {
            16, 64, 256, 1024,
        }  # fmt: skip

    def test_the_paper_has_three_seeds_and_both_budgets_of_cifar10(self, tmp_path):
        trained = [
            p.job.network for p in plan([STUDIES["comparison"]], PAPER, Store(tmp_path)) if isinstance(p.job, Train)
        ]
        assert sorted(r.seed for r in trained if r.data.name == "imagenet64") == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert {r.steps for r in trained if r.data.name == "cifar10"} == {5_000_000, 10_000_000}

    def test_the_networks_of_parameter_studies_at_mini_train_half_as_long_and_average_in_proportion(self):
        usual, short = MINI.profiled("bsi"), MINI.parameter_recipe("bsi")
        assert (2 * short.steps, 2 * short.optimizer.warmup, 2 * short.ema.start) == (
            usual.steps, usual.optimizer.warmup, usual.ema.start
        )  # fmt: skip
        assert 1 - short.ema.beta == pytest.approx(2 * (1 - usual.ema.beta))


class TestNumbers:
    def test_the_gaussian_gap_is_the_known_one(self):
        """Golden values of unit-Gaussian data, BSI(1e-2, 1e6), in nats: L_M^inf 6.912594."""
        known = {16: 12.44657, 64: 7.92753, 1024: 6.97065}
        found = gaussian_gap(bsi.BSI(), torch.ones(3, dtype=torch.float64), list(known))
        assert found == pytest.approx([(value - 6.912594) / math.log(2) for value in known.values()], abs=2e-5)

    def test_two_proposals_are_judged_on_the_same_resampled_images(self):
        """Spreads that rise and fall together leave a difference without an error."""
        generator, level = np.random.default_rng(0), np.geomspace(1e-2, 1e6, 33)
        errors, both = generator.uniform(0.5, 1.5, (33, 50)) / level[:, None], LogUniform(1e-2, 1e6)
        a = resampled(relative_spread, level, errors, both)
        b = resampled(lambda *given: relative_spread(*given) + 1.0, level, errors, both)
        assert a.estimate.error > 0
        assert (b - a).estimate.value == pytest.approx(1.0)
        assert (b - a).estimate.error < 1e-12

    def test_no_spread_is_left_where_the_errors_follow_the_proposal(self):
        level = LogUniform(1e-2, 1e6).icdf(torch.linspace(0, 1, 401, dtype=torch.float64)).numpy()
        errors = np.repeat(1 / level[:, None], 4, axis=1)
        spread = {name: relative_spread(level, errors, p) for name, p in proposals(level, errors).items()}
        assert spread["log-uniform"] == pytest.approx(0, abs=1e-3)
        assert spread["fitted"] == pytest.approx(0, abs=1e-3)
        assert spread["uniform"] > 100

    def test_the_fitted_proposal_has_the_least_spread(self):
        generator = np.random.default_rng(0)
        level = LogUniform(1e-2, 1e6).icdf(torch.linspace(0, 1, 401, dtype=torch.float64)).numpy()
        shape = np.exp(-0.5 * ((np.log(level) - 4) / 3) ** 2) + 0.1
        errors = (shape / level)[:, None] * generator.uniform(0.5, 1.5, (401, 200))
        spread = {name: relative_spread(level, errors, p) for name, p in proposals(level, errors).items()}
        assert min(spread, key=spread.__getitem__) == "fitted"

    def test_the_corners_of_the_cube_are_bsi_and_bfn(self):
        bsi_method, bfn_like = (corner.method(BSI()) for corner in (disentangle.CORNERS[0], disentangle.CORNERS[-1]))
        assert bsi_method == bsi.BSI()
        bfn, level = bsi.BFN(), torch.logspace(0, 5, 20, dtype=torch.float64)
        for ours, theirs in zip(vars(bfn_like.encoder(level)).values(), vars(bfn.encoder(level)).values(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12)
        assert bfn_like.prior(torch.ones(1, 1)).item() == 0

    def test_each_factor_changes_one_thing(self):
        for corner in disentangle.CORNERS:
            method = corner.method(BSI())
            assert method.c == pytest.approx(1e-2 if corner.hyper_prior else 0.0)
            assert method.levels.low == (1e-2 if corner.offset else 1.0)
        assert len({corner.name for corner in disentangle.CORNERS}) == 8

    def test_an_error_of_the_noise_has_no_finite_mean_square_over_levels(self):
        """Near t = 0 the sample's squared error grows like t^-1, with a hyper-prior like t^-2; BSI's is bounded."""
        t = torch.tensor([1e-9, 1e-8], dtype=torch.float64)
        for corner in disentangle.CORNERS:
            method = corner.method(BSI())
            form = COEFFICIENTS["edm" if corner.preconditioning else "epsilon"]
            small, large = form(method.encoder(method.levels.icdf(t)), 1.0).c_out.square().log10().tolist()
            power = 0 if corner.preconditioning else -2 if corner.hyper_prior else -1
            assert large - small == pytest.approx(power, abs=1e-3)

    def test_values_that_others_report_stand_beside_ours(self, tmp_path):
        """CIFAR-10 at 10M steps: VDM's value is its authors', BSI's is measured."""
        store, group = Store(tmp_path), PAPER.comparisons[2]
        (job,) = bounds(PAPER, comparison.networks(group, "bsi"))
        store.write(job, Result({"bits_per_dim": 2.641, "monte_carlo_error": 0.001}), {})
        table = comparison.table_of(PAPER, store, group, (1024,), comparison.printed(group.recipe("bsi")), 1024)
        assert table.rows == (("VDM", None, None, "2.65"), ("BSI", 1, Estimate(2.641, 0.001), "2.64"))

    def test_the_papers_values_on_other_data_are_the_printed_ones(self):
        assert comparison.elsewhere().rows == (
            ("BFN", "3.222 ± 0.006", "38.2 ± 0.8", "2.66", None),
            ("VDM", "3.228 ± 0.006", "35.2 ± 0.7", None, "2.65"),
            ("BSI", "3.218 ± 0.004", "30.1 ± 0.4", "2.65", "2.64"),
        )

    def test_distances_are_told_only_where_there_are_levels(self, tmp_path):
        """The digits' levels end at 1e4."""
        store, level = Store(tmp_path), np.geomspace(1e-2, 1e4, 33)
        distance = np.repeat(1 / (1 + level)[:, None], 3, axis=1) * np.array([0.9, 1.0, 1.1])
        store.write(proposal.profile(SMOKE), Result({}, {"level": level, "distance": distance}), {})
        (table,) = proposal.STUDY.report(SMOKE, store).tables
        assert [row[0] for row in table.rows] == [1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3, 1e4]

    @pytest.mark.parametrize("study", [noise_levels.STUDY, illustration.STUDY], ids=lambda study: study.name)
    def test_what_needs_no_training_holds(self, study, tmp_path):
        found = study.report(SMOKE, Store(tmp_path))
        assert [claim.verdict for claim in found.claims] == ["held"] * len(found.claims)
        assert found.claims


class TestMeasurements:
    def test_the_decoders_precision_is_a_multiple_of_alpha_m_and_draws_are_averaged(self, tmp_path):
        model, dataset = bsi.load("digits"), open_dataset("digits")
        laboratory = Laboratory(SMOKE, dataset, torch.device("cpu"), tmp_path)
        job = Reconstruction(bsi.recipes.digits(), recon=2, factors=(0.01, 2.0))
        found = laboratory.measure(job, model, Deadline()).values["reconstruction"]
        x, ids = model.values(torch.as_tensor(dataset.split("test")[:])), torch.arange(len(dataset.split("test")))
        for factor, bits in zip(job.factors, found, strict=True):
            method = replace(model.method, alpha_R=factor * model.method.alpha_M)
            noise = [standard_normal(1, ids, draw, model.shape) for draw in (0, 1)]
            with torch.no_grad():
                nats = [reconstruction_loss(method, model.denoiser, x, eps, model.bins).mean() for eps in noise]
            assert bits == pytest.approx(float(sum(nats)) / 2 / (64 * math.log(2)), rel=1e-4)

    def test_a_profile_has_how_far_a_prediction_is_from_its_latent_in_units_of_it(self, tmp_path):
        model, dataset = bsi.load("digits"), open_dataset("digits")
        laboratory = Laboratory(SMOKE, dataset, torch.device("cpu"), tmp_path)
        found = laboratory.measure(Profile(bsi.recipes.digits(), levels=3, images=2), model, Deadline()).arrays
        ids, level = torch.tensor([0, len(dataset.split("test")) // 2]), torch.from_numpy(found["level"])[1].expand(2)
        x = model.values(torch.as_tensor(dataset.split("test")[ids.numpy()]))
        psi = model.method.encoder(level).encode(x, standard_normal(2, ids, 0, model.shape))
        with torch.no_grad():
            apart = (psi - model.denoiser(psi, level)).flatten(1).norm(dim=1) / psi.flatten(1).norm(dim=1)
        assert found["distance"][1].tolist() == pytest.approx(apart.tolist(), rel=1e-4)


class TestFigures:
    def test_images_lie_side_by_side_row_by_row(self):
        images = np.arange(3, dtype=np.uint8)[:, None, None, None] * np.ones((1, 1, 2, 3), dtype=np.uint8)
        sheet = figures.tile(images, columns=2)
        assert sheet.shape == (5, 7, 3)
        assert sheet[::3, ::4, 0].tolist() == [[0, 1], [2, 255]], "on white"
        assert (sheet[2] == 255).all()
        assert (sheet[:, 3] == 255).all()

    @pytest.mark.parametrize(("scale", "ends"), [("linear", (2, 3, 900)), ("log", (10, 11, 12))])
    def test_labels_of_lines_keep_apart_and_above_the_axis(self, scale, ends):
        pytest.importorskip("matplotlib")
        with figures.style():
            figure, (axes,) = figures.panels(1)
            axes.set_yscale(scale)
            axes.set_ylim(1, 1000)
            figures.label_ends(axes, [figures.Named(0.5, y, str(y), "black") for y in ends])
        points, bottom = 72 / figure.dpi, axes.get_window_extent().y0
        places = [(axes.transData.transform(text.xy)[1] - bottom) * points + text.xyann[1] for text in axes.texts]
        assert min(np.diff(sorted(places))) > 10.99
        assert min(places) > 5.4

    @pytest.mark.parametrize("second", [(0.5, 0.52), (0.35, 0.5), (0.95, 0.5), (0.65, 0.45)])
    def test_words_beside_points_hide_neither_points_nor_words(self, second):
        pytest.importorskip("matplotlib")
        points = [figures.Named(x, y, "some words", "black") for x, y in ((0.5, 0.5), second)]
        with figures.style():
            figure, (axes,) = figures.panels(1)
            figure.draw_without_rendering()
            figures.label_points(axes, points)
        boxes = [words.get_window_extent() for words in axes.texts]
        assert len(boxes) == 2
        assert not boxes[0].overlaps(boxes[1])
        for box in boxes:
            assert not box.count_contains([axes.transData.transform((end.x, end.y)) for end in points])
            assert axes.get_window_extent().x0 <= box.x0 < box.x1 <= axes.get_window_extent().x1

    def test_files_do_not_tell_when_or_by_what_they_were_drawn(self, tmp_path):
        pytest.importorskip("matplotlib")
        with figures.style():
            figures.save(figures.panels(1)[0], tmp_path)
        drawn = (tmp_path / "figure.svg").read_text("utf-8")
        assert "dc:date" not in drawn
        assert "Matplotlib v" not in drawn
        assert b"Software" not in (tmp_path / "figure.png").read_bytes()


class TestPublished:
    DOCS = Path(__file__).parents[1] / "docs"

    def test_the_page_of_results_is_made_of_the_results(self):
        assert (self.DOCS / "results.md").read_text("utf-8") == page(self.DOCS / "results")

    def test_the_table_of_claims_counts_those_of_the_sections(self):
        """Each verdict as often as in the section that the cell leads to; where there is no section, none."""
        text = (self.DOCS / "results.md").read_text("utf-8")
        rows = re.findall(r"^\| \[([a-z-]+)\]\(#\1\) \|.*$", text, re.M)
        assert rows == list(STUDIES)
        for section in re.split(r"^### ", text, flags=re.M)[1:]:
            name, scale = re.match(r"([a-z-]+), (\w+)", section).groups()
            row = next(line for line in text.splitlines() if line.startswith(f"| [{name}]"))
            said = Counter(re.findall(r"^- .*: \*\*(held|not held|undecided)\b", section, re.M))
            if "Not yet run" in section and scale != "smoke":
                assert f"#{name}-{scale})" not in row
            elif scale != "smoke" or name == "illustration":
                cell = re.search(rf"\[([^\]]*)\]\(#{name}-{scale}\)", row).group(1)
                found = re.findall(r"(\d+) (held|not held|undecided)", cell)
                assert {verdict: int(count) for count, verdict in found} == said
                seeds = re.search(r"^- .*: \*\*[a-z ]+(, for \w+ seeds?)?\*\*", section, re.M)
                assert cell.endswith((seeds and seeds.group(1)) or ""), "what hangs on a seed says so here too"

    def test_figures_are_small_and_name_no_machine(self):
        for path in (self.DOCS / "results").iterdir():
            most = 500_000 if path.name.startswith("samples-") else 150_000  # photographs hardly compress
            assert path.stat().st_size < most, path
            if path.suffix == ".json":
                found = json.loads(path.read_text())
                assert "command" not in found["about"]
                assert "commands" not in found
                assert found["study"] in STUDIES
                assert found["scale"] in SCALES
