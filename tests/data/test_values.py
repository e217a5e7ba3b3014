"""Bins are rounded to the nearest center, and standardized data comes back in its units with the right density."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bsi
from bsi.backbones import MLPConfig, build
from bsi.errors import DataError, UsageError
from bsi.values import Bins, Standardize, to_uint8

ranges = st.builds(
    lambda low, step, count: Bins(low, low + step * (count - 1), count),
    st.floats(-1e3, 1e3),
    st.floats(0.1, 1e3),  # of at least a few multiples of what float32 resolves
    st.integers(2, 65536),
)


@settings(max_examples=60, deadline=None)
@given(bins=ranges, data=st.data(), fraction=st.floats(0, 1))
def test_bins_round_trip_indices_and_take_the_nearest_value(bins, data, fraction):
    index = np.array(data.draw(st.lists(st.integers(0, bins.count - 1), max_size=20)), dtype=bins.dtype)
    assert np.array_equal(bins.indices(bins.values(index)), index)
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


def test_exact_edges_are_in_the_upper_bin_for_arrays_and_tensors() -> None:
    bins = Bins(0.0, 4.0, 5)
    edges = np.array([0.5, 1.5, 2.5, 3.5])
    assert bins.indices(edges).tolist() == bins.indices(torch.from_numpy(edges)).tolist() == [1, 2, 3, 4]


def test_the_storage_type_holds_every_index() -> None:
    assert Bins(0.0, 1.0, 256).dtype == np.uint8
    assert Bins(0.0, 1.0, 257).dtype == np.uint16
    assert Bins(0.0, 1.0, 65536).indices(np.array([1.0]))[0] == 65535


@pytest.mark.parametrize(
    ("shape", "numbers"), [((), 1), ((5,), 5), ((1,), 1), ((3, 4, 4), 3), ((1, 4, 4), 1), ((2, 100), 2)]
)
def test_units_are_per_element_of_a_vector_and_per_channel_of_the_rest(shape: tuple[int, ...], numbers: int) -> None:
    torch.manual_seed(0)
    units = torch.arange(1, numbers + 1).double().view(-1, *[1] * len(shape[1:]))
    data = (torch.randn(500, *shape, dtype=torch.float64) + 7) * 10**units if shape else torch.randn(500).double()
    standardize = Standardize.fit(data)
    assert Standardize.fit(data.numpy()) == standardize
    assert isinstance(standardize.mean, tuple) == (numbers > 1)
    x = standardize.values(data)
    axes = [axis for axis in range(x.ndim) if axis != 1]
    assert x.mean(axes).abs().max() < 1e-9
    assert (x.var(axes, correction=0) - 1).abs().max() < 1e-9
    torch.testing.assert_close(standardize.data(x), data, rtol=1e-12, atol=1e-9)
    # The Jacobian of data -> x, per dimension.
    expected = float(x.var(axes, correction=0).log().mean() / 2 - data.var(axes, correction=0).log().mean() / 2)
    assert standardize.log_determinant == pytest.approx(-expected, abs=1e-9)


def test_units_follow_type_and_shape() -> None:
    standardize = Standardize((1.0, 2.0), (1.0, 4.0))
    for dtype in (torch.float32, torch.float64):
        assert standardize.values(torch.ones(3, 2, dtype=dtype)).dtype == dtype
    assert standardize.values(torch.ones(3, 2, 4, 4))[0, 1].unique().tolist() == [-0.25]
    with pytest.raises(UsageError, match="does not fit"):
        standardize.values(torch.ones(4, 3))
    assert Standardize(1.0, 2.0).values(torch.ones(4, 3)).abs().max() == 0


def test_columns_that_cannot_be_standardized_are_named() -> None:
    data = torch.randn(100, 4)
    data[:, 2] = 3.0
    with pytest.raises(DataError, match="element or channel 2 of the data is constant"):
        Standardize.fit(data)
    data[:, 2] = 1e7 + torch.randn(100)
    with pytest.raises(DataError, match="subtract its mean"):
        Standardize.fit(data)
    with pytest.raises(UsageError, match="positive std"):
        Standardize((0.0, 1.0), (1.0,))


def test_standardizing_changes_the_bound_by_the_change_of_units() -> None:
    """In nats, with the same network and noise: -ln p(data) = -ln p(x) + mean ln std, per dimension."""
    torch.manual_seed(0)
    units = torch.tensor([1e-3, 1.0, 1e4])
    data = (torch.randn(64, 3) + 2) * units
    standardize = Standardize.fit(data)
    network = build("mlp-16x1", shape=(3,))
    ours = bsi.Model(network, bsi.BSI(), (3,), data=standardize).eval()
    by_hand = bsi.Model(network, bsi.BSI(), (3,)).eval()
    x = standardize.values(data)
    logs = data.double().std(0, correction=0).log().mean()
    a, b = ours.elbo(data, seed=1).nats_per_dim, by_hand.elbo(x, seed=1).nats_per_dim
    assert a - b == pytest.approx(float(logs), rel=1e-5)
    samples = ours.sample(200, steps=4, seed=0)
    assert (samples.std(0) / units).log10().abs().max() < 1, "samples are in the units of the columns"


def test_a_run_resumes_with_the_units_it_was_trained_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 0.1.0 had one mean and std for all elements: its runs keep them, bit for bit."""
    torch.manual_seed(0)
    data = torch.randn(64, 3) * torch.tensor([1.0, 2.0, 3.0]) + 1
    recipe = replace(bsi.recipes.arrays(), name="units", backbone=MLPConfig(width=16, depth=1), batch=64)
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, schedule="constant"))

    def train(steps: int, out: str) -> bsi.Model:
        path = bsi.train(replace(recipe, steps=steps), data=data, out=tmp_path / out, device="cpu").path
        return bsi.load(path, ema=False)

    with monkeypatch.context() as former:
        one = Standardize(float(data.mean()), float(data.std(correction=0)))
        former.setattr(Standardize, "fit", classmethod(lambda cls, x: one))
        expected = train(4, "uninterrupted")
        train(2, "resumed")
    found = train(4, "resumed")
    assert found.kind == expected.kind == one
    for a, b in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)
