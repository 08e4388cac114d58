"""Plans come into force at one step on all ranks, however far loaders run ahead."""

from __future__ import annotations

import json

import pytest

from tests.support.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

JOB = "tests/multiprocess/jobs/plan_changes.py"
QUICK = ["2:3:p", "0::d", "2:2:a"]
SOME = ["0::m", "2:2:p", "4:1:p", "4:4:m"]  # each number of loaders, depth and option
REST = ["0:", "0::ad", "2:1", "2:3:m", "2:4:pm", "4:2", "4:3:pm", "4:4:p"]
SAMPLER = ["0::s", "2:2:s", "4:4:s"]


@pytest.mark.parametrize(
    ("settings", "num_ranks"),
    [
        (QUICK, 3),
        pytest.param(SOME, 3, marks=pytest.mark.long),
        pytest.param(REST, 3, marks=pytest.mark.whole),
        pytest.param(SAMPLER, 2, marks=pytest.mark.long),
    ],
)
def test_20_plans_start_at_one_step_everywhere_and_train_as_one_process_does(
    settings: list[str], num_ranks: int
) -> None:
    done = launch(num_ranks, [JOB, *settings], timeout_s=280)
    done.succeeded()
    lines = [line for line in done.output.splitlines() if "found {" in line]
    found = [json.loads(line.split("found ", 1)[1]) for line in lines]
    assert [each["setting"] for each in found] == settings
    for each in found:
        assert each["changes"] >= 20, each
        assert each["steps with different plans"] == 0, each
        assert each["batches of another size"] == 0, each
        assert each["difference"] <= 1e-5, each
