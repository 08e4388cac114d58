"""Caps on micro-batches leave a rank's share free; beside other jobs, as its ranks sleep."""

from __future__ import annotations

import pytest

from tests.multiprocess.test_emulated import run

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(250)]


def test_micro_batches_free_the_share_from_the_cap_and_train_alike() -> None:
    found = run("capped", 25)
    assert found["ratio"] <= 0.75, found
    assert found["largest"]["micro"][3] <= 16, found
    assert max(found["largest"]["share"]) == 96, found
    assert max(found["apart"].values()) <= 1e-5 < found["moved"], found
