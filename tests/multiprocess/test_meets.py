"""Layers and losses that meet other ranks in the backward pass: unequal batches, one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]

JOB = "tests/multiprocess/jobs/meets.py"
long, whole = pytest.mark.long, pytest.mark.whole


# "some": each layer and loss under each front end, with one of the splits; "whole": with each.
@pytest.mark.parametrize("amount", ["some", pytest.param("whole", marks=whole)])
def test_torch_ranks_train_as_one_process(amount: str, tmp_path: Path) -> None:
    done = launch(1, [JOB, "torch", str(tmp_path), amount], launcher="none", timeout_s=360)
    done.succeeded(4)


@pytest.mark.parametrize(
    "amount", [pytest.param("some", marks=long), pytest.param("whole", marks=whole)]
)
def test_horovods_ranks_train_as_one_process(amount: str) -> None:
    launch(4, [JOB, "horovod", amount], timeout_s=360).succeeded(4)
