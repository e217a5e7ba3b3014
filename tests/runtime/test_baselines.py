"""What a histogram and image formats need for images: numbers to compare a bound with."""

import math

import numpy as np
import pytest

from bsi.runtime.baselines import baselines, baselines_text
from bsi.values import Bins


def test_a_histogram_knows_each_pixel_and_nothing_else():
    train = np.zeros((6, 1, 1, 2), np.uint8)
    train[:3, ..., 1] = 1  # the first pixel is always 0, the second 0 or 1 evenly
    test = np.array([[[[0, 1]]]], np.uint8)
    expected = -(math.log2((6 + 1) / (6 + 2)) + math.log2((3 + 1) / (6 + 2))) / 2
    assert baselines(train, test, Bins(0.0, 1.0, 2))["histogram"] == pytest.approx(expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_image_formats_need_the_entropy_of_noise_and_little_for_what_repeats(channels):
    generator = np.random.default_rng(0)
    noise = generator.integers(0, 256, (300, channels, 16, 12), dtype=np.uint8)
    repeated = np.repeat(noise[:1], 300, axis=0)
    for name in ("PNG", "WebP"):
        assert 8.0 <= baselines(noise, noise, Bins.uint8())[name] < 8.8  # PNG: one more byte for each row
        assert baselines(noise, repeated, Bins.uint8())[name] < 1.0


def test_data_that_is_not_8_bit_images_has_no_baselines():
    vectors, images = np.zeros((5, 4), np.uint8), np.zeros((5, 1, 4, 4), np.uint16)
    assert baselines(vectors, vectors, Bins.uint8()) == {}
    assert baselines(images, images, Bins(-1.0, 1.0, 65536)) == {}
    assert baselines(images.astype(np.float32), images.astype(np.float32), None) == {}
    assert baselines_text({}) == ""
    assert baselines_text({"histogram": 2.4402, "PNG": 4.03}) == "histogram 2.44, PNG 4.03 bits/dim"
