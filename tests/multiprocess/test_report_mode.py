"""The report names the slow rank and its cause, and nobody where nothing is wrong."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from loft_hvd.report.text import render_text
from loft_hvd.runlog import read_run_log
from tests.support.launch import launch
from tests.support.marks import long_first

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]

JOB = "tests/multiprocess/jobs/report_mode.py"


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("disk", [("2", "fetch")]),
        pytest.param("nothing", [], marks=pytest.mark.long),
        pytest.param("cpu", [("2", "compute")], marks=pytest.mark.long),
        pytest.param("link", [("2", "fetch")], marks=pytest.mark.long),
    ],
)
def test_report_names_the_slow_rank_and_its_cause(
    kind: str, named: list[tuple[str, str]], tmp_path: Path
) -> None:
    done = launch(3, [JOB, kind], timeout_s=180, env={"LOFT_HVD_LOG_DIR": str(tmp_path)})
    done.succeeded()
    assert re.findall(r"rank (\d) is slow: (\w+)", done.output) == named, done.output[-4000:]
    assert ("no rank is slow" in done.output) == (not named)
    (log,) = tmp_path.iterdir()
    report = render_text(read_run_log(log))
    assert re.findall(r"rank (\d) is slow: (\w+)", report) == named, report
    assert ("samples a batch come from elsewhere" in report) == (kind == "link")


@pytest.mark.long
def test_report_begins_with_the_worker_whose_gradients_are_off(tmp_path: Path) -> None:
    env = {"LOFT_HVD_LOG_DIR": str(tmp_path)}
    done = launch(5, [JOB, "faulty"], timeout_s=180, env=env)
    done.succeeded()
    (log,) = tmp_path.iterdir()
    report = render_text(read_run_log(log))
    assert report.startswith("Rank 2 sends gradients that are off"), report


@pytest.mark.long
@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors take no notes before Python 3.11")
@pytest.mark.parametrize("what", long_first(["raise", "freeze"]))
def test_a_fault_of_another_rank_is_in_the_log_when_the_job_is_gone(
    what: str, tmp_path: Path
) -> None:
    job = ["tests/multiprocess/jobs/train.py", what, "1"]
    done = launch(3, job, timeout_s=80, env={"LOFT_HVD_LOG_DIR": str(tmp_path)})
    assert done.returncode != 0
    (log,) = tmp_path.iterdir()
    report = render_text(read_run_log(log))
    assert re.search(r"Error at step \d+: ", report), report
    assert re.search(r"rank 1 .*(has failed|is frozen)", report), report
