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
    "parameters": r"parameter 2\.bias differs",
    "attached": r"parameter 2\.bias differs",
    "state": r"optimizer state of parameter 0\.weight differs",
    "rule": r"rule.* differs",
    "seed": r"seed.* differs",
    "batch": r"global_batch_size differs",
    "sizes": r"(policy|plans to repeat) differs",
    "shape": r"parameter 0\.bias.* differs",
    "dtype": r"parameter 2\.bias.* differs",
}


@pytest.mark.parametrize("rank", long_first([2, 0]))
@pytest.mark.parametrize("what", FIELDS)
def test_all_ranks_end_soon_and_name_rank_and_field(what: str, rank: int) -> None:
    done = launch(3, [JOB, what, str(rank)], timeout_s=60)
    ended_at = time.time()
    assert done.returncode not in (0, None), done.output[-6000:]
    assert "has finished" not in done.output
    began = re.search(r"differs at ([\d.]+)", done.output)
    assert began is not None
    seconds = ended_at - float(began[1])
    print(f"{what}, rank {rank}: {seconds:.1f} s")  # noqa: T201 - pytest -rP shows it
    told = re.findall(r"MismatchError: .*", done.output)
    assert len(told) >= 3, done.output[-6000:]
    for line in told:
        assert re.search(FIELDS[what], line), line
        assert f"on ranks [{rank}]" in line, line
    assert seconds <= LIMIT_S, done.output[-6000:]
