"""The machines that a launcher reaches are found, with what their links carry."""

from __future__ import annotations

from pathlib import Path

import pytest

from loft_hvd.fleet.parse import read_cluster
from tests.testbed.hosts import Testbed

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(200)]


def test_each_host_s_link_is_found(testbed: Testbed, tmp_path: Path) -> None:
    testbed.up(3, "--rate", "200mbit,200mbit,50mbit")
    path = tmp_path / "cluster.toml"
    command = ["horovodrun", "--gloo", "-np", "4", "-H", "host0:2,host1:1,host2:1"]
    ours = ["python", "-m", "loft_hvd.cli", "inventory", "--out", str(path)]
    testbed.tell("exec", "host0", *command, *ours, timeout_s=150)
    hosts = {host.name: host for host in read_cluster(path).hosts}
    assert {name: sum(host.slots.values()) for name, host in hosts.items()} == {
        "host0": 2,
        "host1": 1,
        "host2": 1,
    }
    # A link carries frames of 1514 bytes for 1448 of values.
    for name, bits in (("host0", 200e6), ("host1", 200e6), ("host2", 50e6)):
        assert 8 * hosts[name].link_bytes_per_s == pytest.approx(bits, rel=0.15), name
