"""Plans follow a device that slows down: against the best fixed split there is."""

from __future__ import annotations

import json
import statistics

import pytest

from tests.support.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(250)]

JOB = "tests/multiprocess/jobs/emulated.py"


def test_five_replans_after_a_slowdown_steps_are_near_the_best_fixed_split() -> None:
    done = launch(4, [JOB, "3"], timeout_s=240)
    assert done.returncode == 0, done.output[-4000:]
    line = next(line for line in done.output.splitlines() if "found {" in line)
    found = json.loads(line.split("found ", 1)[1])
    steps = [step_s for step_s, _ in found["runs"]]
    assert statistics.median(steps) <= 1.10 * found["best_s"], found
