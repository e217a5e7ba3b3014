"""Noise is a function of (seed, sample, draw): Philox against its published answers, Normals against their law."""

import math

import pytest
import scipy.stats
import torch

from bsi.rng import SeededNoise, normals, philox, seed_words, standard_normal, weighted_normals


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, expected):
    assert tuple(word.item() for word in philox(words(*counter), key)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_standard_normal(dtype):
    """Four moments and the Kolmogorov-Smirnov distance, in standard errors."""
    eps = standard_normal(7, torch.arange(50), 3, (2, 1000), dtype).double().flatten().numpy()
    count = len(eps)
    assert abs(eps.mean()) < 4 / math.sqrt(count)
    assert abs(eps.var() - 1) < 4 * math.sqrt(2 / count)
    assert abs((eps**3).mean()) < 4 * math.sqrt(15 / count)
    assert abs((eps**4).mean() - 3) < 4 * math.sqrt(96 / count)
    assert scipy.stats.kstest(eps, "norm").pvalue > 1e-3


def test_sample_numbers_have_64_bits():
    sample = (3 << 32) + 0x80000005
    expected = normals(words(0x80000005, 0, 3, 7), (1, 2), torch.float64)
    found = standard_normal((2 << 32) + 1, torch.tensor([sample]), 7, (4,), torch.float64)
    assert torch.equal(found[0], torch.stack(expected).flatten())


@pytest.mark.parametrize(
    "other",
    [
        standard_normal(1, torch.arange(40), 0, (1000,), torch.float64),
        standard_normal(0, torch.arange(40) + 40, 0, (1000,), torch.float64),
        standard_normal(0, torch.arange(40), 1, (1000,), torch.float64),
        standard_normal(0, torch.arange(40), 0, (1004,), torch.float64)[:, 4:],
        standard_normal(2**32, torch.arange(40), 0, (1000,), torch.float64),
        standard_normal(0, torch.arange(40) + 2**32, 0, (1000,), torch.float64),
    ],
    ids=["seed", "sample", "draw", "position", "high word of seed", "high word of sample"],
)
def test_noise_of_another_seed_sample_or_draw_is_independent(other):
    eps = standard_normal(0, torch.arange(40), 0, (1000,), torch.float64)
    for function in (lambda v: v, torch.square, torch.abs):
        a, b = (function(v).flatten() - function(v).mean() for v in (eps, other))
        products = a * b
        assert abs(products.mean()) < 4 * products.std() / math.sqrt(len(products))


def test_neighboring_numbers_of_one_draw_are_independent():
    """Box and Muller make two Normals of a pair of words: they share a radius, and yet are independent."""
    eps = standard_normal(5, torch.arange(40), 0, (1000,), torch.float64)
    for lag in (1, 2, 3, 4):
        for function in (lambda v: v, torch.square):
            a, b = function(eps[:, :-lag]).flatten(), function(eps[:, lag:]).flatten()
            products = (a - a.mean()) * (b - b.mean())
            assert abs(products.mean()) < 4 * products.std() / math.sqrt(len(products))


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 2, 2)])
def test_noise_of_a_sample_does_not_depend_on_its_batch(shape):
    whole = standard_normal(3, torch.arange(8), 2, shape)
    for ids in (torch.tensor([5]), torch.tensor([7, 0, 5]), torch.arange(2, 6)):
        assert torch.equal(standard_normal(3, ids, 2, shape), whole[ids])
    assert whole.shape == (8, *shape)


def test_seeded_noise_draws_one_after_the_other():
    noise = SeededNoise(4, torch.arange(3), (2,))
    first, second = noise(0.0, 1.0), noise(1.0, 2.0)
    assert torch.equal(first, standard_normal(4, torch.arange(3), 0, (2,)))
    assert torch.equal(second, standard_normal(4, torch.arange(3), 1, (2,)))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("seed", [3, 2**32, 2**62 + 1, 2**64 - 1])
def test_a_seed_may_be_a_number_or_its_two_words(seed: int) -> None:
    samples = torch.arange(5)
    words = seed_words(seed, samples.device)
    assert words.tolist() == [seed % 2**32, seed // 2**32]
    assert torch.equal(standard_normal(words, samples, 1, (6,)), standard_normal(seed, samples, 1, (6,)))


@pytest.mark.parametrize("kind", [torch.int32, torch.int16])
def test_the_integer_type_of_a_samples_number_does_not_matter(kind: torch.dtype) -> None:
    samples = torch.tensor([0, 3, 100])
    assert torch.equal(standard_normal(1, samples.to(kind), 2, (6,)), standard_normal(1, samples, 2, (6,)))


@pytest.mark.parametrize(("count", "shape"), [(0, (3, 2)), (2, ()), (2, (1, 1)), (2, (0,)), (0, (3, 0))], ids=str)
def test_noise_has_the_requested_shape_also_when_empty(count: int, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float16, torch.float32, torch.float64):
        found = standard_normal(1, torch.arange(count), 0, shape, dtype)
        assert (found.shape, found.dtype) == ((count, *shape), dtype)


def test_weighted_normals_are_the_sum_of_single_draws() -> None:
    seed, samples, draws, weights = 9, torch.tensor([4, 2**40]), (7, 0, 12), (0.5, -3.0, 2.0)
    each = [
        w * standard_normal(seed, samples, draw, (6,), torch.float64) for w, draw in zip(weights, draws, strict=True)
    ]
    places, factors = torch.tensor(draws), torch.tensor(weights, dtype=torch.float64)
    found = weighted_normals(seed_words(seed, samples.device), samples, places, factors, 6)
    assert torch.equal(found, each[0] + each[1] + each[2])


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_finite_for_all_words(word, dtype, monkeypatch):
    """One word in four billion is 0: a sample of images takes millions."""
    monkeypatch.setattr("bsi.rng.philox", lambda counter, key: words(word, word, word, word))
    assert all(bool(torch.isfinite(z).all()) for z in normals(words(0, 0, 0, 0), (0, 0), dtype))
