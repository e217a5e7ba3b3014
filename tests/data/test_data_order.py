"""The order of samples is a pure function of the seed and the count, and a fair one; batches fall into whole shards."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bsi.errors import UsageError
from bsi.recipes import digits
from bsi.rng import coins, sample_ids
from bsi.training.stream import shards_of

seeds = st.integers(0, 2**64 - 1)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, n=st.integers(1, 3000), epoch=st.integers(0, 10**9))
def test_every_epoch_visits_every_sample_exactly_once(seed: int, n: int, epoch: int) -> None:
    ids = sample_ids(seed, n, epoch * n, n)
    assert np.array_equal(np.sort(ids), np.arange(n))


@settings(max_examples=25, deadline=None)
@given(
    seed=seeds, n=st.integers(1, 10**12), start=st.integers(0, 10**15), cuts=st.lists(st.integers(0, 50), max_size=6)
)
def test_the_order_does_not_depend_on_how_the_stream_is_cut(seed: int, n: int, start: int, cuts: list[int]) -> None:
    whole = sample_ids(seed, n, start, sum(cuts))
    starts = start + np.cumsum([0, *cuts])
    pieces = [sample_ids(seed, n, int(first), count) for first, count in zip(starts, cuts, strict=False)]
    assert np.array_equal(whole, np.concatenate([np.empty(0, np.int64), *pieces]))
    assert ((whole >= 0) & (whole < n)).all()


@settings(max_examples=15, deadline=None)
@given(seed=seeds, n=st.integers(2**40, 2**61), start=st.integers(0, 2**40))
def test_the_order_of_a_set_too_large_to_list_has_no_repetition(seed: int, n: int, start: int) -> None:
    count = min(500, n - start % n)
    assert len(np.unique(sample_ids(seed, n, start, count))) == count


def test_the_order_is_the_one_of_the_first_release() -> None:
    """A run must go on in the same order under any later version: these values are fixed for good."""
    assert sample_ids(0, 50000, 0, 6).tolist() == [1483, 13803, 10809, 8285, 32512, 41129]
    assert sample_ids(2**64 - 1, 7, 70, 7).tolist() == [1, 6, 2, 4, 5, 0, 3]
    assert coins(0, 0, 12).astype(int).tolist() == [1, 0, 1, 0, 1, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_all_orders_of_a_small_set_are_equally_frequent(n: int) -> None:
    epochs = 10_000
    orders = sample_ids(11, n, 0, n * epochs).reshape(epochs, n)
    _, counts = np.unique((orders * n ** np.arange(n)).sum(1), return_counts=True)
    counts = np.pad(counts, (0, math.factorial(n) - len(counts)))
    assert stats.chisquare(counts).pvalue > 1e-3


def test_every_position_of_an_epoch_is_uniform_and_neighbors_are_unrelated() -> None:
    n, epochs = 200, 800
    orders = sample_ids(5, n, 0, n * epochs).reshape(epochs, n)
    for position in (0, n // 2, n - 1):
        assert stats.chisquare(np.bincount(orders[:, position], minlength=n)).pvalue > 1e-4
    steps = (orders[:, 1:] - orders[:, :-1]) % n
    assert stats.chisquare(np.bincount(steps.ravel(), minlength=n)[1:]).pvalue > 1e-4
    # Two independent permutations agree in a number of places that is Poisson with mean one.
    agreements = (orders[1:] == orders[:-1]).sum(1)
    assert abs(agreements.mean() - 1) < 4 / math.sqrt(epochs)


def test_coins_are_fair_and_depend_on_seed_and_position_alone() -> None:
    n = 40_000
    a, b = coins(1, 0, n), coins(2, 0, n)
    assert np.array_equal(a[100:200], coins(1, 100, 100))
    for sample in (a, b, a ^ b, a[1:] ^ a[:-1]):
        assert abs(sample.mean() - 0.5) < 4 * 0.5 / math.sqrt(n)


@pytest.mark.parametrize(("n", "start", "count"), [(0, 0, 1), (-3, 0, 1), (5, -1, 1), (5, 0, -1), (5, 2**62, 1)])
def test_impossible_positions_are_refused(n: int, start: int, count: int) -> None:
    with pytest.raises(UsageError, match="got"):
        sample_ids(0, n, start, count)


@settings(max_examples=60, deadline=None)
@given(batch=st.integers(1, 600), world=st.integers(1, 9), accumulation=st.integers(1, 5), most=st.integers(1, 70))
def test_a_batch_is_accepted_exactly_when_every_rank_and_piece_gets_whole_shards(
    batch: int, world: int, accumulation: int, most: int
) -> None:
    recipe = replace(digits(), batch=batch, accumulation=accumulation, virtual_shards=most)
    shards = recipe.shards
    assert batch % shards == 0
    if shards % (world * accumulation):
        with pytest.raises(UsageError, match="Use 1"):
            recipe.check(world)
    else:
        recipe.check(world)
        assert [s for rank in range(world) for s in shards_of(rank, world, shards)] == list(range(shards))
