"""Distances between sets of features against closed forms, the textbook, invariances and spreads over draws."""

import math

import numpy as np
import pytest
import torch

from bsi.errors import DataError, NonFinite
from bsi.metrics import two_sample
from bsi.metrics.frechet import Moments, frechet_distance, frechet_error
from bsi.metrics.two_sample import PrecisionRecall, kernel_distance, precision_recall

# ---- Fréchet ---------------------------------------------------------------------------------------------------------


def features(n: int, dim: int, seed: int, scale: float = 1.0, offset: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    return torch.randn(n, dim, generator=generator, dtype=torch.float64) @ mix * scale + offset


def test_moments_agree_with_numpy_in_any_order_and_batches() -> None:
    x = features(101, 5, seed=1)
    shuffled = x[torch.randperm(101, generator=torch.Generator().manual_seed(0))]
    parts = sum((Moments.of(part) for part in (x[:0], *shuffled.split(13))), Moments.empty(5))
    for moments in (Moments.of(x), parts):
        assert moments.n == 101
        np.testing.assert_allclose(moments.mean, x.numpy().mean(0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(moments.covariance, np.cov(x.numpy(), rowvar=False), rtol=1e-12, atol=1e-12)
    assert (Moments.empty(3) + Moments.empty(3)).n == 0
    assert Moments.of(x.float()).scatter.dtype == torch.float64


def test_a_large_mean_loses_no_digits() -> None:
    """A sum of squares about zero would keep 16 - 2 * 7 = 2 digits of these covariances."""
    x = features(400, 4, seed=2)
    near = Moments.of(x)
    far = sum((Moments.of(part) for part in (x + 1e7).split(9)), Moments.empty(4))
    torch.testing.assert_close(far.covariance, near.covariance, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("spread", [1.3, 0.0])  # without spread the covariance is zero
def test_distance_is_the_textbook_formula(spread: float) -> None:
    a, b = Moments.of(features(60, 10, seed=7)), Moments.of(features(80, 10, seed=8, scale=spread, offset=0.5))
    m_1, S_1, m_2, S_2 = (part.numpy() for part in (a.mean, a.covariance, b.mean, b.covariance))
    root = np.sqrt(np.linalg.eigvals(S_1 @ S_2).real.clip(0)).sum()
    textbook = ((m_1 - m_2) ** 2).sum() + np.trace(S_1 + S_2) - 2 * root
    assert frechet_distance(a, b) == pytest.approx(textbook, rel=1e-10)
    assert frechet_distance(b, a) == pytest.approx(textbook, rel=1e-10)


@pytest.mark.parametrize("n", [500, 40])
def test_distance_to_itself_is_zero(n: int) -> None:
    """Also with fewer samples than features, where the covariance is singular."""
    moments = Moments.of(features(n, 64, seed=10))
    assert 0 <= frechet_distance(moments, moments) < 1e-12 * moments.covariance.trace().item()


def test_distance_is_invariant_under_rotations_and_shifts_and_grows_with_the_square_of_the_scale() -> None:
    a, b = features(90, 8, seed=11), features(70, 8, seed=12, scale=0.7)
    rotation = torch.linalg.qr(features(8, 8, seed=13)).Q
    one = frechet_distance(Moments.of(a), Moments.of(b))
    moved = [Moments.of(3 * x @ rotation + 3.0) for x in (a, b)]
    assert frechet_distance(*moved) == pytest.approx(9 * one, rel=1e-10)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_features_are_rejected(bad: float) -> None:
    x = features(20, 3, seed=16)
    x[7, 1] = bad
    with pytest.raises(NonFinite, match="20 images"):
        frechet_distance(Moments.of(x), Moments.of(features(20, 3, seed=17)))


def test_single_samples_and_mixed_extractors_are_rejected() -> None:
    with pytest.raises(DataError, match="at least 2 samples, got 1"):
        frechet_distance(Moments.of(features(1, 3, seed=18)), Moments.of(features(9, 3, seed=19)))
    with pytest.raises(DataError, match="got 3 and 4"):
        frechet_distance(Moments.of(features(9, 3, seed=20)), Moments.of(features(9, 4, seed=21)))


def test_the_error_equals_the_spread_over_draws() -> None:
    """600 sets of 400 samples: the standard deviation of their distances against the mean predicted error."""
    torch.manual_seed(0)
    root = torch.tensor([[1.0, 0.4, 0.0], [0.0, 0.8, 0.3], [0.0, 0.0, 1.3]], dtype=torch.float64)
    real = Moments.of(torch.randn(4000, 3, dtype=torch.float64))
    sets = torch.randn(600, 400, 3, dtype=torch.float64) @ root + 0.2
    found = torch.tensor([frechet_distance(Moments.of(x), real) for x in sets])
    predicted = torch.tensor([frechet_error(x, real) for x in sets[:50]])
    relative = 1 / math.sqrt(2 * len(sets))  # standard error of a standard deviation
    assert float(predicted.mean()) == pytest.approx(float(found.std()), rel=4 * relative)


def test_the_error_is_too_large_by_the_root_of_two_where_only_the_second_order_counts() -> None:
    """200 sets of samples from the real Gaussian itself: the first order is 0, and a jackknife doubles the second."""
    torch.manual_seed(3)
    dim = 20
    real = Moments(2, torch.zeros(dim, dtype=torch.float64), torch.eye(dim, dtype=torch.float64))
    sets = torch.randn(200, 500, dim, dtype=torch.float64)
    found = torch.tensor([frechet_distance(Moments.of(x), real) for x in sets])
    predicted = torch.tensor([frechet_error(x, real) for x in sets[:50]])
    assert float(predicted.mean() / found.std()) == pytest.approx(math.sqrt(2), rel=4 / math.sqrt(2 * len(sets)))


# ---- KID, precision and recall ---------------------------------------------------------------------------------------


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


def test_kid_does_not_depend_on_the_block_size_beyond_noise() -> None:
    x, y = normal(3000, 8, seed=2), normal(3025, 8, seed=3, offset=0.3)  # the last 25 are not used
    small, large = kernel_distance(x, y, block_size=50), kernel_distance(x, y, block_size=500)
    assert (small.blocks, large.blocks) == (60, 6)
    assert abs(small.value - large.value) < 4 * math.hypot(small.standard_error, large.standard_error)
    assert small.value > 10 * small.standard_error


@pytest.mark.parametrize("n", [400, 90])
def test_sorted_images_have_the_kid_of_shuffled_ones(n: int) -> None:
    """Images sorted by class: blocks contain all classes, also of the larger set."""
    offset = torch.arange(4).repeat_interleave(100)[:, None].float()
    shuffled = offset[torch.randperm(400, generator=torch.Generator().manual_seed(7))]
    real, drawn = normal(400, 8, seed=8) + offset, normal(400, 8, seed=9) + shuffled
    kid = kernel_distance(drawn[:n], real, block_size=100)
    assert abs(kid.value) < 15  # about 4 standard errors; blocks of neighbors give 150


def test_precision_and_recall_of_equal_and_distant_sets() -> None:
    assert precision_recall(normal(50, 5, 0), normal(50, 5, 0)) == PrecisionRecall(1.0, 1.0, k=3)
    assert precision_recall(normal(50, 5, 0), normal(50, 5, 1, offset=1000.0)) == PrecisionRecall(0.0, 0.0, k=3)
    # Copies of one image are balls of radius 0, and yet cover it.
    assert precision_recall(torch.zeros(5, 2), torch.zeros(6, 2)) == PrecisionRecall(1.0, 1.0, k=3)


def test_precision_and_recall_of_points_on_a_line() -> None:
    """k = 1. Real 0, 1, 10: radii 1, 1, 9, so the real manifold is [-1, 2] and [1, 19]. Samples -3, -0.5, 5, 30: radii
    2.5, 2.5, 5.5, 25, so theirs is [-5.5, 2], [-0.5, 10.5] and [5, 55]."""
    real, samples = torch.tensor([[0.0], [1.0], [10.0]]), torch.tensor([[-3.0], [-0.5], [5.0], [30.0]])
    both = precision_recall(samples, real, k=1)
    assert both.precision == 0.5
    assert both.recall == 1.0


def test_collapsed_samples_have_high_precision_and_low_recall() -> None:
    real = normal(400, 5, 2)
    samples = real[:1] + 1e-3 * normal(100, 5, 3)
    both = precision_recall(samples, real)
    assert both.precision == 1.0
    assert both.recall < 0.05


def test_a_distant_mean_loses_no_digits() -> None:
    near = precision_recall(normal(200, 5, 4).double(), normal(200, 5, 5).double())
    assert precision_recall(normal(200, 5, 4).double() + 1e6, normal(200, 5, 5).double() + 1e6) == near
    assert 0.1 < near.precision < 1


def test_tiles_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = precision_recall(normal(120, 5, 6), normal(130, 5, 7))
    monkeypatch.setattr(two_sample, "TILE", 11 * 130)
    assert precision_recall(normal(120, 5, 6), normal(130, 5, 7)) == whole


def test_too_few_or_nonfinite_samples_are_rejected() -> None:
    for metric in (kernel_distance, precision_recall):
        with pytest.raises(DataError, match=r"need(s at least 2| more than k) samples"):
            metric(normal(1, 5, 8), normal(50, 5, 9))
        with pytest.raises(NonFinite):
            metric(normal(9, 5, 8) * torch.nan, normal(50, 5, 9))
