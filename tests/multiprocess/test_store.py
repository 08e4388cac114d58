"""Training on a sample store is training in one process, whatever happens to the store."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import launch

pytest.importorskip("pyarrow.flight", reason="the extra [store] is not installed")
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(320)]

JOB = "tests/multiprocess/jobs/store.py"
LIMIT_S = 300.0  # of a job: a machine may be crowded


def run(num_ranks: int, folder: Path, *arguments: int) -> dict[str, Any]:
    output = end_of(num_ranks, folder, *arguments, returncode=0)
    found = re.search(r"found (\{.*\})", output)
    assert found is not None, output[-6000:]
    result: dict[str, Any] = json.loads(found[1])
    result["output"] = output
    return result


def end_of(num_ranks: int, folder: Path, *arguments: int, returncode: int | None = None) -> str:
    """Run the job to its end, an error unless ``returncode`` is 0; returns its output."""
    done = launch(num_ranks, [JOB, str(folder), *map(str, arguments)], timeout_s=LIMIT_S)
    assert done.returncode is not None, done.output[-6000:]
    assert (done.returncode == 0) == (returncode == 0), done.output[-6000:]
    return done.output


def test_plans_that_change_and_a_killed_server_change_no_result(tmp_path: Path) -> None:
    found = run(3, tmp_path, 0, 5, 1, 1, -1)
    assert found["difference"] < 1e-5
    assert found["shares"][0] == [0, 0, 1]
    for own, peer, source in found["shares"][1:]:
        assert own + peer + source == pytest.approx(1)
        assert own > 0.7
    assert "rank 1 does not send its samples" in found["output"]


@pytest.mark.long
def test_fewer_ranks_go_on_from_the_folder(tmp_path: Path) -> None:
    found = run(4, tmp_path, 0, 2, 2, -1, -1)
    assert found["shares"][1][2] == 0  # nothing is read from the source twice
    again = run(3, tmp_path, 2, 5, 2, -1, -1)
    assert again["difference"] < 1e-5
    own, peer, source = again["shares"][0]
    assert source < 0.35  # what the rank that is gone had kept
    assert own + peer > 0.65


@pytest.mark.long
@pytest.mark.timeout(640)
def test_kills_and_a_restart_with_three_of_four_ranks_change_no_result(tmp_path: Path) -> None:
    """Five epochs: a server is killed after the first, a rank in the third, a server again."""
    output = end_of(4, tmp_path, 0, 3, 0, 2, 3)
    # A peer that asks before it is there again says that rank 2 does not send its samples.
    assert "the store's server of rank 2 has ended (-9): it is started again" in output
    again = run(3, tmp_path, 2, 5, 0, 0, -1)  # from the state after two epochs
    assert again["difference"] < 1e-5
    assert again["shares"][0][2] < 0.35  # what the rank that is gone had kept
    for own, peer, source in again["shares"]:
        assert own + peer + source == pytest.approx(1)
