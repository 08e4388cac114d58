"""The heartbeat over several hosts: what ends a job, and what does not."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.marks import long_first
from tests.testbed.hosts import Testbed

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(240)]

JOB = "tests/testbed/jobs/heartbeat.py"
CUT_S = 60.0


def wait_place(folder: Path) -> tuple[str, int]:
    """Return where the job's heartbeat listens, once the job trains."""
    until = time.monotonic() + 60
    while not (folder / "place").exists():
        assert time.monotonic() < until, "the job does not train"
        time.sleep(0.1)
    address, port = (folder / "place").read_text().split()
    return address, int(port)


@contextmanager
def cut_port(testbed: Testbed, host: str, port: int) -> Iterator[None]:
    """Lose all that travels between a host and a port of host0, as a firewall on the way does."""
    to_it = [f"match ip src {address_of(host)}/32 match ip dport {port} 0xffff"]
    with lose(testbed, "host0", to_it), lose(testbed, host, [f"match ip sport {port} 0xffff"]):
        yield


def address_of(host: str) -> str:
    return f"10.77.0.{10 + int(host.removeprefix('host'))}"


@contextmanager
def lose(testbed: Testbed, host: str, matches: Sequence[str], protocol: int = 6) -> Iterator[None]:
    """Lose what comes in at a host over TCP, and is as one of ``tc``'s u32 matches says.

    ``protocol`` is that of IP: 17 is UDP.
    """
    ip = ["ip", "-n", f"{testbed.name}-{host}", "link"]
    tc = ["tc", "-n", f"{testbed.name}-{host}"]
    # A cable without an end swallows it.
    run([*ip, "add", "nowhere", "type", "veth", "peer", "name", "nobody"])
    run([*ip, "set", "nowhere", "up"])
    run([*tc, "qdisc", "add", "dev", "eth0", "clsact"])
    for match in matches:
        filtered = f"ingress protocol ip u32 match ip protocol {protocol} 0xff {match}"
        action = "action mirred egress redirect dev nowhere"
        run([*tc, "filter", "add", "dev", "eth0", *filtered.split(), *action.split()])
    try:
        yield
    finally:
        run([*tc, "qdisc", "del", "dev", "eth0", "clsact"])
        run([*ip, "del", "nowhere"])


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=30)


@pytest.mark.parametrize("trial", long_first(range(20)))
def test_a_job_whose_heartbeat_is_cut_goes_on_and_is_connected_again(
    trial: int, testbed: Testbed, tmp_path: Path
) -> None:
    testbed.up(3)
    healed_at = 0.0

    def cut() -> None:
        nonlocal healed_at
        with cut_port(testbed, "host1", wait_place(tmp_path)[1]):
            time.sleep(CUT_S)
            healed_at = time.time()  # not after it: on a busy machine healing takes longer
        time.sleep(5.0)
        (tmp_path / "stop").touch()

    done = testbed.run([JOB, str(tmp_path), "nothing"], timeout_s=180, during=cut)
    done.succeeded(3)
    assert "the heartbeat's link to rank 1" in done.output
    back = re.search(r"rank 0 at ([\d.]+) rank 1 .* is heard again", done.output)
    assert back is not None, done.output[-6000:]
    assert 0 <= float(back[1]) - healed_at <= 5.0


@pytest.mark.parametrize("frozen", long_first(["host1", "host2"]))
def test_a_rank_that_freezes_while_the_heartbeat_is_cut_is_named(
    frozen: str, testbed: Testbed, tmp_path: Path
) -> None:
    """Of rank 1's link nothing can be told: it was lost before."""
    testbed.up(3)
    frozen_at = 0.0

    def cut_and_freeze() -> None:
        nonlocal frozen_at
        with cut_port(testbed, "host1", wait_place(tmp_path)[1]):
            time.sleep(15.0)
            frozen_at = time.time()
            testbed.tell("signal", frozen, "STOP")
            time.sleep(25.0)

    done = testbed.run([JOB, str(tmp_path), "nothing"], timeout_s=120, during=cut_and_freeze)
    assert done.returncode not in (0, None), done.output[-6000:]
    rank = frozen.removeprefix("host")
    named = re.findall(r"at ([\d.]+) rank (\d) \(process \d+ on \S+\) has been silent", done.output)
    assert named, done.output[-6000:]
    assert {who for _, who in named} == {rank}, done.output[-6000:]
    assert float(named[0][0]) - frozen_at <= 15.0


def test_a_rank_alone_on_its_host_may_hold_its_interpreter(
    testbed: Testbed, tmp_path: Path
) -> None:
    testbed.up(2)

    def stop_later() -> None:
        wait_place(tmp_path)
        time.sleep(2.0)
        (tmp_path / "stop").touch()

    done = testbed.run([JOB, str(tmp_path), "hold"], timeout_s=120, during=stop_later)
    done.succeeded(2)
    assert re.search(r"rank 1 .* runs, but has been silent for 1\d s", done.output), done.output
