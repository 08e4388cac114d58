"""Whatever happens to those who keep samples, a reader gets each once and right."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyarrow.flight", reason="the extra [store] is not installed")

from tests.faults.store_owners import read_under_faults


@pytest.mark.parametrize(
    "num_samples",
    [1500, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(300)])],
)
def test_every_sample_comes_once_and_right_while_owners_fail(
    num_samples: int, tmp_path: Path
) -> None:
    found = read_under_faults(num_samples, tmp_path)
    assert found.wrong == []
    assert found.counts["peer"] > num_samples / 3  # most peers were there most of the time
    assert found.counts["source"] > 0
