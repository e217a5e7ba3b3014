"""Images from files and arrays in batches of uint8 (n, 3, h, w), the input of extractors.

Nothing is resized, cropped or requantized: the extractor gets what a file holds in 8 bits. Files with other content (16
bits, CMYK, transparency, an animation) are rejected with an error that names the file, and not converted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor

from bsi.data.image_folder import SUFFIXES, open_image
from bsi.errors import DataError


def image_files(folder: Path) -> list[Path]:
    """The image files in `folder` and below, sorted by path."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise DataError(f"{folder} holds no images: none of its files ends in {', '.join(SUFFIXES)}.")
    return files


def file_batches(files: Iterable[Path], size: int) -> Iterator[UInt8[Tensor, "n 3 h w"]]:
    """The files' images in order, gray ones in three equal channels. A batch ends before an image of another size."""
    batch: list[np.ndarray] = []
    for path in files:
        image = np.asarray(open_image(path, str(path)).convert("RGB")).transpose(2, 0, 1)
        if batch and (len(batch) == size or batch[0].shape != image.shape):
            yield torch.from_numpy(np.stack(batch))
            batch = []
        batch.append(image)
    if batch:
        yield torch.from_numpy(np.stack(batch))


def array_batches(
    blocks: Iterable[Shaped[np.ndarray, "..."]], size: int, name: str
) -> Iterator[UInt8[Tensor, "n 3 h w"]]:
    """Batches of at most `size` from arrays of shape (n, h, w), (n, c, h, w) or (n, h, w, c) with c of 1 or 3."""
    for block in blocks:
        if block.dtype != np.uint8:
            raise DataError(
                f"{name} holds {block.dtype}; images must be uint8, 0 to 255. Round first, never truncate: for values "
                "in [-1, 1], np.clip(np.rint((x + 1) * 127.5), 0, 255).astype(np.uint8)."
            )
        first = _channels_first(block, name)
        for start in range(0, len(block), size):
            piece = first[start : start + size]
            yield torch.from_numpy(np.broadcast_to(piece, (len(piece), 3, *piece.shape[2:])).copy())


def _channels_first(block: Shaped[np.ndarray, "..."], name: str) -> Shaped[np.ndarray, "n c h w"]:
    if block.ndim == 3:
        return block[:, None]
    if block.ndim == 4 and (block.shape[1] in (1, 3)) != (block.shape[3] in (1, 3)):
        return block if block.shape[1] in (1, 3) else block.transpose(0, 3, 1, 2)
    raise DataError(
        f"{name} must have the shape (n, h, w), (n, c, h, w) or (n, h, w, c) with 1 or 3 channels, got {block.shape}."
    )
