"""Plain SVG pictures of what a run log holds; no scripts, no resources from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["bars", "lines"]

# Units of the drawings: a page shows them as wide as its text, whatever that is in pixels.
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 760, 240, 64, 34, 12
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

Point = tuple[float, float]


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


def bars(rows: Sequence[tuple[str, Sequence[float]]], parts: Sequence[str], *, unit: str) -> str:
    """Draw one bar a row, made of ``parts`` whose lengths, in ``unit``, are all >= 0."""
    # Labels stand left of _LEFT; 90 units stay free for the sum at the end of the longest bar.
    longest = max((sum(values) for _, values in rows), default=0.0) or 1.0  # no rows: no bars
    scale = (_WIDTH - _LEFT - 90) / longest
    shapes = []
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
    height = max(1, len(rows)) * (_ROW + _GAP)
    # A view box scales to the page's width; screen readers take "img" as one picture.
    drawing = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(shapes)}</svg>'
    return drawing + _legend(parts)


def lines(
    series: Sequence[tuple[str, Sequence[Point]]],
    *,
    label: str,
    is_stepped: bool = False,
    least_top: float = 0.0,
) -> str:
    """Draw named lines of points (step, value), values >= 0, over the optimizer's steps.

    The picture reaches up to ``least_top`` at least; stepped, a value holds until the next one.
    """
    points = [point for _, line in series for point in line]
    if not points:
        return '<p class="none">nothing was logged</p>'
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    highest = max(least_top, *(y for _, y in points)) or 1.0  # all zeros: on the base line
    # SVG's y grows downwards: a value lies (value * up) above the base line.
    across = (_WIDTH - _LEFT - 10) / ((last - first) or 1.0)
    up = (_HEIGHT - _BOTTOM - _TOP) / highest
    base = _HEIGHT - _BOTTOM
    shapes = [
        f'<path class="axis" d="M{_LEFT},{_TOP}V{base}H{_WIDTH - 10}"/>',
        _text(_LEFT, _HEIGHT - 14, f"step {first:g}"),
        _text(_WIDTH - 10, _HEIGHT - 14, f"step {last:g}", anchor="end"),
        _text(_LEFT - 6, base, "0", anchor="end"),
        _text(_LEFT - 6, _TOP + 10, f"{highest:.3g}", anchor="end"),
        _text(_LEFT + 8, _TOP + 10, label),
    ]
    for number, (name, line) in enumerate(series):
        path = ""
        for x, y in line:
            at_x, at_y = _LEFT + (x - first) * across, base - y * up
            # Points (0, 64), (20, 76): stepped M0,64 H20 L20,76 stays at 64 until the plan changes.
            if path and is_stepped:
                path += f"H{at_x:.1f}"
            path += f"{'L' if path else 'M'}{at_x:.1f},{at_y:.1f}"
        if len(line) == 1:
            path += "h3"  # a path of one point has no length and would not be seen
        shapes.append(
            f'<path class="line" stroke="{_colour(number)}" d="{path}">'
            f"<title>{escape(name)}</title></path>"
        )
    drawing = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(shapes)}</svg>'
    return drawing + _legend([name for name, _ in series])
