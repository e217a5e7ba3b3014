"""Curves as inline SVG: axes with round numbers, lines, dots with error bars, and a tooltip on every dot.

Colors are CSS classes; the style sheet of the document defines them for light and dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, NamedTuple

WIDTH, HEIGHT = 560.0, 240.0
LEFT, RIGHT, TOP, BASE = 58.0, 548.0, 26.0, 206.0
MAX_POINTS = 600  # more are thinned out

Role = Literal["belief", "predict", "measure", "soft"]
Coordinate = Callable[[float], float]  # from values to coordinates


class Point(NamedTuple):
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

    def shows(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self.log)

    def scale(self, values: Sequence[float], start: float, end: float) -> tuple[Coordinate, list[float]]:
        """The function from values to coordinates between start and end, and the ticks."""
        low = min(values) if self.low is None else self.low
        high = max(values) if self.high is None else self.high
        if not high > low:
            pad = max(0.5, 0.01 * abs(low))
            low, high = (low / 2, low * 2) if self.log else (low - pad, low + pad)
        margin = 0.0 if self.log else 0.04 * (high - low)
        low -= margin if self.low is None else 0.0
        high += margin if self.high is None else 0.0

        def place(value: float) -> float:
            first, last, here = (math.log(v) if self.log else v for v in (low, high, value))
            return start + (end - start) * min(1.0, max(0.0, (here - first) / (last - first)))

        return place, log_ticks(low, high) if self.log else nice_ticks(low, high)


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About `wanted` round numbers in [low, high]: multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


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


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """One chart as an SVG element; an empty string without points."""
    shown = [(s, points) for s in series if (points := [p for p in s.points if x.shows(p.x) and y.shows(p.y)])]
    if not shown:
        return ""
    every = [point for _, points in shown for point in points]
    across, columns = x.scale([p.x for p in every], LEFT, RIGHT)
    up, rows = y.scale([end for p in every for end in ((p.y,) if y.log else (p.y - p.error, p.y + p.error))], BASE, TOP)
    name = escape(title)
    parts = [f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{name}"><title>{name}</title>']
    for value in rows:
        parts.append(_line("rule", LEFT, up(value), RIGHT, up(value)))
        parts.append(_text("tick", LEFT - 7, up(value) + 3.5, label(value), "end"))
    for value in columns:
        parts.append(_line("rule", across(value), BASE, across(value), BASE + 4))
        parts.append(_text("tick", across(value), BASE + 16, label(value), "middle"))
    parts.append(_text("name", RIGHT, HEIGHT - 4, escape(x.name), "end"))
    parts.append(_text("name", 0.0, 11.0, escape(y.name)))
    for s, points in shown:
        thinned = points[:: -(-len(points) // MAX_POINTS) * -1][::-1]  # counted from the end, which keeps the last
        places = [(across(p.x), up(p.y)) for p in thinned]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        if s.filled:
            area = f"{places[0][0]:.1f},{BASE} {line} {places[-1][0]:.1f},{BASE}"
            parts.append(f'<polygon class="fill {s.role}" points="{area}"/>')
        parts.append(f'<polyline class="line {s.role}" points="{line}"/>')
        for p, (a, b) in zip(thinned, places, strict=True) if s.dots else ():
            error = f" ± {p.error:.2g}" if p.error > 0 else ""
            parts += [_line(f"line {s.role}", a, up(p.y - p.error), a, up(p.y + p.error))] if error else []
            tip = escape(f"{s.name}: {p.y:.5g}{error}, {x.name} {label(p.x)}")
            parts.append(
                f'<circle class="dot {s.role}" cx="{a:.1f}" cy="{b:.1f}" r="3.4"><title>{tip}</title></circle>'
            )
    if len(shown) > 1:  # a legend at the top right, each name in its color
        marks = [(s.role, f"{'●' if s.dots else '—'} {escape(s.name)}") for s, _ in shown]
        names = " ".join(f'<tspan class="text {role}" dx="14">{mark}</tspan>' for role, mark in marks)
        parts.append(_text("name", RIGHT, 11.0, names, "end"))
    return "".join([*parts, "</svg>"])


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _text(kind: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
