"""The smallest contest of ``benchmarks/testbed``: data come over the links, a store keeps them."""

from __future__ import annotations

import pytest

from benchmarks.testbed.cases import later_s
from benchmarks.testbed.clusters import FAST, Cluster, Job, run_job
from benchmarks.testbed.contest import GLOBAL_BATCH, Contest, Contestant
from benchmarks.testbed.shares import RECORD_BYTES
from tests.testbed.hosts import Testbed

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(300)]

SLOW = 40e6  # bits a second


def test_a_store_brings_samples_near_and_changes_no_result(testbed: Testbed) -> None:
    cluster = Cluster((0.5, 0.5), (SLOW, FAST), (0.1, 0.9))
    cluster.up(testbed)
    contestants = [
        Contestant("uniform", "uniform"),
        Contestant("loft + store", "loft", budget=1.0),
    ]
    contest = Contest(contestants, list(cluster.shares), epochs=3, interval=5, num_samples=480)
    plain, stored = run_job(testbed, Job(contest, timeout_s=240))["contestants"]
    last = plain["epochs"][-1]
    assert last["sizes"] == [GLOBAL_BATCH // 2, GLOBAL_BATCH // 2]
    # Over the link: no sooner than its rate lets them, at whatever speed the rest is.
    num_fetched = last["sizes"][0] - last["local"][0]
    assert num_fetched > 15
    assert last["fetch_s"][0] >= num_fetched * 8 * RECORD_BYTES / SLOW
    # From the second epoch on near: more than the placement alone has there, and faster.
    assert sum(stored["epochs"][-1]["local"]) > 0.85 * GLOBAL_BATCH > sum(last["local"])
    assert later_s(stored) < later_s(plain)
    # The same samples in the same steps, whoever computes them.
    assert stored["accuracy"] == pytest.approx(plain["accuracy"], abs=0.01)
    assert plain["accuracy"] > 0.3  # what came over the link were digits; guessing is 0.1
