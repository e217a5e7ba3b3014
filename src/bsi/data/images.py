"""One image file to one array of bytes, or a refusal that names the file.

What is done is said in the manifest: the largest centerd square, resampled to size x size. What cannot be done
faithfully is refused: a truncated file, more than eight bits per channel, CMYK, transparency, several frames, sizes
that a decoder should not be asked for, and images smaller than the size, which would have to be made up.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from bsi.errors import DataError, UsageError

__all__ = ["SUFFIXES", "Resampling", "check_options", "decode", "read"]

# Decoders that are pure image readers; others call programs (EPS) or are rarely fuzzed.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
MAX_PIXELS = 1 << 26

Resampling = Literal["lanczos", "bicubic", "bilinear", "box"]
_FILTERS = {
    "lanczos": Image.Resampling.LANCZOS,
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "box": Image.Resampling.BOX,
}


def check_options(size: int, channels: int, resampling: str, test_fraction: float) -> None:
    """Refuse impossible options before any file is read."""
    if not 1 <= size <= 4096:
        raise UsageError(f"size is the side of the images in pixels, 1 to 4096: got {size}")
    if channels not in (1, 3):
        raise UsageError(f"channels is 3 (color) or 1 (gray): got {channels}")
    if resampling not in get_args(Resampling):
        raise UsageError(f"resampling is one of {', '.join(get_args(Resampling))}: got {resampling!r}")
    if not 0 <= test_fraction < 1:
        raise UsageError(f"test_fraction lies in [0, 1): got {test_fraction}")


def read(path: Path, name: str, size: int, channels: int, resampling: Resampling) -> UInt8[np.ndarray, "c size size"]:
    """The image in a file, as (channels, size, size). Errors begin with `name`."""
    try:
        if not path.stat().st_size:
            raise DataError(f"{name} is empty")
        with Image.open(path, formats=FORMATS) as image:
            return decode(image, name, size, channels, resampling)
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{name} is too large to decode: {error}") from error
    except Exception as error:  # a decoder fed with garbage may raise anything
        raise DataError(f"{name} cannot be decoded ({type(error).__name__}: {error})") from error


def decode(
    image: Image.Image, name: str, size: int, channels: int, resampling: Resampling
) -> UInt8[np.ndarray, "c size size"]:
    """The same for an opened image."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise DataError(f"{name} has {width} x {height} pixels, more than {MAX_PIXELS}: shrink it first")
    if min(width, height) < size:
        raise DataError(f"{name} has {width} x {height} pixels, fewer than the size {size}: choose a smaller --size")
    if getattr(image, "is_animated", False) and image.format != "MPO":  # a camera's MPO begins with the picture itself
        raise DataError(f"{name} is animated or has several pages: save one of them")
    if image.mode == "CMYK":
        raise DataError(f"{name} is CMYK: its colors depend on a profile; convert it to RGB first")
    if _wide(image):
        raise DataError(f"{name} has more than eight bits per channel: convert it to 8 bits first")
    if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA"):
        raise DataError(f"{name} has the color mode {image.mode}: convert it to RGB first")
    image = ImageOps.exif_transpose(image)  # upright, as every viewer shows it
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema() != (255, 255):
            raise DataError(f"{name} is partly transparent: flatten it first")
    image = image.convert("RGB" if channels == 3 else "L")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    image = image.resize((size, size), _FILTERS[resampling], box=(left, top, left + side, top + side))
    pixels = np.asarray(image)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1) if channels == 3 else pixels[None])


def _wide(image: Image.Image) -> bool:
    """More than eight bits per channel. Pillow hides this for color PNGs, so the decoder's own mode is looked at."""
    if image.mode.startswith(("I", "F")):
        return True
    if image.format not in ("PNG", "TIFF"):
        return False
    return any(re.search(r";(16|32)", str(tile[3])) for tile in getattr(image, "tile", ()))
