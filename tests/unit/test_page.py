"""The page holds what the log holds, needs nothing from elsewhere, and trusts no text."""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loft_hvd.balance.controller import Decision
from loft_hvd.balance.interval import RankTimes
from loft_hvd.balance.plan import Plan
from loft_hvd.errors import DataError
from loft_hvd.pipeline.suspicion.report import WorkerReport
from loft_hvd.report.page import render_page
from loft_hvd.report.svg import GanttRow, GanttSpan, bars, gantt, lines, ticks
from loft_hvd.runlog import RunLog, read_run_log

VOID = {"meta", "br", "img"}


class Checker(HTMLParser):
    """Sees to it that tags close in order, and keeps all tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def times(rank: int, compute_s: float) -> dict[str, Any]:
    return asdict(RankTimes(rank, 20, 32, 32, 0, 0.01, 0.01, compute_s, 0, 0, 0, 0.35))


@pytest.fixture
def entries(tmp_path: Path) -> list[dict[str, Any]]:
    log = RunLog(tmp_path)
    log.write("run", world_size=3, global_batch_size=96, policy="loft")
    log.write("plan", plan_id=0, first_step=0, sizes=[32, 32, 32])
    for log.step in (20, 40):
        log.write("times", num_ranks=3, ranks=[times(0, 0.1), times(1, 0.1), times(2, 0.3)])
    log.write("plan", plan_id=1, first_step=43, sizes=[40, 40, 16])
    liar = WorkerReport((2,), 0.97, 0.9, 40.0, 0, 20, is_named=True)
    honest = WorkerReport((0,), 0.02, 0.4, 1.0, 0, 20, is_named=False)
    log.write("suspicion", num_steps=40, workers=[asdict(honest), asdict(liar)])
    log.write("spread", ratios=[0.1, 0.0, 0.2], usual=0.1)
    log.write("fault", error="PeerError", text="rank 1 <script>alert(1)</script> & went")
    assert log.path is not None
    return read_run_log(log.path)


def test_a_page_shows_times_plans_workers_and_faults(entries: list[dict[str, Any]]) -> None:
    page = render_page(entries, title="a run")
    assert "rank 2 is slow: compute" in page
    assert "stands out" in page
    assert "PeerError at step 40" in page
    # Parts of a step, throughput, plans, predicted and realised, own work, waits, suspicion.
    assert page.count("<svg") == 7
    assert "sizes [40, 40, 16]" in page


def test_a_page_is_whole_and_needs_nothing_from_elsewhere(entries: list[dict[str, Any]]) -> None:
    page = render_page(entries, title="<b>&")
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    tags = {tag for tag, _ in checker.seen}
    assert not tags & {"script", "link", "img", "iframe", "object", "b"}
    assert not any({"src", "href"} & attrs.keys() for _, attrs in checker.seen)
    assert not re.search(r"https?:|@import|url\(", page)


def test_a_page_of_many_ranks_shows_their_spread(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for log.step in (20, 40):  # other ranks stand for the thousand in each line
        ranks = [times(log.step + place, 0.1 * (1 + place)) for place in range(5)]
        log.write("times", num_ranks=1000, ranks=ranks)
    assert log.path is not None
    page = render_page(read_run_log(log.path), title="many")
    assert "5 of 1000 ranks from the fastest to the slowest" in page
    told = re.findall(r'aria-label="([^:"]+): ([^"]*)"', page)
    names = [name for label, each in told if label != "ms" for name in each.split(", ")]
    middle = ["a quarter", "median", "three quarters"]
    own, waits = ["fastest", *middle, "slowest"], ["least", *middle, "most"]
    assert names == ["all ranks", "realised", *own, *waits]


def test_the_rank_with_most_samples_is_not_called_the_slowest() -> None:
    plan = {"kind": "plan", "step": 0, "plan_id": 0, "first_step": 0, "sizes": [40, *[8] * 8]}
    page = render_page([plan], title="x")
    assert "slowest: 40" not in page
    assert "most: 40" in page


def test_a_page_says_what_was_left_out(entries: list[dict[str, Any]]) -> None:
    assert "were left out" not in render_page(entries, title="x")
    entries.append({"kind": "thinned", "step": 50, "num_lines": 7})
    assert "7 older lines of times, fits, links, suspicion and scalars" in render_page(
        entries, title="x"
    )


def test_an_empty_log_makes_a_page_too() -> None:
    assert "not measured yet" in render_page([], title="nothing")


def test_a_page_says_when_what_is_missing_will_come() -> None:
    run = {"kind": "run", "step": 0, "world_size": 4, "policy": "loft", "times_at": 25}
    rules = {"kind": "rules", "step": 0, "rules": ["median"], "watched_from": 10}
    page = render_page([run, rules], title="new")
    assert "not measured yet, first at step 25" in page
    assert "not looked at yet, first at step 10" in page
    assert "<svg" not in page  # no picture of zeros


def test_a_page_says_when_what_is_missing_will_come_after_a_state_was_loaded() -> None:
    run = {"kind": "run", "step": 0, "world_size": 4, "policy": "loft", "times_at": 25}
    rules = {"kind": "rules", "step": 0, "rules": ["median"], "watched_from": 10}
    loaded = {"kind": "schedule", "step": 1000, "times_at": 1025, "num_passes": 1}
    page = render_page([run, rules, loaded], title="resumed")
    assert "not measured yet, first at step 1025" in page
    assert "not looked at yet, first at step 1010" in page


def test_a_page_says_where_and_from_what_a_run_was_made(tmp_path: Path) -> None:
    log = RunLog(tmp_path, clock=lambda: 1e9)
    log.write_run(world_size=2)
    log.write("rules", rules=["trimmed_mean:f=1"], over=None, watched_from=None, note="")
    assert log.path is not None
    (run, _) = entries = read_run_log(log.path)
    page = render_page(entries, title="x")
    for known in (run["host"], run["commit"], run["script"], "trimmed_mean:f=1"):
        assert f"<td>{known}</td>" in page
    assert "2001-09-09 01:46:40 UTC" in page


def test_a_page_shows_scalars_and_what_was_predicted(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    ranks = [times(0, 0.1), times(1, 0.2)]
    for log.step in (20, 40):
        log.write_scalars({"loss": torch.tensor(40.0 - log.step, requires_grad=True)})
        log.write("times", num_ranks=2, ranks=[each | {"wall_s": 0.2} for each in ranks])
        fits = [{"rank": 0, "predicted_s": 0.1}, {"rank": 1, "predicted_s": 0.25}]
        log.write("fit", plan_id=0, predicted_s=0.25, ranks=fits)
    assert log.path is not None
    page = render_page(read_run_log(log.path), title="x")
    assert "<h2>loss</h2>" in page
    assert "step 20</text>" in page
    assert "predicted one interval before: 250</text>" in page  # what the pointer finds at step 40
    assert "realised: 200</text>" in page
    assert "<td>rank 1</td><td>32</td><td>250</td><td>210</td><td>-16.0%</td>" in page


def test_a_page_of_extreme_numbers_is_still_one() -> None:
    scalars = [
        {"kind": "scalars", "step": step, "values": {"a": value, "b": None}}
        for step, value in enumerate((1.7e308, -1.7e308, 1.0, 1e149, -1e149, 5e-324))
    ]
    nobody = {"kind": "times", "step": 3, "ranks": []}
    plans = {"kind": "plan", "step": 3, "plan_id": 0, "first_step": 0, "sizes": []}
    store = {"kind": "store", "step": 3, "epoch": 0, "ranks": []}
    page = render_page([*scalars, nobody, plans, store], title="x")
    assert not re.search(r'[" ,]-?(nan|inf)', page)


def test_a_page_shows_what_plans_should_save_and_saved(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write("plan", **Plan(1, 20, (80, 48)).fields())
    made = Decision(1, 20, (80, 48), "5.0% less predicted", 0.19, 0.05, 0.2)
    log.write("decision", step=15, **asdict(made))
    assert "<td>5.0%</td><td>-</td>" in page_of(log)
    log.write("saved", step=40, plan_id=1, share=0.0412)
    assert "<td>5.0%</td><td>4.1%</td>" in page_of(log)


def of_interval(log: RunLog, step: int, *, since: int | None) -> None:
    ranks = [times(0, 0.1) | {"wall_s": 0.2}]
    log.write("times", step=step, since=since, num_ranks=1, ranks=ranks)


def fit_of(log: RunLog, step: int, *, plan_id: int | None = 0, s: float = 0.25) -> None:
    ranks = [{"rank": 0, "predicted_s": s}]
    log.write("fit", step=step, plan_id=plan_id, predicted_s=s, ranks=ranks)


def test_a_prediction_is_of_the_interval_that_follows_it(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    of_interval(log, 20, since=0)
    fit_of(log, 20)
    of_interval(log, 40, since=20)
    assert "Each rank's own work in the last interval" in page_of(log)
    of_interval(log, 60, since=40)  # without a fit before it
    assert "Each rank's own work in the last interval" not in page_of(log)


def test_lines_that_were_thinned_apart_are_no_prediction(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    fit_of(log, 20)
    of_interval(log, 60, since=40)  # that of steps 20 to 40 was left out
    assert "no model has said" in page_of(log)


@pytest.mark.parametrize(("plan_id", "is_of_it"), [(0, False), (1, True), (None, True)])
def test_a_prediction_is_of_the_plan_that_came_into_force(
    plan_id: int | None, is_of_it: bool, tmp_path: Path
) -> None:
    log = RunLog(tmp_path)
    log.write("plan", plan_id=0, first_step=0, sizes=[32])
    fit_of(log, 20, plan_id=plan_id)
    log.write("plan", plan_id=1, first_step=25, sizes=[32])
    of_interval(log, 40, since=20)
    assert ("no model has said" not in page_of(log)) is is_of_it


def page_of(log: RunLog) -> str:
    assert log.path is not None
    return render_page(read_run_log(log.path), title="x")


def test_numbers_of_a_stranger_make_a_page(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write("times", num_ranks=0, ranks=[])
    fit_of(log, 20, s=1e308)
    of_interval(log, 40, since=20)
    for log.step, value in enumerate([1.7e308, -1.7e308]):
        log.write_scalars({"loss": value})
    worker = asdict(WorkerReport((0,), 0.5, 0.4, 1.0, 0, 20, is_named=False))
    log.write("suspicion", num_steps=40, workers=[worker | {"suspicion": None}])
    assert "<h2>loss</h2>" in page_of(log)


def test_names_without_end_are_bounded(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for log.step in range(60):
        log.write_scalars({f"number {log.step}": 1.0})
    page = page_of(log)
    assert page.count("<h2>number ") == 50
    assert "10 more names of numbers are not shown" in page


def test_no_text_of_a_log_becomes_part_of_the_page() -> None:
    bad = '"><script>alert(1)</script><img src=x onerror=y>&'
    run: dict[str, Any] = {"kind": "run", "step": 0, "world_size": 2, "devices": [bad]}
    run |= dict.fromkeys(("policy", "host", "script", "commit", "version"), bad)
    rules = {"kind": "rules", "step": 0, "rules": [bad], "note": bad, "over": bad}
    scalars = {"kind": "scalars", "step": 1, "values": {bad: 1.0}}
    explain = {"kind": "explain", "step": 1, "text": bad}
    decision = {"kind": "decision", "step": 1, "plan_id": 0, "first_step": 0, "sizes": [1, 1]}
    fault = {"kind": "fault", "step": 1, "error": bad, "text": bad}
    page = render_page([run, rules, scalars, explain, decision | {"reason": bad}, fault], title=bad)
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert not {tag for tag, _ in checker.seen} & {"script", "img"}
    assert not any("onerror" in attrs for _, attrs in checker.seen)
    # Host, script, commit, version, ranks and policy, devices, rule; the note; a scalar's name.
    assert page.count("&lt;script&gt;alert(1)") >= 9
    assert "<script" not in page


def test_a_page_shows_what_ranks_read_of_a_store() -> None:
    reads = {"rank": 1, "own": 90, "peer": 6, "source": 4, "own_bytes": 9_000_000, "peer_bytes": 5}
    store = {"kind": "store", "step": 80, "epoch": 2, "ranks": [reads]}
    page = render_page([store], title="x")
    assert "Where the samples of epoch 2 came from" in page
    assert "<td>90.0%</td><td>6.0%</td><td>4.0%</td><td>9</td>" in page


def test_a_line_that_lacks_a_field_is_an_error() -> None:
    with pytest.raises(DataError, match="lacks"):
        render_page([{"kind": "plan", "step": 1}], title="x")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 250, [0, 50, 100, 150, 200, 250]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.31, 0.42, [0.32, 0.34, 0.36, 0.38, 0.4, 0.42]),
        (7, 7, [7]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == expected


@pytest.mark.parametrize("high", [1e-9, 0.7, 3, 99, 12345, 6e14])
def test_ticks_are_few_and_inside(high: float) -> None:
    found = ticks(0.0, high)
    assert 3 <= len(found) <= 6
    assert all(0 <= tick <= high * (1 + 1e-6) for tick in found)


def test_lines_that_would_hide_each_other_are_set_apart() -> None:
    level = [(0.0, 8.0), (10.0, 8.0)]
    drawing = lines([("a", level), ("b", level)], label="y")
    heights = re.findall(r'class="line"[^>]* d="M[\d.]+,([\d.]+)L', drawing)
    assert float(heights[0]) - float(heights[1]) == pytest.approx(3.0)
    assert drawing.count(": 8</text>") == 4  # the values that are told stay true


def heights_of(*values: tuple[float, float]) -> list[tuple[float, float]]:
    """Return where lines from step 0 to 10 begin and end in a picture of 0 to 100, in its units."""
    series = [(f"line {number}", [(0.0, a), (10.0, b)]) for number, (a, b) in enumerate(values)]
    drawing = lines(series, label="y", least_top=100.0)
    found = re.findall(r'class="line"[^>]* d="M[\d.]+,([\d.]+)L[\d.]+,([\d.]+)"', drawing)
    return [(250 - 34 - float(a), 250 - 34 - float(b)) for a, b in found]


def test_lines_are_set_apart_where_they_meet_and_do_not_cross_there() -> None:
    # 190 units are 100: the first two are 0.8 units apart at step 0, and far from each other at 10.
    (a, b), (c, d), alone = heights_of((50.4, 20.0), (50.0, 50.0), (90.0, 90.0))
    assert (a, c) == pytest.approx((95.38 - 1.5, 95.38 + 1.5), abs=0.06)
    assert (b, d, *alone) == pytest.approx((38.0, 95.0, 171.0, 171.0), abs=0.06)


@given(values=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=8))
def test_lines_are_apart_and_as_near_to_their_values_as_that_lets(values: list[float]) -> None:
    found = [begin for begin, _ in heights_of(*((value, value) for value in values))]
    ordered = sorted(found)
    assert all(b - a >= 2.9 for a, b in pairwise(ordered))  # of what is printed with one digit
    true = sorted(1.9 * value for value in values)
    assert (
        max(abs(a - b) for a, b in zip(ordered, true, strict=True)) <= 3.0 * (len(values) - 1) + 0.1
    )


def test_lines_that_are_set_apart_stay_above_the_base_line() -> None:
    (first, _), (second, _) = heights_of((0.0, 0.0), (0.0, 0.0))
    assert (first, second) == pytest.approx((0.0, 3.0))


def test_lines_that_cross_between_steps_stay_where_they_are() -> None:
    (a, b), (c, d) = heights_of((20.0, 80.0), (80.0, 20.0))
    assert (a, b, c, d) == pytest.approx((38.0, 152.0, 152.0, 38.0), abs=0.06)


@pytest.mark.parametrize("values", [[0.13, 0.79], [3.0, 570.0], [-7.0, 11.5], [1e-9, 2e-7]])
@pytest.mark.parametrize("is_from_zero", [True, False])
def test_an_axis_ends_at_round_numbers_beyond_all_values(
    values: list[float], is_from_zero: bool
) -> None:
    series = [("a", [(20.0 * at, value) for at, value in enumerate(values)])]
    drawing = lines(series, label="y", is_from_zero=is_from_zero)
    found = re.findall(r'text-anchor="end">([-+\d.e]+)</text>', drawing)
    marks = [float(each) for each in found]
    assert marks[0] <= min(values)
    assert marks[-1] >= max(values)
    assert 3 <= len(marks) <= 8


def test_pointing_at_a_step_tells_every_line_there() -> None:
    drawing = lines([("a", [(0, 1), (10, 3)]), ("b", [(10, 5)])], label="y", is_stepped=True)
    first, second = re.findall(r'<g class="tip">(.*?)</g>', drawing)
    assert re.findall(r">([^<>]+)</text>", first) == ["step 0", "a: 1"]
    assert re.findall(r">([^<>]+)</text>", second) == ["step 10", "a: 3", "b: 5"]


def test_long_lines_show_measured_points_only() -> None:
    points = [(float(step), float(step % 7)) for step in range(5000)]
    drawing = lines([("a", points)], label="y")
    assert len(drawing) < 60_000
    told = re.findall(r"step (\d+)</text>.*?a: (\d)</text>", drawing)
    assert 50 <= len(told) <= 200
    assert all(int(step) % 7 == int(value) for step, value in told)


@pytest.mark.parametrize("is_from_zero", [True, False])
@pytest.mark.parametrize(
    "values",
    [
        [1.7e308, -1.7e308],
        [math.inf, 1.0],
        [math.nan, math.nan],
        [0.0, 5e-324],
        [5e-324, 5e-324],
        [-1e16, -1e16],
        [1.7e308, 1.7e308],
        [1.0, 1.0 + 2e-16],
    ],
)
def test_any_values_make_a_picture(values: list[float], is_from_zero: bool) -> None:
    points = [(20.0 * at, value) for at, value in enumerate(values)]
    drawing = lines([("a", points)], label="y", is_from_zero=is_from_zero)
    assert not re.search(r"(inf|nan)[\d\"., ]", drawing)
    heights = re.findall(r"[ML][\d.]+,([-\d.]+)", drawing)
    assert all(0 <= float(height) <= 250 for height in heights)


def test_bars_are_as_long_as_their_values() -> None:
    drawing = bars([("a", [1.0, 2.0]), ("b", [0.0, 6.0])], ["x", "y"], unit="ms")
    widths = [float(width) for width in re.findall(r'width="([\d.]+)"', drawing)]
    assert widths[1] == pytest.approx(2 * widths[0], rel=1e-2)
    assert widths[3] == pytest.approx(6 * widths[0], rel=1e-2)


def test_lines_rise_with_their_values_and_steps_are_level() -> None:
    drawing = lines([("a", [(0, 1), (10, 3)])], label="y", is_stepped=True)
    (path,) = re.findall(r'stroke="[^"]+" d="([^"]+)"', drawing)
    start, level, end = re.fullmatch(r"M([\d.,]+)H([\d.]+)L([\d.,]+)", path).groups()  # type: ignore[union-attr]  # a failed match is a failed test
    assert float(start.split(",")[1]) > float(end.split(",")[1])  # y grows downwards
    assert level == end.split(",")[0]


def test_a_gantt_chart_has_spans_where_their_times_are() -> None:
    rows = [
        GanttRow("a", [GanttSpan(0.0, 1.0, 0), GanttSpan(1.0, 4.0, 1, "x:2 <hosts>")], (3.0, 5.0)),
        GanttRow("a-job-whose-name-is-longer-than-there-is-room-for", [GanttSpan(2.0, 4.0, 1)]),
    ]
    drawing = gantt(rows, ["waits", "runs"], unit="hours")
    found = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', drawing)
    boxes = [tuple(map(float, each)) for each in found]
    (left, y, hour), (after, _, three), (later, lower, two) = boxes
    assert after == pytest.approx(left + hour, abs=0.2)
    assert three == pytest.approx(3 * hour, abs=0.2)
    assert two == pytest.approx(2 * hour, abs=0.2)
    assert later == pytest.approx(left + 2 * hour, abs=0.2)
    assert lower > y
    assert "a: runs, 1 to 4 hours; x:2 &lt;hosts&gt;" in drawing
    low, high = re.findall(r'class="whisker" d="M([\d.]+),[^H]*H([\d.]+)M', drawing)[0]
    assert float(high) - float(low) == pytest.approx(two, abs=0.2)
    assert "\u2026" in drawing


def test_a_gantt_chart_of_nothing_is_drawn() -> None:
    assert "<svg" in gantt([], ["runs"], unit="hours")
    assert "nan" not in gantt([GanttRow("a", [GanttSpan(0.0, 0.0, 0)])], ["runs"], unit="hours")
