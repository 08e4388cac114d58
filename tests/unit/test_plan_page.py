"""A plan's page: one file that shows what runs where and when, and why."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from loft_hvd.fleet.jobs import DataSet
from loft_hvd.fleet.measured import Origin
from loft_hvd.fleet.plan_page import jobs_page, plan_page
from loft_hvd.fleet.run import JobPlan, plan_job
from loft_hvd.fleet.timeline import PlannedJob, PlannedStretch
from tests.unit.test_job_plan import FLEET, JOB


class Elements(HTMLParser):
    """What a page is made of, and that every element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.links: list[str | None] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]
        if tag not in ("meta", "rect", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "path"):
            assert self.open.pop() == tag


def check(page: str) -> None:
    found = Elements(page)
    assert not found.open
    assert not found.links
    assert "script" not in found.names


@pytest.fixture(scope="module")
def plan() -> JobPlan:
    return plan_job(FLEET, JOB, simulates=False)


def test_a_page_shows_hosts_times_and_worths(plan: JobPlan) -> None:
    page = plan_page(replace(plan, origins={"T4": Origin("measured", 0.05)}))
    check(page)
    assert "<h1>job job: 4 ranks on 2 of 3 hosts, mean</h1>" in page
    assert page.count('class="whisker"') == 2  # the end of each host
    assert "a1: training, 0 to" in page
    assert "its 8 Mb/s link carries the gradients" in page
    assert "MORE THAN" not in page


def test_a_page_shows_the_first_epoch_of_a_store() -> None:
    fleet = replace(FLEET, data=[DataSet("photos", 3_000, 1e5)])
    plan = plan_job(fleet, replace(JOB, data="photos", store=True), simulates=False)
    page = plan_page(plan)
    check(page)
    assert "a1: first epoch, as stores fill, 0 to" in page
    assert 'class="whisker"' not in page  # typed models have no error


def test_a_page_says_that_the_simulator_takes_longer(plan: JobPlan) -> None:
    page = plan_page(replace(plan, simulated_s=1.0))
    assert '<p class="bad">A step takes 1000 ms in the simulator' in page


def test_names_are_text(plan: JobPlan) -> None:
    check(plan_page(replace(plan, choice=replace(plan.choice, left_out={"<script>": "<a>"}))))


KEPT = PlannedStretch(0.0, 7200.0, (("a1", 4),))
ONE = PlannedJob("one", True, "", 0.0, 0.0, 7200.0, 7000.0, 7500.0, 10.0, (KEPT,))


def refused(name: str, reason: str) -> PlannedJob:
    return PlannedJob(name, False, reason, 0.0, None, None, None, None, 0.0)


def test_a_page_of_many_jobs_shows_waits_runs_and_refusals() -> None:
    jobs = [
        ONE,
        replace(
            ONE,
            name="two",
            arrival_s=3600.0,
            start_s=7200.0,
            end_s=14400.0,
            end_high_s=14500.0,
            stretches=(replace(KEPT, start_s=7200.0, end_s=14400.0),),
        ),
        refused("three", "GPUs of <a1> cost too much"),
    ]
    page = jobs_page(jobs, title="plan of jobs.toml")
    check(page)
    assert "<h1>2 of 3 jobs are admitted</h1>" in page
    assert "two: waits, 1 to 2 hours" in page
    assert "two: runs, 2 to 4 hours; a1:4" in page
    assert "GPUs of &lt;a1&gt; cost too much" in page
    assert page.count('class="whisker"') == 2


def test_a_page_shows_how_the_hosts_of_a_job_change() -> None:
    later = PlannedStretch(3600.0, 7200.0, (("a1", 4), ("a2", 2)))
    page = jobs_page([replace(ONE, stretches=(replace(KEPT, end_s=3600.0), later))], title="plan")
    check(page)
    assert "one: runs, 0 to 1 hours; a1:4" in page
    assert "one: runs, 1 to 2 hours; a1:4,a2:2" in page
    assert "<td>a1:4 first, a1:4,a2:2 from 60 min</td>" in page


def test_a_page_of_refused_jobs_has_no_chart() -> None:
    assert "<svg" not in jobs_page([refused("one", "no room")], title="plan")
