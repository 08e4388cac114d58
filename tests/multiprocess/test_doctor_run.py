"""``loft-hvd doctor --run`` on this very machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import launch, launcher_here

pytestmark = pytest.mark.multiprocess
_SAYS = "the robust all-reduce is right on rank"


@pytest.mark.long
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


@pytest.mark.long
def test_ranks_of_mpirun_find_the_result_right() -> None:
    done = launch(3, ["-m", "loft_hvd.doctor.run"], launcher="mpi")
    done.succeeded()
    assert done.output.count(_SAYS) == 3


@pytest.mark.parametrize(
    "launcher",
    ["gloo", *(pytest.param(each, marks=pytest.mark.long) for each in ("mpi", "torchrun"))],
)
def test_doctor_ranks_finds_two_equal_ranks_fit(launcher: str) -> None:
    script = ["-m", "loft_hvd.cli", "doctor", "--ranks"]
    done = launch(2, script, launcher=launcher, timeout_s=100)
    done.succeeded()
    assert done.output.count("Verdict: the 2 ranks fit together") == 1, done.output
    engine = {"gloo": "Horovod on Gloo", "mpi": "Horovod on MPI", "torchrun": "torch.distributed"}
    assert f"2 ranks on 1 host, {engine[launcher]}" in done.output


_ODD = """
import os, sys
if os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    {odd}
from loft_hvd.cli import main
sys.argv = ["loft-hvd", "doctor", "--ranks", "--timeout-s", "{limit}"]
main()
"""


def test_doctor_ranks_names_the_rank_that_is_set_otherwise(tmp_path: Path) -> None:
    script = tmp_path / "odd.py"
    script.write_text(_ODD.format(odd='os.environ["LOFT_HVD_MESH"] = "off"', limit=60))
    done = launch(3, [str(script)], timeout_s=100)
    assert done.returncode not in (0, None), done.output
    assert "mend LOFT_HVD_MESH first, auto on ranks 0 and 2; off on rank 1" in done.output


@pytest.mark.long
def test_doctor_ranks_ends_though_a_rank_never_comes(tmp_path: Path) -> None:
    # Rank 1 lives and has the engine, but does not answer; it ends when the launcher ends it.
    odd = "import time, horovod.torch as hvd; hvd.init(); time.sleep(90)"
    script = tmp_path / "odd.py"
    script.write_text(_ODD.format(odd=odd, limit=8))
    # mpirun ends the other ranks at once, horovodrun after a quarter of a minute.
    launcher = "mpi" if launcher_here("mpi") else "gloo"
    done = launch(2, [str(script)], launcher=launcher, timeout_s=80)
    assert done.returncode not in (0, None), done.output
    assert "was not done after 8 s; this rank was comparing with the other ranks" in done.output


def test_doctor_ranks_finds_that_each_process_is_a_world_of_its_own() -> None:
    # As by an srun whose processes do not find each other: Horovod then starts, and knows itself.
    script = ["-m", "loft_hvd.cli", "doctor", "--ranks"]
    done = launch(1, script, launcher="none", env={"SLURM_STEP_NUM_TASKS": "2"})
    assert done.returncode == 1, done.output
    says = r"the launcher has started 2 ranks, but Horovod on \w+ knows 1: each trains"
    assert re.search(says, done.output), done.output
