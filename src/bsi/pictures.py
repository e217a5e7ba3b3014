"""Pictures of samples and of beliefs: grids, and animations of beliefs. Imports only NumPy and Pillow.

Images have the shape (n, channels, height, width) with one or three channels, and hold integers (bin indices) or
values. Both are scaled linearly from [low, high] to 0 .. 255 and rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Shaped, UInt8
from PIL import Image, ImageDraw, ImageFont

from bsi.errors import UsageError

Images = Shaped[np.ndarray, "n channels height width"]
Number = float | int

PAPER, INK, FAINT, BAR = (255, 255, 255), (34, 34, 40), (226, 226, 232), (58, 110, 190)
GAP = 2
BETWEEN = 12  # pixels between the panels of a frame
SMALLEST = 32  # pixels: smaller images are enlarged
SHEET, PANEL = 384, 256  # the width in pixels to which a grid, and a grid of an animation, is enlarged
COLUMNS = 20  # the most classes that have columns of their own
LINE = 18  # pixels: the height of a line of text
ANIMATIONS = (".gif", ".webp")


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether samples of this shape are images: one or three channels, height, width."""
    return len(shape) == 3 and shape[0] in (1, 3)


def pixels(
    images: Shaped[np.ndarray, "*shape"], low: Number | None = None, high: Number | None = None
) -> UInt8[np.ndarray, "*shape"]:
    """8-bit pixels of values in [low, high]: by default -1 to 1 for floats, 0 to 255 for integers."""
    images = np.asarray(images)
    default_low, default_high = (0.0, 255.0) if np.issubdtype(images.dtype, np.integer) else (-1.0, 1.0)
    low, high = default_low if low is None else low, default_high if high is None else high
    if not low < high:
        raise UsageError(f"pixels need low < high, got low={low} and high={high}.")
    scaled = (images.astype(np.float64) - low) * (255.0 / (high - low))
    return np.clip(np.rint(np.nan_to_num(scaled)), 0, 255).astype(np.uint8)


def class_columns(classes: int | None, count: int) -> int | None:
    """Columns of one class each for `count` samples that take the classes in turn, as near to a square as possible.

    None (a square) if there are too many classes.
    """
    return classes * max(1, math.isqrt(count) // classes) if classes and classes <= COLUMNS else None


def grid(
    images: Shaped[np.ndarray, "..."], columns: int | None = None, low: Number | None = None,
    high: Number | None = None, towards: int = SHEET,
) -> Image.Image:  # fmt: skip
    """The images row by row, by default in a square.

    Small grids are enlarged by an integer factor, to a width of about `towards` pixels.
    """
    shown = np.asarray(images)
    if shown.ndim != 4 or shown.shape[1] not in (1, 3) or not len(shown):
        expected = "at least one image of shape (1 or 3, height, width)"
        raise UsageError(f"a grid needs {expected}, got an array of shape {shown.shape}. Save other data with --npz.")
    shown = pixels(shown, low, high).transpose(0, 2, 3, 1)
    n = len(shown)
    columns = min(math.ceil(math.sqrt(n)) if columns is None else columns, n)
    rows = math.ceil(n / columns)
    enlarge = _enlargement(shown.shape[1], shown.shape[2], columns, towards)
    shown = shown.repeat(enlarge, axis=1).repeat(enlarge, axis=2)
    _, height, width, _ = shown.shape
    sheet = np.full((rows * (height + GAP) + GAP, columns * (width + GAP) + GAP, 3), PAPER[0], np.uint8)
    for i, image in enumerate(shown):
        top, left = GAP + i // columns * (height + GAP), GAP + i % columns * (width + GAP)
        sheet[top : top + height, left : left + width] = image
    return Image.fromarray(sheet)


def _enlargement(height: int, width: int, columns: int, towards: int) -> int:
    return max(math.ceil(SMALLEST / min(height, width)), towards // (columns * width))


@dataclass(frozen=True)
class Moment:
    """One step of a trajectory, as values in the range of the data; the last step, and symbols, have no measurement."""

    belief: Images
    prediction: Images
    measurement: Images | None
    precision: float


def belief_frames(moments: Sequence[Moment], low: Number = -1.0, high: Number = 1.0) -> list[Image.Image]:
    """One frame per step: belief mean, prediction and measurement side by side above the precision."""
    if not moments:
        raise UsageError("an animation needs at least one step")
    logs = [math.log10(max(moment.precision, 1e-300)) for moment in moments]
    blank = np.full_like(moments[0].prediction, (low + high) / 2, dtype=np.float64)
    frames = []
    for i, moment in enumerate(moments):
        parts = {"belief mean": moment.belief, "prediction": moment.prediction}
        if any(each.measurement is not None for each in moments):
            parts["measurement"] = blank if moment.measurement is None else moment.measurement
        panels = {name: grid(images, low=low, high=high, towards=PANEL) for name, images in parts.items()}
        reached = (logs[i] - logs[0]) / (logs[-1] - logs[0]) if logs[-1] > logs[0] else 1.0
        frames.append(_frame(panels, f"precision {moment.precision:.3g}, step {i} of {len(moments) - 1}", reached))
    return frames


def animation_bytes(shape: tuple[int, ...], num: int, steps: int) -> int:
    """Memory in bytes that an animation takes: per step three arrays of values, a frame and its copy.

    Pillow uses four bytes per RGB pixel.
    """
    columns = math.ceil(math.sqrt(num))
    enlarge = _enlargement(shape[1], shape[2], columns, PANEL)
    height, width = (side * enlarge + GAP for side in shape[1:])
    tall = math.ceil(num / columns) * height + GAP + 3 * LINE
    frame = 4 * (3 * (columns * width + GAP) + 2 * BETWEEN) * tall
    return steps * (2 * frame + 3 * 4 * num * math.prod(shape))


def _frame(panels: dict[str, Image.Image], caption: str, reached: float) -> Image.Image:
    """Titled panels in a row, a caption, and a progress bar filled to the fraction `reached`."""
    font = ImageFont.load_default(size=12)
    width, height = next(iter(panels.values())).size
    width = max(width, math.ceil(max(font.getlength(name) for name in panels)) + 2 * GAP)
    total = max(width * len(panels) + BETWEEN * (len(panels) - 1), math.ceil(font.getlength(caption)) + 2 * GAP)
    frame = Image.new("RGB", (total, height + 3 * LINE), PAPER)
    draw = ImageDraw.Draw(frame)
    for i, (name, panel) in enumerate(panels.items()):
        left = i * (width + BETWEEN)
        draw.text((left + GAP, 1), name, INK, font)
        frame.paste(panel, (left, LINE))
    draw.text((GAP, LINE + height), caption, INK, font)
    top, end = 2 * LINE + height + 4, total - 1 - GAP
    draw.rectangle((GAP, top, end, top + 8), FAINT)
    draw.rectangle((GAP, top, GAP + round(reached * (end - GAP)), top + 8), BAR)
    return frame


def animate(frames: Sequence[Image.Image], path: Path, seconds: float = 4.0, lossless: bool = False) -> None:
    """Write an animation (.gif or .webp) that repeats forever: `seconds`, then a pause on the last frame.

    For strongly enlarged pixels, a `lossless` .webp is sharper and smaller.
    """
    if path.suffix.lower() not in ANIMATIONS:
        raise UsageError(f"an animation must be a {' or '.join(ANIMATIONS)} file, got {path.name!r}.")
    each = max(40, round(1000 * seconds / len(frames)))
    durations = [each] * (len(frames) - 1) + [max(each, 1500)]
    # Pillow drops a frame that equals the one before, with its duration. The captions make all frames differ.
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0, lossless=lossless)
