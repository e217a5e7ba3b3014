"""Images from files and arrays as extractors take them: batches of uint8 (n, 3, h, w).

Nothing is resized, cropped or requantized here: what a file holds in 8 bits is what the extractor sees. Files that hold
something else (16 bits, CMYK, transparency, an animation) are refused by name rather than converted by a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Shaped, UInt8
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from bsi.errors import DataError

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".webp"})
MAX_PIXELS = 1 << 24


def image_files(folder: Path) -> list[Path]:
    """The image files in `folder` and below, sorted by path."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise DataError(f"{folder} holds no images: none of its files ends in {', '.join(sorted(SUFFIXES))}.")
    return files


def read_image(path: Path) -> UInt8[np.ndarray, "3 h w"]:
    """One 8-bit image, gray ones repeated to three channels."""
    try:
        with Image.open(path) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"{path} has {image.width} x {image.height} pixels; the limit is {MAX_PIXELS}.")
            frames = getattr(image, "n_frames", 1)  # formats without animation have no such attribute
            if frames > 1:
                raise DataError(f"{path} is an animation of {frames} frames. Save one frame for each sample.")
            if "A" in image.getbands() or "transparency" in image.info:
                if image.convert("RGBA").getchannel("A").getextrema() != (255, 255):
                    raise DataError(f"{path} is transparent in places. Put it on a background first.")
            elif image.mode not in ("1", "L", "P", "RGB"):
                raise DataError(f"{path} has the mode {image.mode}, which is not 8-bit gray or RGB. Convert it first.")
            return np.asarray(image.convert("RGB")).transpose(2, 0, 1).copy()
    except (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is no whole image: {error}. Delete or replace it.") from error


def file_batches(files: Iterable[Path], size: int) -> Iterator[UInt8[Tensor, "n 3 h w"]]:
    """The files' images in order; a batch ends early where the next image has another height or width."""
    batch: list[np.ndarray] = []
    for path in files:
        image = read_image(path)
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
        f"{name} must have the shape (n, h, w), (n, c, h, w) or (n, h, w, c) with 1 or 3 channels: got {block.shape}."
    )
