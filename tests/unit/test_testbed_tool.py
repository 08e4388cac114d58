"""The testbed's own parts that need no host: what a user types, and what is kept."""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.tool import boot, commands, state
from tests.testbed.tool.cables import parse_gaps, parse_loss, parse_rate, parse_time_ms
from tests.testbed.tool.jobs import JobOptions, _horovodrun, _mpirun
from tests.testbed.tool.state import Conf, Host, Process, TestbedError


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_rate, "10mbit", 10_000_000),
        (parse_rate, " 1.5Gbit", 1_500_000_000),
        (parse_rate, "64k", 64_000),
        (parse_rate, "1000", 1000),
        (parse_time_ms, "500us", 0.5),
        (parse_time_ms, "5ms", 5.0),
        (parse_time_ms, "2s", 2000.0),
        (parse_loss, "1%", 0.01),
        (parse_gaps, "300ms/3s", (300.0, 3000.0)),
        (parse_loss, "0.25", 0.25),
    ],
)
def test_units_are_read(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_rate, "10mb"),
        (parse_rate, "fast"),
        (parse_time_ms, "5min"),
        (parse_time_ms, ""),
        (parse_loss, "101%"),
        (parse_gaps, "300ms"),
        (parse_gaps, "3s/300ms"),
        (parse_loss, "-1"),
        (parse_loss, "nan"),
    ],
)
def test_what_is_no_quantity_is_refused(parse: Callable[[str], float], text: str) -> None:
    with pytest.raises(TestbedError, match=r"want e\.g\."):
        parse(text)


def test_one_value_is_for_all_hosts_and_nought_for_no_limit() -> None:
    assert commands._each("0.5", 3, float, "cpu") == [0.5] * 3
    assert commands._each("1,max,0", 3, float, "cpu") == [1.0, None, None]
    assert commands._each(None, 2, float, "cpu") == [None, None]
    with pytest.raises(TestbedError, match="--cpu: 2 values for 3 hosts"):
        commands._each("1,2", 3, float, "cpu")


def test_what_is_kept_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_CONF", tmp_path / "conf.json")
    assert state.load() is None
    near = Host("10.77.0.10", None, 10**9, 0.0, 0.0, 0.0, init=Process(7, 70))
    far = Host("10.77.0.11", 0.5, None, 5.0, 1.0, 0.01, is_cut=True, relay=Process(8, None))
    conf = Conf({"host0": near, "host1": far}, 1500, "cubic", 3, "/bin")
    state.save(conf)
    assert state.load() == conf
    with pytest.raises(TestbedError, match="there are: host0 host1"):
        state.need("host2")


def test_what_was_asked_for_does_not_depend_on_what_runs_it() -> None:
    def conf(**ran: Any) -> Conf:
        host = Host("10.77.0.10", None, None, 0.0, 0.0, 0.0, **ran)
        return Conf({"host0": host}, 1500, "cubic", 0, "/bin")

    assert conf(init=Process(1, 2)).asked() == conf(relay=Process(3, 4)).asked() == conf()
    assert conf(is_cut=True).asked() != conf().asked()


def test_another_process_with_the_same_number_is_not_the_one_that_was_started() -> None:
    own = state.process(os.getpid())
    assert state.alive(own)
    assert own.start is not None
    assert not state.alive(Process(own.pid, own.start - 1))
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert not state.alive(Process(ended.pid, 1))


def test_launchers_are_asked_for_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: f"/bin/{tool}")
    monkeypatch.setenv("LOFT_HVD_MESH", "off")
    slots = ["host0:2", "host1:2"]
    gloo = _horovodrun(JobOptions(), 4, slots)
    assert gloo[:3] == ["/bin/horovodrun", "--gloo", "-np"]
    assert gloo[3:] == ["4", "-H", "host0:2,host1:2", "--network-interfaces", "eth0"]
    asked = JobOptions(min_ranks=2, discovery="/find")
    elastic = _horovodrun(asked, 4, slots)
    assert elastic[4:10] == ["--min-np", "2", "--max-np", "4", "--host-discovery-script", "/find"]
    mpi = _mpirun(JobOptions(launcher="mpirun"), 4, slots)
    assert ("-x", "LOFT_HVD_MESH") in itertools.pairwise(mpi)
    assert ("-x", "HOME") not in itertools.pairwise(mpi)


def test_a_path_with_a_space_is_one_word_of_sshds_settings() -> None:
    told = boot._SSHD_CONFIG.format(
        port=1, address="a", keys="k", host="h", own="o", path="/a b/c", state="/s"
    )
    line = next(each for each in told.splitlines() if each.startswith("SetEnv"))
    assert shlex.split(line)[1] == "PATH=/a b/c"
