"""Training for long: nothing is left behind, and faults change no bit.

A part of it: CONTRIBUTING.md has the commands for 50,000 steps.
"""

from __future__ import annotations

import re

import pytest

from tests.support.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]


@pytest.mark.whole  # ranks do it, too
@pytest.mark.timeout(600)
def test_long_training_of_threads_leaves_nothing_behind() -> None:
    done = launch(
        1,
        ["-m", "tests.faults.soak", "--steps", "3000", "--warm", "600"],
        launcher="none",
        timeout_s=500,
    )
    done.succeeded()


@pytest.mark.timeout(600)
def test_long_training_of_ranks_leaves_nothing_behind() -> None:
    done = launch(
        4,
        ["-m", "tests.faults.soak", "--steps", "2500", "--warm", "600", "--horovod"],
        timeout_s=500,
    )
    done.succeeded()
    assert len(re.findall(r"rank \d: .*: ok", done.output)) == 4, done.output[-6000:]


@pytest.mark.timeout(900)
def test_training_through_faults_ends_with_the_bits_of_a_calm_one() -> None:
    chaos = ["-m", "tests.faults.chaos", "--steps", "750", "--seed", "0", "--life", "150"]
    done = launch(1, chaos, launcher="none", timeout_s=800)
    done.succeeded()
    assert "the same bits" in done.output
