"""No damaged file or state ends in anything but success or a ``LoftError``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from loft_hvd import runlog
from tests.faults.fuzz import TARGETS, fuzz, sample_log


def test_the_log_that_is_damaged_has_a_line_of_every_kind(tmp_path: Path) -> None:
    """Of those that the head of ``runlog`` lists, and a field that came later."""
    listed = re.findall(r"(?m)^\* ``(\w+)``:", str(runlog.__doc__))
    lines = [json.loads(line) for line in sample_log(tmp_path).splitlines()]
    assert len(listed) > 10
    assert {line["kind"] for line in lines} == set(listed)
    assert all("since" in line for line in lines if line["kind"] == "times")


def check(target: str, *, num_cases: int, seed: int) -> None:
    if target == "parquet":
        pytest.importorskip("pyarrow", reason="the extra [store] is not installed")
    found = fuzz(target, num_cases=num_cases, seed=seed)
    assert found.faults == [], "\n".join(found.faults[:3])
    assert sum(found.outcomes.values()) == num_cases
    assert found.outcomes["taken"] > 0  # not everything is refused: cases come through
    assert target in ("caps", "wire") or len(found.outcomes) > 1  # those pass over what is damaged


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_input_is_taken_or_refused_with_our_error(target: str) -> None:
    check(target, num_cases=150, seed=0)


@pytest.mark.long
@pytest.mark.timeout(600)  # wall time, on cores that other tests share
@pytest.mark.parametrize("target", TARGETS)
def test_damaged_input_is_taken_or_refused_with_our_error_for_long(target: str) -> None:
    # 100,000: python -m tests.faults.fuzz --cases 100000
    check(target, num_cases=5000 if target in ("tar", "parquet") else 2000, seed=1000)
