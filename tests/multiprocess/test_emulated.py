"""Plans follow a device that slows down, and cost nothing where there is nothing to win."""

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


def test_on_equal_ranks_planning_costs_a_hundredth_of_a_step_at_most() -> None:
    found = run("equal", 10)
    # The first quarter of the rounds: what other work on the machine did to the rest is not ours.
    first_quarter = sorted(found["ratios"])[len(found["ratios"]) // 4]
    assert first_quarter <= 1.01, found
    assert found["own_share"] <= 0.01, found
