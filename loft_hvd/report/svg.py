"""Plain SVG pictures of what a run log holds; no scripts, no resources from elsewhere.

What a reader points at is told by style alone: behind each step lies an invisible band, and the
page's style shows the band's rule, dots and values while the pointer is over it (``STYLE``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from html import escape
from itertools import pairwise

__all__ = ["MOST_LINES", "STYLE", "bars", "lines", "ticks"]

# Units of the drawings: a page shows them as wide as its text, whatever that is in pixels.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM, _TOP = 760, 250, 64, 10, 34, 26
_ROW, _GAP = 22, 6
# Seven of Paul Tol's "bright" colours, which colour-blind readers tell apart, and a dark one.
_COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#bbbbbb",
    "#332288",
)
MOST_LINES = len(_COLOURS)  # of a picture: more have no colours of their own
_MOST_POINTS = 100  # of a line: closer ones could not be pointed at
_MOST_DOTS = 40  # of a line whose points are drawn: more would touch each other
_APART = 2.0  # between lines that would hide each other; the lines themselves are as wide
# Values between which a picture's heights are numbers too: JSON holds any.
_LEAST, _MOST = 1e-300, 1e300
_TIP_LINE = 15  # height of a line of values
STYLE = """
svg { width: 100%; font-size: 12px } .axis { fill: none; stroke: #999 }
.grid { fill: none; stroke: #eee } .line { fill: none; stroke-width: 2 }
.line:hover { stroke-width: 4 } .dashed { stroke-dasharray: 6 4 }
.dots { fill: none; stroke-width: 6; stroke-linecap: round; pointer-events: none }
.band { fill: transparent } .rule { fill: none; stroke: #bbb }
.tip { pointer-events: none } .tip rect { fill: #fff; stroke: #999; opacity: .93 }
.at .tip, .at .rule { visibility: hidden }
.at:hover .tip, .at:hover .rule { visibility: visible }
.legend span { margin-right: 1.2em; white-space: nowrap }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
"""

Point = tuple[float, float]
Line = tuple[str, Sequence[Point]]


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _legend(names: Sequence[str]) -> str:
    entries = (
        f'<span><i style="background:{_colour(number)}"></i>{escape(name)}</span>'
        for number, name in enumerate(names)
    )
    return f'<p class="legend">{"".join(entries)}</p>'


def ticks(low: float, high: float, *, most: int = 6) -> list[float]:
    """Return round numbers from ``low`` to ``high``, at most ``most``: 1, 2 or 5 times 10^k apart.

    From 0 to 250: 0, 50, 100, 150, 200, 250.
    """
    span = high - low
    if not (_LEAST < span < math.inf):  # a level line, or no number of its own
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    for factor in (1, 2, 5, 10, 20):
        step = factor * power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            break
    # Divided by the inverse where the step is below 1: 3 / 10 prints as 0.3, 3 * 0.1 does not.
    return [
        number * step if step >= 1 else number / (1 / step) for number in range(first, last + 1)
    ]


def bars(rows: Sequence[tuple[str, Sequence[float]]], parts: Sequence[str], *, unit: str) -> str:
    """Draw one bar a row, made of ``parts`` whose lengths, in ``unit``, are all >= 0."""
    # Labels stand left of _LEFT; 90 units stay free for the sum at the end of the longest bar.
    longest = max((sum(values) for _, values in rows), default=0.0)
    longest = longest if longest > _LEAST else 1.0  # no rows: no bars
    scale = (_WIDTH - _LEFT - 90) / longest
    base = max(1, len(rows)) * (_ROW + _GAP)
    shapes = []
    for tick in ticks(0.0, longest):
        at = _LEFT + tick * scale
        shapes.append(f'<path class="grid" d="M{at:.1f},0V{base}"/>')
        shapes.append(_text(at, base + 14, f"{tick:g}", anchor="middle"))
    shapes.append(_text(_WIDTH - _RIGHT, base + 14, unit, anchor="end"))
    for number, (label, values) in enumerate(rows):
        y, x = number * (_ROW + _GAP), float(_LEFT)
        shapes.append(_text(_LEFT - 8, y + 16, label, anchor="end"))
        for place, value in enumerate(values):
            title = escape(f"{label}: {parts[place]} {value:.3g} {unit}")
            shapes.append(
                f'<rect x="{x:.1f}" y="{y}" width="{value * scale:.1f}" height="{_ROW}" '
                f'fill="{_colour(place)}"><title>{title}</title></rect>'
            )
            x += value * scale
        shapes.append(_text(x + 6, y + 16, f"{sum(values):.3g} {unit}"))
    # A view box scales to the page's width; screen readers take "img" as one picture.
    drawing = f'<svg viewBox="0 0 {_WIDTH} {base + 20}" role="img">{"".join(shapes)}</svg>'
    return drawing + _legend(parts)


class _Frame:
    """Where steps and values lie in a picture whose axes hold all of some points."""

    def __init__(self, points: Sequence[Point], *, least_top: float, is_from_zero: bool) -> None:
        self.first, self.last = min(x for x, _ in points), max(x for x, _ in points)
        low = max(min(y for _, y in points), -_MOST)
        high = max(min(max(y for _, y in points), _MOST), least_top)
        if is_from_zero or high - low <= _LEAST:  # a level line at a height of its own
            low, high = min(low, 0.0), max(high, 0.0)
        self.low = low
        self.high = high if high - low > _LEAST else low + 1.0  # all zeros: on the base line
        # SVG's y grows downwards: a value lies (value - low) * up above the base line.
        self._across = (_WIDTH - _LEFT - _RIGHT) / ((self.last - self.first) or 1.0)
        self._up = (_HEIGHT - _BOTTOM - _TOP) / (self.high - self.low)

    def x(self, step: float) -> float:
        return _LEFT + (step - self.first) * self._across

    def y(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)  # also what is beyond all axes
        return _HEIGHT - _BOTTOM - (inside - self.low) * self._up

    def axes(self, label: str) -> list[str]:
        """Draw the axes, with round numbers on both."""
        base, end = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        shapes = []
        for tick in ticks(self.low, self.high):
            y = self.y(tick)
            shapes.append(f'<path class="grid" d="M{_LEFT},{y:.1f}H{end}"/>')
            shapes.append(_text(_LEFT - 6, y + 4, f"{tick:g}", anchor="end"))
        steps = [tick for tick in ticks(self.first, self.last, most=8) if tick == int(tick)]
        for tick in steps or [self.first]:
            x = self.x(tick)
            shapes.append(f'<path class="axis" d="M{x:.1f},{base}v4"/>')
            shapes.append(_text(x, base + 17, f"{tick:g}", anchor="middle"))
        shapes.append(f'<path class="axis" d="M{_LEFT},{_TOP}V{base}H{end}"/>')
        shapes.append(_text(end, base + 30, "step", anchor="end"))
        shapes.append(_text(_LEFT - 6, _TOP - 12, label))
        return shapes


def lines(
    series: Sequence[Line],
    *,
    label: str,
    is_stepped: bool = False,
    is_from_zero: bool = True,
    least_top: float = 0.0,
    dashed: Collection[str] = (),
) -> str:
    """Draw named lines of points (step, value) over the optimizer's steps.

    Where lines would hide each other, all are set apart by their own width; the values that a
    pointer finds are the true ones.

    Args:
        series: name and points of each line, their steps rising; values that are not finite are
            left out.
        label: what the values are, with their unit.
        is_stepped: a value holds until the next one.
        is_from_zero: the axis of values begins at 0, or below where values do.
        least_top: value up to which the axis reaches at least.
        dashed: names of lines that are drawn dashed.
    """
    series = [
        (name, _thinned([(x, y) for x, y in line if math.isfinite(y)])) for name, line in series
    ]
    points = [point for _, line in series for point in line]
    if not points:
        return '<p class="none">nothing was logged</p>'
    frame = _Frame(points, least_top=least_top, is_from_zero=is_from_zero)
    places = [(round(frame.x(x)), round(frame.y(y))) for x, y in points]
    apart = _APART if len(set(places)) < len(places) else 0.0
    shapes = frame.axes(label)
    shifts = [(number - (len(series) - 1) / 2) * apart for number in range(len(series))]
    for number, ((name, line), shift) in enumerate(zip(series, shifts, strict=True)):
        path = ""
        for x, y in line:
            at_x, at_y = frame.x(x), frame.y(y) - shift
            # Points (0, 64), (20, 76): stepped M0,64 H20 L20,76 stays at 64 until the plan changes.
            if path and is_stepped:
                path += f"H{at_x:.1f}"
            path += f"{'L' if path else 'M'}{at_x:.1f},{at_y:.1f}"
        if len(line) == 1:
            path += "h3"  # a path of one point has no length and would not be seen
        kind = "line dashed" if name in dashed else "line"
        shapes.append(
            f'<path class="{kind}" stroke="{_colour(number)}" d="{path}">'
            f"<title>{escape(name)}</title></path>"
        )
        if len(line) <= _MOST_DOTS and not is_stepped:
            dots = (f"M{frame.x(x):.1f},{frame.y(y) - shift:.1f}h0" for x, y in line)
            shapes.append(f'<path class="dots" stroke="{_colour(number)}" d="{"".join(dots)}"/>')
    shapes += _bands(series, shifts, frame, is_stepped=is_stepped)
    drawing = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(shapes)}</svg>'
    return drawing + _legend([name for name, _ in series])


def _thinned(line: Sequence[Point]) -> Sequence[Point]:
    """Return at most ``_MOST_POINTS`` of a line's points, evenly by number, both ends among them.

    Of points in between none is averaged: what is shown was measured.
    """
    if len(line) <= _MOST_POINTS:
        return line
    last = len(line) - 1
    return [line[round(at * last / (_MOST_POINTS - 1))] for at in range(_MOST_POINTS)]


def _bands(
    series: Sequence[Line], shifts: Sequence[float], frame: _Frame, *, is_stepped: bool
) -> list[str]:
    """Return a band for each step: what every line's value is there."""
    steps = sorted({x for _, line in series for x, _ in line})
    if len(steps) > 2 * _MOST_POINTS:
        steps = [step for step, _ in _thinned([(step, 0.0) for step in steps])]
    edges = [frame.x(step) for step in steps]
    left = [float(_LEFT), *((a + b) / 2 for a, b in pairwise(edges))]
    right = [*left[1:], float(_WIDTH - _RIGHT)]
    known = [dict(line) for _, line in series]
    shapes = []
    for number, step in enumerate(steps):
        values = []
        for place, (name, line) in enumerate(series):
            value = known[place].get(step)
            if value is None and is_stepped:
                value = next((y for x, y in reversed(line) if x <= step), None)
            if value is not None:
                values.append((place, name, value))
        shapes.append(
            f'<g class="at"><rect class="band" x="{left[number]:.1f}" y="{_TOP}" '
            f'width="{right[number] - left[number]:.1f}" height="{_HEIGHT - _BOTTOM - _TOP}"/>'
            f'<path class="rule" d="M{edges[number]:.1f},{_TOP}V{_HEIGHT - _BOTTOM}"/>'
            f"{_tip(step, values, shifts, frame)}</g>"
        )
    return shapes


def _tip(
    step: float,
    values: Sequence[tuple[int, str, float]],
    shifts: Sequence[float],
    frame: _Frame,
) -> str:
    """Return the values at a step: a dot on each line, and a box of words beside them."""
    words = [f"step {step:g}", *(f"{name}: {value:.4g}" for _, name, value in values)]
    width = 7 * max(map(len, words)) + 12
    x = frame.x(step)
    at = x + 8 if x + 8 + width < _WIDTH else x - 8 - width
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{frame.y(value) - shifts[place]:.1f}" r="4" '
        f'fill="{_colour(place)}"/>'
        for place, _, value in values
    )
    text = "".join(
        _text(at + 6, _TOP + 15 + _TIP_LINE * row, line) for row, line in enumerate(words)
    )
    height = _TIP_LINE * len(words) + 6
    box = f'<rect x="{at:.1f}" y="{_TOP}" width="{width}" height="{height}"/>'
    return f'<g class="tip">{dots}{box}{text}</g>'
