"""Floats travel in fewer bytes over thin links, and arrive as they were."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loft_hvd.fleet.jobs import DeviceModel, Fleet, Host, Job
from loft_hvd.fleet.traffic import HostRanks, Layout, exchange
from tests.testbed.hosts import Testbed

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

MODELS = {"CPU": DeviceModel(1e-3)}


def test_an_allreduce_over_thin_links_sends_fewer_bytes_than_its_values_have(
    testbed: Testbed, tmp_path: Path
) -> None:
    testbed.up(3, "--rate", "200mbit")
    found = tmp_path / "links.json"
    asked = ["--rate", "2e8", "--mb", "4", "--rounds", "1", "--json", str(found)]
    done = testbed.run(["benchmarks/links.py", *asked], timeout_s=120)  # which compares results
    done.succeeded()
    rows = {row["contestant"]: row for row in json.loads(found.read_text())["results"]}
    plain_bytes = 2 * (2 / 3) * 4e6  # two thirds of the values, twice
    hosts = [Host(f"host{at}", {"CPU": 1}, 200e6 / 8) for at in range(3)]
    layout = Layout.of([HostRanks(host, "CPU", 1) for host in hosts])
    for name, share, compression in (
        ("trimmed_mean float32", 0.86, "none"),
        ("trimmed_mean bfloat16", 0.72 / 2, "bf16"),
        ("trimmed_mean float16", 0.9 / 2, "fp16"),
    ):
        headers = 1514 / 1448 * 1.03  # frames, and what acknowledges them
        assert rows[name]["host_bytes"] < share * headers * plain_bytes
        job = Job("job", ["python"], 4e6, 64, MODELS, steps=1, rule="trimmed_mean:f=1")
        planned = exchange(Fleet(hosts), replace(job, compression=compression), layout)
        assert rows[name]["host_bytes"] == pytest.approx(planned.host_bytes[0], rel=0.03)
