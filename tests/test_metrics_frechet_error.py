"""A Fréchet distance says how sure it is: its error is the spread over draws, and pairs of samples share most of it."""

import math

import pytest
import torch

from bsi.metrics import Moments, frechet_distance, frechet_error
from bsi.metrics.frechet import Yardstick


def test_it_is_the_spread_over_draws() -> None:
    """600 sets of 400 samples: the standard deviation of their distances against the mean predicted error."""
    torch.manual_seed(0)
    root = torch.tensor([[1.0, 0.4, 0.0], [0.0, 0.8, 0.3], [0.0, 0.0, 1.3]], dtype=torch.float64)
    real = Moments.of(torch.randn(4000, 3, dtype=torch.float64))
    sets = torch.randn(600, 400, 3, dtype=torch.float64) @ root + 0.2
    found = torch.tensor([frechet_distance(Moments.of(x), real) for x in sets])
    predicted = torch.tensor([frechet_error(x, real) for x in sets[:50]])
    relative = 1 / math.sqrt(2 * len(sets))  # standard error of a standard deviation
    assert float(predicted.mean()) == pytest.approx(float(found.std()), rel=4 * relative)


def test_pairs_of_samples_say_how_sure_a_difference_is() -> None:
    """400 pairs of sets from the same noise: the spread of the differences, a fifth of either distance's own."""
    torch.manual_seed(2)
    real = Moments.of(torch.randn(4000, 3, dtype=torch.float64))
    yardstick, noise = Yardstick(real), torch.randn(400, 300, 3, dtype=torch.float64)
    a, b = ([yardstick(x) for x in sets] for sets in (1.2 * noise + 0.3, 1.15 * noise + 0.3))
    for x, found in zip(1.2 * noise[:3] + 0.3, a, strict=False):
        assert found.distance == pytest.approx(frechet_distance(Moments.of(x), real), rel=1e-9)
        assert found.error == frechet_error(x, real)
    spread = torch.tensor([x.distance - y.distance for x, y in zip(a, b, strict=True)]).std()
    gaps = [x.influence - y.influence for x, y in zip(a[:50], b[:50], strict=True)]
    predicted = torch.stack([gap.std() / math.sqrt(len(gap)) for gap in gaps]).mean()
    assert float(predicted) == pytest.approx(float(spread), rel=4 / math.sqrt(2 * len(a)))
    assert float(predicted) < 0.3 * a[0].error


def test_it_falls_as_the_root_of_the_number() -> None:
    torch.manual_seed(1)
    x, real = torch.randn(6400, 4) + 0.5, Moments.of(torch.randn(5000, 4))
    assert frechet_error(x[:1600], real) == pytest.approx(2 * frechet_error(x, real), rel=0.1)


def test_it_is_too_large_by_the_root_of_two_where_only_the_second_order_counts() -> None:
    """200 sets of samples from the real Gaussian itself: the first order is 0, and a jackknife doubles the second."""
    torch.manual_seed(3)
    dim = 20
    real = Moments(2, torch.zeros(dim, dtype=torch.float64), torch.eye(dim, dtype=torch.float64))
    sets = torch.randn(200, 500, dim, dtype=torch.float64)
    found = torch.tensor([frechet_distance(Moments.of(x), real) for x in sets])
    predicted = torch.tensor([frechet_error(x, real) for x in sets[:50]])
    assert float(predicted.mean() / found.std()) == pytest.approx(math.sqrt(2), rel=4 / math.sqrt(2 * len(sets)))
