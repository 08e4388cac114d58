"""A run log as one self-contained page: HTML with its style and pictures inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, TypeVar

from loft_hvd.balance.explain import find_slow
from loft_hvd.codec import printable
from loft_hvd.report.entries import (
    Fault,
    Line,
    Plans,
    Run,
    Spread,
    Suspicion,
    Thinned,
    Times,
    read_lines,
)
from loft_hvd.report.svg import bars, lines
from loft_hvd.report.text import say, spread_line

__all__ = ["render_page"]

LineT = TypeVar("LineT", bound=Line)

# The parts of a step in the order in which it passes through them; they add up to the step.
_PARTS = ("stall", "compute", "queued", "wait", "other")
# Of many ranks a picture shows these, as shares of the way from the fastest to the slowest.
_SPREAD = {"fastest": 0.0, "a quarter": 0.25, "median": 0.5, "three quarters": 0.75, "slowest": 1.0}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 820px; margin: 2em auto; padding: 0 1em;
  color: #222; background: #fff }
svg { width: 100%; font-size: 12px } .axis { fill: none; stroke: #999 }
.line { fill: none; stroke-width: 2 } .legend span { margin-right: 1.2em }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
table { border-collapse: collapse; width: 100% }
th, td { text-align: right; padding: .15em .6em; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
.bad { background: #fde8e8; padding: .6em 1em; border-left: 4px solid #c33 }
.none { color: #777 } pre { white-space: pre-wrap; background: #f6f6f6; padding: .8em }
"""


def render_page(entries: Sequence[dict[str, Any]], *, title: str) -> str:
    """Return a page that says and shows what a run log holds, the entries of ``read_run_log``.

    Raises:
        DataError: a line lacks a field, or is of another type.
    """
    read = read_lines(entries)
    body, text = "\n".join(_sections(read)), say(read)
    # One file, without scripts or links: it can be mailed, and opens where there is no network.
    return printable(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n"
        f"<h2>In words</h2><pre>{escape(text)}</pre>\n</body></html>\n"
    )


def _of(kind: type[LineT], read: Sequence[Line]) -> list[LineT]:
    return [line for line in read if isinstance(line, kind)]


def _sections(read: Sequence[Line]) -> Iterator[str]:
    # An elastic job writes a "run" line for each of its worlds; the last one is what is left.
    for run in _of(Run, read)[-1:]:
        yield f"<p>{escape(', '.join(run.facts))}.</p>"
    for fault in _of(Fault, read):
        yield f'<p class="bad">{escape(str(fault))}</p>'
    for thinned in _of(Thinned, read)[-1:]:
        yield f"<p>{escape(str(thinned))}.</p>"
    yield from _times(_of(Times, read))
    yield from _plans(_of(Plans, read), last_step=max((line.step for line in read), default=0))
    yield from _workers(_of(Suspicion, read))
    for spread in _of(Spread, read)[-1:]:
        yield f"<h2>Do ranks draw from the same data?</h2><p>{escape(spread_line(spread))}</p>"


def _times(entries: Sequence[Times]) -> Iterator[str]:
    yield "<h2>Where a step goes</h2>"
    if not entries:
        yield '<p class="none">no times yet</p>'
        return
    times = [entry.ranks for entry in entries]
    for entry in find_slow(times[-1]):
        line = f"rank {entry.rank} is slow: {entry.cause} ({entry.ratio:.2f}x the median rank)"
        yield f'<p class="bad">{escape(line)}</p>'
    rows = [
        (f"rank {t.rank}", [1e3 * getattr(t, f"{part}_s") for part in _PARTS]) for t in times[-1]
    ]
    last = f"Last interval, up to step {entries[-1].step}{entries[-1].which}"
    yield f"<p>{escape(last)}, an average batch:</p>"
    yield bars(rows, _PARTS, unit="ms")
    yield "<h2>Each rank's own work</h2>"
    steps = [float(entry.step) for entry in entries]
    series = []
    for rank in sorted({time.rank for ranks in times for time in ranks}):  # worlds differ in size
        points = [
            (step, 1e3 * time.busy_s)
            for step, ranks in zip(steps, times, strict=True)
            for time in ranks
            if time.rank == rank
        ]
        series.append((f"rank {rank}", points))
    if any(entry.which for entry in entries):  # other ranks in each line: their spread
        own = [sorted(1e3 * time.busy_s for time in ranks) for ranks in times]
        series = [
            (
                name,
                [
                    (step, work[round(at * (len(work) - 1))])
                    for step, work in zip(steps, own, strict=True)
                    if work
                ],
            )
            for name, at in _SPREAD.items()
        ]
    yield lines(series, label="fetch waited for and computing, ms a batch")


def _plans(entries: Sequence[Plans], *, last_step: int) -> Iterator[str]:
    if not entries:
        return
    yield "<h2>Plans</h2>"
    num_ranks = max(len(entry.sizes) for entry in entries)
    series = []
    for rank in range(num_ranks):
        points = [
            (float(entry.first_step), float(entry.sizes[rank]))
            for entry in entries
            if rank < len(entry.sizes)
        ]
        # The last plan holds to the end of the log, as far as any line says how far that is.
        points.append((max(float(last_step), points[-1][0]), points[-1][1]))
        series.append((f"rank {rank}", points))
    yield lines(series, label="samples of a step", is_stepped=True)


def _workers(entries: Sequence[Suspicion]) -> Iterator[str]:
    if not entries:
        return
    yield "<h2>Workers</h2>"
    # Workers are ranks or, with over=, groups; the newest report says which ones there are now.
    newest = entries[-1]
    series = [
        (
            f"ranks {' '.join(map(str, worker.ranks))}",
            [
                (float(entry.step), each.suspicion)
                for entry in entries
                for each in entry.workers
                if each.ranks == worker.ranks
            ],
        )
        for worker in newest.workers
    ]
    yield lines(series, label="suspicion, 0 as the others to 1", least_top=1.0)
    yield "<table><tr><th>ranks</th><th>suspicion</th><th>outside</th><th>distance</th>"
    yield "<th>left out</th><th>clipped</th><th>copied</th><th>not finite</th><th></th></tr>"
    for worker in newest.workers:
        state = "in quarantine" if worker.in_quarantine_until is not None else ""
        state = state or ("stands out" if worker.is_named else "")
        cells = (
            " ".join(map(str, worker.ranks)),
            f"{worker.suspicion:.2f}",
            f"{worker.share_outside:.1%}",
            f"{worker.distance:.3g}",
            f"{worker.share_left_out:.1%}",
            f"{worker.share_clipped:.1%}",
            f"{worker.share_copied:.1%}",
            str(worker.num_non_finite),
            state,
        )
        yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    yield "</table>"
