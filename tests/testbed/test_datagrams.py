"""Rows by datagrams over several hosts: ranks that fail, and UDP that does not pass."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loft_hvd._native import datagram_extension
from tests.support.launch import Finished
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
KINDS = ("tolerant", "torch-tolerant")


def run_job(testbed: Testbed, folder: Path, what: str, during: Callable[[], None]) -> Finished:
    testbed.up(3)

    def begin() -> None:
        wait_place(folder)
        time.sleep(1.0)
        during()

    return testbed.run([JOB, str(folder), what], timeout_s=150, during=begin)


@pytest.mark.parametrize(
    ("signal", "what"),
    long_first([(signal, what) for what in KINDS for signal in ("KILL", "STOP")], 2),
)
def test_a_rank_that_fails_is_named_and_every_process_ends(
    signal: str, what: str, testbed: Testbed, tmp_path: Path
) -> None:
    failed_at = 0.0

    def fail() -> None:
        nonlocal failed_at
        failed_at = time.time()
        testbed.tell("signal", "host1", signal)

    done = run_job(testbed, tmp_path, what, fail)
    if signal == "STOP":
        testbed.tell("signal", "host1", "KILL")  # it stays as it is
    assert "datagrams between ranks: at least" in done.output
    assert done.returncode not in (0, None), done.output[-9000:]
    # By the heartbeat; or by Gloo, where the script's own all-reduce was under way.
    named = r"rank 1 \(process \d+ on host1\)|to or from rank 1:"
    assert re.search(named, done.output), done.output
    assert done.ended_at - failed_at <= MOST_S + LOADED_S, done.output[-9000:]


@pytest.mark.parametrize("what", long_first(KINDS))
def test_where_udp_is_cut_in_the_midst_of_a_job_it_goes_on(
    what: str, testbed: Testbed, tmp_path: Path
) -> None:
    def cut() -> None:
        with lose(testbed, "host1", ALL, UDP), lose(testbed, "host2", ALL, UDP):
            time.sleep(MOST_S + LOADED_S)
            (tmp_path / "stop").touch()
            until = time.monotonic() + 30.0
            while testbed.tell("ranks") and time.monotonic() < until:
                time.sleep(0.2)

    done = run_job(testbed, tmp_path, what, cut)
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
