"""Killed ranks are named, and no honest one is: a few of the trials of ``kills.py``."""

from __future__ import annotations

import pytest

from tests.faults.kills import LIMIT_S, run_trial

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]

LOADED_S = 10.0  # more than on idle cores, for which the limit is


# 9: two at once, beside rank 0; 1: two at once, rank 0 among them; 6: one.
@pytest.mark.parametrize(
    "seed",
    [
        9,
        pytest.param(1, marks=pytest.mark.long),
        pytest.param(6, marks=pytest.mark.whole),
    ],
)
def test_killed_ranks_are_named_and_no_honest_one_is(seed: int) -> None:
    outcome = run_trial(seed)
    assert outcome.is_right, f"{outcome}\n{outcome.output[-6000:]}"
    assert outcome.seconds <= LIMIT_S + LOADED_S, f"{outcome}\n{outcome.output[-6000:]}"
