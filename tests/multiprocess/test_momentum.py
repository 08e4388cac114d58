"""Worker momentum over processes: it is as large as torch's momentum."""

from __future__ import annotations

import re

import pytest

from tests.multiprocess.jobs.momentum import NUM_VALUES
from tests.support.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(330)]

JOB = "tests/multiprocess/jobs/momentum.py"


def test_averages_take_no_more_memory_than_momentum_in_sgd() -> None:
    took = {}
    for by in ("sgd", "worker"):
        done = launch(2, [JOB, by], timeout_s=150)
        done.succeeded()
        took[by] = max(map(int, re.findall(rf"took (\d+) bytes by {by}", done.output)))
    assert took["sgd"] > 3 * 4 * NUM_VALUES  # parameters, gradients, momentum: all are in there
    assert took["worker"] <= 1.01 * took["sgd"], took
