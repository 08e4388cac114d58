"""Plans follow a device that slows down, and cost nothing where there is nothing to win.

Those of ``make whole`` ask on processes what ``tests/unit/test_loft.py`` asks on a clock.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest

from tests.support.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(250)]

JOB = "tests/multiprocess/jobs/emulated.py"


def run(mode: str, count: int) -> dict[str, Any]:
    done = launch(4, [JOB, mode, str(count)], timeout_s=240)
    done.succeeded()
    line = next(line for line in done.output.splitlines() if "found {" in line)
    found: dict[str, Any] = json.loads(line.split("found ", 1)[1])
    return found


def test_five_replans_after_a_slowdown_steps_are_near_the_best_fixed_split() -> None:
    found = run("slowdown", 3)
    steps = [step_s for step_s, _ in found["runs"]]
    assert statistics.median(steps) <= 1.10 * found["best_s"], found


@pytest.mark.whole
def test_a_slowdown_is_answered_within_two_intervals_and_its_end_within_four() -> None:
    found = run("changing", 100)
    sizes, begins, interval = found["sizes"], found["begins"], found["interval"]
    assert sizes[begins] == [24] * 4
    assert sizes[begins + 2 * interval][2] <= 14, found  # of a rank three times as slow: 9.6
    assert min(sizes[begins + 100 + 4 * interval]) >= 22, found


@pytest.mark.whole
def test_a_rank_that_was_shrunk_wrongly_is_back_within_three_intervals() -> None:
    found = run("changing", 15)  # slow until its share has become smaller
    sizes, begins, interval = found["sizes"], found["begins"], found["interval"]
    shrunk_at = next(step for step in range(begins, len(sizes)) if sizes[step][2] <= 14)
    assert min(sizes[shrunk_at + 3 * interval]) >= 22, found


@pytest.mark.whole
def test_stalls_alone_change_no_plan() -> None:
    found = run("stalling", 1000)  # ten of 1 to 8 s
    assert found["plans"] == [[24] * 4], found


def test_on_equal_ranks_planning_costs_a_hundredth_of_a_step_at_most() -> None:
    found = run("equal", 10)
    # The first quarter of the rounds: what other work on the machine did to the rest is not ours.
    first_quarter = sorted(found["ratios"])[len(found["ratios"]) // 4]
    assert first_quarter <= 1.01, found
    assert found["own_share"] <= 0.01, found


def test_micro_batches_free_the_share_from_the_cap_and_train_alike() -> None:
    found = run("capped", 40)
    assert found["ratio"] <= 0.75, found
    assert found["largest"]["micro"][3] <= 16, found
    assert max(found["largest"]["share"]) == 96, found
    assert max(found["apart"].values()) <= 1e-5 < found["moved"], found
