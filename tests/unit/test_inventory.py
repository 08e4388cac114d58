"""What is found of machines becomes a file that a plan reads, or asks to be completed."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from loft_hvd.doctor.ranks import RankFacts
from loft_hvd.errors import ArgumentError
from loft_hvd.fleet.inventory import _rounds, cluster_text, hosts_of_ranks, read_nodes
from loft_hvd.fleet.parse import read_cluster

NODES = """
NodeName=node-1 Arch=x86_64 CPUTot=64 Gres=gpu:a100:4(S:0-1),nic:2 RealMemory=512000 State=IDLE
NodeName=node-2 CPUTot=16 Gres=gpu:2 RealMemory=64000
NodeName=node-3 CPUTot=8 Gres=(null) RealMemory=32000
"""


def test_slurm_s_nodes_are_read() -> None:
    hosts = read_nodes(NODES)
    assert [(host.name, dict(host.slots), host.cpus) for host in hosts] == [
        ("node-1", {"a100": 4}, 64),
        ("node-2", {"gpu": 2}, 16),
        ("node-3", {"CPU": 1}, 8),
    ]
    assert hosts[0].memory_bytes == 512000 * 2**20
    assert "how many ranks share its CPUs" in hosts[2].note


def test_a_plan_asks_for_what_was_not_learnt(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_text(read_nodes(NODES), source="Slurm"))
    with pytest.raises(ArgumentError, match=r"\['link_bytes_per_s'\] are missing"):
        read_cluster(path)
    path.write_text(path.read_text().replace("# link_bytes_per_s", "link_bytes_per_s = 1e9 #"))
    assert read_cluster(path).hosts[0].slots == {"a100": 4}


def test_ranks_of_a_launcher_become_hosts(tmp_path: Path) -> None:
    facts = [
        RankFacts("a", (0, 1), 1, {"GPUs": "2 Tesla T4, 1 NVIDIA A100-SXM4-40GB", "CPU": "x"}),
        RankFacts("b", (0, 1), 1, {"GPUs": "none", "CPU": "AMD EPYC (7B13)"}),
        RankFacts("b", (2, 3), 1, {"GPUs": "none", "CPU": "AMD EPYC (7B13)"}),
    ]
    hosts = hosts_of_ranks(facts, {"a": 1.234e8, "b": 9.9e6})
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_text(hosts, source="ranks"))
    found = {host.name: host for host in read_cluster(path).hosts}
    assert found["a"].slots == {"Tesla T4": 2, "NVIDIA A100-SXM4-40GB": 1}
    assert found["b"].slots == {"CPU AMD EPYC 7B13": 2}
    assert (found["a"].link_bytes_per_s, found["b"].link_bytes_per_s) == (1.2e8, 9.9e6)
    assert found["b"].cpus == 4


@pytest.mark.parametrize("count", range(2, 9))
def test_each_host_meets_each_other_once_and_one_at_a_time(count: int) -> None:
    rounds = _rounds(count)
    met = [tuple(sorted(pair)) for pairs in rounds for pair in pairs]
    assert sorted(met) == list(combinations(range(count), 2))
    for pairs in rounds:
        busy = [at for pair in pairs for at in pair]
        assert len(busy) == len(set(busy))
