"""The page holds what the log holds, needs nothing from elsewhere, and trusts no text."""

from __future__ import annotations

import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from loft_hvd.balance.interval import RankTimes
from loft_hvd.errors import DataError
from loft_hvd.pipeline.suspicion.report import WorkerReport
from loft_hvd.report.page import render_page
from loft_hvd.report.svg import bars, lines
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
    return asdict(RankTimes(rank, 20, 32, 32, 0, 0.01, 0.01, compute_s, 0, 0, 0, 0))


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
    assert page.count("<svg") == 4  # parts of a step, own work, plans, suspicion
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
    names = re.findall(r"<title>([^<:]+)</title></path>", page)
    assert names == ["fastest", "a quarter", "median", "three quarters", "slowest"]


def test_a_page_says_what_was_left_out(entries: list[dict[str, Any]]) -> None:
    assert "were left out" not in render_page(entries, title="x")
    entries.append({"kind": "thinned", "step": 50, "num_lines": 7})
    assert "7 older lines of times" in render_page(entries, title="x")


def test_an_empty_log_makes_a_page_too() -> None:
    assert "no times yet" in render_page([], title="nothing")


def test_a_line_that_lacks_a_field_is_an_error() -> None:
    with pytest.raises(DataError, match="lacks"):
        render_page([{"kind": "plan", "step": 1}], title="x")


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
