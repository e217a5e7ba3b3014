"""Pictures: rounding, layout, and animations that open again."""

import numpy as np
import pytest
from PIL import Image

from bsi.errors import UsageError
from bsi.pictures import Moment, animate, animation_bytes, belief_frames, class_columns, grid, pixels


def test_pixels_are_rounded_and_never_truncated():
    values = np.array([-1.0, -0.999, 0.0, 0.5 / 127.5 - 1e-9, 1.5 / 127.5, 1.0, 7.0, -7.0, np.nan])
    assert pixels(values).tolist() == [0, 0, 128, 128, 129, 255, 255, 0, 0]
    index = np.arange(256, dtype=np.uint8)
    assert np.array_equal(pixels(index), index)
    assert pixels(np.array([0, 8, 16], np.uint8), 0, 16).tolist() == [0, 128, 255]
    assert np.array_equal(pixels(index / 127.5 - 1), index)


def test_a_grid_shows_every_image_in_order():
    images = np.zeros((5, 3, 32, 40), np.uint8)
    for i in range(5):
        images[i] = 10 * (i + 1)
    picture = np.asarray(grid(images, towards=0))
    assert picture.shape == (2 * 34 + 2, 3 * 42 + 2, 3)  # three columns, gaps of two pixels
    assert [int(picture[2 + 16, 2 + 42 * i + 20, 0]) for i in range(3)] == [10, 20, 30]
    assert [int(picture[2 + 34 + 16, 2 + 42 * i + 20, 0]) for i in range(3)] == [40, 50, 255]
    assert np.asarray(grid(images, columns=5, towards=0)).shape[0] == 36


def test_small_images_are_enlarged():
    assert grid(np.zeros((400, 1, 8, 8), np.uint8)).size == (20 * 34 + 2, 20 * 34 + 2)
    assert grid(np.zeros((16, 1, 8, 8), np.uint8)).size == (4 * 98 + 2, 4 * 98 + 2)
    assert grid(np.zeros((64, 3, 32, 32), np.uint8)).size == (8 * 34 + 2, 8 * 34 + 2)
    assert grid(np.zeros((1, 3, 500, 500), np.uint8)).size == (504, 504)


@pytest.mark.parametrize(("shape", "num"), [((1, 8, 8), 16), ((3, 32, 32), 9), ((3, 300, 200), 2)])
def test_the_memory_of_an_animation_is_estimated(shape, num):
    moment = Moment(*np.zeros((3, num, *shape), np.float32), 1.0)
    (frame,) = belief_frames([moment])
    held = 2 * 4 * frame.width * frame.height + sum(
        part.nbytes for part in (moment.belief, moment.prediction, moment.measurement)
    )
    assert animation_bytes(shape, num, 1) == pytest.approx(held, rel=0.02)


def test_values_without_a_picture_are_rejected():
    for shape in ((4, 2, 8, 8), (4, 8), (0, 3, 8, 8)):
        with pytest.raises(UsageError, match="1 or 3"):
            grid(np.zeros(shape, np.uint8))
    with pytest.raises(UsageError, match="low < high"):
        pixels(np.zeros(3), 1.0, 1.0)


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_an_animation_has_a_frame_for_every_step(tmp_path, suffix):
    random = np.random.default_rng(0)
    moments = [
        Moment(*random.normal(size=(2, 4, 1, 8, 8)), random.normal(size=(4, 1, 8, 8)) if i < 5 else None, 10.0**i)
        for i in range(6)
    ]
    frames = belief_frames(moments)
    assert len({frame.size for frame in frames}) == 1
    target = tmp_path / f"belief{suffix}"
    animate(frames, target, seconds=1.0)
    with Image.open(target) as opened:
        assert opened.n_frames == 6
        assert opened.size == frames[0].size
    with pytest.raises(UsageError, match=r"\.gif or \.webp"):
        animate(frames, tmp_path / "belief.mp4")
    with pytest.raises(UsageError, match="at least one step"):
        belief_frames([])


def test_each_column_is_of_one_of_a_few_classes():
    few = {None: None, 0: None, 1: 8, 2: 8, 3: 6, 10: 10, 20: 20, 21: None, 1000: None}
    assert {classes: class_columns(classes, 64) for classes in few} == few
