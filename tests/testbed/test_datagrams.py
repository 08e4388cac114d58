"""Rows by datagrams over several hosts: ranks that fail, and UDP that does not pass."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loft_hvd._native import datagram_extension
from tests.support.launch import Finished, launcher_here
from tests.support.marks import long_first
from tests.testbed.hosts import Testbed
from tests.testbed.test_faults import LOADED_S
from tests.testbed.test_lost_links import JOB, lose, wait_place

_MODULE, _REASON = datagram_extension()
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.long,
    pytest.mark.timeout(240),
    pytest.mark.skipif(_MODULE is None, reason=_REASON),
]

MOST_S = 15.0  # on idle cores
ALL = ["match u32 0 0"]  # whatever it is
UDP = 17
KINDS = (("tolerant", "gloo"), ("torch-tolerant", "gloo"), ("tolerant", "mpirun"))


def run_job(
    testbed: Testbed, folder: Path, what: str, launcher: str, during: Callable[[], None]
) -> Finished:
    if launcher == "mpirun" and not launcher_here("mpi"):
        pytest.skip("mpirun is not on PATH")
    testbed.up(3)

    def begin() -> None:
        wait_place(folder)
        time.sleep(1.0)
        during()

    return testbed.run(
        [JOB, str(folder), what], timeout_s=150, options=["--launcher", launcher], during=begin
    )


@pytest.mark.parametrize(
    ("signal", "what", "launcher"),
    [
        *long_first([(signal, *kind) for kind in KINDS[:2] for signal in ("KILL", "STOP")], 2),
        *long_first([(signal, *KINDS[2]) for signal in ("STOP", "KILL")]),
    ],
)
def test_a_rank_that_fails_is_named_and_every_process_ends(
    signal: str, what: str, launcher: str, testbed: Testbed, tmp_path: Path
) -> None:
    failed_at = 0.0

    def fail() -> None:
        nonlocal failed_at
        failed_at = time.time()
        testbed.tell("signal", "host1", signal)

    done = run_job(testbed, tmp_path, what, launcher, fail)
    if signal == "STOP":
        testbed.tell("signal", "host1", "KILL")  # it stays as it is
    assert "datagrams between ranks: at least" in done.output
    assert done.returncode not in (0, None), done.output[-9000:]
    # By the heartbeat; by Gloo, where the script's own all-reduce was under way; or by mpirun.
    named = r"rank 1 \(process \d+ on host1\)|to or from rank 1:|process rank 1 with PID"
    assert re.search(named, done.output), done.output
    assert done.ended_at - failed_at <= MOST_S + LOADED_S, done.output[-9000:]


@pytest.mark.parametrize(("what", "launcher"), long_first([KINDS[0], KINDS[2], KINDS[1]]))
def test_where_udp_is_cut_in_the_midst_of_a_job_it_goes_on(
    what: str, launcher: str, testbed: Testbed, tmp_path: Path
) -> None:
    def cut() -> None:
        with lose(testbed, "host1", ALL, UDP), lose(testbed, "host2", ALL, UDP):
            time.sleep(MOST_S + LOADED_S)
            (tmp_path / "stop").touch()
            until = time.monotonic() + 30.0
            while testbed.tell("ranks") and time.monotonic() < until:
                time.sleep(0.2)

    done = run_job(testbed, tmp_path, what, launcher, cut)
    done.succeeded(3)
    told = re.findall(
        r"rank (\d): no UDP packet passes any more between \S+ and rank (\d)", done.output
    )
    # Between all hosts: packets pass from host1 to host0, and their acknowledgements do not.
    assert {frozenset(pair) for pair in told} == {frozenset(each) for each in ("01", "02", "12")}


def test_where_udp_never_passes_ranks_take_the_other_lane(testbed: Testbed, tmp_path: Path) -> None:
    testbed.up(3)

    def stop() -> None:
        wait_place(tmp_path)
        (tmp_path / "stop").touch()

    with lose(testbed, "host1", ALL, UDP):
        done = testbed.run([JOB, str(tmp_path), "tolerant"], timeout_s=150, during=stop)
    done.succeeded(3)
    assert re.search(
        r"rank 1 does not hear rank 0 \(10\.77\.0\.10:\d+/udp to 10\.77\.0\.11:\d+/udp\)",
        done.output,
    ), done.output[-9000:]


def test_ranks_stay_equal_and_small_over_1000_steps_that_lose_packets(testbed: Testbed) -> None:
    testbed.up(3, "--loss", "1%")
    done = testbed.run(["tests/testbed/jobs/lossy_steps.py"], timeout_s=120)
    told = re.findall(r"finished; (\d+) lost, (\d+) filled, (-?[\d.]+) MB", done.succeeded(3))
    for lost, filled, more_mb in told:
        assert int(lost) > 100
        assert int(filled) > 0
        assert float(more_mb) < 4.0, told  # 1,000 rows of a byte a block are less
