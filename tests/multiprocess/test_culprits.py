"""A slow rank is named, and sizes answer, where all ranks average their losses before backward."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]
JOB = "tests/multiprocess/jobs/culprits.py"


@pytest.mark.parametrize(("engine", "launcher"), [("horovod", "gloo"), ("ddp", "torchrun")])
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
    assert len(cases) == {"horovod": 5, "ddp": 6}[engine]
    for case in cases:
        culprit, is_fetch = num_ranks - 1, case["where"] == "fetch"
        sizes = case["sizes"]
        if case["where"] is None:
            assert case["named"] == [], case
            assert max(sizes) - min(sizes) <= 2, case
        else:
            assert case["named"] == [f"{culprit} {'fetch' if is_fetch else 'compute'}"], case
            assert sizes[culprit] < 0.6 * max(sizes), case
