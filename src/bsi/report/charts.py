"""Curves as inline SVG: axes with round numbers, lines, dots with error bars, and a tooltip on every dot.

Colors are CSS classes; the style sheet of the document defines them for light and dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Literal

WIDTH, HEIGHT = 560.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 12.0, 26.0, 34.0
BASE = HEIGHT - BOTTOM
MAX_POINTS = 600  # more are thinned out

Role = Literal["belief", "predict", "measure", "soft"]
Place = Callable[[float], float]  # from values to coordinates


@dataclass(frozen=True)
class Point:
    """A value and its standard error; 0 if unknown."""

    x: float
    y: float
    error: float = 0.0


@dataclass(frozen=True)
class Series:
    """Points in increasing order of x, drawn as one line."""

    name: str
    points: Sequence[Point]
    role: Role = "belief"
    dots: bool = False
    filled: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis. A logarithmic one leaves out values that are not positive. `low` and `high` limit the range."""

    name: str
    log: bool = False
    low: float | None = None
    high: float | None = None


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About `wanted` round numbers in [low, high]: multiples of 1, 2 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high) and high > low):
        return [low]
    raw = (high - low) / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten in [low, high], every second or third if there are many; round numbers if there are few."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first < 1:
        ones = [f * 10.0**p for p in range(first - 1, last + 1) for f in (1, 2, 5)]
        within = [value for value in ones if low <= value <= high]
        return within if len(within) > 2 else nice_ticks(low, high, 4)
    return [10.0**power for power in range(first, last + 1, 1 + (last - first) // 7)]


def label(value: float) -> str:
    """A short form of a number: 0.001, 2,000, 10⁶."""
    size = abs(value)
    if size and (size >= 1e5 or size < 1e-4):
        digits, _, power = f"{value:.0e}".partition("e")
        raised = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return f"10{raised}" if digits == "1" else f"{digits}·10{raised}"
    return f"{value:,.10g}" if size >= 1 or not size else f"{value:.3g}"


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> tuple[Place, list[float]]:
    """The function from values to coordinates between start and end, and the ticks."""
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    if not high > low:
        low, high = (low / 2, high * 2) if axis.log else (low - 0.5, high + 0.5)
    if not axis.log and axis.low is None:
        low -= 0.04 * (high - low)
    if not axis.log and axis.high is None:
        high += 0.04 * (high - low)

    def place(value: float) -> float:
        first, last, here = (math.log(v) if axis.log else v for v in (low, high, value))
        return start + (end - start) * min(1.0, max(0.0, (here - first) / (last - first)))

    return place, log_ticks(low, high) if axis.log else nice_ticks(low, high)


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """One chart as an SVG element; an empty string without points."""
    shown = [s for s in (replace(s, points=_usable(s.points, x, y)) for s in series) if s.points]
    if not shown:
        return ""
    points = [point for s in shown for point in s.points]
    across, columns = _scale(x, [p.x for p in points], LEFT, WIDTH - RIGHT)
    ends = [end for p in points for end in ((p.y,) if y.log else (p.y - p.error, p.y + p.error))]
    up, rows = _scale(y, ends, BASE, TOP)
    name = escape(title)
    parts = [f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{name}"><title>{name}</title>']
    for value in rows:
        parts.append(_line("rule", LEFT, up(value), WIDTH - RIGHT, up(value)))
        parts.append(_text("tick", LEFT - 7, up(value) + 3.5, label(value), "end"))
    for value in columns:
        parts.append(_line("rule", across(value), BASE, across(value), BASE + 4))
        parts.append(_text("tick", across(value), BASE + 16, label(value), "middle"))
    parts.append(_text("name", WIDTH - RIGHT, HEIGHT - 4, escape(x.name), "end"))
    parts.append(_text("name", 0.0, 11.0, escape(y.name)))
    for s in shown:
        parts += _draw(s, across, up, x.name)
    if len(shown) > 1:  # a legend at the top right, each name in its color
        names = " ".join(
            f'<tspan class="text {s.role}" dx="14">{"●" if s.dots else "—"} {escape(s.name)}</tspan>' for s in shown
        )
        parts.append(_text("name", WIDTH - RIGHT, 11.0, names, "end"))
    return "".join([*parts, "</svg>"])


def _usable(points: Sequence[Point], x: Axis, y: Axis) -> list[Point]:
    fit = [
        p for p in points
        if math.isfinite(p.x) and math.isfinite(p.y) and (p.x > 0 or not x.log) and (p.y > 0 or not y.log)
    ]  # fmt: skip
    every = -(-len(fit) // MAX_POINTS) or 1
    return fit[::-every][::-1]  # counted from the end, which keeps the last


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _text(kind: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _draw(series: Series, across: Place, up: Place, x_name: str) -> list[str]:
    places = [(across(p.x), up(p.y)) for p in series.points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = []
    if series.filled:
        area = f"{places[0][0]:.1f},{BASE} {line} {places[-1][0]:.1f},{BASE}"
        parts.append(f'<polygon class="fill {series.role}" points="{area}"/>')
    parts.append(f'<polyline class="line {series.role}" points="{line}"/>')
    for point, (x, y) in zip(series.points, places, strict=True) if series.dots else ():
        error = ""
        if point.error > 0:
            parts.append(_line(f"line {series.role}", x, up(point.y - point.error), x, up(point.y + point.error)))
            error = f" ± {point.error:.2g}"
        tip = escape(f"{series.name}: {point.y:.5g}{error}, {x_name} {label(point.x)}")
        parts.append(
            f'<circle class="dot {series.role}" cx="{x:.1f}" cy="{y:.1f}" r="3.4"><title>{tip}</title></circle>'
        )
    return parts
