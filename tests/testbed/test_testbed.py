"""The testbed is what it says: other hosts, links as slow as told, nothing left behind."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.testbed.hosts import Testbed

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

ALLREDUCE = "tests/testbed/examples/allreduce.py"
LINK = "tests/testbed/jobs/link.py"
ELASTIC = "tests/testbed/examples/elastic.py"


def median_ms(output: str) -> float:
    found = re.search(r"allreduce \S+ MB median (\S+) ms", output)
    assert found is not None, output[-6000:]
    return float(found[1])


def test_ranks_run_on_hosts_of_their_own(testbed: Testbed) -> None:
    testbed.up(3)
    done = testbed.run([ALLREDUCE, "1"], timeout_s=60)
    done.succeeded()
    hosts = re.findall(r"rank \d/3 local 0/1 on (host\d) sum \[3\.0,", done.output)
    assert sorted(hosts) == ["host0", "host1", "host2"]


@pytest.mark.long
def test_a_link_is_as_slow_as_told(testbed: Testbed) -> None:
    testbed.up(2, "--rate", "100mbit")
    done = testbed.run([ALLREDUCE, "4"], timeout_s=60)
    done.succeeded()
    line_ms = 4e6 * 8 / 100e6 * 1e3  # two ranks: each sends 2 (n - 1) / n = 1 time the bytes
    assert line_ms < median_ms(done.output)


@pytest.mark.long
def test_a_host_that_crashes_is_gone_and_comes_back(testbed: Testbed) -> None:
    testbed.up(2)
    testbed.tell("crash", "host1")
    with pytest.raises(RuntimeError, match=r"host1 .* DEAD"):
        testbed.tell("status")
    testbed.tell("boot", "host1")
    assert "DEAD" not in testbed.tell("status")


@pytest.mark.long
def test_a_job_is_ended_at_its_limit(testbed: Testbed) -> None:
    testbed.up(2)
    done = testbed.run(["-c", "import time; time.sleep(60)"], timeout_s=3)
    assert done.returncode is None
    testbed.up(2)
    assert testbed.tell("ranks") == ""


@pytest.mark.long
def test_an_elastic_job_goes_on_without_a_killed_rank(testbed: Testbed, tmp_path: Path) -> None:
    testbed.up(3)

    def kill_one() -> None:
        waited = subprocess.run(
            ["sh", "-c", f"until [ -e {tmp_path}/trains ]; do sleep 0.1; done"], timeout=60
        )
        assert waited.returncode == 0
        testbed.tell("signal", "host2", "KILL")

    done = testbed.run(
        [ELASTIC, "40", str(tmp_path / "trains")],
        timeout_s=100,
        env={"HOROVOD_GLOO_TIMEOUT_SECONDS": "5"},
        options=["--min-np", "2", "--np", "3", "--max-np", "3"],
        during=kill_one,
    )
    assert len(re.findall(r"r\d/2 done 40", done.output)) == 2, done.output[-6000:]


def measured(output: str) -> dict[str, float]:
    found = re.findall(r"(round_trip_ms|lost|mbit_per_s) ([-.\d]+)", output)
    return {name: float(value) for name, value in found}


@pytest.mark.long
def test_a_long_link_is_as_long_and_lossy_as_asked(testbed: Testbed) -> None:
    testbed.up(2, "--delay", "0,5ms", "--loss", "0,1%")
    done = testbed.run([LINK, "100000", "200", "20000"], timeout_s=60)
    found = measured(done.output)
    assert 10.0 <= found["round_trip_ms"] < 11.0, done.output
    assert 0.009 < found["lost"] < 0.011, done.output
    assert "in_order True" in done.output


@pytest.mark.long
def test_a_long_link_carries_what_its_rate_says(testbed: Testbed) -> None:
    testbed.up(2, "--delay", "10ms")
    done = testbed.run([LINK, "100000", "1472", "30000"], timeout_s=60)  # by two relays
    found = measured(done.output)
    assert found["lost"] == 0.0, done.output
    assert found["mbit_per_s"] > 200, done.output


@pytest.mark.long
def test_a_link_with_gaps_loses_what_comes_in_them(testbed: Testbed) -> None:
    testbed.up(2, "--gaps", "0,100ms/500ms")
    done = testbed.run([LINK, "10000", "200", "2000"], timeout_s=60)
    assert 0.15 < measured(done.output)["lost"] < 0.25, done.output


@pytest.mark.long
def test_nothing_is_left_after_down() -> None:
    testbed = Testbed(f"left{os.getpid()}")
    testbed.up(2, "--delay", "1ms", "--cpu", "0.5")
    testbed.down()
    testbed.down()
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=30)
    assert testbed.name not in spaces.stdout
    assert not Path("/run/testbed", testbed.name).exists()
