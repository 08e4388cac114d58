"""Elastic jobs recover from ranks that are lost, and take in ranks that join."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.support.elastic import launch_elastic
from tests.support.launch import Finished

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(160)]

JOB = "tests/multiprocess/jobs/elastic.py"
LIMIT_S = 20.0
NUM_STEPS = 48  # three epochs of 192 samples, 12 a step


def run(folder: Path, what: str, **options: object) -> Finished:
    return launch_elastic(
        folder,
        [JOB, str(folder), what],
        **{  # type: ignore[arg-type]  # the options of launch_elastic
            "hosts": ["localhost:2", "127.0.0.1:1"],
            "num_ranks": 3,
            "min_ranks": 2,
            "timeout_s": 120.0,
            **options,
        },
    )


@pytest.mark.parametrize(
    ("what", "says"),
    [
        pytest.param(
            "kill",
            r"rank \d \(process \d+ on \S+\) has ended without a word",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "kill:loft",
            r"rank \d \(process \d+ on \S+\) has ended without a word",
            marks=pytest.mark.long,
        ),
        ("freeze", r"rank \d \(process \d+ on \S+\) is frozen"),
        pytest.param(
            "raise", r"rank \d .* has failed: RuntimeError: rank \d raises", marks=pytest.mark.long
        ),
    ],
)
def test_the_job_recovers_from_a_lost_rank_and_names_it(
    what: str, says: str, tmp_path: Path
) -> None:
    done = run(tmp_path, what)
    assert re.search(says, done.output), done.output[-6000:]
    assert done.output.count(f"of 2 has finished at step {NUM_STEPS}") == 2, done.output[-6000:]
    assert "rank 0 of 2 goes on at step 8" in done.output
    fault_at = float((tmp_path / "fault").read_text().split()[0])
    recovered_at = float((tmp_path / "recovered").read_text())
    assert recovered_at - fault_at <= LIMIT_S


@pytest.mark.long
def test_a_model_that_differs_ends_the_job_instead_of_being_tried_again(tmp_path: Path) -> None:
    began = time.monotonic()
    done = run(tmp_path, "mismatch")
    assert done.returncode not in (0, None), done.output[-6000:]
    assert "MismatchError: DistributedOptimizer: parameter weight differs on ranks [" in (
        done.output
    )
    assert "has finished" not in done.output
    assert time.monotonic() - began < 60


@pytest.mark.long
@pytest.mark.parametrize(("what", "num_ranks"), [("join", 2), ("join-sets", 3), ("join:loft", 2)])
def test_a_rank_that_joins_late_takes_part(what: str, num_ranks: int, tmp_path: Path) -> None:
    hosts = [f"localhost:{num_ranks}"]

    def add_host(found: Path) -> None:
        until = time.monotonic() + 60
        while not (tmp_path / "recovered").exists() and time.monotonic() < until:
            time.sleep(0.2)  # until the first ranks train
        found.write_text("\n".join([*hosts, "127.0.0.1:1"]) + "\n")

    # A rank that joins imports torch while the others wait for it.
    done = run(tmp_path, what, hosts=hosts, num_ranks=num_ranks, during=add_host, gloo_timeout_s=40)
    assert done.returncode == 0, done.output[-6000:]
    assert f"rank 0 of {num_ranks} goes on at step 0" in done.output
    later = rf"rank \d of {num_ranks + 1} goes on at step [1-9]\d*"
    assert len(re.findall(later, done.output)) == num_ranks + 1
    assert len(re.findall(rf"of {num_ranks + 1} has finished", done.output)) == num_ranks + 1
