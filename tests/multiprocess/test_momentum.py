"""Worker momentum over processes: it is torch's momentum, also over a resume, and as large."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.multiprocess.jobs.momentum import NUM_VALUES, RESUMED_AT
from tests.support.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(330)]

JOB = "tests/multiprocess/jobs/momentum.py"


def test_a_resumed_job_ends_where_torchs_momentum_does(tmp_path: Path) -> None:
    for first, last in ((0, RESUMED_AT), (RESUMED_AT, 100)):
        done = launch(2, [JOB, "train", str(tmp_path), str(first), str(last)], timeout_s=150)
        done.succeeded()
        away = re.findall(rf"is (\S+) away after {last} steps", done.output)
        assert len(away) == 2, done.output[-4000:]
        assert max(map(float, away)) < 1e-6


def test_averages_take_no_more_memory_than_momentum_in_sgd() -> None:
    took = {}
    for by in ("sgd", "worker"):
        done = launch(2, [JOB, "memory", by], timeout_s=150)
        done.succeeded()
        took[by] = max(map(int, re.findall(rf"took (\d+) bytes by {by}", done.output)))
    assert took["sgd"] > 3 * 4 * NUM_VALUES  # parameters, gradients, momentum: all are in there
    assert took["worker"] <= 1.01 * took["sgd"], took
