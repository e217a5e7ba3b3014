"""Curves as inline SVG: axes with round numbers, lines, dots with error bars, and a tooltip on every dot.

Colors are CSS classes; the style sheet of the document defines them for light and dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 560.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 12.0, 26.0, 34.0
MAX_POINTS = 600  # more are thinned out

Role = Literal["belief", "predict", "measure", "soft"]


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
    every = 1 + (last - first) // 7
    return [10.0**power for power in range(first, last + 1, every)]


def label(value: float) -> str:
    """A short form of a number: 0.001, 2,000, 10⁶."""
    size = abs(value)
    if size and (size >= 1e5 or size < 1e-4):
        digits, _, power = f"{value:.0e}".partition("e")
        raised = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return f"10{raised}" if digits == "1" else f"{digits}·10{raised}"
    return f"{value:,.10g}" if size >= 1 or not size else f"{value:.3g}"


@dataclass(frozen=True)
class _Scale:
    """From values to coordinates."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    @classmethod
    def of(cls, axis: Axis, values: Sequence[float], start: float, end: float) -> _Scale:
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        if not high > low:
            low, high = (low / 2, high * 2) if axis.log else (low - 0.5, high + 0.5)
        if not axis.log and axis.low is None:
            low -= 0.04 * (high - low)
        if not axis.log and axis.high is None:
            high += 0.04 * (high - low)
        return cls(low, high, start, end, axis.log)

    @property
    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else nice_ticks(self.low, self.high)

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * min(1.0, max(0.0, (value - low) / (high - low)))


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """One chart as an SVG element; an empty string without points."""
    shown = [Series(s.name, _usable(s.points, x, y), s.role, s.dots, s.filled) for s in series]
    shown = [s for s in shown if s.points]
    if not shown:
        return ""
    points = [point for s in shown for point in s.points]
    across = _Scale.of(x, [p.x for p in points], LEFT, WIDTH - RIGHT)
    ends = [end for p in points for end in ((p.y,) if y.log else (p.y - p.error, p.y + p.error))]
    up = _Scale.of(y, ends, HEIGHT - BOTTOM, TOP)
    name = escape(title)
    parts = [f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{name}"><title>{name}</title>']
    parts += [_row(up(v), label(v)) for v in up.ticks] + [_column(across(v), label(v)) for v in across.ticks]
    parts.append(f'<text class="name" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(x.name)}</text>')
    parts.append(f'<text class="name" x="0" y="11">{escape(y.name)}</text>')
    for s in shown:
        parts += _draw(s, across, up, x.name)
    if len(shown) > 1:
        parts.append(_legend(shown))
    return "".join([*parts, "</svg>"])


def _usable(points: Sequence[Point], x: Axis, y: Axis) -> list[Point]:
    fit = [
        p for p in points
        if math.isfinite(p.x) and math.isfinite(p.y) and (p.x > 0 or not x.log) and (p.y > 0 or not y.log)
    ]  # fmt: skip
    every = -(-len(fit) // MAX_POINTS) or 1
    return fit[::-every][::-1]  # counted from the end, which keeps the last


def _row(place: float, text: str) -> str:
    return (
        f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>'
        f'<text class="tick" x="{LEFT - 7}" y="{place + 3.5:.1f}" text-anchor="end">{text}</text>'
    )


def _column(place: float, text: str) -> str:
    base = HEIGHT - BOTTOM
    return (
        f'<line class="rule" x1="{place:.1f}" x2="{place:.1f}" y1="{base}" y2="{base + 4}"/>'
        f'<text class="tick" x="{place:.1f}" y="{base + 16}" text-anchor="middle">{text}</text>'
    )


def _draw(series: Series, across: _Scale, up: _Scale, x_name: str) -> list[str]:
    places = [(across(p.x), up(p.y)) for p in series.points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = []
    if series.filled:
        base = HEIGHT - BOTTOM
        area = f"{places[0][0]:.1f},{base} {line} {places[-1][0]:.1f},{base}"
        parts.append(f'<polygon class="fill {series.role}" points="{area}"/>')
    parts.append(f'<polyline class="line {series.role}" points="{line}"/>')
    if series.dots:
        for point, (x, y) in zip(series.points, places, strict=True):
            if point.error > 0:
                low, high = up(point.y - point.error), up(point.y + point.error)
                parts.append(
                    f'<line class="line {series.role}" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
                )
            tip = f"{series.name}: {point.y:.5g}" + (f" ± {point.error:.2g}" if point.error > 0 else "")
            tip += f", {x_name} {label(point.x)}"
            place = f'cx="{x:.1f}" cy="{y:.1f}" r="3.4"'
            parts.append(f'<circle class="dot {series.role}" {place}><title>{escape(tip)}</title></circle>')
    return parts


def _legend(shown: Sequence[Series]) -> str:
    """The names at the top right, each in its color."""
    names = " ".join(
        f'<tspan class="text {s.role}" dx="14">{"●" if s.dots else "—"} {escape(s.name)}</tspan>' for s in shown
    )
    return f'<text class="name" x="{WIDTH - RIGHT}" y="11" text-anchor="end">{names}</text>'
