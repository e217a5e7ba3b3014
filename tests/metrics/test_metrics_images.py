"""Images of files and arrays reach the extractor as they are, or are refused by name."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bsi.errors import DataError
from bsi.metrics.features import array_batches, file_batches, image_files


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_a_folder_is_read_in_order_and_batched_by_size(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    shapes = {"a.png": (4, 5), "b.bmp": (4, 5), "c.PNG": (4, 5), "deep/d.png": (6, 5)}
    for seed, (name, shape) in enumerate(shapes.items()):
        Image.fromarray(picture(*shape, seed)).save(tmp_path / name)
    (tmp_path / "notes.txt").touch()
    batches = list(file_batches(image_files(tmp_path), size=2))
    assert [tuple(batch.shape) for batch in batches] == [(2, 3, 4, 5), (1, 3, 4, 5), (1, 3, 6, 5)]
    np.testing.assert_array_equal(batches[0][1].numpy(), picture(4, 5, 1).transpose(2, 0, 1))


def test_files_of_every_mode_are_their_rgb_and_unusable_ones_are_named(tmp_path: Path) -> None:
    color = Image.fromarray(picture(4, 4))
    for mode in ("L", "P", "RGBA"):
        color.convert(mode).save(tmp_path / f"{mode}.png")
        expected = np.asarray(color.convert(mode).convert("RGB")).transpose(2, 0, 1)
        np.testing.assert_array_equal(next(file_batches([tmp_path / f"{mode}.png"], 1))[0].numpy(), expected)
    color.convert("CMYK").save(tmp_path / "cmyk.jpg")
    with pytest.raises(DataError, match=r"cmyk\.jpg is CMYK"):
        next(file_batches([tmp_path / "cmyk.jpg"], 1))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no images"):
        image_files(tmp_path / "empty")


def test_arrays_of_every_layout_become_three_channels_first() -> None:
    last = np.stack([picture(4, 5, seed) for seed in range(5)])
    first = torch.from_numpy(last).permute(0, 3, 1, 2)
    for array in (last, first.numpy()):
        torch.testing.assert_close(torch.cat(list(array_batches([array[:3], array[3:]], 2, "x"))), first)
    gray = last[..., 0]
    for array in (gray, gray[:, None], gray[..., None]):
        torch.testing.assert_close(next(array_batches([array], 8, "x")), first[:, :1].expand(-1, 3, -1, -1))


@pytest.mark.parametrize("shape", [(2, 3, 8, 3), (2, 4, 8, 8), (2, 8), (2, 3, 8, 8, 1)])
def test_shapes_that_are_no_images_or_ambiguous_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="with 1 or 3 channels, got"):
        next(array_batches([np.zeros(shape, np.uint8)], 2, "x"))
    with pytest.raises(DataError, match=r"x holds float32.*never truncate"):
        next(array_batches([np.zeros((2, 3, 8, 8), np.float32)], 2, "x"))
