"""How figures look: one style, colors that color-blind readers tell apart, labels beside the lines.

matplotlib is imported when a figure is drawn, and only then (`pip install matplotlib`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bsi.errors import UsageError
from bsi.studies.estimates import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

__all__ = [
    "COLORS",
    "FAINT",
    "GREY",
    "INK",
    "MARKS",
    "NAMES",
    "PALETTE",
    "SHADES",
    "Named",
    "error_line",
    "label",
    "label_ends",
    "label_points",
    "panels",
    "remove",
    "save",
    "style",
    "tile",
]

Number = float | int
Side = Literal["left", "center", "right"]

# Okabe and Ito (2008): told apart with any kind of color vision.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
COLORS = {"bsi": PALETTE[0], "vdm": PALETTE[1], "bfn": PALETTE[2]}
MARKS = {"bsi": "o", "vdm": "s", "bfn": "^"}
# Light to dark, for few to many of something of one method; in print without color too, by their marks.
SHADES = (("#3C9DD8", "o"), ("#0072B2", "s"), ("#00344F", "^"), ("#000000", "D"))
NAMES = {"bsi": "BSI", "vdm": "VDM", "bfn": "BFN"}
# Where words may stand beside a point, in points: right, left, above, below, then the corners.
SIDES: tuple[tuple[int, int, Side], ...] = (
    (7, 0, "left"), (-7, 0, "right"), (0, 10, "center"), (0, -10, "center"),
    (5, 12, "left"), (5, -12, "left"), (-5, 12, "right"), (-5, -12, "right"),
)  # fmt: skip
INK, GREY, FAINT = "#222228", "#6F6F78", "#E4E4EA"

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "text.color": INK,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "bsi",
}


@contextmanager
def style() -> Iterator[None]:
    """Draw and save inside this block."""
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(
            "figures are drawn by matplotlib, which is not installed: pip install matplotlib. What was measured is "
            "kept; the same command then draws the figure."
        ) from error
    with matplotlib.rc_context(STYLE):
        yield


def panels(columns: int, rows: int = 1, width: float = 3.2, height: float = 2.6) -> tuple[Figure, list[Axes]]:
    """An empty figure of panels, row by row; sizes of one panel in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def error_line(
    axes: Axes,
    x: Sequence[Number],
    found: Sequence[Estimate],
    color: str,
    mark: str = "o",
    dashes: str = "-",
    hollow: bool = False,
) -> None:
    """A line with its points, and bars of one standard error."""
    axes.errorbar(
        x, [e.value for e in found], yerr=[e.error for e in found], color=color, linestyle=dashes, marker=mark,
        markerfacecolor="white" if hollow else color, capsize=2, elinewidth=1,
    )  # fmt: skip


def label(
    axes: Axes,
    x: Number,
    y: Number,
    words: str,
    color: str,
    dx: Number = 5,
    dy: Number = 0,
    side: Side = "left",
    clear: bool = False,
) -> Annotation:
    """Words beside a point, in the line's color: no legend to look up. `side` is the end of the words at the point;
    `clear` keeps lines from running through them."""
    return axes.annotate(
        words, (x, y), xytext=(dx, dy), textcoords="offset points", color=color, va="center", ha=side, fontsize=8.5,
        fontweight="bold", annotation_clip=False,
        bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.6} if clear else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Named:
    """A point, the end of a line or one alone, and what it is called."""

    x: Number
    y: Number
    words: str
    color: str


def label_ends(axes: Axes, ends: Sequence[Named], apart: float = 11.0) -> None:
    """Label lines at their ends, at least so many points apart. Call it when the axes' scales and limits are final."""
    low, high = axes.get_ylim()
    size = axes.get_window_extent().height * 72 / axes.figure.dpi  # in points; about, before the layout is final
    place = (lambda y: math.log(y)) if axes.get_yscale() == "log" else (lambda y: y)
    wanted = {end: (place(end.y) - place(low)) / (place(high) - place(low)) * size for end in ends}
    taken: list[float] = []
    order = sorted(ends, key=lambda end: wanted[end])
    for end in order:
        taken.append(max(wanted[end], taken[-1] + apart) if taken else wanted[end])
    excess = sum(y - wanted[end] for y, end in zip(taken, order, strict=True)) / len(order)
    excess = min(excess, taken[0] - apart / 2)  # above the axis
    for y, end in zip(taken, order, strict=True):
        label(axes, end.x, end.y, end.words, end.color, dx=6, dy=y - wanted[end] - excess, clear=True)


def label_points(axes: Axes, points: Sequence[Named]) -> None:
    """Label points that stand alone, each on the first side where its words hide neither point nor other words. Call it
    when the figure's layout is final."""
    marks = [axes.transData.transform((point.x, point.y)) for point in points]
    room = axes.get_window_extent()
    taken: list[Bbox] = []
    for point in points:
        for dx, dy, side in SIDES:
            words = label(axes, point.x, point.y, point.words, point.color, dx, dy, side)
            box = words.get_window_extent()
            inside = room.x0 <= box.x0 and box.x1 <= room.x1 and room.y0 <= box.y0 and box.y1 <= room.y1
            if inside and not box.count_contains(marks) and not box.count_overlaps(taken):
                break
            words.remove()
        else:  # no side is free: the first has to do
            words = label(axes, point.x, point.y, point.words, point.color, *SIDES[0])
        taken.append(words.get_window_extent())


def tile(images: np.ndarray, columns: int, gap: int = 1) -> np.ndarray:
    """8-bit images (n, channels, height, width) side by side, as one (height, width, 3) picture on white."""
    n, channels, height, width = images.shape
    rows = -(-n // columns)
    sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8)
    for i, image in enumerate(images):
        top, left = i // columns * (height + gap), i % columns * (width + gap)
        shown = image.transpose(1, 2, 0)
        sheet[top : top + height, left : left + width] = shown if channels == 3 else shown.repeat(3, axis=2)
    return sheet


def save(figure: Figure, folder: Path) -> None:
    """The figure as PNG and SVG, the same bytes every time."""
    figure.savefig(folder / "figure.png", dpi=150, metadata={"Software": None})
    figure.savefig(folder / "figure.svg", metadata={"Date": None, "Creator": None})


def remove(folder: Path) -> None:
    """What `save` wrote."""
    for name in ("figure.png", "figure.svg"):
        (folder / name).unlink(missing_ok=True)
