"""Jobs end as they should, and killed ones go on in mid-epoch with another number of ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.multiprocess.jobs.restart import NUM_SAMPLES, SAVE_EVERY
from tests.support.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(330)]

JOB = "tests/multiprocess/jobs/restart.py"


def held(folder: Path, num_ranks: int) -> dict[int, list[int]]:
    """Return the samples of each step, over all ranks."""
    steps: dict[int, list[int]] = {}
    for rank in range(num_ranks):
        for line in (folder / f"ranks-{num_ranks}-rank-{rank}.jsonl").read_text().splitlines():
            note = json.loads(line)
            steps.setdefault(note["step"], []).extend(note["held"])
    return steps


@pytest.mark.parametrize(
    "kill_at",
    [
        9,
        pytest.param(2, marks=pytest.mark.whole),
        pytest.param(16, marks=pytest.mark.whole),
    ],
)
def test_every_sample_is_computed_once_in_an_epoch_begun_by_4_ranks_and_ended_by_3(
    kill_at: int, tmp_path: Path
) -> None:
    killed = launch(4, [JOB, str(tmp_path), str(kill_at)], timeout_s=150)
    assert killed.returncode not in (0, None), killed.output[-3000:]
    assert "has finished" not in killed.output
    resumed = launch(3, [JOB, str(tmp_path), "-1"], timeout_s=150)
    resumed.succeeded()
    assert resumed.output.count("has finished the epoch") == 3
    before, after = held(tmp_path, 4), held(tmp_path, 3)
    first = min(after)
    assert kill_at - SAVE_EVERY <= first <= kill_at  # from the newest checkpoint, not the start
    kept = [sample for step, samples in before.items() if step < first for sample in samples]
    rest = [sample for samples in after.values() for sample in samples]
    assert sorted(kept + rest) == list(range(NUM_SAMPLES))


@pytest.mark.long
def test_connections_between_ranks_end_with_the_engine() -> None:
    env = {"LOFT_HVD_MESH": "on"}  # ranks of one host have none of their own otherwise
    done = launch(3, ["tests/multiprocess/jobs/meshes.py"], timeout_s=60, env=env)
    done.succeeded()
    says = r"rank \d: opened [2-9], left 0, {}, the connections between ranks were closed with"
    assert len(re.findall(says, done.output)) == 3, done.output[-4000:]


@pytest.mark.long
def test_shared_memory_ends_with_the_engine_and_comes_with_the_next() -> None:
    done = launch(3, ["tests/multiprocess/jobs/shared_memory.py"], timeout_s=60)
    done.succeeded()
    says = r"rank \d: mapped 2, left 0, the memories that ranks share were closed with"
    assert len(re.findall(says, done.output)) == 3, done.output[-4000:]


@pytest.mark.long
def test_a_rank_that_ends_leaves_the_engine_to_those_whose_last_exchange_is_under_way() -> None:
    done = launch(3, ["tests/multiprocess/jobs/last_step.py"], timeout_s=60)
    done.succeeded(3)
