"""Fourier features, precision embedding, positions and labels: the statements of their docstrings."""

import math

import pytest
import torch

from bsi.backbones.config import fourier_exponents, input_channels
from bsi.backbones.layers import ConditionEmbedding, FourierFeatures, PrecisionEmbedding, positions
from bsi.errors import UsageError

STEP = 1 / 1024


def test_fourier_features_are_the_papers_for_256_bins() -> None:
    u = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    phases = [2**i * math.pi * u for i in (6, 7, 8)]
    expected = torch.cat([u, *map(torch.sin, phases), *map(torch.cos, phases)], dim=1)
    torch.testing.assert_close(FourierFeatures(256)(u), expected, atol=0, rtol=0)
    assert FourierFeatures(None)(u).equal(u), "continuous data has none"
    assert (input_channels(3, 256), input_channels(3, None)) == (21, 3)


@pytest.mark.parametrize(("count", "first"), [(256, 6), (2, -1), (16, 2), (17, 2), (1024, 8), (65536, 14)])
def test_the_fastest_fourier_feature_has_about_one_period_per_bin(count: int, first: int) -> None:
    assert fourier_exponents(count) == range(first, first + 3)
    turns_per_bin = 2 ** fourier_exponents(count)[-1] / 2 * (2 / count)
    assert 2**-0.5 <= turns_per_bin <= 2**0.5
    with pytest.raises(UsageError, match="at least 2"):
        fourier_exponents(1)


def test_fourier_features_resolve_a_value_even_after_rounding_to_bfloat16() -> None:
    u = torch.linspace(-2, 2, 64).view(-1, 1)
    near = FourierFeatures(256)(u + 2e-5).bfloat16() != FourierFeatures(256)(u).bfloat16()
    assert near.any(dim=1).all()
    assert not ((u + 2e-5).bfloat16() != u.bfloat16()).all()  # u alone is not enough


def test_neighboring_precisions_are_distinguishable_everywhere() -> None:
    t = torch.arange(1025) * STEP
    e = PrecisionEmbedding()(t)
    assert e.shape == (1025, 32)
    distance = (e[1:] - e[:-1]).norm(dim=1)
    torch.testing.assert_close(distance, torch.full_like(distance, distance.mean().item()), rtol=1e-3, atol=0)
    assert distance.min() > 0.09  # for vectors of norm 4
    # and no two precisions of the complete range are nearer than neighbors
    assert torch.cdist(e, e)[~torch.eye(1025, dtype=torch.bool)].min() > 0.09
    assert (e.bfloat16()[1:] != e.bfloat16()[:-1]).any(dim=1).all()


def test_similarity_of_precisions_decreases_with_their_difference_only() -> None:
    def similarity(t: torch.Tensor) -> torch.Tensor:
        e = PrecisionEmbedding()(t).double()
        return torch.nn.functional.cosine_similarity(e, e[:1])

    s = similarity(torch.arange(1025) * STEP)
    highest_later = s.flip(0).cummax(0).values.flip(0)
    assert (highest_later - s).max() < 0.01, "similarity increases again with the distance"
    assert -s.diff().min() < 0.005, "similarity jumps between neighbors"
    assert s[1] > 0.999
    assert s[-1] < 0.3
    halves = (similarity(torch.linspace(start, start + 0.5, 100)) for start in (0.0, 0.5))
    torch.testing.assert_close(*halves, atol=1e-5, rtol=0)


def test_positions_on_two_axes_are_those_of_the_published_dit_with_rows_before_columns() -> None:
    """Its code says `np.meshgrid(grid_w, grid_h)`: the first half of its channels is the column's."""
    width, grid = 16, (3, 5)
    omega = 1 / 10000 ** (torch.arange(4, dtype=torch.float64) / 4)
    table = positions(grid, width)
    for row in range(3):
        for column in range(5):
            y, x = row * omega, column * omega
            expected = torch.cat([y.sin(), y.cos(), x.sin(), x.cos()]).float()
            torch.testing.assert_close(table[row * 5 + column], expected)


@pytest.mark.parametrize("grid", [(7,), (3, 4), (2, 3, 4), (2, 2, 2, 3)])
def test_positions_distinguish_all_points_of_a_grid(grid: tuple[int, ...]) -> None:
    table = positions(grid, 20)
    assert table.shape == (math.prod(grid), 20)
    assert torch.cdist(table, table)[~torch.eye(len(table), dtype=torch.bool)].min() > 0.1


def test_a_missing_label_is_the_null_class_and_an_unexpected_one_raises() -> None:
    torch.manual_seed(0)
    embed, t = ConditionEmbedding(8, num_classes=3), torch.rand(4)
    assert embed(t).equal(embed(t, torch.full((4,), 3)))
    assert not embed(t).equal(embed(t, torch.tensor([3, 3, 3, 0])))
    with pytest.raises(UsageError, match="num_classes"):
        ConditionEmbedding(8, num_classes=0)(torch.rand(2), torch.zeros(2, dtype=torch.long))
    with pytest.raises(UsageError, match="num_classes"):
        ConditionEmbedding(8, num_classes=-1)


def test_the_condition_is_float32_under_autocast() -> None:
    embed, t = ConditionEmbedding(8, num_classes=0), torch.rand(4)
    with torch.autocast("cpu", torch.bfloat16):
        inside = embed(t)
    assert inside.dtype == torch.float32
    assert inside.equal(embed(t))
