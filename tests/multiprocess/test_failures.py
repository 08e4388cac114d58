"""One rank fails, and all ranks end soon, with an error that names it."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

import pytest
from _pytest.mark import ParameterSet

from tests.support.launch import LAUNCHERS, launch
from tests.support.marks import long_first

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(100)]

JOB = "tests/multiprocess/jobs/train.py"
LIMIT_S = 20.0


@dataclass(frozen=True)
class Case:
    """A fault, and what the others must say about it (one of these patterns)."""

    what: str
    rank: int
    says: str


# What the heartbeat notes of a rank that leaves, and what shared memory says of it.
NOTE, MARK = r"loft_hvd: ranks \[1\] have ended their scripts", r"ranks \[1\] have left"
CASES = [
    Case("kill", 1, r"rank 1 \(process \d+ on \S+\) has ended without a word"),
    Case("freeze", 1, r"rank 1 \(process \d+ on \S+\) is frozen"),
    Case("freeze", 0, r"rank 0 \(process \d+ on \S+\) is frozen"),
    Case("freeze-foreign", 1, r"rank 1 \(process \d+ on \S+\) is frozen"),
    Case("raise", 1, r"rank 1 .* has failed: RuntimeError: rank 1 raises in its backward"),
    Case("raise-hook", 1, r"rank 1 .* has failed: RuntimeError: rank 1 raises in a hook"),
    Case("raise", 0, r"rank 0 .* has failed: RuntimeError: rank 0 raises in its backward"),
    Case("leave", 1, NOTE if sys.version_info >= (3, 11) else MARK),
    Case("shape", 1, r"MismatchError: .*on(ly)? ranks? \[1\]|ranks \[1\] describe other things"),
    Case(
        "order",
        1,
        r"take other steps: ranks \[1\] wait for '[^']+' at \S+ in \w+ while ranks \[0, 2\]",
    ),
]
# In `make test`, beside a kill (test_kills.py) and an error (test_memory.py).
QUICK = {("freeze", 1, "gloo"), ("shape", 1, "mpi")}
# In `make test-all` each under one launcher, but what a launcher has a part in.
BY_MPI = {"shape", "order"}
# A job that mpirun ends by itself at once need not say more than mpirun does.
BY_MPIRUN = {"kill": r"rank 1 with PID \d+ on node \S+ exited on signal 9"}


def params() -> list[ParameterSet]:
    made = []
    for launcher in LAUNCHERS:
        for case in CASES:
            marks = [] if (case.what, case.rank, launcher) in QUICK else [pytest.mark.long]
            if case.what != "kill" and (launcher == "mpi") != (case.what in BY_MPI):
                marks.append(pytest.mark.whole)
            name = f"{case.what}{case.rank}-{launcher}"
            made.append(pytest.param(case, launcher, id=name, marks=marks))
    return made


@pytest.mark.parametrize(("case", "launcher"), params())
def test_all_ranks_end_soon_and_name_the_one_at_fault(case: Case, launcher: str) -> None:
    done = launch(3, [JOB, case.what, str(case.rank)], launcher=launcher, timeout_s=80)
    says = case.says
    if launcher == "mpi" and case.what in BY_MPIRUN:
        says = f"{says}|{BY_MPIRUN[case.what]}"
    done.failed(says, within_s=LIMIT_S)


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "rank"), long_first([("gloo", 1), ("mpi", 0), ("gloo", 0), ("mpi", 1)])
)
def test_a_frozen_rank_is_named_where_process_sets_are_dynamic(launcher: str, rank: int) -> None:
    """Horovod then waits for it with a lock in hand that every call of its own takes."""
    # Between two cycles, where Horovod is most of the time then, all ranks wait for the next one.
    env = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "HOROVOD_CYCLE_TIME": "200"}
    job = [JOB, "freeze-alone", str(rank)]
    done = launch(3, job, launcher=launcher, timeout_s=80, env=env)
    done.failed(rf"rank {rank} \(process \d+ on \S+\) is frozen", within_s=LIMIT_S)


@pytest.mark.long
@pytest.mark.parametrize("launcher", long_first(LAUNCHERS))
def test_without_a_heartbeat_the_wait_ends_at_its_limit_and_names_the_bucket(launcher: str) -> None:
    env = {"LOFT_HVD_TIMEOUT_S": "5", "LOFT_HVD_HEARTBEAT_S": "0"}
    done = launch(3, [JOB, "freeze", "1"], launcher=launcher, timeout_s=80, env=env)
    done.failed(r"waited 5 s for bucket 0 \(", within_s=LIMIT_S)


@pytest.mark.long
@pytest.mark.parametrize("launcher", long_first(LAUNCHERS))
def test_without_a_heartbeat_the_wait_for_horovods_process_sets_ends_at_its_limit(
    launcher: str,
) -> None:
    env = {"LOFT_HVD_TIMEOUT_S": "5", "LOFT_HVD_HEARTBEAT_S": "0"}
    env |= {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "HOROVOD_CYCLE_TIME": "200"}
    env |= {"LOFT_HVD_MESH": "off"}  # in shared memory ranks wait for the bucket, not for Horovod
    done = launch(3, [JOB, "freeze-alone", "1"], launcher=launcher, timeout_s=80, env=env)
    says = r"starting '\S+': no answer from Horovod within 5 s; .*process_sets=\[\.\.\.\]"
    done.failed(says, within_s=LIMIT_S)


@pytest.mark.long
def test_a_rank_that_leaves_is_named_before_its_exit_handlers_are_through() -> None:
    """Without a heartbeat, which says good-bye."""
    env = {"LOFT_HVD_HEARTBEAT_S": "0"}
    done = launch(3, [JOB, "leave-slowly", "1"], timeout_s=60, env=env)
    done.failed(MARK, within_s=LIMIT_S)


@pytest.mark.long
@pytest.mark.parametrize("launcher", long_first(LAUNCHERS))
def test_a_rank_that_is_too_slow_is_named_at_the_limit(launcher: str) -> None:
    env = {"LOFT_HVD_TIMEOUT_S": "6"}
    done = launch(3, [JOB, "sleep", "1"], launcher=launcher, timeout_s=80, env=env)
    done.failed(r"waited 6 s for bucket 0 \(.*0\.weight\).*ranks \[1\] have not come to it")


@pytest.mark.long
@pytest.mark.parametrize("launcher", long_first(LAUNCHERS))
def test_a_rank_that_holds_its_interpreter_is_waited_for(launcher: str) -> None:
    done = launch(3, [JOB, "hold", "1"], launcher=launcher, timeout_s=80)
    done.succeeded(3)
    assert re.search(r"rank 1 .* runs, but has been silent for 1\d s", done.output), done.output


@pytest.mark.long
@pytest.mark.parametrize("launcher", long_first(LAUNCHERS))
def test_a_rank_in_a_call_of_the_engines_that_all_have_made_is_waited_for(launcher: str) -> None:
    """A broadcast ends on some ranks long before it does on others, which a slow link leads to."""
    done = launch(3, [JOB, "slow-foreign", "1"], launcher=launcher, timeout_s=80)
    done.succeeded(3)


@pytest.mark.long
@pytest.mark.parametrize("launcher", long_first(LAUNCHERS))
def test_a_rank_that_holds_its_interpreter_for_longer_than_others_may_wait_is_named(
    launcher: str,
) -> None:
    """While they wait in the engine's own call, which has no limit."""
    env = {"LOFT_HVD_TIMEOUT_S": "6"}
    job = [JOB, "hold-foreign", "1"]
    done = launch(3, job, launcher=launcher, timeout_s=90, env=env)
    done.failed(r"rank 1 \(process \d+ on \S+\) runs, but its Python interpreter has not for \d+ s")


@pytest.mark.long
def test_the_same_job_finishes_when_nothing_fails() -> None:
    done = launch(3, [JOB, "nothing", "1"], timeout_s=60)
    done.succeeded(3)
