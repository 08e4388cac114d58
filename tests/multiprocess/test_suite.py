"""Runs the tests in ``ranks/`` under every launcher, and jobs that fail on purpose."""

from __future__ import annotations

import time

import pytest

from tests.support.launch import LAUNCHERS, launch, launcher_here

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]

RANKS = "tests/multiprocess/ranks"
JOB = "tests/multiprocess/jobs/train.py"
needs_mpirun = pytest.mark.skipif(
    not launcher_here("mpi"), reason="mpirun is not on PATH (Debian: openmpi-bin libopenmpi-dev)"
)
launchers = pytest.mark.parametrize(
    "launcher",
    [pytest.param(name, marks=needs_mpirun if name == "mpi" else ()) for name in LAUNCHERS],
)


@pytest.mark.parametrize(
    ("launcher", "num_ranks"),
    [
        ("gloo", 1),
        ("gloo", 2),
        ("gloo", 3),
        ("gloo", 4),
        pytest.param("mpi", 2, marks=needs_mpirun),
        pytest.param("mpi", 3, marks=needs_mpirun),
    ],
)
def test_ranks_pass_together(launcher: str, num_ranks: int) -> None:
    done = launch(
        num_ranks,
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=60", RANKS],
        launcher=launcher,
        timeout_s=390,
        env={"LOFT_HVD_TIMEOUT_S": "30"},
    )
    assert done.returncode == 0, done.output[-8000:]
    assert done.output.count(" passed") == num_ranks, done.output[-8000:]


@needs_mpirun
def test_horovod_is_built_with_mpi_where_mpirun_exists() -> None:
    import horovod.torch as hvd

    assert hvd.mpi_built(), "mpirun is on PATH, but Horovod was built without MPI: run `make setup`"


@launchers
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("kill", None),
        ("raise", "rank 1 raises in its backward pass"),
        ("leave", None),
    ],
)
def test_a_failing_rank_ends_the_job(what: str, message: str | None, launcher: str) -> None:
    began = time.monotonic()
    done = launch(3, [JOB, what, "1"], launcher=launcher, timeout_s=60)
    assert done.returncode is not None, f"hung for 60 s\n{done.output[-4000:]}"
    assert done.returncode != 0
    assert "has finished" not in done.output
    assert time.monotonic() - began < 60
    if message is not None:
        assert message in done.output


@launchers
def test_a_frozen_rank_ends_the_wait_with_an_error_that_names_the_bucket(launcher: str) -> None:
    done = launch(
        3, [JOB, "freeze", "1"], launcher=launcher, timeout_s=40, env={"LOFT_HVD_TIMEOUT_S": "5"}
    )
    assert "waited 5 s for bucket 0 (" in done.output, done.output[-4000:]


def test_the_same_job_finishes_when_nothing_fails() -> None:
    done = launch(3, [JOB, "nothing", "1"], timeout_s=60)
    assert done.returncode == 0, done.output[-4000:]
    assert done.output.count("has finished") == 3
