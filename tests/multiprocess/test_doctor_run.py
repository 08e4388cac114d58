"""``loft-hvd doctor --run`` on this very machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import launch, launcher_here

pytestmark = pytest.mark.multiprocess
_SAYS = "the robust all-reduce is right on rank"


def test_doctor_run_is_right_and_exits_0() -> None:
    program = Path(sys.executable).with_name("loft-hvd")
    done = subprocess.run(
        [program, "doctor", "--run", "--json"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["Run"]["is_right"] is True
    assert found["Run"]["output"].count(_SAYS) == 2


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
def test_ranks_of_either_launcher_find_the_result_right(launcher: str, num_ranks: int) -> None:
    if not launcher_here(launcher):
        pytest.skip(f"no launcher for {launcher} on this machine")
    done = launch(num_ranks, ["-m", "loft_hvd.doctor.run"], launcher=launcher)
    assert done.returncode == 0, done.output
    assert done.output.count(_SAYS) == num_ranks
