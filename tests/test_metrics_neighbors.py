"""Precision and recall on sets whose answer is known by hand."""

import pytest
import torch

from bsi.errors import DataError, NonFinite
from bsi.metrics import neighbors
from bsi.metrics.two_sample import precision_recall


def normal(n: int, seed: int, offset: float = 0.0) -> torch.Tensor:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(seed)) + offset


def test_a_set_covers_itself() -> None:
    both = precision_recall(normal(50, 0), normal(50, 0))
    assert (both.precision, both.recall, both.k) == (1.0, 1.0, 3)


def test_sets_far_apart_share_nothing() -> None:
    both = precision_recall(normal(50, 0), normal(50, 1, offset=1000.0))
    assert (both.precision, both.recall) == (0.0, 0.0)


def test_a_line_by_hand() -> None:
    """k = 1. Real 0, 1, 10: radii 1, 1, 9, so the real manifold is [-1, 2] and [1, 19]. Samples -3, -0.5, 5, 30: radii
    2.5, 2.5, 5.5, 25, so theirs is [-5.5, 2], [-0.5, 10.5] and [5, 55]."""
    real, samples = torch.tensor([[0.0], [1.0], [10.0]]), torch.tensor([[-3.0], [-0.5], [5.0], [30.0]])
    both = precision_recall(samples, real, k=1)
    assert both.precision == 0.5
    assert both.recall == 1.0


def test_a_ball_holds_its_surface() -> None:
    """Copies of one image are balls of radius 0, and yet cover it."""
    both = precision_recall(torch.zeros(5, 2), torch.zeros(6, 2))
    assert (both.precision, both.recall) == (1.0, 1.0)


def test_collapsed_samples_are_precise_and_recall_little() -> None:
    real = normal(400, 2)
    samples = real[:1] + 1e-3 * normal(100, 3)
    both = precision_recall(samples, real)
    assert both.precision == 1.0
    assert both.recall < 0.05


def test_a_far_mean_costs_no_digits() -> None:
    near = precision_recall(normal(200, 4).double(), normal(200, 5).double())
    assert precision_recall(normal(200, 4).double() + 1e6, normal(200, 5).double() + 1e6) == near
    assert 0.1 < near.precision < 1


def test_tiles_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = precision_recall(normal(120, 6), normal(130, 7))
    monkeypatch.setattr(neighbors, "ROWS", 11)
    monkeypatch.setattr(neighbors, "COLUMNS", 17)
    assert precision_recall(normal(120, 6), normal(130, 7)) == whole


def test_too_few_or_non_finite_samples_are_refused() -> None:
    with pytest.raises(DataError, match="k = 3 need more than k samples: got 3 and 50"):
        precision_recall(normal(3, 8), normal(50, 9))
    with pytest.raises(NonFinite):
        precision_recall(normal(9, 8) * torch.nan, normal(50, 9))
