"""Some rows of the table of faults; ``python -m tests.faults.table`` has all of them."""

from __future__ import annotations

import pytest

from tests.faults.table import Trial, run_trial
from tests.support.launch import launcher_here
from tests.testbed.hosts import Testbed

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(240)]

LOADED_S = 10.0  # more than on idle cores, for which the table's limits are


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "trial",
    [
        Trial("segv", "gloo", 0),
        Trial("loader-kill", "gloo", 1),
        Trial("memory", "mpi", 1),
        Trial("crash", "gloo", 1),
        Trial("cut", "gloo", 0),
        Trial("cut", "mpi", 1),
        Trial("kill", "elastic", 1),
        Trial("forward", "elastic", 0),
        Trial("freeze", "gloo", 1, is_attached=True),
        Trial("kill", "gloo", 1, is_attached=True),
    ],
    ids=str,
)
def test_who_is_at_fault_is_named_and_nothing_is_left(trial: Trial, testbed: Testbed) -> None:
    if not launcher_here(trial.controller):
        pytest.skip("mpirun is not on PATH")
    outcome = run_trial(trial, lambda: testbed)
    assert [fault for fault in outcome.faults() if fault != "late"] == [], outcome.output[-9000:]
    assert outcome.seconds <= trial.limit_s + LOADED_S, outcome.output[-9000:]
