"""Stored integers and values are inverses of each other, and an index is found by rounding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bsi.errors import UsageError
from bsi.values import Bins, to_uint8

ranges = st.builds(
    lambda low, width, count: Bins(low, low + width, count),
    st.floats(-1e3, 1e3),
    st.floats(1e-2, 1e3),
    st.integers(2, 65536),
)


@settings(max_examples=100, deadline=None)
@given(bins=ranges, data=st.data())
def test_an_index_survives_the_round_trip(bins: Bins, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, bins.count - 1), max_size=20)), dtype=bins.dtype)
    assert np.array_equal(bins.indices(bins.values(index)), index)


@settings(max_examples=100, deadline=None)
@given(bins=ranges, fraction=st.floats(0, 1))
def test_the_index_of_a_value_is_that_of_the_nearest_center(bins: Bins, fraction: float) -> None:
    value = np.array([bins.low + fraction * (bins.high - bins.low)])
    distance = np.abs(bins.values(bins.indices(value)) - value)
    assert distance[0] <= bins.width * (0.5 + 1e-9) + 1e-12


def test_8_bit_images_are_rounded_and_never_truncated() -> None:
    gray = Bins.uint8().values(np.arange(256))
    almost = 0.4 * Bins.uint8().width
    for shift in (-almost, 0.0, almost):
        assert np.array_equal(to_uint8(gray + shift), np.arange(256, dtype=np.uint8))
    assert to_uint8(np.array([-7.0, 7.0])).tolist() == [0, 255]
    assert (gray[0], gray[-1]) == (-1, 1)


def test_the_storage_type_holds_every_index() -> None:
    assert Bins(0.0, 1.0, 256).dtype == np.uint8
    assert Bins(0.0, 1.0, 257).dtype == np.uint16
    assert Bins(0.0, 1.0, 65536).indices(np.array([1.0]))[0] == 65535


@pytest.mark.parametrize(
    ("low", "high", "count"), [(0, 1, 1), (1, 1, 4), (2, 1, 4), (0, float("inf"), 4), (0, 1, 65537)]
)
def test_impossible_bins_are_refused(low: float, high: float, count: int) -> None:
    with pytest.raises(UsageError, match="bins need"):
        Bins(float(low), float(high), count)
