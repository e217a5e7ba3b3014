"""Baselines by simple models and file formats, to compare a bound with."""

import math

import numpy as np
import pytest

from bsi.data.baselines import baselines, baselines_text
from bsi.values import CONTINUOUS, Bins, Symbols

SOUND = Bins(-1.0, 1.0, 65536)


def test_a_histogram_knows_each_pixel_and_nothing_else():
    train = np.zeros((6, 1, 1, 2), np.uint8)
    train[:3, ..., 1] = 1  # the first pixel is always 0, the second is 0 or 1 with equal probability
    test = np.array([[[[0, 1]]]], np.uint8)
    expected = -(math.log2((6 + 1) / (6 + 2)) + math.log2((3 + 1) / (6 + 2))) / 2
    assert baselines(train, test, Bins(0.0, 1.0, 2))["histogram"] == pytest.approx(expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_image_formats_need_the_entropy_of_noise_and_little_for_repetition(channels):
    generator = np.random.default_rng(0)
    noise = generator.integers(0, 256, (300, channels, 16, 12), dtype=np.uint8)
    repeated = np.repeat(noise[:1], 300, axis=0)
    for name in ("PNG", "WebP"):
        assert 8.0 <= baselines(noise, noise, Bins.uint8())[name] < 8.8  # PNG: one more byte for each row
        assert baselines(noise, repeated, Bins.uint8())[name] < 1.0


def test_linear_prediction_costs_the_noise_of_a_tone():
    generator, t = np.random.default_rng(0), np.arange(4096)
    tone = 9000 * np.sin(0.05 * t + generator.uniform(0, 6, (8, 2, 1))) + 40 * generator.standard_normal((8, 2, 4096))
    series = (tone.round() + 32768).astype(np.uint16)
    found = baselines(series, series, SOUND)
    entropy = math.log2(40 * math.sqrt(2 * math.pi * math.e))  # 7.37
    assert entropy < found["linear prediction"] < entropy + 0.5
    assert found["linear prediction"] + 1 < found["LZMA"] < 16


@pytest.mark.parametrize(("bins", "bits"), [(SOUND, 16), (Bins.uint8(), 8), (Bins(-1.0, 1.0, 17), 5)])
def test_noise_is_stored_without_prediction(bins, bits):
    series = np.random.default_rng(0).integers(0, bins.count, (4, 1, 2048))
    assert math.log2(bins.count) < baselines(series, series, bins)["linear prediction"] < bits + 0.05


def test_ngrams_reach_the_entropy_of_a_markov_chain():
    generator = np.random.default_rng(0)
    law = generator.dirichlet(np.ones(3), size=3)  # of the next symbol, for each symbol before it
    rows = np.zeros((3000, 64), np.uint8)
    for i in range(1, 64):
        rows[:, i] = (generator.random((3000, 1)) > law[rows[:, i - 1]].cumsum(1)).sum(1)
    train, test = rows[:2000], rows[2000:]
    found = baselines(train, test, Symbols(3))
    after = law[test[:, :-1]]
    entropy = -(after * np.log2(after)).sum() / test.size  # the first symbol is always 0
    assert entropy < found["6-grams"] < 1.06 * entropy < found["1-grams"] < math.log2(3)
    assert found["6-grams"] < found["LZMA"]


def test_ngram_probabilities_sum_to_one_after_unseen_contexts():
    train = np.array([[0, 1, 0], [1, 0, 2], [0, 0, 1]])
    rows = np.stack(np.meshgrid(*[np.arange(4)] * 3, indexing="ij"), -1).reshape(-1, 3)
    bits = [baselines(train, row[None], Symbols(4))["6-grams"] for row in rows]
    assert sum(2.0 ** (-3 * each) for each in bits) == pytest.approx(1)


def test_gaussians_have_their_entropies_in_the_units_of_the_data():
    mixing = np.array([[2.0, 1.0, 0.0], [0.0, 1.0, 3.0], [0.0, 0.0, 0.5]])
    train, test = (np.random.default_rng(seed).standard_normal((20_000, 3)) @ mixing + 100 for seed in (0, 1))
    found = baselines(train, test, CONTINUOUS)
    full = np.linalg.slogdet(2 * np.pi * math.e * mixing.T @ mixing)[1] / 6
    diagonal = np.log(2 * np.pi * math.e * (mixing**2).sum(axis=0)).mean() / 2
    tolerance = 4 / math.sqrt(2 * 2048 * 3)  # four standard errors of the test set
    assert found["full Gaussian"] * math.log(2) == pytest.approx(full, abs=tolerance)
    assert found["diagonal Gaussian"] * math.log(2) == pytest.approx(diagonal, abs=tolerance)
    assert list(baselines(train[:, [0, 1, 1]], test[:, [0, 1, 1]], CONTINUOUS)) == ["diagonal Gaussian"]  # singular
    assert baselines(train * [1, 0, 1], test, CONTINUOUS) == {}  # a constant column has no density


def test_unsupported_data_has_no_baselines():
    vectors, images = np.zeros((5, 4), np.uint8), np.zeros((5, 1, 4, 4), np.uint16)
    assert baselines(vectors, vectors, Bins.uint8()) == {}
    assert baselines(images, images, SOUND) == {}
    assert baselines(images.astype(np.float32), images.astype(np.float32), CONTINUOUS) == {}
    assert list(baselines(images, images, Symbols(2))) == ["histogram"]
    assert baselines(images[:0], images, SOUND) == {}


def test_baselines_are_printed_in_the_units_of_the_bound():
    assert baselines_text({}) == ""
    assert baselines_text({"LZMA": 2.5}, element="char") == "LZMA 2.50 bits/char"
    assert baselines_text({"histogram": 2.4402, "PNG": 4.03}) == "histogram 2.44, PNG 4.03 bits/dim"
    assert baselines_text({"full Gaussian": 2.0}, binned=False) == "full Gaussian 1.39 nats/dim"
