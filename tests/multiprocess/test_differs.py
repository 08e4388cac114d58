"""One rank starts otherwise than the others: all ranks end soon, and say which rank and what."""

from __future__ import annotations

import re
import time

import pytest

from tests.support.launch import launch
from tests.support.marks import long_first

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(100)]

JOB = "tests/multiprocess/jobs/differs.py"
LIMIT_S = 10.0
FIELDS = {  # what every rank says
    "attached": r"parameter 2\.bias differs",
    "state": r"optimizer state of parameter 0\.weight differs",
    "rule": r"rule.* differs",
    "seed": r"seed.* differs",
    "batch": r"global_batch_size differs",
    "sizes": r"(policy|plans to repeat) differs",
    "shape": r"parameter 0\.bias.* differs",
    "dtype": r"parameter 2\.bias.* differs",
    "parameters": r"parameter 2\.bias differs",
}


@pytest.mark.parametrize("rank", long_first([2, 0]))
def test_all_ranks_name_rank_and_field_and_end_soon(rank: int) -> None:
    """Of one world, that goes on after every difference but the last."""
    done = launch(3, [JOB, str(rank), *FIELDS], timeout_s=80)
    ended_at = time.time()
    assert done.returncode not in (0, None), done.output[-6000:]
    assert "has finished" not in done.output
    *whats, last = FIELDS
    for what in whats:
        told = re.findall(rf"{what}: MismatchError: .*", done.output)
        assert len(told) == 3, done.output[-9000:]
        for line in told:
            assert re.search(FIELDS[what], line), line
            assert f"on ranks [{rank}]" in line, line
    ends = done.output.partition("differs at ")[2]
    told = re.findall(r"MismatchError: .*", ends)
    assert len(told) >= 3, ends[-6000:]
    for line in told:
        assert re.search(FIELDS[last], line), line
        assert f"on ranks [{rank}]" in line, line
    assert ended_at - float(ends.split()[0]) <= LIMIT_S, done.output[-6000:]
