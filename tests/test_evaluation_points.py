"""Where the bound is evaluated, and what independent replicates say about its error."""

import math

import pytest
import torch
from scipy import stats

from bsi.errors import UsageError
from bsi.evaluation.basis import KNOTS
from bsi.evaluation.plan import FEWEST
from bsi.evaluation.points import ENOUGH, Design, Pilot, Spread, noise, spread
from repetitions import repeat

IDS = torch.arange(60)


@pytest.mark.parametrize(
    ("count", "measure", "sizes"),
    [(10_000, 5, (3, 2)), (10_000, 2, (1, 1)), (10_000, 20, (10, 10)), (1, 5, (3, 2)), (1, 100, (4,) * 25)],
)
def test_levels_are_dealt_to_at_least_two_replicates(count, measure, sizes):
    assert Design(count, measure).sizes == sizes


def test_levels_are_equally_spaced_within_each_sample():
    design = Design(60, 7)
    for replicate, m in enumerate(design.sizes):
        t = design.t(IDS, replicate)
        torch.testing.assert_close(torch.diff(t, dim=0), torch.full((m - 1, 60), 1 / m, dtype=torch.float64))
        assert float(t.min()) >= 0
        assert float(t.max()) < 1


def test_levels_are_equally_spaced_over_each_block():
    design = Design(61, 5, seed=3)
    ids = torch.arange(61)
    block = design.block(ids)
    assert set(torch.bincount(block).tolist()) <= {4, 5}
    for b in range(design.blocks):
        t = torch.sort(design.t(ids[block == b], 0).flatten()).values
        torch.testing.assert_close(torch.diff(t), torch.full_like(t[1:], 1 / len(t)))


def test_stages_are_whole_blocks_and_grow_with_what_was_learned():
    design = Design(1000, 5)
    parts = design.stages(256)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(1000))
    blocks = [set(design.block(part).tolist()) for part in parts]
    assert sum(len(each) for each in blocks) == design.blocks
    learned = 256
    for part, each in zip(parts[:-1], blocks, strict=False):
        assert len(each) == 1 or len(part) * 5 <= learned / 4 + 5 * len(each)
        learned += 5 * len(part)
    assert len(parts[-2]) > 2 * len(parts[0])


def test_who_has_learned_enough_or_nothing_to_learn_goes_in_one_stage():
    (part,) = Design(61, 5).stages(ENOUGH)
    assert torch.equal(part, torch.arange(61))
    parts = Design(100_000, 5).stages(2048)
    assert len(parts) == 2
    assert 5 * len(parts[0]) > ENOUGH - 2048


def test_each_level_is_uniform():
    t = torch.stack([Design(60, 5, seed).t(IDS, 1)[:, 17] for seed in range(300)])
    for column in t.T:
        assert stats.kstest((2 * column) % 1, "uniform").pvalue > 1e-4  # which half is settled by j, the rest by chance


def test_a_shift_has_53_bits():
    shift = Design(4, 1).t(torch.arange(1), 0).item()
    assert (shift * 2**53).is_integer()
    assert not (shift * 2**40).is_integer()


def test_replicates_rounds_blocks_and_seeds_have_shifts_of_their_own():
    def shifts(i: int, replicate: int, turn: int, first: int = 0) -> list[float]:
        designs = [Design(4096, 4, seed) for seed in range(first, first + 100)]
        return [float(design.t(torch.tensor([i]), replicate, turn)[0, 0] * 2 % 1) for design in designs]

    base = shifts(0, 0, 0)
    for other in (shifts(0, 1, 0), shifts(0, 0, 1), shifts(200, 0, 0), shifts(0, 0, 0, first=1)):
        assert abs(stats.pearsonr(base, other).statistic) < 4 / math.sqrt(100)


def test_levels_and_noise_do_not_depend_on_the_batch():
    design, some = Design(60, 5, 1), torch.tensor([3, 41, 59])
    assert torch.equal(design.t(IDS, 0, 2)[:, some], design.t(some, 0, 2))
    whole = noise(1, IDS, "measure", 4, (3, 2), torch.float32)
    assert torch.equal(whole[some], noise(1, some, "measure", 4, (3, 2), torch.float32))


def test_noise_of_different_kinds_is_independent():
    kinds = [noise(0, IDS, kind, 0, (50,), torch.float32).flatten() for kind in ("measure", "recon", "pilot")]
    correlation = torch.corrcoef(torch.stack(kinds)) - torch.eye(3)
    assert float(correlation.abs().max()) < 4 / math.sqrt(3000)


@pytest.mark.parametrize(("power", "ratio"), [(1, 1.0), (3, 81 / 70)])
def test_the_variance_of_unequal_replicates_is_right_for_noise_and_careful_for_strata(power, ratio):
    """Replicates of 3 and 2 levels: Var = 1 / m for noise; 1 / m^3 for strata, where the estimate is larger."""
    sizes, generator = torch.tensor([3, 2]), torch.Generator().manual_seed(0)
    error = torch.randn(2, 40_000, generator=generator, dtype=torch.float64) * (sizes[:, None] ** (-power / 2))
    found = spread(error, sizes, torch.arange(40_000) // 8)
    true = 0.36 / 3**power + 0.16 / 2**power
    for claimed, variances in ((float(found.sample_variance.mean()), 40_000), (found.sum_variance / 40_000, 5000)):
        assert claimed / true == pytest.approx(ratio, abs=4 * ratio * math.sqrt(2 / variances))


def test_block_sums_see_errors_that_cancel():
    error = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    found = spread(error, torch.tensor([1, 1]), torch.tensor([0, 0]))
    assert found.sample_variance.tolist() == [1.0, 1.0]
    assert found.sum_variance == 0


def test_degrees_of_freedom_add_over_blocks():
    generator = torch.Generator().manual_seed(1)
    many = [
        spread(torch.randn(2, 32, generator=generator, dtype=torch.float64), torch.tensor([1, 1]), torch.arange(32))
        for _ in range(200)
    ]
    found = torch.tensor([Spread.degrees_of_freedom(each) for each in many])
    assert float(found.mean()) == pytest.approx(32, abs=4 * float(found.std()) / math.sqrt(200) + 2)
    one = Spread(torch.zeros(1).double(), torch.ones(1).double(), torch.ones(1).double(), freedom=7)
    assert Spread.degrees_of_freedom(one) == pytest.approx(7)


def test_a_pilot_covers_samples_and_levels():
    for count in (7, 1000):
        pilot = Pilot(count, 128)
        members = torch.arange(pilot.samples)
        t = torch.cat([pilot.t(members, draw) for draw in range(pilot.draws)])
        assert 256 <= pilot.evaluations <= 2 * (128 + count)
        assert count - count // pilot.samples <= int(pilot.ids(members).max()) + 1 <= count, "from first to last"
        assert len(set(pilot.ids(members).tolist())) == pilot.samples
        assert float(torch.diff(torch.sort(t).values).max()) < 3 / len(t)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 31, 127])
def test_a_pilot_of_few_samples_leaves_no_knot_unseen(count):
    """Each knot is told of by what lies between its neighbors, and the regression asks for the average there."""

    def knots_seen(seed: int) -> int:
        pilot = Pilot(count, FEWEST // 2, seed)
        members = torch.arange(pilot.samples)
        t = torch.cat([pilot.t(members, draw) for draw in range(pilot.draws)])
        return len(set((t * (KNOTS - 1)).long().tolist()))

    assert set(repeat(knots_seen, range(50))) == {KNOTS - 1}


def test_a_design_needs_samples_and_levels():
    for count, measure in ((0, 5), (5, 0)):
        with pytest.raises(UsageError, match="samples and levels"):
            Design(count, measure)
