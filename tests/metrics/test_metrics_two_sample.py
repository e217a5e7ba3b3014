"""KID against its definition and the coverage of its error; precision and recall where the answer is known."""

import math

import pytest
import torch

from bsi.errors import DataError, NonFinite
from bsi.metrics import two_sample
from bsi.metrics.two_sample import PrecisionRecall, kernel_distance, precision_recall


def normal(n: int, dim: int, seed: int, offset: float = 0.0) -> torch.Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)) + offset


def test_one_block_is_the_unbiased_estimate_written_out() -> None:
    x, y = normal(6, 4, seed=0).double(), normal(6, 4, seed=1, offset=0.5).double()

    def k(u: torch.Tensor, v: torch.Tensor) -> float:
        return ((u @ v).item() / 4 + 1) ** 3

    pairs = [(i, j) for i in range(6) for j in range(6)]
    within = sum(k(s[i], s[j]) for s in (x, y) for i, j in pairs if i != j) / 30
    between = sum(k(x[i], y[j]) for i, j in pairs) / 36
    kid = kernel_distance(x, y)
    assert kid.value == pytest.approx(within - 2 * between, rel=1e-12)
    assert (kid.blocks, kid.block_size, kid.standard_error) == (1, 6, None)


def test_kid_of_one_distribution_is_zero_within_its_error() -> None:
    """Unbiased: over 200 independent repetitions the mean vanishes, and the stated errors have the stated size."""
    kids = [kernel_distance(normal(200, 8, seed=s), normal(200, 8, seed=1000 + s), block_size=20) for s in range(200)]
    scores = torch.tensor([kid.value / kid.standard_error for kid in kids])
    mean = torch.tensor([kid.value for kid in kids])
    assert abs(mean.mean()) < 4 * mean.std() / math.sqrt(len(kids))
    # Student's t with 9 degrees of freedom has the standard deviation 1.13; with 200 draws it is known to about 6%.
    assert 0.9 < scores.std() < 1.4


def test_kid_does_not_depend_on_the_block_size_but_in_noise() -> None:
    x, y = normal(3000, 8, seed=2), normal(3025, 8, seed=3, offset=0.3)  # the last 25 are not used
    small, large = kernel_distance(x, y, block_size=50), kernel_distance(x, y, block_size=500)
    assert (small.blocks, large.blocks) == (60, 6)
    assert abs(small.value - large.value) < 4 * math.hypot(small.standard_error, large.standard_error)
    assert small.value > 10 * small.standard_error


@pytest.mark.parametrize("n", [400, 90])
def test_sorted_images_have_the_kid_of_shuffled_ones(n: int) -> None:
    """By class, as in folders: neither blocks of one class, nor the first classes of the larger set alone."""
    offset = torch.arange(4).repeat_interleave(100)[:, None].float()
    shuffled = offset[torch.randperm(400, generator=torch.Generator().manual_seed(7))]
    real, drawn = normal(400, 8, seed=8) + offset, normal(400, 8, seed=9) + shuffled
    kid = kernel_distance(drawn[:n], real, block_size=100)
    assert abs(kid.value) < 15  # about 4 standard errors; blocks of neighbors give 150


def five(n: int, seed: int, offset: float = 0.0) -> torch.Tensor:
    return normal(n, 5, seed, offset)


def test_a_set_covers_itself_and_none_far_away() -> None:
    assert precision_recall(five(50, 0), five(50, 0)) == PrecisionRecall(1.0, 1.0, k=3)
    assert precision_recall(five(50, 0), five(50, 1, offset=1000.0)) == PrecisionRecall(0.0, 0.0, k=3)
    # Copies of one image are balls of radius 0, and yet cover it.
    assert precision_recall(torch.zeros(5, 2), torch.zeros(6, 2)) == PrecisionRecall(1.0, 1.0, k=3)


def test_a_line_by_hand() -> None:
    """k = 1. Real 0, 1, 10: radii 1, 1, 9, so the real manifold is [-1, 2] and [1, 19]. Samples -3, -0.5, 5, 30: radii
    2.5, 2.5, 5.5, 25, so theirs is [-5.5, 2], [-0.5, 10.5] and [5, 55]."""
    real, samples = torch.tensor([[0.0], [1.0], [10.0]]), torch.tensor([[-3.0], [-0.5], [5.0], [30.0]])
    both = precision_recall(samples, real, k=1)
    assert both.precision == 0.5
    assert both.recall == 1.0


def test_collapsed_samples_are_precise_and_recall_little() -> None:
    real = five(400, 2)
    samples = real[:1] + 1e-3 * five(100, 3)
    both = precision_recall(samples, real)
    assert both.precision == 1.0
    assert both.recall < 0.05


def test_a_far_mean_costs_no_digits() -> None:
    near = precision_recall(five(200, 4).double(), five(200, 5).double())
    assert precision_recall(five(200, 4).double() + 1e6, five(200, 5).double() + 1e6) == near
    assert 0.1 < near.precision < 1


def test_tiles_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = precision_recall(five(120, 6), five(130, 7))
    monkeypatch.setattr(two_sample, "ROWS", 11)
    monkeypatch.setattr(two_sample, "COLUMNS", 17)
    assert precision_recall(five(120, 6), five(130, 7)) == whole


def test_too_few_or_non_finite_samples_are_refused() -> None:
    for metric in (kernel_distance, precision_recall):
        with pytest.raises(DataError, match=r"need(s at least 2| more than k) samples"):
            metric(five(1, 8), five(50, 9))
        with pytest.raises(NonFinite):
            metric(five(9, 8) * torch.nan, five(50, 9))
