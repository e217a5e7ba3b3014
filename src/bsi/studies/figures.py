"""The common style of the figures, with colors that color-blind readers can distinguish.

matplotlib is imported only when a figure is drawn (extra `figures`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bsi.errors import extra
from bsi.studies.outcome import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Number = float | int

# Okabe and Ito (2008), for any kind of color vision.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
COLORS = {"bsi": PALETTE[0], "vdm": PALETTE[1], "bfn": PALETTE[2]}
MARKS = {"bsi": "o", "vdm": "s", "bfn": "^"}
NAMES = {"bsi": "BSI", "vdm": "VDM", "bfn": "BFN"}
# Light to dark, for increasing values, with markers for prints without color.
SHADES = (("#3C9DD8", "o"), ("#0072B2", "s"), ("#00344F", "^"), ("#000000", "D"))
INK, GREY, FAINT = "#222228", "#6F6F78", "#E4E4EA"

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "text.color": INK,
}


@contextmanager
def style() -> Iterator[None]:
    """Figures are drawn and saved inside this block."""
    with extra("figures", "drawing a figure"):
        import matplotlib
    with matplotlib.rc_context(STYLE):
        yield


def panels(columns: int, rows: int = 1, width: float = 3.4, height: float = 2.8) -> tuple[Figure, list[Axes]]:
    """An empty figure of panels, row by row; sizes of one panel in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def line(axes: Axes, x: Sequence[Number], found: Sequence[Estimate], color: str, mark: str = "o", **how: Any) -> None:
    """A line through estimates, with bars of one standard error."""
    axes.errorbar(
        x, [e.value for e in found], yerr=[e.error for e in found], color=color, marker=mark, capsize=2, elinewidth=1,
        **how,
    )  # fmt: skip


def label(axes: Axes, x: Number, y: Number, text: str, color: str, dx: Number = 5, dy: Number = 0) -> None:
    """Text next to a point, in points to its right and above."""
    axes.annotate(
        text, (x, y), xytext=(dx, dy), textcoords="offset points", color=color, va="center", fontsize=8.5,
        fontweight="bold", annotation_clip=False,
    )  # fmt: skip


def log_axis(axes: Axes, ticks: Sequence[Number], base: int = 2) -> None:
    """A logarithmic x axis with these ticks."""
    axes.set_xscale("log", base=base)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
