"""The order of samples is a pure function of seed and count, and a batch depends on its ids alone."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.utils.data import Dataset

from bsi.data import batches
from bsi.data.batches import ResidentSource, ahead, as_source, flip, windows
from bsi.errors import DataError, UsageError
from bsi.recipes import digits
from bsi.rng import coins, sample_ids
from bsi.training.step import shards_of

# ---- Order -----------------------------------------------------------------------------------------------------------

seeds = st.integers(0, 2**64 - 1)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, n=st.one_of(st.integers(1, 3000), st.integers(2**40, 2**61)), epoch=st.integers(0, 10**9))
def test_every_epoch_visits_every_sample_exactly_once(seed: int, n: int, epoch: int) -> None:
    epoch = min(epoch, 2**61 // n)
    ids = sample_ids(seed, n, epoch * n, min(n, 3000))
    assert len(np.unique(ids)) == len(ids)
    assert ((ids >= 0) & (ids < n)).all()


@settings(max_examples=25, deadline=None)
@given(
    seed=seeds, n=st.integers(1, 10**12), start=st.integers(0, 10**15), cuts=st.lists(st.integers(0, 50), max_size=6)
)
def test_the_order_does_not_depend_on_the_batch_size(seed: int, n: int, start: int, cuts: list[int]) -> None:
    whole = sample_ids(seed, n, start, sum(cuts))
    starts = start + np.cumsum([0, *cuts])
    pieces = [sample_ids(seed, n, int(first), count) for first, count in zip(starts, cuts, strict=False)]
    assert np.array_equal(whole, np.concatenate([np.empty(0, np.int64), *pieces]))
    assert ((whole >= 0) & (whole < n)).all()


def test_the_order_is_that_of_the_first_release() -> None:
    """Later versions must resume a run in the same order: these values must never change."""
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


def test_every_position_of_an_epoch_is_uniform_and_independent_of_its_neighbors() -> None:
    n, epochs = 200, 800
    orders = sample_ids(5, n, 0, n * epochs).reshape(epochs, n)
    for position in (0, n // 2, n - 1):
        assert stats.chisquare(np.bincount(orders[:, position], minlength=n)).pvalue > 1e-4
    steps = (orders[:, 1:] - orders[:, :-1]) % n
    assert stats.chisquare(np.bincount(steps.ravel(), minlength=n)[1:]).pvalue > 1e-4
    # Two independent permutations agree in a number of places that is Poisson with mean one.
    agreements = (orders[1:] == orders[:-1]).sum(1)
    assert abs(agreements.mean() - 1) < 4 / math.sqrt(epochs)


def test_random_flips_are_fair_and_depend_on_seed_and_position_only() -> None:
    n = 40_000
    a, b = coins(1, 0, n), coins(2, 0, n)
    assert np.array_equal(a[100:200], coins(1, 100, 100))
    for sample in (a, b, a ^ b, a[1:] ^ a[:-1]):
        assert abs(sample.mean() - 0.5) < 4 * 0.5 / math.sqrt(n)


@pytest.mark.parametrize(("n", "start", "count"), [(0, 0, 1), (-3, 0, 1), (5, -1, 1), (5, 0, -1), (5, 2**62, 1)])
def test_invalid_positions_are_rejected(n: int, start: int, count: int) -> None:
    with pytest.raises(UsageError, match="got"):
        sample_ids(0, n, start, count)


@settings(max_examples=60, deadline=None)
@given(batch=st.integers(1, 600), world=st.integers(1, 9), accumulation=st.integers(1, 5), most=st.integers(1, 70))
def test_a_batch_is_accepted_exactly_when_every_rank_and_piece_gets_whole_shards(batch, world, accumulation, most):
    recipe = replace(digits(), batch=batch, accumulation=accumulation, virtual_shards=most)
    shards = recipe.shards
    assert batch % shards == 0
    if shards % (world * accumulation):
        with pytest.raises(UsageError, match="Use 1"):
            recipe.check(world)
    else:
        recipe.check(world)
        assert [s for rank in range(world) for s in shards_of(rank, world, shards)] == list(range(shards))


# ---- Batches ---------------------------------------------------------------------------------------------------------


class Pairs(Dataset):
    """A map-style Dataset as users write them: (sample, label)."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.data[index], index


@pytest.fixture
def images(tmp_path: Path) -> np.ndarray:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 256, (50, 3, 4, 4), dtype=np.uint8))
    return np.load(tmp_path / "x.npy", mmap_mode="r")


def test_every_kind_of_source_gives_the_same_batch(images: np.ndarray) -> None:
    ids = sample_ids(seed=3, n=50, start=17, count=120)
    expected = torch.from_numpy(np.array(images))[torch.from_numpy(ids)]
    tensor = torch.from_numpy(np.array(images))
    sources = [as_source(data) for data in (images, np.array(images), tensor, Pairs(tensor), ResidentSource(tensor))]
    for source in (*sources, as_source(Pairs(tensor), workers=1), as_source(Pairs(tensor), workers=3)):
        assert len(source) == 50
        assert torch.equal(source.take(ids), expected)


def test_batches_fetched_ahead_come_in_order(images: np.ndarray) -> None:
    source = as_source(images)
    for number in (0, 1, 10):
        ids = [sample_ids(0, 50, 8 * i, 8) for i in range(number)]
        for found, batch in zip(ahead(source, ids), ids, strict=True):
            assert torch.equal(found, source.take(batch))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_dataset_kept_on_the_device_gives_the_same_batches(images, monkeypatch):
    ids = sample_ids(0, 50, 0, 32)
    expected = as_source(images).take(ids)
    resident = as_source(images, "cuda")
    assert isinstance(resident, ResidentSource)
    monkeypatch.setattr(batches, "RESIDENT_PART", 0.0)
    mapped = as_source(images, "cuda")
    assert not isinstance(mapped, ResidentSource)
    for source in (resident, mapped, as_source(Pairs(torch.from_numpy(np.array(images))), "cuda")):
        batch = source.take(ids)
        assert batch.device.type == "cuda"
        assert torch.equal(batch.cpu(), expected)
        assert torch.equal(flip(batch, 1, 5).cpu(), flip(expected, 1, 5))


def test_a_batch_is_a_copy_with_a_supported_integer_type() -> None:
    for kind, expected in ((np.uint8, torch.uint8), (np.uint16, torch.int32)):
        array = np.array([[1], [255]], kind)
        batch = as_source(array).take(np.array([1, 0, 0]))
        assert (batch.dtype, batch.tolist()) == (expected, [[255], [1], [1]])
        batch.zero_()
        assert array.all()


def test_a_flip_is_a_function_of_seed_and_position() -> None:
    x = torch.arange(2 * 3 * 4.0).view(2, 3, 4).repeat(30, 1, 1)
    flipped = flip(x, seed=1, start=100)
    heads = coins(1, 100, 60)
    assert 10 < heads.sum() < 50
    for i, head in enumerate(heads):
        assert torch.equal(flipped[i], x[i].flip(-1) if head else x[i])
    assert torch.equal(flip(x[20:], seed=1, start=120), flipped[20:])


def test_unsupported_sources_are_rejected_with_the_supported_ones() -> None:
    for wrong in (3, [1, 2], {"a": 1}, "train", None):
        with pytest.raises(UsageError, match="tensor"):
            as_source(wrong)
    for empty in (torch.empty(0, 3), np.empty((0, 3)), torch.tensor(3.0)):
        with pytest.raises(DataError, match="at least one"):
            as_source(empty)

    class Names(Pairs):
        def __getitem__(self, index: int) -> str:
            return "name"

    with pytest.raises(DataError, match="sample 2 of Names is a str"):
        as_source(Names(torch.zeros(4))).take(np.array([2]))


@pytest.mark.parametrize("odd", [torch.zeros(5), torch.zeros(4, dtype=torch.float64)], ids=["shape", "type"])
def test_samples_of_different_shapes_or_types_are_rejected_by_number(odd: torch.Tensor) -> None:
    class Ragged(Pairs):
        def __getitem__(self, index: int) -> torch.Tensor:
            return odd if index == 3 else torch.zeros(4)

    source = as_source(Ragged(torch.zeros(4)))
    assert source.take(np.array([2, 0])).shape == (2, 4)
    with pytest.raises(DataError, match=r"samples of Ragged differ: 1 is .* of shape \(4,\), 3 is .*__getitem__"):
        source.take(np.array([1, 0, 3]))


def test_windows_are_all_pieces_of_the_series_of_any_source():
    rows = torch.arange(12).reshape(3, 4)
    series, ids = rows.flatten(), np.array([8, 0, 3])
    for data in (rows, rows.numpy()):
        source = windows(as_source(data))
        assert len(source) == 9
        assert torch.equal(source.take(ids), torch.stack([series[i : i + 4] for i in ids]))
    for other in (torch.zeros(3, 2, 4), Pairs(rows)):
        with pytest.raises(UsageError, match="windows"):
            windows(as_source(other))
