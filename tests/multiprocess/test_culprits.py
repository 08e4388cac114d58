"""A slow rank is named where all ranks average their losses before backward, and sizes answer it.

What takes its time between the passes, such as a callback, is named, too; sizes do not answer it.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.support.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]
JOB = "tests/multiprocess/jobs/culprits.py"


@pytest.mark.parametrize(
    ("engine", "launcher"),
    [pytest.param("horovod", "gloo", marks=pytest.mark.long), ("ddp", "torchrun")],
)
@pytest.mark.parametrize(
    "num_ranks",
    [
        2,
        pytest.param(3, marks=pytest.mark.whole),
        pytest.param(4, marks=pytest.mark.long),
    ],
)
def test_whoever_waits_for_others_before_backward_is_not_taken_to_compute(
    num_ranks: int, engine: str, launcher: str
) -> None:
    done = launch(num_ranks, [JOB, engine], launcher=launcher, timeout_s=120)
    output = done.succeeded(num_ranks)
    cases = [json.loads(each) for each in re.findall(r"CASE (\{.*\})", output)]
    assert len(cases) == {"horovod": 7, "ddp": 8}[engine]
    assert sum(case["steps"] > 48 for case in cases) <= 1, "plans that are undone"
    for case in cases:
        culprit, is_fetch = num_ranks - 1, case["where"] == "fetch"
        sizes = case["sizes"]
        if case["where"] is None:
            assert case["named"] == [], case
            assert max(sizes) - min(sizes) <= 2, case
        elif case["where"] in ("before step", "after step"):
            assert case["named"] == [f"{culprit} other"], case
        else:
            assert case["named"] == [f"{culprit} {'fetch' if is_fetch else 'compute'}"], case
            assert sizes[culprit] < 0.6 * max(sizes), f"{case}"
