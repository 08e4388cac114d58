"""Plain SVG pictures of what a run log holds; no scripts, no resources from elsewhere.

What a reader points at is told by style alone: behind each step lies an invisible band, and the
page's style shows the band's rule, dots and values while the pointer is over it (``STYLE``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

__all__ = ["MOST_LINES", "STYLE", "GanttRow", "GanttSpan", "bars", "gantt", "lines", "ticks"]

# Units of the drawings: a page shows them as wide as its text, whatever that is in pixels.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM, _TOP = 760, 250, 64, 10, 34, 26
_ROW, _GAP = 22, 6
_LETTER, _MOST_LETTERS = 7, 30  # a letter's width, and those of a row's label
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
_THICK = 2.0  # a line's width
_APART = 3.0  # between lines, at least: closer ones would hide each other
# Values between which a picture's heights are numbers too: JSON holds any.
_LEAST, _MOST = 1e-300, 1e300
_TIP_LINE = 15  # height of a line of values
STYLE = f"""
svg {{ width: 100%; font-size: 12px }} .axis {{ fill: none; stroke: #999 }}
.grid {{ fill: none; stroke: #eee }} .line {{ fill: none; stroke-width: {_THICK:g} }}
.dashed {{ stroke-dasharray: 6 4 }}
.dots {{ fill: none; stroke-width: 6; stroke-linecap: round; pointer-events: none }}
.whisker {{ fill: none; stroke: #222; stroke-width: 1.5 }}
.band {{ fill: transparent }} .rule {{ fill: none; stroke: #bbb }}
.tip {{ pointer-events: none }} .tip rect {{ fill: #fff; stroke: #999; opacity: .93 }}
.at .tip, .at .rule {{ visibility: hidden }}
.at:hover .tip, .at:hover .rule {{ visibility: visible }}
.legend span {{ margin-right: 1.2em; white-space: nowrap }}
.legend i {{ display: inline-block; width: .8em; height: .8em; margin-right: .4em }}
"""

Point = tuple[float, float]
Line = tuple[str, Sequence[Point]]


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _legend(names: Sequence[str]) -> str:
    """Return what colour is what; one colour alone is what the picture's heading says."""
    if len(names) < 2:
        return ""
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
    drawing = _drawing(shapes, height=base + 20, told=f"{unit}: {', '.join(parts)}")
    return drawing + _legend(parts)


@dataclass(frozen=True)
class GanttSpan:
    """A part of a row of a Gantt chart."""

    start: float
    end: float  # >= start
    part: int  # its place among the chart's parts
    told: str = ""  # what a reader who points at it is told beside row, part and times


@dataclass(frozen=True)
class GanttRow:
    """A row of a Gantt chart."""

    label: str
    spans: Sequence[GanttSpan]
    end_between: tuple[float, float] | None = None  # where the last end may lie


def gantt(rows: Sequence[GanttRow], parts: Sequence[str], *, unit: str) -> str:
    """Draw what takes when: one row below the other, over a common time from 0.

    Where a row's end is known between limits only, a whisker spans them.

    Args:
        rows: from above; times are finite and >= 0, in ``unit``.
        parts: names of what spans are, each of a colour of its own.
        unit: of the times.
    """
    ends = [span.end for row in rows for span in row.spans]
    ends += [row.end_between[1] for row in rows if row.end_between is not None]
    last = max(ends, default=0.0)
    last = last if last > _LEAST else 1.0
    letters = min(max((len(row.label) for row in rows), default=0), _MOST_LETTERS)
    left = max(_LEFT, _LETTER * letters + 12)
    scale = (_WIDTH - left - _RIGHT) / last
    base = max(1, len(rows)) * (_ROW + _GAP)
    shapes = []
    for tick in ticks(0.0, last, most=8):
        at = left + tick * scale
        shapes.append(f'<path class="grid" d="M{at:.1f},0V{base}"/>')
        anchor = "end" if at > _WIDTH - 3 * _LETTER else "middle"
        shapes.append(_text(at, base + 14, f"{tick:g}", anchor=anchor))
    shapes.append(_text(_WIDTH - _RIGHT, base + 30, unit, anchor="end"))
    for number, row in enumerate(rows):
        y = number * (_ROW + _GAP)
        short = row.label if len(row.label) <= letters else row.label[: letters - 1] + "\u2026"
        shapes.append(_text(left - 8, y + 16, short, anchor="end"))
        for span in row.spans:
            title = f"{row.label}: {parts[span.part]}, {span.start:.4g} to {span.end:.4g} {unit}"
            title += f"; {span.told}" if span.told else ""
            shapes.append(
                f'<rect x="{left + span.start * scale:.1f}" y="{y}" '
                f'width="{max((span.end - span.start) * scale, 0.5):.1f}" height="{_ROW}" '
                f'fill="{_colour(span.part)}"><title>{escape(title)}</title></rect>'
            )
        if row.end_between is not None:
            low, high = (left + each * scale for each in row.end_between)
            middle, up = y + _ROW / 2, _ROW / 4
            shapes.append(
                f'<path class="whisker" d="M{low:.1f},{middle - up:g}v{2 * up:g}'
                f'M{low:.1f},{middle:g}H{high:.1f}M{high:.1f},{middle - up:g}v{2 * up:g}"/>'
            )
    drawing = _drawing(shapes, height=base + 34, told=f"{unit}: {', '.join(parts)}")
    return drawing + _legend(parts)


def _drawing(shapes: Sequence[str], *, height: int, told: str) -> str:
    # A view box scales to the page's width; screen readers take "img" as one picture of that name.
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(told)}">'
        f"{''.join(shapes)}</svg>"
    )


class _Frame:
    """Where steps and values lie in a picture whose axes hold all of some points.

    The axis of values ends at round numbers: from 0 to 570 at 600, and from 0.13 to 0.8 at 0.1.
    """

    def __init__(self, points: Sequence[Point], *, least_top: float, is_from_zero: bool) -> None:
        self.first, self.last = min(x for x, _ in points), max(x for x, _ in points)
        low = max(min(y for _, y in points), -_MOST)
        high = max(min(max(y for _, y in points), _MOST), least_top)
        if is_from_zero or high - low <= _LEAST:  # a level line at a height of its own
            low, high = min(low, 0.0), max(high, 0.0)
        high = high if high - low > _LEAST else low + 1.0  # all zeros: on the base line
        self.marks = ticks(low, high)
        apart = self.marks[1] - self.marks[0] if len(self.marks) > 1 else 0.0
        if self.marks[0] > low + apart * 1e-6:
            self.marks = [self.marks[0] - apart, *self.marks]
        if self.marks[-1] < high - apart * 1e-6:
            self.marks = [*self.marks, self.marks[-1] + apart]
        self.low, self.high = min(low, self.marks[0]), max(high, self.marks[-1])
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
        for tick in self.marks:
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

    Where lines would hide each other they are set apart by a little more than their width; the
    values that a pointer finds are the true ones.

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
    shapes = frame.axes(label)
    heights, asides = _set_apart([line for _, line in series], frame)
    for number, ((name, line), aside) in enumerate(zip(series, asides, strict=True)):
        path = ""
        for x, _ in line:
            at_x, at_y = frame.x(x), heights[number][x]
            # Points (0, 64), (20, 76): stepped M0,64 H20 L20,76 stays at 64 until the plan changes.
            if path and is_stepped:
                at_x = min(max(at_x + aside, _LEFT), _WIDTH - _RIGHT) if x < line[-1][0] else at_x
                path += f"H{at_x:.1f}"
            path += f"{'L' if path else 'M'}{at_x:.1f},{at_y:.1f}"
        if len(line) == 1:
            path += "h3"  # a path of one point has no length and would not be seen
        kind = "line dashed" if name in dashed else "line"
        shapes.append(f'<path class="{kind}" stroke="{_colour(number)}" d="{path}"/>')
        if len(line) <= _MOST_DOTS and not is_stepped:
            dots = "".join(f"M{frame.x(x):.1f},{heights[number][x]:.1f}h0" for x, _ in line)
            shapes.append(f'<path class="dots" stroke="{_colour(number)}" d="{dots}"/>')
    shapes += _bands(series, heights, frame, is_stepped=is_stepped)
    names = [name for name, _ in series]
    drawing = _drawing(shapes, height=_HEIGHT, told=f"{label}: {', '.join(names)}")
    return drawing + _legend(names)


def _set_apart(
    series: Sequence[Sequence[Point]], frame: _Frame
) -> tuple[list[dict[float, float]], list[float]]:
    """Return y of each line's points, by step, and how far its upright parts are moved aside.

    Above the base line values at 40, 41 and 90 are drawn at 39, 42 and 90. Lines that are closer
    than that keep the order of the step before, so that they do not cross without need. Upright
    parts of stepped lines lie at the same steps, too: each has a place of its own.
    """
    base = _HEIGHT - _BOTTOM
    above = [{x: base - frame.y(y) for x, y in line} for line in series]
    usual = [sum(line.values()) / max(1, len(line)) for line in above]
    upwards = sorted(range(len(series)), key=lambda number: (usual[number], number))
    order = upwards
    heights: list[dict[float, float]] = [{} for _ in series]
    for step in sorted({x for line in above for x in line}):
        there: list[int] = []  # lines with a point here, upwards
        for number in (each for each in order if step in above[each]):
            place = len(there)
            while place and above[there[place - 1]][step] > above[number][step] + _APART:
                place -= 1
            there.insert(place, number)
        for number, height in zip(there, _spread([above[n][step] for n in there]), strict=True):
            heights[number][step] = base - height
        ordered = iter(there)
        order = [next(ordered) if number in there else number for number in order]
    # The highest goes left, as it mostly was the one to rise.
    middle = (len(series) - 1) / 2
    return heights, [(middle - upwards.index(number)) * _APART for number in range(len(series))]


def _spread(heights: Sequence[float]) -> list[float]:
    """Move heights as little as makes each ``_APART`` higher than the one before, all >= 0.

    Heights that are too close become a block around their mean, which may then meet the next one:
    5, 6 and 9 become 3.67, 6.67 and 9.67.
    """
    blocks: list[tuple[float, int]] = []  # lowest height, number of heights
    for height in heights:
        low, number = height, 1
        while blocks and blocks[-1][0] + blocks[-1][1] * _APART > low:
            below, others = blocks.pop()
            # The mean of what both blocks want for the lowest height of the one that they become.
            low = (below * others + (low - others * _APART) * number) / (others + number)
            number += others
        blocks.append((low, number))
    placed = [low + place * _APART for low, number in blocks for place in range(number)]
    return [max(height, place * _APART) for place, height in enumerate(placed)]


def _thinned(line: Sequence[Point]) -> Sequence[Point]:
    """Return at most ``_MOST_POINTS`` of a line's points, evenly by number, both ends among them.

    Of points in between none is averaged: what is shown was measured.
    """
    if len(line) <= _MOST_POINTS:
        return line
    last = len(line) - 1
    return [line[round(at * last / (_MOST_POINTS - 1))] for at in range(_MOST_POINTS)]


def _bands(
    series: Sequence[Line],
    heights: Sequence[Mapping[float, float]],
    frame: _Frame,
    *,
    is_stepped: bool,
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
            at: float | None = step if step in known[place] else None
            if at is None and is_stepped:
                at = next((x for x, _ in reversed(line) if x <= step), None)
            if at is not None:
                values.append((_colour(place), name, known[place][at], heights[place][at]))
        shapes.append(
            f'<g class="at"><rect class="band" x="{left[number]:.1f}" y="{_TOP}" '
            f'width="{right[number] - left[number]:.1f}" height="{_HEIGHT - _BOTTOM - _TOP}"/>'
            f'<path class="rule" d="M{edges[number]:.1f},{_TOP}V{_HEIGHT - _BOTTOM}"/>'
            f"{_tip(step, values, frame)}</g>"
        )
    return shapes


def _tip(step: float, values: Sequence[tuple[str, str, float, float]], frame: _Frame) -> str:
    """Return the values at a step, of colour, name, value and y: dots, and a box of words."""
    words = [f"step {step:g}", *(f"{name}: {value:.4g}" for _, name, value, _ in values)]
    width = 7 * max(map(len, words)) + 12
    x = frame.x(step)
    at = x + 8 if x + 8 + width < _WIDTH else x - 8 - width
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for colour, _, _, y in values
    )
    text = "".join(
        _text(at + 6, _TOP + 15 + _TIP_LINE * row, line) for row, line in enumerate(words)
    )
    height = _TIP_LINE * len(words) + 6
    box = f'<rect x="{at:.1f}" y="{_TOP}" width="{width}" height="{height}"/>'
    return f'<g class="tip">{dots}{box}{text}</g>'
