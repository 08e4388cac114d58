"""A run log as one self-contained page: HTML with its style and pictures inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from typing import Any

from loft_hvd.balance.interval import RankTimes
from loft_hvd.report.entries import (
    DecisionLine,
    Fault,
    Fits,
    Line,
    LinksLine,
    NoiseLine,
    PassCounts,
    Plans,
    Rules,
    Run,
    SavedLine,
    Scalars,
    ScheduleLine,
    SpreadLine,
    Store,
    StoreReads,
    SuspicionLine,
    Thinned,
    Times,
    newest_of,
    of_kind,
    read_lines,
)
from loft_hvd.report.html import table, whole_page
from loft_hvd.report.screen import PARTS, throughput
from loft_hvd.report.svg import MOST_LINES, Point, bars, lines
from loft_hvd.report.text import LINK_COLUMNS, link_cells, links_line, say, spread_line
from loft_hvd.report.verdict import judge, newest_world, rules_of, step_s, when_measured

__all__ = ["render_page"]

# Of many ranks a picture shows these, as shares of the way from the least to the greatest value.
_MIDDLE = {"a quarter": 0.25, "median": 0.5, "three quarters": 0.75}
_BY_PACE = {"fastest": 0.0, **_MIDDLE, "slowest": 1.0}  # of seconds of own work
_BY_VALUE = {"least": 0.0, **_MIDDLE, "most": 1.0}  # of sizes and waits, which fast ranks have
_MOST_SCALARS = 50  # names with a picture each: a log may have a new one on every line


def render_page(entries: Sequence[dict[str, Any]], *, title: str) -> str:
    """Return a page that says and shows what a run log holds, the entries of ``read_run_log``.

    Its first line is the verdict: who costs what share of a step, and whose gradients are off.

    Raises:
        DataError: a line lacks a field, or is of another type.
    """
    read = read_lines(entries)
    body, text = "\n".join(_sections(read, title)), say(read)
    return whole_page(f"{body}\n<h2>In words</h2><pre>{escape(text)}</pre>", title=title)


def _sections(read: Sequence[Line], title: str) -> Iterator[str]:
    first, *others = judge(read)
    yield f"<h1>{escape(first)}</h1>"
    yield "".join(f"<p>{escape(sentence)}</p>" for sentence in others)
    for fault in of_kind(Fault, read):
        yield f'<p class="bad">{escape(str(fault))}</p>'
    for thinned in of_kind(Thinned, read)[-1:]:
        yield f"<p>{escape(str(thinned))}.</p>"
    # An elastic job writes a "run" line for each of its worlds; the last one is what is left.
    world = newest_world(read)
    yield _facts(read, world, title)
    times, last_step = of_kind(Times, world), max((line.step for line in world), default=0)
    later, passes = when_measured(world), PassCounts(world)
    plans = [passes.in_steps(plan) for plan in of_kind(Plans, world)]
    yield from _step_parts(times, later)
    yield from _throughput(times, later)
    yield from _scalars(of_kind(Scalars, world))
    yield from _plans(plans, last_step=last_step)
    yield from _noise(of_kind(NoiseLine, world), plans)
    yield from _predictions(world, times, plans, later)
    made = [passes.in_steps(each) for each in of_kind(DecisionLine, world)]
    saved = {line.plan_id: line.share for line in of_kind(SavedLine, world)}
    yield from _decisions(made, plans, times, saved)
    own = _by_rank("Each rank's own work", times, later, _BY_PACE, of=lambda each: each.busy_s)
    yield from own
    waits = _by_rank("Waits for other ranks", times, later, _BY_VALUE, of=lambda each: each.wait_s)
    yield from waits
    yield from _links(of_kind(LinksLine, world))
    yield from _workers(world)
    yield from _store(of_kind(Store, world))
    for spread in of_kind(SpreadLine, world)[-1:]:
        yield f"<h2>Do ranks draw from the same data?</h2><p>{escape(spread_line(spread))}</p>"


def _facts(read: Sequence[Line], world: Sequence[Line], title: str) -> str:
    run = newest_of(Run, world)
    stamps = [line.time_s for line in read if math.isfinite(line.time_s)]
    found: dict[str, str | None] = {"log": title}
    if stamps:
        found["started"] = _moment(stamps[0])
        found["last line"] = f"{_moment(stamps[-1])}, step {read[-1].step}"
    if run is not None:
        devices = dict.fromkeys(run.devices or [])
        found |= {
            "host": run.host,
            "script": run.script,
            "commit": run.commit,
            "loft_hvd": run.version,
            "ranks": ", ".join(run.facts),
            "devices": ", ".join([*devices][:8]) + (" ..." if len(devices) > 8 else ""),
        }
    found["rule"] = rules_of(world)
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in found.items()
        if value
    )
    return f'<table class="facts">{rows}</table>'


def _moment(time_s: float) -> str:
    try:
        when = datetime.fromtimestamp(time_s, tz=timezone.utc)
    except (OverflowError, OSError, ValueError):  # from a clock that is none
        return "at no time known"
    return when.strftime("%Y-%m-%d %H:%M:%S UTC")


def _none(text: str) -> str:
    return f'<p class="none">{escape(text)}</p>'


def _step_parts(entries: Sequence[Times], later: str) -> Iterator[str]:
    yield "<h2>Where a step goes</h2>"
    if not entries:
        yield _none(later)
        return
    newest = entries[-1]
    rows = [
        (f"rank {t.rank}", [1e3 * getattr(t, f"{part}_s") for part in PARTS]) for t in newest.ranks
    ]
    last = f"Last interval, up to step {newest.step}{newest.which}"
    yield f"<p>{escape(last)}, an average batch:</p>"
    yield bars(rows, PARTS, unit="ms")


def _throughput(entries: Sequence[Times], later: str) -> Iterator[str]:
    yield "<h2>Throughput</h2>"
    rates = [(float(entry.step), throughput(entry)) for entry in entries]
    points = [(step, rate) for step, rate in rates if rate is not None]
    label = "samples a second, all ranks together"
    yield lines([("all ranks", points)], label=label) if points else _none(later)


def _scalars(entries: Sequence[Scalars]) -> Iterator[str]:
    names = dict.fromkeys(name for entry in entries for name in entry.values)
    for name in [*names][:_MOST_SCALARS]:
        points = [
            (float(entry.step), entry.values[name]) for entry in entries if name in entry.values
        ]
        yield f"<h2>{escape(name)}</h2>"
        yield lines([(name, points)], label=name, is_from_zero=False)
    if len(names) > _MOST_SCALARS:
        yield _none(f"{len(names) - _MOST_SCALARS} more names of numbers are not shown")


def _noise(entries: Sequence[NoiseLine], plans: Sequence[Plans]) -> Iterator[str]:
    """Draw the gradients' noise scale, with the global batch beside it."""
    if not entries or not plans:
        return
    yield "<h2>Noise of gradients, in samples</h2>"
    scales = [(float(entry.step), entry.scale) for entry in entries if entry.scale is not None]
    batches = [(float(plan.first_step), float(sum(plan.sizes))) for plan in plans]
    ends = [*batches, (float(entries[-1].step), batches[-1][1])]
    yield lines([("noise scale", scales), ("global batch", ends)], label="samples", is_stepped=True)
    yield f"<p>{escape(entries[-1].noise.describe(sum(plans[-1].sizes)))}</p>"


def _plans(entries: Sequence[Plans], *, last_step: int) -> Iterator[str]:
    if not entries:
        return
    yield "<h2>Plans</h2>"
    num_ranks = max(len(entry.sizes) for entry in entries)
    series: list[tuple[str, Sequence[Point]]] = []
    if num_ranks > MOST_LINES:
        rows = [(float(entry.first_step), entry.sizes) for entry in entries]
        series = _quantiles(rows, _BY_VALUE)
    else:
        for rank in range(num_ranks):
            points = [
                (float(entry.first_step), float(entry.sizes[rank]))
                for entry in entries
                if rank < len(entry.sizes)
            ]
            series.append((f"rank {rank}", points))
    # The last plan holds to the end of the log, as far as any line says how far that is.
    series = [
        (name, [*points, (max(float(last_step), points[-1][0]), points[-1][1])])
        for name, points in series
    ]
    yield lines(series, label="samples of a step", is_stepped=True)


def _quantiles(
    rows: Sequence[tuple[float, Sequence[float]]], names: Mapping[str, float]
) -> list[tuple[str, Sequence[Point]]]:
    """Return lines from the least to the greatest of each step's values, in place of one a rank."""
    ordered = [(step, sorted(values)) for step, values in rows if values]
    return [
        (name, [(step, values[round(at * (len(values) - 1))]) for step, values in ordered])
        for name, at in names.items()
    ]


def _by_rank(
    title: str,
    entries: Sequence[Times],
    later: str,
    names: Mapping[str, float],
    *,
    of: Callable[[RankTimes], float],
) -> Iterator[str]:
    yield f"<h2>{title}</h2>"
    if not entries:
        yield _none(later)
        return
    ranks = sorted({time.rank for entry in entries for time in entry.ranks})
    # Where each line has other ranks, or there are many, their spread.
    if len(ranks) > MOST_LINES or any(entry.which for entry in entries):
        rows = [(float(entry.step), [1e3 * of(each) for each in entry.ranks]) for entry in entries]
        series = _quantiles(rows, names)
    else:
        series = [
            (
                f"rank {rank}",
                [
                    (float(entry.step), 1e3 * of(each))
                    for entry in entries
                    for each in entry.ranks
                    if each.rank == rank
                ],
            )
            for rank in ranks
        ]
    yield lines(series, label="ms a batch")


def _predictions(
    world: Sequence[Line], times: Sequence[Times], plans: Sequence[Plans], later: str
) -> Iterator[str]:
    """Show what models said of each interval before it was measured, beside what it was."""
    yield "<h2>Predicted and realised</h2>"
    if not times:
        yield _none(later)
        return
    fit: Fits | None = None
    predicted: list[Point] = []
    own: Mapping[int, float] = {}
    for line in world:
        if isinstance(line, Times):
            own = {}  # of this interval, or of none
            if fit is not None and _is_of(fit, line, plans) and math.isfinite(fit.predicted_s):
                predicted.append((float(line.step), 1e3 * fit.predicted_s))
                own = {each.rank: each.predicted_s for each in fit.ranks}
            fit = None
        elif isinstance(line, Fits):
            fit = line
    known = [(float(entry.step), 1e3 * step_s(entry.ranks)) for entry in times]
    realised = [point for point in known if point[1] > 0]
    if not predicted:
        yield _none("no model has said what the next interval would take")
    yield lines(
        [("realised", realised), ("predicted one interval before", predicted)][
            : 1 + bool(predicted)
        ],
        label="ms a step",
        dashed=["predicted one interval before"],
    )
    if own:
        yield from _own_predictions(times[-1], own)


def _is_of(fit: Fits, times: Times, plans: Sequence[Plans]) -> bool:
    """Say whether a fit is of the interval before, and of the plan that the times show.

    Lines of fits and of times are left out apart when a log is full.
    """
    if times.since is not None and times.since != fit.step:
        return False
    begun = [plan.plan_id for plan in plans if plan.first_step < times.step]
    return fit.plan_id is None or not begun or fit.plan_id == begun[-1]


def _own_predictions(newest: Times, own: Mapping[int, float]) -> Iterator[str]:
    yield f"<p>Each rank's own work in the last interval, up to step {newest.step}:</p>"
    rows = [
        (
            f"rank {each.rank}",
            f"{each.samples:.4g}",
            _ms(own[each.rank]),
            _ms(each.busy_s),
            f"{each.busy_s / own[each.rank] - 1:+.1%}",
        )
        for each in newest.ranks
        if own.get(each.rank, 0.0) > 0  # NaN is not
    ]
    yield table(("", "samples", "predicted ms", "realised ms", "off by"), rows)


def _decisions(
    made: Sequence[DecisionLine],
    plans: Sequence[Plans],
    times: Sequence[Times],
    saved: Mapping[int, float],
) -> Iterator[str]:
    if not made:
        return
    rows = []
    starts = [plan.first_step for plan in plans] + [math.inf]
    for entry in made:
        until = next(start for start in starts if start > entry.first_step)
        # The interval in which a plan began has steps at its sizes only.
        taken = [step_s(each.ranks) for each in times if entry.first_step < each.step <= until]
        gains = entry.predicted_gain, saved.get(entry.plan_id)
        rows.append(
            (
                f"{entry.plan_id}, from step {entry.first_step}",
                _ms(entry.measured_s),
                _ms(entry.predicted_s),
                _ms(taken[0] if taken else None),
                *("-" if gain is None else f"{gain:.1%}" for gain in gains),
            )
        )
    head = ("plan", "before ms", "predicted ms", "realised ms", "should save", "saved")
    yield table(head, rows)


def _ms(seconds: float | None) -> str:
    known = seconds is not None and math.isfinite(seconds)
    return f"{1e3 * seconds:.4g}" if known and seconds is not None else "-"


def _links(entries: Sequence[LinksLine]) -> Iterator[str]:
    if not entries:
        return
    newest = entries[-1]
    yield "<h2>Links</h2>"
    lost = [
        (float(line.step), 100.0 * max((each.lost_share for each in line.links), default=0.0))
        for line in entries
    ]
    filled = [(float(line.step), 100.0 * line.filled_share) for line in entries]
    names = "packets that the worst link loses", "values that are filled in"
    yield lines([*zip(names, (lost, filled), strict=True)], label="%")
    said = links_line(newest, entries)
    yield f"<p>{escape(said[0].upper() + said[1:])}</p>"
    rows = [
        (
            f"{each.peer}, {each.address}",
            *link_cells(each),
            "waits for whole rows" if each.waits else "",
        )
        for each in newest.links
    ]
    named = {place for place, each in enumerate(newest.links) if each.news(newest.rank)}
    yield table(("peer", *LINK_COLUMNS, ""), rows, named=named)


def _workers(world: Sequence[Line]) -> Iterator[str]:
    entries, rules = of_kind(SuspicionLine, world), newest_of(Rules, world)
    if rules is None and not entries:
        return
    yield "<h2>Workers</h2>"
    if not entries:
        at = None if rules is None else _watched_at(rules, world)
        note = "" if rules is None else rules.note
        yield _none(note if at is None else f"not looked at yet, first at step {at}")
        return
    # Workers are ranks or, with over=, groups; the newest report says which ones there are now.
    newest = entries[-1]
    shown = sorted(newest.workers, key=lambda each: -each.suspicion)[:MOST_LINES]
    series = [
        (
            f"rank{'s' if len(worker.ranks) > 1 else ''} {' '.join(map(str, worker.ranks))}",
            [
                (float(entry.step), each.suspicion)
                for entry in entries
                for each in entry.workers
                if each.ranks == worker.ranks
            ],
        )
        for worker in sorted(shown, key=lambda each: each.ranks)
    ]
    yield lines(series, label="suspicion, 0 as the others to 1", least_top=1.0)
    rows = []
    for worker in newest.workers:
        state = "in quarantine" if worker.in_quarantine_until is not None else ""
        state = state or ("stands out" if worker.is_named else "")
        rows.append(
            (
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
        )
    head = ("ranks", "suspicion", "outside", "distance", "left out", "clipped", "copied")
    named = {place for place, worker in enumerate(newest.workers) if worker.is_named}
    yield table((*head, "not finite", ""), rows, named=named)


def _watched_at(rules: Rules, world: Sequence[Line]) -> int | None:
    """Return the step of the first look: so many from where the run went on, if it was loaded."""
    begun = max([rules.step, *(line.step for line in of_kind(ScheduleLine, world))])
    return None if rules.watched_from is None else begun + rules.watched_from - rules.step


def _store(entries: Sequence[Store]) -> Iterator[str]:
    if not entries:
        return
    yield "<h2>The sample store</h2>"
    newest = entries[-1]
    parts = ("own", "peers", "source")
    rows = [
        (f"rank {each.rank}", [float(each.own), float(each.peer), float(each.source)])
        for each in newest.ranks
    ]
    yield (
        f"<p>Where the samples of epoch {newest.epoch} came from, the newest that another has "
        "followed:</p>"
    )
    yield bars(rows, parts, unit="samples")
    cells = [_reads_row(f"{entry.epoch}", each) for entry in entries for each in entry.ranks]
    head = (
        "epoch",
        "rank",
        "samples",
        "own",
        "peers",
        "source",
        "own MB",
        "peers MB",
        "source MB*",
    )
    yield table(head, cells)
    yield "<p>* if they were as long as the samples that were kept.</p>"


def _reads_row(epoch: str, reads: StoreReads) -> tuple[str, ...]:
    total = max(reads.num_samples, 1)
    return (
        epoch,
        str(reads.rank),
        str(reads.num_samples),
        *(f"{each / total:.1%}" for each in (reads.own, reads.peer, reads.source)),
        *(f"{each / 1e6:.4g}" for each in (reads.own_bytes, reads.peer_bytes, reads.source_bytes)),
    )
