"""How many bytes travel over thin links: fewer than values have, and as many as plans say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loft_hvd.fleet.jobs import DeviceModel, Fleet, Host, Job
from loft_hvd.fleet.traffic import HostRanks, Layout, exchange
from tests.testbed.hosts import Testbed

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]


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
    for name, share in (
        ("trimmed_mean float32", 0.86),
        ("trimmed_mean bfloat16", 0.72 / 2),
        ("trimmed_mean float16", 0.9 / 2),
    ):
        headers = 1514 / 1448 * 1.03  # frames, and what acknowledges them
        assert rows[name]["host_bytes"] < share * headers * plain_bytes


@pytest.mark.long
@pytest.mark.parametrize(("compact", "bytes_per_s"), [("on", 25e6), ("off", 25e9)])
def test_a_plan_says_how_many_bytes_leave_a_host(
    compact: str, bytes_per_s: float, testbed: Testbed, tmp_path: Path
) -> None:
    # A far link has no segmentation offload, with which interfaces count one header for 64 KiB.
    testbed.up(2, "--rate", "200mbit", "--delay", "0.1ms")
    found = tmp_path / "bytes.json"
    asked = ["--mb", "16", "--rounds", "1", "--wires", "none,bf16", "--kinds", "flat,two-level"]
    testbed.run(
        ["benchmarks/wire_bytes.py", *asked, "--json", str(found)],
        timeout_s=120,
        env={"LOFT_HVD_COMPACT": compact},
        options=["--slots", "2"],
    ).succeeded()
    parts = [HostRanks(Host(f"host{at}", {"CPU": 2}, bytes_per_s), "CPU", 2) for at in range(2)]
    fleet = Fleet([part.host for part in parts])
    models = {"CPU": DeviceModel(1e-3)}
    for row in json.loads(found.read_text())["results"]:
        traits = {"rule": "median", "compression": row["wire"]}
        job = Job("job", ["python"], 16e6, 64, models, steps=1, **traits)
        over = "nodes" if row["kind"] == "two-level" else "ranks"
        planned = exchange(fleet, job, Layout.of(parts, over=over))
        assert row["host_bytes"] == pytest.approx(planned.host_bytes[0], rel=0.03), row
