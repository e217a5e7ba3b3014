"""Figures of the studies. matplotlib is imported only when one is drawn (extra `figures`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bsi.errors import extra
from bsi.studies.outcome import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito (2008)
MARKS = "os^Dvp*"
COLORS = {"bsi": PALETTE[0], "vdm": PALETTE[1], "bfn": PALETTE[2]}
GREY = "#6F6F78"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4EA",
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


@contextmanager
def style() -> Iterator[None]:
    """Figures are drawn and saved inside this block."""
    with extra("figures", "drawing a figure"):
        import matplotlib
    with matplotlib.rc_context(STYLE):
        yield


def panels(columns: int, width: float = 3.4, height: float = 2.8) -> tuple[Figure, list[Axes]]:
    """An empty figure of panels in a row; sizes of one panel in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False).flat)


def curves(
    axes: Axes, x: Sequence[float | int], found: Mapping[str, Sequence[Estimate]], base: int = 2, **labels: Any
) -> None:
    """Estimates by name, with bars of one standard error, over a logarithmic axis. Methods have colors of their own."""
    for i, (name, estimates) in enumerate(found.items()):
        color = COLORS.get(name.lower(), PALETTE[i % len(PALETTE)])
        axes.errorbar(
            x[: len(estimates)], [e.value for e in estimates], yerr=[e.error for e in estimates], color=color,
            marker=MARKS[PALETTE.index(color)], capsize=2, elinewidth=1, label=name,
        )  # fmt: skip
    axes.set_xscale("log", base=base)
    axes.set_xticks(x, [f"{tick:g}" for tick in x])
    axes.minorticks_off()
    axes.set(**labels)
    axes.legend()
